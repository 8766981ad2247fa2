# Rows, and the eviction queues of evictable rows: inline operations over int32 row indices.
#
# A queue is one recency order. Most rows are in an intrusive list, ascending by stamp. A row that returns out of order
# (its reference ended after younger rows had joined) goes to a small heap beside the list. The oldest row of a queue
# is the older of the list's first row and the heap's top, so no call walks over rows that cannot be evicted.

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kvcache.core.index cimport prefetch

cdef enum:
    FREE = 0        # holds no block
    PINNED = 1      # holds a block that cannot be evicted now: referenced, or being written
    LISTED = 2      # in its queue's list
    HEAPED = 3      # in its queue's heap
    WITHHELD = 4    # holds no block, and is assigned to no key

cdef enum:
    LINES_BELOW = 5     # cache lines of sixteen heap nodes that stand together

cdef struct Row:
    PyObject* key           # strong; NULL if FREE
    uint64_t hash
    uint64_t stamp          # when it last moved to a most-recent end; unique
    int32_t prev            # LISTED: neighbour; HEAPED: position in the heap
    int32_t next            # LISTED: neighbour; FREE: next free row
    int32_t ref_cnt         # -1: being written; WITHHELD: whether the row is still in the free list
    uint32_t generation     # incremented when the row is assigned or freed
    uint32_t mark           # equal to the table's mark: named in this call
    uint8_t list_idx
    uint8_t is_shared       # used by another request than the one that stored it
    uint8_t where

cdef struct HeapNode:
    uint64_t stamp
    int32_t row

cdef struct EvictionQueue:
    HeapNode* nodes
    int32_t num_nodes
    int32_t size            # of nodes, allocated
    int32_t num_listed
    int32_t cursor          # this call has skipped all rows of the list before it
    uint32_t cursor_mark    # the call that the cursor belongs to


# A 4-ary min-heap of stamps. The `prev` of each row in it is its position.
#
# Four children share a cache line or two, which halves the cache misses of a descent in a binary heap.

cdef inline void sift_up(Row* rows, HeapNode* nodes, int32_t i, HeapNode node) noexcept nogil:
    cdef int32_t parent
    while i > 0:
        parent = (i - 1) >> 2
        if node.stamp > nodes[parent].stamp:
            break
        nodes[i] = nodes[parent]
        rows[nodes[i].row].prev = i
        i = parent
    nodes[i] = node
    rows[node.row].prev = i


cdef inline void sift_down(Row* rows, HeapNode* nodes, int32_t n, int32_t i, HeapNode node) noexcept nogil:
    cdef int32_t child, least
    cdef Py_ssize_t below
    while 4 * i + 1 < n:
        # The descent's next level is known only when the children are loaded: prefetch all sixteen grandchildren.
        below = 16 * <Py_ssize_t> i + 5
        if below < n:
            for child in range(LINES_BELOW):
                prefetch(<char*> &nodes[below] + 64 * child)
        least = 4 * i + 1
        for child in range(least + 1, min(least + 4, n)):
            if nodes[child].stamp < nodes[least].stamp:
                least = child
        if node.stamp < nodes[least].stamp:
            break
        nodes[i] = nodes[least]
        rows[nodes[i].row].prev = i
        i = least
    nodes[i] = node
    rows[node.row].prev = i


# The head of queue Q's list is row Q: next is the oldest, prev the most recent.

cdef inline void link_before(Row* rows, int32_t row, int32_t neighbour) noexcept nogil:
    cdef int32_t prev = rows[neighbour].prev
    rows[row].prev = prev
    rows[row].next = neighbour
    rows[prev].next = row
    rows[neighbour].prev = row
    rows[row].where = LISTED


cdef inline void unlink(Row* rows, int32_t row) noexcept nogil:
    cdef int32_t prev = rows[row].prev
    cdef int32_t next = rows[row].next
    rows[prev].next = next
    rows[next].prev = prev


cdef inline void heap_push(Row* rows, EvictionQueue* queue, int32_t row) noexcept nogil:
    # Call BlockTable.reserve_heaps before.
    cdef HeapNode node
    node.stamp = rows[row].stamp
    node.row = row
    rows[row].where = HEAPED
    queue.num_nodes += 1
    sift_up(rows, queue.nodes, queue.num_nodes - 1, node)


cdef inline void heap_remove(Row* rows, EvictionQueue* queue, int32_t row) noexcept nogil:
    cdef HeapNode last
    cdef int32_t i = rows[row].prev
    queue.num_nodes -= 1
    last = queue.nodes[queue.num_nodes]
    if last.row == row:
        return
    # The last node replaces the removed one, and moves up or down.
    if last.stamp < queue.nodes[i].stamp:
        sift_up(rows, queue.nodes, i, last)
    else:
        sift_down(rows, queue.nodes, queue.num_nodes, i, last)


cdef inline void queue_remove(Row* rows, EvictionQueue* queue, int32_t row) noexcept nogil:
    if rows[row].where == LISTED:
        unlink(rows, row)
        queue.num_listed -= 1
    elif rows[row].where == HEAPED:
        heap_remove(rows, queue, row)


cdef inline void queue_append(Row* rows, EvictionQueue* queue, int32_t head, int32_t row) noexcept nogil:
    # The row's stamp is the youngest of all.
    link_before(rows, row, head)
    queue.num_listed += 1


cdef inline void queue_insert(Row* rows, EvictionQueue* queue, int32_t head, int32_t row) noexcept nogil:
    cdef uint64_t stamp = rows[row].stamp
    if queue.num_listed == 0 or stamp > rows[rows[head].prev].stamp:
        link_before(rows, row, head)
    elif stamp < rows[rows[head].next].stamp:
        link_before(rows, row, rows[head].next)
    else:
        heap_push(rows, queue, row)
        return
    queue.num_listed += 1
