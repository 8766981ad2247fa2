"""The scheduler's half: vLLM's manager interface over ours, one thin method each.

vLLM never calls ``touch``. A use is counted by the first ``prepare_*`` that names a key; every store orders what the
request has named so far, so that a long request's head stays younger than its tail while it runs; and when it ends all
its keys are named once more, so that blocks which the engine found on its own device stay young on the host as well.
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

    Attributes
    ----------
    named : list of bytes
        The keys it has loaded or stored, in that order.
    promoted : set of bytes
        The keys that were not in host memory when it first asked for them: what it loads of them came from a tier.
    """

    __slots__ = ("named", "promoted")

    def __init__(self, req_id: str, kv_transfer_params: dict[str, Any] | None) -> None:
        super().__init__(req_id, kv_transfer_params)
        self.named: list[bytes] = []
        self.promoted: set[bytes] = set()


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
        self.metrics = MetricsSource()
        self._key_positions = release.key_positions
        self.sources: Any = None
        if release.load_source:
            from vllm.v1.metrics.cache_hit_source import CacheHitSource

            self.sources = CacheHitSource

    def tier_descriptions(self) -> list[str]:
        """Return for each tier below host memory what it is and what it holds."""
        return []

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        req_context.set_state(EngineRequest(req_context.req_id, req_context.kv_transfer_params))
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._manager.lookup(key, req_context.get_state(EngineRequest))
        if found:
            return LookupResult.HIT
        if found is None:
            return LookupResult.RETRY
        return LookupResult.MISS if self._manager.policy.get(key) is None else LookupResult.HIT_PENDING

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        return self.sources and self.sources.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> LoadStoreSpec:
        ours, keys = req_context.get_state(EngineRequest), list(keys)
        spec = self._manager.prepare_load(keys, ours)
        ours.named += keys
        return spec

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        self._manager.complete_load(list(keys))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        ours, keys = req_context.get_state(EngineRequest), list(keys)
        output = self._manager.prepare_store(keys, ours)
        if output is not None:
            ours.named += keys
            self._manager.touch(ours.named, ours)
        return output

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        self._manager.complete_store(list(keys), None, success)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._manager.touch(list(keys), req_context.get_state(EngineRequest))

    def on_request_finished(self, req_context: Any) -> None:
        ours = req_context.get_state(EngineRequest)
        if ours is None:
            return
        if self._key_positions:
            positions = req_context._offload_key_positions
            for key, end_token in positions.items():
                ours.set_offload_key_position(key, end_token)
            self._manager.touch(sorted(positions, key=positions.__getitem__), ours)
        self._manager.on_request_finished(ours)

    def on_schedule_end(self, context: Any = None) -> None:
        self._manager.on_schedule_end()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self._manager.take_events():
            yield OffloadingEvent(keys=event.keys, medium=Medium.CPU, removed=event.removed)

    def get_stats(self) -> Any:
        return self.metrics.changes(self._manager.stats())

    def reset_cache(self) -> None:
        self._manager.reset_cache()

    def shutdown(self) -> None:
        if self._what_if_log is not None:
            self._what_if_log.close()
        self._manager.shutdown()
