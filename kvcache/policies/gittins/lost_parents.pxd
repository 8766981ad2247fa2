cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

# A parent that was removed by a failed store while it had children of others. The children refer to it by its old row.
cdef struct LostParent:
    uint64_t hash
    int32_t row
    uint32_t generation
    uint32_t num_children   # 0: free
    int32_t next            # next in its bucket, 0: none; if free: the next free one


@cython.final
cdef class LostParents:
    cdef LostParent* parents            # [size]; 0: none
    cdef int32_t size
    cdef int32_t num_fresh
    cdef int32_t free_head
    cdef Py_ssize_t num_lost
    cdef int32_t* buckets               # [num_buckets]: lost parents by row and generation
    cdef uint32_t num_buckets
    cdef uint64_t num_searched          # lost parents visited since the start

    cdef int grow(self, int64_t size) except -1
    cdef void clear(self) noexcept nogil
    cdef void add(self, int32_t row, uint32_t generation, uint64_t hash, uint32_t num_children) noexcept nogil
    cdef bint take_child(self, int32_t row, uint32_t generation, uint64_t* hash) noexcept nogil
    cdef int check(self) except -1


cdef inline int reserve_lost(LostParents lost, Py_ssize_t n) except -1:
    # Make room for `n` more.
    if lost.num_lost + n >= lost.size:
        lost.grow(2 * (lost.num_lost + n) + 16)
    return 0
