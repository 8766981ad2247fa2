"""The scheduler's half: vLLM's manager interface over ours, one thin method each.

vLLM never calls ``touch``. The first ``prepare_*`` that names a key counts as a use. Every store orders the keys that
the request has used so far, so that the head of a long prompt stays younger than its tail. When the request ends, all
keys of its prompt are used and ordered, so that blocks found on the device stay young in host memory, too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcache import events
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.control.hints import HintBoard
from kvcache.control.pool import BlockPool
from kvcache.integrations.vllm.device_cache import DeviceCache
from kvcache.integrations.vllm.metrics import MetricsSource
from kvcache.integrations.vllm.releases import Release
from kvcache.request import ReqContext, path_after
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.tiering.manager import TieredOffloadingManager

RESULTS = (LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.HIT, LookupResult.RETRY)
"""vLLM's answer per state that a manager's `status` returns: absent, pending, ready, ask again."""
_PENDING = LookupResult.HIT_PENDING


class EngineRequest(ReqContext):
    """A request of the engine, from vLLM's context of it.

    The context holds the end position of each key's block; vLLM adds positions while the request runs.
    """

    __slots__ = (
        "found_tokens",
        "has_ended",
        "may_load_below",
        "num_path_positions",
        "promoted",
        "transfers",
        "waits_until_s",
    )

    def __init__(self, req_context: Any) -> None:
        # From vLLM 0.33 on, a request has an envelope of hints.
        kv_hints = getattr(req_context, "kv_hints", None)
        super().__init__(req_context.req_id, req_context.kv_transfer_params, kv_hints=kv_hints)
        # Whether the engine has reported its end; its last stores may still be running.
        self.has_ended = False
        # The keys of the group without a window were used for the positions before this one.
        self.num_path_positions = 0
        # Where the leading run of blocks without a window ends that memory and tiers hold.
        self.found_tokens = 0
        # Its running loads and stores: number of resets before, and keys in the order of the prompt.
        self.transfers: list[tuple[int, list[bytes]]] = []
        # Keys that were not in host memory at their first look-up: if they are loaded, a tier promoted them.
        self.promoted: set[bytes] = set()
        # Time at which it stops waiting for blocks that are being stored.
        self.waits_until_s: float | None = None
        self.may_load_below: bool = req_context.load_tier_filter.allows(Medium.STORAGE, None)
        self.set_offload_key_positions(req_context._offload_key_positions)

    @property
    def head(self) -> bytes:
        """The first key with a position, or empty. With one group of KV caches, it is the prompt's first key."""
        return next(iter(self.positions or ()), b"")

    def begin_transfer(self, keys: list[bytes], num_resets: int) -> None:
        """Record the order of keys before a transfer, and the number of resets."""
        if keys:
            self.transfers.append((num_resets, keys))

    def end_transfer(self, keys: Collection[bytes], num_resets: int) -> Collection[bytes]:
        """Return the keys of a finished transfer in the order of the prompt; the engine passes a set.

        In that order, blocks return to their place in the queue without a search. Concurrent transfers of one request
        have no key in common, so one key identifies the transfer. Transfers from before a reset are not reported.
        """
        for i, (resets, moved) in enumerate(self.transfers):
            if resets == num_resets and len(moved) == len(keys) and moved[0] in keys:
                del self.transfers[i]
                return moved
        return keys


def engine_event(event: events.OffloadingEvent, medium: Medium, is_local: bool) -> OffloadingEvent:
    """Return our event as vLLM's. A local medium is this machine's alone, and reports every removal.

    vLLM keeps the tokens of a block until all media that announced a removal have removed it. A shared store evicts
    blocks without a report.
    """
    locality = Locality.LOCAL if is_local else Locality.REMOTE
    return OffloadingEvent(event.keys, medium, event.removed, locality, removal_expected=is_local)


class KVCacheOffloadingManager(OffloadingManager):
    """Adapter of a manager to vLLM's scheduler. No other caller drives the manager.

    `spec_type` is vLLM's class for host blocks if its own worker copies them; None: ours. `info` holds the values of
    `info_keys`. `path_group` is the group of KV caches without a window, if the policy knows the windows of the others.
    """

    info_keys = ("kvcache_capacity_blocks", "kvcache_capacity_bytes")
    info: tuple[int, ...] = ()
    spec_type: Any = None
    path_group: int | None = None
    lookup_deadline_s = 5.0
    clock = staticmethod(time.monotonic)

    def __init__(self, manager: CPUOffloadingManager | TieredOffloadingManager, release: Release) -> None:
        self._manager = manager
        self._pool = manager if isinstance(manager, BlockPool) else manager.pool
        self._num_resets = 0
        self._failed: list[bytes] = []
        self.device = DeviceCache()
        self.hints = HintBoard(manager)
        self.metrics = MetricsSource(manager)
        self._release = release

    def tier_descriptions(self) -> list[str]:
        """Return a description of each tier below host memory."""
        return []

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        ours = EngineRequest(req_context)
        req_context.set_state(ours)
        self._manager.on_new_request(ours)
        self.hints.begin(ours)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        # The method is looked up each time, because a recorder or a timer may wrap it later.
        result = RESULTS[self._manager.status(key)]
        return self.while_stored(req_context) if result is _PENDING else result

    def while_stored(self, req_context: Any) -> LookupResult:
        """Return the answer for a block that is being stored: a hit, unless the request has waited long enough."""
        ours, now_s = req_context.get_state(EngineRequest), self.clock()
        if ours.waits_until_s is None:
            ours.waits_until_s = now_s + self.lookup_deadline_s
        return _PENDING if now_s < ours.waits_until_s else LookupResult.MISS

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> LoadStoreSpec:
        ours, keys = self._used(req_context), list(keys)
        spec = self._manager.prepare_load(keys, ours)
        self.device.begin_load(ours.req_id)
        ours.begin_transfer(keys, self._num_resets)
        ours.waits_until_s = None
        return spec if self.spec_type is None else self._engine_spec(spec)

    def _used(self, req_context: Any) -> EngineRequest:
        """Return our context of a request. If the policy knows windows, use the keys that its path has gained."""
        ours: EngineRequest = req_context.get_state(EngineRequest)
        positions = ours.positions or {}
        if self.path_group is not None and len(positions) > ours.num_path_positions:
            group, num_old = self.path_group.to_bytes(4, "big"), ours.num_path_positions
            ours.num_path_positions = len(positions)
            self._manager.touch(path_after(positions, num_old, group, self._manager.block_size), ours)
        return ours

    def _engine_spec(self, spec: Any) -> Any:
        return self.spec_type(spec.block_ids)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        ours = req_context.get_state(EngineRequest)
        self.device.end_load(ours.req_id)
        self._manager.complete_load(ours.end_transfer(keys, self._num_resets), self._open_request(ours))

    def _open_request(self, ours: EngineRequest) -> EngineRequest | None:
        return None if ours.has_ended else ours

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        ours = self._used(req_context)
        if not self.device.may_store(ours):
            keys = []
        output = self._manager.prepare_store(keys, ours)
        if output is None and len(keys) > self._pool.num_blocks:
            # vLLM would offer a batch that never fits at every step, and more keys each time.
            output = self._prepare_head(keys, ours)
        if output is not None:
            ours.begin_transfer(output.keys_to_store, self._num_resets)
            self._manager.reorder(ours)
            if self.spec_type is not None:
                output.store_spec = self._engine_spec(output.store_spec)
        return output

    def _prepare_head(self, keys: Collection[bytes], ours: EngineRequest) -> PrepareStoreOutput | None:
        """Reserve slots for the head of a batch that host memory cannot hold; None: later, other blocks are in use.

        The head ends where every group of the batch has a block, as a prompt is not resumed elsewhere. If the groups
        with windows have blocks at some ends only, it contains all of those before its end.
        """
        by_end: dict[int, list[bytes]] = {}
        for key in keys:
            by_end.setdefault(ours.get_offload_key_position(key) or 0, []).append(key)
        most = max(map(len, by_end.values()))
        head: list[bytes] = []
        num_whole, is_whole_so_far, ends = 0, True, sorted(by_end)
        for end, next_end in zip(ends, [*ends[1:], None], strict=True):
            head += by_end[end]
            if len(head) > self._pool.num_blocks:
                break
            is_whole = len(by_end[end]) == most
            is_whole_so_far &= is_whole
            if is_whole and (is_whole_so_far or next_end is None or len(by_end[next_end]) < most):
                num_whole = len(head)
        chosen = set(head[:num_whole])
        return self._manager.prepare_store([key for key in keys if key in chosen], ours)

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        ours = req_context.get_state(EngineRequest)
        stored = ours.end_transfer(keys, self._num_resets)
        context = self._open_request(ours) if success else ours
        self._manager.complete_store(stored, context, success)
        if not success and self._release.metadata_only and self._pool.events is not None:
            self._failed += stored

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._manager.touch(keys, req_context.get_state(EngineRequest))

    def on_request_finished(self, req_context: Any) -> None:
        if (ours := req_context.get_state(EngineRequest)) is not None:
            if not ours.num_path_positions:
                # Keys behind the prompt, of a reply, count as used only by a store or a load that names them.
                self._used(req_context)
            ours.has_ended = True
            self.device.end_request(ours.req_id)
            self._manager.on_request_finished(ours, use_positions=self.path_group is None)
            self.hints.end(ours)

    def on_schedule_end(self, context: Any = None) -> None:
        self.device.end_step(context)
        self.hints.step()
        self._manager.on_schedule_end()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self._manager.take_events():
            yield self._engine_event(event)
        failed, self._failed = self._failed, []
        # vLLM then drops its notes of the failed store. A block that was offered again keeps them.
        if absent := [key for key, state in zip(failed, self._pool.states(failed), strict=True) if not state]:
            yield OffloadingEvent(keys=absent, medium=Medium.CPU, removed=True, metadata_only=True)

    def _engine_event(self, event: events.OffloadingEvent) -> OffloadingEvent:
        return engine_event(event, Medium.CPU, is_local=True)

    def get_stats(self) -> Any:
        return self.metrics.changes()

    def config_info(self) -> list[dict[str, Any]]:
        return [dict(zip(self.info_keys, self.info, strict=False))]

    def reset_cache(self, version: str | int | None = None) -> None:
        # vLLM passes no version, and new weights reach its workers without passing the scheduler.
        self._num_resets += 1
        self._manager.reset_cache(version)
        self.device.reset()
        # Replaced only now, so that look-ups are not slower before such a reset.
        self.lookup = self._lookup_and_note  # type: ignore[method-assign]

    def _lookup_and_note(self, key: bytes, req_context: Any) -> LookupResult:
        self.device.note_lookup(key, req_context.get_state(EngineRequest))
        return type(self).lookup(self, key, req_context)

    def shutdown(self) -> None:
        self._manager.shutdown()
