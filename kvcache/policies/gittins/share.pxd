from libc.stdint cimport int32_t

from kvcache.core.table cimport BlockTable


cdef class Share:
    cdef BlockTable table
    cdef int32_t first                  # the oldest row; 0: none
    cdef int32_t last

    cdef void append(self, int32_t row) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef void remove(self, int32_t row) noexcept nogil
    cdef Py_ssize_t evict(self, Py_ssize_t n, int32_t list_idx, int32_t* victims) noexcept nogil
