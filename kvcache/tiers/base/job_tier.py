"""JobTier: everything of a tier but the I/O. A subclass moves buffers; see `kvcache.tiers.memory` for the smallest one.

It takes, cuts, cancels and reports jobs. What the medium holds is the subject of its catalog (`catalog`), what state
the tier is in that of its `lifecycle`. A tier on another medium is `get` and `put`, and `exists` or `open`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.tiers.base.batch import CANCELLED, BlockOutcome, Counts, Job, Jobs, Move, Removal, TierBatch
from kvcache.tiers.base.catalog import Catalog, ExistenceQuery, RemoteCatalog, SlotCatalog, TierContents
from kvcache.tiers.base.io_threads import LOAD, QUERY, STORE, IOThreads
from kvcache.tiers.base.lifecycle import Lifecycle, State
from kvcache.tiers.base.medium import Medium
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS, Tier, TierResult, TierStats, checked_host_blocks

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiers.base.codec import Codec
    from kvcache.tiers.base.codec_stage import CodecStage
    from kvcache.tiers.base.tier import HostBlocks

__all__ = ["BlockOutcome", "JobTier", "TierBatch", "TierContents"]

_SHUTDOWN_S = 5.0


class JobTier(Medium, Tier):
    """A tier whose subclass only moves buffers.

    Parameters
    ----------
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    medium : str
        The medium's name in events.
    codec : Codec, optional
        Encodes blocks on their way to the medium. The batches of `get` and `put` then hold encoded rows in place of
        host blocks; `kvcache.tiers.base.codec.stored_form` returns their length.
    fingerprint : mapping, optional
        Identifies the model and the geometry of the blocks. A codec that encrypts binds blocks to it.
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
    absent_s : float
        For how long the answer of an existence query counts that a block is absent.
    read_only : bool
        Whether stores are refused.

    Notes
    -----
    Call this constructor last in the subclass's own: it starts the threads. An error of `open` is raised here if it
    comes within `open_timeout_s`, and is the `unavailable_reason` if it comes later.
    """

    def __init__(  # noqa: PLR0913 - the properties of a subclass's medium, by name
        self,
        host_blocks: HostBlocks,
        medium: str,
        *,
        codec: Codec | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        num_blocks: int | None = None,
        cache_policy: str | type = "lru",
        num_threads: int = 4,
        max_queued_blocks: int = 65536,
        max_batch_blocks: int = 32,
        max_key_bytes: int | None = None,
        open_timeout_s: float = 10.0,
        maintain_interval_s: float | None = None,
        query_deadline_s: float = 1.0,
        absent_s: float = 1.0,
        read_only: bool = False,
    ) -> None:
        self._pool = self.host_rows = checked_host_blocks(host_blocks).view(np.uint8)
        self._stage: CodecStage | None = None
        if codec is not None:
            # Not imported without a codec: it needs a package of an extra.
            from kvcache.tiers.base.codec_stage import CodecStage

            self._stage = CodecStage(codec, self._pool, num_threads, max_batch_blocks, fingerprint)
            self.host_rows = self._stage.rows
        self.medium = medium
        self.cache_policy = cache_policy
        self.num_blocks = 0 if num_blocks is None else num_blocks
        self.max_batch_blocks = max_batch_blocks
        self.max_queued_blocks: int = max_queued_blocks
        self._max_key_bytes = sys.maxsize if max_key_bytes is None else max_key_bytes
        self._read_only = read_only
        self._jobs = Jobs()
        self._counts = Counts()
        self._lock = RLock()
        self._threads = IOThreads(num_threads, medium.lower())

        def new_catalog(contents: TierContents | None, last_seq: int) -> Catalog:
            self.num_blocks = 0 if contents is None else contents.num_blocks
            if contents is None:
                submit = partial(self._threads.submit, priority=QUERY)
                return RemoteCatalog(lambda keys: self.exists(keys), submit, absent_s, query_deadline_s)
            last_seq = max(last_seq, contents.last_seq)
            return SlotCatalog(contents.num_blocks, cache_policy, contents.keys, contents.slots, last_seq)

        self._life = Lifecycle(self, new_catalog, self._threads, self._lock, maintain_interval_s, self._counts)
        try:
            self._life.start(open_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    # Methods that a subclass calls, from any thread.

    def report_removed(self, keys: list[bytes]) -> None:
        """Report that blocks left the medium without a job."""
        self._threads.report(Removal(keys))

    def set_unavailable(self, reason: str) -> None:
        """Find, store and load nothing, for this `reason`; empty: work again."""
        self._life.outage = reason

    def is_bad(self, key: bytes) -> bool:
        """Return whether a medium with an index holds a block that could not be read: it must be overwritten."""
        return self._life.catalog.is_bad(key)

    @property
    def generation(self) -> int:
        """Number of resets since the tier was made."""
        return self._life.generation

    @property
    def version(self) -> str | int | None:
        """The version of the last reset, None without one."""
        return self._life.version

    # Methods of an engine's door; any thread may call them.

    def load_now(self, keys: list[bytes], buffers: list[list[memoryview]]) -> list[bytes]:
        """Load what needs no wait for the medium, in the caller's thread; return the keys of the verified blocks.

        Each key has buffers that together are as long as a block; those of other keys may hold anything.
        """
        with self._lock:
            # A reset replaces the catalog without waiting for this call.
            catalog = self._life.catalog
            placement = None if self._life.reason or self._stage else catalog.begin_load(keys)
        if placement is None or not placement.slots:
            return []
        parts = dict(zip(keys, buffers, strict=True))
        places = placement.slots, placement.keys, [parts[key] for key in placement.keys]
        answers = self._counts.attempt("get_now", self.get_now, *places) or []
        done = [key for key, is_loaded in zip(placement.keys, answers, strict=False) if is_loaded]
        with self._lock:
            catalog.end_load(placement.keys)
            self._counts.update(loaded_blocks=len(done))
        return done

    def pin(self, keys: list[bytes]) -> list[bytes]:
        """Keep blocks from being evicted until `unpin`, and return the held ones; each has a reference per call."""
        with self._lock:
            return [] if self._life.reason else self._life.catalog.begin_load(keys)[0]

    def unpin(self, keys: list[bytes]) -> None:
        """Release the references of `pin`."""
        with self._lock:
            self._life.catalog.end_load(keys)

    # Methods that a manager calls.

    def lookup(self, keys: list[bytes]) -> int | None:
        with self._lock:
            return 0 if self._life.reason else self._life.catalog.find(keys)

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        with self._lock:
            if not self._life.reason:
                catalog = self._life.catalog
                if slots := catalog.touch(keys, req_context):
                    self._counts.attempt("on_used", self.on_used, slots, catalog.last_seq)

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            self._life.catalog.end_request(req_context)

    def hint(self, request_or_keys: ReqContext | list[bytes], next_use: str) -> None:
        with self._lock:
            if not self._life.reason:
                self._life.catalog.hint(request_or_keys, next_use)

    def delete(self, keys: list[bytes], timeout_s: float = 0.0) -> list[bytes]:
        with self._lock:
            held = [] if self._life.reason or self._read_only else self._life.catalog.delete(keys)
        if held and timeout_s:
            self._life.maintain(timeout_s)
        return held

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        return self._submit(job_id, False, keys, block_ids)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        return self._submit(job_id, True, keys, block_ids)

    def cancel(self, job_id: int) -> None:
        with self._lock:
            if job_id in self._jobs.under_way:
                self._cancel_waiting([self._jobs.under_way[job_id]])

    def call_on_end(self, callback: Callable[[], object]) -> None:
        self._threads.on_ended = callback

    def get_finished(self) -> list[TierResult]:
        with self._lock:
            num_blocks = 0
            while num_blocks < MAX_STEP_BLOCKS and (task := self._threads.get_finished()) is not None:
                num_blocks += len(task.keys)
                if isinstance(task, Move):
                    # A cancelled move was ended when it was cancelled.
                    if task.error != CANCELLED:
                        self._end_move(task)
                elif isinstance(task, ExistenceQuery):
                    if task.error:
                        self._counts.note_error(f"exists: {task.error}")
                    task.end()
                elif removed := self._life.catalog.forget(task.keys):
                    self._jobs.results.append(TierResult(None, removed=removed))
            # A tier that resets accepts no jobs, so all that are under way are from before the reset.
            if not self._jobs.under_way and (replaced := self._life.end_reset()) is not None:
                # The new catalog counts from 0, and counters never go back.
                self._counts["evicted_blocks"] += replaced.num_evicted
            if self._life.state is State.OPEN and (keys := self._life.catalog.announce(MAX_STEP_BLOCKS)):
                self._jobs.results.append(TierResult(None, keys))
            results, self._jobs.results = self._jobs.results, []
            return results

    def reset(self, version: str | int | None = None) -> None:
        with self._lock:
            if not self._life.begin_reset(version):
                return
            self._cancel_waiting(self._jobs.under_way.values())
        self._counts.attempt("mark_reset", self.mark_reset)
        self._life.order_clear()

    def stats(self) -> TierStats:
        with self._lock:
            catalog = self._life.catalog
            counts = {**self._counts, "evicted_blocks": self._counts["evicted_blocks"] + catalog.num_evicted}
            stats = TierStats(
                self.medium,
                self.num_blocks,
                catalog.num_held,
                last_error=self._counts.last_error,
                unavailable_reason=self._life.reason or self._counts.store_error,
                **({} if self.wear is None else self.wear.stats()),
                **counts,
            )
            return stats if self._stage is None else self._stage.described(stats)

    def shutdown(self) -> None:
        with self._lock:
            if not self._life.shut():
                return
        self._threads.close(_SHUTDOWN_S)
        self._life.join(_SHUTDOWN_S)

    def _submit(self, job_id: int, is_load: bool, keys: list[bytes], block_ids: list[int]) -> bool:
        with self._lock:
            if job_id in self._jobs.under_way:
                raise ValueError(f"job {job_id} is still under way")
            if len(keys) != len(block_ids):
                raise ValueError(f"{len(keys)} keys need as many block ids, got {len(block_ids)}")
            rows = dict(zip(keys, block_ids, strict=True))
            # A key that is too long was never stored, so loads need not look for one.
            too_long = [] if is_load else [key for key in rows if len(key) > self._max_key_bytes]
            is_full = self._jobs.num_blocks + len(keys) > self.max_queued_blocks
            placement = None
            if not (is_full or self._life.reason or (self._read_only and not is_load)):
                catalog = self._life.catalog
                placement = (catalog.begin_load if is_load else catalog.begin_store)(_without(list(rows), too_long))
            if placement is None:
                self._counts["refused_blocks"] += len(keys)
                return False
            # No call below may refuse the job: the catalog has given slots and references to its blocks.
            failed = too_long + placement.missed
            self._counts["missed_blocks" if is_load else "refused_blocks"] += len(failed)
            block_ids = [rows[key] for key in placement.keys]
            whole = TierBatch(job_id, is_load, placement.keys, block_ids, placement.slots, placement.seqs,
                              self.generation, self._pool)  # fmt: skip
            in_order = list(range(len(block_ids)))
            groups = self._cut(whole.slots, in_order) if in_order else []
            batches = [whole] if groups == [in_order] else [whole.part(positions) for positions in groups]
            moves = [Move(batch, self._run_batch) for batch in batches]
            self._jobs.begin(job_id, moves, failed, placement.evicted)
            for move in moves:
                self._threads.submit(move, LOAD if is_load else STORE)
            return True

    def _run_batch(self, batch: TierBatch) -> Sequence[int] | None:
        if batch.is_load:
            return self.get(batch) if self._stage is None else self._stage.get(batch, self.get)
        outcomes: Sequence[int] | None = None
        try:
            outcomes = self.put(batch) if self._stage is None else self._stage.put(batch, self.put)
        finally:
            if self.wear is not None:
                # Counted here, because the scheduler does not read results at a shutdown. A failed write may have
                # reached the disk.
                self.wear.spend(len(batch.keys) - (outcomes or []).count(BlockOutcome.HELD))
        return outcomes

    def _cut(self, slots: list[int] | None, in_order: list[int]) -> list[list[int]]:
        """Return the groups of `cut` if they name every position once, or else batches of `max_batch_blocks`."""
        num_blocks = len(in_order)
        groups: list[list[int]] = self._counts.attempt("cut", self.cut, slots, num_blocks)
        try:
            is_small = max(map(len, groups)) <= self.max_batch_blocks
            if is_small and sorted(position for group in groups for position in group) == in_order:
                return [group for group in groups if group]
            self._counts.note_error(f"cut: {groups!r} does not name each of {num_blocks} positions once")
        except (TypeError, ValueError):
            pass
        return Medium.cut(self, slots, num_blocks)

    def _cancel_waiting(self, jobs: Iterable[Job]) -> None:
        """End the moves that no thread has begun."""
        for move in [move for job in jobs for move in job.moves if move.claim()]:
            move.error = CANCELLED
            self._end_move(move)

    def _end_move(self, move: Move) -> None:
        keys, batch, counts = move.keys, move.batch, self._counts
        if move.error and move.error != CANCELLED:
            counts.note_error(move.error)
        done = move.keys_with(BlockOutcome.DONE)
        if batch.is_load:
            self._end_load(move, done)
            return
        stored = done + move.keys_with(BlockOutcome.HELD)
        self._life.catalog.end_store(keys, stored)
        if move.has_no_room and (has_space := self.has_space()) is not None:
            moves = [other for job in self._jobs.under_way.values() for other in job.moves if not other.batch.is_load]
            under_way = [key for other in moves for key in other.keys]
            counts.attempt("withhold", self._life.catalog.withhold, has_space, under_way)
        counts["stored_blocks"] += len(done)
        if not move.error:
            counts["refused_blocks"] += len(keys) - len(stored)
            counts.store_error = ""
            counts.attempt("on_stored", self.on_stored, batch)
        elif move.error != CANCELLED:
            counts.store_error = f"writes fail: {move.error}"
        self._jobs.end_part(move, done, _without(keys, stored))

    def _end_load(self, move: Move, done: list[bytes]) -> None:
        catalog, counts, lost = self._life.catalog, self._counts, _without(move.keys, done)
        catalog.end_load(move.keys)
        removed: list[bytes] = []
        # Blocks that were not read because of an error may be whole, so they stay.
        if not move.error:
            corrupt = move.keys_with(BlockOutcome.CORRUPT)
            counts["loaded_blocks"] += len(done)
            counts["corrupt_blocks"] += len(corrupt)
            counts["missed_blocks"] += len(lost) - len(corrupt)
            removed = catalog.forget(lost, corrupt) if lost else []
            counts.attempt("on_loaded", self.on_loaded, move.batch)
        self._jobs.end_part(move, done, lost, removed)


def _without(keys: list[bytes], some: list[bytes]) -> list[bytes]:
    if not some or len(some) == len(keys):
        return [] if some else keys
    left_out = set(some)
    return [key for key in keys if key not in left_out]
