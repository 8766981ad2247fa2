"""The integration of vLLM: `KVCacheOffloadingSpec` for its OffloadingConnector, `KVCacheTier` for its own tiering.

The package imports vLLM and checks its release on the first access to a class. Without vLLM, the modules for settings
can still be imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["KVCacheOffloadingSpec", "KVCacheTier"]

if TYPE_CHECKING:
    from kvcache.integrations.vllm.spec import KVCacheOffloadingSpec
    from kvcache.integrations.vllm.tier import KVCacheTier

_MODULES = {"KVCacheOffloadingSpec": "spec", "KVCacheTier": "tier"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcache.integrations.vllm.releases import TRIED, installed_release

    installed_release()
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        raise ImportError(f"{error} (kvcache was tried with vLLM {TRIED})") from error
    member = globals()[name] = getattr(module, name)
    return member
