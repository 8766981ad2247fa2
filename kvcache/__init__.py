"""KV-cache offloading for large language models: a compiled control plane and a data plane that never waits.

Names are imported when first used, so that the scheduler's half never pays for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_HOMES = {
    "kvcache.types": (
        "BlockIDsLoadStoreSpec",
        "BlockStateError",
        "BlockStatus",
        "CPULoadStoreSpec",
        "CanonicalKVCacheRef",
        "CanonicalKVCacheTensor",
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "ManagerStats",
        "OffloadKey",
        "OffloadPolicy",
        "OffloadingEvent",
        "PrepareStoreOutput",
        "ReqContext",
        "RequestOffloadingContext",
        "Retention",
        "TransferResult",
        "get_offload_block_hash",
        "get_offload_group_idx",
        "make_offload_key",
    ),
    "kvcache.policies": (
        "AMQCachePolicy",
        "ARCCachePolicy",
        "CachePolicy",
        "LFUDACachePolicy",
        "LRUCachePolicy",
        "MQCachePolicy",
    ),
    "kvcache.backend": ("Backend", "CPUBackend"),
    "kvcache.whatif": ("WhatIf",),
    "kvcache.manager": ("BackendOffloadingManager", "CPUOffloadingManager", "OffloadingManager"),
    "kvcache.transfer.base": ("OffloadingHandler",),
    "kvcache.transfer.handler": ("cpu_gpu_handlers",),
    "kvcache.transfer.memory": ("HostPool",),
    "kvcache.transfer.worker": ("OffloadingWorker",),
    "kvcache.tiers.base": ("Tier", "TierResult", "TierStats"),
    "kvcache.tiers.disk": ("DiskTier",),
    "kvcache.tiers.lane": ("LaneStats", "TierRule"),
    "kvcache.tiers.manager": ("TieredOffloadingManager",),
    "kvcache.tiering": ("TieringOffloadingSpec",),
    "kvcache.spec": ("CPUOffloadingSpec", "OffloadingConfig", "OffloadingGroup", "OffloadingSpec", "make_spec"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]

if TYPE_CHECKING:
    from kvcache.backend import Backend, CPUBackend
    from kvcache.manager import BackendOffloadingManager, CPUOffloadingManager, OffloadingManager
    from kvcache.policies import (
        AMQCachePolicy,
        ARCCachePolicy,
        CachePolicy,
        LFUDACachePolicy,
        LRUCachePolicy,
        MQCachePolicy,
    )
    from kvcache.spec import CPUOffloadingSpec, OffloadingConfig, OffloadingGroup, OffloadingSpec, make_spec
    from kvcache.tiering import TieringOffloadingSpec
    from kvcache.tiers.base import Tier, TierResult, TierStats
    from kvcache.tiers.disk import DiskTier
    from kvcache.tiers.lane import LaneStats, TierRule
    from kvcache.tiers.manager import TieredOffloadingManager
    from kvcache.transfer.base import OffloadingHandler
    from kvcache.transfer.handler import cpu_gpu_handlers
    from kvcache.transfer.memory import HostPool
    from kvcache.transfer.worker import OffloadingWorker
    from kvcache.types import (
        BlockIDsLoadStoreSpec,
        BlockStateError,
        BlockStatus,
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        CPULoadStoreSpec,
        GPULoadStoreSpec,
        LoadStoreSpec,
        ManagerStats,
        OffloadingEvent,
        OffloadKey,
        OffloadPolicy,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        Retention,
        TransferResult,
        get_offload_block_hash,
        get_offload_group_idx,
        make_offload_key,
    )
    from kvcache.whatif import WhatIf


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvcache' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("kvcache."):
            raise
        raise ImportError(
            f"{error.name} is not compiled in {__path__[0]}: Python took kvcache from a folder of its sources. "
            "Run from another folder or with PYTHONSAFEPATH=1, where kvcache is installed; or build it there: "
            "python setup.py build_ext --inplace"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
