"""vLLM's entry point: one spec for the scheduler and one per worker, which share only the config."""

from __future__ import annotations

import inspect
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcache.assembly.assemble import open_manager
from kvcache.control.telemetry import MAX_LABEL_CHARS
from kvcache.integrations.vllm.copies import Copies, EngineCopies, OwnCopies
from kvcache.integrations.vllm.group_windows import described_groups, find_windows
from kvcache.integrations.vllm.identity import engine_config, group_caches
from kvcache.integrations.vllm.manager import KVCacheOffloadingManager
from kvcache.integrations.vllm.metrics import metric_definitions
from kvcache.integrations.vllm.releases import installed_release
from kvcache.integrations.vllm.settings import (
    DEFAULT_POLICY,
    UNDESCRIBED,
    WHERE,
    OurManager,
    read_config,
    unknown_keys,
)
from kvcache.integrations.vllm.startup import use_engine_log
from kvcache.integrations.vllm.tiered import TieredKVCacheOffloadingManager, record_region
from kvcache.options import check_windows
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.transfer.free_memory import check_memory

# vLLM's log configuration covers loggers below its own name only.
logger = init_logger(f"vllm.{__name__}")


class KVCacheOffloadingSpec(TieringOffloadingSpec):
    """Offload vLLM's KV cache to host memory under a policy of ours.

    On CUDA, ROCm and XPU vLLM's own worker copies the blocks, and the layout of host memory is vLLM's. On the CPU, or
    with ``"data_plane": "kvcache"``, our worker copies them. ValueError: an option is invalid, or the memory does not
    hold one block.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return KVCacheOffloadingManager.info_keys

    def __init__(self, config: Any) -> None:
        use_engine_log()
        placement = read_config(config.extra_config, len(config.groups))
        self.settings = placement.settings
        self.node_pool = placement.node_pool if isinstance(placement, OurManager) else None
        has_engine_worker = placement.has_engine_worker
        if has_engine_worker is None:
            has_engine_worker = current_platform.is_cuda_alike() or current_platform.is_xpu()
        if self.node_pool and config.parallel.pp_size > 1:
            raise ValueError(f"'node_pool' does not work with a pipeline of {config.parallel.pp_size} stages")
        # Initializes vLLM's base class, which reads the settings.
        self.copies: Copies = (EngineCopies if has_engine_worker else OwnCopies)(self, config)
        self.num_blocks, self.block_bytes = self.copies.num_blocks, self.copies.block_bytes
        self._engine_config = engine_config()
        self.group_caches = group_caches(config)
        if self.node_pool:
            # Workers join the pool before the scheduler, and must name the same windows.
            self._set_windows(None)
        self._manager: KVCacheOffloadingManager | None = None
        self._worker: Any = None

    # The manager's clock: monotonic seconds.
    clock = staticmethod(time.monotonic)

    def get_manager(self) -> KVCacheOffloadingManager:
        if self._manager is None:
            # Only the scheduler's spec makes a manager, so this is logged once.
            if unknown := unknown_keys(self.extra_config):
                logger.warning("kvcache does not know these keys of %s: %s", WHERE, unknown)
            if self.kv_events_config.enable_kv_cache_events and not self.kv_events_config.self_describing_kv_events:
                logger.warning("%s", UNDESCRIBED)
            frame = inspect.currentframe()
            self._set_windows(frame and frame.f_back)
            self._manager = self._make_manager()
            self._manager.info = (self.num_blocks, self.num_blocks * self.block_bytes)
            self._manager.spec_type = self.copies.spec_type
            self._manager.device.is_exact = len(self.config.groups) == self.blocks_per_chunk == 1
            logger.info("%s", self._description(self._manager))
        return self._manager

    def _set_windows(self, caller: FrameType | None) -> None:
        """Choose the policy of a model with several groups of KV caches, unless the configuration names windows."""
        num_groups = len(self.config.groups)
        if num_groups == 1 or self.settings.group_windows is not None:
            return
        if self.extra_config.get("cache_policy") not in (None, DEFAULT_POLICY):
            return
        try:
            groups = described_groups(self.config) if self.node_pool else self.config.groups
            windows = tuple(check_windows(find_windows(groups, None if self.node_pool else caller)))
            self.settings = replace(self.settings, cache_policy=DEFAULT_POLICY, group_windows=windows)
        except ValueError as error:
            policy = self.settings.cache_policy
            text = "policy %s without group_windows, for %d groups of KV caches: %s"
            # Workers have no caller.
            if caller is not None:
                logger.info(text, policy, num_groups, error)

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            self._worker = self.copies.make_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        # Without tiers, only the workers map the region, and vLLM unlinks it at once.
        kind: Any = CPUOffloadingSpec
        if self.node_pool:
            from kvcache.integrations.vllm.node import joined_region

            with joined_region(self, self._block_tokens(), self._engine_config):
                return kind.create_worker(self, kv_caches)
        is_shared = self._uses_shared_region()
        folder = Path("/dev/shm") if is_shared else None
        # The first rank makes the memory of all.
        if folder is None or not (folder / f"vllm_offload_{self.config.engine_id}.mmap").exists():
            num_bytes = self.num_blocks * self.block_bytes
            check_memory(num_bytes // (1 if is_shared else self.config.parallel.world_size), folder)
        if self._is_mapped_by_scheduler():
            kind = TieringOffloadingSpec
            # The connector keeps this spec as long as the worker.
            self._record = record_region(self)
        return kind.create_worker(self, kv_caches)

    def _uses_shared_region(self) -> bool:
        return bool(self.node_pool) or self._is_mapped_by_scheduler() or CPUOffloadingSpec._uses_shared_region(self)

    def _is_mapped_by_scheduler(self) -> bool:
        return bool(self.settings.tiers or self.config.canonical_layout)

    def _description(self, manager: KVCacheOffloadingManager) -> str:
        """Return the log line that describes the pool and its tiers at start."""
        num_ranks = self.config.parallel.world_size
        num_bytes = self.num_blocks * self.block_bytes
        parts = [
            f"kvcache offloads to {self.num_blocks:,} blocks of {self._block_tokens()} tokens in host memory "
            f"({num_bytes / 2**30:.2f} GiB on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}), "
            f"policy {self.settings.cache_policy}",
            f"{self.copies.name} copies them" + (", one copy for all ranks" if self.replicated_layout else ""),
            *manager.tier_descriptions(),
        ]
        return "; ".join(parts)

    def _block_tokens(self) -> int:
        return int(self.tokens_per_block[0] * self.blocks_per_chunk)

    def _labels(self) -> dict[str, str]:
        # The same after a restart, unlike vLLM's id of the engine: series go on.
        engine = f"{self.config.model.name}@{socket.gethostname()}"[-MAX_LABEL_CHARS:]
        return {"engine": engine, "rank": str(self.config.parallel.data_parallel_index)}

    def open_worker_pool(self) -> Any:
        """Register this worker with the pool of its node, and map it."""
        from kvcache.integrations.vllm.node import open_worker_pool

        return open_worker_pool(self, self._block_tokens(), self._engine_config)

    def _make_manager(self) -> KVCacheOffloadingManager:
        if self.node_pool:
            from kvcache.integrations.vllm.node import open_node_manager

            return open_node_manager(self, self._block_tokens(), self._engine_config)
        # Only tiers touch bytes in the scheduler: without them, its process maps no host memory.
        shared, identity = self.copies.open_host_blocks(self._engine_config) if self.settings.tiers else (None, None)
        manager = open_manager(
            self.settings,
            block_size=self._block_tokens(),
            num_blocks=self.num_blocks,
            enable_events=self.kv_events_config.enable_kv_cache_events,
            shared=shared,
            fingerprint=identity,
            clock=self.clock,
            block_bytes=self.block_bytes,
            labels=self._labels(),
        )
        adapter: KVCacheOffloadingManager
        if isinstance(manager, TieredOffloadingManager):
            adapter = TieredKVCacheOffloadingManager(manager, installed_release())
            adapter.clock = self.clock
        else:
            adapter = KVCacheOffloadingManager(manager, installed_release())
        if self.settings.group_windows is not None:
            adapter.path_group = self.settings.group_windows.index(None)
        adapter.lookup_deadline_s = self.settings.lookup_deadline_s
        return adapter
