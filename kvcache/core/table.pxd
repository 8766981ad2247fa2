cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache.core.eviction_queue cimport (
    LISTED, PINNED, EvictionQueue, Row, heap_push, queue_append, queue_insert, queue_remove,
)
from kvcache.core.index cimport Bucket, home_of, prefetch

cdef enum:
    MAX_LISTS = 8

cdef struct CallerBlock:
    PyObject* status        # strong: the BlockStatus that a caller inserted; NULL if the row is free
    int32_t* ref_cnt        # inside it

cdef extern from "Python.h":
    char* PyByteArray_AS_STRING(object flags) noexcept
    bint PyBytes_CheckExact(PyObject* key) noexcept nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject* key) noexcept nogil
    PyObject* PyList_GET_ITEM(object keys, Py_ssize_t i) noexcept
    void PyList_SET_ITEM(object keys, Py_ssize_t i, PyObject* key) noexcept


cdef struct Position:
    int64_t position        # where a key's block ends in the prompt
    int64_t at              # in the order of first use

cdef extern from *:
    """
    #define KV_NO_POSITION INT64_MIN
    """
    const int64_t NO_POSITION "KV_NO_POSITION"


# The keys of one call, resolved to rows. Every array has room for `size` keys. A cache has one batch for all its calls.
@cython.final
cdef class Batch:
    cdef Py_ssize_t size
    # One entry per key, in the order of the call.
    cdef int32_t* rows              # 0: absent
    cdef uint64_t* hashes
    cdef Py_ssize_t* places         # index in the request's keys; -1: not among them
    cdef int64_t* ends              # end in the prompt, or NO_POSITION; filled for a policy that tracks uses
    # One entry per key that the request uses for the first time.
    cdef int32_t* used_rows
    cdef uint64_t* used_hashes
    # One entry per key that the call acts on: to store, make ready or drop.
    cdef Py_ssize_t* picked         # index in the call
    cdef Py_ssize_t* picked_places
    cdef int32_t* picked_rows
    cdef int32_t* victims           # rows to evict
    cdef Position* in_prompt        # used keys of the request, in prompt order

    cdef int reserve(self, Py_ssize_t n) except -1


@cython.final
cdef class BlockTable:
    cdef Py_ssize_t cache_capacity
    cdef Py_ssize_t num_free
    cdef Py_ssize_t num_referenced
    cdef Py_ssize_t num_pending
    cdef Py_ssize_t num_evictable           # ready and not referenced; counted in a manager's pool only
    cdef Py_ssize_t num_resident
    cdef Py_ssize_t[MAX_LISTS] num_in_list
    cdef Row* rows                          # [num_rows]: a head per list, then the blocks
    cdef EvictionQueue* queues              # [first]: one per list
    cdef CallerBlock* caller_blocks         # [num_rows], or NULL in a manager's pool
    cdef Bucket* buckets                    # [num_buckets]: from hash to row
    cdef uint32_t num_buckets
    cdef int32_t first                      # row of block 0; also the number of lists
    cdef int32_t num_rows
    cdef int32_t num_fresh                  # rows that have ever held a block since the last reset
    cdef int32_t num_stale                  # rows from num_fresh up to here may hold a key from before the last reset
    cdef set withheld                       # ids of slots that are assigned to no key, or None
    cdef uint64_t num_calls                 # operations begun; detects Python code that runs during an operation
    cdef int32_t free_head
    cdef uint32_t mark                      # of the current call: rows with this mark are protected
    cdef bint keeps_queues                  # False: the policy keeps its own order, and rows are not linked here
    cdef uint64_t stamp                     # of the youngest row
    cdef uint64_t oldest_stamp
    cdef uint64_t version                   # incremented when a key is added or removed
    cdef uint64_t epoch                     # unique among all tables, and changed by each reset
    cdef int32_t* aside                     # [aside_size]: heap tops that this call must not evict
    cdef Py_ssize_t aside_size
    cdef Py_ssize_t num_aside

    cdef int reserve_heaps(self, Py_ssize_t n) except -1
    cdef int reserve_aside(self, Py_ssize_t n) except -1
    cdef uint32_t next_mark(self) noexcept nogil
    cdef int find(self, list keys, Py_ssize_t start, Py_ssize_t stop, Batch batch) except -1
    cdef int32_t find_one(self, PyObject* key, uint64_t hash) noexcept nogil
    cdef int32_t row_of(self, key) except -1
    cdef void admit(
        self, list keys, const uint64_t* hashes, const Py_ssize_t* picked, Py_ssize_t n, int32_t* out) noexcept
    cdef void release(self, const int32_t* victims, Py_ssize_t n, list keys) noexcept
    cdef Py_ssize_t take_oldest(self, int32_t list_idx, Py_ssize_t n, int32_t* out) noexcept nogil
    cdef void return_aside(self) noexcept nogil
    cdef bint is_withheld(self, int32_t row) noexcept
    cdef int withhold(self, set slots) except -1
    cdef int give_back(self, list slots) except -1
    cdef void drop_stale(self, int32_t stop) noexcept
    cdef list reset(self)
    cdef list keys_of_list(self, int32_t list_idx)
    cdef int check(self) except -1


cdef inline int32_t ref_of(BlockTable t, int32_t row) noexcept nogil:
    return t.rows[row].ref_cnt if t.caller_blocks == NULL else t.caller_blocks[row].ref_cnt[0]


cdef inline void detach(BlockTable t, int32_t row) noexcept nogil:
    if t.keeps_queues:
        queue_remove(t.rows, &t.queues[t.rows[row].list_idx], row)
    t.rows[row].where = PINNED


cdef inline void attach(BlockTable t, int32_t row) noexcept nogil:
    # Return a row to its place in its queue. Call BlockTable.reserve_heaps before.
    cdef int32_t queue = t.rows[row].list_idx
    if not t.keeps_queues:
        t.rows[row].where = LISTED
    else:
        queue_insert(t.rows, &t.queues[queue], queue, row)


cdef inline void count_rows(BlockTable t, int32_t list_idx, Py_ssize_t n) noexcept nogil:
    # Add `n` rows (or remove -n) to a list's count, for a policy that keeps its own order.
    t.num_in_list[list_idx] += n


cdef inline void make_youngest(BlockTable t, int32_t row) noexcept nogil:
    t.stamp += 1
    t.rows[row].stamp = t.stamp


cdef inline void enter(BlockTable t, int32_t row, int32_t list_idx) noexcept nogil:
    # Append a new row, PINNED, at the most-recent end.
    t.num_in_list[list_idx] += 1
    t.rows[row].list_idx = <uint8_t> list_idx
    make_youngest(t, row)


cdef inline void move_to_tail(BlockTable t, int32_t row, int32_t list_idx) noexcept nogil:
    # Move a row to the most-recent end of a list. A pinned row takes its place there when it is unpinned.
    if t.rows[row].where != PINNED:
        queue_remove(t.rows, &t.queues[t.rows[row].list_idx], row)
    t.num_in_list[t.rows[row].list_idx] -= 1
    enter(t, row, list_idx)
    if t.rows[row].where != PINNED:
        queue_append(t.rows, &t.queues[list_idx], list_idx, row)


cdef inline void place(BlockTable t, int32_t row, int32_t list_idx, uint64_t stamp) noexcept nogil:
    # Move a row to the place of a stamp in a list. Call BlockTable.reserve_heaps before.
    cdef bint is_pinned = t.rows[row].where == PINNED
    if not is_pinned:
        detach(t, row)
    t.num_in_list[t.rows[row].list_idx] -= 1
    t.num_in_list[list_idx] += 1
    t.rows[row].list_idx = <uint8_t> list_idx
    t.rows[row].stamp = stamp
    if not is_pinned:
        attach(t, row)


cdef inline void move_to_front(BlockTable t, int32_t row, int32_t list_idx) noexcept nogil:
    # Move a row to the least-recent end of a list, where no heap is needed.
    t.oldest_stamp -= 1
    place(t, row, list_idx, t.oldest_stamp)


cdef inline void prefetch_release(BlockTable t, int32_t row) noexcept nogil:
    # Prefetch what `release` will read of a victim, while the caller searches for the next one.
    prefetch(&t.buckets[home_of(<uint32_t> t.rows[row].hash, t.num_buckets)])
    prefetch(t.rows[row].key)


cdef inline bint may_leave(BlockTable t, int32_t row) noexcept nogil:
    return t.rows[row].mark != t.mark and (t.caller_blocks == NULL or t.caller_blocks[row].ref_cnt[0] == 0)


cdef inline int32_t pick_victim(BlockTable t, int32_t queue_idx) noexcept nogil:
    # Return the oldest evictable row of a list, or 0. A call skips each protected row only once.
    cdef EvictionQueue* queue = &t.queues[queue_idx]
    cdef int32_t row, top
    row = queue.cursor if queue.cursor_mark == t.mark else t.rows[queue_idx].next
    while row != queue_idx and not may_leave(t, row):
        row = t.rows[row].next
    queue.cursor = row
    queue.cursor_mark = t.mark
    while queue.num_nodes and not may_leave(t, queue.nodes[0].row):
        top = queue.nodes[0].row
        detach(t, top)
        t.aside[t.num_aside] = top
        t.num_aside += 1
    if queue.num_nodes and (row == queue_idx or queue.nodes[0].stamp < t.rows[row].stamp):
        return queue.nodes[0].row
    return 0 if row == queue_idx else row


cdef inline int32_t take_victim(BlockTable t, int32_t list_idx) noexcept nogil:
    # Remove the oldest evictable row of a list from its queue. Return it, or 0 if there is none.
    cdef int32_t row = pick_victim(t, list_idx)
    if row != 0:
        if t.queues[list_idx].cursor == row:
            t.queues[list_idx].cursor = t.rows[row].next
        detach(t, row)
        t.num_in_list[list_idx] -= 1
    return row


cdef inline list as_list(keys):
    if type(keys) is list:
        return <list> keys
    if isinstance(keys, (bytes, str)):
        raise ValueError(f"keys must be an iterable of keys, got one {type(keys).__name__}: {keys!r}")
    return list(keys)
