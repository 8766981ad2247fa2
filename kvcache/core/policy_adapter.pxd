from libc.stdint cimport int32_t

from kvcache.core.cache cimport BlockCache

cdef class PolicyAdapter(BlockCache):
    cdef int _refuse_native(self, str verb) except -1
    cdef int _drop_foreign(self, int32_t row) except -1
