cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache.core.eviction_queue cimport Row
from kvcache.core.index cimport Bucket, Probe
from kvcache.core.table cimport Batch, BlockTable

cdef extern from *:
    """
    /* Return the value of a one-digit int, as most positions are, without a call; -1 for any other object. */
    static inline int64_t kv_small_int(PyObject *value)
    {
        if (!PyLong_CheckExact(value))
            return -1;
    #if PY_VERSION_HEX < 0x030C0000
        return Py_SIZE(value) == 1 ? (int64_t)((PyLongObject *)value)->ob_digit[0] : -1;
    #else
        return PyUnstable_Long_IsCompact((PyLongObject *)value)
            ? (int64_t)PyUnstable_Long_CompactValue((PyLongObject *)value) : -1;
    #endif
    }
    """
    int64_t small_int "kv_small_int"(PyObject* value) noexcept
    int64_t PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow) except? -1

cdef struct Named:
    PyObject* key           # strong
    uint64_t hash
    int32_t row             # where the key was last found; 0: nowhere
    uint32_t generation     # of that row, then
    uint32_t mark           # of the last prepare_store that named it
    uint8_t is_used         # False: only looked up
    uint8_t is_own          # the request stored the block in that row

# State of a used key, kept only for a policy that sets `ReplacementPolicy.tracks_uses`.
cdef struct KeyUse:
    int64_t position        # in the prompt; if unknown, the position of the key used before it
    int32_t before          # place in named + 1 of the used key before it in the prompt; 0: this key is the head
    int32_t after
    int32_t note            # the policy's own
    bint is_positioned
    bint is_taken           # scratch of a policy

# Used keys in prompt order: the positions of the first and the last, and the last one's place in `named`.
cdef struct Span:
    int64_t first
    int64_t last
    int32_t tail

cdef enum:
    STATE_SIZE = 17         # words that a policy keeps per request, as a struct of its own


@cython.final
cdef class RequestKeys:
    cdef Named* named               # [size]
    cdef Bucket* buckets            # [num_buckets]: from hash to place in named + 1; NULL while there are few keys
    cdef uint32_t num_buckets
    cdef Py_ssize_t num_named
    cdef Py_ssize_t size
    cdef readonly uint32_t num_seen
    cdef int32_t* used              # [size], behind `named`: place in named of each used key, in the order of first use
    cdef uint32_t num_ordered       # used keys at the last reorder
    cdef uint32_t num_in_full       # used keys at the last reorder of the whole request
    cdef int32_t tail               # place of the last of its ordered keys
    cdef uint64_t next_stamp        # of the next key behind the tail; the request owns num_in_full stamps from it down
    cdef int64_t first_position     # of its ordered keys
    cdef int64_t last_position
    cdef int64_t newest_position    # of the key used last; a key without a position stays behind the key before it
    cdef uint64_t version           # the table's version when all rows were last valid
    cdef uint64_t epoch             # the table's epoch when the first key was named
    cdef int32_t next_use    # the request's hint: 0 (none), 1 (end), 2 (soon), 3 (later)
    cdef bint has_ended
    cdef dict positions      # of keys in the prompt, or None; owned by the context, which may add to it
    cdef KeyUse* uses               # [size], or NULL if the policy does not track uses
    cdef int32_t head               # place + 1 of the first used key in the prompt
    cdef int32_t finger             # place + 1 of the key used last
    cdef Py_ssize_t num_positions   # positions read so far, for used and unused keys of the request
    cdef Py_ssize_t positions_at    # where reading resumes
    cdef int64_t largest_position
    cdef public int64_t found_position      # of the last key without a gap in memory and tiers; 0: unknown
    cdef Py_ssize_t prompt_at       # in `positions`, behind the key that was last looked up
    cdef uint32_t num_in_order      # leading used keys whose positions were read and do not descend
    cdef bint is_out_of_order       # whether the used key after these breaks the order
    cdef Py_ssize_t order_at        # in `positions`, behind the last of these keys
    cdef Py_ssize_t num_passed      # positions before order_at
    cdef int64_t first_in_order     # positions of the first and the last of these keys
    cdef int64_t last_in_order
    cdef uint64_t[STATE_SIZE] policy_state

    cdef void forget(self) noexcept
    cdef int reserve(self, Py_ssize_t n) except -1
    cdef int track_uses(self) except -1
    cdef int resolve(self, BlockTable table, list keys, Batch batch, bint add) except -1
    cdef Py_ssize_t walk(self, BlockTable table, list keys, Batch batch) noexcept
    cdef Py_ssize_t locate(self, PyObject* key, uint64_t hash) noexcept nogil
    cdef Py_ssize_t seek(self, PyObject* key, uint64_t hash, Probe* probe) noexcept nogil
    cdef void meet(
        self, BlockTable table, list keys, Py_ssize_t start, Py_ssize_t stop, Batch batch, bint add) noexcept
    cdef int32_t row_now(self, BlockTable table, Py_ssize_t place) noexcept nogil
    cdef int read_new_positions(self, BlockTable table) except -1
    cdef int read_positions(self, BlockTable table, list keys, Batch batch) except -1
    cdef Py_ssize_t add_uses(self, Batch batch, Py_ssize_t n) noexcept nogil
    cdef void link_use(self, Py_ssize_t place, int64_t position, bint is_positioned) noexcept nogil
    cdef bint is_in_order(self, dict positions) except -1
    cdef bint is_whole_prompt(self, dict positions) except -1
    cdef int rows_in_prompt(
        self, BlockTable table, Py_ssize_t start, dict positions, Batch batch, Span* span) except -1
    cdef int sort_used(self, BlockTable table, Py_ssize_t start, dict positions, Batch batch) except -1


cdef inline int64_t number_of(PyObject* value) except? -1:
    # Clip positions beyond 64 bits: policies need not distinguish them.
    cdef int overflow = 0
    cdef int64_t number = small_int(value)
    if number >= 0:
        return number
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow:
        return (<int64_t> 1 << 62) if overflow > 0 else -(<int64_t> 1 << 62)
    return number
