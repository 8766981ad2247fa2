"""lfuda: least frequently used with dynamic ageing. A block's priority is its uses plus the cache age at its last use.

Compiled because it loops over rows. Arlitt et al., "Evaluating Content Management Techniques for Web Proxy Caches",
2000, with a history of the uses of evicted keys.
"""

cimport cython
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free

from kvcache.core.ghosts cimport GhostList
from kvcache.core.index cimport zeroed
from kvcache.core.eviction_queue cimport HEAPED, heap_update
from kvcache.core.table cimport BlockTable, enter, make_youngest, queue_of, take_victim
from kvcache.core.policy_adapter cimport PolicyAdapter

from kvcache.policies.base import CachePolicy

cdef enum:
    HISTORY_FACTOR = 4      # size of the history of evicted keys, in capacities


@cython.final
cdef class LFUDACachePolicy(PolicyAdapter):
    """LFUDACachePolicy(cache_capacity)

    Evict the block with the lowest value: its uses, plus the age of the cache at its last use.

    Notes
    -----
    The age is the highest value evicted so far. O(log capacity) per block: a heap ordered by value, then by recency.
    The history keeps the uses of the last ``4 * cache_capacity`` evicted keys.
    """

    cdef uint32_t* uses             # [num_rows]; the value is in the table's ranks
    cdef readonly GhostList history
    cdef readonly uint64_t age

    cdef void _rank(self, int32_t row) noexcept nogil

    def __cinit__(self, cache_capacity):
        self.table = BlockTable(cache_capacity, ranked=True)
        self.uses = <uint32_t*> zeroed(self.table.num_rows * sizeof(uint32_t))
        if self.uses == NULL:
            raise MemoryError(f"no memory for {cache_capacity} blocks")
        self.history = GhostList(HISTORY_FACTOR * cache_capacity, tight=True)

    def __dealloc__(self):
        free(self.uses)

    cdef void _rank(self, int32_t row) noexcept nogil:
        """Set the row's stamp to the youngest, and move it down the heap according to its value."""
        make_youngest(self.table, row)
        if self.table.rows[row].where == HEAPED:
            heap_update(self.table.rows, &self.table.queues[queue_of(self.table, row)], row, self.table.ranks[row])

    def gauges(self):
        """Return the age of the cache, and the number of keys in the history."""
        return {"age": self.age, "remembered_keys": self.history.num_ghosts}

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row
        for i in range(n - 1, -1, -1):
            row = rows[i]
            if row != 0:
                self.uses[row] += 1
                self.table.ranks[row] = self.age + self.uses[row]
                self._rank(row)

    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(n - 1, -1, -1):
            if rows[i] != 0:
                self._rank(rows[i])

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, ghost
        for i in range(n):
            row = rows[i]
            self.uses[row] = 1
            ghost = self.history.find(self.table.rows[row].hash)
            if ghost != 0:
                self.uses[row] += self.history.ghosts[ghost].state
                self.history.drop(ghost)
            self.table.ranks[row] = self.age + self.uses[row]
            enter(self.table, row, 0)

    cdef Py_ssize_t select_victims(self, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil:
        cdef Py_ssize_t got = 0
        cdef int32_t row, ghost
        while got < n:
            row = take_victim(self.table, 0, priority)
            if row == 0:
                break
            self.age = max(self.age, self.table.ranks[row])
            ghost = self.history.push(self.table.rows[row].hash)
            self.history.ghosts[ghost].state = self.uses[row]
            out[got] = row
            got += 1
        return got

    cdef void on_reset(self) noexcept nogil:
        self.age = 0
        self.history.clear()

    cdef int check_policy(self) except -1:
        return self.check_ghosts(self.history)


CachePolicy.register(LFUDACachePolicy)
