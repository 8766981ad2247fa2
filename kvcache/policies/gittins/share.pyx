"""Share: the queue (first in, first out) of blocks above a tier that pass through host memory.

Compiled because it links rows of a policy's table.
"""

cimport cython
from libc.stdint cimport int32_t

from kvcache.core.table cimport BlockTable, count_rows, ref_of
from kvcache.policies.gittins.policy cimport PASSING

from kvcache.block import BlockStateError

cdef enum:
    MOST_PASSED = 1024          # rows in use that one call skips


@cython.final
cdef class Share:
    """Share(table)

    The rows in the list PASSING, oldest first.
    """

    def __cinit__(self, BlockTable table not None):
        self.table = table

    @property
    def keys(self):
        """The keys of the rows, oldest first."""
        cdef int32_t row = self.first
        keys = []
        while row != 0:
            if self.table.rows[row].list_idx != PASSING:
                raise BlockStateError(f"invariant broken: row {row} passes, but is in another list")
            keys.append(<object> self.table.rows[row].key)
            row = self.table.rows[row].next
        return keys

    cdef void append(self, int32_t row) noexcept nogil:
        """Append a new row."""
        self.table.rows[row].list_idx = PASSING
        self.table.rows[row].prev = self.last
        self.table.rows[row].next = 0
        if self.last != 0:
            self.table.rows[self.last].next = row
        else:
            self.first = row
        self.last = row
        count_rows(self.table, PASSING, 1)

    cdef void clear(self) noexcept nogil:
        """Forget all rows, which a reset of the table freed."""
        self.first = self.last = 0

    cdef void remove(self, int32_t row) noexcept nogil:
        """Unlink a row. The caller counts it."""
        cdef int32_t prev = self.table.rows[row].prev
        cdef int32_t next = self.table.rows[row].next
        if prev != 0:
            self.table.rows[prev].next = next
        else:
            self.first = next
        if next != 0:
            self.table.rows[next].prev = prev
        else:
            self.last = prev

    cdef Py_ssize_t evict(self, Py_ssize_t n, int32_t list_idx, int32_t* victims) noexcept nogil:
        """Select up to `n` victims, oldest first. They become rows of `list_idx`. Return their number."""
        cdef Py_ssize_t got = 0
        cdef int num_left = MOST_PASSED
        cdef int32_t row, next = self.first
        while next != 0 and got < n and num_left > 0:
            row = next
            next = self.table.rows[row].next
            # A tier or the engine is reading or writing the block.
            if ref_of(self.table, row) != 0:
                num_left -= 1
                continue
            self.remove(row)
            count_rows(self.table, PASSING, -1)
            self.table.rows[row].list_idx = list_idx
            victims[got] = row
            got += 1
        return got
