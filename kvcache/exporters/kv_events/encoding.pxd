from libc.stdint cimport uint8_t, uint64_t

from kvcache.exporters.kv_events.block_set cimport Key
from kvcache.exporters.kv_events.queue cimport EventKind, Medium

cdef enum:
    MAX_CONTROL_BYTES = 128     # a digest's message

# Bytes that grow; the same memory is written again and again.
cdef struct Buffer:
    uint8_t* data
    size_t start            # of what counts
    size_t size
    size_t capacity

# How many blocks a medium holds, and the sum of their values.
cdef struct MediumDigest:
    uint64_t num_blocks
    uint64_t sum

cdef Py_ssize_t encode_event(
    Buffer* out, EventKind kind, Medium medium, uint64_t block_size, const Key* keys, Py_ssize_t n,
) noexcept nogil
cdef int start_batch(Buffer* out) noexcept nogil
cdef int finish_batch(Buffer* out, double ts, Py_ssize_t num_events, uint64_t rank) noexcept nogil
cdef size_t encode_digest(uint8_t* out, uint64_t seq, const MediumDigest* digests, uint64_t epoch) noexcept nogil
cdef void put_seq(uint8_t* out, uint64_t seq) noexcept nogil
