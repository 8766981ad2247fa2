cimport cython
from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.index cimport Bucket, home_of, prefetch

cdef struct Ghost:
    uint64_t hash
    int32_t prev            # -1: dropped
    int32_t next            # if dropped: the next dropped one
    uint32_t state          # the policy's own: its uses, or its group
    uint32_t used_at


@cython.final
cdef class GhostList:
    cdef Ghost* ghosts      # [capacity + 2]; 0 is the list head: next is the oldest, prev the most recent
    cdef Bucket* buckets    # [num_buckets]: from hash to ghost
    cdef uint32_t num_buckets
    cdef int32_t num_fresh
    cdef int32_t free_head
    cdef bint tight
    cdef Py_ssize_t capacity
    cdef Py_ssize_t num_ghosts

    cdef int reserve(self, Py_ssize_t n) except -1
    cdef int32_t find(self, uint64_t hash) noexcept nogil
    cdef bint holds(self, int32_t ghost, uint64_t hash) noexcept nogil
    cdef int32_t push(self, uint64_t hash) noexcept nogil
    cdef int32_t append(self, uint64_t hash) noexcept nogil
    cdef void refresh(self, int32_t ghost) noexcept nogil
    cdef void drop(self, int32_t ghost) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef int _grow(self, Py_ssize_t capacity) except -1
    cdef void _link_last(self, int32_t ghost) noexcept nogil
    cdef void _unlink(self, int32_t ghost) noexcept nogil


cdef inline void prefetch_ghost(GhostList ghosts, uint64_t hash) noexcept nogil:
    # Prefetch before looking up many ghosts: each look-up is a cache miss.
    prefetch(&ghosts.buckets[home_of(<uint32_t> hash, ghosts.num_buckets)])
