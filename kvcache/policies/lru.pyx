"""lru: the block whose last use is longest ago leaves first.

Compiled because it is a PolicyAdapter; its one recency list is the table's default.
"""

cimport cython

from kvcache.core.policy_adapter cimport PolicyAdapter

from kvcache.policies.base import CachePolicy


@cython.final
cdef class LRUCachePolicy(PolicyAdapter):
    """LRUCachePolicy(cache_capacity)

    Evict the least recently used block, passing over those referenced, not ready or protected.
    """

    def __cinit__(self, cache_capacity):
        self._allocate(1, False)


CachePolicy.register(LRUCachePolicy)
