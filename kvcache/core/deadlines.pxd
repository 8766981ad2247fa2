cimport cython
from libc.stdint cimport int32_t, uint64_t

from kvcache.core.heap cimport HeapNode


@cython.final
cdef class Deadlines:
    cdef HeapNode* nodes        # [num_rows]; rank: deadline in ns; stamp: when it was set
    cdef int32_t* at            # [num_rows]: index of a row's node, if it has one: see `holds`
    cdef int32_t num_nodes
    cdef uint64_t stamp

    cdef bint holds(self, int32_t row) noexcept nogil
    cdef uint64_t of(self, int32_t row) noexcept nogil
    cdef void set(self, int32_t row, uint64_t deadline) noexcept nogil
    cdef void remove(self, int32_t row) noexcept nogil
    cdef int32_t nearest(self) noexcept nogil
    cdef void clear(self) noexcept nogil
