cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.eviction_queue cimport HeapNode
from kvcache.core.table cimport BlockTable


@cython.final
cdef class PriorityClasses:
    cdef BlockTable table
    cdef HeapNode* nodes                # [num_rows]; rank: deadline in ns; stamp: when it was set. NULL: no hint so far
    cdef int32_t* at                    # [num_rows]: index of a raised row's node
    cdef int32_t num_raised
    cdef uint64_t stamp
    cdef Py_ssize_t max_raised
    cdef int64_t now_ns

    cdef int start(self) except -1
    cdef int reserve(self, Py_ssize_t n) except -1
    cdef int advance(self, int64_t now_ns) except -1
    cdef void apply(self, const int32_t* rows, Py_ssize_t n, int32_t priority, int64_t ttl_ns) noexcept nogil
    cdef void restate(self, const int32_t* rows, Py_ssize_t n, int32_t priority, int64_t ttl_ns) noexcept nogil
    cdef void forget(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef int check(self) except -1
    cdef void _set(self, int32_t row, int32_t priority) noexcept nogil
    cdef void _raise(self, int32_t row, int32_t priority, uint64_t deadline) noexcept nogil
    cdef void _drop_deadline(self, int32_t row) noexcept nogil
    cdef void _crowd_out(self) noexcept nogil
    cdef void _drop_nearest(self) noexcept nogil
