"""Recorder: write every call of a manager, its result and its inputs to a file, for a replay.

The calls run under one lock and queue their records (`kvcache.recorder.calls`). A recorder thread hashes the keys,
and packs and writes the records. If the disk is slow, records are lost and counted; the scheduler is not delayed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.background import Background, after_fork
from kvcache.control.watch import Watch
from kvcache.options import parse_size
from kvcache.recorder.calls import CallQueue, RecordedCalls
from kvcache.recorder.files import RotatingFile
from kvcache.recorder.ops import Op
from kvcache.recorder.tier import RecordedTier
from kvcache.registry import how_to_install

if TYPE_CHECKING:
    from kvcache.recorder.format import FrameEncoder

DEFAULT_MAX_BYTES = 1 << 30
_FLUSH_S = 0.1
_STOP_S = 10.0
_QUIET_S = 1.0
"""How long a stop waits for a call of another thread to end."""
# Only one thread at a time may start or stop a recorder.
_ATTACHING = threading.RLock()
_METHODS = (
    "lookup", "status", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store", "reorder",
    "on_request_finished", "reset_cache", "take_events", "hint",
)  # fmt: skip
_TIERED_METHODS = (*_METHODS, "on_schedule_end", "report_prefills", "prefetch", "demote")


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Counters of a recorder.

    `num_records` counts records, and `num_lost` lost ones: the file was too slow or failed, or the record was longer
    than half of the recorder's `max_bytes`. `num_bytes` were written, also to files that are deleted. `error` says why
    writing has stopped; empty if it has not.
    """

    num_records: int
    num_lost: int
    num_bytes: int
    error: str


class Recorder:
    """Record the calls of one manager from now on.

    Parameters
    ----------
    manager : CPUOffloadingManager or TieredOffloadingManager
        The manager to record. A replay from the start needs a recording that begins before the manager's first call.
    path : path-like
        The file. ``{pid}`` in it is replaced by the process id. An older recording is renamed to ``path.1``.
    max_bytes : int or str
        Limit of the bytes of both files of a recording. Beyond it, the older half is deleted. A record longer than a
        half is lost.
    salt : str or bytes, optional
        Salt of the keys' hashes. It is never written. Recordings with the same salt have equal hashes. Default: random.
    buffer_bytes : int or str
        Memory for records: half for those that wait, half for those that are being written. Beyond it, records are
        lost. The keys of these records are kept alive as long.
    clock : callable, optional
        Returns the timestamps of calls, in seconds. Default: the system's monotonic clock.

    Raises
    ------
    ValueError
        The file belongs to another recorder, is not a recording, or cannot be opened. An argument is invalid. Or the
        manager is already being recorded or cannot be recorded. Or msgspec is not installed.

    Notes
    -----
    `shutdown` of the manager stops its recording. A kill loses at most the last second. A forked child does not record.

    A recording starts and stops between two calls. Both wait up to a second for a call of another thread to end. After
    that, the start counts a lost record, and the end omits the statistics that a replay compares.
    """

    def __init__(
        self,
        manager: Any,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str = DEFAULT_MAX_BYTES,
        salt: str | bytes | None = None,
        buffer_bytes: int | str = 16 << 20,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.max_bytes = parse_size("max_bytes", max_bytes)
        buffer = parse_size("buffer_bytes", buffer_bytes)
        if not hasattr(manager, "configuration"):
            raise ValueError(f"cannot record a {type(manager).__name__}: it does not know its own configuration")
        self.path = Path(os.fspath(path).replace("{pid}", str(os.getpid())))
        if "\0" in str(self.path):
            raise ValueError(f"cannot record to {self.path}: the path has a null character")
        with _ATTACHING:
            if manager.recorder is not None:
                raise ValueError(f"the manager is being recorded already, to {manager.recorder.path}")
            self._begin(manager, _salt_bytes(salt), buffer, clock or time.monotonic)

    def _begin(self, manager: Any, salt: bytes, buffer: int, clock: Callable[[], float]) -> None:
        try:
            from kvcache.recorder.format import FrameEncoder
        except ModuleNotFoundError as error:
            raise ValueError(f"recording needs the package {error.name}{how_to_install(error)}") from error
        header = {
            "id": uuid.uuid4().hex,
            "segment": 0,
            "manager": manager.configuration(),
            "is_from_start": _is_new(manager),
            "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "python": platform.python_version(),
        }
        self._queue = queue = CallQueue(buffer, clock)
        self._file = RotatingFile(self.path, self.max_bytes, header)
        controllers = getattr(manager, "controllers", ())
        self._calls = calls = RecordedCalls(queue, _TIERED_METHODS if hasattr(manager, "controllers") else _METHODS)
        manager.clock = _RecordedClock(queue, manager.clock)
        for number, controller in enumerate(controllers):
            controller.tier = RecordedTier(queue, number, controller.tier)
        manager.recorder = self
        self._manager = weakref.ref(manager)
        try:
            with queue.lock:
                Watch.of(manager).add(calls)
                if header["is_from_start"] and not _is_new(manager):
                    queue.put_note(Op.LOST, 0)  # calls were made in the meantime
        except ValueError:
            self._detach(manager)
            self._file.close()
            raise
        # The thread does not refer to the manager. If that is dropped, or lives until exit, the file is complete.
        has_groups = any(controller.link is not None for controller in controllers)
        self._encoder = encoder = FrameEncoder(salt, self._file.max_frame_bytes, has_groups)
        self._thread = Background("recorder", partial(_write, queue, encoder, self._file))
        self._end = weakref.finalize(manager, _end, queue, self._thread)
        after_fork(queue, CallQueue.forget)

    def stop(self) -> None:
        """Stop recording, write the rest, and close the file. Waits for at most 10 s. May be called twice."""
        with _ATTACHING:
            manager = self._manager()
            if manager is not None and manager.recorder is self:
                self._detach(manager)
        self._end()

    def _detach(self, manager: Any) -> None:
        queue = self._queue
        if queue.lock.acquire(timeout=_QUIET_S):
            try:
                if not queue.is_inside:
                    counters = {name: count for name, count in asdict(manager.stats()).items() if type(count) is int}
                    queue.put_note(Op.STATS, counters)
                queue.close()
            finally:
                queue.lock.release()
        queue.close()
        Watch.of(manager).remove(self._calls)
        manager.clock = manager.clock.recorded
        for controller in getattr(manager, "controllers", ()):
            controller.tier = controller.tier.recorded
        manager.recorder = None

    def stats(self) -> RecorderStats:
        """Return counters since the start."""
        queue, file = self._queue, self._file
        num_lost = queue.num_lost + self._encoder.num_lost + file.num_lost
        return RecorderStats(queue.num_records, num_lost, file.num_bytes, file.error)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class _RecordedClock:
    """Returns the times of another clock, and records them as inputs of calls."""

    def __init__(self, queue: CallQueue, clock: Callable[[], float]) -> None:
        self.recorded = clock
        self._queue = queue

    def __call__(self) -> float:
        now_s = self.recorded()
        self._queue.put_input(Op.CLOCK, float(now_s))
        return now_s


def _salt_bytes(salt: str | bytes | None) -> bytes:
    if salt is None:
        return os.urandom(32)
    if not isinstance(salt, str | bytes) or not salt:
        raise ValueError(f"salt must be a str or bytes that is not empty, got {salt!r}")
    return hashlib.sha256(salt.encode() if isinstance(salt, str) else salt).digest()


def _is_new(manager: Any) -> bool:
    stats = manager.stats()
    return all(getattr(stats, name) == 0 for name in ("lookups", "needed_blocks"))


def _end(queue: CallQueue, thread: Background) -> None:
    queue.close()
    thread.stop(_STOP_S)


def _write(queue: CallQueue, encoder: FrameEncoder, file: RotatingFile, stopping: threading.Event) -> None:
    """Write queued records several times a second, until the recorder is stopped."""
    is_last = False
    while not is_last:
        is_last = stopping.wait(_FLUSH_S)
        for frame, num_taken in encoder.frames(queue.take()):
            file.write(frame, num_taken)
    file.close()
