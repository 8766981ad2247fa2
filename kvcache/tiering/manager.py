"""The manager of a host pool with tiers below it: the host pool, and jobs that move blocks up and down.

A promotion reserves host blocks, has a tier read into them, and commits them. A store downwards references host blocks,
has a tier write them, and releases them. Each call is atomic, never waits for I/O, and does a bounded amount of work.

Why no request waits for ever
-----------------------------
`lookup` returns None only while a requested block is being promoted or queued for promotion. A promotion that does not
fit is cut, and the rest is a miss. One request tries to promote a key once, so two requests that evict each other's
blocks both get an answer. Blocks that a request waits for are held (one reference each) until it loads them, ends, or
its deadline passes. Past the deadline, `lookup` answers from host memory alone.

Jobs in flight
--------------
Host blocks of a job are the tier's until it reports the job, even after the deadline. `reset_cache` drains first: the
cache is empty at once, and takes new blocks when the last old job has ended or is overdue. Slots of overdue jobs are
withheld until the tier reports them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from kvcache.control.arbiter import LoadArbiter
from kvcache.control.atomic import Guard, atomic
from kvcache.control.manager import Keys, OffloadingManager
from kvcache.control.observers.what_if import estimate, sampler_for
from kvcache.control.pool import BlockPool
from kvcache.events import FinishedJob, JobLog, OffloadingEvent
from kvcache.keys import as_key_list
from kvcache.metrics import HistogramData, ManagerStats, Part, gauge, histogram
from kvcache.options import check_seconds
from kvcache.request import ReqContext, check_next_use
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.tiering.arbitration import Arbitration, Source, Sources
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


@dataclass(frozen=True, slots=True)
class PromotionStats:
    """The requests that wait for blocks from tiers."""

    waiting_requests: int = gauge("requests", "Requests that wait for blocks from tiers, or have lately.")
    wait_seconds: HistogramData | None = histogram(
        "seconds", "Time from a request's first wait for a tier to its load, its end or its deadline."
    )


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
        Whether events are recorded for `take_events`; a tier's events carry its medium.
    deadline_s : float
        How long a request waits at most, from its first None on.
    clock : callable
        Seconds that only grow.
    prefill_tokens_per_s : float or mapping of int to float, optional
        For tiers with an arbiter: how fast the engine computes a prompt, at any position or at these. None: learned
        from `report_prefill`.
    what_if, **host_options
        For the host pool, as in `CPUOffloadingManager`.

    Attributes
    ----------
    pool : BlockPool
        Of host memory; read it, the manager drives it.
    controllers : list of TierController
        Of the tiers, in order.
    job_log : JobLog or None
        Is given every job that ends while it is set.
    arbitration : Arbitration or None
        What decides between loading and computing, where a tier has an arbiter.

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
        prefill_tokens_per_s: float | Mapping[int, float] | None = None,
        what_if: bool | int = False,
        **host_options: Any,
    ) -> None:
        check_seconds("deadline_s", deadline_s)
        self.guard = Guard()
        self._clock: Callable[[], float] = _SteadyClock(clock)
        self._deadline_s = deadline_s
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self.pool = BlockPool(
            num_blocks,
            cache_policy,
            block_size=block_size,
            enable_events=enable_events,
            clock=self._clock,
            observer=sampler_for(what_if, num_blocks),
            **host_options,
        )
        if tiers and hasattr(self.pool.policy, "stores_all"):
            # A block that host memory declines would never reach a tier.
            self.pool.policy.stores_all = True
        self.block_size = block_size
        self.medium = self.pool.medium
        self.job_log: JobLog | None = None
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
        self._pending = PendingRequests(self.pool, deadline_s, MAX_STEP_BLOCKS, self._clock)
        arbiter = LoadArbiter(prefill_tokens_per_s)
        self.arbitration: Arbitration | None = None
        if any(one.link is not None for one in self.controllers):
            self.arbitration = Arbitration(arbiter, self._pending, self.controllers, block_size)
        self._job_ids = count(1)
        self._promoting: dict[bytes, TierJob] = {}
        # Its first item goes often: in a plain dict that would cost a walk over the gaps of those before.
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._promoted_loads = 0
        self._is_draining = False
        # The keys whose use was counted for each request.
        self._counted: WeakKeyDictionary[ReqContext, set[bytes]] = WeakKeyDictionary()

    @property
    def policy(self) -> CachePolicy:
        """The host pool's policy."""
        return self.pool.policy

    _policy = policy

    @property
    def arbiter(self) -> LoadArbiter | None:
        """What weighs loading against computing, where a tier has one."""
        return None if self.arbitration is None else self.arbitration.arbiter

    def configuration(self) -> dict[str, Any]:
        """Return the arguments of a manager that answers alike over equal tiers, in types of JSON.

        Returns
        -------
        dict
            As of `CPUOffloadingManager.configuration`, ``deadline_s``, ``tiers``: medium and `TierConfig` of each, and
            ``prefill_tokens_per_s`` where it is given.
        """
        tiers = [{"medium": one.medium, **asdict(one.config)} for one in self.controllers]
        options = {**self.pool.configuration(), "deadline_s": self._deadline_s, "tiers": tiers}
        if self._prefill_tokens_per_s is not None:
            given = self._prefill_tokens_per_s
            options["prefill_tokens_per_s"] = dict(given) if isinstance(given, Mapping) else given
        return options

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds that never go back; a new one is also the pool's and that of pending requests."""
        return self._clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self._clock = self.pool.clock = self._pending.clock = clock

    def lookup(self, keys: Any = None, req_context: ReqContext | None = None, *, key: Any = None) -> bool | int | None:
        if keys is None:
            keys = key
        if isinstance(keys, bytes):
            if self._is_ready(keys, req_context):
                return True
            answer = self._answer([keys], req_context)
            return None if answer is None else answer == 1
        return self._answer(as_key_list(keys), req_context)

    def status(self, key: bytes, req_context: ReqContext | None = None) -> int:
        """Return the state of one key: ABSENT 0, PENDING 1 (it will become ready), READY 2 or ASK_AGAIN 3."""
        return READY if self._is_ready(key, req_context) else self._status_below(key, req_context)

    def _is_ready(self, key: bytes, req_context: ReqContext | None) -> bool:
        """Count a hit if host memory answers; one compiled call does, and needs no lock."""
        if req_context is None or self._is_draining or self.pool.locate([key]) == [-1]:
            return False
        return self.pool.lookup(key, req_context) is True

    @atomic
    def is_coming(self, key: bytes, req_context: ReqContext | None = None) -> bool:
        """Return whether a block that is not ready is known to be held, and on its way to this request."""
        return self._is_coming(key, req_context)

    def _is_coming(self, key: bytes, req_context: ReqContext | None) -> bool:
        if self._is_draining:
            return False
        arbitration = self.arbitration
        if arbitration is not None and req_context is not None and not arbitration.may_wait_for(key, req_context):
            return False
        job = self._promoting.get(key)
        if job is not None:
            return not job.is_overdue and self._pending.of(req_context).may_wait(self._clock())
        return key in self._pending.of(req_context).wanted or self.pool.states([key]) != b"\0"

    @atomic
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        keys = as_key_list(keys)
        if self._is_draining and keys:
            raise KeyError(f"block is not in the cache: {keys[0]!r}")
        spec = self.pool.pin(keys, req_context)
        if req_context is not None:
            if tried := self._pending.of(req_context).tried:
                self._promoted_loads += len(tried.intersection(keys))
            self._pending.close(req_context)
        self._note_use(keys, req_context)
        return spec

    @atomic
    def reorder(self, req_context: ReqContext) -> None:
        """Order the keys that a running request used; see `CPUOffloadingManager.reorder`."""
        if not self._is_draining:
            self.pool.reorder(req_context)

    @atomic
    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        if self._is_draining:
            return
        keys = as_key_list(keys)
        self.pool.touch(keys, req_context)
        self._note_use(keys, req_context)

    @atomic
    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        self.pool.unpin(as_key_list(keys), req_context)

    @atomic
    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        if self._is_draining:
            return None
        keys = as_key_list(keys)
        output = self.pool.reserve(keys, req_context)
        if output is not None:
            self._note_evicted(output.evicted_keys)
            self._count_uses(keys, req_context)
        return output

    @atomic
    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        if isinstance(req_context, bool):
            success, req_context = req_context, None
        keys = as_key_list(keys)
        if self._promoting:
            # The engine must not commit blocks that a tier is still reading into.
            keys = [key for key in keys if key not in self._promoting]
        if self._is_draining or not success:
            self.pool.abort(keys, req_context)
            return
        ready = self.pool.commit(keys, req_context)
        if ready:
            self._offer(ready, None)
            self._write_down(self._clock())

    def take_events(self, max_events: int | None = None) -> Iterator[OffloadingEvent]:
        """Yield the events since the last call, or the first `max_events` of them, each once."""
        return self.pool.take_events(max_events)

    @atomic
    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        self.pool.end_request(req_context, use_positions=use_positions)
        self._pending.close(req_context)
        self._counted.pop(req_context, None)
        if self.arbitration is not None:
            self.arbitration.forget(req_context)
        for controller in self.controllers:
            controller.end_request(req_context)

    def report_prefill(self, first_token: int, num_tokens: int, seconds: float) -> None:
        """Take in how long the engine computed a part of a prompt, for the arbiter; other values are ignored.

        Parameters
        ----------
        first_token : int
            Position in the prompt of the first token that was computed.
        num_tokens : int
            Tokens that were computed.
        seconds : float
            What that took.
        """
        if first_token >= 0 and num_tokens > 0 and seconds > 0:
            self.report_prefills([(first_token, num_tokens)], seconds)

    @atomic
    def report_prefills(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take in how long the engine computed parts of prompts together, for the arbiter.

        Parameters
        ----------
        parts : sequence of (int, int)
            Of each, the position in its prompt of the first token that was computed, and how many were.
        seconds : float
            The time of all parts together.
        """
        if self.arbiter is not None:
            self.arbiter.prefill.record_together(parts, seconds)

    @atomic
    def hint(self, request_or_keys: ReqContext | Keys, next_use: str) -> None:
        check_next_use(next_use)
        if not self._is_draining:
            self.pool.hint(request_or_keys, next_use)

    @atomic
    def on_schedule_end(self) -> None:
        """Handle the results of the tiers, and send them the jobs of this step."""
        now_s = self._clock()
        self._take_in(now_s)
        self._pending.expire(now_s)
        for controller in self.controllers:
            controller.pass_on_uses()
        if not self._is_draining:
            self._promote(now_s)
            if self.arbitration is not None:
                self._probe(self.arbitration.take_probes(), now_s)
            self._write_down(now_s)

    @atomic
    def reset_cache(self, version: str | int | None = None) -> None:
        """Forget everything, in all tiers; new blocks are taken once the last job under way has ended or is overdue.

        A tier serves nothing until its own reset is done (see `Tier.reset`, also for `version`).
        """
        if version is not None and not isinstance(version, str | int):
            raise ValueError(f"version must be a str or an int, got {version!r}")
        now_s = self._clock()
        self._is_draining = True
        if self.pool.events is not None:
            self.pool.events.clear()
        self._pending.forget()
        if self.arbitration is not None:
            self.arbitration.take_probes()
        self._uses = OrderedDict()
        self._counted.clear()
        for controller in self.controllers:
            controller.reset(now_s, version)
        self._end_draining()

    def shutdown(self) -> None:
        """Shut the tiers down; waits for them, not for ever."""
        super().shutdown()
        for controller in self.controllers:
            controller.shutdown()

    def has_pending_work(self) -> bool:
        """Return whether another `on_schedule_end` would move something on."""
        return (
            self._is_draining
            or bool(self._pending.wanting())
            or any(
                one.backlog or one.has_reports or any(not job.is_overdue for job in one.jobs.values())
                for one in self.controllers
            )
        )

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until nothing is under way, as no scheduler may; return whether that took at most `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while True:
            self.on_schedule_end()
            if not self.has_pending_work():
                return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.0002)

    def stats(self) -> ManagerStats:
        decided = {} if self.arbitration is None else self.arbitration.counts
        return replace(self.pool.stats(), promoted_loads=self._promoted_loads, **decided)

    def parts(self) -> list[Part]:
        waits = HistogramData(*self._pending.waits.data())
        promotions = Part("promotion", PromotionStats(len(self._pending), waits))
        return [Part("", self.stats()), *self.pool.parts()[1:], promotions, *self.tier_parts()]

    def tier_parts(self) -> list[Part]:
        """Return the statistics of each tier with its labels; callable in any thread."""
        return [
            Part("tier", stats, (("tier", str(number)), ("medium", stats.tier.medium)))
            for number, stats in enumerate(self.tier_stats())
        ]

    @property
    def num_blocks(self) -> int:
        """Slots of the host pool."""
        return self.pool.num_blocks

    def tier_stats(self) -> list[TierControllerStats]:
        """Return the statistics of each tier, in order."""
        return [controller.stats() for controller in self.controllers]

    def what_if(self, policies: str | Iterable[str] | None = None, capacities: Iterable[int] | None = None) -> WhatIf:
        """Estimate what other policies and capacities would have hit; see `CPUOffloadingManager.what_if`."""
        return estimate(self.pool.observer, self.num_blocks, type(self.policy), policies, capacities)

    @atomic
    def _answer(self, keys: list[bytes], req_context: ReqContext | None) -> int | None:
        return self._find(keys, req_context)

    @atomic
    def _status_below(self, key: bytes, req_context: ReqContext | None) -> int:
        answer = self._find([key], req_context)
        if answer:
            return READY
        # Not through the public method, which a recorder would take for a call of its own.
        if self._is_coming(key, req_context):
            return PENDING
        return ABSENT if answer == 0 else ASK_AGAIN

    def _find(self, keys: list[bytes], req_context: ReqContext | None) -> int | None:
        num_ready = self.pool.match_prefix(keys, req_context)
        self.pool.count_lookup(len(keys))
        if self._is_draining:
            return 0
        if num_ready < len(keys) and self.controllers:
            now_s = self._clock()
            if self._pending.of(req_context).may_wait(now_s):
                found = self._look_below(keys, num_ready, req_context, now_s)
                if self.arbitration is not None and req_context is not None and any(found):
                    found = self.arbitration.judge(
                        found,
                        keys,
                        num_ready,
                        req_context,
                        now_s,
                        lambda run: self._look_below(run, 0, req_context, now_s),
                    )
                sources, is_moving = found
                wanted = {key: source for key, source in sources if isinstance(source, TierController)}
                jobs = dict.fromkeys(source for _, source in sources if isinstance(source, TierJob))
                for job in jobs:
                    job.waiters.add(req_context)
                if wanted or jobs or is_moving:
                    self._pending.wait(req_context, keys, num_ready, wanted, now_s)
                    return None
        if req_context is None:
            self._pending.close(None)
        self.pool.count_hits(num_ready)
        return num_ready

    def _look_below(self, keys: list[bytes], num_ready: int, req_context: ReqContext | None, now_s: float) -> Sources:
        """Return the sources of the next keys, up to the first absent one, and whether a tier must be asked again.

        The tiers are asked for all keys together that are not in host memory, so the cost grows with their number only.
        """
        window = keys[num_ready : num_ready + MAX_STEP_BLOCKS]
        tried, promoting = self._pending.of(req_context).tried, self._promoting
        sources: list[Source] = []
        below: list[bytes] = []
        places: list[int] = []
        for key, state in zip(window, self.pool.states(window), strict=True):
            source: Source = None
            if state != READY:
                source = promoting.get(key)
                if source is None:
                    if key in tried:
                        break
                    places.append(len(sources))
                    below.append(key)
                elif source.is_overdue:
                    break
            sources.append(source)
        is_unknown = False
        position = num_lookups = 0
        while position < len(below) and num_lookups < _MAX_TIER_LOOKUPS:
            num_found: int | None = 0
            for controller in self.controllers:
                num_lookups += 1
                num_found = controller.lookup(below[position:], now_s)
                if num_found != 0:
                    break
            if not num_found:
                is_unknown = num_found is None
                break
            for place in places[position : position + num_found]:
                sources[place] = controller
            position += num_found
        if position < len(below):
            del sources[places[position] :]
        return list(zip(window, sources, strict=False)), is_unknown

    def _probe(self, cut: dict[TierController, list[bytes]], now_s: float) -> None:
        """Load a few blocks that were cut, from time to time, to notice a link that got faster."""
        for controller, keys in cut.items():
            link = controller.link
            if link is None or not controller.may_send(True, now_s) or self._pending.wanting():
                continue
            keys = list(dict.fromkeys(keys))
            absent = [key for key, state in zip(keys, self.pool.states(keys), strict=True) if state == ABSENT]
            num_blocks = min(link.take_probe(now_s), controller.room(True)) if absent else 0
            output = self.pool.reserve_leading(absent[:num_blocks]) if num_blocks else None
            if output is not None:
                self._note_evicted(output.evicted_keys)
                self._load(controller, output.keys_to_store, _block_ids(output.store_spec), (), now_s)

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
            output = self.pool.reserve_leading(absent) if absent else None
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
                    self._load(controller, part, [block_of[key] for key in part], (request.req_context,), now_s)

    def _next_batch(self, request: PendingRequest, num_left: int, now_s: float) -> dict[bytes, TierController]:
        """Take the first wanted keys that fit; give up the keys of tiers that must not be asked."""
        rooms: dict[TierController, int] = {}
        batch: dict[bytes, TierController] = {}
        given_up: list[bytes] = []
        num_left = min(num_left, self._budget.num_left)
        for key, controller in request.wanted.items():
            room = rooms.get(controller)
            if room is None:
                room = controller.room(True) if controller.may_send(True, now_s) else -1
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
        waiters: Iterable[ReqContext | None],
        now_s: float,
    ) -> None:
        deadline_s = now_s + controller.config.deadline_s
        job = TierJob(next(self._job_ids), controller, True, keys, block_ids, deadline_s)
        job.waiters.update(waiters)
        # A tier that is being tried again gets one job only.
        if controller.may_send(True, now_s) and controller.send(job, now_s):
            self._promoting.update(dict.fromkeys(keys, job))
        else:
            self.pool.abort(keys, is_move=True)

    def _end_promotion(self, job: TierJob, result: TierResult) -> None:
        for key in job.keys:
            del self._promoting[key]
        arrived = set() if self._is_draining else set(result.done)
        done = [key for key in job.keys if key in arrived]
        failed = [key for key in job.keys if key not in arrived]
        if failed:
            self.pool.abort(failed, is_move=True)
        if done:
            ready = self.pool.commit(done, is_move=True)
            self._pending.hold(job.waiters, done)
            self._offer(ready, job.controller)

    def _offer(self, keys: list[bytes], source: TierController | None) -> None:
        """Offer blocks that became ready to the tiers below, by their write policy."""
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
            if controller.dirty is not None and controller.may_send(False, now_s):
                controller.offer(controller.dirty.take_due(controller.room(False) - len(controller.backlog)))
            if controller.backlog and not controller.may_send(False, now_s):
                controller.drop_backlog()
            while (
                controller.backlog
                and (room := min(controller.room(False), num_left, _MAX_JOB_BLOCKS)) > 0
                and controller.may_send(False, now_s)
            ):
                keys = [controller.backlog.popleft() for _ in range(min(room, len(controller.backlog)))]
                num_left -= len(keys)
                if not self._store_batch(controller, keys, now_s):
                    break

    def _store_batch(self, controller: TierController, keys: list[bytes], now_s: float) -> bool:
        keys = list(dict.fromkeys(keys))
        ready = [key for key, state in zip(keys, self.pool.states(keys), strict=True) if state == READY]
        controller.dropped_blocks += len(keys) - len(ready)
        if not ready:
            return True
        block_ids = _block_ids(self.pool.pin(ready, is_move=True))
        job = TierJob(next(self._job_ids), controller, False, ready, block_ids, now_s + controller.config.deadline_s)
        if controller.send(job, now_s):
            return True
        self.pool.unpin(ready)
        controller.dropped_blocks += len(ready)
        controller.drop_backlog()
        return False

    def _take_in(self, now_s: float) -> None:
        """Handle the results of the tiers since the last call, a bounded number."""
        max_blocks = max(1, MAX_STEP_BLOCKS // max(1, len(self.controllers)))
        for controller in self.controllers:
            for job, result in controller.get_finished(max_blocks, now_s):
                if job is not None and job.is_withheld:
                    self._give_back(job)
                    continue
                if job is not None:
                    self._trace(job, result, now_s)
                    if job.is_load:
                        self._end_promotion(job, result)
                    else:
                        self.pool.unpin(job.keys)
                if not self._is_draining:
                    self._add_event(result.removed, controller.medium, True)
                    if job is None or not job.is_load:
                        self._add_event(result.done, controller.medium, False)
            controller.give_up_overdue(now_s)
            controller.retry_reset(now_s)
        self._end_draining()

    def _trace(self, job: TierJob, result: TierResult, now_s: float) -> None:
        seconds = now_s - job.sent_s
        name = "promotion" if job.is_load else "write"
        if _LOG.isEnabledFor(logging.DEBUG):
            text = "%s of %d blocks, tier %s: %d done in %.1f ms%s"
            error = f": {result.error}" if result.error else ""
            _LOG.debug(text, name, len(job.keys), job.controller.medium, len(result.done), seconds * 1e3, error)
        if self.job_log is not None:
            medium = job.controller.medium
            self.job_log.add(FinishedJob(name, medium, len(result.done), 0, time.time(), seconds, result.error))

    def _end_draining(self) -> None:
        """Open the empty cache once no job is under way except overdue ones."""
        if not self._is_draining:
            return
        stuck = [job for controller in self.controllers for job in controller.jobs.values()]
        if not all(job.is_overdue for job in stuck):
            return
        self._promoting = {}
        self.pool.reset()
        for job in stuck:
            job.is_withheld = True
        # Two tiers may be writing the same block.
        self.pool.withhold(sorted({block_id for job in stuck for block_id in job.block_ids}))
        self._is_draining = False

    def _give_back(self, job: TierJob) -> None:
        others = [other for one in self.controllers for other in one.jobs.values() if other.is_withheld]
        taken = {block_id for other in others for block_id in other.block_ids}
        self.pool.give_back([block_id for block_id in job.block_ids if block_id not in taken])

    def _add_event(self, keys: list[bytes], medium: str, removed: bool) -> None:
        if self.pool.events is not None:
            self.pool.events.add(keys, medium, removed)

    def _note_evicted(self, keys: list[bytes]) -> None:
        if keys:
            for controller in self.controllers:
                controller.remove(keys)

    def _note_use(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        self._count_uses(keys, req_context)
        for controller in self.controllers:
            controller.touch(keys, req_context)

    def _count_uses(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Count one use a request of each resident key, and offer those that have been used enough."""
        if not self._selective:
            return
        if req_context is not None:
            seen = self._counted.setdefault(req_context, set())
            keys = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(keys)
        # Counts of blocks that left go first.
        while len(self._uses) > 2 * self.num_blocks:
            self._uses.popitem(last=False)
        by_uses: dict[int, list[bytes]] = {}
        for key in keys:
            num_uses = self._uses[key] = self._uses.get(key, 0) + 1
            by_uses.setdefault(num_uses, []).append(key)
        for controller in self._selective:
            # Other blocks are offered once they are ready.
            enough = by_uses.get(controller.config.num_uses, [])
            states = self.pool.states(enough)
            ready = [key for key, state in zip(enough, states, strict=True) if state == READY]
            controller.offer(reversed(ready))


class _SteadyClock:
    """A clock that never raises or goes back, over a clock that may; without it, the system's clock is used."""

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
