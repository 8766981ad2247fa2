cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvcache.core.event_log cimport Event, EventSink, TakenEvents
from kvcache.exporters.kv_events.block_set cimport Key

cdef enum EventKind:
    STORED
    REMOVED
    CLEARED

cdef enum Medium:
    CPU
    STORAGE
    NUM_MEDIA

# An event in the queue; its keys follow it, each a size of 4 bytes and its own, or only their hashes (`hash_of_bytes`),
# 8 bytes each.
cdef struct EventHeader:
    uint64_t block_size
    uint32_t num_keys
    uint8_t kind
    uint8_t medium
    uint8_t by_hash

# Memory that events lie in one after the other. The scheduler writes at `num_written`, and makes known how far whole
# events go (`num_ready`); the publishing thread reads behind it.
cdef struct Chunk:
    Chunk* next
    size_t capacity
    size_t num_written
    size_t num_ready
    size_t num_read
    uint8_t* data


@cython.final
cdef class EventQueue(EventSink):
    # the scheduler's side
    cdef Chunk* tail
    cdef Chunk* spare               # read, and ready to be written again
    cdef uint64_t default_block_size
    cdef int64_t max_events
    cdef int64_t num_queued
    cdef public uint64_t last_number
    cdef bint has_short             # a key without a group: another hash than the one that was put in its place
    cdef char[64] apart             # a cache line, so that neither thread waits for what the other writes
    # the publishing thread's
    cdef Chunk* head
    cdef EventHeader event          # the one that is being read
    cdef uint32_t num_keys_left
    cdef int64_t num_taken
    # both
    cdef Chunk* returned            # a stack of chunks that were read
    cdef int64_t num_returned
    cdef int64_t num_sent
    cdef int64_t merging
    cdef int64_t refused

    cdef int _put_cleared(self) except -1
    cdef int _put(self, list keys, medium, bint removed, uint64_t block_size) except -1
    cdef int _copy(
        self, list keys, Py_ssize_t n, medium, bint removed, uint64_t block_size, bint drops) except -1
    cdef int _put_hashes(self, const uint64_t* hashes, Py_ssize_t n, medium, uint64_t block_size) except -1
    cdef uint8_t* _put_header(
        self, Py_ssize_t num_keys, medium, bint removed, uint64_t block_size, bint by_hash) noexcept
    cdef size_t _num_bytes(self, list keys) except 0
    cdef int _check_key(self, PyObject* key) except -1
    cdef int _make_room(self, size_t size) except -1
    cdef void _commit(self, int64_t num_events) noexcept
    cdef void _roll_back(self) noexcept
    cdef bint next_event(self) noexcept nogil
    cdef Py_ssize_t next_keys(self, Key* keys, Py_ssize_t n, size_t max_bytes) noexcept nogil
    cdef const uint8_t* hashes_left(self) noexcept nogil
    cdef void skip_hashes(self, Py_ssize_t n) noexcept nogil
    cdef void mark_sent(self) noexcept nogil
    cdef void _give_back(self, Chunk* chunk) noexcept nogil
