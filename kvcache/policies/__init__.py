"""Replacement policies: the abstract base class, the batch operations that a manager calls, and compiled policies."""

from kvcache.policies.arc import ARCCachePolicy as ARCCachePolicy
from kvcache.policies.base import CachePolicy as CachePolicy
from kvcache.policies.base import RequestUses as RequestUses
from kvcache.policies.gittins import GittinsCachePolicy as GittinsCachePolicy
from kvcache.policies.lru import LRUCachePolicy as LRUCachePolicy
