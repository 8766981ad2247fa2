from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.priority cimport PriorityClasses
from kvcache.core.request_keys cimport RequestKeys

cdef class BlockCache(PriorityClasses):
    cdef Py_ssize_t _count(self, RequestKeys request_keys, Py_ssize_t n) noexcept nogil
    cdef int _evict(self, Py_ssize_t n, int32_t* out) noexcept nogil
    cdef int _admit_wanted(self, list keys, RequestKeys names, Py_ssize_t n, list stored, int64_t* ids) except -1
    cdef list _by_position(self, RequestKeys request_keys, Py_ssize_t n, dict positions)
