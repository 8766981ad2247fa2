"""The manager of a host pool with tiers below it: the contract, resets, events and statistics.

A promotion (`kvcache.tiering.promotion`) reserves host blocks, has a tier read into them, and commits them. A store
downwards (`kvcache.tiering.writing`) references host blocks, has a tier write them, and releases them. Each call is
atomic, never waits for I/O, and does a bounded amount of work.

Host blocks of a job are the tier's until it reports the job, even after the deadline. `reset_cache` drains first: the
cache is empty at once, and takes new blocks when the last old job has ended or is overdue. Slots of overdue jobs are
withheld until the tier reports them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache.block import ABSENT, ASK_AGAIN, PENDING, READY
from kvcache.control.atomic import Guard, atomic
from kvcache.control.manager import Keys, OffloadingManager
from kvcache.control.pool import BlockPool
from kvcache.events import OffloadingEvent
from kvcache.keys import GROUP_PART, as_key_list
from kvcache.metrics import ManagerStats, Part
from kvcache.options import parse_duration
from kvcache.registry import POLICIES
from kvcache.request import ReqContext, RequestOffloadingContext, check_next_use
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput
from kvcache.tiering.arbiter import LoadArbiter
from kvcache.tiering.controller import HostBudget, JobState, TierConfig, TierController
from kvcache.tiering.pending import PendingRequests
from kvcache.tiering.promotion import Promotion
from kvcache.tiering.writing import Writing
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS, Tier

if TYPE_CHECKING:
    from kvcache.policies.base import CachePolicy
    from kvcache.tiering.controller import TierControllerStats, TierJob
    from kvcache.tiers.base.tier import TierResult

_LOG = logging.getLogger(__name__)
_WORST_FIRST = ("deferred", "missing", "rejected", "clipped", "accepted")
F = TypeVar("F", bound=Callable[..., Any])


def _while_open(answer: Any = None) -> Callable[[F], F]:
    """Return a gate for methods of a manager: while a reset waits for old jobs, they return `answer`."""

    def gate(method: F) -> F:
        @wraps(method)
        def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs) if self._is_open else answer

        return gated  # type: ignore[return-value]

    return gate


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
    **host_options
        For the host pool, as in `CPUOffloadingManager`.

    Attributes
    ----------
    pool : BlockPool
        Of host memory; read it, the manager drives it.
    controllers : list of TierController
        Of the tiers, in order.
    arbiter : LoadArbiter or None
        Decides between loading and computing; None if no tier has an arbiter.

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
        **host_options: Any,
    ) -> None:
        deadline_s = parse_duration("deadline_s", deadline_s)
        self.guard = Guard()
        self._clock = clock
        self._deadline_s = deadline_s
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self.pool = BlockPool(
            num_blocks,
            cache_policy,
            block_size=block_size,
            enable_events=enable_events,
            clock=self._clock,
            **host_options,
        )
        if tiers and hasattr(self.pool.policy, "stores_all"):
            # A block that host memory declines would never reach a tier.
            self.pool.policy.stores_all = True
        self.block_size = block_size
        self.medium = self.pool.medium
        pairs = [item if isinstance(item, tuple) else (item, TierConfig()) for item in tiers]
        for pair in pairs:
            if not (len(pair) == 2 and isinstance(pair[0], Tier) and isinstance(pair[1], TierConfig)):
                raise ValueError(f"tiers must be Tier or (Tier, TierConfig), got {pair!r}")
        # Jobs that dead tiers never report may cost three quarters of the host pool, never all of it.
        budget = HostBudget(max(1, 3 * num_blocks // 4))
        self.controllers = [TierController(tier, config, num_blocks, len(pairs), budget) for tier, config in pairs]
        self._pending = PendingRequests(self.pool, deadline_s, MAX_STEP_BLOCKS, self._clock)
        self.arbiter: LoadArbiter | None = None
        if any(controller.link is not None for controller in self.controllers):
            self.arbiter = LoadArbiter(block_size, self.controllers, prefill_tokens_per_s)
        self._writing = Writing(self.pool, self.controllers)
        self._promotion = Promotion(self.pool, self.controllers, self._pending, self.arbiter, self._writing, budget)
        # False from a reset until no job of before uses the pool.
        self._is_open = True
        # Whether a look-up of this step has handled the results of the tiers.
        self._has_results = False

    @property
    def policy(self) -> CachePolicy:
        """The host pool's policy."""
        return self.pool.policy

    _policy = policy

    def configuration(self) -> dict[str, Any]:
        """Return the arguments of a manager that answers alike over equal tiers, in types of JSON.

        Returns
        -------
        dict
            As of `CPUOffloadingManager.configuration`, ``deadline_s``, ``tiers``: medium, policy (if known) and
            `TierConfig` of each, and ``prefill_tokens_per_s`` if it was set.
        """
        tiers = [{"medium": controller.medium, **asdict(controller.config)} for controller in self.controllers]
        for tier, controller in zip(tiers, self.controllers, strict=True):
            if controller.tier.cache_policy is not None:
                tier["cache_policy"] = POLICIES.path_of(controller.tier.cache_policy)
        options = {**self.pool.configuration(), "deadline_s": self._deadline_s, "tiers": tiers}
        rates = self._prefill_tokens_per_s
        if rates is not None:
            options["prefill_tokens_per_s"] = dict(rates) if isinstance(rates, Mapping) else rates
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
        is_one = isinstance(keys, bytes)
        keys = [keys] if is_one else as_key_list(keys)
        if is_one and self._is_ready(keys, req_context):
            return True
        num_ready, num_coming, ask_again = self._find(keys, req_context)
        if num_coming or ask_again:
            return None
        return num_ready == 1 if is_one else num_ready

    def status(self, key: bytes, req_context: ReqContext | None = None) -> int:
        """Return the `BlockState` of one key. PENDING: it will become ready."""
        keys = [key]
        if self._is_ready(keys, req_context):
            return READY
        num_ready, num_coming, ask_again = self._find(keys, req_context, True)
        if num_coming:
            return PENDING
        return READY if num_ready else ASK_AGAIN if ask_again else ABSENT

    def _is_ready(self, keys: list[bytes], req_context: ReqContext | None) -> bool:
        """Return whether host memory has the one key, and count a hit. The compiled call needs no lock."""
        if req_context is None or not self._is_open or self.pool.locate(keys)[0] < 0:
            return False
        return self.pool.lookup(keys[0], req_context) is True

    @atomic
    def _find(
        self, keys: list[bytes], req_context: ReqContext | None, is_status: bool = False
    ) -> tuple[int, int, bool]:
        """Return what `Promotion.find` does, and count the look-up. A status also waits for blocks being stored."""
        if not self._is_open:
            self.pool.count_lookup(len(keys))
            return 0, 0, False
        # The first look-up of a step handles results, so that it finds the blocks that have arrived.
        if not self._has_results:
            self._has_results = True
            if any(controller.jobs for controller in self.controllers):
                self._take_results(self._clock())
        answer = num_ready, num_coming, ask_again = self._promotion.find(keys, req_context)
        self.pool.count_lookup(len(keys))
        if num_coming or ask_again:
            return answer
        if req_context is None:
            self._pending.close(None)
        self.pool.count_hits(num_ready)
        if is_status and not num_ready and self._promotion.waits_for_store(keys[0], req_context):
            return 0, 1, False
        return answer

    @atomic
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        keys = as_key_list(keys)
        if keys and not self._is_open:
            raise KeyError(f"block is not in the cache: {keys[0]!r}")
        spec = self.pool.pin(keys, req_context)
        # The engine's own references hold the blocks from here on.
        self._promotion.note_load(keys, req_context)
        self._writing.touch(keys, req_context)
        return spec

    @atomic
    @_while_open()
    def reorder(self, req_context: ReqContext) -> None:
        """Order the keys that a running request used; see `CPUOffloadingManager.reorder`."""
        self.pool.reorder(req_context)

    @atomic
    @_while_open()
    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        keys = as_key_list(keys)
        self.pool.touch(keys, req_context)
        self._writing.touch(keys, req_context)

    @atomic
    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        self.pool.unpin(as_key_list(keys), req_context)

    @atomic
    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        # A request that may store nothing gets its answer even while a reset waits: the engine asks only once.
        if self._is_open or self.pool.ages.predates(req_context):
            return self._writing.reserve(as_key_list(keys), req_context)
        return None

    @atomic
    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        if isinstance(req_context, bool):
            success, req_context = req_context, None
        keys = as_key_list(keys)
        if self._is_open and self.pool.is_of_before(keys, req_context):
            return
        # The engine must not commit blocks that a tier is still reading into.
        keys = self._promotion.without_coming(keys)
        if not (success and self._is_open):
            self.pool.abort(keys, req_context)
            self._writing.abort(keys)
            return
        if ready := self.pool.commit(keys, req_context):
            self._writing.offer(ready, None)
            self._writing.send(self._clock())

    def take_events(self, max_events: int | None = None) -> Iterator[OffloadingEvent]:
        """Yield the events since the last call, or the first `max_events` of them, each once."""
        return self.pool.take_events(max_events)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.pool.ages.open(req_context)
        return super().on_new_request(req_context)

    @atomic
    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        self.pool.end_request(req_context, use_positions=use_positions)
        self._pending.close(req_context)
        if self.arbiter is not None:
            self.arbiter.forget(req_context)
        self._writing.end_request(req_context)

    def report_prefill(self, first_token: int, num_tokens: int, seconds: float) -> None:
        """Take in how long the engine computed one part of a prompt; see `report_prefills`."""
        self.report_prefills([(first_token, num_tokens)], seconds)

    @atomic
    def report_prefills(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take in how long the engine computed parts of prompts together, for the arbiter; invalid values are ignored.

        Parameters
        ----------
        parts : sequence of (int, int)
            Of each, the position in its prompt of the first token that was computed, and how many were.
        seconds : float
            The time of all parts together.
        """
        if self.arbiter is not None:
            self.arbiter.report_prefills(parts, seconds)

    @atomic
    def hint(self, request_or_keys: ReqContext | Keys, next_use: str) -> None:
        if not isinstance(request_or_keys, ReqContext):
            request_or_keys = as_key_list(request_or_keys)
        check_next_use(next_use)
        if self._is_open:
            self.pool.hint(request_or_keys, next_use)
            for controller in self.controllers:
                controller.hint(request_or_keys, next_use)

    @atomic
    @_while_open("rejected")
    def prefetch(self, keys: Keys) -> str:
        keys, now_s, windows = as_key_list(keys), self._clock(), self.pool.group_windows
        parts: dict[bytes, list[bytes]] = {b"": keys} if windows is None else {}
        for key in keys if windows else ():
            parts.setdefault(key[GROUP_PART], []).append(key)
        # A request goes on at its end, so a group with a window needs its last blocks only.
        last = {group: windows[int.from_bytes(group, "big")] or 0 if windows else 0 for group in parts}
        answers = [self._promotion.prefetch(part[-last[group] :], now_s) for group, part in parts.items()]
        return min(answers, key=_WORST_FIRST.index, default="accepted")

    @atomic
    @_while_open("rejected")
    def demote(self, keys: Keys, req_context: ReqContext | None = None) -> str:
        keys = as_key_list(keys)
        states = self.pool.states(keys)
        if not any(states):
            return "missing"
        if not any(controller.may_send(False, self._clock()) for controller in self.controllers):
            return "rejected"
        if not self._writing.hurry(keys) or PENDING in states:
            return "deferred"
        # Not this manager's own hint, which is about the tiers, too.
        self.pool.hint(keys if req_context is None else req_context, "end")
        return "accepted"

    @atomic
    def on_schedule_end(self) -> None:
        """Handle the results of the tiers, and send them the jobs of this step."""
        now_s = self._clock()
        self._take_results(now_s)
        self._has_results = False
        self._pending.expire(now_s)
        for controller in self.controllers:
            controller.pass_on_uses()
        self._send(now_s)

    @_while_open()
    def _send(self, now_s: float) -> None:
        self._promotion.send(now_s)
        self._writing.send(now_s)

    @atomic
    def reset_cache(self, version: str | int | None = None) -> None:
        """Forget everything, in all tiers; new blocks are taken once the last job under way has ended or is overdue.

        A tier serves nothing until its own reset is done (see `Tier.reset`, also for `version`).
        """
        version = self.version_of_reset(version)
        now_s = self._clock()
        self._is_open = False
        # Counted now, not when the pool is empty: requests that begin in between are new.
        self.pool.ages.num_resets += 1
        if self.pool.events is not None:
            self.pool.events.clear()
        self._pending.forget()
        if self.arbiter is not None:
            self.arbiter.probes.clear()
        for controller in self.controllers:
            controller.reset(now_s, version)
        self._open_again()

    def shutdown(self) -> None:
        """Shut the tiers down; waits for them, not for ever."""
        super().shutdown()
        for controller in self.controllers:
            controller.shutdown()

    def has_pending_work(self) -> bool:
        """Return whether another `on_schedule_end` would move something on."""
        if not self._is_open or self._pending.wanting():
            return True
        return any(controller.is_busy for controller in self.controllers)

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
        decided = {} if self.arbiter is None else self.arbiter.counts
        return replace(self.pool.stats(), promoted_loads=self._promotion.num_loads, **decided)

    def parts(self) -> list[Part]:
        promotions = Part("promotion", self._pending.stats())
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

    def _take_results(self, now_s: float) -> None:
        """Handle the results of the tiers since the last call, a bounded number."""
        max_blocks = max(1, MAX_STEP_BLOCKS // max(1, len(self.controllers)))
        for controller in self.controllers:
            for job, result in controller.poll(max_blocks, now_s):
                if job is not None and job.state is JobState.WITHHELD:
                    self._give_back(job)
                    continue
                if job is not None:
                    _log_job(job, result, now_s)
                    self._end(job, result)
                self._announce(controller.medium, job, result)
        self._open_again()

    def _end(self, job: TierJob, result: TierResult) -> None:
        """Release the blocks of a job; blocks from before a reset neither arrive nor are written again."""
        if job.is_load:
            self._promotion.end(job, result.done if self._is_open else ())
        else:
            self._writing.end(job, result.failed if result.error and self._is_open else [])

    @_while_open()
    def _announce(self, medium: str, job: TierJob | None, result: TierResult) -> None:
        """Record the events of a result."""
        events = self.pool.events
        if events is not None:
            events.add(result.removed, medium, True)
            if job is None or not job.is_load:
                events.add(result.done, medium, False)

    def _open_again(self) -> None:
        """Open the empty cache after a reset, once no job is under way except overdue ones."""
        if self._is_open:
            return
        stuck = [job for controller in self.controllers for job in controller.jobs.values()]
        if not all(job.is_overdue for job in stuck):
            return
        self._promotion.clear()
        self.pool.reset()
        for job in stuck:
            job.state = JobState.WITHHELD
        # Two tiers may be writing the same block.
        self.pool.withhold(sorted({block_id for job in stuck for block_id in job.block_ids}))
        self._is_open = True

    def _give_back(self, job: TierJob) -> None:
        """Give the slots of a withheld job back to the pool, but for those that other such jobs still use."""
        jobs = [
            other
            for controller in self.controllers
            for other in controller.jobs.values()
            if other.state is JobState.WITHHELD
        ]
        in_use = {block_id for other in jobs for block_id in other.block_ids}
        self.pool.give_back([block_id for block_id in job.block_ids if block_id not in in_use])


def _log_job(job: TierJob, result: TierResult, now_s: float) -> None:
    """Log the end of a job at level debug."""
    if _LOG.isEnabledFor(logging.DEBUG):
        name = "promotion" if job.is_load else "write"
        text = "%s of %d blocks, tier %s: %d done in %.1f ms%s"
        error = f": {result.error}" if result.error else ""
        ms = (now_s - job.sent_s) * 1e3
        _LOG.debug(text, name, len(job.keys), job.controller.medium, len(result.done), ms, error)
