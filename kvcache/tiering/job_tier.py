"""JobTier: everything of a tier but the I/O. A subclass moves buffers; see `kvcache.tiers.memory` for the smallest one.

It keeps jobs and their results, threads, refusals, cancelling, reset, quarantine of bad blocks, existence queries and
removals that no job caused, so that a tier on another medium is `get` and `put`, and `exists` or `open`.

Which thread calls what
-----------------------
The caller's thread (the scheduler's) calls the methods of `Tier` and the hooks `cut`, `mark_reset`, `on_stored`,
`on_loaded` and `on_used`, which must not wait. I/O threads call `get`, `put` and `exists`, a batch at a time and
several at once. One control thread, which never waits behind a batch that hangs, calls `open`, `clear`, `maintain` and
`close`. What any of the I/O methods raises fails the batch and is reported; it never reaches the scheduler.

Two kinds of media
------------------
A tier that owns its space (`open` returns `TierContents`, or `num_blocks` is given) has an index here: which block
lies in which slot, and what leaves when it is full. A medium that keeps its own index is asked with `exists`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Event, Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.tiering.existence import ExistenceCache
from kvcache.tiering.io_threads import LOAD, QUERY, STORE, IOThreads
from kvcache.tiering.slot_index import SlotIndex
from kvcache.tiering.tier import Tier, TierResult, TierStats, checked_host_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.request import ReqContext
    from kvcache.tiering.tier import HostBlocks

MAX_STEP_BLOCKS = 1024
"""Blocks whose end one call of `get_finished` takes in; the scheduler waits for it."""
_SHUTDOWN_S = 5.0
_RETRY_S = 1.0
_MAX_REMEMBERED_KEYS = 1 << 20
_CANCELLED = "cancelled"


class BlockOutcome(IntEnum):
    """What became of one block of a batch."""

    DONE = 0
    ABSENT = 1
    """To be loaded, and not there (any more)."""
    CORRUPT = 2
    """Loaded, and not what was stored: quarantined until its key is stored again."""
    REFUSED = 3
    """Not stored, for want of room or permission; no I/O failure."""
    HELD = 4
    """To be stored, and there already: another engine was first."""


@dataclass(frozen=True, slots=True)
class TierContents:
    """What `open` found.

    Parameters
    ----------
    num_blocks : int
        Slots of the tier.
    keys : list of bytes
        The blocks that are there, each once, least recently used first.
    slots : sequence of int
        Where they lie.
    last_seq : int
        The largest number that was given to a block so far; the next store gets the one after it.
    """

    num_blocks: int
    keys: list[bytes] = field(default_factory=list)
    slots: Sequence[int] | npt.NDArray[np.int64] = ()
    last_seq: int = 0


class TierBatch:
    """Blocks of one job that are moved by one call of `get` or `put`.

    Attributes
    ----------
    is_load : bool
        Whether host blocks are written to.
    keys : list of bytes
        Whose blocks these are.
    block_ids : list of int
        The host blocks, in the same order.
    slots : list of int or None
        Where they lie in a tier that owns its space.
    seqs : list of int or None
        For a store to such a tier: a number per block that only grows over its life.
    generation : int
        Resets before the batch was made; what an older batch leaves behind must not count.
    """

    def __init__(
        self,
        tier: JobTier,
        job_id: int,
        is_load: bool,
        keys: list[bytes],
        block_ids: list[int],
        slots: list[int] | None,
        seqs: list[int] | None,
    ) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.keys = keys
        self.block_ids = block_ids
        self.slots = slots
        self.seqs = seqs
        self.generation = tier.generation
        self.outcomes: Sequence[int] | None = None
        self.is_all_done = False
        self.error = ""
        self.end_s = 0.0
        self._tier = tier
        self._unclaimed = [True]

    @property
    def buffers(self) -> list[memoryview]:
        """The host blocks as buffers."""
        rows = self._tier.host_rows
        return [rows[block_id].data for block_id in self.block_ids]

    @property
    def addresses(self) -> list[int]:
        """The host blocks' addresses; each is `block_bytes` of contiguous memory."""
        rows = self._tier.host_rows
        start, stride = rows.ctypes.data, rows.strides[0]
        return [start + block_id * stride for block_id in self.block_ids]

    def claim(self) -> bool:
        """Return True to one caller: the thread that moves the batch, or whoever cancels it before."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def run(self) -> None:
        """Move the blocks, in an I/O thread."""
        if not self.claim():
            return
        try:
            outcomes = (self._tier.get if self.is_load else self._tier.put)(self)
        finally:
            self.end_s = time.monotonic()
        if outcomes is None:
            self.is_all_done = True
            return
        if len(outcomes) != len(self.keys):
            raise ValueError(f"{len(outcomes)} outcomes for {len(self.keys)} blocks")
        self.outcomes = [BlockOutcome(outcome) for outcome in outcomes]


class _Query:
    """Keys to be asked for."""

    def __init__(self, tier: JobTier, keys: list[bytes]) -> None:
        self.keys = keys
        self.generation = tier.generation
        self.is_held: list[bool] | None = None
        self.error = ""
        self._tier = tier

    def run(self) -> None:
        answer = [bool(one) for one in self._tier.exists(self.keys)]
        if len(answer) != len(self.keys):
            raise ValueError(f"exists answered {len(answer)} of {len(self.keys)} keys")
        self.is_held = answer


class _Job:
    """What is left of a job: batches under way, and the outcome so far."""

    __slots__ = ("batches", "done", "end_s", "error", "failed", "num_batches", "removed", "start_s")

    def __init__(self, failed: list[bytes], removed: list[bytes]) -> None:
        self.batches: list[TierBatch] = []
        self.num_batches = 0
        self.done: list[bytes] = []
        self.failed = failed
        self.removed = removed
        self.error = ""
        self.start_s = self.end_s = time.monotonic()


class JobTier(Tier):
    """A tier whose subclass only moves buffers.

    Parameters
    ----------
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    medium : str
        The medium's name in events.
    num_blocks : int, optional
        Blocks that the tier holds, if it owns its space and starts empty.
    cache_policy : str or type
        What leaves when it is full.
    num_threads : int
        Batches in flight.
    max_queued_blocks : int
        Blocks under way at most; more are refused.
    max_batch_blocks : int
        Blocks of one call of `get` or `put` at most.
    max_key_bytes : int, optional
        Longer keys are not stored.
    open_timeout_s : float
        How long the constructor waits for `open`; the tier is unavailable until it has ended.
    maintain_interval_s : float, optional
        How often `maintain` is called; None: only at the end.
    query_deadline_s : float
        How long an existence query may take.
    held_s, absent_s : float
        For how long the answer of an existence query counts.
    max_query_keys : int
        Keys of one call of `exists` at most.
    read_only : bool
        Whether stores are refused.

    Notes
    -----
    Call this constructor last in the subclass's own: it starts the threads. An error of `open` is raised here if it
    comes within `open_timeout_s`, and is the `unavailable_reason` if it comes later.
    """

    def __init__(
        self,
        host_blocks: HostBlocks,
        medium: str,
        *,
        num_blocks: int | None = None,
        cache_policy: str | type = "lru",
        num_threads: int = 4,
        max_queued_blocks: int = 65536,
        max_batch_blocks: int = 32,
        max_key_bytes: int | None = None,
        open_timeout_s: float = 10.0,
        maintain_interval_s: float | None = None,
        query_deadline_s: float = 1.0,
        held_s: float = 10.0,
        absent_s: float = 1.0,
        max_query_keys: int = 1024,
        read_only: bool = False,
    ) -> None:
        self.host_rows = checked_host_blocks(host_blocks).view(np.uint8)
        self.medium = medium
        self.num_blocks = 0 if num_blocks is None else num_blocks
        self.max_batch_blocks = max_batch_blocks
        self.generation = 0
        self._cache_policy = cache_policy
        self.max_queued_blocks: int = max_queued_blocks
        self._max_key_bytes = max_key_bytes
        self._maintain_interval_s = maintain_interval_s
        self._max_query_keys = max_query_keys
        self._read_only = read_only
        self._existence = ExistenceCache(held_s, absent_s, query_deadline_s, _MAX_REMEMBERED_KEYS)
        self._index: SlotIndex | None = None
        self._bad: set[bytes] = set()
        self._last_seq = 0
        self._jobs: dict[int, _Job] = {}
        self._results: list[TierResult] = []
        self._num_queued = 0
        self._counts = dict.fromkeys(("stored", "loaded", "evicted", "missed", "corrupt", "refused", "io_errors"), 0)
        self._last_error = ""
        self._store_error = ""
        self._reason = ""
        self._state = "opening"
        self._reset_error = ""
        self._old_jobs: set[int] = set()
        self._owns_space = False
        self._found: list[bytes] = []
        self._num_announced = 0
        self._removals: SimpleQueue[list[bytes]] = SimpleQueue()
        self._lock = Lock()
        self._threads: IOThreads[TierBatch | _Query] = IOThreads(num_threads, f"kvcache-{medium.lower()}")
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        self._fresh: SimpleQueue[tuple[int, SlotIndex | None, str]] = SimpleQueue()
        self._is_shut = False
        self._is_opened = Event()
        self._open_error: BaseException | None = None
        self._control = Thread(target=self._run_control, name=f"kvcache-{medium.lower()}-control", daemon=True)
        self._control.start()
        if self._is_opened.wait(open_timeout_s) and self._open_error is not None:
            self.shutdown()
            raise self._open_error

    # What a subclass writes.

    @abstractmethod
    def get(self, batch: TierBatch) -> Sequence[int] | None:
        """Fill the buffers of `batch`; return a `BlockOutcome` (DONE, ABSENT, CORRUPT) per key, None for all done."""

    @abstractmethod
    def put(self, batch: TierBatch) -> Sequence[int] | None:
        """Store the buffers of `batch`; return a `BlockOutcome` (DONE, HELD, REFUSED) per key, None for all done."""

    def exists(self, keys: list[bytes]) -> Sequence[bool]:
        """Return per key whether the medium holds it; only asked where the tier has no index of its own."""
        raise NotImplementedError(f"{type(self).__name__} neither opens with contents nor answers exists")

    def open(self) -> TierContents | None:
        """Connect, and return what a tier that owns its space found; None: the medium keeps its own index.

        What it has opened when it raises is its own to close.
        """
        return TierContents(self.num_blocks) if self.num_blocks else None

    def clear(self, generation: int) -> None:
        """Forget every block for good, before `generation` begins; what is raised is tried again until it is not."""

    def maintain(self) -> None:
        """Do what is due now and then, and once at the end."""

    def close(self) -> None:
        """Release resources; called once, when no thread uses them any more."""

    def cut(self, slots: list[int] | None, num_blocks: int) -> list[list[int]]:
        """Return the positions 0 .. `num_blocks` - 1 in groups, one for each batch.

        Parameters
        ----------
        slots : list of int or None
            Where the blocks lie, in a tier that owns its space.
        num_blocks : int
            Blocks of the job.
        """
        positions, size = list(range(num_blocks)), self.max_batch_blocks
        return [positions[first : first + size] for first in range(0, num_blocks, size)]

    def mark_reset(self) -> None:
        """Do the little of a reset that must be done before `reset` returns; the tier serves nothing by then."""

    def on_stored(self, batch: TierBatch) -> None:
        """Called when `batch` was written without an error."""

    def on_loaded(self, batch: TierBatch) -> None:
        """Called when `batch` was read without an error."""

    def on_used(self, slots: list[int], last_seq: int) -> None:
        """Called when the blocks in `slots` were used; the first one is the most recent, as of number `last_seq`."""

    # What a subclass calls, from any thread.

    def report_removed(self, keys: list[bytes]) -> None:
        """Answer keys as absent, since they left the medium without a job."""
        self._removals.put(list(keys))

    def set_unavailable(self, reason: str) -> None:
        """Answer and take nothing, for this `reason`; empty: work again."""
        self._reason = reason

    # What a manager calls.

    def lookup(self, keys: list[bytes]) -> int | None:
        with self._lock:
            if self._is_unavailable():
                return 0
            if self._index is not None:
                return self._index.count_held(keys)
            now_s = time.monotonic()
            if self._bad:
                keys = keys[: next((i for i, key in enumerate(keys) if key in self._bad), len(keys))]
            num_held, unknown, is_waiting = self._existence.count_held(keys, now_s)
            for first in range(0, len(unknown), self._max_query_keys):
                batch = unknown[first : first + self._max_query_keys]
                self._existence.ask(batch, now_s)
                self._threads.submit(_Query(self, batch), QUERY)
            return None if unknown or is_waiting else num_held

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        with self._lock:
            index = self._index
            if index is None or self._is_unavailable():
                return
            index.touch(keys, req_context)
            num_held = index.count_held(keys)
            if num_held:
                self._last_seq += num_held
                slots = index.locate(keys[:num_held])
                self._call_hook("on_used", lambda: self.on_used(slots, self._last_seq))

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            if self._index is not None:
                self._index.end_request(req_context)

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        with self._lock:
            self._check_job(job_id, keys, block_ids)
            if self._read_only or not self._has_room(len(keys)):
                self._counts["refused"] += len(keys)
                return False
            source = dict(zip(keys, block_ids, strict=True))
            limit = self._max_key_bytes
            refused = [] if limit is None else [key for key in source if len(key) > limit]
            offered = [key for key in source if len(key) <= limit] if refused and limit is not None else list(source)
            slots: list[int] | None = None
            removed: list[bytes] = []
            if self._index is None:
                now_s = time.monotonic()
                placed = [key for key in offered if key in self._bad or not self._existence.is_held(key, now_s)]
            else:
                placement = self._index.place(offered)
                if placement is None:
                    self._counts["refused"] += len(keys)
                    return False
                placed, slots, removed = placement
            self._counts["refused"] += len(refused)
            first_seq = self._last_seq + 1
            self._last_seq += len(placed)
            seqs = list(range(first_seq, self._last_seq + 1))
            self._start(job_id, _Job(refused, removed), False, placed, source, slots, seqs)
            return True

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        with self._lock:
            self._check_job(job_id, keys, block_ids)
            if not self._has_room(len(keys)):
                self._counts["refused"] += len(keys)
                return False
            target = dict(zip(keys, block_ids, strict=True))
            slots: list[int] | None = None
            if self._index is None:
                held = [key for key in target if key not in self._bad]
                missed = [key for key in target if key in self._bad]
            else:
                held, missed = self._index.split_held(list(target))
                slots = self._index.pin(held)
            self._counts["missed"] += len(missed)
            self._start(job_id, _Job(missed, []), True, held, target, slots, None)
            return True

    def cancel(self, job_id: int) -> None:
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None:
                for batch in [batch for batch in job.batches if batch.claim()]:
                    batch.error = _CANCELLED
                    self._end_batch(batch)

    def get_finished(self) -> list[TierResult]:
        with self._lock:
            num_blocks = 0
            while num_blocks < MAX_STEP_BLOCKS and (task := self._threads.get_finished()) is not None:
                num_blocks += len(task.keys)
                if isinstance(task, TierBatch):
                    # One that was cancelled has been reported.
                    if task.error != _CANCELLED:
                        self._end_batch(task)
                else:
                    self._end_query(task)
            self._take_removals()
            self._take_fresh_index()
            results, self._results = self._results, []
            if self._found:
                self._announce(results)
            return results

    def reset(self) -> None:
        with self._lock:
            if self._state == "shut":
                return
            self.generation += 1
            self._found = []
            self._existence.clear()
            if self._state != "opening":
                self._state = "resetting"
            for job_id in list(self._jobs):
                for batch in [batch for batch in self._jobs[job_id].batches if batch.claim()]:
                    batch.error = _CANCELLED
                    self._end_batch(batch)
            self._old_jobs.update(self._jobs)
        self._try("mark_reset", self.mark_reset)
        self._orders.put(self.generation)

    def stats(self) -> TierStats:
        with self._lock:
            index, counts = self._index, self._counts
            return TierStats(
                medium=self.medium,
                num_blocks=self.num_blocks,
                num_held=self._existence.num_held if index is None else index.num_held,
                stored_blocks=counts["stored"],
                loaded_blocks=counts["loaded"],
                evicted_blocks=counts["evicted"] + (0 if index is None else index.num_evicted),
                missed_blocks=counts["missed"],
                corrupt_blocks=counts["corrupt"],
                refused_blocks=counts["refused"],
                io_errors=counts["io_errors"],
                last_error=self._last_error,
                unavailable_reason=self._unavailable_reason() or self._store_error,
            )

    def shutdown(self) -> None:
        with self._lock:
            if self._is_shut:
                return
            self._is_shut = True
            self._reason = "shut down"
            self._state = "shut"
        self._threads.close(_SHUTDOWN_S)
        self._orders.put(None)
        self._control.join(_SHUTDOWN_S)

    def _is_unavailable(self) -> bool:
        return bool(self._reason) or self._state != "open"

    def _unavailable_reason(self) -> str:
        if self._reason or self._state == "open":
            return self._reason
        if self._state == "opening":
            return "opening"
        return f"reset failed: {self._reset_error}" if self._reset_error else "reset under way"

    def _check_job(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> None:
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is still under way")
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys need as many block ids, got {len(block_ids)}")

    def _has_room(self, num_blocks: int) -> bool:
        return not self._is_unavailable() and self._num_queued + num_blocks <= self.max_queued_blocks

    def _start(
        self,
        job_id: int,
        job: _Job,
        is_load: bool,
        keys: list[bytes],
        host: dict[bytes, int],
        slots: list[int] | None,
        seqs: list[int] | None,
    ) -> None:
        self._jobs[job_id] = job
        block_ids = [host[key] for key in keys]
        in_order = list(range(len(keys)))
        groups = self._cut(slots, in_order) if keys else []
        if groups == [in_order]:
            job.batches.append(TierBatch(self, job_id, is_load, keys, block_ids, slots, seqs))
        else:
            for positions in groups:
                job.batches.append(
                    TierBatch(
                        self,
                        job_id,
                        is_load,
                        [keys[i] for i in positions],
                        [block_ids[i] for i in positions],
                        None if slots is None else [slots[i] for i in positions],
                        None if seqs is None else [seqs[i] for i in positions],
                    )
                )
        job.num_batches = len(job.batches)
        self._num_queued += len(keys)
        for batch in job.batches:
            self._threads.submit(batch, LOAD if is_load else STORE)
        self._end_job_if_done(job_id, job)

    def _cut(self, slots: list[int] | None, in_order: list[int]) -> list[list[int]]:
        """Return what `cut` says if it names every position once, and batches of `max_batch_blocks` otherwise."""
        num_blocks = len(in_order)
        groups: list[list[int]] = self._call_hook("cut", lambda: self.cut(slots, num_blocks))
        try:
            if groups == [in_order]:
                return groups
            if sorted(position for group in groups for position in group) == in_order:
                return [group for group in groups if group]
            self._note_error(f"cut: {groups!r} does not name each of {num_blocks} positions once")
        except TypeError:
            pass
        return JobTier.cut(self, slots, num_blocks)

    def _call_hook(self, name: str, hook: Callable[[], Any]) -> Any:
        # Whatever a subclass's hook raises, a job must end and a slot must not be lost.
        try:
            return hook()
        except Exception as error:
            self._note_error(f"{name}: {type(error).__name__}: {error}")
            return None

    def _end_batch(self, batch: TierBatch) -> None:
        job = self._jobs[batch.job_id]
        self._num_queued -= len(batch.keys)
        if batch.error and batch.error != _CANCELLED:
            self._note_error(batch.error)
        (self._end_load if batch.is_load else self._end_store)(batch, job)
        job.num_batches -= 1
        job.end_s = max(job.end_s, batch.end_s)
        if batch.error != _CANCELLED:
            job.error = job.error or batch.error
        self._end_job_if_done(batch.job_id, job)

    def _end_store(self, batch: TierBatch, job: _Job) -> None:
        done, held = _keys_with(batch, BlockOutcome.DONE), _keys_with(batch, BlockOutcome.HELD)
        there = done + held if held else done
        if self._index is not None:
            self._index.end_store(batch.keys, there)
        elif batch.generation == self.generation:
            self._bad.difference_update(there)
            self._existence.learn(there, True, time.monotonic())
        job.done += done
        if len(there) < len(batch.keys):
            written = set(there)
            job.failed += [key for key in batch.keys if key not in written]
        self._counts["stored"] += len(done)
        if not batch.error:
            self._counts["refused"] += len(batch.keys) - len(there)
            self._store_error = ""
            self._call_hook("on_stored", lambda: self.on_stored(batch))
        elif batch.error != _CANCELLED:
            self._store_error = f"stores fail: {batch.error}"

    def _end_load(self, batch: TierBatch, job: _Job) -> None:
        if self._index is not None:
            self._index.unpin(batch.keys)
        if batch.error:
            # Nothing is known of blocks that were not read, so they stay.
            job.failed += batch.keys
            return
        done, corrupt = _keys_with(batch, BlockOutcome.DONE), _keys_with(batch, BlockOutcome.CORRUPT)
        job.done += done
        self._counts["loaded"] += len(done)
        if len(done) < len(batch.keys):
            arrived = set(done)
            lost = [key for key in batch.keys if key not in arrived]
            job.failed += lost
            self._counts["corrupt"] += len(corrupt)
            self._counts["missed"] += len(lost) - len(corrupt)
            job.removed += self._forget(lost, corrupt)
        self._call_hook("on_loaded", lambda: self.on_loaded(batch))

    def _forget(self, lost: list[bytes], corrupt: list[bytes]) -> list[bytes]:
        """Answer blocks as absent; return those that counted as held."""
        if self._index is not None:
            return self._index.quarantine(lost)
        now_s = time.monotonic()
        known = [key for key in lost if self._existence.is_held(key, now_s)]
        self._existence.learn(lost, False, now_s)
        self._bad.update(corrupt)
        return known

    def _end_job_if_done(self, job_id: int, job: _Job) -> None:
        if not job.num_batches:
            del self._jobs[job_id]
            self._old_jobs.discard(job_id)
            self._results.append(
                TierResult(job_id, job.done, job.failed, job.removed, job.error, job.start_s, job.end_s)
            )

    def _end_query(self, query: _Query) -> None:
        if query.error:
            self._note_error(f"exists: {query.error}")
        if query.generation == self.generation:
            # What could not be asked counts as absent for a while, so that it is not asked at once again.
            is_held = query.is_held or [False] * len(query.keys)
            self._existence.answer(query.keys, is_held, time.monotonic())

    def _take_removals(self) -> None:
        num_blocks = 0
        # Nobody else takes any out: what is seen here is there.
        while num_blocks < MAX_STEP_BLOCKS and not self._removals.empty():
            keys = self._removals.get()
            num_blocks += len(keys)
            if removed := self._forget(keys, []):
                self._results.append(TierResult(None, [], removed=removed))

    def _announce(self, results: list[TierResult]) -> None:
        """Report some of what was found at the start, and is still held; it belongs to no job."""
        keys = self._found[self._num_announced : self._num_announced + MAX_STEP_BLOCKS]
        self._num_announced += len(keys)
        if self._num_announced == len(self._found):
            self._found = []
        if self._index is not None and (held := self._index.split_held(keys)[0]):
            results.append(TierResult(None, held))

    def _take_fresh_index(self) -> None:
        """Go on with an empty index once a reset is durable and the last job from before it was reported."""
        if self._old_jobs or self._state not in {"opening", "resetting"}:
            return
        while True:
            try:
                generation, index, error = self._fresh.get_nowait()
            except Empty:
                return
            if generation != self.generation:
                continue
            self._reset_error = error
            if error:
                self._note_error(f"reset: {error}")
                continue
            if self._index is not None:
                # The fresh one counts from 0, and counters never go back.
                self._counts["evicted"] += self._index.num_evicted
            self._index = index
            self._bad.clear()
            self._state = "open"
            return

    def _note_error(self, error: str) -> None:
        self._counts["io_errors"] += 1
        self._last_error = error

    def _run_control(self) -> None:
        """Open, then clear and maintain until the end."""
        try:
            contents = self.open()
            try:
                index = self._new_index(contents)
            except BaseException:
                self._try("close", self.close)
                raise
        except BaseException as error:
            self._open_error = error
            self._reason = f"opening failed: {type(error).__name__}: {error}"
            self._is_opened.set()
            return
        with self._lock:
            self._owns_space = contents is not None
            if contents is not None:
                self.num_blocks = contents.num_blocks
                self._last_seq = max(self._last_seq, contents.last_seq)
            if self._state == "opening" and not self.generation:
                self._index = index
                self._found = [] if contents is None else list(contents.keys)
                self._state = "open"
            elif self._state == "opening":
                self._state = "resetting"
        self._is_opened.set()
        wanted: int | None = None
        while True:
            interval_s = self._maintain_interval_s if wanted is None else _RETRY_S
            try:
                order = self._orders.get(timeout=interval_s)
                if order is None:
                    break
                wanted = order
            except Empty:
                pass
            if wanted is not None:
                wanted = self._try_clear(wanted)
            else:
                self._try("maintenance", self.maintain)
        self._try("maintenance", self.maintain)
        # A thread that hangs still uses what would be closed, and `shutdown` does not wait for this one for ever.
        if self._threads.close(TIMEOUT_MAX):
            self._try("close", self.close)

    def _try_clear(self, generation: int) -> int | None:
        """Make a reset durable; return the generation if it has to be tried again."""
        try:
            self.clear(generation)
            index = self._new_index(TierContents(self.num_blocks) if self._owns_space else None)
        except BaseException as error:
            self._fresh.put((generation, None, f"{type(error).__name__}: {error}"))
            return generation
        self._fresh.put((generation, index, ""))
        return None

    def _new_index(self, contents: TierContents | None) -> SlotIndex | None:
        if contents is None:
            return None
        return SlotIndex(contents.num_blocks, self._cache_policy, contents.keys, contents.slots)

    def _try(self, what: str, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception as error:
            with self._lock:
                self._note_error(f"{what}: {type(error).__name__}: {error}")


def _keys_with(batch: TierBatch, outcome: BlockOutcome) -> list[bytes]:
    if batch.is_all_done and not batch.error:
        return batch.keys if outcome == BlockOutcome.DONE else []
    if batch.error or batch.outcomes is None:
        return []
    return [key for key, one in zip(batch.keys, batch.outcomes, strict=True) if one == outcome]
