"""The disk tier: blocks in one file of fixed slots, verified on every load, found again after a restart.

Which block lies where, and what leaves, is the business of a manager like the host pool's own, over slots instead of
host memory; it is asked by the caller's thread only. The threads below move bytes, compute checksums and write
records; they share nothing with it but queues.

A restart hands the blocks found on disk to a fresh manager, oldest first, so that recency comes back as order. It
numbers blocks 0, 1, 2, ... in that order; `_slot_of` says in which slot of the file each of its numbers lies.

A block that does not verify is quarantined: it is answered as absent, its record is wiped, and it keeps its slot
until it is evicted, or until the same key is stored again and written anew.

The directory is opened by the keeper's thread, which later makes everything durable now and then. Whoever makes the
tier waits for it for a while only: on a mount that hangs, the tier is there and unavailable.

A reset is begun at once, whatever jobs hang: a mark of a few bytes, for whoever comes after a kill, then a header of
another generation, durably. Jobs carry the generation that they were submitted under, so nothing that they still
write counts. The tier takes jobs again once the reset is durable and the last old job was reported.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.options import check_int, check_seconds, parse_size
from kvcache.tiering.controller import RULE_OPTIONS
from kvcache.tiering.io_threads import LOAD, STORE, IOThreads
from kvcache.tiering.log_limiter import LogLimiter
from kvcache.tiering.tier import Tier, TierResult, TierStats, checked_host_blocks
from kvcache.tiers.disk.data_file import MAX_RUN_BLOCKS, DataFile, LoadRun, ResetRun, StoreRun
from kvcache.tiers.disk.directory import Header, TierDirectory, TierDirectoryError, capacity_for, num_slots_within
from kvcache.tiers.disk.slot_table import MAX_KEY_BYTES, SlotTable

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.request import ReqContext
    from kvcache.specs import BlockIDsLoadStoreSpec, LoadStoreSpec
    from kvcache.tiering.tier import HostBlocks

_LOG = logging.getLogger(__name__)
_SHUTDOWN_S = 5.0
_MARK_S = 0.02
"""How long `reset` waits for its mark: it is there within a fraction of that, unless the disk hangs."""


class _Job:
    """What is left of a job: runs under way, and the outcome so far."""

    __slots__ = ("done", "error", "failed", "num_runs", "removed")

    def __init__(self, failed: list[bytes], removed: list[bytes]) -> None:
        self.num_runs = 0
        self.done: list[bytes] = []
        self.failed = failed
        self.removed = removed
        self.error = ""


class DiskTier(Tier):
    """Keep blocks in a directory of a local disk.

    Parameters
    ----------
    path : path-like
        The directory; made if it is missing. One process may write to it at a time.
    capacity_bytes : int
        Bytes on disk at most, metadata included.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes); for direct I/O, blocks start at multiples of 4096.
    fingerprint : mapping, optional
        The model, dtype and geometry whose blocks these are, as JSON can say it; a directory of another one is
        refused.
    cache_policy : str or type
        What leaves when the tier is full: a policy's name, class or ``"package.module:Class"``.
    num_threads : int
        Operations in flight.
    flush_interval_s : float
        How often recency is written and what was written is made durable.
    max_queued_blocks : int
        Blocks under way at most; more are refused.
    max_io_bytes : int
        Bytes in one operation at most, where blocks lie side by side.
    preallocate : bool
        Whether to take all disk space at once, where the file system can do that without writing.
    read_only : bool
        Serve what the directory holds and change nothing; another process may be writing to it.
    open_timeout_s : float
        How long to wait for the directory to open. After that the tier is unavailable, `stats` says so, until it opens
        after all; if it then cannot be used, it stays unavailable and the reason is logged.

    Raises
    ------
    TierDirectoryError
        The directory cannot be used; the message says why. It is a ValueError.
    ValueError
        An argument is out of range, or the capacity is below one block.
    """

    medium = "DISK"

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        host_blocks: HostBlocks,
        *,
        fingerprint: Mapping[str, Any] | None = None,
        cache_policy: str | type = "lru",
        num_threads: int = 4,
        flush_interval_s: float = 1.0,
        max_queued_blocks: int = 65536,
        max_io_bytes: int = 2 << 20,
        preallocate: bool = True,
        read_only: bool = False,
        open_timeout_s: float = 10.0,
    ) -> None:
        checked_host_blocks(host_blocks)
        block_bytes = host_blocks.shape[1]
        for name, value in (
            ("num_threads", num_threads),
            ("max_queued_blocks", max_queued_blocks),
            ("max_io_bytes", max_io_bytes),
        ):
            check_int(name, value)
        for name, seconds in (("flush_interval_s", flush_interval_s), ("open_timeout_s", open_timeout_s)):
            check_seconds(name, seconds)
        try:
            plain = json.loads(json.dumps(dict(fingerprint or {}), allow_nan=False))
        except RecursionError:
            raise ValueError("fingerprint must be what JSON can say, got one nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"fingerprint must be what JSON can say, got {fingerprint!r}") from error
        self.path = Path(path)
        self.capacity_bytes = capacity_bytes
        self.num_blocks = num_slots_within(capacity_bytes, block_bytes)
        self._header = Header.fresh(block_bytes, self.num_blocks, plain)
        self._host_blocks = host_blocks
        self._policy = cache_policy
        self._read_only = read_only
        self._preallocate = preallocate
        self._num_threads = num_threads
        self._flush_interval_s = flush_interval_s
        self._max_queued = max_queued_blocks
        is_packed = self._header.slot_bytes == block_bytes
        self._max_run = max(1, min(MAX_RUN_BLOCKS, max_io_bytes // block_bytes)) if is_packed else 1
        self._bad: set[bytes] = set()
        self._jobs: dict[int, _Job] = {}
        self._results: list[TierResult] = []
        self._num_queued = 0
        self._num_restored = 0
        self._clock = 0
        self._reset: ResetRun | None = None
        self._is_reset_wanted = False
        self._reset_error = ""
        self._retry_reset_s = 0.0
        self._quiet_reason = f"directory {path} is being opened"
        self._store_error = ""
        self._counts = dict.fromkeys(("loaded", "missed", "corrupt", "refused", "io_errors"), 0)
        self._last_error = ""
        self._warnings = LogLimiter(_LOG)
        self._lock = Lock()
        self._stop = Event()
        self._is_open = False
        self._is_waited_for = True
        self._is_removed = False
        self._may_close = True
        self._may_end = Event()
        self._open_error: BaseException | None = None
        self._has_opened = Event()
        self._keeper = Thread(target=self._keep, name="kvcache-disk-keeper", daemon=True)
        self._keeper.start()
        is_late = not self._has_opened.wait(open_timeout_s)
        with self._lock:
            failure, self._open_error = self._open_error, None
            self._is_waited_for = False
            if is_late and failure is None and not self._is_open:
                self._quiet_reason = f"directory {path} has not opened within {open_timeout_s} s"
                _LOG.warning("disk tier: %s; going on without it until it does", self._quiet_reason)
        if failure is not None:
            raise failure

    @classmethod
    def from_config(
        cls, options: Mapping[str, Any], host_blocks: HostBlocks, fingerprint: Mapping[str, Any]
    ) -> DiskTier:
        known = {
            "path",
            "capacity",
            "cache_policy",
            "num_threads",
            "flush_interval_s",
            "max_queued_blocks",
            "max_io_bytes",
            "preallocate",
            "read_only",
            "open_timeout_s",
        }
        values = dict(options)
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"unknown options of a disk tier: {', '.join(unknown)}; known ones: {', '.join(sorted(known))}; "
                f"of the rule by which any tier is used: {', '.join(RULE_OPTIONS)}"
            )
        for name in ("path", "capacity"):
            if name not in values:
                raise ValueError(f"a disk tier needs {name!r}, got {dict(options)!r}")
        path, capacity_bytes = values.pop("path"), parse_size("capacity", values.pop("capacity"))
        return cls(path, capacity_bytes, host_blocks, fingerprint=fingerprint, **values)

    @staticmethod
    def capacity_for(num_blocks: int, block_bytes: int) -> int:
        """Return the smallest `capacity_bytes` that holds `num_blocks` blocks."""
        return capacity_for(num_blocks, block_bytes)

    @property
    def is_direct(self) -> bool:
        """Whether I/O passes the page cache by; False until the directory is open."""
        return self._is_open and self._file.is_direct

    def flush(self) -> None:
        """Write recency and make all that was reported as stored durable; waits for the disk."""
        self._table.flush()
        os.fdatasync(self._file.fd)

    def lookup(self, keys: list[bytes]) -> int:
        with self._lock:
            if self._is_quiet():
                return 0
            return self._held(keys)

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        with self._lock:
            if self._is_quiet():
                return
            self._index.touch(keys, req_context)
            num_held = self._index.lookup(keys)
            if num_held:
                held = keys[:num_held]
                slots = self._slots(self._index.prepare_load(held))
                self._index.complete_load(held)
                # The head of the prefix is the latest.
                self._clock += num_held
                self._table.stamp(slots, self._clock - np.arange(num_held, dtype=np.uint64))

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            if self._is_open:
                self._index.on_request_finished(req_context)

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        with self._lock:
            if self._read_only or not self._has_room(job_id, keys, block_ids):
                self._counts["refused"] += len(keys)
                return False
            source = dict(zip(keys, block_ids, strict=True))
            refused = [key for key in keys if len(key) > MAX_KEY_BYTES]
            offered = [key for key in keys if len(key) <= MAX_KEY_BYTES] if refused else keys
            output = self._index.prepare_store(offered)
            if output is None:
                self._counts["refused"] += len(keys)
                return False
            self._bad.difference_update(output.evicted_keys)
            stored, slots = output.keys_to_store, self._slots(output.store_spec)
            rewritten = [key for key in dict.fromkeys(offered) if key in self._bad] if self._bad else []
            if rewritten:
                slots = np.concatenate([slots, self._slots(self._index.prepare_load(rewritten))])
                stored = stored + rewritten
            job = self._jobs[job_id] = _Job(refused, output.evicted_keys)
            first_seq = self._clock + 1
            self._clock += len(stored)
            for slot, places in self._runs(slots):
                run = [stored[i] for i in places]
                ids = [source[key] for key in run]
                task = StoreRun(self._file, self._table, self._generation, job_id, slot, run, ids)
                task.seqs = [first_seq + i for i in places]
                self._start(job, task)
            self._end_if_done(job_id, job)
            return True

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        with self._lock:
            if not self._has_room(job_id, keys, block_ids):
                self._counts["refused"] += len(keys)
                return False
            target = dict(zip(keys, block_ids, strict=True))
            held, missed = keys, []
            if self._held(keys) < len(keys):
                held = [key for key in keys if self._held([key])]
                missed = [key for key in keys if not self._held([key])]
                self._counts["missed"] += len(missed)
            slots = self._slots(self._index.prepare_load(held))
            job = self._jobs[job_id] = _Job(missed, [])
            for slot, places in self._runs(slots):
                run = [held[i] for i in places]
                ids = [target[key] for key in run]
                task = LoadRun(self._file, self._table, self._generation, job_id, slot, run, ids)
                task.may_wipe = not self._read_only
                self._start(job, task)
            self._end_if_done(job_id, job)
            return True

    def get_finished(self) -> list[TierResult]:
        with self._lock:
            if not self._is_open:
                return []
            while (run := self._threads.get_finished()) is not None:
                self._num_queued -= len(run.keys)
                if run.error:
                    self._note_error(run)
                if isinstance(run, LoadRun):
                    self._finish_load(run)
                else:
                    self._finish_store(run)
            if self._is_reset_wanted:
                self._go_on_with_reset()
            results, self._results = self._results, []
            return results

    def reset(self) -> None:
        """Forget every block.

        Notes
        -----
        Waits for a mark in the page cache, a hundredth of a second or two at most: from then on, nothing old comes back
        after a kill. Against a loss of power the reset counts once `stats` does not call it under way any more.
        """
        with self._lock:
            if self._read_only:
                # The blocks are another process's; this one looks away.
                self._quiet_reason = "reset while read-only"
                return
            self._is_reset_wanted = True
            if not self._is_open:
                return
            if self._reset is None:
                self._begin_reset()
            assert self._reset is not None
            is_marked = self._reset.is_marked
        is_marked.wait(_MARK_S)

    def stats(self) -> TierStats:
        with self._lock:
            counts = self._counts
            own = TierStats(
                medium=self.medium,
                num_blocks=self.num_blocks,
                num_held=0,
                loaded_blocks=counts["loaded"],
                missed_blocks=counts["missed"],
                corrupt_blocks=counts["corrupt"],
                refused_blocks=counts["refused"],
                io_errors=counts["io_errors"],
                last_error=self._last_error,
                unavailable_reason=self._unavailable_reason(),
            )
            if not self._is_open:
                return own
            index = self._index.stats()
            return replace(
                own,
                num_held=index.num_blocks - index.num_free - index.num_pending - len(self._bad),
                stored_blocks=index.stored_blocks - self._num_restored,
                evicted_blocks=index.evicted_blocks,
            )

    def shutdown(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self._quiet_reason = "shut down"
            self._stop.set()
            is_open = self._is_open
        # The keeper closes the files once it has written what is left; one that hangs leaves them to the process.
        is_over = not is_open or self._threads.close(_SHUTDOWN_S)
        self._may_close = is_over
        self._may_end.set()
        self._keeper.join(_SHUTDOWN_S)

    def _open(self) -> None:
        """Open the directory and take over what it holds, least recent first."""
        with ExitStack() as undo:
            try:
                directory = TierDirectory(self.path, self._header, self._read_only)
                undo.callback(directory.close)
                if self._preallocate and not self._read_only:
                    directory.allocate()
                table = SlotTable(directory, self._read_only)
                undo.callback(table.close)
                file = DataFile(directory, self._host_blocks, self._read_only)
                undo.callback(file.close)
                self._restore(table, directory.header.num_slots)
                threads: IOThreads[StoreRun | LoadRun] = IOThreads(self._num_threads, "kvcache-disk")
            except (OSError, MemoryError, OverflowError, RuntimeError) as error:
                raise TierDirectoryError(
                    f"disk tier directory {self.path} cannot be opened: {type(error).__name__}: {error}"
                ) from error
            undo.pop_all()
        with self._lock:
            self.num_blocks = directory.header.num_slots
            self._directory, self._table, self._file, self._threads = directory, table, file, threads
            self._generation = directory.header.generation
            self._is_open = True
            if not self._stop.is_set():
                self._quiet_reason = ""
            if self._is_reset_wanted and not self._read_only:
                self._begin_reset()

    def _restore(self, table: SlotTable, num_slots: int) -> None:
        keys, slots, seqs, times = table.load()
        self._clock = int(times[-1]) if keys else 0
        self._index = CPUOffloadingManager(1, num_slots, self._policy)
        output = self._index.prepare_store(keys)
        if output is None or len(output.keys_to_store) != len(keys):
            # A key stands in two slots: of the older one, only the record was left.
            latest: dict[bytes, int] = {}
            for i, key in enumerate(keys):
                if key not in latest or seqs[i] > seqs[latest[key]]:
                    latest[key] = i
            kept = sorted(latest.values())
            keys, slots = [keys[i] for i in kept], slots[kept]
            self._index.reset_cache()
            self._index.prepare_store(keys)
        self._index.complete_store(keys)
        self._num_restored = len(keys)
        is_free = np.ones(num_slots, np.bool_)
        is_free[slots] = False
        self._slot_of = np.concatenate([slots, np.flatnonzero(is_free)])

    def _is_quiet(self) -> bool:
        return bool(self._quiet_reason) or self._is_reset_wanted

    def _unavailable_reason(self) -> str:
        if self._is_reset_wanted:
            return "reset under way" if not self._reset_error else f"reset failed: {self._reset_error}"
        return self._quiet_reason or self._store_error

    def _note_error(self, run: StoreRun | LoadRun | ResetRun) -> None:
        self._counts["io_errors"] += 1
        self._last_error = run.error
        verb = "load" if run.is_load else "reset" if isinstance(run, ResetRun) else "store"
        if verb == "store":
            self._store_error = f"stores fail: {run.error}"
        self._warnings.warn(
            f"{verb} {run.error.partition('] ')[0]}", "disk tier %s: a %s failed: %s", self.path, verb, run.error
        )

    def _note_corrupt(self, run: LoadRun) -> None:
        if run.num_short:
            self._warnings.warn(
                "truncated",
                "disk tier %s: its data file ends early, at slot %d; %d blocks are lost",
                self.path,
                run.slot + len(run.keys) - run.num_short,
                run.num_short,
            )
        if len(run.corrupt) > run.num_short:
            self._warnings.warn(
                "corrupt",
                "disk tier %s: %d blocks did not verify and count as misses, one of them at slot %d or after",
                self.path,
                len(run.corrupt) - run.num_short,
                run.slot,
            )

    def _held(self, keys: list[bytes]) -> int:
        num_held: int = self._index.lookup(keys)
        if self._bad:
            return next((i for i in range(num_held) if keys[i] in self._bad), num_held)
        return num_held

    def _has_room(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is still under way")
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys need as many block ids, got {len(block_ids)}")
        return not self._is_quiet() and self._num_queued + len(keys) <= self._max_queued

    def _slots(self, spec: LoadStoreSpec) -> npt.NDArray[np.int64]:
        return self._slot_of[cast("BlockIDsLoadStoreSpec", spec).block_ids]

    def _runs(self, slots: npt.NDArray[np.int64]) -> list[tuple[int, list[int]]]:
        """Cut slots into consecutive runs: the first slot, and which of `slots` are in the run, in order."""
        order = np.argsort(slots, kind="stable")
        runs: list[tuple[int, list[int]]] = []
        expected = -1
        for i, slot in zip(order.tolist(), slots[order].tolist(), strict=True):
            if slot != expected or len(runs[-1][1]) == self._max_run:
                runs.append((slot, []))
            runs[-1][1].append(i)
            expected = slot + 1
        return runs

    def _start(self, job: _Job, run: StoreRun | LoadRun) -> None:
        job.num_runs += 1
        self._num_queued += len(run.keys)
        self._threads.submit(run, LOAD if run.is_load else STORE)

    def _finish_store(self, run: StoreRun) -> None:
        job = self._jobs[run.job_id]
        rewritten = [key for key in run.keys if key in self._bad] if self._bad else []
        if rewritten:
            self._index.complete_load(rewritten)
        if run.done:
            self._store_error = ""
            self._bad.difference_update(rewritten)
            self._index.complete_store(run.keys)
            self._table.stamp(
                np.arange(run.slot, run.slot + len(run.keys)),
                np.array(run.seqs, np.uint64),
            )
            job.done += run.keys
        else:
            self._index.complete_store(run.keys, success=False)
            job.failed += run.keys
        self._finish_run(run, job)

    def _finish_load(self, run: LoadRun) -> None:
        job = self._jobs[run.job_id]
        self._index.complete_load(run.keys)
        if run.error:
            # Nothing is known of blocks that were not read, so they stay.
            job.failed += run.keys
        else:
            job.done += run.done
            job.failed += run.corrupt
            job.removed += [key for key in run.corrupt if key not in self._bad]
            self._bad.update(run.corrupt)
            self._counts["loaded"] += len(run.done)
            self._counts["corrupt"] += len(run.corrupt)
            if run.corrupt:
                self._note_corrupt(run)
            self._table.count_use(run.slot, len(run.keys))
        self._finish_run(run, job)

    def _finish_run(self, run: StoreRun | LoadRun, job: _Job) -> None:
        job.num_runs -= 1
        job.error = job.error or run.error
        self._end_if_done(run.job_id, job)

    def _end_if_done(self, job_id: int, job: _Job) -> None:
        if not job.num_runs:
            del self._jobs[job_id]
            self._results.append(TierResult(job_id, job.done, job.failed, job.removed, job.error))

    def _begin_reset(self) -> None:
        self._reset = ResetRun(self._directory, self._directory.header.after_reset())
        # A thread of its own: those that do I/O may all hang.
        Thread(target=self._reset.run, name="kvcache-disk-reset", daemon=True).start()

    def _go_on_with_reset(self) -> None:
        run = self._reset
        if run is None or not run.is_over.is_set():
            return
        if run.error:
            if not self._reset_error:
                self._note_error(run)
                self._reset_error = run.error
                self._retry_reset_s = monotonic() + self._flush_interval_s
            elif monotonic() >= self._retry_reset_s:
                self._reset_error = ""
                self._begin_reset()
            return
        if self._jobs:
            return
        self._reset, self._is_reset_wanted, self._reset_error = None, False, ""
        self._generation = self._directory.header.generation
        self._index.reset_cache()
        self._num_restored = 0
        self._slot_of = np.arange(self.num_blocks)
        self._bad.clear()

    def _keep(self) -> None:
        """Open the directory, make everything durable now and then, and close it at the end."""
        try:
            self._open()
        except Exception as error:
            with self._lock:
                if self._is_waited_for:
                    self._open_error = error
                else:
                    self._quiet_reason = str(error)
                    _LOG.warning("disk tier: %s", error)
            return
        finally:
            self._has_opened.set()
        while not self._stop.wait(self._flush_interval_s):
            if self._read_only:
                continue
            try:
                if not self._directory.is_present(self._file.fd):
                    self._give_up()
                    break
                self.flush()
            except OSError as error:
                self._note_flush_error(error)
        self._stop.wait()
        self._may_end.wait()
        if not self._may_close:
            # A thread that hangs still uses the files.
            return
        if not self._read_only and not self._is_removed:
            try:
                self.flush()
            except OSError as error:
                self._note_flush_error(error)
        for part in (self._file, self._table, self._directory):
            with suppress(OSError):
                part.close()

    def _give_up(self) -> None:
        with self._lock:
            self._quiet_reason = f"directory {self.path} was removed"
            self._is_removed = True
        self._warnings.warn("removed", "disk tier: %s", self._quiet_reason)
        if not os.fstat(self._file.fd).st_nlink:
            # Open and deleted, it would take its space until the engine ends.
            os.ftruncate(self._file.fd, 0)

    def _note_flush_error(self, error: OSError) -> None:
        with self._lock:
            self._counts["io_errors"] += 1
            self._last_error = f"flush: {error}"
        self._warnings.warn(f"flush {error.errno}", "disk tier %s: a flush failed: %s", self.path, error)
