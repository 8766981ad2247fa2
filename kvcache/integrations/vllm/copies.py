"""Who copies blocks between device and host memory: vLLM's worker, in vLLM's layout, or ours, in our own.

The worker decides the layout of host memory, and so the size of a block, what tiers map, and their fingerprint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcache.integrations.vllm.identity import check_readable, chunk_fingerprint, fingerprint
from kvcache.integrations.vllm.settings import blocks_per_rank
from kvcache.integrations.vllm.tiered import EngineRegion, SharedPool
from kvcache.integrations.vllm.worker import KVCacheOffloadingWorker
from kvcache.transfer.shared_file import SharedBlocks


class Copies(ABC):
    """The worker of an OffloadingSpec `spec`, which has `settings` and is initialized here with vLLM's `config`.

    `num_blocks` is the size of host memory, in blocks of `block_bytes` over all ranks. `spec_type` is vLLM's class for
    host blocks if its own worker copies them; None: ours.
    """

    name: str
    spec_type: Any = None
    num_blocks: int
    block_bytes: int

    @abstractmethod
    def make_worker(self, kv_caches: Any) -> Any:
        """Make the worker of one rank."""

    @abstractmethod
    def open_host_blocks(self, vllm_config: Any) -> tuple[Any, dict[str, Any]]:
        """Map host memory for tiers, in the scheduler; return it, and what identifies its blocks."""


class EngineCopies(Copies):
    """vLLM's worker copies blocks."""

    name = "vLLM"
    spec_type = CPULoadStoreSpec

    def __init__(self, spec: Any, config: Any) -> None:
        num_bytes = spec.settings.cpu_bytes_to_use
        # vLLM reads whole bytes only.
        extra_config = {**config.extra_config, "cpu_bytes_to_use": num_bytes}
        TieringOffloadingSpec.__init__(spec, replace(config, extra_config=extra_config))
        self._spec = spec
        self.num_blocks = int(spec.num_chunks)
        # Of all ranks, or the one copy that they share.
        self.block_bytes = int(spec.kv_bytes_per_chunk)
        if not self.num_blocks:
            raise ValueError(
                f"cpu_bytes_to_use must be at least one block of {self.block_bytes} bytes, got {num_bytes}"
            )

    def make_worker(self, kv_caches: Any) -> Any:
        return TieringOffloadingSpec.get_worker(self._spec, kv_caches)

    def open_host_blocks(self, vllm_config: Any) -> tuple[Any, dict[str, Any]]:
        # The region is closed by its manager only, so what may fail comes first.
        check_readable(vllm_config, self._spec.settings.tiers)
        identity = chunk_fingerprint(self._spec, vllm_config, self._spec.settings.weights_version)
        return EngineRegion(self._spec), identity


class OwnCopies(Copies):
    """Our worker copies blocks; each rank keeps its own part."""

    name = "kvcache"

    def __init__(self, spec: Any, config: Any) -> None:
        if config.extra_config.get("canonical_layout"):
            raise ValueError("'canonical_layout' needs vLLM's worker, which this platform or 'data_plane' excludes")
        OffloadingSpec.__init__(spec, config)
        self._spec = spec
        settings, parallel = spec.settings, config.parallel
        self._rank_block_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        self._rank_block_bytes = settings.part_bytes(self._rank_block_bytes, is_shared=bool(spec.node_pool))
        self.num_blocks = blocks_per_rank(settings, parallel.world_size, self._rank_block_bytes, parallel.pp_size)
        self.block_bytes = self._rank_block_bytes * parallel.world_size

    def make_worker(self, kv_caches: Any) -> Any:
        settings, rank = self._spec.settings, self._spec.config.parallel.rank
        shared: SharedBlocks | None = None
        if self._spec.node_pool:
            shared = self._spec.open_worker_pool()
        elif settings.tiers:
            shared = self._shared_pool(is_owner=False)
        return KVCacheOffloadingWorker(
            kv_caches,
            self.num_blocks,
            self._spec.blocks_per_chunk,
            settings.num_copy_threads,
            shared,
            rank,
            self._rank_block_bytes,
        )

    def open_host_blocks(self, vllm_config: Any) -> tuple[Any, dict[str, Any]]:
        check_readable(vllm_config, self._spec.settings.tiers)
        spec = self._spec
        identity = fingerprint(spec.config, vllm_config, spec.settings.weights_version, spec.group_caches)
        return self._shared_pool(is_owner=True), identity

    def _shared_pool(self, is_owner: bool) -> SharedPool:
        folder = self._spec.settings.pool_folder
        return SharedPool(self._spec.config, folder, self.num_blocks, self._rank_block_bytes, is_owner=is_owner)
