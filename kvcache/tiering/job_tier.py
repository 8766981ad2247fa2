"""JobTier: everything of a tier but the I/O. A subclass moves buffers; see `kvcache.tiers.memory` for the smallest one.

It keeps jobs and their results, threads, refusals, cancelling, reset, quarantine of bad blocks, codecs, existence
queries and removals without a job. A tier on another medium is `get` and `put`, and `exists` or `open`.

Which thread calls what
-----------------------
The caller's thread (the scheduler's) calls the methods of `Tier` and the hooks `cut`, `mark_reset`, `on_stored`,
`on_loaded` and `on_used`, which must not wait. I/O threads call `get`, `put` and `exists`, a batch at a time and
several at once. One control thread, which never waits behind a batch that hangs, calls `open`, `clear`, `maintain` and
`close`. An exception in an I/O method fails the batch and is reported; it never reaches the scheduler.

Two kinds of media
------------------
A tier that owns its space (`open` returns `TierContents`, or `num_blocks` is given) has an index here: the slot of
each block, and which block is evicted when the tier is full. A medium that keeps its own index is asked with `exists`.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Event, RLock
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kvcache.background import Background
from kvcache.tiering.batch import CANCELLED, BlockOutcome, Move, TierBatch
from kvcache.tiering.codec import make_codec
from kvcache.tiering.existence import ExistenceCache
from kvcache.tiering.io_threads import LOAD, QUERY, STORE, IOThreads, Task
from kvcache.tiering.slot_index import SlotIndex
from kvcache.tiering.tier import CodecTierStats, Tier, TierResult, TierStats, checked_host_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.request import ReqContext
    from kvcache.tiering.codec import Codec
    from kvcache.tiering.codec_stage import CodecStage
    from kvcache.tiering.tier import HostBlocks

__all__ = ["BlockOutcome", "JobTier", "TierBatch", "TierContents"]

MAX_STEP_BLOCKS = 1024
"""Blocks whose end one call of `get_finished` handles at most, because the scheduler waits for it."""
_SHUTDOWN_S = 5.0
_RETRY_S = 1.0
_MAX_REMEMBERED_KEYS = 1 << 20


@dataclass(frozen=True, slots=True)
class TierContents:
    """The blocks that `open` found.

    Parameters
    ----------
    num_blocks : int
        Slots of the tier.
    keys : list of bytes
        The blocks in the tier, each once, least recently used first.
    slots : sequence of int
        Their slots.
    last_seq : int
        The largest sequence number of a block so far; the next store gets the one after it.
    """

    num_blocks: int
    keys: list[bytes] = field(default_factory=list)
    slots: Sequence[int] | npt.NDArray[np.int64] = ()
    last_seq: int = 0


@dataclass(slots=True)
class _Job:
    """The moves of a job, how many have not ended, and the fields of its result so far."""

    moves: list[Move]
    num_left: int
    result: dict[str, Any]


class _Query(Task):
    """An existence query as a task of an I/O thread."""

    def __init__(self, tier: JobTier, keys: list[bytes]) -> None:
        self.keys = keys
        self.generation = tier.generation
        self.is_held: list[bool] | None = None
        self._tier = tier

    def run(self) -> None:
        self._tier._close_query(self)
        answer = [bool(one) for one in self._tier.exists(self.keys)]
        if len(answer) != len(self.keys):
            raise ValueError(f"exists answered {len(answer)} of {len(self.keys)} keys")
        self.is_held = answer


class JobTier(Tier):
    """A tier whose subclass only moves buffers.

    Parameters
    ----------
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    medium : str
        The medium's name in events.
    codec : Codec, optional
        Encodes blocks on their way to the medium. The batches of `get` and `put` then hold encoded rows in place of
        host blocks; `kvcache.tiering.codec.stored_form` returns their length.
    num_blocks : int, optional
        Blocks that the tier holds, if it owns its space and starts empty.
    cache_policy : str or type
        Which block is evicted when the tier is full.
    num_threads : int
        Batches in flight.
    max_queued_blocks : int
        Blocks under way at most; more are refused.
    max_batch_blocks : int
        Blocks of one call of `get` or `put` at most.
    max_key_bytes : int, optional
        Longer keys are not stored.
    open_timeout_s : float
        How long the constructor waits for `open`; the tier is unavailable until `open` has ended.
    maintain_interval_s : float, optional
        Time between calls of `maintain`; None: it is called at the end only.
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
        codec: Codec | None = None,
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
        self._pool_rows = self.host_rows = checked_host_blocks(host_blocks).view(np.uint8)
        self._stage: CodecStage | None = None
        if codec is not None:
            # Not imported without a codec: it needs a package of an extra.
            from kvcache.tiering.codec_stage import CodecStage

            self._stage = CodecStage(codec, self._pool_rows, num_threads, max_batch_blocks)
            self.host_rows = self._stage.rows
        self.medium = medium
        self.num_blocks = 0 if num_blocks is None else num_blocks
        self.max_batch_blocks = max_batch_blocks
        self.generation = 0
        self.version: str | int | None = None
        self.max_queued_blocks: int = max_queued_blocks
        self._cache_policy = cache_policy
        self._max_key_bytes = sys.maxsize if max_key_bytes is None else max_key_bytes
        self._max_query_keys = max_query_keys
        self._read_only = read_only
        self._existence = ExistenceCache(held_s, absent_s, query_deadline_s, _MAX_REMEMBERED_KEYS)
        self._index: SlotIndex | None = None
        self._bad: set[bytes] = set()
        self._last_seq = 0
        self._jobs: dict[int, _Job] = {}
        self._num_queued = 0
        self._results: list[TierResult] = []
        names = ("stored", "loaded", "evicted", "missed", "corrupt", "refused")
        self._counts = {"io_errors": 0, **{f"{name}_blocks": 0 for name in names}}
        self._last_error = ""
        self._store_error = ""
        self._reason = ""
        self._state = "opening"
        self._reset_error = ""
        # The generation that a reset has made durable, and its index.
        self._cleared: tuple[int, SlotIndex | None] | None = None
        self._found: deque[bytes] = deque()
        self._waiting_query: _Query | None = None
        self._removals: SimpleQueue[list[bytes]] = SimpleQueue()
        # Hooks that fail are counted from any thread, with or without the lock.
        self._lock = RLock()
        self._threads = IOThreads(num_threads, medium.lower())
        self._maintain_interval_s = maintain_interval_s
        # Generations to clear for; None ends the control thread.
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        self._is_opened = Event()
        self._open_error: BaseException | None = None
        self._control = Background(f"{medium.lower()}-control", self._run_control)
        if self._is_opened.wait(open_timeout_s) and self._open_error is not None:
            self.shutdown()
            raise self._open_error

    @classmethod
    def from_config(cls, options: Mapping[str, Any], host_blocks: HostBlocks, fingerprint: Mapping[str, Any]) -> Self:
        """Open the tier with `host_blocks`, `fingerprint` and the `arguments` of its `options_type`."""
        if cls.options_type is None:
            return super().from_config(options, host_blocks, fingerprint)
        arguments = cls.options_type.read(options).arguments()
        arguments |= {"codec": make_codec(arguments.get("codec"), host_blocks), "fingerprint": fingerprint}
        return cls(host_blocks=host_blocks, **arguments)

    # Hooks that a subclass implements.

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
        """Connect, and return the contents of a tier that owns its space; None: the medium keeps its own index.

        If it raises, it has to close its files and connections itself.
        """
        return TierContents(self.num_blocks) if self.num_blocks else None

    def clear(self, generation: int) -> None:
        """Forget every block for good, before `generation` begins; called again until it does not raise.

        `version` is that of the reset, None without one.
        """

    def maintain(self) -> None:
        """Do periodic work; called every `maintain_interval_s` and once at the end."""

    def close(self) -> None:
        """Release resources; called once, after the last batch."""

    def cut(self, slots: list[int] | None, num_blocks: int) -> list[list[int]]:
        """Return the positions 0 .. `num_blocks` - 1 in groups, one for each batch.

        Parameters
        ----------
        slots : list of int or None
            The blocks' slots, in a tier that owns its space.
        num_blocks : int
            Blocks of the job.
        """
        positions, size = list(range(num_blocks)), self.max_batch_blocks
        return [positions[first : first + size] for first in range(0, num_blocks, size)]

    def mark_reset(self) -> None:
        """Do the part of a reset that must be done before `reset` returns; the tier serves nothing by then."""

    def on_stored(self, batch: TierBatch) -> None:
        """Called when `batch` was written without an error."""

    def on_loaded(self, batch: TierBatch) -> None:
        """Called when `batch` was read without an error."""

    def on_used(self, slots: list[int], last_seq: int) -> None:
        """Called when the blocks in `slots` were used; the first one is the most recent, as of number `last_seq`."""

    # Methods that a subclass calls, from any thread.

    def report_removed(self, keys: list[bytes]) -> None:
        """Report that blocks left the medium without a job."""
        self._removals.put(list(keys))

    def set_unavailable(self, reason: str) -> None:
        """Find, store and load nothing, for this `reason`; empty: work again."""
        self._reason = reason

    # Methods that a manager calls.

    def lookup(self, keys: list[bytes]) -> int | None:
        with self._lock:
            if self._reason_now():
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
                self._ask(batch)
            return None if unknown or is_waiting else num_held

    def _ask(self, keys: list[bytes]) -> None:
        # An engine may look up one key a call, so keys join a query that no thread has begun.
        query = self._waiting_query
        if (
            query is not None
            and query.generation == self.generation
            and len(query.keys) + len(keys) <= self._max_query_keys
        ):
            query.keys += keys
            return
        self._waiting_query = query = _Query(self, keys)
        self._threads.submit(query, QUERY)

    def _close_query(self, query: _Query) -> None:
        with self._lock:
            if self._waiting_query is query:
                self._waiting_query = None

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        with self._lock:
            index = self._index
            if index is None or self._reason_now():
                return
            index.touch(keys, req_context)
            num_held = index.count_held(keys)
            if num_held:
                self._last_seq += num_held
                slots = index.locate(keys[:num_held])
                self._try("on_used", lambda: self.on_used(slots, self._last_seq))

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            if self._index is not None:
                self._index.end_request(req_context)

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        with self._lock:
            if not self._may_take(job_id, keys, block_ids, is_load=False):
                return False
            source = dict(zip(keys, block_ids, strict=True))
            refused = [key for key in source if len(key) > self._max_key_bytes]
            offered = _without(list(source), refused) if refused else list(source)
            slots: list[int] | None = None
            removed: list[bytes] = []
            if self._index is None:
                now_s = time.monotonic()
                placed = [key for key in offered if key in self._bad or not self._existence.is_held(key, now_s)]
            else:
                placement = self._index.place(offered)
                if placement is None:
                    self._counts["refused_blocks"] += len(keys)
                    return False
                placed, slots, removed = placement
            self._counts["refused_blocks"] += len(refused)
            first_seq = self._last_seq + 1
            self._last_seq += len(placed)
            seqs = list(range(first_seq, self._last_seq + 1))
            block_ids = [source[key] for key in placed]
            whole = TierBatch(job_id, False, placed, block_ids, slots, seqs, self.generation, self._pool_rows)
            self._start(whole, refused, removed)
            return True

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        with self._lock:
            if not self._may_take(job_id, keys, block_ids, is_load=True):
                return False
            target = dict(zip(keys, block_ids, strict=True))
            slots: list[int] | None = None
            if self._index is None:
                held = [key for key in target if key not in self._bad]
                missed = [key for key in target if key in self._bad]
            else:
                held, missed = self._index.split_held(list(target))
                slots = self._index.pin(held)
            self._counts["missed_blocks"] += len(missed)
            block_ids = [target[key] for key in held]
            whole = TierBatch(job_id, True, held, block_ids, slots, None, self.generation, self._pool_rows)
            self._start(whole, missed, [])
            return True

    def cancel(self, job_id: int) -> None:
        with self._lock:
            if job_id in self._jobs:
                self._cancel_waiting([self._jobs[job_id]])

    def get_finished(self) -> list[TierResult]:
        with self._lock:
            num_blocks = 0
            while num_blocks < MAX_STEP_BLOCKS and (task := self._threads.get_finished()) is not None:
                num_blocks += len(task.keys)
                if isinstance(task, _Query):
                    self._end_query(task)
                elif isinstance(task, Move) and task.error != CANCELLED:
                    self._end_move(task)
            self._take_removals()
            self._take_cleared()
            self._announce()
            results, self._results = self._results, []
            return results

    def reset(self, version: str | int | None = None) -> None:
        with self._lock:
            if self._state == "shut":
                return
            # Before the generation: `clear` reads it, and no block of the new generation may get an older version.
            self.version = version
            self.generation += 1
            self._found.clear()
            self._existence.clear()
            if self._state != "opening":
                self._state = "resetting"
            self._cancel_waiting(self._jobs.values())
        self._try("mark_reset", self.mark_reset)
        self._orders.put(self.generation)

    def stats(self) -> TierStats:
        with self._lock:
            index, counts = self._index, dict(self._counts)
            if index is not None:
                counts["evicted_blocks"] += index.num_evicted
            stats = TierStats(
                self.medium,
                self.num_blocks,
                self._existence.num_held if index is None else index.num_held,
                last_error=self._last_error,
                unavailable_reason=self._reason_now() or self._store_error,
                **counts,
            )
            if self._stage is None:
                return stats
            return CodecTierStats(**asdict(stats), codec=self._stage.name, **self._stage.counts)

    def shutdown(self) -> None:
        with self._lock:
            if self._state == "shut":
                return
            self._reason = "shut down"
            self._state = "shut"
        self._threads.close(_SHUTDOWN_S)
        self._orders.put(None)
        self._control.stop(_SHUTDOWN_S)

    def _reason_now(self) -> str:
        if self._reason or self._state == "open":
            return self._reason
        if self._state == "opening":
            return "opening"
        return f"reset failed: {self._reset_error}" if self._reset_error else "reset under way"

    def _may_take(self, job_id: int, keys: list[bytes], block_ids: list[int], is_load: bool) -> bool:
        """Return whether such a job may begin, and count its blocks as refused if not; ValueError if it is invalid."""
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is still under way")
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys need as many block ids, got {len(block_ids)}")
        is_full = self._num_queued + len(keys) > self.max_queued_blocks
        if is_full or self._reason_now() or (self._read_only and not is_load):
            self._counts["refused_blocks"] += len(keys)
            return False
        return True

    def _start(self, whole: TierBatch, failed: list[bytes], removed: list[bytes]) -> None:
        in_order = list(range(len(whole.keys)))
        groups = self._cut(whole.slots, in_order) if in_order else []
        batches = [whole] if groups == [in_order] else [whole.part(positions) for positions in groups]
        moves = [Move(batch, self._run_batch) for batch in batches]
        now_s = time.monotonic()
        result = {"done": [], "failed": failed, "removed": removed, "error": "", "start_s": now_s, "end_s": now_s}
        self._jobs[whole.job_id] = _Job(moves, len(moves), result)
        self._num_queued += len(whole.keys)
        self._report_ended(whole.job_id)
        for move in moves:
            self._threads.submit(move, LOAD if whole.is_load else STORE)

    def _run_batch(self, batch: TierBatch) -> Sequence[int] | None:
        if self._stage is None:
            return self.get(batch) if batch.is_load else self.put(batch)
        return self._stage.get(batch, self.get) if batch.is_load else self._stage.put(batch, self.put)

    def _cut(self, slots: list[int] | None, in_order: list[int]) -> list[list[int]]:
        """Return the groups of `cut` if they name every position once, or else batches of `max_batch_blocks`."""
        num_blocks = len(in_order)
        groups: list[list[int]] = self._try("cut", lambda: self.cut(slots, num_blocks))
        try:
            # A codec has rows for so many blocks of a batch.
            is_small = self._stage is None or max(map(len, groups)) <= self.max_batch_blocks
            if is_small and sorted(position for group in groups for position in group) == in_order:
                return [group for group in groups if group]
            self._note_error(f"cut: {groups!r} does not name each of {num_blocks} positions once")
        except (TypeError, ValueError):
            pass
        return JobTier.cut(self, slots, num_blocks)

    def _try(self, name: str, hook: Callable[[], Any]) -> Any:
        # A job must end and no slot may be lost, even if a subclass's hook raises.
        try:
            return hook()
        except Exception as error:
            self._note_error(f"{name}: {type(error).__name__}: {error}")
            return None

    def _cancel_waiting(self, jobs: Iterable[_Job]) -> None:
        """End the moves that no thread has begun."""
        for move in [move for job in jobs for move in job.moves if move.claim()]:
            move.error = CANCELLED
            self._end_move(move)

    def _end_move(self, move: Move) -> None:
        if move.error and move.error != CANCELLED:
            self._note_error(move.error)
        if move.batch.is_load:
            self._end_load(move)
        else:
            self._end_store(move)

    def _end_store(self, move: Move) -> None:
        keys, batch = move.keys, move.batch
        done, held = move.keys_with(BlockOutcome.DONE), move.keys_with(BlockOutcome.HELD)
        there = done + held if held else done
        if self._index is not None:
            self._index.end_store(keys, there)
        elif batch.generation == self.generation:
            self._bad.difference_update(there)
            self._existence.learn(there, True, time.monotonic())
        self._counts["stored_blocks"] += len(done)
        if not move.error:
            self._counts["refused_blocks"] += len(keys) - len(there)
            self._store_error = ""
            self._try("on_stored", lambda: self.on_stored(batch))
        elif move.error != CANCELLED:
            self._store_error = f"writes fail: {move.error}"
        self._end_part(move, done, _without(keys, there))

    def _end_load(self, move: Move) -> None:
        keys, batch = move.keys, move.batch
        if self._index is not None:
            self._index.unpin(keys)
        if move.error:
            # Blocks that were not read may be whole, so they stay.
            self._end_part(move, [], keys)
            return
        done, corrupt = move.keys_with(BlockOutcome.DONE), move.keys_with(BlockOutcome.CORRUPT)
        lost = _without(keys, done)
        self._counts["loaded_blocks"] += len(done)
        self._counts["corrupt_blocks"] += len(corrupt)
        self._counts["missed_blocks"] += len(lost) - len(corrupt)
        removed = self._forget(lost, corrupt) if lost else []
        self._try("on_loaded", lambda: self.on_loaded(batch))
        self._end_part(move, done, lost, removed)

    def _end_part(self, move: Move, done: list[bytes], failed: list[bytes], removed: Iterable[bytes] = ()) -> None:
        """Add a move's outcome to its job, and report the job after the last one."""
        job = self._jobs[move.batch.job_id]
        result = job.result
        result["done"] += done
        result["failed"] += failed
        result["removed"] += removed
        result["end_s"] = max(result["end_s"], move.end_s)
        if move.error != CANCELLED:
            result["error"] = result["error"] or move.error
        self._num_queued -= len(move.keys)
        job.num_left -= 1
        self._report_ended(move.batch.job_id)

    def _report_ended(self, job_id: int) -> None:
        job = self._jobs[job_id]
        if not job.num_left:
            del self._jobs[job_id]
            self._results.append(TierResult(job_id, **job.result))

    def _forget(self, lost: list[bytes], corrupt: list[bytes]) -> list[bytes]:
        """Answer blocks as absent; return those that counted as held."""
        if self._index is not None:
            return self._index.quarantine(lost)
        now_s = time.monotonic()
        known = [key for key in lost if self._existence.is_held(key, now_s)]
        self._existence.learn(lost, False, now_s)
        self._bad.update(corrupt)
        return known

    def _end_query(self, query: _Query) -> None:
        if query.error:
            self._note_error(f"exists: {query.error}")
        if query.generation == self.generation:
            # What could not be asked counts as absent for a while, so that it is not asked at once again.
            is_held = query.is_held or [False] * len(query.keys)
            self._existence.answer(query.keys, is_held, time.monotonic())

    def _take_removals(self) -> None:
        num_blocks = 0
        # Single consumer, so a queue that is not empty stays so until `get`.
        while num_blocks < MAX_STEP_BLOCKS and not self._removals.empty():
            keys = self._removals.get()
            num_blocks += len(keys)
            if removed := self._forget(keys, []):
                self._results.append(TierResult(None, removed=removed))

    def _announce(self) -> None:
        """Report some of the blocks that were found at the start and are still held."""
        keys = [self._found.popleft() for _ in range(min(len(self._found), MAX_STEP_BLOCKS))]
        if keys and self._index is not None and (held := self._index.split_held(keys)[0]):
            self._results.append(TierResult(None, held))

    def _take_cleared(self) -> None:
        """Go on with an empty index once a reset is durable and the last job from before it was reported."""
        # A tier that resets accepts no jobs, so all of these are from before it.
        if self._cleared is None or self._cleared[0] != self.generation or self._jobs:
            return
        if self._index is not None:
            # The new index counts from 0, and counters never go back.
            self._counts["evicted_blocks"] += self._index.num_evicted
        self._index = self._cleared[1]
        self._cleared = None
        self._bad.clear()
        if self._state != "shut":
            self._state = "open"

    def _note_error(self, error: str) -> None:
        with self._lock:
            self._counts["io_errors"] += 1
            self._last_error = error

    def _run_control(self, _: Event) -> None:
        """Open the tier, make its resets durable, maintain it and close it; the control thread runs this."""
        try:
            self._run_open()
        except BaseException as error:
            self._open_error = error
            return
        finally:
            self._is_opened.set()
        wanted: int | None = None
        while True:
            try:
                order = self._orders.get(timeout=self._maintain_interval_s if wanted is None else _RETRY_S)
                if order is None:
                    break
                wanted = order
            except Empty:
                pass
            if wanted is None:
                self._try("maintenance", self.maintain)
            elif self._run_clear(wanted):
                wanted = None
        self._try("maintenance", self.maintain)
        # A thread that hangs still uses what would be closed, and `shutdown` waits for this one for a bounded time.
        if self._threads.close(TIMEOUT_MAX):
            self._try("close", self.close)

    def _run_open(self) -> None:
        try:
            contents = self.open()
            try:
                index = self._new_index(contents)
            except BaseException:
                self._try("close", self.close)
                raise
        except BaseException as error:
            self._reason = f"opening failed: {type(error).__name__}: {error}"
            raise
        with self._lock:
            self.num_blocks = 0
            if contents is not None:
                self.num_blocks = contents.num_blocks
                self._last_seq = max(self._last_seq, contents.last_seq)
            if self._state == "opening" and not self.generation:
                self._index = index
                self._found.extend([] if contents is None else contents.keys)
                self._state = "open"
            elif self._state == "opening":
                self._state = "resetting"

    def _run_clear(self, generation: int) -> bool:
        """Make a reset durable; return False if it has to be tried again."""
        try:
            self.clear(generation)
            index = self._new_index(TierContents(self.num_blocks) if self.num_blocks else None)
        except BaseException as error:
            with self._lock:
                self._reset_error = f"{type(error).__name__}: {error}"
                self._note_error(f"reset: {self._reset_error}")
            return False
        with self._lock:
            self._reset_error = ""
            self._cleared = (generation, index)
        return True

    def _new_index(self, contents: TierContents | None) -> SlotIndex | None:
        if contents is None:
            return None
        return SlotIndex(contents.num_blocks, self._cache_policy, contents.keys, contents.slots)


def _without(keys: list[bytes], found: list[bytes]) -> list[bytes]:
    if len(found) == len(keys):
        return []
    left_out = set(found)
    return [key for key in keys if key not in left_out]
