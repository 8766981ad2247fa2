"""The jobs of a `JobTier`, their batches, and what became of them; an I/O thread moves one batch at a time."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvcache.tiers.base.io_threads import Task
from kvcache.tiers.base.tier import TierResult

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

CANCELLED = "cancelled"
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write for which the disk or a quota has no room, or the file would be too large."""


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


@dataclass(slots=True, eq=False)
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

    job_id: int
    is_load: bool
    keys: list[bytes]
    block_ids: list[int]
    slots: list[int] | None
    seqs: list[int] | None
    generation: int
    _host_rows: HostBlocks = field(repr=False)

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
            self.job_id,
            self.is_load,
            [self.keys[i] for i in positions],
            [self.block_ids[i] for i in positions] if block_ids is None else block_ids,
            None if self.slots is None else [self.slots[i] for i in positions],
            None if self.seqs is None else [self.seqs[i] for i in positions],
            self.generation,
            self._host_rows if host_rows is None else host_rows,
        )


def checked_outcomes(outcomes: Sequence[int] | None, batch: TierBatch) -> list[BlockOutcome]:
    """Return what `get` or `put` answered for `batch`, an outcome per key; ValueError if it is something else."""
    if outcomes is None:
        return [BlockOutcome.DONE] * len(batch.keys)
    if len(outcomes) != len(batch.keys):
        raise ValueError(f"{len(outcomes)} outcomes for {len(batch.keys)} blocks")
    return [BlockOutcome(outcome) for outcome in outcomes]


class Removal(Task):
    """Blocks that left the medium without a job."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = list(keys)


class Move(Task):
    """A batch as a task of an I/O thread."""

    def __init__(self, batch: TierBatch, move: Callable[[TierBatch], Sequence[int] | None]) -> None:
        self.batch = batch
        self.keys = batch.keys
        # None: all done.
        self.outcomes: list[BlockOutcome] | None = []
        self.end_s = 0.0
        self.has_no_room = False
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
            except OSError as error:
                self.has_no_room = error.errno in NO_ROOM
                raise
            finally:
                self.end_s = time.monotonic()
            self.outcomes = None if outcomes is None else checked_outcomes(outcomes, self.batch)

    def keys_with(self, outcome: BlockOutcome) -> list[bytes]:
        """Return the keys of the blocks with this outcome; none if the batch failed as a whole."""
        if self.outcomes is None:
            return self.keys if outcome == BlockOutcome.DONE else []
        return [key for key, result in zip(self.keys, self.outcomes, strict=False) if result == outcome]


@dataclass(slots=True)
class Job:
    """The moves of a job, how many have not ended, and the fields of its result so far."""

    moves: list[Move]
    num_left: int
    result: dict[str, Any]


class Jobs:
    """The jobs under way, the blocks in them, and the results that have not been reported."""

    def __init__(self) -> None:
        self.under_way: dict[int, Job] = {}
        self.num_blocks = 0
        self.results: list[TierResult] = []

    def begin(self, job_id: int, moves: list[Move], failed: list[bytes], removed: list[bytes]) -> None:
        """Add a job; some of its blocks may have failed already."""
        now_s = time.monotonic()
        result = {"done": [], "failed": failed, "removed": removed, "error": "", "start_s": now_s, "end_s": now_s}
        self.under_way[job_id] = Job(moves, len(moves), result)
        self.num_blocks += sum(len(move.keys) for move in moves)
        self._report_ended(job_id)

    def end_part(self, move: Move, done: list[bytes], failed: list[bytes], removed: Iterable[bytes] = ()) -> None:
        """Add a move's outcome to its job, and report the job after the last one."""
        job = self.under_way[move.batch.job_id]
        result = job.result
        result["done"] += done
        result["failed"] += failed
        result["removed"] += removed
        result["end_s"] = max(result["end_s"], move.end_s)
        if move.error != CANCELLED:
            result["error"] = result["error"] or move.error
        self.num_blocks -= len(move.keys)
        job.num_left -= 1
        self._report_ended(move.batch.job_id)

    def _report_ended(self, job_id: int) -> None:
        job = self.under_way[job_id]
        if not job.num_left:
            del self.under_way[job_id]
            self.results.append(TierResult(job_id, **job.result))


class Counts(Counter[str]):
    """The counters of a tier by the names of `TierStats`, and its last errors, which any thread may note."""

    def __init__(self) -> None:
        super().__init__()
        self.last_error = ""
        self.store_error = ""
        self._lock = Lock()

    def note_error(self, error: str) -> None:
        """Count an error."""
        with self._lock:
            self["io_errors"] += 1
            self.last_error = error

    def attempt(self, name: str, hook: Callable[..., Any], *args: Any) -> Any:
        """Call a subclass's hook. If it raises, a job must still end and no slot may be lost: count that."""
        try:
            return hook(*args)
        except Exception as error:
            self.note_error(f"{name}: {type(error).__name__}: {error}")
            return None
