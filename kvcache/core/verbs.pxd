from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.retention cimport Retention
from kvcache.core.trail cimport Trail

cdef class Verbs(Retention):
    cdef Py_ssize_t _count(self, Trail trail, Py_ssize_t n) noexcept nogil
    cdef int _evict(self, Py_ssize_t n, int32_t* out) noexcept nogil
    cdef int _admit_wanted(self, list keys, Trail names, Py_ssize_t n, list stored, int64_t* ids) except -1
    cdef list _by_position(self, Trail trail, Py_ssize_t n, dict positions)
