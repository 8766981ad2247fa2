"""The manager of a host pool with tiers below it: the host pool, and jobs that move blocks up and down.

Every decision about host memory is the pool's. This manager adds *jobs*: a promotion reserves host blocks, has a tier
read into them, and commits them; a store downwards takes references on host blocks, has a tier write them, and gives
the references back. It runs in the scheduler's thread and never waits, and a call does a bounded amount of work: what
16,000 blocks need is spread over several steps.

Why nobody waits for ever
-------------------------
`lookup` returns None only while a requested block is being promoted or queued for promotion, never for want of room: a
promotion that does not fit is cut to what fits, and the rest is a miss. One request tries to promote a key once, so two
requests that evict each other's blocks both get an answer; and blocks that a request waits for are held (one reference
each) until it loads them, ends, or its deadline passes. Past the deadline, `lookup` answers from host memory alone.

What is in flight
-----------------
Host blocks of a job are the tier's until it reports the job, be it long after the deadline: a block being read into
stays reserved, a block being written stays referenced. `reset_cache` drains first: the cache is empty at once, and
takes new blocks when the last old job has ended or is overdue; slots of overdue ones are withheld until they end.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from kvcache.control.manager import Keys, OffloadingManager
from kvcache.control.observers.what_if import estimate, sampler_for
from kvcache.control.pool import BlockPool
from kvcache.core.sampler import Sampler
from kvcache.events import OffloadingEvent
from kvcache.keys import as_key_list
from kvcache.metrics import ManagerStats
from kvcache.options import check_seconds
from kvcache.request import ReqContext, RequestOffloadingContext
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.tiering.controller import (
    MAX_STEP_BLOCKS,
    HostBudget,
    TierConfig,
    TierController,
    TierControllerStats,
    TierJob,
)
from kvcache.tiering.log_limiter import LogLimiter
from kvcache.tiering.pending import PendingRequest, PendingRequests
from kvcache.tiering.tier import Tier, TierResult

if TYPE_CHECKING:
    from kvcache.control.observers.what_if import WhatIf
    from kvcache.policies.base import CachePolicy
    from kvcache.specs import BlockIDsLoadStoreSpec

_LOG = logging.getLogger(__name__)
ABSENT, PENDING, READY, ASK_AGAIN = range(4)
"""What `status` returns."""
_MAX_JOB_BLOCKS = 512
_MAX_TIER_LOOKUPS = 64


class _UsedKeys:
    """The keys whose use was counted for a request, per manager."""

    def __init__(self) -> None:
        self.by_manager: dict[Any, set[bytes]] = {}


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
    what_if, **host_options
        For the host pool, as in `CPUOffloadingManager`.

    Attributes
    ----------
    controllers : list of TierController
        Of the tiers, in order.

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
        what_if: bool | int = False,
        **host_options: Any,
    ) -> None:
        check_seconds("deadline_s", deadline_s)
        self._clock = _SteadyClock(clock)
        self._pool = BlockPool(
            num_blocks,
            cache_policy,
            block_size=block_size,
            enable_events=enable_events,
            clock=self._clock,
            observer=sampler_for(what_if, num_blocks),
            **host_options,
        )
        self.block_size = block_size
        self.medium = self._pool.medium
        self._num_blocks = num_blocks
        pairs = [item if isinstance(item, tuple) else (item, TierConfig()) for item in tiers]
        for pair in pairs:
            if not (len(pair) == 2 and isinstance(pair[0], Tier) and isinstance(pair[1], TierConfig)):
                raise ValueError(f"tiers must be Tier or (Tier, TierConfig), got {pair!r}")
        # Jobs that dead tiers never report may cost three quarters of the host pool, never all of it.
        self._budget = HostBudget(max(1, 3 * num_blocks // 4))
        self.controllers = [
            TierController(tier, config, num_blocks, len(pairs), self._budget) for tier, config in pairs
        ]
        self._selective = [one for one in self.controllers if one.config.write_policy == "write_through_selective"]
        self._pending = PendingRequests(self._pool, deadline_s, MAX_STEP_BLOCKS)
        self._job_ids = count(1)
        self._promoting: dict[bytes, TierJob] = {}
        # Its first item goes often: in a plain dict that would cost a walk over the gaps of those before.
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._is_draining = False

    @property
    def policy(self) -> CachePolicy:
        """The host pool's policy."""
        return self._pool.policy

    _policy = policy

    def lookup(
        self, keys: Any = None, req_context: ReqContext | None = None, *, key: Any = None
    ) -> bool | int | None:
        if keys is None:
            keys = key
        if isinstance(keys, bytes):
            answer = self._answer([keys], req_context)
            return None if answer is None else answer == 1
        return self._answer(as_key_list(keys), req_context)

    def status(self, key: bytes, req_context: ReqContext | None = None) -> int:
        """Look one key up and return its state: ABSENT 0, PENDING 1, READY 2 or ASK_AGAIN 3.

        PENDING: it is known to be held, and being written or promoted for this request. ASK_AGAIN: a tier does not
        know yet.

        Parameters
        ----------
        key : bytes
            A block's key.
        req_context : ReqContext, optional
            The request.

        Returns
        -------
        int
            0 absent, 1 pending, 2 ready, 3 ask again.
        """
        answer = self._answer([key], req_context)
        if answer:
            return READY
        if self.is_coming(key, req_context):
            return PENDING
        return ABSENT if answer == 0 else ASK_AGAIN

    def is_coming(self, key: bytes, req_context: ReqContext | None = None) -> bool:
        """Return whether a block that is not ready is known to be held, and on its way to this request.

        Parameters
        ----------
        key : bytes
            A block's key.
        req_context : ReqContext, optional
            The request.

        Returns
        -------
        bool
            Whether it is being promoted for this request.
        """
        if self._is_draining:
            return False
        job = self._promoting.get(key)
        if job is not None:
            return not job.is_overdue and self._pending.may_wait(req_context, self._clock())
        return self._pending.wants(req_context, key) or self._pool.states([key]) != b"\0"

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        keys = as_key_list(keys)
        if self._is_draining and keys:
            raise KeyError(f"block is not in the cache: {keys[0]!r}")
        spec = self._pool.pin(keys, req_context)
        if req_context is not None:
            self._pending.close(req_context)
        self._note_use(keys, req_context)
        return spec

    def reorder(self, req_context: ReqContext) -> None:
        """Order the keys that a running request used; see `CPUOffloadingManager.reorder`.

        Parameters
        ----------
        req_context : ReqContext
            The request.
        """
        if not self._is_draining:
            self._pool.reorder(req_context)

    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        if self._is_draining:
            return
        keys = as_key_list(keys)
        self._pool.touch(keys, req_context)
        self._note_use(keys, req_context)

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        self._pool.unpin(as_key_list(keys), req_context)

    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        if self._is_draining:
            return None
        keys = as_key_list(keys)
        output = self._pool.reserve(keys, req_context)
        if output is not None:
            self._note_evicted(output.evicted_keys)
            self._count_uses(keys, req_context)
        return output

    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        if isinstance(req_context, bool):
            success, req_context = req_context, None
        keys = as_key_list(keys)
        if self._promoting:
            # What a tier is reading into is not the engine's to make ready.
            keys = [key for key in keys if key not in self._promoting]
        if self._is_draining or not success:
            self._pool.abort(keys, req_context)
            return
        ready = self._pool.commit(keys, req_context)
        if ready:
            self._offer(ready, None)
            self._write_down(self._clock())

    def take_events(self, max_events: int | None = None) -> Iterator[OffloadingEvent]:
        """Yield the events since the last call, or the first `max_events` of them, each once.

        Parameters
        ----------
        max_events : int, optional
            At most so many.

        Returns
        -------
        iterator of OffloadingEvent
            Oldest first.
        """
        return self._pool.take_events(max_events)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        self._pool.end_request(req_context, use_positions=use_positions)
        self._pending.close(req_context)
        used = req_context.get_state(_UsedKeys)
        if used is not None:
            used.by_manager.pop(self, None)
        for controller in self.controllers:
            controller.end_request(req_context)

    def on_schedule_end(self) -> None:
        """Take in what the tiers have done, and send them what the step asked for."""
        now_s = self._clock()
        self._take_in(now_s)
        self._pending.expire(now_s)
        for controller in self.controllers:
            controller.pass_on_uses()
        if not self._is_draining:
            self._promote(now_s)
            self._write_down(now_s)

    def reset_cache(self) -> None:
        """Forget everything, in all tiers; new blocks are taken once the last job under way has ended or is overdue.

        A tier serves nothing until its own reset is done; what it must make durable before this returns is its own
        (see `Tier.reset`).
        """
        now_s = self._clock()
        self._is_draining = True
        if self._pool.events is not None:
            self._pool.events.clear()
        self._pending.forget()
        self._uses = OrderedDict()
        for controller in self.controllers:
            controller.reset(now_s)
        self._end_draining()

    def shutdown(self) -> None:
        """Shut the tiers down; waits for them, not for ever."""
        super().shutdown()
        for controller in self.controllers:
            controller.shutdown()

    def has_pending_work(self) -> bool:
        """Return whether another `on_schedule_end` would move something on.

        Returns
        -------
        bool
            Whether a tier has jobs under way, or a request waits for one.
        """
        return (
            self._is_draining
            or bool(self._pending.wanting())
            or any(
                one.backlog or one.has_reports or any(not job.is_overdue for job in one.jobs.values())
                for one in self.controllers
            )
        )

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until nothing is under way, as a scheduler must never do; return whether that came in time.

        Parameters
        ----------
        timeout_s : float
            How long to wait.

        Returns
        -------
        bool
            Whether everything ended in time.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            self.on_schedule_end()
            if not self.has_pending_work():
                return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.0002)

    def stats(self) -> ManagerStats:
        return self._pool.stats()

    def tier_stats(self) -> list[TierControllerStats]:
        """Return the statistics of each tier, in order.

        Returns
        -------
        list of TierControllerStats
            One for each tier, in order.
        """
        return [controller.stats() for controller in self.controllers]

    def what_if(
        self, policies: str | Iterable[str] | None = None, capacities: Iterable[int] | None = None
    ) -> WhatIf:
        """Estimate for the host pool what other policies and capacities would have hit.

        See `CPUOffloadingManager.what_if`.

        Parameters
        ----------
        policies : str or iterable of str, optional
            Names of policies.
        capacities : iterable of int, optional
            Blocks, ascending.

        Returns
        -------
        WhatIf
            The estimate for the host pool.
        """
        sampler = self._pool.observer if isinstance(self._pool.observer, Sampler) else None
        return estimate(sampler, self._num_blocks, type(self.policy), policies, capacities)

    # ---- look-ups --------------------------------------------------------------------------------------------

    def _answer(self, keys: list[bytes], req_context: ReqContext | None) -> int | None:
        num_ready = self._pool.match_prefix(keys, req_context)
        self._pool.lookups += 1
        self._pool.looked_up_blocks += len(keys)
        if self._is_draining:
            return 0
        if num_ready < len(keys) and self.controllers:
            now_s = self._clock()
            if self._pending.may_wait(req_context, now_s):
                wanted, is_moving = self._find_below(keys, num_ready, req_context, now_s)
                if wanted or is_moving:
                    self._pending.wait(req_context, keys, num_ready, wanted, now_s)
                    return None
        if req_context is None:
            self._pending.close(None)
        self._pool.hit_blocks += num_ready
        return num_ready

    def _find_below(
        self, keys: list[bytes], num_ready: int, req_context: ReqContext | None, now_s: float
    ) -> tuple[dict[bytes, TierController], bool]:
        """Follow keys through all tiers from `num_ready` on, a step's worth: what to promote, and whether any moves.

        Each key is looked at once and each tier asked about the keys that are not in host memory, together, so the
        cost grows with the number of keys, wherever they lie.
        """
        window = keys[num_ready : num_ready + MAX_STEP_BLOCKS]
        tried, promoting = self._pending.tried(req_context), self._promoting
        is_moving = False
        below: list[bytes] = []
        jobs: dict[TierJob, None] = {}
        for key, state in zip(window, self._pool.states(window), strict=True):
            if state == READY:
                continue
            job = promoting.get(key)
            if job is None:
                if key in tried:
                    break
                below.append(key)
            elif job.is_overdue:
                break
            elif below:
                # It moves for this request only if what is before it can be had.
                below.append(key)
            else:
                jobs[job] = None
        wanted: dict[bytes, TierController] = {}
        position = num_lookups = 0
        while position < len(below) and num_lookups < _MAX_TIER_LOOKUPS:
            job = promoting.get(below[position])
            if job is not None:
                jobs[job] = None
                position += 1
                continue
            num_found: int | None = 0
            for controller in self.controllers:
                num_lookups += 1
                num_found = controller.lookup(below[position:], now_s)
                if num_found != 0:
                    break
            if num_found is None:
                is_moving = True
            if not num_found:
                break
            for key in below[position : position + num_found]:
                job = promoting.get(key)
                if job is None:
                    wanted[key] = controller
                else:
                    jobs[job] = None
            position += num_found
        for job in jobs:
            job.waiters.add(req_context)
        return wanted, is_moving or bool(jobs)

    # ---- blocks that move up ---------------------------------------------------------------------------------

    def _promote(self, now_s: float) -> None:
        num_left = MAX_STEP_BLOCKS
        for request in self._pending.wanting():
            if num_left <= 0:
                break
            batch = self._next_batch(request, num_left, now_s)
            num_left -= len(batch)
            absent = []
            for key in batch:
                job = self._promoting.get(key)
                if job is None:
                    absent.append(key)
                else:
                    job.waiters.add(request.req_context)
            output = self._pool.reserve_leading(absent) if absent else None
            if output is None:
                continue
            self._note_evicted(output.evicted_keys)
            block_of = dict(zip(output.keys_to_store, _block_ids(output.store_spec), strict=True))
            by_controller: dict[TierController, list[bytes]] = {}
            for key in block_of:
                by_controller.setdefault(batch[key], []).append(key)
            for controller, keys in by_controller.items():
                for first in range(0, len(keys), _MAX_JOB_BLOCKS):
                    part = keys[first : first + _MAX_JOB_BLOCKS]
                    self._load(controller, part, [block_of[key] for key in part], request.req_context, now_s)

    def _next_batch(self, request: PendingRequest, num_left: int, now_s: float) -> dict[bytes, TierController]:
        """Take the first wanted keys that there is room for; what no tier may be asked for is given up."""
        rooms: dict[TierController, int] = {}
        batch: dict[bytes, TierController] = {}
        given_up: list[bytes] = []
        num_left = min(num_left, self._budget.num_left)
        for key, controller in request.wanted.items():
            room = rooms.get(controller)
            if room is None:
                room = controller.load_room if controller.may_load(now_s) else -1
            if room < 0:
                given_up.append(key)
                rooms[controller] = -1
                continue
            if room == 0 or len(batch) >= num_left:
                break
            rooms[controller] = room - 1
            batch[key] = controller
        request.try_now([*given_up, *batch])
        return batch

    def _load(
        self,
        controller: TierController,
        keys: list[bytes],
        block_ids: list[int],
        req_context: ReqContext | None,
        now_s: float,
    ) -> None:
        deadline_s = now_s + controller.config.deadline_s
        job = TierJob(next(self._job_ids), controller, True, keys, block_ids, deadline_s)
        job.waiters.add(req_context)
        # A tier that is being tried again gets one job only.
        if controller.may_load(now_s) and controller.send(job):
            self._promoting.update(dict.fromkeys(keys, job))
        else:
            self._pool.abort(keys, is_move=True)

    def _end_promotion(self, job: TierJob, result: TierResult) -> None:
        for key in job.keys:
            del self._promoting[key]
        arrived = set() if self._is_draining else set(result.done)
        done = [key for key in job.keys if key in arrived]
        failed = [key for key in job.keys if key not in arrived]
        if failed:
            self._pool.abort(failed, is_move=True)
        if done:
            ready = self._pool.commit(done, is_move=True)
            self._pending.hold(job.waiters, done)
            self._offer(ready, job.controller)

    # ---- blocks that move down -------------------------------------------------------------------------------

    def _offer(self, keys: list[bytes], source: TierController | None) -> None:
        """Let the tiers have blocks that became ready, or know of them."""
        for controller in self.controllers:
            if controller is source:
                continue
            if controller.dirty is not None:
                controller.dirty.add(keys)
                continue
            if controller.config.write_policy == "write_through_selective":
                offered = [key for key in keys if self._uses.get(key, 1) >= controller.config.num_uses]
            else:
                offered = keys
            # The head of a prefix is written last, and so leaves the tier last.
            controller.offer(reversed(offered))

    def _write_down(self, now_s: float) -> None:
        num_left = MAX_STEP_BLOCKS
        for controller in self.controllers:
            if controller.dirty is not None and controller.may_store(now_s):
                controller.offer(controller.dirty.take_due(controller.store_room - len(controller.backlog)))
            if controller.backlog and not controller.may_store(now_s):
                controller.drop_backlog()
            while (
                controller.backlog
                and (room := min(controller.store_room, num_left, _MAX_JOB_BLOCKS)) > 0
                and controller.may_store(now_s)
            ):
                keys = [controller.backlog.popleft() for _ in range(min(room, len(controller.backlog)))]
                num_left -= len(keys)
                if not self._store_batch(controller, keys, now_s):
                    break

    def _store_batch(self, controller: TierController, keys: list[bytes], now_s: float) -> bool:
        keys = list(dict.fromkeys(keys))
        ready = [key for key, state in zip(keys, self._pool.states(keys), strict=True) if state == READY]
        controller.dropped_blocks += len(keys) - len(ready)
        if not ready:
            return True
        block_ids = _block_ids(self._pool.pin(ready, is_move=True))
        job = TierJob(next(self._job_ids), controller, False, ready, block_ids, now_s + controller.config.deadline_s)
        if controller.send(job):
            return True
        self._pool.unpin(ready)
        controller.dropped_blocks += len(ready)
        controller.drop_backlog()
        return False

    # ---- what tiers report -----------------------------------------------------------------------------------

    def _take_in(self, now_s: float) -> None:
        """Take over what the tiers have done since the last time, a step's worth."""
        max_blocks = max(1, MAX_STEP_BLOCKS // max(1, len(self.controllers)))
        for controller in self.controllers:
            for job, result in controller.get_finished(max_blocks, now_s):
                if job is not None and job.is_withheld:
                    self._give_back(job)
                    continue
                if job is not None:
                    if job.is_load:
                        self._end_promotion(job, result)
                    else:
                        self._pool.unpin(job.keys)
                if not self._is_draining:
                    self._add_event(result.removed, controller.medium, True)
                    if job is None or not job.is_load:
                        self._add_event(result.done, controller.medium, False)
            controller.give_up_overdue(now_s)
            controller.retry_reset(now_s)
        self._end_draining()

    def _end_draining(self) -> None:
        """Open the empty cache once no job is under way but those that nobody waits for."""
        if not self._is_draining:
            return
        stuck = [job for controller in self.controllers for job in controller.jobs.values()]
        if not all(job.is_overdue for job in stuck):
            return
        self._promoting = {}
        self._pool.reset()
        for job in stuck:
            job.is_withheld = True
        # Two tiers may be writing the same block.
        self._pool.withhold(sorted({block_id for job in stuck for block_id in job.block_ids}))
        self._is_draining = False

    def _give_back(self, job: TierJob) -> None:
        others = [other for one in self.controllers for other in one.jobs.values() if other.is_withheld]
        taken = {block_id for other in others for block_id in other.block_ids}
        self._pool.give_back([block_id for block_id in job.block_ids if block_id not in taken])

    def _add_event(self, keys: list[bytes], medium: str, removed: bool) -> None:
        if self._pool.events is not None:
            self._pool.events.add(keys, medium, removed)

    def _note_evicted(self, keys: list[bytes]) -> None:
        if keys:
            for controller in self.controllers:
                controller.remove(keys)

    # ---- uses ------------------------------------------------------------------------------------------------

    def _note_use(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        self._count_uses(keys, req_context)
        for controller in self.controllers:
            controller.touch(keys, req_context)

    def _count_uses(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Count one use a request of each resident key, and offer those that have been used enough."""
        if not self._selective:
            return
        if req_context is not None:
            used = req_context.get_state(_UsedKeys)
            if used is None:
                used = _UsedKeys()
                req_context.set_state(used)
            seen = used.by_manager.setdefault(self, set())
            keys = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(keys)
        # Counts of blocks that left go first.
        while len(self._uses) > 2 * self._num_blocks:
            self._uses.popitem(last=False)
        by_uses: dict[int, list[bytes]] = {}
        for key in keys:
            num_uses = self._uses[key] = self._uses.get(key, 0) + 1
            by_uses.setdefault(num_uses, []).append(key)
        for controller in self._selective:
            # What is not ready is offered once it is.
            enough = by_uses.get(controller.config.num_uses, [])
            states = self._pool.states(enough)
            ready = [key for key, state in zip(enough, states, strict=True) if state == READY]
            controller.offer(reversed(ready))


class _SteadyClock:
    """A clock that never raises, never goes back and never stands still for ever, over one that may."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = -math.inf
        self._last_true_s = time.monotonic()
        self._warnings = LogLimiter(_LOG)

    def __call__(self) -> float:
        try:
            now_s = float(self._clock())
            if not math.isfinite(now_s):
                raise ValueError(f"{now_s!r} s")
        except Exception as error:
            self._warnings.warn("clock", "the clock failed, deadlines go by the system's: %s: %s", type(error), error)
            passed_s = time.monotonic() - self._last_true_s
            return passed_s if self._last_s == -math.inf else self._last_s + passed_s
        self._last_s = max(self._last_s, now_s)
        self._last_true_s = time.monotonic()
        return self._last_s


def _block_ids(spec: LoadStoreSpec) -> list[int]:
    ids: list[int] = cast("BlockIDsLoadStoreSpec", spec).block_ids.tolist()
    return ids
