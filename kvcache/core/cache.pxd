from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache.core.priority cimport PriorityClasses
from kvcache.core.request_keys cimport RequestKeys

cdef class BlockCache(PriorityClasses):
    cdef int _read_positions(self, list keys, RequestKeys request_keys) except -1
    cdef object _reserve_leading(
        self, list keys, RequestKeys names, RequestKeys request_keys, const uint8_t* admitted)
    cdef Py_ssize_t _count(self, RequestKeys request_keys, Py_ssize_t n) noexcept nogil
    cdef int _evict(self, Py_ssize_t n, int32_t* out) noexcept nogil
    cdef int _admit_wanted(self, list keys, RequestKeys names, Py_ssize_t n, list stored, int64_t* ids) except -1
    cdef int32_t _state_of(self, int32_t row) noexcept nogil
    cdef bint _is_withheld(self, int32_t row) noexcept
    cdef int _sort_used(self, RequestKeys request_keys, Py_ssize_t start, Py_ssize_t stop, dict positions) except -1
    cdef void _rows_in_order(self, RequestKeys request_keys, Py_ssize_t n) noexcept nogil
    cdef int32_t _row_named(self, RequestKeys request_keys, Py_ssize_t place) noexcept nogil
