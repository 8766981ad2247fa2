"""The jobs of a `JobTier`: their batches under way, and the results that the scheduler has not taken yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from kvcache.tiering.tier import TierResult

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks

CANCELLED = "cancelled"


class BlockOutcome(IntEnum):
    """The outcome of one block of a batch."""

    DONE = 0
    ABSENT = 1
    """Load: the medium does not hold the block (any more)."""
    CORRUPT = 2
    """Load: the bytes are not those that were stored. The block is quarantined until its key is stored again."""
    REFUSED = 3
    """Store: no room or no permission; not an I/O failure."""
    HELD = 4
    """Store: the medium holds the block already."""


class TierBatch:
    """Blocks of one job that are moved by one call of `get` or `put`.

    Attributes
    ----------
    is_load : bool
        Whether host blocks are written to.
    keys : list of bytes
        The blocks' keys.
    block_ids : list of int
        Rows of `JobTier.host_rows`, in the same order.
    slots : list of int or None
        The blocks' slots, in a tier that owns its space.
    seqs : list of int or None
        Stores to such a tier: a number per block that grows with each store.
    generation : int
        Number of resets before the batch was made. A block of an older batch must not be found after a reset.
    """

    def __init__(
        self,
        host_rows: HostBlocks,
        job_id: int,
        is_load: bool,
        keys: list[bytes],
        block_ids: list[int],
        slots: list[int] | None,
        seqs: list[int] | None,
        generation: int,
    ) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.keys = keys
        self.block_ids = block_ids
        self.slots = slots
        self.seqs = seqs
        self.generation = generation
        self._host_rows = host_rows

    @property
    def buffers(self) -> list[memoryview]:
        """The host blocks as buffers."""
        return [self._host_rows[block_id].data for block_id in self.block_ids]

    @property
    def addresses(self) -> list[int]:
        """The host blocks' addresses; each is `block_bytes` of contiguous memory."""
        start, stride = self._host_rows.ctypes.data, self._host_rows.strides[0]
        return [start + block_id * stride for block_id in self.block_ids]

    def part(
        self, positions: Sequence[int], host_rows: HostBlocks | None = None, block_ids: list[int] | None = None
    ) -> TierBatch:
        """Return the blocks at `positions` as a batch; `host_rows` and `block_ids` replace their host memory."""
        return TierBatch(
            self._host_rows if host_rows is None else host_rows,
            self.job_id,
            self.is_load,
            [self.keys[i] for i in positions],
            [self.block_ids[i] for i in positions] if block_ids is None else block_ids,
            None if self.slots is None else [self.slots[i] for i in positions],
            None if self.seqs is None else [self.seqs[i] for i in positions],
            self.generation,
        )


def checked_outcomes(outcomes: Sequence[int] | None, batch: TierBatch) -> list[BlockOutcome]:
    """Return what `get` or `put` answered for `batch`, an outcome per key; ValueError if it is something else."""
    if outcomes is None:
        return [BlockOutcome.DONE] * len(batch.keys)
    if len(outcomes) != len(batch.keys):
        raise ValueError(f"{len(outcomes)} outcomes for {len(batch.keys)} blocks")
    return [BlockOutcome(outcome) for outcome in outcomes]


class Move:
    """A batch as a task of an I/O thread."""

    def __init__(self, batch: TierBatch, move: Callable[[TierBatch], Sequence[int] | None]) -> None:
        self.batch = batch
        self.keys = batch.keys
        self.outcomes: list[BlockOutcome] = []
        self.is_all_done = False
        self.error = ""
        self.end_s = 0.0
        self._move = move
        self._unclaimed = [True]

    def claim(self) -> bool:
        """Return True to one caller: the thread that moves the batch, or the one that cancels it before."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def run(self) -> None:
        """Move the blocks."""
        if self.claim():
            try:
                outcomes = self._move(self.batch)
            finally:
                self.end_s = time.monotonic()
            if outcomes is None:
                self.is_all_done = True
            else:
                self.outcomes = checked_outcomes(outcomes, self.batch)

    def keys_with(self, outcome: BlockOutcome) -> list[bytes]:
        """Return the keys of the blocks with this outcome; none if the batch failed as a whole."""
        if self.is_all_done:
            return self.keys if outcome == BlockOutcome.DONE else []
        if self.error:
            return []
        return [key for key, one in zip(self.keys, self.outcomes, strict=True) if one == outcome]


class _Job:
    """The moves of a job, and its outcome so far."""

    __slots__ = ("moves", "num_left", "result", "start_s")

    def __init__(self, moves: list[Move], result: dict[str, Any]) -> None:
        self.moves = moves
        self.num_left = len(moves)
        self.result = result


class JobTable:
    """Jobs by their id, until their last batch has ended; `num_queued` blocks are under way."""

    def __init__(self) -> None:
        self.num_queued = 0
        self._jobs: dict[int, _Job] = {}
        self._old: set[int] = set()
        self._results: list[TierResult] = []

    @property
    def has_old(self) -> bool:
        """Whether a job from before the last reset is under way."""
        return bool(self._old)

    def check(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> None:
        """Raise ValueError if such a job cannot begin."""
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is still under way")
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys need as many block ids, got {len(block_ids)}")

    def start(self, job_id: int, moves: list[Move], failed: list[bytes], removed: list[bytes]) -> None:
        """Add a job; `failed` and `removed` are known before any block moves."""
        now_s = time.monotonic()
        result = {"done": [], "failed": failed, "removed": removed, "error": "", "start_s": now_s, "end_s": now_s}
        self._jobs[job_id] = _Job(moves, result)
        self.num_queued += sum(len(move.keys) for move in moves)
        self._report_ended(job_id)

    def end(self, move: Move, done: list[bytes], failed: list[bytes], removed: Iterable[bytes] = ()) -> None:
        """Add a move's outcome to its job, and report the job after the last one."""
        job = self._jobs[move.batch.job_id]
        result = job.result
        result["done"] += done
        result["failed"] += failed
        result["removed"] += removed
        result["end_s"] = max(result["end_s"], move.end_s)
        if move.error != CANCELLED:
            result["error"] = result["error"] or move.error
        self.num_queued -= len(move.keys)
        job.num_left -= 1
        self._report_ended(move.batch.job_id)

    def claim_waiting(self, job_id: int | None = None) -> list[Move]:
        """Claim the moves of a job, or of all jobs, that have not begun; the caller ends them as cancelled."""
        jobs = list(self._jobs.values()) if job_id is None else [self._jobs[job_id]] if job_id in self._jobs else []
        moves = [move for job in jobs for move in job.moves if move.claim()]
        for move in moves:
            move.error = CANCELLED
        return moves

    def mark_old(self) -> None:
        """Mark the jobs under way as older than a reset."""
        self._old.update(self._jobs)

    def report(self, result: TierResult) -> None:
        """Add what happened without a job."""
        self._results.append(result)

    def take_results(self) -> list[TierResult]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results

    def _report_ended(self, job_id: int) -> None:
        job = self._jobs[job_id]
        if not job.num_left:
            del self._jobs[job_id]
            self._old.discard(job_id)
            self._results.append(TierResult(job_id, **job.result))
