"""Recorder: write every call of a manager, its result and its inputs to a file, for a replay.

The calls run under one lock and queue their records (`kvcache.recorder.calls`). A recorder thread hashes the keys,
and packs and writes the records. If the disk is slow, records are lost and counted; the scheduler is not delayed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import stat
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from kvcache.control.watch import Watch
from kvcache.options import parse_size
from kvcache.recorder.calls import CallQueue, RecordedCalls
from kvcache.recorder.format import MAGIC, FrameEncoder, header_bytes, older_files
from kvcache.recorder.ops import Op
from kvcache.recorder.tier import RecordedTier

_LOG = logging.getLogger(__name__)
DEFAULT_MAX_BYTES = 1 << 30
LEAST_MAX_BYTES = 1 << 16
NUM_FILES = 4
"""Files of one recording at most; the oldest is deleted first."""
_FLUSH_S = 1.0
_QUIET_S = 1.0
"""How long start and stop wait for a call of another thread to end."""
_FRAME_RECORDS = 512
_FRAME_UNITS = 1 << 15
# Only one thread at a time may start or stop a recorder.
_ATTACHING = threading.RLock()
_METHODS = (
    "lookup", "status", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store", "reorder",
    "on_request_finished", "reset_cache", "take_events", "hint",
)  # fmt: skip
_TIERED_METHODS = (*_METHODS, "on_schedule_end", "is_coming", "report_prefills")


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Counters of a recorder.

    Parameters
    ----------
    num_records : int
        Number of records: calls, and their inputs.
    num_lost : int
        Lost records: the file was too slow or failed, or the record was longer than a quarter of `max_bytes`.
    num_bytes : int
        Bytes written to files, including deleted files.
    error : str
        Why writing has stopped; empty if it has not.
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
        The file. ``{pid}`` in it is replaced by the process id. An older recording is renamed to ``path.1``, and so on.
    max_bytes : int or str
        Limit of the bytes of all files of a recording. Beyond it, the oldest quarter is deleted. A record longer than a
        quarter is lost.
    salt : str or bytes, optional
        Salt of the keys' hashes. It is never written. Recordings with the same salt have equal hashes. Default: random.
    buffer_bytes : int or str
        Memory for unwritten records. Beyond it, records are lost. The keys of these records are kept alive as long.
    clock : callable, optional
        Returns the timestamps of calls, in seconds. Default: the system's monotonic clock.

    Raises
    ------
    ValueError
        The file belongs to another recorder, is not a recording, or cannot be opened. An argument is invalid. Or the
        manager is already being recorded or cannot be recorded.

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
        buffer_bytes: int | str = 8 << 20,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.max_bytes = parse_size("max_bytes", max_bytes)
        if self.max_bytes < LEAST_MAX_BYTES:
            raise ValueError(f"max_bytes must be at least {LEAST_MAX_BYTES}, got {max_bytes!r}")
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
        header = {
            "id": uuid.uuid4().hex,
            "segment": 0,
            "manager": manager.configuration(),
            "is_from_start": _is_new(manager),
            "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "python": platform.python_version(),
        }
        self._queue = queue = CallQueue(buffer, clock)
        self._file = _RotatingFile(self.path, self.max_bytes, header)
        controllers = getattr(manager, "controllers", ())
        names = _TIERED_METHODS if hasattr(manager, "controllers") else _METHODS
        calls = RecordedCalls(queue, names)
        encoder = FrameEncoder(salt, any(one.link is not None for one in controllers))
        self._calls = weakref.ref(calls)
        plain = {
            method.__code__
            for one in type(manager).__mro__
            for name, method in vars(one).items()
            if name in names and isinstance(method, FunctionType)
        }
        try:
            Watch.of(manager).add(calls)
        except ValueError:
            self._file.close()
            raise
        manager.clock = _RecordedClock(queue, manager.clock)
        for number, controller in enumerate(controllers):
            controller.tier = RecordedTier(queue, number, controller.tier, controller.link is not None)
        manager.recorder = self
        self._manager = weakref.ref(manager)
        # The thread does not refer to the manager. If that is dropped, or lives until exit, the file is complete.
        self._thread = threading.Thread(
            target=_write, args=(queue, encoder, self._file), name="kvcache-recorder", daemon=True
        )
        self._end = weakref.finalize(manager, _end, queue, self._thread)
        _QUEUES.add(queue)
        self._thread.start()
        end_s = time.monotonic() + _QUIET_S
        # A call that began before the wrappers were added would change the cache without a record.
        while is_inside := _is_in_call(manager, plain):
            if time.monotonic() >= end_s:
                break
            time.sleep(1e-3)
        with queue.lock:
            queue.open()
            if is_inside or (header["is_from_start"] and not _is_new(manager)):
                queue.put((0, Op.LOST, 0))  # calls were made in the meantime

    def stop(self) -> None:
        """Stop recording, write the rest, and close the file. Waits for at most 10 s. May be called twice."""
        manager = self._manager()
        with _ATTACHING:
            if manager is not None and manager.recorder is self:
                self._detach(manager)
        self._end()

    def _detach(self, manager: Any) -> None:
        queue = self._queue
        if queue.lock.acquire(timeout=_QUIET_S):
            try:
                if not queue.is_inside:
                    queue.put((0, Op.STATS, _stats_of(manager)))
                queue.close()
            finally:
                queue.lock.release()
        queue.close()
        calls = self._calls()
        if calls is not None:
            Watch.of(manager).remove(calls)
        manager.clock = manager.clock.recorded
        for controller in getattr(manager, "controllers", ()):
            controller.tier = controller.tier.recorded
        manager.recorder = None

    def stats(self) -> RecorderStats:
        """Return counters since the start."""
        queue, file = self._queue, self._file
        return RecorderStats(queue.num_records, queue.num_lost + file.num_lost, file.num_bytes, file.error)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _is_in_call(manager: Any, methods: set[CodeType]) -> bool:
    """Return whether another thread is inside one of the manager's plain `methods`."""
    for ident, frame in sys._current_frames().items():
        while frame is not None and ident != threading.get_ident():
            if frame.f_code in methods and frame.f_locals.get("self") is manager:
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False


_QUEUES: weakref.WeakSet[CallQueue] = weakref.WeakSet()


def _forget_in_child() -> None:
    for queue in list(_QUEUES):
        queue.forget()


os.register_at_fork(after_in_child=_forget_in_child)


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
    return all(getattr(stats, name) == 0 for name in ("lookups", "needed_blocks", "stored_blocks", "rejected_stores"))


def _stats_of(manager: Any) -> dict[str, int]:
    return {name: value for name, value in asdict(manager.stats()).items() if type(value) is int}


def _end(queue: CallQueue, thread: threading.Thread) -> None:
    queue.close()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(10)


def _write(queue: CallQueue, encoder: FrameEncoder, file: _RotatingFile) -> None:
    """Write queued records until the queue is closed: a full queue at once, otherwise every second."""
    # A frame of several records fits into a file even if all keys are new.
    max_units = min(_FRAME_UNITS, file.max_frame_bytes // 32)
    number = 0
    is_last = False
    while not is_last:
        queue.wait(_FLUSH_S)
        is_last = queue.is_ended
        records = queue.take()
        while records:
            taken = [records.popleft()]
            num_units = taken[0][0]
            while records and len(taken) < _FRAME_RECORDS and num_units + records[0][0] <= max_units:
                taken.append(records.popleft())
                num_units += taken[-1][0]
            num_taken = sum(len(one[2]) if one[1] is Op.STATUS_RUN else 1 for one in taken)
            try:
                frame, following = encoder.encode(number, taken)
                is_lost = len(frame) > file.max_frame_bytes
            except Exception:
                _LOG.debug("%d records could not be encoded", num_taken, exc_info=True)
                is_lost = True
            if is_lost:
                file.num_lost += num_taken
                frame, following = encoder.encode(number, [(0, Op.LOST, num_taken)])
                num_taken = 0
            file.write(frame, num_taken)
            number = following
            queue.release(num_units)
            del taken  # release their keys and requests now
    file.close()


class _RotatingFile:
    """The files of a recording: the newest under its own name, and older ones numbered from 1 on."""

    def __init__(self, path: Path, max_bytes: int, header: dict[str, Any]) -> None:
        self.path = path
        self.num_bytes = self.num_lost = 0
        self.error = ""
        self._header = header
        self._file_bytes = max_bytes // NUM_FILES
        # For the header of another segment, whose numbers may have more digits.
        self.max_frame_bytes = self._file_bytes - len(header_bytes(header)) - 16
        if self.max_frame_bytes < 4096:
            raise ValueError(f"max_bytes is too little for the manager's configuration, got {max_bytes}")
        self._size = 0
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self.close()
            raise ValueError(f"cannot record to {path}: {error}") from None

    def _shift(self) -> None:
        """Increment the numbers of the existing files, and delete the last file."""
        older = list(older_files(self.path))
        for one in older:
            with one.open("rb") as file:
                if not MAGIC.startswith(file.read(len(MAGIC))):
                    raise ValueError(f"{one} is no recording, and will not be written over")
        if not self.path.exists() and not self.path.is_symlink():
            return
        if not stat.S_ISREG(self.path.lstat().st_mode):
            raise ValueError(f"{self.path} is no file, and will not be recorded to")
        with self.path.open("rb") as file:
            begin = file.read(len(MAGIC))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{self.path} is being recorded to by another manager or process") from None
        # A recorder that was killed may have left an incomplete header.
        if not MAGIC.startswith(begin):
            raise ValueError(f"{self.path} is no recording, and will not be written over")
        for last in older[NUM_FILES - 2 :]:
            last.unlink()
        for number in range(min(len(older), NUM_FILES - 2), 0, -1):
            older[number - 1].replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))

    def _open(self) -> None:
        self._shift()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        # While the file is locked, no other process rotates it.
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size = 0
        self._append(header_bytes(self._header))

    def _append(self, data: bytes) -> None:
        _write_all(self._fd, data)
        self._size += len(data)
        self.num_bytes += len(data)

    def write(self, frame: bytes, num_records: int) -> None:
        """Append a frame, to a new file if this one is full or was moved. After an error, only count lost records."""
        if self.error:
            self.num_lost += num_records
            return
        try:
            is_moved = self._is_moved()
            if is_moved:
                _LOG.warning("%s was moved or removed: recording continues in a new file", self.path)
            if is_moved or self._size + len(frame) > self._file_bytes:
                self.close()
                self._header = {**self._header, "segment": self._header["segment"] + 1}
                self._open()
            self._append(frame)
        except (OSError, ValueError) as error:
            self.num_lost += num_records
            self.error = f"{type(error).__name__}: {error}"
            _LOG.warning("kvcache stops recording calls to %s: %s", self.path, self.error)

    def _is_moved(self) -> bool:
        ours = os.fstat(self._fd)
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino)

    def close(self) -> None:
        """Close the file. Other recorders may then use the path."""
        if self._fd >= 0:
            # A forked child may hold the file open, and would keep its lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
        self._fd = -1


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
