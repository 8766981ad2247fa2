"""The manager of a host pool with tiers below it: the host pool's own manager, and blocks that move up and down.

Every decision about host memory is the host manager's. This one adds *moves*: a promotion reserves host blocks, has a
tier read into them, and commits them; a store downwards takes references on host blocks, has a tier write them, and
gives the references back. It runs in the scheduler's thread and never waits.

Why nobody waits for ever
-------------------------
`lookup` answers None only for what moves or is about to, never for want of room: a promotion that does not fit is cut
to what fits, and the rest is a miss. One request tries to promote a key once, so two requests that evict each other's
blocks both get an answer; and blocks that a request was told to wait for are held (one reference each) until it loads
them, ends, or its deadline passes. Past the deadline, `lookup` answers from what host memory holds.

What is in flight
-----------------
Host blocks of a job are the tier's until it reports the job, be it long after the deadline: a block being read into
stays reserved, a block being written stays referenced. `reset_cache` waits for the jobs under way: the cache is empty
at once, and takes new blocks when the last old job has ended or is overdue; slots of overdue ones stay reserved.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from kvcache.control.cpu import CPUOffloadingManager, _key_list
from kvcache.control.manager import Keys, OffloadingManager
from kvcache.events import OffloadingEvent
from kvcache.metrics import ManagerStats
from kvcache.options import check_seconds
from kvcache.request import ReqContext, RequestOffloadingContext
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.tiering.controller import TierConfig, TierController, TierControllerStats, TierJob
from kvcache.tiering.pending import PendingRequests
from kvcache.tiering.tier import Tier, TierResult

if TYPE_CHECKING:
    from kvcache.control.observers.what_if import WhatIf
    from kvcache.policies.base import CachePolicy
    from kvcache.specs import BlockIDsLoadStoreSpec


class TieredOffloadingManager(OffloadingManager):
    """Offload to a pool in host memory, and from there to tiers below it.

    Parameters
    ----------
    block_size : int
        Tokens of one offloaded block, >= 1.
    num_blocks : int
        Slots of the host pool, >= 1.
    tiers : sequence of Tier or of (Tier, TierConfig)
        Looked into in this order; each is used by its rule.
    cache_policy : str or type
        Of the host pool: a policy's name, class or ``"package.module:Class"``.
    enable_events : bool
        Whether `take_events` has anything to tell; a tier's events carry its medium.
    deadline_s : float
        How long a request is told to wait at most, from its first None on.
    clock : callable
        Seconds that only grow.
    **host_options
        For the host pool's `CPUOffloadingManager`.

    Raises
    ------
    ValueError
        An argument is out of range or of the wrong type.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        tiers: Sequence[Tier | tuple[Tier, TierConfig]],
        cache_policy: str | type = "lru",
        enable_events: bool = False,
        *,
        deadline_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        **host_options: Any,
    ) -> None:
        check_seconds("deadline_s", deadline_s)
        self._host = CPUOffloadingManager(block_size, num_blocks, cache_policy, enable_events=True, **host_options)
        self._cache = self._host._cache
        self.block_size = block_size
        self.medium = self._host.medium
        self._num_blocks = num_blocks
        self._clock = clock
        pairs = [item if isinstance(item, tuple) else (item, TierConfig()) for item in tiers]
        for pair in pairs:
            if not (len(pair) == 2 and isinstance(pair[0], Tier) and isinstance(pair[1], TierConfig)):
                raise ValueError(f"tiers must be Tier or (Tier, TierConfig), got {pair!r}")
        # Jobs that a dead tier never reports may cost half of the host pool, never all of it.
        max_load_blocks = max(1, num_blocks // (2 * max(1, len(pairs))))
        self._lanes = [TierController(tier, rule, max_load_blocks, num_blocks) for tier, rule in pairs]
        self._use_lanes = [lane for lane in self._lanes if lane.rule.write_policy == "write_through_selective"]
        self._asks = PendingRequests(self._cache, deadline_s)
        self._job_ids = count(1)
        self._promoting: dict[bytes, TierJob] = {}
        # Its first item goes often: in a plain dict that would cost a walk over the gaps of those before.
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._is_fenced = False
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._lookups = 0
        self._looked_up_blocks = 0
        self._hit_blocks = 0
        self._moved_out_blocks = 0

    @property
    def policy(self) -> CachePolicy:
        """The host pool's policy."""
        return self._host.policy

    _policy = policy

    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int | None:
        if isinstance(keys, bytes):
            answer = self._answer([keys], req_context)
            return None if answer is None else answer == 1
        return self._answer(_key_list(keys), req_context)

    def is_coming(self, key: bytes, req_context: ReqContext | None = None) -> bool:
        """Return whether a block that is not ready is known to be held, and on its way to this request."""
        if self._is_fenced:
            return False
        move = self._promoting.get(key)
        if move is not None:
            return not move.is_overdue and self._asks.may_wait(req_context, self._clock())
        return self._asks.wants(req_context, key) or self.policy.get(key) is not None

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        keys = _key_list(keys)
        if self._is_fenced and keys:
            raise KeyError(f"block is not in the cache: {keys[0]!r}")
        spec = self._host.prepare_load(keys, req_context)
        if req_context is not None:
            self._asks.close(req_context)
        self._count_uses(keys, req_context)
        for lane in self._lanes:
            lane.touch(keys, req_context)
        return spec

    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        if self._is_fenced:
            return
        keys = _key_list(keys)
        self._host.touch(keys, req_context)
        self._count_uses(keys, req_context)
        for lane in self._lanes:
            lane.touch(keys, req_context)

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        self._host.complete_load(keys, req_context)

    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        if self._is_fenced:
            return None
        keys = _key_list(keys)
        output = self._host.prepare_store(keys, req_context)
        if output is not None:
            self._take_host_events()
            for lane in self._lanes:
                lane.leave(output.evicted_keys)
            self._count_uses(keys, req_context)
        return output

    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        keys = _key_list(keys)
        if self._promoting:
            # What a tier is reading into is not the engine's to make ready.
            keys = [key for key in keys if key not in self._promoting]
        if self._is_fenced:
            success = False
        self._host.complete_store(keys, req_context, success)
        ready = self._take_host_events()
        if ready:
            self._offer(ready, None)
            self._write_down(self._clock())

    def take_events(self) -> Iterator[OffloadingEvent]:
        if self._events is None:
            return iter(())
        events, self._events = self._events, []
        return iter(events)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._host.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._asks.close(req_context)
        self._host.on_request_finished(req_context)
        if req_context._request_keys:
            req_context._request_keys.pop(self, None)
        for lane in self._lanes:
            lane.finish(req_context)

    def on_schedule_end(self) -> None:
        """Take in what the tiers have done, and send them what the step asked for."""
        now_s = self._clock()
        self._host.on_schedule_end()
        self._take_in(now_s)
        self._asks.expire(now_s)
        if not self._is_fenced:
            self._promote(now_s)
            self._write_down(now_s)

    def reset_cache(self) -> None:
        """Forget everything, in all tiers; new blocks are taken once the last job under way has ended or is overdue."""
        self._asks.clear()
        self._uses.clear()
        for lane in self._lanes:
            lane.backlog.clear()
            if lane.ahead is not None:
                lane.ahead.clear()
            lane.tier.reset()
        self._is_fenced = True
        self._end_fence()

    def shutdown(self) -> None:
        """Shut the tiers down; waits for them, not for ever."""
        for lane in self._lanes:
            lane.tier.shutdown()
        self._host.shutdown()

    def has_pending_work(self) -> bool:
        """Return whether another `on_schedule_end` would move something on."""
        return (
            self._is_fenced
            or bool(self._asks.wanting())
            or any(lane.backlog or any(not move.is_overdue for move in lane.moves.values()) for lane in self._lanes)
        )

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until nothing is under way, as a scheduler must never do; return whether that came in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            self.on_schedule_end()
            if not self.has_pending_work():
                return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.0002)

    def what_if(
        self, policies: str | Iterable[str] | None = None, capacities: Iterable[int] | None = None
    ) -> WhatIf:
        """Estimate for the host pool what other policies and capacities would have hit.

        See `CPUOffloadingManager.what_if`.
        """
        return self._host.what_if(policies, capacities)

    def stats(self) -> ManagerStats:
        host = self._host.stats()
        return replace(
            host,
            lookups=self._lookups,
            looked_up_blocks=self._looked_up_blocks,
            hit_blocks=self._hit_blocks,
            evicted_blocks=host.evicted_blocks + self._moved_out_blocks,
        )

    def tier_stats(self) -> list[TierControllerStats]:
        """Return the statistics of each tier, in order."""
        return [lane.stats() for lane in self._lanes]

    def _answer(self, keys: list[bytes], req_context: ReqContext | None) -> int | None:
        self._lookups += 1
        self._looked_up_blocks += len(keys)
        num_ready = self._cache.match_prefix(keys, self._host._request_keys_of(req_context))
        if self._is_fenced:
            return 0
        now_s = self._clock()
        if num_ready < len(keys) and self._asks.may_wait(req_context, now_s):
            wanted, is_moving = self._find_below(keys, num_ready, req_context, now_s)
            if wanted or is_moving:
                self._asks.wait(req_context, keys[:num_ready], wanted, now_s)
                return None
        if req_context is None:
            self._asks.close(None)
        self._hit_blocks += num_ready
        return num_ready

    def _find_below(
        self, keys: list[bytes], position: int, req_context: ReqContext | None, now_s: float
    ) -> tuple[dict[bytes, TierController], bool]:
        """Follow keys from `position` on through all tiers: what to promote, and whether something moves already."""
        wanted: dict[bytes, TierController] = {}
        is_moving = False
        tried = self._asks.tried(req_context)
        first = position
        while position < len(keys):
            key = keys[position]
            move = self._promoting.get(key)
            if move is not None and not move.is_overdue:
                move.waiters.add(req_context)
                is_moving = True
                position += 1
                continue
            rest = keys[position:]
            num_ready = self._cache.match_prefix(rest, None) if position > first else 0
            if num_ready:
                position += num_ready
                continue
            if move is not None or key in tried:
                break
            num_found: int | None = 0
            for lane in self._lanes:
                num_found = lane.lookup(rest, now_s)
                if num_found != 0:
                    break
            if num_found is None:
                is_moving = True
            if not num_found:
                break
            for key in rest[:num_found]:
                if key in tried or key in self._promoting:
                    break
                wanted[key] = lane
                position += 1
        return wanted, is_moving

    def _promote(self, now_s: float) -> None:
        for ask in self._asks.wanting():
            for lane, keys in ask.by_lane():
                if not lane.may_load(now_s):
                    ask.tries(keys)
                    continue
                batch = keys[: lane.load_room]
                ask.tries(batch)
                absent = []
                for key in batch:
                    move = self._promoting.get(key)
                    if move is None:
                        absent.append(key)
                    else:
                        move.waiters.add(ask.req_context)
                output = self._reserve_leading(absent)
                if output is None or not output.keys_to_store:
                    continue
                stored = output.keys_to_store
                block_ids = _block_ids(output.store_spec)
                move = TierJob(next(self._job_ids), lane, True, stored, block_ids, now_s + lane.rule.deadline_s)
                move.waiters.add(ask.req_context)
                if lane.send(move):
                    self._promoting.update(dict.fromkeys(stored, move))
                else:
                    self._cache.abort(stored, None)

    def _reserve_leading(self, keys: list[bytes]) -> PrepareStoreOutput | None:
        """Make room for as many of the first keys as can be."""
        cache = self._cache
        keys = keys[: self._num_blocks - cache.num_referenced - cache.num_pending]
        while keys:
            output = cache.reserve(keys, None, None)
            if output is not None:
                self._note_left(output.evicted_keys)
                return output
            keys = keys[: len(keys) // 2]
        return None

    def _offer(self, keys: list[bytes], source: TierController | None) -> None:
        """Let the tiers have blocks that became ready, or know of them."""
        for lane in self._lanes:
            if lane is source:
                continue
            if lane.ahead is not None:
                lane.ahead.add(keys)
                continue
            if lane.rule.write_policy == "write_through_selective":
                offered = [key for key in keys if self._uses.get(key, 1) >= lane.rule.num_uses]
            else:
                offered = keys
            # The head of a prefix is written last, and so leaves the tier last.
            lane.offer(reversed(offered))

    def _write_down(self, now_s: float) -> None:
        for lane in self._lanes:
            if lane.ahead is not None and lane.may_store(now_s):
                lane.offer(lane.ahead.take_due(lane.store_room - len(lane.backlog)))
            if lane.backlog and not lane.may_store(now_s):
                lane.drop_backlog()
            while lane.backlog and lane.store_room and lane.may_store(now_s):
                keys = [lane.backlog.popleft() for _ in range(min(lane.store_room, len(lane.backlog)))]
                ready = [key for key in dict.fromkeys(keys) if self._cache.match_prefix([key], None)]
                lane.dropped_blocks += len(keys) - len(ready)
                if not ready:
                    continue
                block_ids = _block_ids(self._cache.pin(ready, None))
                move = TierJob(next(self._job_ids), lane, False, ready, block_ids, now_s + lane.rule.deadline_s)
                if not lane.send(move):
                    self._cache.unpin(ready, None)
                    lane.dropped_blocks += len(ready)
                    lane.drop_backlog()

    def _take_in(self, now_s: float) -> None:
        """Take over what the tiers have done since the last time."""
        for lane in self._lanes:
            for move, result in lane.ended(now_s):
                if move.stand_ins:
                    self._free_stuck(move)
                    continue
                if move.is_load:
                    self._end_promotion(move, result)
                else:
                    self._cache.unpin(move.keys, None)
                if not self._is_fenced:
                    self._note_event(result.removed, lane.tier.medium, True)
                    self._note_event([] if move.is_load else result.done, lane.tier.medium, False)
            lane.note_overdue(now_s)
        self._end_fence()

    def _end_promotion(self, move: TierJob, result: TierResult) -> None:
        for key in move.keys:
            del self._promoting[key]
        arrived = set() if self._is_fenced else set(result.done)
        done = [key for key in move.keys if key in arrived]
        failed = [key for key in move.keys if key not in arrived]
        if failed:
            self._cache.abort(failed, None)
        if done:
            ready = self._cache.commit(done, None)
            self._note_event(ready, self.medium, False)
            self._asks.hold(move.waiters, done)
            self._offer(ready, move.lane)

    def _end_fence(self) -> None:
        """Open the empty cache once no job is under way but those that nobody waits for."""
        if not self._is_fenced:
            return
        stuck = [move for lane in self._lanes for move in lane.moves.values()]
        if not all(move.is_overdue for move in stuck):
            return
        self._is_fenced = False
        self._promoting.clear()
        self._host.reset_cache()
        if not stuck:
            return
        # Every slot is taken once, so that those of the stuck jobs can be kept.
        names = [b"stuck-%d" % i for i in range(self._num_blocks)]
        output = self._cache.reserve(names, None, None)
        assert output is not None
        name_at = dict(zip(_block_ids(output.store_spec), names, strict=True))
        for move in stuck:
            move.stand_ins = [name_at[block_id] for block_id in move.block_ids]
        taken = {name for move in stuck for name in move.stand_ins}
        self._cache.abort([name for name in reversed(names) if name not in taken], None)

    def _free_stuck(self, move: TierJob) -> None:
        # Two tiers may have been writing the same block.
        taken = {name for lane in self._lanes for other in lane.moves.values() for name in other.stand_ins}
        self._cache.abort([name for name in move.stand_ins if name not in taken], None)

    def _take_host_events(self) -> list[bytes]:
        """Take over what the host manager did; return the keys that became ready."""
        ready: list[bytes] = []
        for event in self._host.take_events():
            if not event.removed:
                ready += event.keys
            if self._events is not None:
                self._events.append(event)
        return ready

    def _note_event(self, keys: list[bytes], medium: str, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(list(keys), self.block_size, medium, removed))

    def _note_left(self, keys: list[bytes]) -> None:
        """Note blocks that left host memory without the host manager's knowing."""
        self._moved_out_blocks += len(keys)
        self._note_event(keys, self.medium, True)
        for lane in self._lanes:
            lane.leave(keys)

    def _count_uses(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Count one use a request of each resident key, and offer those that have been used enough."""
        if not self._use_lanes:
            return
        if req_context is not None:
            request_keys_by_pool = req_context._request_keys
            if request_keys_by_pool is None:
                request_keys_by_pool = req_context._request_keys = {}
            seen = request_keys_by_pool.setdefault(self, set())
            keys = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(keys)
        # Counts of blocks that left go first.
        while len(self._uses) > 2 * self._num_blocks:
            self._uses.popitem(last=False)
        is_enough: dict[int, list[bytes]] = {}
        for key in keys:
            num_uses = self._uses[key] = self._uses.get(key, 0) + 1
            is_enough.setdefault(num_uses, []).append(key)
        for lane in self._use_lanes:
            # What is not ready is offered once it is.
            enough = is_enough.get(lane.rule.num_uses, [])
            lane.offer(key for key in reversed(enough) if self._cache.match_prefix([key], None))


def _block_ids(spec: LoadStoreSpec) -> list[int]:
    ids: list[int] = cast("BlockIDsLoadStoreSpec", spec).block_ids.tolist()
    return ids
