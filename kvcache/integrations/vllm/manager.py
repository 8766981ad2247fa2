"""The scheduler's half: vLLM's manager interface over ours, one thin method each.

vLLM never calls ``touch``. A use is counted by the first ``prepare_*`` that names a key; every store orders what the
request has used so far, so that a long request's head stays younger than its tail while it runs; and when it ends all
keys of its prompt are used and ordered, so that blocks which the engine found on its own device stay young on the host
as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    RequestOffloadingContext,
)

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.integrations.vllm.metrics import MetricsSource
from kvcache.integrations.vllm.releases import Release
from kvcache.integrations.vllm.what_if_log import WhatIfLog
from kvcache.request import ReqContext
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.tiering.manager import TieredOffloadingManager

RESULTS = (LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.HIT, LookupResult.RETRY)
"""By the state of a key that a manager's `status` returns: absent, being written or promoted, ready, ask again."""


class EngineRequest(ReqContext):
    """A request of the engine.

    Parameters
    ----------
    req_context : vllm.v1.kv_offload.base.ReqContext
        The engine's context of it.
    has_positions : bool
        Whether that knows where each key's block ends; it learns so while the request runs.

    Attributes
    ----------
    has_ended : bool
        Whether the engine has said so; its last stores may still be under way.
    transfers : list of (int, list of bytes)
        What is being loaded or stored for it now: the resets before, and the keys in the order of the prompt.
    promoted : set of bytes
        The keys that were not in host memory when it first asked for them: what it loads of them came from a tier.
    """

    __slots__ = ("has_ended", "promoted", "transfers")

    def __init__(self, req_context: Any, has_positions: bool) -> None:
        super().__init__(req_context.req_id, req_context.kv_transfer_params)
        self.has_ended = False
        self.transfers: list[tuple[int, list[bytes]]] = []
        self.promoted: set[bytes] = set()
        if has_positions:
            self.set_offload_key_positions(req_context._offload_key_positions)

    def begin_transfer(self, keys: list[bytes], num_resets: int) -> None:
        """Remember the order of keys that are about to be moved, and after how many resets."""
        if keys:
            self.transfers.append((num_resets, keys))

    def end_transfer(self, keys: Collection[bytes], num_resets: int) -> Collection[bytes]:
        """Return the keys of a transfer that has ended in the order of the prompt; the engine hands back a set.

        In that order blocks come back to where they stand in their queue without a search. Transfers of one request
        that are under way at a time have no key in common, so that one key tells which it is; none from before a
        reset is reported.
        """
        for i, (resets, moved) in enumerate(self.transfers):
            if resets == num_resets and len(moved) == len(keys) and moved[0] in keys:
                del self.transfers[i]
                return moved
        return keys


class KVCacheOffloadingManager(OffloadingManager):
    """Answer vLLM's scheduler out of a `CPUOffloadingManager`.

    Parameters
    ----------
    manager : CPUOffloadingManager or TieredOffloadingManager
        Ours; nobody else drives it.
    release : Release
        What the engine has and has not.
    what_if_log : WhatIfLog, optional
        Closed at `shutdown`.
    """

    def __init__(
        self,
        manager: CPUOffloadingManager | TieredOffloadingManager,
        release: Release,
        what_if_log: WhatIfLog | None = None,
    ) -> None:
        self._manager = manager
        self._what_if_log = what_if_log
        self._num_resets = 0
        self.metrics = MetricsSource(manager)
        self._key_positions = release.key_positions
        self.sources: Any = None
        if release.load_source:
            from vllm.v1.metrics.cache_hit_source import CacheHitSource

            self.sources = CacheHitSource

    def tier_descriptions(self) -> list[str]:
        """Return for each tier below host memory what it is and what it holds."""
        return []

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        req_context.set_state(EngineRequest(req_context, self._key_positions))
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        # Not a method kept from the start: a recorder or a timer may be put around it later.
        return RESULTS[self._manager.status(key)]

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        return self.sources and self.sources.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> LoadStoreSpec:
        ours, keys = req_context.get_state(EngineRequest), list(keys)
        spec = self._manager.prepare_load(keys, ours)
        ours.begin_transfer(keys, self._num_resets)
        return spec

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        ours = req_context.get_state(EngineRequest)
        self._manager.complete_load(ours.end_transfer(keys, self._num_resets), None if ours.has_ended else ours)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        ours = req_context.get_state(EngineRequest)
        output = self._manager.prepare_store(keys, ours)
        if output is not None:
            ours.begin_transfer(output.keys_to_store, self._num_resets)
            self._manager.reorder(ours)
        return output

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        ours = req_context.get_state(EngineRequest)
        self._manager.complete_store(
            ours.end_transfer(keys, self._num_resets), None if ours.has_ended else ours, success
        )

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._manager.touch(keys, req_context.get_state(EngineRequest))

    def on_request_finished(self, req_context: Any) -> None:
        ours = req_context.get_state(EngineRequest)
        if ours is not None:
            ours.has_ended = True
            self._manager.on_request_finished(ours, use_positions=self._key_positions)

    def on_schedule_end(self, context: Any = None) -> None:
        self._manager.on_schedule_end()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self._manager.take_events():
            yield OffloadingEvent(keys=event.keys, medium=Medium.CPU, removed=event.removed)

    def get_stats(self) -> Any:
        return self.metrics.changes()

    def reset_cache(self) -> None:
        self._num_resets += 1
        self._manager.reset_cache()

    def shutdown(self) -> None:
        if self._what_if_log is not None:
            self._what_if_log.close()
        self._manager.shutdown()
