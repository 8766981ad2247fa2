"""TierController: one tier's state in the manager. All calls to the tier are made here.

A tier may be slow or dead, raise, return invalid answers or lose a job, and the scheduler's thread must not suffer. So
each call is guarded and each answer checked. Each job has a deadline, after which no request waits for it. Each
direction has a breaker, because a full disk can still be read. Blocks under way are bounded, including lost jobs.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from kvcache.metrics import HistogramData, counter, gauge, histogram, state
from kvcache.options import Options, choice_of, option, parse_count, parse_duration, parse_flag
from kvcache.registry import POLICIES
from kvcache.tiering.arbiter import Link
from kvcache.tiering.backlog import Backlog, SelectiveBacklog, WriteBackBacklog
from kvcache.tiering.breaker import BREAKER_STATES, Direction, Faults
from kvcache.tiering.endurance import BudgetBacklog
from kvcache.tiering.uses import UseQueue
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS, TierResult, TierStats
from kvcache.tiers.base.wear import parse_endurance

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiers.base.tier import Tier

_LOG = logging.getLogger(__name__)
WRITE_POLICIES = ("write_through", "write_back", "write_through_selective")
_MAX_WAITING_USES = 32 * MAX_STEP_BLOCKS


@dataclass(frozen=True)
class TierConfig(Options):
    """How a manager uses one tier.

    Parameters
    ----------
    write_policy : str
        When blocks are written to it: ``"write_through"`` (when they become ready in host memory), ``"write_back"``
        (before they leave it) or ``"write_through_selective"``.
    num_uses : int
        With ``"write_through_selective"``: how many uses, the first store counted.
    deadline_s : float
        How long a job may take before requests stop waiting for it.
    max_store_blocks : int
        Blocks being written at most; they stay in host memory so long.
    max_failures : int
        Failed jobs in a row that open the breaker.
    pause_s : float
        How long an open breaker keeps jobs from the tier before one job tries again.
    arbiter : bool
        Whether blocks are loaded only where that is expected to take less time than to compute them.
    endurance : float or str, optional
        Limit of a disk: drive writes a day, or bytes such as ``"6TiB/day"``. None: unlimited.

    Raises
    ------
    ValueError
        A value is out of range.
    """

    write_policy: str = option(
        choice_of(*WRITE_POLICIES), "write_through", when="the tier wears out, or is slower than computing"
    )
    num_uses: int = option(parse_count, 2, when="`write_through_selective` should wait for more uses than two")
    deadline_s: float = option(parse_duration, 5.0, when="a job of a healthy tier may take longer, or must take less")
    max_store_blocks: int = option(
        parse_count, 64, when="writes need more blocks under way to be fast, or must hold less of the pool", rare=True
    )
    max_failures: int = option(
        parse_count, 3, when="the tier must be paused after fewer, or more, failed jobs in a row", rare=True
    )
    pause_s: float = option(
        parse_duration, 5.0, when="a tier that failed must be tried again sooner, or later", rare=True
    )
    arbiter: bool = option(
        parse_flag, False, when="loading may take longer than computing the blocks; it is `true` by default for `s3`"
    )
    endurance: float | str | None = option(
        parse_endurance, None, when="an SSD must not wear out early: its rated drive writes a day"
    )

    def check_together(self, where: str) -> None:
        if self.endurance is not None and self.write_policy != "write_through":
            place = f" in {where}" if where else ""
            raise ValueError(f"endurance chooses what is written{place}: omit write_policy {self.write_policy!r}")


@dataclass(frozen=True, slots=True)
class TierControllerStats:
    """The manager's statistics of one tier; `tier` holds its own. `kvcache.metrics.metrics_of` describes each."""

    tier: TierStats
    promoted_blocks: int = counter("blocks", "Blocks that came back into host memory.", is_sized=True)
    written_blocks: int = counter("blocks", "Blocks of host memory that were written.", is_sized=True)
    dropped_blocks: int = counter("blocks", "Blocks that were to be written and were not.")
    failed_jobs: int = counter("jobs", "Jobs that failed.")
    overdue_jobs: int = counter("jobs", "Jobs that missed their deadline.")
    stuck_blocks: int = gauge("blocks", "Host blocks that belong to overdue jobs.")
    reads: str = state("State of the reads' breaker.", BREAKER_STATES, exported="reads_breaker")
    writes: str = state("State of the writes' breaker.", BREAKER_STATES, exported="writes_breaker")
    num_jobs: int = gauge("jobs", "Jobs under way.", exported="jobs")
    num_loading: int = gauge("blocks", "Blocks that are being read.", exported="loading_blocks")
    num_storing: int = gauge("blocks", "Blocks that are being written.", exported="storing_blocks")
    num_backlog: int = gauge("blocks", "Blocks that wait to be written.", exported="backlog_blocks")
    declined_blocks: int = counter("blocks", "Blocks that the budget of writes did not cover.", is_sized=True)
    dropped_uses: int = counter(
        "blocks",
        "Uses of blocks that the tier was not told of, because too many waited.",
        "The tier evicts less exactly while it grows.",
    )
    promotion_seconds: HistogramData | None = histogram(
        "seconds", "Time from a promotion's submission until the scheduler took its blocks in."
    )
    write_seconds: HistogramData | None = histogram(
        "seconds", "Time from a write's submission until the scheduler took its end in."
    )
    load_latency_s: float = gauge(
        "seconds", "Latency of loads, as the arbiter has learned it; 0: not known.", exported="load_latency_seconds"
    )
    load_blocks_per_s: float = gauge(
        "blocks", "Blocks a second of loads, as the arbiter has learned it.", exported="load_rate_blocks_per_second"
    )


@dataclass(slots=True)
class HostBudget:
    """Host blocks that more jobs may have. It is bounded, so that tiers that hang never take the whole pool."""

    num_left: int


class JobState(IntEnum):
    """States of a job that has not ended, in the order in which it passes through them.

    The tier still uses the host blocks of an overdue job. After a reset, these blocks are withheld from the pool.
    """

    UNSENT = 0
    SENT = 1
    OVERDUE = 2
    WITHHELD = 3


@dataclass(slots=True, eq=False)
class TierJob:
    """A job of a tier, sent at `sent_s`.

    `waiters` are the requests that asked for its blocks. `is_again`: its blocks are already counted as dropped.
    """

    job_id: int
    controller: TierController
    is_load: bool
    keys: list[bytes]
    block_ids: list[int]
    deadline_s: float
    waiters: set[ReqContext | None] = field(default_factory=set)
    is_again: bool = False
    sent_s: float = 0.0
    state: JobState = JobState.UNSENT

    is_coming = True

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has passed, so that no request waits for it."""
        return self.state >= JobState.OVERDUE

    @property
    def link(self) -> Link | None:
        """The link of its tier; see `kvcache.tiering.arbiter.Source`."""
        return self.controller.link


class TierController:
    """One tier under a manager: its `jobs` under way and the `backlog` of blocks that wait to be written.

    With an arbiter, `link` learns the rate of loads.
    """

    is_coming = False

    def __init__(self, tier: Tier, config: TierConfig, num_blocks: int, num_tiers: int, budget: HostBudget) -> None:
        self.tier = tier
        self.medium = str(tier.medium)
        self.config = config
        self.jobs: dict[int, TierJob] = {}
        self.backlog = self._new_backlog(num_blocks)
        self.link = Link() if config.arbiter else None
        self._max_blocks = max(1, budget.num_left // num_tiers)
        if tier.max_queued_blocks is not None:
            self._max_blocks = max(1, min(self._max_blocks, tier.max_queued_blocks))
        self._budget = budget
        self._reads = Direction("reads", max(1, num_blocks // (2 * num_tiers)), config.max_failures, config.pause_s)
        self._writes = Direction("writes", config.max_store_blocks, config.max_failures, config.pause_s)
        self._reported: deque[TierResult] = deque()
        keeps_paths = tier.cache_policy is not None and POLICIES.resolve(tier.cache_policy).reads_clock
        self._uses = UseQueue(MAX_STEP_BLOCKS, _MAX_WAITING_USES, keeps_paths)
        self._faults = Faults(self.medium)
        self._stuck_blocks = 0
        self._overdue_jobs = 0
        # When a reset that raised is tried again, and the version that it was for.
        self._reset_again: tuple[float, str | int | None] | None = None

    def _new_backlog(self, num_blocks: int) -> Backlog:
        if self.config.endurance is not None:
            if self.tier.wear is None:
                raise ValueError(f"endurance limits the writes of a disk; tier {self.medium} does not wear")
            self.tier.wear.limit(self.config.endurance)
            return BudgetBacklog(num_blocks, self.tier.wear)
        if self.config.write_policy == "write_through_selective":
            return SelectiveBacklog(num_blocks, self.config.num_uses)
        return (WriteBackBacklog if self.config.write_policy == "write_back" else Backlog)(num_blocks)

    def may_send(self, is_load: bool, now_s: float) -> bool:
        """Return whether it is worth asking the tier for blocks, or offering blocks to it."""
        direction = self._direction(is_load)
        return self._reset_again is None and direction.allows(now_s) and self._stuck_blocks < direction.max_blocks

    def room(self, is_load: bool) -> int:
        """Return how many blocks may be sent now to be read or written."""
        direction = self._direction(is_load)
        room = self._max_blocks - self._reads.num_blocks - self._writes.num_blocks
        return max(0, min(direction.max_blocks - direction.num_blocks, room, self._budget.num_left))

    def _direction(self, is_load: bool) -> Direction:
        return self._reads if is_load else self._writes

    @property
    def has_reports(self) -> bool:
        """Whether reports of the tier, or uses for it, are waiting."""
        return bool(self._reported or self._uses)

    @property
    def is_busy(self) -> bool:
        """Whether another step would move something on: jobs, reports, uses, or blocks that may be written."""
        has_writes = self.backlog or (self.backlog.missed and self._writes.is_healthy)
        return bool(has_writes or self.has_reports or any(not job.is_overdue for job in self.jobs.values()))

    def room_for_missed(self, room: int) -> int:
        """Return how many of the missed blocks may be offered again: one, as a probe, while writes are paused."""
        if self._writes.is_healthy:
            return room
        return min(room, self._writes.state != "closed")

    def lookup(self, keys: list[bytes], now_s: float) -> int | None:
        """Return how many of the first keys the tier can load, 0 while its reads are paused; None: ask again."""
        if not self.may_send(True, now_s):
            return 0
        num_held: Any = self._faults.call("lookup", -1, self.tier.lookup, keys)
        if num_held is None:
            return None
        if type(num_held) is not int or not 0 <= num_held <= len(keys):
            if num_held != -1:
                self._faults.note("lookup", f"returned {num_held!r} for {len(keys)} keys")
            self._fail(self._reads, now_s)
            return 0
        return num_held

    @property
    def num_waiting(self) -> int:
        """Blocks that are being written, or will be."""
        return len(self.backlog) + len(self.backlog.missed) + self._writes.num_blocks

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Record a use, to be passed to the tier before the next job."""
        self.backlog.touch(keys)
        self._uses.add(keys, req_context)

    def end_request(self, req_context: ReqContext) -> None:
        """Record a request's end, to be passed to the tier after the request's uses."""
        self.backlog.end_request(req_context)
        self._uses.end(req_context)

    def hint(self, request_or_keys: ReqContext | list[bytes], next_use: str) -> None:
        """Pass a hint on to the tier, after the uses that it is about."""
        self.pass_on_uses()
        self._faults.call("hint", None, self.tier.hint, request_or_keys, next_use)

    def pass_on_uses(self) -> None:
        """Pass uses on to the tier, a bounded number of keys at a time."""
        if not self._uses:
            return
        for keys, req_context in self._uses.take():
            if keys:
                self._faults.call("touch", None, self.tier.touch, keys, req_context)
            else:
                self._faults.call("on_request_finished", None, self.tier.on_request_finished, req_context)

    def send(self, job: TierJob, now_s: float) -> bool:
        """Give a job to the tier; return whether it took it."""
        self.pass_on_uses()
        submit = self.tier.submit_load if job.is_load else self.tier.submit_store
        # If a tier raises, it may have taken the job: the job counts as lost.
        keys, block_ids = list(job.keys), list(job.block_ids)
        if not self._faults.call("submit", True, lambda: bool(submit(job.job_id, keys, block_ids))):
            return False
        self.jobs[job.job_id] = job
        job.state, job.sent_s = JobState.SENT, now_s
        self._budget.num_left -= len(job.keys)
        direction = self._direction(job.is_load)
        direction.num_blocks += len(job.keys)
        direction.record_sent()
        if self.link is not None and job.is_load:
            self.link.sent(len(job.keys), now_s)
        return True

    def give_up_overdue(self, now_s: float) -> None:
        """Mark the jobs whose deadline has passed, let the tier cancel them, and open their direction's breaker."""
        for job in self.jobs.values():
            if now_s >= job.deadline_s and not job.is_overdue:
                job.state = JobState.OVERDUE
                if self.link is not None and job.is_load:
                    self.link.ended(len(job.keys), 0, job.sent_s, now_s, now_s)
                self._overdue_jobs += 1
                self._stuck_blocks += len(job.keys)
                self._faults.last_error = f"a job of {len(job.keys)} blocks took over {self.config.deadline_s} s"
                self._fail(self._direction(job.is_load), now_s, at_once=True)
                self._faults.call("cancel", None, self.tier.cancel, job.job_id)

    def poll(self, max_blocks: int, now_s: float) -> list[tuple[TierJob | None, TierResult]]:
        """Return results as `get_finished` does, then stop waiting for late jobs and retry a failed reset.

        Reports are read first: a job that has ended is not late.
        """
        finished = self.get_finished(max_blocks, now_s)
        self.give_up_overdue(now_s)
        self.retry_reset(now_s)
        return finished

    def get_finished(self, max_blocks: int, now_s: float) -> list[tuple[TierJob | None, TierResult]]:
        """Return results of about so many blocks with their jobs; None instead of a job: it happened without one."""
        results: Any = self._faults.call("get_finished", (), self.tier.get_finished)
        try:
            self._reported.extend(results)
        except TypeError:
            self._faults.note("get_finished", f"returned {results!r}")
        pairs: list[tuple[TierJob | None, TierResult]] = []
        while self._reported and max_blocks > 0:
            try:
                job, result = self._checked(self._reported.popleft())
            except Exception as error:
                self._faults.note("get_finished", f"reported nonsense: {error}")
                continue
            if job is not None:
                self._end(job, result, now_s)
            elif result.job_id is not None:
                continue
            max_blocks -= 1 + len(result.done) + len(result.failed) + len(result.removed)
            pairs.append((job, result))
        return pairs

    def _checked(self, result: Any) -> tuple[TierJob | None, TierResult]:
        """Return a result that names keys of its job only, and the job; a job that is not under way is None."""
        job_id = result.job_id
        clean = TierResult(
            job_id,
            _key_list(result.done),
            _key_list(result.failed),
            _key_list(result.removed),
            str(result.error),
            _seconds(result.start_s),
            _seconds(result.end_s),
        )
        job = None if type(job_id) is not int else self.jobs.get(job_id)
        if job is None:
            return None, clean
        # The manager trusts these keys with the job's host blocks.
        job_keys = set(job.keys)
        done = [key for key in dict.fromkeys(clean.done) if key in job_keys]
        return job, replace(clean, done=done, failed=[key for key in clean.failed if key in job_keys])

    def _end(self, job: TierJob, result: TierResult, now_s: float) -> None:
        num_blocks = len(job.keys)
        direction = self._direction(job.is_load)
        del self.jobs[job.job_id]
        self._budget.num_left += num_blocks
        direction.num_blocks -= num_blocks
        direction.num_moved += len(result.done)
        direction.seconds.observe(now_s - job.sent_s)
        if not job.is_load:
            self.backlog.note_unwritten(len(result.failed), job.is_again)
        if result.error:
            self._faults.num_failed += 1
            self._faults.last_error = result.error
            self._fail(direction, now_s)
        if job.is_overdue:
            self._stuck_blocks -= num_blocks
            return
        if not result.error:
            if direction.state != "closed":
                _LOG.info("tier %s: %s resumed", self.medium, direction.name)
            direction.record_success()
        if self.link is not None and job.is_load:
            start_s, end_s = result.start_s, result.end_s
            if start_s is None or end_s is None:
                start_s, end_s = job.sent_s, now_s
            # A failed job does not show the rate.
            self.link.ended(num_blocks, 0 if result.error else len(result.done), start_s, end_s, now_s)

    def reset(self, now_s: float, version: str | int | None = None) -> None:
        """Reset the tier and drop the backlog. If that raises, the tier is not used until a reset works."""
        self.backlog.clear()
        self._uses.clear()
        # Jobs are still awaited; other reports are of blocks that the tier forgets now.
        self._reported = deque(report for report in self._reported if getattr(report, "job_id", None) is not None)
        has_failed = self._faults.call("reset", True, self.tier.reset, version)
        self._reset_again = (now_s + self.config.pause_s, version) if has_failed else None

    def retry_reset(self, now_s: float) -> None:
        """Try a reset that raised again, once a pause is over."""
        if self._reset_again is not None and now_s >= self._reset_again[0]:
            self.reset(now_s, self._reset_again[1])

    def shutdown(self) -> None:
        """Shut the tier down."""
        self._faults.call("shutdown", None, self.tier.shutdown)

    def stats(self) -> TierControllerStats:
        """Return counters since start and gauges now."""
        tier: Any = self._faults.call("stats", None, self.tier.stats)
        # A plug-in may raise or return anything; the figures of the controller itself must still be shown.
        if not isinstance(tier, TierStats):
            tier = TierStats(self.medium, 0, 0, last_error=self._faults.last_error, unavailable_reason="stats failed")
        reason = tier.unavailable_reason or self._unavailable_reason()
        return TierControllerStats(
            tier=replace(tier, unavailable_reason=reason, last_error=tier.last_error or self._faults.last_error),
            promoted_blocks=self._reads.num_moved,
            written_blocks=self._writes.num_moved,
            dropped_blocks=self.backlog.num_dropped,
            failed_jobs=self._faults.num_failed,
            overdue_jobs=self._overdue_jobs,
            stuck_blocks=self._stuck_blocks,
            reads=self._reads.state,
            writes=self._writes.state,
            load_latency_s=0.0 if self.link is None else self.link.latency_s,
            load_blocks_per_s=0.0 if self.link is None else self.link.blocks_per_s,
            num_jobs=len(self.jobs),
            num_loading=self._reads.num_blocks,
            num_storing=self._writes.num_blocks,
            num_backlog=len(self.backlog),
            declined_blocks=self.backlog.num_declined,
            dropped_uses=self._uses.num_dropped,
            promotion_seconds=HistogramData(*self._reads.seconds.data()),
            write_seconds=HistogramData(*self._writes.seconds.data()),
        )

    def _unavailable_reason(self) -> str:
        if self._reset_again is not None:
            return f"reset failed: {self._faults.last_error}"
        names = [direction.name for direction in (self._reads, self._writes) if direction.state != "closed"]
        return f"{' and '.join(names)} paused: {self._faults.last_error}" if names else ""

    def _fail(self, direction: Direction, now_s: float, at_once: bool = False) -> None:
        if direction.record_failure(now_s, at_once):
            self._faults.note_pause(direction.name, self.config.pause_s)


def _key_list(keys: Any) -> list[bytes]:
    key_list = list(keys)
    for key in key_list:
        if type(key) is not bytes:
            raise TypeError(f"{key!r} is no key")
    return key_list


def _seconds(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
