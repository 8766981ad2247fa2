cimport cython
from cpython.pythread cimport PyThread_type_lock
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kvcache.exporters.kv_events.block_set cimport BlockSet, Key
from kvcache.exporters.kv_events.encoding cimport Buffer, MediumDigest
from kvcache.exporters.kv_events.queue cimport NUM_MEDIA, EventQueue

# An encoded batch.
cdef struct Payload:
    uint8_t* data           # malloc'ed
    size_t size

# What was held before batch `seq`: a copy.
cdef struct HeldKeys:
    uint64_t seq
    (Key*)[NUM_MEDIA] keys  # free each
    Py_ssize_t[NUM_MEDIA] num_keys
    MediumDigest[NUM_MEDIA] digests


@cython.final
cdef class BatchLog:
    cdef EventQueue queue
    cdef BlockSet cpu
    cdef BlockSet storage
    cdef PyThread_type_lock lock    # of the sets and of num_made, for who reads them in another thread
    cdef Payload* kept              # [max_kept]: a ring of the latest
    cdef Py_ssize_t max_kept
    cdef size_t num_kept_bytes
    cdef int64_t first_kept         # batches before it were dropped
    cdef int64_t num_made           # batches: the number of the next one
    cdef uint64_t rank
    cdef double last_ts
    cdef Buffer events
    cdef Buffer part
    cdef Key* keys                  # [MAX_BATCH_KEYS]
    cdef int32_t* found             # [MAX_BATCH_KEYS]: blocks that leave

    cdef int make_batch(self) noexcept nogil
    cdef uint64_t oldest_kept(self) noexcept nogil
    cdef const Payload* payload_of(self, uint64_t seq) noexcept nogil
    cdef void digests(self, MediumDigest* digests) noexcept nogil
    cdef int copy_held(self, HeldKeys* held) noexcept nogil
    cdef int encode_part(self, int medium, uint64_t block_size, const Key* keys, Py_ssize_t n) noexcept nogil
    cdef int _fill(self) noexcept nogil
    cdef Py_ssize_t _remove_hashes(
        self, BlockSet held, Py_ssize_t max_keys, Py_ssize_t* num_events) noexcept nogil
    cdef void _drop(self, Payload* payload) noexcept nogil
    cdef int _finish(self, Buffer* batch, Py_ssize_t num_events) noexcept nogil
