"""Tiers below host memory under vLLM: the host blocks that scheduler and workers share, and the manager over tiers.

Every worker starts before the scheduler and maps the file of this engine's id. The scheduler locks the file and unlinks
it, so that nothing is left behind however the engine ends. Before its first job a worker checks that a process holds
the lock: on another node, say, it would map a file that no tier reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcache import events
from kvcache.block import ASK_AGAIN, PENDING, READY
from kvcache.integrations.vllm.manager import (
    RESULTS,
    EngineRequest,
    KVCacheOffloadingManager,
    engine_event,
)
from kvcache.integrations.vllm.prefill_watch import PrefillWatch
from kvcache.integrations.vllm.releases import Release
from kvcache.options import format_size
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import describe_tier
from kvcache.transfer.shared_file import PREFIX, FileRecord, SharedBlocks, leftover_files, private_folder

# vLLM's log configuration covers loggers below its own name only.
logger = init_logger(f"vllm.{__name__}")


class SharedPool(SharedBlocks):
    """The engine's host blocks in shared memory; the parts of all ranks lie side by side in a block.

    The scheduler's spec is the owner. ValueError: the memory is too small, or the file belongs to another engine.
    """

    def __init__(self, config: Any, folder: str, num_blocks: int, rank_bytes: int, is_owner: bool) -> None:
        parallel = config.parallel
        name = f"{PREFIX}{config.engine_id}-{parallel.data_parallel_index}".replace("/", "-")
        path = private_folder(Path(folder)) / name
        super().__init__(path, num_blocks, rank_bytes * parallel.world_size, is_owner)
        if is_owner:
            self.unlink()
        elif self.has_owner():
            self.close()
            raise ValueError(f"shared pool {path} belongs to a running engine of the same engine_id; give each its own")


def record_region(spec: Any) -> FileRecord | None:
    """Remove the regions of killed engines, and record that this process uses the one of the engine of `spec`.

    vLLM's processes map a region by its name, and remove it when they end. Call this before the region is made: an
    engine that is killed while it fills the region leaves all of it behind.
    """
    for path, num_bytes in leftover_files(remove=True):
        logger.warning("removed %s: %s of an engine that was killed", path, format_size(num_bytes))
    try:
        return FileRecord(Path(f"/dev/shm/vllm_offload_{spec.config.engine_id}.mmap"))
    except (OSError, ValueError) as error:
        logger.warning("if this engine is killed, its host blocks stay in /dev/shm: %s", error)
        return None


class EngineRegion:
    """vLLM's host blocks, mapped by the scheduler for our tiers; vLLM's workers copy to and from them.

    The geometry of the TieringOffloadingSpec `spec` names the region.
    """

    def __init__(self, spec: Any) -> None:
        self._record = record_region(spec)
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=None,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self.array = np.asarray(self._region.create_kv_memoryview())

    def close(self) -> None:
        """Unlink the region; it is unmapped once no tier holds its blocks any more."""
        self._region.mmap_obj = None
        self._region.cleanup()
        if self._record is not None:
            self._record.close()
            self._record = None


class TieredKVCacheOffloadingManager(KVCacheOffloadingManager):
    """Adapter of a `TieredOffloadingManager` to vLLM's scheduler."""

    def __init__(self, manager: TieredOffloadingManager, release: Release) -> None:
        super().__init__(manager, release)
        self._tiered = manager
        self._watch: PrefillWatch | None = None
        if manager.arbiter is not None:
            # The method is looked up each time, because a recorder may wrap it later.
            self._watch = PrefillWatch(
                manager.block_size,
                lambda parts, seconds: manager.report_prefills(parts, seconds),
                release.ends_step_last,
            )
        self._are_disks = all(stats.tier.medium == "DISK" for stats in manager.tier_stats())

    def tier_descriptions(self) -> list[str]:
        return [describe_tier(stats.tier) for stats in self._tiered.tier_stats()]

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        ours = req_context.get_state(EngineRequest)
        if self._watch is not None:
            self._watch.on_lookup(ours.req_id, ours.get_offload_key_position(key))
        if not ours.may_load_below:
            result = RESULTS[self._tiered.pool.states([key])[0]]
            return self.while_stored(req_context) if result is RESULTS[PENDING] else result
        status = self._tiered.status(key, ours)
        if status in (PENDING, ASK_AGAIN) and self._tiered.policy.get(key) is None:
            ours.promoted.add(key)
        # There are at most 64 groups.
        if key[-1] == self.path_group and status in (READY, PENDING):
            ours.found_tokens = max(ours.found_tokens, ours.get_offload_key_position(key) or 0)
        # A block that a tier holds is pending, which counts as a hit: the search of a sliding window ends there.
        return RESULTS[status]

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> LoadStoreSpec:
        if self._watch is not None:
            self._watch.on_load(req_context.req_id, _end_tokens(keys, req_context))
        spec = super().prepare_load(keys, req_context)
        if self.path_group is not None:
            # The policy decides now which of the loaded blocks stay: the request may never store any.
            self._tiered.prepare_store([], req_context.get_state(EngineRequest))
        return spec

    def _used(self, req_context: Any) -> EngineRequest:
        ours: EngineRequest = req_context.get_state(EngineRequest)
        if ours.found_tokens and not ours.num_path_positions:
            self._tiered.pool.note_found(ours, ours.found_tokens)
        return super()._used(req_context)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        if self._watch is not None:
            self._watch.on_store(req_context.req_id, _end_tokens(keys, req_context))
        return super().prepare_store(keys, req_context)

    def on_request_finished(self, req_context: Any) -> None:
        super().on_request_finished(req_context)
        if self._watch is not None:
            self._watch.on_request_finished(req_context.req_id)

    def on_schedule_end(self, context: Any = None) -> None:
        super().on_schedule_end(context)
        if self._watch is not None:
            self._watch.on_step(self.clock())

    def take_events(self) -> Iterable[OffloadingEvent]:
        # vLLM calls this once for each step that was computed, whether it publishes events or not.
        if self._watch is not None:
            self._watch.on_output()
        return super().take_events()

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        if key not in req_context.get_state(EngineRequest).promoted:
            return super().get_load_source(key, req_context)
        return CacheHitSource.DISK if self._are_disks else CacheHitSource.EXTERNAL_UNSPECIFIED

    def _engine_event(self, event: events.OffloadingEvent) -> OffloadingEvent:
        medium = Medium.CPU if event.medium == self._tiered.medium else Medium.STORAGE
        return engine_event(event, medium, is_local=medium is Medium.CPU or event.medium == "DISK")

    def has_pending_work(self) -> bool:
        return self._tiered.has_pending_work()


def _end_tokens(keys: Iterable[bytes], req_context: Any) -> list[int]:
    positions = req_context.get_state(EngineRequest).positions or {}
    return [positions[key] for key in keys if key in positions]
