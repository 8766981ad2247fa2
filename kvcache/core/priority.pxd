from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.table cimport BlockTable
from kvcache.core.request_keys cimport RequestKeys

cdef class PriorityClasses(BlockTable):
    cdef void _set_priority(self, int32_t row, int32_t priority) noexcept nogil
    cdef void _retain_row(self, int32_t row, int32_t priority, uint64_t deadline) noexcept nogil
    cdef int _reserve_retention(self, Py_ssize_t n) except -1
    cdef void _retain(self, const int32_t* rows, Py_ssize_t n, RequestKeys request_keys) noexcept nogil
    cdef void _restate(self, const int32_t* rows, Py_ssize_t n, int32_t priority, int64_t ttl_ns) noexcept nogil
    cdef void _crowd_out(self) noexcept nogil
    cdef int _after(self) except -1
