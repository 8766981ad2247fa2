"""The specification of the manager in plain dicts: complete, checked, and not optimized.

It shares no code with the batch operations, so that a bug in those shows as a difference.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from kvcache.block import BlockStateError, BlockStatus
from kvcache.control.manager import OffloadingManager
from kvcache.events import OffloadingEvent
from kvcache.metrics import ManagerStats
from kvcache.policies.base import CachePolicy, RequestUses
from kvcache.request import ReqContext, RequestOffloadingContext, check_next_use
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput
from kvcache.testing.reference import REFERENCE_POLICIES, ReferenceGate


class ReferenceManager(OffloadingManager):
    """The manager's contract in plain dicts, for one pool of slots in host memory.

    Parameters
    ----------
    block_size, num_blocks, cache_policy, enable_events, store_threshold, max_tracker_size, clock
        As for `CPUOffloadingManager`. The policy is a name in `REFERENCE_POLICIES`, or a class.
    """

    medium = CPULoadStoreSpec.medium()

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
        # By key: the only request that has used the block, if it has stored it.
        self.owners: dict[bytes, RequestUses | None] = {}

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
            self._share(keys)
        elif keys and self._count_uses(keys, req_context) < len(keys):
            self.policy.order(keys)

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
        victims = self.policy.evict(num_missing, set(keys)) if num_missing else []
        assert victims is not None, "enough blocks could be evicted"
        self.counts.update(gated_blocks=len(absent) - len(to_store))
        self._count_needed(len(absent), req_context)
        return self._replace(victims, to_store, req_context)

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
        return self._replace(victims, to_store[:num_taken], req_context)

    def _replace(
        self, victims: list[tuple[bytes, BlockStatus]], to_store: list[bytes], req_context: ReqContext | None
    ) -> PrepareStoreOutput:
        for key, _ in victims:
            self._free(key)
        for key in to_store:
            slot = next(self.unused_slots, None)
            block = BlockStatus(self.freed.pop() if slot is None else slot)
            self.blocks[key] = block
            self.in_use.add(key)
            self.policy.insert(key, block)
            self.owners[key] = None if req_context is None else self.requests.named[req_context]
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
        request = self.requests.named.pop(req_context, None)
        in_prefix_order = self._in_prefix_order(req_context, request)
        if request is not None and in_prefix_order:
            self.requests.ended[req_context] = request
        self.requests.hinted.pop(req_context, None)
        self.requests.open.discard(req_context)
        self.requests.old.discard(req_context)
        self.policy.order(in_prefix_order)
        if request is not None and request.next_use == "end":
            self._demote_own(in_prefix_order, request)

    def hint(self, request_or_keys: ReqContext | Iterable[bytes], next_use: str) -> None:
        check_next_use(next_use)
        keys = self._hinted_keys(request_or_keys, next_use)
        if self.policy.reads_clock:
            self._set_time()
        self.policy.hint(keys, next_use)
        if next_use != "end":
            return
        if not isinstance(request_or_keys, ReqContext):
            self.policy.demote(keys)
        elif not self._is_running(request_or_keys) and request_or_keys in self.requests.ended:
            self._demote_own(keys, self.requests.ended[request_or_keys])

    def _demote_own(self, keys: list[bytes], request: RequestUses) -> None:
        self.policy.demote([key for key in keys if self.owners.get(key) is request])

    def _share(self, keys: Iterable[bytes]) -> None:
        self.owners.update(dict.fromkeys(self.owners.keys() & keys))

    def _is_running(self, req_context: ReqContext) -> bool:
        running = self.requests.named.get(req_context)
        return running is not None and len(running.keys) > 0

    def _hinted_keys(self, request_or_keys: ReqContext | Iterable[bytes], next_use: str) -> list[bytes]:
        """Return the keys of a hint in prefix order, and store the hint for later uses by the request."""
        if not isinstance(request_or_keys, ReqContext):
            return checked_keys(request_or_keys)
        running = self.requests.named.get(request_or_keys)
        if not self._is_running(request_or_keys) and request_or_keys in self.requests.ended:
            return self._in_prefix_order(request_or_keys, self.requests.ended[request_or_keys])
        self.requests.open.add(request_or_keys)
        self.requests.hinted[request_or_keys] = next_use
        if running is not None:
            running.next_use = next_use
        return self._in_prefix_order(request_or_keys, running)

    def stats(self) -> ManagerStats:
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
            self._share(unseen)
        return len(unseen)

    def _begin(self, keys: Iterable[bytes], req_context: ReqContext | None) -> list[bytes]:
        """Advance the clock of a policy that reads it: until a request uses a key, and for calls without a request."""
        keys = self._open(keys, req_context)
        if isinstance(keys, Iterable) and not isinstance(keys, bytes | str):
            keys = list(keys)
            if self.policy.reads_clock and not (req_context is not None and self._is_running(req_context)):
                self._set_time()
        return checked_keys(keys)

    def _open(self, keys: Any, req_context: ReqContext | None) -> Any:
        """Note that a request is open, once its context and the type of `keys` are valid."""
        _check_context(req_context)
        if req_context is not None and isinstance(keys, Iterable) and not isinstance(keys, bytes | str):
            self.requests.open.add(req_context)
        return keys

    def _has_used(self, req_context: ReqContext | None) -> bool:
        return req_context is not None and (self._is_running(req_context) or req_context in self.requests.ended)

    def _set_time(self) -> None:
        now_s = self.clock()
        if self.start_s is None:
            self.start_s = now_s
        self.policy.now_ms = round((now_s - self.start_s) * 1e9) // 1_000_000  # type: ignore[attr-defined]

    def _free(self, key: bytes) -> None:
        self.freed.append(self.blocks.pop(key).block_id)
        del self.owners[key]

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
