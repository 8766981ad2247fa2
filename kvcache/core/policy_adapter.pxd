from libc.stdint cimport int32_t

from kvcache.core.policy cimport ReplacementPolicy
from kvcache.core.table cimport Batch

cdef class PolicyAdapter(ReplacementPolicy):
    cdef Batch batch
    cdef int _refuse_native(self, str operation) except -1
    cdef int _end(self) except -1
    cdef void _release(self, const int32_t* rows, Py_ssize_t n, list keys, list blocks) noexcept
