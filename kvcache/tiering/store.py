"""KeyedStore: blocks of one size under keys, in a tier below an engine with host memory of its own. Its calls wait.

An engine's door (SGLang, LMCache) calls it from threads of the engine that may wait, and gives it the engine's buffers.
The bytes move through rows of the store's own, and only the calling thread touches the engine's buffers: it copies, or
loads what the medium has in memory. So a call that has returned leaves the engine's memory alone, even if an I/O thread
of the tier still hangs in a read or write: that thread has its row until the tier reports it.

Loads and stores have half of the rows each. A medium that hangs in writes can still be read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from threading import Condition, RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.metrics import Labels, Part
from kvcache.options import check_int
from kvcache.tiering.controller import HostBudget, TierConfig, TierController, TierJob
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS, Tier, TierResult, host_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.tiering.controller import TierControllerStats
    from kvcache.tiers.base.tier import HostBlocks

    Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
    OpenTier = Callable[[HostBlocks], tuple[Tier, TierConfig]]

STAGING_BYTES = 64 << 20
"""Memory of the rows. It is taken as they are first used."""
_MIN_ROWS, _MAX_ROWS = 8, 1024
_JOBS_PER_CALL = 8
"""A call splits its blocks so that some are copied while others move to or from the medium."""
_ROW_ALIGNMENT = 4096
_NOW_BLOCKS = 16
"""Blocks that a load without a wait keeps from being evicted."""
_TICK_S = 1e-3
"""How long a call waits before it looks at deadlines, and asks a tier that does not report the end of work."""


class _Blocks:
    """The blocks of one call: those that wait to be moved, and those that were."""

    def __init__(
        self, is_load: bool, keys: Sequence[bytes], buffers: Sequence[Buffer | Sequence[Buffer]], num_bytes: int
    ) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys need as many buffers, got {len(buffers)}")
        # A key may be named twice, with buffers of its own.
        self.parts: dict[bytes, list[list[npt.NDArray[np.uint8]]]] = {}
        for key, buffer in zip(keys, buffers, strict=True):
            pieces: Any = buffer if isinstance(buffer, list | tuple) else [buffer]
            parts = [np.frombuffer(piece, np.uint8) for piece in pieces]
            if sum(map(len, parts)) != num_bytes:
                raise ValueError(f"a block has {num_bytes} bytes, got {[len(part) for part in parts]} for {key!r}")
            if is_load and not all(part.flags.writeable for part in parts):
                raise ValueError(f"a block is loaded into writable buffers, got read-only ones for {key!r}")
            self.parts.setdefault(key, []).append(parts)
        self.waiting = deque(self.parts)
        self.moved: set[bytes] = set()
        # Clears of the store before this call.
        self.num_clears = 0

    def fill(self, row: npt.NDArray[np.uint8], key: bytes) -> None:
        """Copy a block into a row."""
        start = 0
        for part in self.parts[key][0]:
            row[start : start + len(part)] = part
            start += len(part)

    def take(self, row: npt.NDArray[np.uint8], key: bytes) -> None:
        """Copy a row into the block's buffers."""
        for parts in self.parts[key]:
            start = 0
            for part in parts:
                part[:] = row[start : start + len(part)]
                start += len(part)


class KeyedStore:
    """A tier whose calls wait; several threads may call it at once. No call raises because of I/O.

    `open_tier` opens the tier over the host blocks that it is given, and returns it with its `TierConfig`; only its
    ``deadline_s``, ``max_failures`` and ``pause_s`` are used; see `kvcache.assembly.assemble.open_store`.
    `staging_bytes` of memory, rounded to a few whole blocks, hold blocks on their way. `labels` are for the metrics.
    `on_change` is called with the keys of blocks that were stored or found at the start, and of those that were removed
    before them, under the store's lock; it must not call the store.

    A call gives up a job, of at most a sixteenth of `staging_bytes`, after ``deadline_s``. Its blocks then count as
    missing or not stored, and the tier's reads or writes are paused for ``pause_s``.
    """

    def __init__(
        self,
        open_tier: OpenTier,
        block_bytes: int,
        *,
        labels: Labels = (),
        staging_bytes: int = STAGING_BYTES,
        on_change: Callable[[list[bytes], list[bytes]], None] | None = None,
    ) -> None:
        self.block_bytes = check_int("block_bytes", block_bytes)
        # Aligned rows of whole pages let a disk tier pass the page cache by.
        row_bytes = -(-block_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self._num_rows = max(_MIN_ROWS, min(_MAX_ROWS, staging_bytes // row_bytes)) // 2
        num_rows = 2 * self._num_rows
        self._rows = host_rows(num_rows, row_bytes)
        # The rows without a block, by direction.
        self._free = {False: list(range(self._num_rows)), True: list(range(self._num_rows, num_rows))}
        self._job_ids = count()
        self._results: dict[int, TierResult] = {}
        self._lock = RLock()
        # Ends of work in the tier, and of calls that freed their rows.
        self._num_ended = 0
        self._has_ended = Condition()
        self._is_closed = False
        self._num_clears = 0
        self._on_change = on_change
        # For the calls that need no store: `pin` and `unpin`.
        self.tier: Any
        self.tier, config = open_tier(self._rows)
        self.tier.call_on_end(self._note_end)
        self._config = replace(config, max_store_blocks=num_rows, arbiter=False)
        self._controller = TierController(self.tier, self._config, 2 * num_rows, 1, HostBudget(num_rows))
        self._labels = (*labels, ("medium", self._controller.medium))

    # The clock of deadlines and pauses: monotonic seconds.
    clock = staticmethod(time.monotonic)

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first keys are held and can be loaded; 0 while the tier does not answer."""
        keys = list(keys)

        def look_up(now_s: float) -> int | None:
            may_load = not self._is_closed and self._num_stuck(True) < self._num_rows
            return self._controller.lookup(keys, now_s) if may_load else 0

        return self._answer(look_up) or 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is held and can be loaded."""
        answers: list[bool] = []
        while len(answers) < len(keys):
            part = keys[len(answers) : len(answers) + MAX_STEP_BLOCKS]
            num_held = self.num_held(part)
            answers += [True] * num_held + [False] * (num_held < len(part))
        return answers

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer | Sequence[Buffer]]) -> list[bool]:
        """Fill the buffers of each key; return for each whether its block was held and verified.

        A key has a contiguous, writable buffer of `block_bytes`, or a list of buffers with as many bytes in all. If its
        answer is False, they may hold anything. Keys are in prefix order. They are not touched, because a call may have
        a part of a prefix only: see `touch`.
        """
        return self._move(True, keys, buffers)

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer | Sequence[Buffer]]) -> list[bool]:
        """Store the buffers of each key, as for `get`; return for each whether the tier holds the key now."""
        return self._move(False, keys, buffers)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use of `keys`, in prefix order: the first becomes the most recent; unknown keys are ignored."""
        with self._lock:
            if not self._is_closed:
                self._controller.touch(list(keys), None)
                self._poll()

    def delete(self, keys: Sequence[bytes]) -> list[bytes]:
        """Forget blocks, and return the keys that were held. The medium frees their space when needed.

        They stay forgotten after a kill or a loss of power, unless the medium hangs for ``deadline_s`` or fails. A tier
        of a store that engines share forgets them for this engine alone.
        """
        return [] if self._is_closed else self.tier.delete(list(keys), self._config.deadline_s)

    def clear(self, version: str | int | None = None) -> bool:
        """Forget every block; return whether that is done and the tier serves again, within ``deadline_s``.

        `version` names the weights of later blocks. Without one, no other process and no later start finds them.
        """
        with self._lock:
            if not self._is_closed:
                self._num_clears += 1
                self._controller.reset(self.clock(), version)
        return bool(self._answer(lambda _: not self._controller.stats().tier.unavailable_reason or None))

    def stats(self) -> TierControllerStats:
        """Return counters since start and gauges now."""
        with self._lock:
            self._poll()
            return self._controller.stats()

    def parts(self) -> list[Part]:
        """Return the statistics for `kvcache.control.telemetry.Telemetry`."""
        return [Part("tier", self.stats(), self._labels)]

    def close(self) -> None:
        """Close the tier; later calls find and store nothing. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            while self._controller.has_reports:
                self._poll()
        self._controller.shutdown()

    def _poll(self) -> float:
        """Read the tier's reports, stop waiting for late jobs, and report uses to the tier; return the time."""
        now_s = self.clock()
        controller = self._controller
        for job, result in controller.poll(MAX_STEP_BLOCKS, now_s):
            if self._on_change is not None:
                self._on_change([] if job is not None and job.is_load else result.done, result.removed)
            if job is None:
                continue
            if job.is_overdue:
                self._free[job.is_load] += job.block_ids
            else:
                self._results[job.job_id] = result
        controller.pass_on_uses()
        return now_s

    def _answer(self, ask: Callable[[float], int | None]) -> int | None:
        """Return the first answer of `ask`, which is called with the time under the lock; None: none in time."""
        start_s = self.clock()
        while True:
            num_ended = self._num_ended
            with self._lock:
                now_s = self._poll()
                answer = ask(now_s)
            if answer is not None or now_s - start_s > self._config.deadline_s:
                return answer
            self._sleep(num_ended)

    def _num_stuck(self, is_load: bool) -> int:
        """Return how many rows wait for a tier that hangs."""
        jobs = self._controller.jobs.values()
        return sum(len(job.block_ids) for job in jobs if job.is_overdue and job.is_load == is_load)

    def _note_end(self) -> None:
        with self._has_ended:
            self._num_ended += 1
            self._has_ended.notify_all()

    def _sleep(self, num_ended: int) -> None:
        """Wait until there are more than `num_ended` ends, or for a while."""
        with self._has_ended:
            if self._num_ended == num_ended:
                self._has_ended.wait(_TICK_S)

    def _move(self, is_load: bool, keys: Sequence[bytes], buffers: Sequence[Buffer | Sequence[Buffer]]) -> list[bool]:
        """Load or store as many of the blocks as the tier takes."""
        blocks = _Blocks(is_load, keys, buffers, self.block_bytes)
        jobs: list[TierJob] = []
        size = max(1, self._num_rows // _JOBS_PER_CALL)
        num_clears = blocks.num_clears = self._num_clears
        if is_load:
            self._load_now(blocks)
        progress_s, num_left = self.clock(), len(blocks.waiting)
        while blocks.waiting or jobs:
            # Counted before the reports are taken: an end that comes later ends the wait.
            num_ended = self._num_ended
            with self._lock:
                now_s = self._poll()
                ended = [job for job in jobs if job.is_overdue or job.job_id in self._results]
                results = [self._results.pop(job.job_id, None) for job in ended]
                is_late = now_s - progress_s > self._config.deadline_s
                rows = [] if is_late else self._rows_for(is_load, min(size, len(blocks.waiting)), now_s)
                is_busy = any(not job.is_overdue for job in self._controller.jobs.values())
            for job, result in zip(ended, results, strict=True):
                jobs.remove(job)
                if result is not None:
                    self._end(job, result, blocks)
            num_before, num_left = num_left, len(blocks.waiting) + sum(len(job.keys) for job in jobs)
            sent = self._start(is_load, rows, blocks) if rows else None
            if sent is not None:
                jobs.append(sent)
            if num_left < num_before:
                progress_s = now_s
            elif rows and sent is None and size > 1:
                # The tier has refused more blocks than it can evict now.
                size = (size + 1) // 2
            elif not jobs and (rows is None or is_late or (rows and not is_busy)):
                break
            elif sent is None or ended:
                self._sleep(num_ended)
        # After a clear, an earlier block must not be found: it may be of other weights.
        return [key in blocks.moved and num_clears == self._num_clears for key in keys]

    def _load_now(self, blocks: _Blocks) -> None:
        """Load what needs no wait into the engine's buffers. No other thread ever has these."""
        keys = [key for key in blocks.waiting if len(blocks.parts[key]) == 1]
        # A block in the tier is as long as a row.
        padding = [memoryview(bytearray(self._rows.shape[1] - self.block_bytes))]
        for first in range(0, len(keys), _NOW_BLOCKS):
            with self._lock:
                if self._is_closed or not self._controller.may_send(True, self.clock()):
                    break
            some = keys[first : first + _NOW_BLOCKS]
            buffers = [[part.data for part in blocks.parts[key][0]] + padding for key in some]
            blocks.moved.update(self.tier.load_now(some, buffers))
        blocks.waiting = deque(key for key in blocks.waiting if key not in blocks.moved)

    def _rows_for(self, is_load: bool, num_blocks: int, now_s: float) -> list[int] | None:
        """Return free rows for at most `num_blocks` blocks; None if the tier takes no job now."""
        may_send = self._controller.may_send(is_load, now_s) and self._num_stuck(is_load) < self._num_rows
        if self._is_closed or not may_send:
            return None
        free = self._free[is_load]
        rows = free[len(free) - num_blocks :] if num_blocks < len(free) else free[:]
        del free[len(free) - len(rows) :]
        return rows

    def _start(self, is_load: bool, rows: list[int], blocks: _Blocks) -> TierJob | None:
        """Send a job for the next blocks; None if the tier refuses it."""
        keys = [blocks.waiting.popleft() for _ in rows]
        if not is_load:
            # As the manager stores them: the head of a prefix last, so that it is the most recent.
            keys.reverse()
            for row, key in zip(rows, keys, strict=True):
                blocks.fill(self._rows[row], key)
        with self._lock:
            now_s = self.clock()
            deadline_s = now_s + self._config.deadline_s
            job = TierJob(next(self._job_ids), self._controller, is_load, keys, rows, deadline_s)
            is_old = blocks.num_clears != self._num_clears
            if not (self._is_closed or is_old) and self._controller.send(job, now_s):
                return job
            self._free[is_load] += rows
        if is_old:
            blocks.waiting.clear()
            return None
        blocks.waiting.extendleft(reversed(keys) if is_load else keys)
        return None

    def _end(self, job: TierJob, result: TierResult, blocks: _Blocks) -> None:
        """Take the blocks of a job that the tier has reported, and free its rows."""
        if job.is_load:
            done = set(result.done)
            for row, key in zip(job.block_ids, job.keys, strict=True):
                if key in done:
                    blocks.take(self._rows[row], key)
        else:
            done = set(job.keys).difference(result.failed)
        with self._lock:
            self._free[job.is_load] += job.block_ids
            if not job.is_load:
                # The tier holds the others already, or another call stores them or reads the bad blocks in their place.
                busy = {key for key in done.difference(result.done) if self.tier.lookup([key]) == 0}
                blocks.waiting.extend(key for key in reversed(job.keys) if key in busy)
                done -= busy
        self._note_end()
        blocks.moved |= done
