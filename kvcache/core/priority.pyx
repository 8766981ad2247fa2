"""PriorityClasses: a retention hint moves blocks to a queue evicted before or after normal blocks until its TTL ends.

Compiled because a hinted request moves every one of its blocks, in the scheduler's thread.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kvcache.core.eviction_queue cimport HeapNode, heap_put, sift_up
from kvcache.core.table cimport NORMAL, PINNED, BlockTable, attach, detach

from kvcache.block import BlockStateError

cdef enum:
    FALLS_PER_CALL = 256    # expired blocks that one call returns to normal priority


cdef class PriorityClasses:
    """PriorityClasses(table)

    The priorities of a table's blocks: one eviction queue per priority, and a deadline per raised block.
    """

    def __cinit__(self, BlockTable table not None):
        self.table = table

    def __dealloc__(self):
        PyMem_Free(self.nodes)
        PyMem_Free(self.at)

    cdef int start(self) except -1:
        """Keep deadlines from now on, because a request has given a hint."""
        cdef Py_ssize_t num_rows = self.table.num_rows
        if self.nodes != NULL:
            return 0
        # Left uninitialized: zeroing them would take milliseconds.
        self.at = <int32_t*> PyMem_Malloc(num_rows * sizeof(int32_t))
        if self.at != NULL:
            self.nodes = <HeapNode*> PyMem_Malloc(num_rows * sizeof(HeapNode))
        if self.nodes == NULL:
            PyMem_Free(self.at)
            self.at = NULL
            raise MemoryError(f"no memory for the deadlines of {num_rows} blocks")
        return 0

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room, before anything changes, for `n` rows to be raised and for `n` rows to expire."""
        if self.nodes != NULL:
            self.table.reserve_heaps(2 * n)
        return 0

    cdef int advance(self, int64_t now_ns) except -1:
        """Return expired blocks to normal priority, at most 256 of them."""
        cdef int num_left = FALLS_PER_CALL
        self.now_ns = now_ns
        if self.nodes == NULL:
            return 0
        self.table.reserve_heaps(FALLS_PER_CALL)
        while num_left and self.num_raised and self.nodes[0].rank <= <uint64_t> self.now_ns:
            self._drop_nearest()
            num_left -= 1
        return 0

    cdef void apply(self, const int32_t* rows, Py_ssize_t n, int32_t priority, int64_t ttl_ns) noexcept nogil:
        """Apply a request's hint to resident rows. Priority 0 (no hint) lifts one-shot blocks: they were used again."""
        cdef Py_ssize_t i
        cdef uint64_t deadline = <uint64_t> (self.now_ns + ttl_ns) if ttl_ns else <uint64_t> -1
        if self.nodes == NULL:
            return
        # Go from last to first: blocks with the same deadline expire in this order, and the tail must expire first.
        for i in range(n - 1, -1, -1):
            if rows[i] != 0:
                self._raise(rows[i], NORMAL + priority, deadline)
        self._crowd_out()

    cdef void restate(self, const int32_t* rows, Py_ssize_t n, int32_t priority, int64_t ttl_ns) noexcept nogil:
        """Move resident rows to the priority of a later hint, unless they are held at priority 2 or 3."""
        cdef Py_ssize_t i
        cdef int32_t row
        cdef uint64_t deadline = <uint64_t> (self.now_ns + ttl_ns) if ttl_ns else <uint64_t> -1
        if self.nodes == NULL:
            return
        for i in range(n - 1, -1, -1):
            row = rows[i]
            if row == 0 or self.table.rows[row].priority > NORMAL + 1:
                continue
            if priority > 0:
                self._raise(row, NORMAL + priority, deadline)
                continue
            if self.table.rows[row].priority > NORMAL:
                self._drop_deadline(row)
            self._set(row, NORMAL + priority)
        self._crowd_out()

    cdef void _crowd_out(self) noexcept nogil:
        """If too many blocks are raised, return those with the earliest deadlines to normal priority."""
        while self.num_raised > self.max_raised:
            self._drop_nearest()

    cdef void forget(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Remove rows that are about to be evicted."""
        cdef Py_ssize_t i
        if self.nodes == NULL:
            return
        for i in range(n):
            if self.table.rows[rows[i]].priority > NORMAL:
                self._drop_deadline(rows[i])

    cdef void clear(self) noexcept nogil:
        self.num_raised = 0

    cdef int check(self) except -1:
        """Check every row. Raise BlockStateError naming the broken invariant."""
        cdef int32_t row
        cdef Py_ssize_t num_raised = 0
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            num_raised += self.table.rows[row].key != NULL and self.table.rows[row].priority > NORMAL
        if num_raised != self.num_raised:
            raise BlockStateError(
                f"invariant broken: {num_raised} rows are at a raised priority, {self.num_raised} have a deadline")
        return 0

    cdef void _set(self, int32_t row, int32_t priority) noexcept nogil:
        """Move a row to the queue of another priority, at the place of its stamp."""
        cdef bint is_pinned = self.table.rows[row].where == PINNED
        if not is_pinned:
            detach(self.table, row)
        self.table.rows[row].priority = <uint8_t> priority
        if not is_pinned:
            attach(self.table, row)

    cdef void _raise(self, int32_t row, int32_t priority, uint64_t deadline) noexcept nogil:
        """Raise a row, or extend its deadline. A hint never lowers a priority that another request has set."""
        cdef int32_t before = self.table.rows[row].priority
        cdef HeapNode node
        if priority > before:
            self._set(row, priority)
        if priority <= NORMAL or priority < before or (
                priority == before and deadline < self.nodes[self.at[row]].rank):
            return
        self.stamp += 1
        node.rank = deadline
        node.stamp = self.stamp
        node.row = row
        if before > NORMAL:
            heap_put(self.at, 1, self.nodes, self.num_raised, self.at[row], node)
        else:
            self.num_raised += 1
            sift_up(self.at, 1, self.nodes, self.num_raised - 1, node)

    cdef void _drop_deadline(self, int32_t row) noexcept nogil:
        """Remove the deadline of a raised row."""
        cdef int32_t i = self.at[row]
        self.num_raised -= 1
        if i != self.num_raised:
            heap_put(self.at, 1, self.nodes, self.num_raised, i, self.nodes[self.num_raised])

    cdef void _drop_nearest(self) noexcept nogil:
        """Return the block with the earliest deadline to normal priority."""
        cdef int32_t row = self.nodes[0].row
        self._drop_deadline(row)
        self._set(row, NORMAL)
