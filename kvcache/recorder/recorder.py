"""Recorder: write every call of a manager, its answer and what it depended on to a file that can be run again.

The scheduler's thread writes to memory (`kvcache.recorder.call_log`) and nothing else; a thread of the recorder hashes
the keys in full chunks, packs and writes them, so that a slow disk costs records, which are counted, and never the
scheduler's time.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import logging
import math
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
_QUIET_S = 1.0
"""How long a moment is waited for at which no other thread is inside a call."""
_QUIET_STEP_S = 0.0005
# Without a GIL, what another thread runs cannot be looked at.
_SEES_THREADS = getattr(sys, "_is_gil_enabled", lambda: True)()
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
        Records for which there was no room, because the file was too slow or failed, or which were longer than a
        quarter of `max_bytes`; and one for each of the following.
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
        Bytes of all files of a recording; beyond them the oldest quarter goes. A record that is longer than a quarter
        is lost.
    salt : str or bytes, optional
        What keys are hashed with, so that recordings of several engines name blocks alike; left out: a random one,
        which is kept nowhere. It is never written.
    buffer_bytes : int or str
        Memory for records that are not written yet; taken at once. The keys that they name live as long. A record that
        is longer is lost.
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

    While other threads make calls, a recording begins and ends between two of them, and waits a second for that. Where
    there is no such moment, it begins with a lost record, or ends without the statistics that a replay compares.
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
            raise ValueError(f"cannot record to {self.path}: there is a null in it")
        with _ATTACHING:
            if getattr(manager, "recorder", None) is not None:
                raise ValueError(f"the manager is being recorded already, to {manager.recorder.path}")
            self._begin(manager, salt, buffer, clock)

    def _begin(self, manager: Any, salt: str | bytes | None, buffer: int, clock: Callable[[], float] | None) -> None:
        header = {
            "id": uuid.uuid4().hex,
            "segment": 0,
            "manager": manager.configuration(),
            "is_from_start": False,
            "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "python": platform.python_version(),
        }
        chunk_bytes = min(_CHUNK_BYTES, max(4096, self.max_bytes // 64))
        max_record_bytes = _most_packed(self.max_bytes // NUM_FILES - len(header_bytes(header)))
        if max_record_bytes < chunk_bytes:
            raise ValueError(f"max_bytes is too little for the manager's configuration, got {self.max_bytes}")
        log = CallLog(_salt_bytes(salt), chunk_bytes, max(2, buffer // chunk_bytes), max_record_bytes, clock)
        self._log = log
        self._file = _RotatingFile(self.path, self.max_bytes)
        self._thread = threading.Thread(target=_write, args=(log, self._file), name="kvcache-recorder", daemon=True)
        attached = None
        try:
            self._attached = attached = _Attached(manager, log)
            self._file.begin({**header, "is_from_start": attached.begin(manager)})
        except ValueError:
            log.close()
            if attached is not None:
                attached.undo(manager)
            self._file.close()
            raise
        self._manager = weakref.ref(manager)
        manager.recorder = self
        # A manager that is dropped, or alive when the interpreter ends, leaves a whole file.
        self._end = weakref.finalize(manager, _end, log, self._thread)
        self._thread.start()

    def stop(self) -> None:
        """Stop recording, write what is left, and close the file; waits for it, 10 s at most. May be called twice."""
        manager = self._manager()
        with _ATTACHING:
            if manager is not None and manager.recorder is self:
                self._attached.end(manager)
                self._log.close()
                self._attached.undo(manager)
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


def _most_packed(num_bytes: int) -> int:
    """Return how long a record may be, so that so many bytes hold it in a frame of its own, whatever is in it."""
    # zlib makes what it cannot pack longer by less than a part in a thousand.
    return num_bytes - num_bytes // 1000 - 256


class _Attached:
    """What records the calls of a manager, in the place of its cache, or else methods, and of its tiers and clock."""

    def __init__(self, manager: Any, log: CallLog) -> None:
        controllers = getattr(manager, "controllers", None)
        names = _METHODS if controllers is None else _TIERED_METHODS
        methods = (getattr(getattr(manager, name, None), "__func__", None) for name in names)
        codes = (getattr(method, "__code__", None) for method in methods)
        self._codes = frozenset(code for code in codes if code is not None) if _SEES_THREADS else frozenset()
        calls = RecordedCalls(log, names)
        # Over tiers, or under a plug-in's policy, a call is more than what a compiled cache is asked.
        self._is_cache = controllers is None and manager.wrap_cache(lambda cache: RecordedCache(cache, calls))
        if not self._is_cache:
            WrappedCalls.of(manager).add(calls)
        manager.wrap_clock(lambda clock: RecordedClock(log, clock))
        for number, controller in enumerate(controllers or ()):
            is_timed = controller.link is not None
            log.has_groups |= is_timed
            controller.tier = RecordedTier(log, number, controller.tier, is_timed)
        # They hold the manager, which must be free to go while its recorder stays.
        self._found = weakref.ref(calls)

    @property
    def _calls(self) -> RecordedCalls:
        calls = self._found()
        assert calls is not None, "the manager is there, and holds them"
        return calls

    def begin(self, manager: Any) -> bool:
        """Record from now on; return whether no call was ever made before."""
        calls = self._calls
        end_s = self._last_try_s()
        while True:
            num_entered = calls.num_entered
            is_late = time.monotonic() > end_s
            if is_late or calls.is_quiet(self._codes):
                is_new = _is_new(manager)
                if calls.begin(self._codes, num_entered, is_late):
                    return is_new
            time.sleep(_QUIET_STEP_S)

    def end(self, manager: Any) -> None:
        """Record the manager's statistics and nothing after them, if there is a moment for it."""
        calls = self._calls
        end_s = self._last_try_s()
        while time.monotonic() < end_s:
            num_entered = calls.num_entered
            if calls.is_quiet(self._codes) and calls.end(self._codes, num_entered, _stats_text(manager)):
                return
            time.sleep(_QUIET_STEP_S)

    def _last_try_s(self) -> float:
        """Return when to give up on a moment without calls: at once where this thread makes one itself."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code in self._codes:
                return -math.inf
            frame = frame.f_back
        return time.monotonic() + _QUIET_S

    def undo(self, manager: Any) -> None:
        """Put back what was there."""
        if self._is_cache:
            manager.wrap_cache(None)
        else:
            WrappedCalls.of(manager).remove(self._calls)
        for controller in getattr(manager, "controllers", None) or ():
            controller.tier = controller.tier.recorded
        manager.wrap_clock(lambda clock: clock.recorded)


def _end(log: CallLog, thread: threading.Thread) -> None:
    log.close()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(10)


def _write(log: CallLog, file: _RotatingFile) -> None:
    """Write what is recorded, until the end: full chunks at once, others every second."""
    is_last = False
    while not is_last:
        is_last = log.wait(_FLUSH_S)
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

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self.num_lost = 0
        self.error = ""
        self._header: dict[str, Any] = {}
        self._file_bytes = max_bytes // NUM_FILES
        self._size = 0
        self._fd = -1
        self._inode = (0, 0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._shift()
            self._open()
        except OSError as error:
            raise ValueError(f"cannot record to {path}: {error}") from None

    def begin(self, header: dict[str, Any]) -> None:
        """Write the head of the first file."""
        self._header = header
        try:
            self._write_head()
        except OSError as error:
            raise ValueError(f"cannot record to {self.path}: {error}") from None

    def _shift(self) -> None:
        """Number the files that are there one higher; the last goes."""
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
        # One that ends in its head was begun by a recorder that was killed.
        if not MAGIC.startswith(begin):
            raise ValueError(f"{self.path} is no recording, and will not be written over")
        for gone in older[NUM_FILES - 2 :]:
            gone.unlink()
        for number in range(min(len(older), NUM_FILES - 2), 0, -1):
            older[number - 1].replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._inode = _inode(os.fstat(self._fd))
        # As long as it is written to, nobody else rotates it.
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _write_head(self) -> None:
        head = header_bytes(self._header)
        _write_all(self._fd, head)
        self._size = len(head)
        self.num_bytes += len(head)

    def write(self, frame: bytes, num_records: int) -> None:
        """Append a frame, to a new file where this one is full or gone; after a failure nothing is written any more."""
        if self.error:
            self.num_lost += num_records
            return
        try:
            if not self._is_ours():
                raise OSError("its file descriptor was closed by somebody else")
            is_gone = self._is_gone()
            if is_gone:
                _LOG.warning("%s was moved or removed: recording goes on in a new file", self.path)
            if is_gone or self._size + len(frame) > self._file_bytes:
                self.close()
                self._shift()
                self._header = {**self._header, "segment": self._header["segment"] + 1}
                self._open()
                self._write_head()
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
        return _inode(there) != self._inode

    def _is_ours(self) -> bool:
        """Return whether the descriptor is still that of our file; its number may be used anew."""
        try:
            return _inode(os.fstat(self._fd)) == self._inode
        except OSError:
            return False

    def fail(self, error: Exception, num_records: int) -> None:
        """Give up, once and for all."""
        self.num_lost += num_records
        self.error = f"{type(error).__name__}: {error}"
        _LOG.warning("kvcache records no more calls to %s: %s", self.path, self.error)

    def close(self) -> None:
        """Close the file and leave the path to others."""
        if self._fd >= 0 and self._is_ours():
            # A child that was forked holds the file, and would hold its lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
        self._fd = -1


def _inode(of: os.stat_result) -> tuple[int, int]:
    return of.st_dev, of.st_ino


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
