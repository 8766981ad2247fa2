"""arc: two recency lists, for blocks seen once and blocks seen again. Hits on ghosts adapt the sizes of the lists.

Compiled because it loops over rows. Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03.
"""

cimport cython
from libc.stdint cimport int32_t, uint64_t

from kvcache.core.ghosts cimport GhostList, prefetch_ghost
from kvcache.core.table cimport BlockTable, enter, move_to_front, move_to_tail, prefetch_release, ref_of, take_victim
from kvcache.core.policy_adapter cimport PolicyAdapter

import math

from kvcache.core.policy_adapter import ListView
from kvcache.policies.base import CachePolicy

cdef enum:
    T1 = 0
    T2 = 1
    AHEAD = 12      # ghosts prefetched ahead of a loop over rows


@cython.final
cdef class ARCCachePolicy(PolicyAdapter):
    """ARCCachePolicy(cache_capacity)

    Balance recency and frequency by the uses of recently evicted keys.

    Notes
    -----
    REPLACE of Megiddo & Modha, FAST '03, fig. 4. Unlike the original, it skips referenced, unready and protected
    blocks, and trims both ghost lists to `cache_capacity`.
    """

    cdef double target
    cdef readonly GhostList b1
    cdef readonly GhostList b2

    def __cinit__(self, cache_capacity):
        self.table = BlockTable(cache_capacity, 2)
        self.b1 = GhostList(cache_capacity)
        self.b2 = GhostList(cache_capacity)

    @property
    def t1(self):
        """Keys seen once, oldest first."""
        return ListView(self, T1)

    @property
    def t2(self):
        """Keys seen again, oldest first."""
        return ListView(self, T2)

    @property
    def target_t1_size(self):
        """Target length of the list of blocks seen once, a float."""
        return self.target

    @target_t1_size.setter
    def target_t1_size(self, value):
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"target_t1_size must be a number >= 0, got {value!r}")
        self.target = value

    def gauges(self):
        """Return the lengths of both lists and of their ghost lists, and the target length of the first list."""
        return {
            "t1_blocks": self.table.num_in_list[T1],
            "t2_blocks": self.table.num_in_list[T2],
            "b1_ghosts": self.b1.num_ghosts,
            "b2_ghosts": self.b2.num_ghosts,
            "t1_target_blocks": self.target,
        }

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, ghost
        cdef double len1, len2
        cdef bint is_new
        for i in range(n - 1, -1, -1):
            row = rows[i]
            if row != 0:
                # The first use of a block that is being written is its store, so it counts as seen once.
                is_new = self.table.rows[row].list_idx == T1 and ref_of(self.table, row) < 0
                self.table.rows[row].is_shared = True
                move_to_tail(self.table, row, T1 if is_new else T2)
                continue
            len1 = self.b1.num_ghosts
            len2 = self.b2.num_ghosts
            ghost = self.b1.find(hashes[i])
            if ghost != 0:
                self.target = min(self.target + max(1.0, len2 / len1), <double> self.table.cache_capacity)
                self.b1.refresh(ghost)
                continue
            ghost = self.b2.find(hashes[i])
            if ghost != 0:
                self.target = max(self.target - max(1.0, len1 / len2), 0.0)
                self.b2.refresh(ghost)

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t ghost
        for i in range(n):
            if i + AHEAD < n:
                prefetch_ghost(self.b1, self.table.rows[rows[i + AHEAD]].hash)
                prefetch_ghost(self.b2, self.table.rows[rows[i + AHEAD]].hash)
            enter(self.table, rows[i], T1)
            ghost = self.b1.find(self.table.rows[rows[i]].hash)
            if ghost != 0:
                self.b1.drop(ghost)
            ghost = self.b2.find(self.table.rows[rows[i]].hash)
            if ghost != 0:
                self.b2.drop(ghost)

    cdef void select_victims(self, Py_ssize_t n, int32_t* out) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, choice
        for i in range(n):
            choice = T1 if self.table.num_in_list[T1] >= <Py_ssize_t> self.target else T2
            row = take_victim(self.table, choice)
            if row == 0:
                choice = T2 if choice == T1 else T1
                row = take_victim(self.table, choice)
            prefetch_release(self.table, row)
            if choice == T1:
                prefetch_ghost(self.b1, self.table.rows[row].hash)
            else:
                prefetch_ghost(self.b2, self.table.rows[row].hash)
            out[i] = row
        # The loop above does not depend on ghosts. Pushing them in a separate loop overlaps their cache misses.
        for i in range(n):
            row = out[i]
            if self.table.rows[row].list_idx == T1:
                self.b1.push(self.table.rows[row].hash)
            else:
                self.b2.push(self.table.rows[row].hash)

    cdef void on_demote(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(n):
            if rows[i] != 0:
                move_to_front(self.table, rows[i], T1)

    cdef void on_reset(self) noexcept nogil:
        self.target = 0.0
        self.b1.clear()
        self.b2.clear()

    cdef int check_policy(self) except -1:
        self.check_ghosts(self.b1)
        return self.check_ghosts(self.b2)


CachePolicy.register(ARCCachePolicy)
