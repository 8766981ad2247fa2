"""Recorder: write every call of a manager, its answer and what it depended on to a file that can be run again.

The scheduler's thread writes to memory (`kvcache.recorder.call_log`) and nothing else; a thread of the recorder hashes
the keys in full chunks, packs and writes them, so that a slow disk costs records, which are counted, and never the
scheduler's time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import queue
import stat
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcache.control.wrapped_calls import WrappedCalls
from kvcache.options import parse_size
from kvcache.recorder.call_log import CallLog, RecordedClock
from kvcache.recorder.format import MAGIC, frame_bytes, header_bytes, older_files
from kvcache.recorder.recorded_cache import RecordedCache
from kvcache.recorder.recorded_calls import RecordedCalls
from kvcache.recorder.tier import RecordedTier

_LOG = logging.getLogger(__name__)
DEFAULT_MAX_BYTES = 1 << 30
LEAST_MAX_BYTES = 1 << 16
NUM_FILES = 4
"""Files of one recording at most; the oldest goes first."""
_CHUNK_BYTES = 1 << 18
_FLUSH_S = 1.0
# Recorders are put on a manager and taken off by one thread at a time.
_ATTACHING = threading.RLock()
_METHODS = (
    "lookup", "status", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store", "reorder",
    "on_request_finished", "reset_cache", "take_events", "hint",
)  # fmt: skip
_TIERED_METHODS = (*_METHODS, "on_schedule_end", "is_coming", "report_prefills")


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """What a recorder has done.

    Parameters
    ----------
    num_records : int
        Records made: calls, and what they depended on.
    num_lost : int
        Records for which there was no room, because the file was too slow or failed.
    num_overlapped : int
        Calls made while another thread was inside one, so that their order is not known.
    num_bytes : int
        Bytes written to files, those of files that have gone included.
    error : str
        Why nothing is written any more; empty while it is.
    """

    num_records: int
    num_lost: int
    num_overlapped: int
    num_bytes: int
    error: str


class Recorder:
    """Record the calls of one manager from now on.

    Parameters
    ----------
    manager : CPUOffloadingManager or TieredOffloadingManager
        Whose calls are recorded. Only what is recorded from its first call on can be replayed from the start.
    path : path-like
        The file; ``{pid}`` in it stands for the process id. What lies there is kept as ``path.1``, and so on.
    max_bytes : int or str
        Bytes of all files of a recording; beyond them the oldest quarter goes.
    salt : str or bytes, optional
        What keys are hashed with, so that recordings of several engines name blocks alike; left out: a random one,
        which is kept nowhere. It is never written.
    buffer_bytes : int or str
        Memory for records that are not written yet; taken at once. The keys that they name live as long.
    clock : callable, optional
        Returns the seconds that calls are dated with; left out: the system's monotonic clock, to some milliseconds.

    Raises
    ------
    ValueError
        The file is being written by another recorder, is no recording, or cannot be opened; an argument is bad; or the
        manager is being recorded already or cannot be.

    Notes
    -----
    A manager that is shut down ends its recording. After a kill, what is missing is the last second at most.
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
        with _ATTACHING:
            if getattr(manager, "recorder", None) is not None:
                raise ValueError(f"the manager is being recorded already, to {manager.recorder.path}")
            self._begin(manager, salt, buffer, clock)

    def _begin(self, manager: Any, salt: str | bytes | None, buffer: int, clock: Callable[[], float] | None) -> None:
        chunk_bytes = min(_CHUNK_BYTES, max(4096, self.max_bytes // 64))
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        wakes = self._wakes
        self._log = CallLog(
            _salt_bytes(salt),
            chunk_bytes,
            max(2, buffer // chunk_bytes),
            clock,
            # Lost records would pile up here while the file is slow.
            lambda: wakes.put(False) if wakes.empty() else None,
        )
        self._header = {
            "id": uuid.uuid4().hex,
            "segment": 0,
            "manager": manager.configuration(),
            "is_from_start": _is_new(manager),
            "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "python": platform.python_version(),
        }
        self._file = _RotatingFile(self.path, self.max_bytes, self._header)
        self._thread = threading.Thread(
            target=_write, args=(self._log, self._wakes, self._file), name="kvcache-recorder", daemon=True
        )
        try:
            self._undo = _attach(manager, self._log)
        except ValueError:
            self._file.close()
            raise
        self._manager = weakref.ref(manager)
        manager.recorder = self
        # A manager that is dropped, or alive when the interpreter ends, leaves a whole file.
        self._end = weakref.finalize(manager, _end, self._log, self._wakes, self._thread)
        self._thread.start()

    def stop(self) -> None:
        """Stop recording, write what is left, and close the file; waits for it, 10 s at most. May be called twice."""
        manager = self._manager()
        with _ATTACHING:
            if manager is not None and manager.recorder is self:
                self._undo(manager)
                self._log.put_stats(_stats_text(manager))
                manager.recorder = None
        self._end()

    def stats(self) -> RecorderStats:
        """Return what was recorded and lost so far.

        Returns
        -------
        RecorderStats
            Counters since the start.
        """
        log, file = self._log, self._file
        return RecorderStats(
            log.num_records, log.num_lost + file.num_lost, log.num_overlapped, file.num_bytes, file.error
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _salt_bytes(salt: str | bytes | None) -> bytes:
    if salt is None:
        return os.urandom(32)
    if not isinstance(salt, str | bytes) or not salt:
        raise ValueError(f"salt must be a str or bytes that is not empty, got {salt!r}")
    import hashlib

    return hashlib.sha256(salt.encode() if isinstance(salt, str) else salt).digest()


def _is_new(manager: Any) -> bool:
    stats = manager.stats()
    return all(getattr(stats, name) == 0 for name in ("lookups", "needed_blocks", "stored_blocks", "rejected_stores"))


def _stats_text(manager: Any) -> bytes:
    counted = asdict(manager.stats())
    return json.dumps({name: value for name, value in counted.items() if type(value) is int}).encode()


def _attach(manager: Any, log: CallLog) -> Callable[[Any], None]:
    """Put what records in the place of a manager's cache, or else methods, tiers and clock; return what undoes it."""
    controllers = getattr(manager, "controllers", None)
    calls = RecordedCalls(log, _METHODS if controllers is None else _TIERED_METHODS)
    # Over tiers, or under a plug-in's policy, a call is more than what a compiled cache is asked.
    is_cache = controllers is None and manager.wrap_cache(lambda cache: RecordedCache(cache, calls))
    if not is_cache:
        WrappedCalls.of(manager).add(calls)
    manager.wrap_clock(lambda clock: RecordedClock(log, clock))
    for number, controller in enumerate(controllers or ()):
        is_timed = controller.link is not None
        log.has_groups |= is_timed
        controller.tier = RecordedTier(log, number, controller.tier, is_timed)
    # It holds the manager, which must be free to go while its recorder stays.
    found = weakref.ref(calls)

    def undo(manager: Any) -> None:
        calls = found()
        if is_cache:
            manager.wrap_cache(None)
        elif calls is not None:
            WrappedCalls.of(manager).remove(calls)
        for controller in getattr(manager, "controllers", None) or ():
            controller.tier = controller.tier.recorded
        manager.wrap_clock(lambda clock: clock.recorded)

    return undo


def _end(log: CallLog, wakes: queue.SimpleQueue[bool], thread: threading.Thread) -> None:
    log.close()
    wakes.put(True)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(10)


def _write(log: CallLog, wakes: queue.SimpleQueue[bool], file: _RotatingFile) -> None:
    """Write what is recorded, until told to end: full chunks at once, others every second."""
    is_last = False
    while not is_last:
        with contextlib.suppress(queue.Empty):
            is_last = wakes.get(timeout=_FLUSH_S)
        for chunk, num_bytes, first_record, num_records, counts, ids in log.take():
            try:
                with memoryview(chunk)[:num_bytes] as records:
                    frame = frame_bytes(first_record, counts, ids, records)
            except Exception as error:
                file.fail(error, num_records)
            else:
                file.write(frame, num_records)
            log.give_back(chunk)
    file.close()


class _RotatingFile:
    """The files of a recording: the newest under its own name, older ones numbered from 1 on."""

    def __init__(self, path: Path, max_bytes: int, header: dict[str, Any]) -> None:
        self.path = path
        self.num_bytes = 0
        self.num_lost = 0
        self.error = ""
        self._header = header
        self._file_bytes = max_bytes // NUM_FILES
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._shift()
            self._fd = self._open()
        except OSError as error:
            raise ValueError(f"cannot record to {path}: {error}") from None

    def _shift(self) -> None:
        """Number the files that are there one higher; the last goes."""
        older = list(older_files(self.path))
        for one in older:
            with one.open("rb") as file:
                if file.read(len(MAGIC)) not in (MAGIC, b""):
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
        if begin and begin != MAGIC:
            raise ValueError(f"{self.path} is no recording, and will not be written over")
        for gone in older[NUM_FILES - 2 :]:
            gone.unlink()
        for number in range(min(len(older), NUM_FILES - 2), 0, -1):
            older[number - 1].replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))

    def _open(self) -> int:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        # As long as it is written to, nobody else rotates it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head = header_bytes(self._header)
        _write_all(fd, head)
        self._size = len(head)
        self.num_bytes += len(head)
        return fd

    def write(self, frame: bytes, num_records: int) -> None:
        """Append a frame, to a new file where this one is full or gone; after a failure nothing is written any more."""
        if self.error:
            self.num_lost += num_records
            return
        try:
            is_gone = self._is_gone()
            if is_gone:
                _LOG.warning("%s was moved or removed: recording goes on in a new file", self.path)
            if is_gone or self._size + len(frame) > self._file_bytes:
                self.close()
                self._shift()
                self._header = {**self._header, "segment": self._header["segment"] + 1}
                self._fd = self._open()
            _write_all(self._fd, frame)
            self._size += len(frame)
            self.num_bytes += len(frame)
        except (OSError, ValueError) as error:
            self.fail(error, num_records)

    def _is_gone(self) -> bool:
        try:
            there = self.path.lstat()
        except FileNotFoundError:
            return True
        ours = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def fail(self, error: Exception, num_records: int) -> None:
        """Give up, once and for all."""
        self.num_lost += num_records
        self.error = f"{type(error).__name__}: {error}"
        _LOG.warning("kvcache records no more calls to %s: %s", self.path, self.error)

    def close(self) -> None:
        """Close the file and leave the path to others."""
        if self._fd >= 0:
            # A child that was forked holds the file, and would hold its lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
