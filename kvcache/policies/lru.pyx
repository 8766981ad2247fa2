"""lru: evict the least recently used block.

Compiled because it loops over rows. This is the shortest policy: read it first. `core/policy.pxd` describes the hooks.
"""

cimport cython
from libc.stdint cimport int32_t, uint64_t

from kvcache.core.policy_adapter cimport PolicyAdapter
from kvcache.core.table cimport BlockTable, enter, move_to_front, move_to_tail

from kvcache.policies.base import CachePolicy

cdef enum:
    RECENCY = 0     # its only list: oldest block first


@cython.final
cdef class LRUCachePolicy(PolicyAdapter):
    """LRUCachePolicy(cache_capacity)

    Evict the least recently used block, and skip blocks that are referenced, not ready or protected.
    """

    def __cinit__(self, cache_capacity):
        self.table = BlockTable(cache_capacity)

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        """Move each block to the most-recent end, the prompt's head last: a tail is useless without its head."""
        cdef Py_ssize_t i
        for i in range(n - 1, -1, -1):
            if rows[i] != 0:
                self.table.rows[rows[i]].is_shared = True
                move_to_tail(self.table, rows[i], RECENCY)

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Append new blocks at the most-recent end."""
        cdef Py_ssize_t i
        for i in range(n):
            enter(self.table, rows[i], RECENCY)

    cdef void select_victims(self, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Remove the oldest blocks."""
        self.table.take_oldest(RECENCY, n, victims)

    cdef void on_demote(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Move each block to the least-recent end, the prompt's tail last: it is evicted first."""
        cdef Py_ssize_t i
        for i in range(n):
            if rows[i] != 0:
                move_to_front(self.table, rows[i], RECENCY)


CachePolicy.register(LRUCachePolicy)
