"""KV-cache offloading for large language models: a compiled control plane and a data plane that never waits.

Names are imported when first used, so that the scheduler's half never pays for torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.version import __version__ as __version__

# What homes need beyond numpy, and what may be missing: torch where only the control plane runs, and extras.
_NEEDED_BY = {
    "kvcache.tiers.disk": "xxhash",
    "kvcache.transfer.factory": "torch",
    "kvcache.transfer.host_pool": "torch",
}

if TYPE_CHECKING:
    from kvcache.assembly.spec import (
        CPUOffloadingSpec,
        OffloadingConfig,
        OffloadingGroup,
        OffloadingSpec,
        TieringOffloadingSpec,
        make_spec,
    )
    from kvcache.block import BlockStateError, BlockStatus
    from kvcache.control.backend import Backend, CPUBackend
    from kvcache.control.cpu import BackendOffloadingManager, CPUOffloadingManager
    from kvcache.control.manager import OffloadingManager
    from kvcache.events import OffloadingEvent
    from kvcache.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
    from kvcache.metrics import ManagerStats
    from kvcache.policies import ARCCachePolicy, CachePolicy, GittinsCachePolicy, LRUCachePolicy, RequestUses
    from kvcache.recorder.recorder import Recorder, RecorderStats
    from kvcache.request import OffloadPolicy, ReqContext, RequestOffloadingContext, Retention
    from kvcache.specs import (
        BlockIDsLoadStoreSpec,
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        CPULoadStoreSpec,
        GPULoadStoreSpec,
        LoadStoreSpec,
        PrepareStoreOutput,
        TransferResult,
    )
    from kvcache.tiering.controller import TierConfig, TierControllerStats
    from kvcache.tiering.manager import TieredOffloadingManager
    from kvcache.tiers.base.job_tier import BlockOutcome, JobTier, TierBatch, TierContents
    from kvcache.tiers.base.tier import Tier, TierResult, TierStats
    from kvcache.tiers.disk.tier import DiskTier
    from kvcache.tiers.memory import MemoryTier
    from kvcache.transfer.base import OffloadingHandler
    from kvcache.transfer.factory import cpu_gpu_handlers
    from kvcache.transfer.host_pool import HostPool
    from kvcache.transfer.worker import OffloadingWorker


# Here, whatever is imported: an engine or a benchmark in a checkout would fail later, and not say why.
if importlib.util.find_spec("kvcache.core.table") is None:
    raise ImportError(
        f"kvcache is not compiled in {__path__[0]}: Python took it from a folder of its sources. Run `make dev` there, "
        "then `export PYTHONPATH=$PWD PYTHONSAFEPATH=1 PATH=$PWD/.venv/bin:$PATH`; or run from another folder, or with "
        "PYTHONSAFEPATH=1, where kvcache is installed"
    )


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, as the block above imports it for type checkers."""
    import ast

    source = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    [block, *_] = [node for node in source.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


def _usable_names() -> list[str]:
    """Return the public names whose packages are installed: what ``import *`` and ``help`` go through."""
    missing = tuple(home for home, package in _NEEDED_BY.items() if importlib.util.find_spec(package) is None)
    return ["__version__", *sorted(name for name, home in _homes().items() if not home.startswith(missing))]


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _usable_names()
    home = _homes().get(name)
    if home is None:
        raise AttributeError(f"module 'kvcache' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_usable_names()})
