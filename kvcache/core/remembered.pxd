cimport cython
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "remembered.h" nogil:
    ctypedef struct Places "kv_places":
        uint16_t tag[10]
        uint32_t num_passed
        int32_t place[10]

cdef enum:
    SEGMENT_KEYS = 16
    SEGMENT_GROUPS = 4

cdef struct HashInGroup:
    uint64_t hash
    int32_t group

# Consecutive remembered keys, oldest first. A key's place is 16 times its segment, plus its index in the segment.
cdef struct Segment:
    uint32_t[SEGMENT_KEYS] low          # half of the hash
    int32_t[SEGMENT_GROUPS] groups      # distinct groups of its keys
    uint32_t which                      # index into `groups`, two bits per key
    int32_t prev
    int32_t next                        # free: the next free one
    uint16_t held                       # a bit for each position that holds a key
    uint8_t num_held
    uint8_t num_groups


@cython.final
cdef class RememberedKeys:
    cdef Segment* segments      # [num_segments]; 0: head of the queue, next is the oldest, prev the youngest
    cdef int32_t num_segments
    cdef int32_t num_fresh
    cdef int32_t free_head
    cdef readonly Py_ssize_t num_in_use     # segments that hold keys
    cdef Places* buckets        # [num_buckets]
    cdef uint32_t num_buckets
    cdef readonly Py_ssize_t num_keys
    cdef Py_ssize_t most_keys   # that the index has room for

    cdef int reserve(self, Py_ssize_t n) except -1
    cdef int _grow_index(self, Py_ssize_t num_keys) except -1
    cdef int _grow_segments(self, Py_ssize_t num_segments) except -1
    cdef void clear(self) noexcept nogil
    cdef int32_t find(self, uint64_t hash) noexcept nogil
    cdef void find_absent(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t* places) noexcept nogil
    cdef bint holds(self, int32_t place, uint64_t hash) noexcept nogil
    cdef int32_t group_of(self, int32_t place) noexcept nogil
    cdef int32_t append(self, uint64_t hash, int32_t group) noexcept nogil
    cdef void append_all(self, const HashInGroup* keys, Py_ssize_t n) noexcept nogil
    cdef int32_t renew(self, int32_t place, int32_t group) noexcept nogil
    cdef void remove(self, int32_t place) noexcept nogil
    cdef int32_t pop_oldest(self, Py_ssize_t most, Py_ssize_t* num_popped) noexcept nogil
    cdef void fetch(self, uint64_t hash) noexcept nogil
    cdef void fetch_oldest(self) noexcept nogil
    cdef int32_t _put_youngest(self, uint32_t low, int32_t group) noexcept nogil
    cdef int _unused_group(self, const Segment* segment) noexcept nogil
    cdef int32_t _new_youngest(self) noexcept nogil
    cdef void _vacate(self, int32_t place) noexcept nogil
    cdef void _drop_segment(self, int32_t segment) noexcept nogil
    cdef bint _merge(self, int32_t older, int32_t younger) noexcept nogil
    cdef uint32_t _low_at(self, int32_t place) noexcept nogil
