from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache.core.deadlines cimport Deadlines
from kvcache.core.heap cimport HeapNode
from kvcache.core.index cimport Bucket
from kvcache.core.eviction_queue cimport (
    HEAPED, LISTED, PINNED, EvictionQueue, Row, heap_push, heap_remove, join_by_stamp, join_last, leave_lane,
)
from kvcache.core.request_keys cimport RequestKeys

cdef enum:
    NUM_PRIORITIES = 5      # one-shot, normal, raised 1 to 3: a lane each
    ONE_SHOT = 0
    NORMAL = 1
    MAX_LISTS = 8

cdef struct Position:
    int64_t position        # where a key's block ends in the prompt
    int64_t at              # in the order of first use

cdef extern from *:
    """
    #define KV_NO_POSITION INT64_MIN
    """
    const int64_t NO_POSITION "KV_NO_POSITION"

cdef struct CallerBlock:
    PyObject* status        # strong: the BlockStatus that a caller inserted; NULL if the row is free
    int32_t* ref_cnt        # inside it

cdef extern from "Python.h":
    char* PyByteArray_AS_STRING(object flags) noexcept
    bint PyBytes_CheckExact(PyObject* key) noexcept nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject* key) noexcept nogil
    PyObject* PyList_GET_ITEM(object keys, Py_ssize_t i) noexcept
    void PyList_SET_ITEM(object keys, Py_ssize_t i, PyObject* key) noexcept

cdef class BlockTable:
    cdef readonly Py_ssize_t cache_capacity
    cdef readonly Py_ssize_t num_free
    cdef readonly Py_ssize_t num_referenced
    cdef readonly Py_ssize_t num_pending
    cdef public Py_ssize_t gated_blocks
    cdef readonly Py_ssize_t declined_blocks    # of the gated ones, those that the policy did not take
    cdef Py_ssize_t num_evictable           # ready and not referenced; counted in native mode only
    cdef Py_ssize_t num_resident
    cdef Py_ssize_t[MAX_LISTS] num_in_list
    cdef Row* rows                          # [num_rows]: a head per lane, then the blocks
    cdef EvictionQueue* lanes                        # [first]
    cdef CallerBlock* caller_blocks                   # [num_rows], or NULL in native mode
    cdef uint64_t* ranks                    # [num_rows], or NULL: lanes are ordered by stamp alone
    cdef Bucket* buckets                    # [num_buckets]: from hash to row
    cdef uint32_t num_buckets
    cdef int32_t first                      # row of block 0; also the number of lanes
    cdef int32_t num_rows
    cdef int32_t num_fresh                  # rows that have ever held a block since the last reset
    cdef int32_t num_stale                  # rows from num_fresh up to here may hold a key from before the last reset
    cdef set withheld                       # ids of slots that are given to no key, or None
    cdef uint64_t num_calls                 # of batch operations
    cdef int32_t free_head
    cdef uint32_t mark
    cdef bint is_native
    cdef bint keeps_queues                  # False: the policy keeps an order of its own, and no row is linked here
    cdef bint tracks_uses                   # requests keep what the policy must know of their keys (`KeyUse`)
    cdef Deadlines deadlines                # of blocks at a raised priority; None until a request gives a hint
    cdef Py_ssize_t max_raised
    cdef int64_t now_ns
    cdef uint64_t stamp
    cdef uint64_t version                   # raised whenever a key comes or goes
    cdef uint64_t epoch                     # unlike every other table's, and another after each reset
    cdef int32_t* batch_rows                # [batch_size]: scratch of one call, by position in its keys
    cdef uint64_t* batch_hashes
    cdef Py_ssize_t* batch_named
    cdef Py_ssize_t* batch_wanted
    cdef Position* batch_positions
    cdef Py_ssize_t* batch_places           # in the request's keys, of the wanted keys
    cdef int64_t* batch_ends                # in the prompt, NO_POSITION where not known; filled if uses are tracked
    cdef int32_t* fresh_rows
    cdef uint64_t* fresh_hashes
    cdef Py_ssize_t batch_size
    cdef int32_t* aside                     # [aside_size]: heap tops that this call must not choose
    cdef Py_ssize_t aside_size
    cdef Py_ssize_t num_aside

    # What a policy is: its answers to a batch. `rows` are in the order of the keys, head of the prefix first.
    cdef void on_request(self) noexcept nogil
    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil
    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use) noexcept nogil
    cdef void on_append(self, const int32_t* rows, Py_ssize_t n, uint64_t stamp, int32_t tail) noexcept nogil
    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    cdef Py_ssize_t select_victims(self, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil
    cdef Py_ssize_t _take(self, int32_t list_idx, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil
    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    cdef void on_reset(self) noexcept nogil
    cdef int on_grow(self, int32_t num_rows_before) except -1
    # The same with the request at hand, for a policy that tracks uses; and what a policy decides of a store.
    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil
    cdef Py_ssize_t on_offer(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered,
        Py_ssize_t last_place, int32_t* victims, Py_ssize_t* num_victims) noexcept nogil
    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n) noexcept nogil
    cdef int reserve_policy(self, Py_ssize_t n) except -1
    cdef int _check_policy(self) except -1

    cdef int _allocate(self, int32_t num_lists, bint ranked) except -1
    cdef void _start_epoch(self) noexcept nogil
    cdef int _grow(self) except -1
    cdef int _reserve_batch(self, Py_ssize_t n) except -1
    cdef int _reserve_heaps(self, Py_ssize_t n) except -1
    cdef int _reserve_aside(self, Py_ssize_t n) except -1
    cdef uint32_t _next_mark(self) noexcept nogil
    cdef int _find(self, list keys, Py_ssize_t start, Py_ssize_t stop) except -1
    cdef int32_t _find_one(self, PyObject* key, uint64_t hash) noexcept nogil
    cdef Py_ssize_t _walk(self, list keys, Py_ssize_t n, RequestKeys request_keys) noexcept
    cdef void _drop_stale(self, int32_t stop) noexcept
    cdef int _begin(self, RequestKeys request_keys) except -1
    cdef int _resolve(self, list keys, RequestKeys request_keys, bint add) except -1
    cdef int32_t _row_of(self, key) except -1
    cdef int32_t _row_now(self, RequestKeys names, Py_ssize_t place) noexcept nogil
    cdef void _admit(self, list keys, const Py_ssize_t* wanted, Py_ssize_t n, int32_t* out) noexcept
    cdef void _release(self, const int32_t* victims, Py_ssize_t n, list keys) noexcept


cdef inline int32_t ref_of(BlockTable t, int32_t row) noexcept nogil:
    return t.rows[row].ref_cnt if t.caller_blocks == NULL else t.caller_blocks[row].ref_cnt[0]


cdef inline int32_t lane_of(BlockTable t, int32_t row) noexcept nogil:
    return t.rows[row].list_idx * NUM_PRIORITIES + t.rows[row].priority


cdef inline void detach(BlockTable t, int32_t row) noexcept nogil:
    if t.keeps_queues:
        leave_lane(t.rows, &t.lanes[lane_of(t, row)], row)
    t.rows[row].where = PINNED


cdef inline void attach(BlockTable t, int32_t row) noexcept nogil:
    # Back to where it stands; BlockTable._reserve_heaps has been called.
    cdef int32_t lane = lane_of(t, row)
    if not t.keeps_queues:
        t.rows[row].where = LISTED
    elif t.ranks != NULL:
        heap_push(t.rows, &t.lanes[lane], row, t.ranks[row])
    else:
        join_by_stamp(t.rows, &t.lanes[lane], lane, row)


cdef inline void enter(BlockTable t, int32_t row, int32_t list_idx) noexcept nogil:
    # A new row, PINNED, at the most-recent end.
    t.num_in_list[list_idx] += 1
    t.rows[row].list_idx = <uint8_t> list_idx
    t.stamp += 1
    t.rows[row].stamp = t.stamp


cdef inline void move_to_tail(BlockTable t, int32_t row, int32_t list_idx) noexcept nogil:
    # To the most-recent end of a list; a parked row takes its place there when it comes back.
    cdef int32_t lane
    if t.rows[row].where != PINNED:
        leave_lane(t.rows, &t.lanes[lane_of(t, row)], row)
    t.num_in_list[t.rows[row].list_idx] -= 1
    enter(t, row, list_idx)
    if t.rows[row].where != PINNED:
        lane = lane_of(t, row)
        join_last(t.rows, &t.lanes[lane], lane, row)


cdef inline void set_stamp(BlockTable t, int32_t row, uint64_t stamp) noexcept nogil:
    # To another place in its queue; BlockTable._reserve_heaps has been called.
    cdef bint is_pinned = t.rows[row].where == PINNED
    if not is_pinned:
        detach(t, row)
    t.rows[row].stamp = stamp
    if not is_pinned:
        attach(t, row)


cdef inline bint may_leave(BlockTable t, int32_t row) noexcept nogil:
    return t.rows[row].mark != t.mark and (t.caller_blocks == NULL or t.caller_blocks[row].ref_cnt[0] == 0)


cdef inline int32_t pick_victim(BlockTable t, int32_t lane_idx) noexcept nogil:
    # The oldest row of a lane that may leave, or 0. BlockTable passed over in the list are passed over once per call.
    cdef EvictionQueue* lane = &t.lanes[lane_idx]
    cdef int32_t row, top
    row = lane.cursor if lane.cursor_mark == t.mark else t.rows[lane_idx].next
    while row != lane_idx and not may_leave(t, row):
        row = t.rows[row].next
    lane.cursor = row
    lane.cursor_mark = t.mark
    while lane.num_nodes and not may_leave(t, lane.nodes[0].row):
        top = lane.nodes[0].row
        detach(t, top)
        t.aside[t.num_aside] = top
        t.num_aside += 1
    if lane.num_nodes and (row == lane_idx or lane.nodes[0].stamp < t.rows[row].stamp):
        return lane.nodes[0].row
    return 0 if row == lane_idx else row


cdef inline int32_t take_victim(BlockTable t, int32_t list_idx, int32_t priority) noexcept nogil:
    cdef int32_t lane = list_idx * NUM_PRIORITIES + priority
    cdef int32_t row = pick_victim(t, lane)
    if row != 0:
        if t.lanes[lane].cursor == row:
            t.lanes[lane].cursor = t.rows[row].next
        detach(t, row)
        t.num_in_list[list_idx] -= 1
    return row


cdef inline list as_list(keys):
    if type(keys) is list:
        return <list> keys
    if isinstance(keys, (bytes, str)):
        raise ValueError(f"keys must be an iterable of keys, got one {type(keys).__name__}: {keys!r}")
    return list(keys)
