"""What a manager knows of one tier: jobs under way, deadlines, circuit breakers, and what it gave up.

A tier may be slow, dead, or lose a job for ever. So every job has a deadline, after which nobody waits for it; each
direction has a breaker of its own (a full disk can still be read); and blocks under way are bounded, those of lost
jobs included.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from kvcache.options import check_int, check_seconds
from kvcache.tiering.write_policy import DirtyBlocks

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiering.tier import Tier, TierResult, TierStats

_LOG = logging.getLogger(__name__)
WRITE_POLICIES = ("write_through", "write_back", "write_through_selective")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """How a manager uses one tier.

    Parameters
    ----------
    write_policy : str
        When blocks are written to it: ``"write_through"`` (when they become ready in host memory), ``"write_back"``
        (before they leave it) or ``"write_through_selective"``.
    num_uses : int
        With ``"write_through_selective"``: how many uses, the first store counted.
    deadline_s : float
        How long a job may take before nobody waits for it any more.
    max_store_blocks : int
        Blocks being written at most; they stay in host memory so long.
    max_failures : int
        Failed jobs in a row that open the breaker.
    pause_s : float
        How long an open breaker keeps the tier quiet before one job tries again.

    Raises
    ------
    ValueError
        A value is out of range.
    """

    write_policy: str = "write_through"
    num_uses: int = 2
    deadline_s: float = 5.0
    max_store_blocks: int = 64
    max_failures: int = 3
    pause_s: float = 5.0

    def __post_init__(self) -> None:
        if self.write_policy not in WRITE_POLICIES:
            raise ValueError(f"write_policy must be one of {', '.join(WRITE_POLICIES)}, got {self.write_policy!r}")
        for name in ("num_uses", "max_store_blocks", "max_failures"):
            check_int(name, getattr(self, name))
        for name in ("deadline_s", "pause_s"):
            check_seconds(name, getattr(self, name))


RULE_OPTIONS = tuple(option.name for option in fields(TierConfig))


@dataclass(frozen=True, slots=True)
class TierControllerStats:
    """Of one tier under a manager: the tier's own statistics, and what the manager saw of it.

    `dropped_blocks` were to be written and were not; `overdue_jobs` missed their deadline, `stuck_blocks` of host
    memory still belong to such jobs; `reads` and `writes` are ``"open"``, ``"paused"`` or ``"probing"``.
    """

    tier: TierStats
    promoted_blocks: int
    written_blocks: int
    dropped_blocks: int
    failed_jobs: int
    overdue_jobs: int
    stuck_blocks: int
    reads: str
    writes: str


class Breaker:
    """Keep away from what fails, and try it again after a while with a single job.

    Parameters
    ----------
    max_failures : int
        Failures in a row that open it.
    pause_s : float
        How long it stays open.
    """

    def __init__(self, max_failures: int, pause_s: float) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._until_s: float | None = None
        self._is_probing = False

    @property
    def state(self) -> str:
        """``"open"`` to jobs, ``"paused"``, or ``"probing"``."""
        if self._until_s is None:
            return "open"
        return "probing" if self._is_probing else "paused"

    def allows(self, now_s: float) -> bool:
        """Return whether a job may be sent."""
        return self._until_s is None or (now_s >= self._until_s and not self._is_probing)

    def sent(self) -> None:
        """Hear that a job was sent."""
        self._is_probing = self._until_s is not None

    def succeeded(self) -> None:
        """Hear that a job ended well."""
        self._num_failures = 0
        self._until_s = None
        self._is_probing = False

    def failed(self, now_s: float, at_once: bool = False) -> None:
        """Hear that a job failed; `at_once` opens the breaker without counting."""
        self._num_failures += 1
        if at_once or self._is_probing or self._num_failures >= self._max_failures:
            self._until_s = now_s + self._pause_s
            self._is_probing = False


@dataclass(slots=True, eq=False)
class TierJob:
    """A job under way.

    `waiters` are the requests that asked for its blocks. A job that a reset did not wait for has `stand_ins`: keys that
    keep its host blocks from everybody until it is reported.
    """

    job_id: int
    lane: TierController
    is_load: bool
    keys: list[bytes]
    block_ids: list[int]
    deadline_s: float
    stand_ins: list[bytes] = field(default_factory=list)
    waiters: set[ReqContext | None] = field(default_factory=set)
    is_overdue: bool = False


class TierController:
    """One tier under a manager.

    Parameters
    ----------
    tier : Tier
        Driven by nobody else.
    rule : TierConfig
        How it is used.
    max_load_blocks : int
        Blocks being read at most.
    num_blocks : int
        Slots of the host pool; at most so many keys wait to be written.

    Attributes
    ----------
    ahead : DirtyBlocks or None
        What host memory holds and the tier does not, if it is written on eviction.
    """

    def __init__(self, tier: Tier, rule: TierConfig, max_load_blocks: int, num_blocks: int) -> None:
        self.tier = tier
        self.rule = rule
        self.moves: dict[int, TierJob] = {}
        self.backlog: deque[bytes] = deque()
        self.ahead = DirtyBlocks(num_blocks) if rule.write_policy == "write_back" else None
        self.dropped_blocks = 0
        self._max_load_blocks = max_load_blocks
        self._max_backlog_blocks = num_blocks
        self._reads = Breaker(rule.max_failures, rule.pause_s)
        self._writes = Breaker(rule.max_failures, rule.pause_s)
        self._num_loading = 0
        self._num_storing = 0
        self._stuck_blocks = 0
        self._promoted_blocks = 0
        self._written_blocks = 0
        self._failed_jobs = 0
        self._overdue_jobs = 0

    def may_load(self, now_s: float) -> bool:
        """Return whether it is worth asking the tier for blocks."""
        return self._reads.allows(now_s) and self._stuck_blocks < self._max_load_blocks

    def may_store(self, now_s: float) -> bool:
        """Return whether it is worth offering blocks to the tier."""
        return self._writes.allows(now_s) and self._stuck_blocks < self.rule.max_store_blocks

    @property
    def load_room(self) -> int:
        """Blocks that may be sent to be read now."""
        return max(0, self._max_load_blocks - self._num_loading)

    @property
    def store_room(self) -> int:
        """Blocks that may be sent to be written now."""
        return max(0, self.rule.max_store_blocks - self._num_storing)

    def offer(self, keys: Iterable[bytes]) -> None:
        """Put keys into the backlog; what it cannot hold is dropped, longest waiting first."""
        self.backlog.extend(keys)
        while len(self.backlog) > self._max_backlog_blocks:
            self.backlog.popleft()
            self.dropped_blocks += 1

    def drop_backlog(self) -> None:
        """Give up what waits to be written."""
        self.dropped_blocks += len(self.backlog)
        self.backlog.clear()

    def lookup(self, keys: list[bytes], now_s: float) -> int | None:
        """Return how many of the first keys the tier can load, 0 while it is quiet; None: ask again."""
        if not self.may_load(now_s):
            return 0
        try:
            return self.tier.lookup(keys)
        except Exception:
            self._complain("lookup")
            self._reads.failed(now_s)
            return 0

    def leave(self, keys: list[bytes]) -> None:
        """Hear what left host memory; what the tier should have had is lost, and counted."""
        if self.ahead is not None:
            self.dropped_blocks += self.ahead.leave(keys)

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Tell the tier of a use."""
        if self.ahead is not None:
            self.ahead.touch(keys)
        try:
            self.tier.touch(keys, req_context)
        except Exception:
            self._complain("touch")

    def finish(self, req_context: ReqContext) -> None:
        """Tell the tier of a request's end."""
        try:
            self.tier.on_request_finished(req_context)
        except Exception:
            self._complain("on_request_finished")

    def send(self, move: TierJob) -> bool:
        """Give a job to the tier; return whether it took it."""
        submit = self.tier.submit_load if move.is_load else self.tier.submit_store
        try:
            is_taken = submit(move.job_id, move.keys, move.block_ids)
        except Exception:
            # What it took before it raised is not known: the job counts as lost.
            self._complain("submit")
            is_taken = True
        if not is_taken:
            return False
        self.moves[move.job_id] = move
        if move.is_load:
            self._num_loading += len(move.keys)
            self._reads.sent()
        else:
            self._num_storing += len(move.keys)
            self._writes.sent()
        return True

    def note_overdue(self, now_s: float) -> None:
        """Mark the jobs whose deadline has passed, and pause their direction."""
        for move in self.moves.values():
            if now_s >= move.deadline_s and not move.is_overdue:
                move.is_overdue = True
                self._overdue_jobs += 1
                self._stuck_blocks += len(move.keys)
                (self._reads if move.is_load else self._writes).failed(now_s, at_once=True)

    def ended(self, now_s: float) -> list[tuple[TierJob, TierResult]]:
        """Return the jobs that the tier reports, with their results; a report of an unknown job is ignored."""
        pairs = []
        try:
            results = self.tier.get_finished()
        except Exception:
            self._complain("finished")
            return []
        for result in results:
            move = None if result.job_id is None else self.moves.pop(result.job_id, None)
            if move is None:
                continue
            breaker = self._reads if move.is_load else self._writes
            if result.error:
                self._failed_jobs += 1
                breaker.failed(now_s)
            elif not move.is_overdue:
                breaker.succeeded()
            if move.is_overdue:
                self._stuck_blocks -= len(move.keys)
            if move.is_load:
                self._num_loading -= len(move.keys)
                self._promoted_blocks += len(result.done)
            else:
                self._num_storing -= len(move.keys)
                self._written_blocks += len(result.done)
                self.dropped_blocks += len(result.failed)
            pairs.append((move, result))
        return pairs

    def _complain(self, verb: str) -> None:
        # A tier may be anybody's code, and the engine's thread must not pay for it.
        self._failed_jobs += 1
        _LOG.exception("tier %s: %s raised, which a tier must not do", self.tier.medium, verb)

    def stats(self) -> TierControllerStats:
        """Return counters since start and gauges now."""
        return TierControllerStats(
            tier=self.tier.stats(),
            promoted_blocks=self._promoted_blocks,
            written_blocks=self._written_blocks,
            dropped_blocks=self.dropped_blocks,
            failed_jobs=self._failed_jobs,
            overdue_jobs=self._overdue_jobs,
            stuck_blocks=self._stuck_blocks,
            reads=self._reads.state,
            writes=self._writes.state,
        )
