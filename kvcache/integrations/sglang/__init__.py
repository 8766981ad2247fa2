"""The integration of SGLang: `KVCacheStorage`, a backend ``dynamic`` of HiCache. Its settings need no SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["KVCacheStorage"]

if TYPE_CHECKING:
    from kvcache.integrations.sglang.storage import KVCacheStorage


def __getattr__(name: str) -> Any:
    if name != "KVCacheStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcache.integrations.sglang.storage import KVCacheStorage

    return KVCacheStorage
