"""Deadlines: which block held at a raised priority expires next.

Compiled because every hinted call sets one deadline per block.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.heap cimport HeapNode, heap_put, sift_up


cdef class Deadlines:
    """Deadlines(num_rows)

    The rows held at a raised priority, ordered by deadline.
    """

    def __cinit__(self, Py_ssize_t num_rows):
        # Left uninitialized: zeroing it would take milliseconds. `holds` works with any contents.
        self.at = <int32_t*> PyMem_Malloc(num_rows * sizeof(int32_t))
        self.nodes = <HeapNode*> PyMem_Malloc(num_rows * sizeof(HeapNode))
        if self.at == NULL or self.nodes == NULL:
            raise MemoryError(f"no memory for the deadlines of {num_rows} blocks")

    def __dealloc__(self):
        PyMem_Free(self.nodes)
        PyMem_Free(self.at)

    def __len__(self):
        return self.num_nodes

    cdef bint holds(self, int32_t row) noexcept nogil:
        """Return whether the row has a deadline. Its node decides, whatever `at` contains (Briggs & Torczon, 1993)."""
        return <uint32_t> self.at[row] < <uint32_t> self.num_nodes and self.nodes[self.at[row]].row == row

    cdef uint64_t of(self, int32_t row) noexcept nogil:
        """Return the row's deadline, or 0."""
        return self.nodes[self.at[row]].rank if self.holds(row) else 0

    cdef void set(self, int32_t row, uint64_t deadline) noexcept nogil:
        """Set the row's deadline, or replace it."""
        cdef HeapNode node
        self.stamp += 1
        node.rank = deadline
        node.stamp = self.stamp
        node.row = row
        if self.holds(row):
            heap_put(self.at, 1, self.nodes, self.num_nodes, self.at[row], node)
            return
        self.num_nodes += 1
        sift_up(self.at, 1, self.nodes, self.num_nodes - 1, node)

    cdef void remove(self, int32_t row) noexcept nogil:
        """Remove the row's deadline, if it has one."""
        cdef int32_t i
        if not self.holds(row):
            return
        i = self.at[row]
        self.num_nodes -= 1
        if i != self.num_nodes:
            heap_put(self.at, 1, self.nodes, self.num_nodes, i, self.nodes[self.num_nodes])

    cdef int32_t nearest(self) noexcept nogil:
        """Return the row with the earliest deadline, or 0."""
        return self.nodes[0].row if self.num_nodes else 0

    cdef void clear(self) noexcept nogil:
        """Remove all deadlines."""
        self.num_nodes = 0
