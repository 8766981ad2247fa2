"""The integration of LMCache: `KVCacheL2`, an L2 adapter for its server. Only the class needs LMCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["KVCacheL2"]

if TYPE_CHECKING:
    from kvcache.integrations.lmcache.adapter import KVCacheL2


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcache.integrations.lmcache.adapter import KVCacheL2

    return KVCacheL2
