"""The specification of the manager in plain dicts: complete, checked, and not optimized.

It shares no code with the batch operations, so that a bug in those shows as a difference.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from kvcache.block import BlockStateError, BlockStatus
from kvcache.control.manager import OffloadingManager
from kvcache.events import OffloadingEvent
from kvcache.metrics import ManagerStats
from kvcache.policies.base import CachePolicy, RequestUses
from kvcache.request import ReqContext, RequestOffloadingContext, Retention, check_next_use
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput
from kvcache.testing.reference import REFERENCE_POLICIES, ReferenceGate

ONE_SHOT, NORMAL, HIGHEST = -1, 0, 3


class ReferenceManager(OffloadingManager):
    """The manager's contract in plain dicts, for one pool of slots in host memory.

    Parameters
    ----------
    block_size, num_blocks, cache_policy, enable_events, store_threshold, max_tracker_size, clock
        As for `CPUOffloadingManager`. The policy is a name in `REFERENCE_POLICIES`, or a class.
    """

    medium = CPULoadStoreSpec.medium()
    falls_per_call = 256

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        cache_policy: str | type[CachePolicy] = "lru",
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        policy_class = REFERENCE_POLICIES[cache_policy] if isinstance(cache_policy, str) else cache_policy
        self.policy = policy_class(num_blocks)
        self.make_gate = partial(ReferenceGate, store_threshold, max_tracker_size)
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self.clock = clock
        self.retained = Retained(clock, None)
        self.start_s: float | None = None
        self.counts: Counter[str] = Counter()
        self.requests = Requests()
        self.refused: WeakKeyDictionary[ReqContext, int] = WeakKeyDictionary()
        self.reset_cache()

    def reset_cache(self, version: str | int | None = None) -> None:
        self.requests.named.clear()
        self.requests.ended.clear()
        self.requests.old |= self.requests.open
        policy = type(self.policy)(self.num_blocks)
        if policy.reads_clock:
            policy.now_ms = self.policy.now_ms  # type: ignore[attr-defined]
        self.policy = policy
        if self.events is not None:
            self.events.clear()
        self.gate = self.make_gate()
        self.blocks: dict[bytes, BlockStatus] = {}
        self.in_use: set[bytes] = set()  # being written or read: not evictable
        self.unused_slots = iter(range(self.num_blocks))
        self.freed: list[int] = []
        self.retained = Retained(self.clock, self.retained.max_raised)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.requests.open.add(req_context)
        return super().on_new_request(req_context)

    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int:
        self._open(keys if not isinstance(keys, bytes) else [keys], req_context)
        listed = [keys] if isinstance(keys, bytes) else checked_keys(keys)
        num_ready = 0
        for key in checked_keys(listed):
            if key not in self.blocks or not self.blocks[key].is_ready:
                break
            num_ready += 1
        self.counts.update(lookups=1, looked_up_blocks=len(listed), hit_blocks=num_ready)
        return num_ready == 1 if isinstance(keys, bytes) else num_ready

    def touch(self, keys: Iterable[bytes], req_context: ReqContext | None = None) -> None:
        keys = self._begin(keys, req_context)
        if keys and req_context is None:
            self.policy.touch(keys)
        elif keys and self._count_uses(keys, req_context) < len(keys):
            self.policy.order(keys)
        self._retain(keys, self._retention_of(req_context))

    def prepare_load(self, keys: Iterable[bytes], req_context: ReqContext | None = None) -> CPULoadStoreSpec:
        keys = self._begin(keys, req_context)
        for key in keys:
            if key not in self.blocks:
                raise KeyError(f"block is not in the cache: {key!r}")
            if not self.blocks[key].is_ready:
                raise BlockStateError(f"block is not ready: {key!r}")
        self._count_uses(keys, req_context)
        for key in keys:
            self.blocks[key].ref_cnt += 1
            self.in_use.add(key)
        self.counts.update(loaded_blocks=len(keys), needed_blocks=len(keys))
        if req_context is not None:
            self._retain(keys, self._retention_of(req_context))
        return self._spec(keys)

    def complete_load(self, keys: Iterable[bytes], req_context: ReqContext | None = None) -> None:
        keys = checked_keys(self._open(keys, req_context))
        num_released: Counter[bytes] = Counter()
        for key in keys:
            num_released[key] += 1
            if key not in self.blocks:
                raise KeyError(f"block is not in the cache: {key!r}")
            if self.blocks[key].ref_cnt < num_released[key]:
                raise BlockStateError(f"block has fewer references than are given back: {key!r}")
        for key in keys:
            self.blocks[key].ref_cnt -= 1
            if self.blocks[key].ref_cnt == 0:
                self.in_use.remove(key)

    def prepare_store(self, keys: Iterable[bytes], req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        keys = self._begin(keys, req_context)
        keys = list(dict.fromkeys(keys))
        absent = [key for key in keys if key not in self.blocks]
        admitted = [] if req_context in self.requests.old else self.gate.admitted(keys)
        to_store = [key for key in absent if key in admitted]
        num_idle_named = sum(key in self.blocks and key not in self.in_use for key in keys)
        num_evictable = len(self.blocks) - len(self.in_use) - num_idle_named
        if self.policy.declines:
            self.counts.update(needed_blocks=len(absent))
            return self._store_leading(keys, absent, to_store, req_context)
        num_missing = max(0, len(to_store) - self._num_free())
        if num_missing > num_evictable:
            self.counts.update(rejected_stores=1)
            self._count_needed(len(absent), req_context, is_refused=True)
            return None

        # Uses count before victims are selected: the policy adapts to them.
        self._count_uses(keys, req_context)
        victims = self._evict(num_missing, set(keys)) if num_missing else []
        assert victims is not None, "enough blocks could be evicted"
        self.counts.update(gated_blocks=len(absent) - len(to_store))
        self._count_needed(len(absent), req_context)
        output = self._replace(victims, to_store)
        retention = self._retention_of(req_context)
        self.retained.priorities.update(dict.fromkeys(to_store, min(retention.priority_class, NORMAL)))
        if req_context is not None:
            self._retain(keys, retention)
        return output

    def _count_needed(self, num_absent: int, req_context: ReqContext | None, is_refused: bool = False) -> None:
        """Count absent blocks as needed. Those of a refused store that the request offers again count once."""
        num_counted = 0 if req_context is None else self.refused.get(req_context, 0)
        self.counts.update(needed_blocks=max(0, num_absent - num_counted))
        if req_context is not None:
            num_left = max(num_absent, num_counted) if is_refused else max(0, num_counted - num_absent)
            self.refused[req_context] = num_left

    def _store_leading(
        self, keys: list[bytes], absent: list[bytes], to_store: list[bytes], req_context: ReqContext | None
    ) -> PrepareStoreOutput:
        self._count_uses(keys, req_context)
        request = None if req_context is None else self.requests.named.get(req_context)
        num_taken, victims = self.policy.make_room(to_store, self._num_free(), keys, request)
        assert len(victims) == max(0, num_taken - self._num_free()), "exactly as many leave as are needed"
        self.counts.update(gated_blocks=len(absent) - num_taken, declined_blocks=len(to_store) - num_taken)
        return self._replace(victims, to_store[:num_taken])

    def _replace(self, victims: list[tuple[bytes, BlockStatus]], to_store: list[bytes]) -> PrepareStoreOutput:
        for key, _ in victims:
            self._free(key)
        for key in to_store:
            slot = next(self.unused_slots, None)
            block = BlockStatus(self.freed.pop() if slot is None else slot)
            self.blocks[key] = block
            self.in_use.add(key)
            self.policy.insert(key, block)
        evicted = [key for key, _ in victims]
        self.counts.update(evicted_blocks=len(evicted))
        self._tell(evicted, removed=True)
        return PrepareStoreOutput(to_store, self._spec(to_store), evicted)

    def complete_store(
        self, keys: Iterable[bytes], req_context: ReqContext | bool | None = None, success: bool = True
    ) -> None:
        if isinstance(req_context, bool):
            success, req_context = req_context, None
        _check_context(req_context)
        if req_context in self.requests.old:
            checked_keys(keys)
            return
        if success or not self._has_used(req_context):
            self._open(keys, req_context)
        offered = dict.fromkeys(checked_keys(keys))
        written = [key for key in offered if key in self.blocks and not self.blocks[key].is_ready]
        self.in_use.difference_update(written)
        if success:
            for key in written:
                self.blocks[key].ref_cnt = 0
            self.counts.update(stored_blocks=len(written))
            self._tell(written, removed=False)
        else:
            for key in written:
                self.policy.remove(key)
                self._free(key)
            self.counts.update(failed_blocks=len(written))

    def take_events(self) -> Iterator[OffloadingEvent]:
        if self.events is None:
            return iter(())
        events, self.events = self.events, []
        return iter(events)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.retained.let_fall(self.falls_per_call)
        request = self.requests.named.pop(req_context, None)
        in_prefix_order = self._in_prefix_order(req_context, request)
        retention = self._retention_of(req_context)
        if request is not None and in_prefix_order:
            self.requests.ended[req_context] = request
        self.requests.hinted.pop(req_context, None)
        self.requests.open.discard(req_context)
        self.requests.old.discard(req_context)
        self.policy.order(in_prefix_order)
        if retention.priority_class > NORMAL:
            self._retain(in_prefix_order, retention)

    def hint(self, request_or_keys: ReqContext | Iterable[bytes], next_use: str) -> None:
        check_next_use(next_use)
        keys = self._hinted_keys(request_or_keys, next_use)
        self.retained.let_fall(self.falls_per_call)
        if self.policy.reads_clock:
            self._set_time()
        self.policy.hint(keys, next_use)
        if self.retained.max_raised is None:
            return
        said = Retention(next_use=next_use)
        for key in reversed(keys):
            if self.retained.priorities.get(key, HIGHEST) > 1:
                continue
            if said.priority_class > NORMAL:
                self.retained.raise_to(key, said.priority_class, self.retained.end_of(said))
            else:
                self.retained.priorities[key] = said.priority_class
                self.retained.ends.pop(key, None)
        self.retained.crowd_out()

    def _hinted_keys(self, request_or_keys: ReqContext | Iterable[bytes], next_use: str) -> list[bytes]:
        """Return the keys of a hint in prefix order, and store the hint for later uses by the request."""
        if not isinstance(request_or_keys, ReqContext):
            return checked_keys(request_or_keys)
        running = self.requests.named.get(request_or_keys)
        if (running is None or not running.keys) and request_or_keys in self.requests.ended:
            return self._in_prefix_order(request_or_keys, self.requests.ended[request_or_keys])
        self.requests.open.add(request_or_keys)
        self.requests.hinted[request_or_keys] = next_use
        if running is not None:
            running.next_use = next_use
        return self._in_prefix_order(request_or_keys, running)

    def stats(self) -> ManagerStats:
        self.counts["retained_blocks"] = len(self.retained.ends)
        num_pending = sum(not self.blocks[key].is_ready for key in self.in_use)
        counters = {
            field.name: self.counts[field.name] for field in fields(ManagerStats) if not field.name.startswith("num_")
        }
        return ManagerStats(
            num_blocks=self.num_blocks,
            num_free=self._num_free(),
            num_referenced=len(self.in_use) - num_pending,
            num_pending=num_pending,
            **counters,
        )

    def _count_uses(self, keys: Iterable[bytes], req_context: ReqContext | None) -> int:
        if req_context is None:
            return 0
        retention = req_context.retention
        next_use = self.requests.hinted.get(req_context, None if retention is None else retention.next_use)
        named = self.requests.named.setdefault(req_context, RequestUses(next_use))
        named.positions = req_context.positions
        named.read_positions()
        unseen = [key for key in dict.fromkeys(keys) if key not in named.keys]
        if unseen:
            named.add(unseen)
            self.policy.count_uses(unseen, named)
        return len(unseen)

    def _begin(self, keys: Iterable[bytes], req_context: ReqContext | None) -> list[bytes]:
        """Advance the clock of a policy that reads it: until a request uses a key, and for calls without a request."""
        keys = self._open(keys, req_context)
        if isinstance(keys, Iterable) and not isinstance(keys, bytes | str):
            keys = list(keys)
            self.retained.let_fall(self.falls_per_call)
            named = None if req_context is None else self.requests.named.get(req_context)
            is_begun = named is not None and len(named.keys) > 0
            if self.policy.reads_clock and not is_begun:
                self._set_time()
        return checked_keys(keys)

    def _open(self, keys: Any, req_context: ReqContext | None) -> Any:
        """Note that a request is open, once its context and the type of `keys` are valid."""
        _check_context(req_context)
        if req_context is not None and isinstance(keys, Iterable) and not isinstance(keys, bytes | str):
            self.requests.open.add(req_context)
        return keys

    def _has_used(self, req_context: ReqContext | None) -> bool:
        running = None if req_context is None else self.requests.named.get(req_context)
        return bool(running is not None and running.keys) or req_context in self.requests.ended

    def _set_time(self) -> None:
        now_s = self.clock()
        if self.start_s is None:
            self.start_s = now_s
        self.policy.now_ms = round((now_s - self.start_s) * 1e9) // 1_000_000  # type: ignore[attr-defined]

    def _retention_of(self, req_context: ReqContext | None) -> Retention:
        if req_context is None or self.retained.max_raised is None:
            return Retention()
        retention = req_context.retention or Retention()
        next_use = self.requests.hinted.get(req_context)
        return retention if next_use is None or retention.priority_class > 1 else Retention(next_use=next_use)

    def _retain(self, keys: Iterable[bytes], retention: Retention) -> None:
        end = self.retained.end_of(retention)
        # The head last: blocks with equal deadlines expire in the order in which the deadlines were set.
        for key in reversed(list(dict.fromkeys(keys))):
            self.retained.raise_to(key, retention.priority_class, end)
        self.retained.crowd_out()

    def _free(self, key: bytes) -> None:
        self.freed.append(self.blocks.pop(key).block_id)
        self.retained.priorities.pop(key, None)
        self.retained.ends.pop(key, None)

    def _evict(self, n: int, protected: Container[bytes]) -> list[tuple[bytes, BlockStatus]] | None:
        if self.retained.max_raised is None:
            return self.policy.evict(n, protected)
        victims: list[tuple[bytes, BlockStatus]] = []
        for priority in range(ONE_SHOT, HIGHEST + 1):
            others = {
                key
                for key, block in self.blocks.items()
                if self.retained.priorities[key] != priority or block.ref_cnt or key in protected
            }
            num_evictable = len(self.blocks) - len(others)
            victims += self.policy.evict(min(n - len(victims), num_evictable), others) or []
        return victims

    def _in_prefix_order(self, req_context: ReqContext, request: RequestUses | None) -> list[bytes]:
        """Return the keys that a request has named, by position in the prompt, or as first seen."""
        named = [] if request is None else list(request.keys)
        positions: list[int] = []
        for key in named:
            position = req_context.get_offload_key_position(key)
            if position is None:
                position = positions[-1] if positions else -1
            positions.append(position)
        return [key for _, key in sorted(zip(positions, named, strict=True), key=lambda pair: pair[0])]

    def _num_free(self) -> int:
        return self.num_blocks - len(self.blocks)

    def _spec(self, keys: Iterable[bytes]) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([self.blocks[key].block_id for key in keys])

    def _tell(self, keys: list[bytes], removed: bool) -> None:
        if self.events is not None and keys:
            self.events.append(OffloadingEvent(keys, self.block_size, self.medium, removed))


class RetainingReferenceManager(ReferenceManager):
    """The manager's contract with retention hints, for one pool of slots in host memory.

    Parameters
    ----------
    retention_share : float
        Share of the blocks that may be held at a raised priority.
    *arguments, **options
        As for `ReferenceManager`.
    """

    def __init__(self, *arguments: Any, retention_share: float = 0.5, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.retained.max_raised = int(retention_share * self.num_blocks)


class Requests:
    """What requests have said and used."""

    def __init__(self) -> None:
        # Those that were announced or made a call, and those of them that are older than the last reset.
        self.open: WeakSet[ReqContext] = WeakSet()
        self.old: WeakSet[ReqContext] = WeakSet()
        # Keys that each request has named, in the order first seen: counted once, ordered at the request's end.
        self.named: WeakKeyDictionary[ReqContext, RequestUses] = WeakKeyDictionary()
        self.ended: WeakKeyDictionary[ReqContext, RequestUses] = WeakKeyDictionary()
        # Hints of next use that a request received after it began.
        self.hinted: WeakKeyDictionary[ReqContext, str] = WeakKeyDictionary()


class Retained:
    """Priorities of blocks, and when raised ones end. With `max_raised` None, retention hints are ignored."""

    def __init__(self, clock: Callable[[], float], max_raised: int | None) -> None:
        self.clock = clock
        self.max_raised = max_raised
        self.priorities: dict[bytes, int] = {}
        # Deadlines of raised blocks (seconds; infinity: no TTL), in the order in which they were set.
        self.ends: dict[bytes, float] = {}

    def end_of(self, retention: Retention) -> float:
        return self.clock() + retention.ttl_ns / 1e9 if retention.ttl_ns else float("inf")

    def raise_to(self, key: bytes, priority: int, end: float) -> None:
        if key not in self.priorities or priority < self.priorities[key]:
            return
        if priority > self.priorities[key] or end >= self.ends.get(key, 0):
            self.priorities[key] = priority
            self.ends.pop(key, None)
            if priority > NORMAL:
                self.ends[key] = end

    def crowd_out(self) -> None:
        while len(self.ends) > (self.max_raised or 0):
            self._fall(self._nearest())

    def let_fall(self, limit: int) -> None:
        while self.ends and limit and self.ends[self._nearest()] <= self.clock():
            self._fall(self._nearest())
            limit -= 1

    def _nearest(self) -> bytes:
        return min(self.ends, key=self.ends.__getitem__)

    def _fall(self, key: bytes) -> None:
        self.priorities[key] = NORMAL
        del self.ends[key]


def checked_keys(keys: Iterable[bytes]) -> list[bytes]:
    if isinstance(keys, bytes | str) or not isinstance(keys, Iterable):
        raise ValueError(f"keys must be an iterable of keys, got {keys!r}")
    listed = list(keys)
    for key in listed:
        if type(key) is not bytes or not key:
            raise ValueError(f"key must be exact, non-empty bytes, got {key!r}")
    return listed


def _check_context(req_context: object) -> None:
    if req_context is not None and not isinstance(req_context, ReqContext):
        raise ValueError(f"req_context must be a ReqContext or None, got {req_context!r}")
