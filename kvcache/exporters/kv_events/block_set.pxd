cimport cython
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kvcache.core.index cimport Bucket

cdef enum:
    GROUP_BYTES = 4
    INLINE_BYTES = 44       # with the rest of a block one cache line: block hashes of up to 40 bytes

# A key is a block hash and its group index, 4 bytes, big-endian; it lies anywhere, and is copied where it has to stay.
cdef struct Key:
    const uint8_t* data
    uint32_t size

cdef struct Block:
    uint8_t key[INLINE_BYTES]       # the key, or the address of one that is longer
    uint32_t size           # of the key; 0: free
    uint64_t hash           # keyed: where the index has it; of a free block: the next free one
    uint64_t value          # its share of the digest

cdef bytes hash_bytes(const Key* key)
cdef uint32_t group_of(const Key* key) noexcept nogil


@cython.final
cdef class BlockSet:
    cdef readonly uint64_t sum
    cdef Py_ssize_t num_blocks
    cdef Block* blocks              # [1 + capacity]; 0: none
    cdef Bucket* buckets            # [num_buckets]: from hash to block
    cdef uint32_t num_buckets
    cdef int32_t capacity
    cdef int32_t num_fresh          # blocks that were ever used
    cdef int32_t free_head

    cdef int change(self, const Key* keys, Py_ssize_t n, bint removed) noexcept nogil
    cdef Py_ssize_t find_hashes(
        self, const uint8_t* hashes, Py_ssize_t n, size_t max_bytes, int32_t* found, Key* keys, Py_ssize_t* num_found,
    ) noexcept nogil
    cdef void drop_found(self, const int32_t* found, Py_ssize_t n) noexcept nogil
    cdef void empty(self) noexcept nogil
    cdef Key* copy_keys(self) noexcept nogil
    cdef int32_t _find(self, const Key* key, uint64_t hash) noexcept nogil
    cdef int _add(self, const Key* key, uint64_t hash) noexcept nogil
    cdef void _drop(self, int32_t at) noexcept nogil
    cdef int _grow(self) noexcept nogil
    cdef _change_hashes(self, list hashes, group_idx, bint removed)
