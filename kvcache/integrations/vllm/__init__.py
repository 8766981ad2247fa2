"""The integration of vLLM: `KVCacheOffloadingSpec`, for the engine's own OffloadingConnector.

The package imports vLLM and checks its release on the first access to the class. Without vLLM, the modules for settings
can still be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["KVCacheOffloadingSpec"]

if TYPE_CHECKING:
    from kvcache.integrations.vllm.spec import KVCacheOffloadingSpec


def __getattr__(name: str) -> Any:
    if name != "KVCacheOffloadingSpec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcache.integrations.vllm.releases import installed_release

    installed_release()
    from kvcache.integrations.vllm.spec import KVCacheOffloadingSpec

    globals()[name] = KVCacheOffloadingSpec
    return KVCacheOffloadingSpec
