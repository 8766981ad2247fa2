"""Replacement policies: the abstract base class, the batch operations that a manager calls, and compiled policies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcache.policies.base import CachePolicy, RequestUses

_HOME_OF = {
    "LRUCachePolicy": "kvcache.policies.lru",
    "ARCCachePolicy": "kvcache.policies.arc",
    "MQCachePolicy": "kvcache.policies.mq",
    "AMQCachePolicy": "kvcache.policies.amq",
    "LFUDACachePolicy": "kvcache.policies.lfuda",
    "GittinsCachePolicy": "kvcache.policies.gittins",
}

__all__ = [
    "AMQCachePolicy",
    "ARCCachePolicy",
    "CachePolicy",
    "GittinsCachePolicy",
    "LFUDACachePolicy",
    "LRUCachePolicy",
    "MQCachePolicy",
    "RequestUses",
]

if TYPE_CHECKING:
    from kvcache.policies.amq import AMQCachePolicy
    from kvcache.policies.arc import ARCCachePolicy
    from kvcache.policies.gittins import GittinsCachePolicy
    from kvcache.policies.lfuda import LFUDACachePolicy
    from kvcache.policies.lru import LRUCachePolicy
    from kvcache.policies.mq import MQCachePolicy


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvcache.policies' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
