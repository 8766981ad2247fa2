from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.ghosts cimport GhostList
from kvcache.core.policy_adapter cimport PolicyAdapter

cdef enum:
    NUM_LEVELS = 8
    NUM_BINS = 64           # two per octave of a 32-bit distance

cdef struct Member:
    int64_t moved_at        # when the block was last used or demoted
    int64_t used_at
    uint32_t uses
    int32_t prev            # neighbours in its queue, referenced blocks included
    int32_t next

cdef class MultiQueue(PolicyAdapter):
    cdef Member* members            # [num_rows]; queue L's head is member L
    cdef readonly GhostList history
    cdef readonly int64_t clock     # requests that counted a use
    cdef readonly int64_t life      # an unused block moves down one queue after this many requests
    cdef uint32_t* distances        # [NUM_BINS], or NULL if life is fixed
    cdef uint32_t num_distances

    cdef void _count_use(self, int32_t row) noexcept nogil
    cdef void _demote(self) noexcept nogil
