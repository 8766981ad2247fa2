from libc.stdint cimport int32_t

from kvcache.core.cache cimport BlockCache

cdef class PolicyAdapter(BlockCache):
    cdef int _refuse_native(self, str verb) except -1
    cdef int _check_rows(self) except -1
    cdef void _release_caller_blocks(self, const int32_t* rows, Py_ssize_t n, list keys, list blocks) noexcept
