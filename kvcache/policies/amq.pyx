"""amq: multi-queue replacement that finds out for itself after how many requests a block is stale.

Compiled because its base is; our own, mq without its parameter.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t

from kvcache.policies.mq cimport NUM_BINS, MultiQueue

from kvcache.policies.base import CachePolicy

cdef enum:
    TICKS_PER_SETTING = 64
    FEWEST_DISTANCES = 256
    MOST_DISTANCES = 65536


@cython.final
cdef class AMQCachePolicy(MultiQueue):
    """AMQCachePolicy(cache_capacity)

    Multi-Queue whose blocks live as long as the traffic's own median distance between a key's first two uses.

    Notes
    -----
    As mq, but a block expires when it has neither been used nor demoted for `life` requests. The distances from a key's
    first use to its second, in requests, fill a histogram of two bins per octave; every 64 requests, once it holds 256,
    `life` becomes the middle of its median bin's upper edge and the next. Integers only.
    """

    cdef uint32_t[NUM_BINS] bins

    def __cinit__(self, cache_capacity):
        self.distances = self.bins

    cdef void on_request(self) noexcept nogil:
        self.clock += 1
        if self.clock % TICKS_PER_SETTING == 0 and self.num_distances >= FEWEST_DISTANCES:
            self._set_life()
        self._demote()

    cdef void _set_life(self) noexcept nogil:
        cdef int i = 0
        cdef uint32_t num_below = self.bins[0]
        while num_below < (self.num_distances + 1) // 2:
            i += 1
            num_below += self.bins[i]
        self.life = (<int64_t> 2 << (i // 2)) if i % 2 else (<int64_t> 3 << (i // 2)) >> 1
        if self.num_distances >= MOST_DISTANCES:
            self.num_distances = 0
            for i in range(NUM_BINS):
                self.bins[i] >>= 1
                self.num_distances += self.bins[i]


CachePolicy.register(AMQCachePolicy)
