from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.rows cimport Rows
from kvcache.core.trail cimport Trail

cdef class Verbs(Rows):
    cdef Py_ssize_t _count(self, Trail trail, Py_ssize_t n) noexcept nogil
    cdef int _evict(self, Py_ssize_t n, int32_t* out) noexcept nogil
    cdef void _set_priority(self, int32_t row, int32_t priority) noexcept nogil
    cdef void _retain_row(self, int32_t row, int32_t priority, uint64_t deadline) noexcept nogil
    cdef int _reserve_retention(self, Py_ssize_t n) except -1
    cdef void _retain(self, const int32_t* rows, Py_ssize_t n, Trail trail) noexcept nogil
    cdef int _after(self) except -1
    cdef int _admit_wanted(self, list keys, Trail names, Py_ssize_t n, list stored, int64_t* ids) except -1
    cdef list _by_position(self, Trail trail, Py_ssize_t n, dict positions)
