"""The specification of retention hints in plain dicts: which blocks are raised, their deadlines, and eviction order.

Written from the rules alone: no heaps, no queues. Every answer comes from a walk over all blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

from kvcache.block import BlockStatus
from kvcache.metrics import ManagerStats
from kvcache.request import ReqContext, Retention
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput
from kvcache.testing.reference_manager import ReferenceManager, checked_keys

ONE_SHOT, NORMAL, HIGHEST = -1, 0, 3


class _AllBut:
    """All keys except a few: the protected keys for an eviction within one priority."""

    def __init__(self, few: Collection[bytes]) -> None:
        self.few = few

    def __contains__(self, key: object) -> bool:
        return key not in self.few


class RetainingReferenceManager(ReferenceManager):
    """The manager's contract with retention hints, for one pool of slots in host memory.

    Parameters
    ----------
    retention_share : float
        Share of the blocks that may be held at a raised priority.
    clock : callable
        Returns seconds of a monotonic clock.
    *arguments, **options
        As for `ReferenceManager`.
    """

    falls_per_call = 256

    def __init__(
        self,
        *arguments: Any,
        retention_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.max_raised = int(retention_share * self.num_blocks)
        self.clock = clock

    def reset_cache(self) -> None:
        super().reset_cache()
        self.priorities: dict[bytes, int] = {}
        # Deadlines of raised blocks (seconds; infinity: no TTL), in the order in which they were set.
        self.ends: dict[bytes, float] = {}

    def touch(self, keys: Iterable[bytes], req_context: ReqContext | None = None) -> None:
        keys = _listed(keys)
        self._let_time_pass()
        super().touch(keys, req_context)
        self._retain(keys, self._retention_of(req_context))

    def prepare_load(self, keys: Iterable[bytes], req_context: ReqContext | None = None) -> CPULoadStoreSpec:
        keys = _listed(keys)
        self._let_time_pass()
        spec = super().prepare_load(keys, req_context)
        if req_context is not None:
            self._retain(keys, self._retention_of(req_context))
        return spec

    def prepare_store(self, keys: Iterable[bytes], req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        keys = _listed(keys)
        self._let_time_pass()
        output = super().prepare_store(keys, req_context)
        if output is None:
            return None
        for key in output.evicted_keys:
            self._forget(key)
        is_one_shot = self._priority_of(req_context) == ONE_SHOT
        self.priorities.update(dict.fromkeys(output.keys_to_store, ONE_SHOT if is_one_shot else NORMAL))
        if req_context is not None:
            self._retain(keys, self._retention_of(req_context))
        return output

    def complete_store(
        self, keys: Iterable[bytes], req_context: ReqContext | bool | None = None, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, success)
        for key in self.priorities.keys() - self.blocks.keys():
            self._forget(key)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._let_time_pass()
        named = self.in_prefix_order(req_context)
        retention = self._retention_of(req_context)
        super().on_request_finished(req_context)
        if retention.priority_class > NORMAL:
            self._retain(named, retention)

    def hint(self, request_or_keys: ReqContext | Iterable[bytes], next_use: str) -> None:
        said = Retention(next_use=next_use)
        keys = self.hinted_keys(request_or_keys, next_use)
        self._let_time_pass()
        end = self._end_of(said)
        for key in reversed(keys):
            if self.priorities.get(key, HIGHEST) > 1:
                continue
            if said.priority_class > NORMAL:
                self._raise(key, said.priority_class, end)
            else:
                self.priorities[key] = said.priority_class
                self.ends.pop(key, None)
        self._crowd_out()

    def stats(self) -> ManagerStats:
        self.counts["retained_blocks"] = len(self.ends)
        return super().stats()

    def _retention_of(self, req_context: ReqContext | None) -> Retention:
        if req_context is None:
            return Retention()
        given = req_context.retention or Retention()
        next_use = self.hinted.get(req_context)
        return given if next_use is None or given.priority_class > 1 else Retention(next_use=next_use)

    def _priority_of(self, req_context: ReqContext | None) -> int:
        return self._retention_of(req_context).priority_class

    def _end_of(self, retention: Retention) -> float:
        return self.clock() + retention.ttl_ns / 1e9 if retention.ttl_ns else float("inf")

    def _retain(self, keys: Iterable[bytes], retention: Retention) -> None:
        end = self._end_of(retention)
        # The head last: blocks with equal deadlines expire in the order in which the deadlines were set.
        for key in reversed(list(dict.fromkeys(keys))):
            self._raise(key, retention.priority_class, end)
        self._crowd_out()

    def _raise(self, key: bytes, priority: int, end: float) -> None:
        if key not in self.priorities or priority < self.priorities[key]:
            return
        if priority > self.priorities[key] or end >= self.ends.get(key, 0):
            self.priorities[key] = priority
            self.ends.pop(key, None)
            if priority > NORMAL:
                self.ends[key] = end

    def _crowd_out(self) -> None:
        while len(self.ends) > self.max_raised:
            self._fall(self._nearest())

    def _let_time_pass(self) -> None:
        num_left = self.falls_per_call
        while self.ends and num_left and self.ends[self._nearest()] <= self.clock():
            self._fall(self._nearest())
            num_left -= 1

    def _nearest(self) -> bytes:
        return min(self.ends, key=self.ends.__getitem__)

    def _fall(self, key: bytes) -> None:
        self.priorities[key] = NORMAL
        del self.ends[key]

    def _forget(self, key: bytes) -> None:
        del self.priorities[key]
        self.ends.pop(key, None)

    def _evict(self, n: int, protected: Container[bytes]) -> list[tuple[bytes, BlockStatus]] | None:
        victims: list[tuple[bytes, BlockStatus]] = []
        for priority in range(ONE_SHOT, HIGHEST + 1):
            may_leave = {
                key
                for key, block in self.blocks.items()
                if self.priorities[key] == priority and block.ref_cnt == 0 and key not in protected
            }
            chosen = self.policy.evict(min(n - len(victims), len(may_leave)), _AllBut(may_leave))
            victims += chosen or []
        return victims


def _listed(keys: Any) -> list[bytes]:
    # Consume an iterator only once. Reject a value that is not an iterable of keys before the clock advances.
    return list(keys) if isinstance(keys, Iterable) and not isinstance(keys, bytes | str) else checked_keys(keys)
