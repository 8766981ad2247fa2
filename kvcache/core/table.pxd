from libc.stdint cimport int32_t

from kvcache.core.verbs cimport Verbs

cdef class Table(Verbs):
    cdef int _refuse_native(self, str verb) except -1
    cdef int _drop_foreign(self, int32_t row) except -1
