"""amq: multi-queue replacement that learns after how many requests a block is stale.

Compiled because its base class is. The rule is the project's own: mq without its parameter.
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

    Multi-Queue with a block lifetime equal to the measured median distance between a key's first two uses.

    Notes
    -----
    Like mq, but a block expires when it has been neither used nor demoted for `life` requests. A histogram with two
    bins per octave collects the distances, in requests, from a key's first use to its second. Every 64 requests, if it
    holds at least 256 distances, `life` is set to the middle of the upper edge of its median bin and the next edge. All
    arithmetic is in integers.
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
