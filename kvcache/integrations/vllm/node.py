"""An engine's part of a node's pool: the adapter of a `NodeManager`, and what identifies the engine's blocks there.

Imported only if ``node_pool`` is set.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_offload.base import LookupResult

from kvcache.assembly.assemble import OffloadSettings, open_exporters
from kvcache.block import PENDING, READY
from kvcache.control.hints import HintBoard
from kvcache.control.telemetry import Telemetry
from kvcache.epoch import without_weights
from kvcache.exporters.status import StatusServer
from kvcache.integrations.vllm.identity import fingerprint
from kvcache.integrations.vllm.manager import RESULTS, EngineRequest, KVCacheOffloadingManager
from kvcache.integrations.vllm.releases import installed_release
from kvcache.integrations.vllm.settings import node_options
from kvcache.node.client import MappedPool, NodeManager, greeting, register_worker
from kvcache.node.protocol import node_folder
from kvcache.version import __version__

# Linux 5.14; Python knows its name only if it was built against it.
_MADV_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)


def _seed(vllm_config: Any) -> list[str]:
    """Return the hash algorithm of block keys, and a digest of its seed. ValueError: the seed is random."""
    if vllm_config is None:
        raise ValueError("'node_pool' needs vLLM's configuration, which this release does not show to a spec")
    algorithm, seed = vllm_config.cache_config.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("xxhash"):
        raise ValueError(
            f"engines of a 'node_pool' must hash alike, and {algorithm} has a random seed: set PYTHONHASHSEED=0 "
            "for all of them, or --prefix-caching-hash-algo sha256"
        )
    return [algorithm, hashlib.sha256((seed or DEFAULT_NONE_HASH_SEED).encode()).hexdigest()[:16]]


def _greeting(spec: Any, block_tokens: int, vllm_config: Any, rank: int) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the pool, and what this process says of itself."""
    config, parallel = spec.config, spec.config.parallel
    model = fingerprint(config, vllm_config, spec.settings.weights_version, getattr(spec, "group_caches", None))
    model["hash"] = _seed(vllm_config)
    if spec.copies.spec_type is not None:
        model["worker"] = ["vllm", bool(spec.replicated_layout)]
    digest = _digest(model)
    name = digest if spec.node_pool is True else spec.node_pool.replace("{model}", digest)
    if digest not in name:
        # Engines of different weights may join a pool of this name, and keys in its tiers begin with their epochs.
        digest = _digest(without_weights(model))
    identity = {
        **model, "num_blocks": spec.num_blocks, "block_bytes": spec.block_bytes, "block_size": block_tokens,
    }  # fmt: skip
    if spec.settings.group_windows is not None:
        identity["group_windows"] = spec.settings.group_windows
    hello = greeting(
        f"{config.engine_id}-{parallel.data_parallel_index}",
        json.loads(json.dumps(identity, default=str)),
        node_options(config.extra_config, spec.settings, digest),
        rank,
        parallel.world_size if rank < 0 else 0,
    )
    return node_folder(name), hello


def _digest(model: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode()).hexdigest()[:24]


def open_worker_pool(spec: Any, block_tokens: int, vllm_config: Any) -> MappedPool:
    """Register a worker with the node's pool, and map it."""
    folder, hello = _greeting(spec, block_tokens, vllm_config, spec.config.parallel.rank)
    return register_worker(folder, hello, spec.num_blocks, spec.block_bytes)


@contextmanager
def joined_region(spec: Any, block_tokens: int, vllm_config: Any) -> Iterator[None]:
    """Register a worker with the node's pool; a region that vLLM makes in this context is the pool's memory.

    ValueError: the pool refuses the worker, or the kernel is older than Linux 5.14.
    """
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            raise ValueError(
                "vLLM's worker over a 'node_pool' needs MADV_POPULATE_WRITE (Linux 5.14): without, it rewrites "
                f"bytes of other engines ({error.strerror}); set 'data_plane' to 'kvcache'"
            ) from None
    folder, hello = _greeting(spec, block_tokens, vllm_config, spec.config.parallel.rank)
    register_worker(folder, hello, spec.num_blocks, spec.block_bytes).close()
    # vLLM joins a file that exists, and leaves its removal to its creator. Each worker has a name of its own for it.
    config = spec.config
    spec.config = replace(config, engine_id=f"{config.engine_id}-{os.getpid()}")
    link = Path(f"/dev/shm/vllm_offload_{spec.config.engine_id}.mmap")
    link.symlink_to(folder / "pool")
    try:
        yield
    finally:
        link.unlink()
        spec.config = config


def open_node_manager(spec: Any, block_tokens: int, vllm_config: Any) -> NodeKVCacheOffloadingManager:
    """Join the node's pool, and start its owner if none serves it. ValueError names each difference to the pool."""
    if spec.kv_events_config.enable_kv_cache_events:
        raise ValueError("KV events do not work with 'node_pool'; leave out --kv-events-config")
    folder, hello = _greeting(spec, block_tokens, vllm_config, -1)
    manager = NodeManager(folder, hello, num_groups=len(spec.config.groups))
    if any(component.cls is StatusServer for component in spec.settings.exporters):
        # The owner opens the other exporters. This engine's socket accepts the version of its own next reset.
        manager.telemetry = Telemetry(manager, block_bytes=spec.block_bytes, config={"version": __version__})
        open_exporters(OffloadSettings.parse({"exporters": ["status"]}), manager.telemetry)
    return NodeKVCacheOffloadingManager(manager, folder)


class NodeKVCacheOffloadingManager(KVCacheOffloadingManager):
    """Adapter of a `NodeManager` to vLLM's scheduler. Each call carries its request, which holds the blocks."""

    def __init__(self, manager: NodeManager, folder: Path) -> None:
        super().__init__(manager, installed_release())  # type: ignore[arg-type]
        self._node = manager
        # The pool's owner executes hints.
        self.hints, manager.hints = HintBoard(), None
        # The policy needs to know where the run of blocks that memory and tiers hold ends.
        self._found_group = manager.path_group if manager.asks_tiers else None
        self._folder = folder

    def get_stats(self) -> Any:
        # Read the node's part at each call: it is cheap, and an engine that becomes idle makes no later call.
        return self.metrics.changes(all_parts=True)

    def tier_descriptions(self) -> list[str]:
        return [f"one pool for all engines of this machine, {self._folder}", *self._node.found]

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        ours = req_context.get_state(EngineRequest)
        status = self._node.status(key, ours)
        # There are at most 64 groups.
        if key[-1] == self._found_group and status in (READY, PENDING):
            self._node.note_found(ours, ours.get_offload_key_position(key) or 0)
        return RESULTS[status]

    def _open_request(self, ours: EngineRequest) -> EngineRequest:
        # The owner keeps a request until its last copy has ended.
        return ours
