"""KVCacheTier: one of our tiers under vLLM's own TieringOffloadingManager.

vLLM's manager keeps host memory and its worker copies to and from the device. Our tier adds a bound, checksums, an
eviction policy, and recency that survives a restart. vLLM calls a tier under the manager's lock, so only `drain_jobs`
and `shutdown` wait for I/O.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcache.assembly.assemble import open_tiers
from kvcache.control.hints import HintBoard
from kvcache.integrations.vllm.device_cache import DeviceCache
from kvcache.integrations.vllm.identity import check_readable, chunk_fingerprint, engine_config
from kvcache.integrations.vllm.manager import EngineRequest
from kvcache.integrations.vllm.metrics import SampleChanges, tier_metric_definitions
from kvcache.integrations.vllm.settings import ENGINE_TIER_KEYS, read_tier
from kvcache.integrations.vllm.startup import use_engine_log
from kvcache.integrations.vllm.tiered import record_region
from kvcache.metrics import Part
from kvcache.tiering.controller import HostBudget, JobState, TierConfig, TierController, TierJob
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS, TierResult, describe_tier

_LOG = logging.getLogger(__name__)
_STATS_INTERVAL_S = 1.0
_LOOKUP_KEYS = 256
_DRAIN_POLL_S = 0.001
_DRAIN_WARNING_S = 5.0


class _Request(EngineRequest):
    """A request of the engine, and its keys in the order in which vLLM looks them up."""

    __slots__ = ("_keys", "_place_of", "failed", "predates_reset")

    def __init__(self, req_context: Any) -> None:
        super().__init__(req_context)
        self._keys: list[bytes] = []
        self._place_of: dict[bytes, int] = {}
        # Keys that the tier did not load: a second promotion would fail like the first one, and the request never run.
        self.failed: set[bytes] = set()
        # Whether the tier was reset after the request began. Such a request stores nothing more.
        self.predates_reset = False

    def keys_from(self, key: bytes) -> list[bytes]:
        """Return `key` and the next keys of the prompt, `_LOOKUP_KEYS` at most."""
        positions = self.positions or {}
        if len(self._keys) < len(positions):
            # vLLM sets positions in the order of the prompt, one group after another.
            self._keys = list(positions)
            self._place_of = dict(zip(self._keys, range(len(positions)), strict=True))
        place = self._place_of.get(key)
        return [key] if place is None else self._keys[place : place + _LOOKUP_KEYS]


def _place_of(options: dict[str, Any], offloading_spec: Any) -> int:
    """Return the place of a tier among the secondary tiers, from 1 on, as vLLM's own metrics label it."""
    entries = offloading_spec.extra_config.get("secondary_tiers") or []
    written = [{key: value for key, value in entry.items() if key not in ENGINE_TIER_KEYS} for entry in entries]
    return written.index(options) + 1 if options in written else 1


class KVCacheTier(SecondaryTierManager):
    """A bounded, checksummed tier below vLLM's host memory.

    The `options` are those of `KVCacheTierOptions`, ``deadline_s``, and those of the tier that ``kind`` names.
    ValueError: one is missing, unknown or invalid, or the tier holds blocks of another model or layout.

    vLLM offers each block once and keeps it in host memory until the store has ended. So at most half of the host
    blocks are under way to the tier; further stores are refused.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        use_engine_log()
        tier_options, settings = read_tier(options)
        host_blocks = np.asarray(primary_kv_view)
        num_chunks, row_bytes = host_blocks.shape
        max_store_blocks = tier_options.max_store_blocks or max(1, num_chunks // 2)
        settings = replace(settings, config=replace(settings.config, max_store_blocks=max_store_blocks))
        # Not closed: vLLM removes the region after this tier has ended, and the record goes with the process.
        self._record = record_region(offloading_spec)
        vllm_config = engine_config()
        check_readable(vllm_config, [settings])
        identity = chunk_fingerprint(offloading_spec, vllm_config, tier_options.weights_version)
        rank = str(offloading_spec.config.parallel.data_parallel_index)
        tier, config = open_tiers((settings,), host_blocks, identity, rank)[0]
        # vLLM has reserved the host blocks of every load, so only stores are bounded.
        budget = HostBudget(2 * num_chunks)
        self._controller = TierController(tier, config, 2 * num_chunks, 1, budget)
        if tier.medium != "DISK":
            self.cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED
        self.locality = None if tier_options.locality is None else Locality(tier_options.locality)
        self._options = tier_options
        has_events = tier_options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if has_events else None
        self._requests: dict[str, _Request] = {}
        # Host memory is vLLM's.
        self._hints = HintBoard()
        # Of the current step.
        self._answers: dict[bytes, LookupResult] = {}
        # Of each job: its request, its keys, and how many of them had no room.
        self._engine_jobs: dict[int, tuple[str, list[bytes], int]] = {}
        self._num_refused = 0
        self._results: list[JobResult] = []
        self._label = f"{_place_of(options, offloading_spec)}:{tier_type}"
        block_tokens = offloading_spec.tokens_per_block[0] * offloading_spec.blocks_per_chunk
        self._changes = SampleChanges(tier_metric_definitions(), block_tokens, row_bytes)
        self._device = DeviceCache()
        self._device.is_exact = len(offloading_spec.config.groups) == offloading_spec.blocks_per_chunk == 1
        self._next_stats_s = 0.0
        _LOG.info("vLLM's tier %s: %s", tier_type, describe_tier(tier.stats()))

    # The clock of deadlines and pauses: monotonic seconds.
    clock = staticmethod(time.monotonic)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        request = self._requests[req_context.req_id] = _Request(req_context)
        self._hints.begin(request)
        self._hints.step()
        self._device.begin(req_context.req_id)
        return RequestOffloadingContext(policy=OffloadPolicy(self._options.offload_policy))

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        answer = self._answers.get(key)
        if answer is None:
            answer = self._look_up(key, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None and self._device.heads is not None:
            self._device.note_lookup(key, request)
        return LookupResult.MISS if request is not None and key in request.failed else answer

    def _look_up(self, key: bytes, req_context: Any) -> LookupResult:
        # vLLM asks for one key a call, and next for a neighbour, so the answers of a step are found in batches.
        request = self._requests.get(req_context.req_id)
        keys = [key] if request is None else request.keys_from(key)
        if len(keys) > 1 and keys[1] in self._answers:
            del keys[1:]
        num_held = self._controller.lookup(keys, self.clock())
        if num_held is None:
            self._answers.update(dict.fromkeys(keys, LookupResult.RETRY))
        else:
            self._answers.update(dict.fromkeys(keys[:num_held], LookupResult.HIT))
            self._answers.update(dict.fromkeys(keys[num_held : num_held + 1], LookupResult.MISS))
        return self._answers[key]

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=True)

    def _submit(self, engine_job: Any, is_load: bool) -> None:
        controller, now_s = self._controller, self.clock()
        request = self._requests.get(engine_job.req_context.req_id)
        positions = (None if request is None else request.positions) or {}
        chunk_of = dict(zip(engine_job.keys, engine_job.chunk_ids.tolist(), strict=True))
        # vLLM passes the keys of a store as a set.
        keys = sorted(chunk_of, key=lambda key: positions.get(key, 0))
        may_send = controller.may_send(is_load, now_s)
        room = controller.room(is_load) if may_send else 0
        if not is_load and request is not None and (request.predates_reset or not self._device.may_store(request)):
            may_send, room = True, 0
        num_refused = max(len(keys) - room, 0) if may_send and not is_load else 0
        self._num_refused += num_refused
        if is_load:
            controller.touch(keys, request)
        self._engine_jobs[engine_job.job_id] = engine_job.req_context.req_id, keys, num_refused
        # The head of a prompt is needed before its tail, and the block that is stored last is the most recent.
        sent = keys[:room] if is_load else keys[:room][::-1]
        num_under_way = len(keys) + sum(len(job.keys) for job in controller.jobs.values())
        job = TierJob(
            engine_job.job_id,
            controller,
            is_load,
            sent,
            [chunk_of[key] for key in sent],
            # A job waits for those before it, which vLLM does not bound as our own manager does.
            now_s + controller.config.deadline_s * (1 + num_under_way / TierConfig.max_store_blocks),
        )
        if not room or not controller.send(job, now_s):
            self._end_job(job, TierResult(job.job_id), now_s)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._take_finished()
        results, self._results = self._results, []
        return results

    def _take_finished(self) -> None:
        now_s = self.clock()
        self._answers.clear()
        for job, result in self._controller.poll(MAX_STEP_BLOCKS, now_s):
            self._announce(result.removed, removed=True)
            if job is None:
                self._announce(result.done, removed=False)
            else:
                self._end_job(job, result, now_s)

    def _end_job(self, job: TierJob, result: TierResult, now_s: float) -> None:
        req_id, keys, num_refused = self._engine_jobs.pop(job.job_id)
        num_bytes = len(result.done) * self._changes.block_bytes
        seconds = 0.0 if job.state is JobState.UNSENT else now_s - job.sent_s
        if result.start_s is not None and result.end_s is not None:
            seconds = result.end_s - result.start_s
        details: dict[str, Any] = {"transfer_bytes": num_bytes}
        done = set(result.done)
        if job.is_load:
            is_whole = len(done) == len(keys)
            if not is_whole:
                details["successful_keys"] = result.done
                if (request := self._requests.get(req_id)) is not None:
                    request.failed.update(key for key in keys if key not in done)
        else:
            # As vLLM's tiers announce them, and some readers need the head of a prompt first.
            self._announce([key for key in keys if key in done], removed=False)
            # A block that the tier held already is neither done nor failed. Nor is one without room: vLLM would take
            # it for a fault of the tier, and from 0.33 on stop offering blocks for a while.
            is_whole = (job.state is not JobState.UNSENT or num_refused == len(keys)) and not result.failed
        self._results.append(JobResult(job.job_id, is_whole, transfer_time=seconds, **details))

    def _announce(self, keys: list[bytes], removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(
                OffloadingEvent(
                    keys=keys, medium=self.medium, removed=removed, locality=self.locality, removal_expected=True
                )
            )

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._controller.touch(list(keys), self._requests.get(req_context.req_id))

    def on_request_finished(self, req_context: Any) -> None:
        # vLLM calls this after the request's last store.
        request = self._requests.pop(req_context.req_id, None)
        if request is None:
            return
        self._device.end_request(req_context.req_id)
        if positions := request.positions:
            # Blocks that were found on the device or in host memory stay recent in the tier, too.
            self._controller.touch(sorted(positions, key=positions.__getitem__), request)
        self._controller.end_request(request)

    def on_schedule_end(self, context: Any) -> None:
        self._answers.clear()
        self._device.end_step(context)
        self._controller.pass_on_uses()

    def has_pending_work(self) -> bool:
        return bool(self._results or self._controller.jobs or self._controller.has_reports)

    def drain_jobs(self) -> None:
        next_warning_s = self.clock() + _DRAIN_WARNING_S
        self._take_finished()
        while self._controller.jobs:
            if self.clock() >= next_warning_s:
                next_warning_s += _DRAIN_WARNING_S
                _LOG.warning("%s: vLLM waits for %d jobs to end", self.tier_type, len(self._controller.jobs))
            time.sleep(_DRAIN_POLL_S)
            self._take_finished()
        # vLLM calls this only when it resets host memory.
        if self._options.forget_on_reset:
            self._controller.reset(self.clock())
            self._device.reset()
            for request in self._requests.values():
                request.predates_reset = True

    def shutdown(self) -> None:
        if not hasattr(self, "_controller"):
            return
        self._controller.shutdown()
        # vLLM unmaps the host blocks next, and the tier's arrays in reference cycles would prevent it.
        del self._controller
        gc.collect()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        read_tier(extra_config)
        return tier_metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        now_s = self.clock()
        if now_s < self._next_stats_s:
            return None
        self._next_stats_s = now_s + _STATS_INTERVAL_S
        stats = self._controller.stats()
        tier = replace(stats.tier, refused_blocks=stats.tier.refused_blocks + self._num_refused)
        labels = (("tier", self._label), ("medium", str(tier.medium)))
        return self._changes.since_last([Part("tier", replace(stats, tier=tier), labels), *self._hints.parts()])

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return ("kvcache_kind", "kvcache_medium", "kvcache_capacity_blocks", "kvcache_capacity_bytes")

    def config_info(self) -> dict[str, Any]:
        stats = self._controller.stats().tier
        values = (self._options.kind, stats.medium, stats.num_blocks, stats.num_blocks * self._changes.block_bytes)
        return dict(zip(self.config_info_keys({}), values, strict=True))
