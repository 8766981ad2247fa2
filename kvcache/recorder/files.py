"""The two files of a recording: the newest under its own name, and the one before it as ``path.1``."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import zlib
from pathlib import Path
from typing import Any

from kvcache.files import write_all

_LOG = logging.getLogger(__name__)
MAGIC = b"KVCLOG\r\n"
VERSION = 6
_HEAD = MAGIC + VERSION.to_bytes(4, "little")
_GZIP = 31  # zlib's number for a gzip stream, which has a CRC-32


def header_bytes(header: dict[str, Any]) -> bytes:
    """Return the head of a file."""
    return _HEAD + frame_bytes(json.dumps(header, sort_keys=True).encode())


def frame_bytes(raw: bytes) -> bytes:
    """Return a frame: its length, and `raw` compressed."""
    packed = zlib.compress(raw, 1, _GZIP)
    return len(packed).to_bytes(4, "little") + packed


def older_file(path: Path) -> Path:
    """Return the name of the file before `path`."""
    return path.with_name(f"{path.name}.1")


class RotatingFile:
    """Writes frames to the newest file of a recording. A full file replaces the older one.

    Both files together have at most `max_bytes`. Each further file has the next "segment" in its header.
    """

    def __init__(self, path: Path, max_bytes: int, header: dict[str, Any]) -> None:
        self.path = path
        self.num_bytes = self.num_lost = 0
        self.error = ""
        self._header = header
        self._file_bytes = max_bytes // 2
        # For the header of another segment, whose numbers may have more digits.
        self.max_frame_bytes = self._file_bytes - len(header_bytes(header)) - 64
        if self.max_frame_bytes < 4096:
            raise ValueError(f"max_bytes is too little for the manager's configuration, got {max_bytes}")
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self.close()
            raise ValueError(f"cannot record to {path}: {error}") from None

    def _open(self) -> None:
        """Begin a new file, after the existing one was renamed."""
        older = older_file(self.path)
        _check_replaceable(older)
        if _check_replaceable(self.path):
            self.path.replace(older)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        # While the file is locked, no other process rotates it.
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size = 0
        self._append(header_bytes(self._header))

    def _append(self, data: bytes) -> None:
        write_all(self._fd, data)
        self._size += len(data)
        self.num_bytes += len(data)

    def write(self, frame: bytes, num_records: int) -> None:
        """Append a frame, to a new file if this one is full. After an error, only count lost records."""
        if not self.error:
            try:
                if self._size + len(frame) > self._file_bytes:
                    self.close()
                    self._header = {**self._header, "segment": self._header["segment"] + 1}
                    self._open()
                self._append(frame)
            except (OSError, ValueError) as error:
                self.error = f"{type(error).__name__}: {error}"
                _LOG.warning("kvcache stops recording calls to %s: %s", self.path, self.error)
        if self.error:
            self.num_lost += num_records

    def close(self) -> None:
        """Close the file. Other recorders may then use the path."""
        if self._fd >= 0:
            # A forked child may hold the file open, and would keep its lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
        self._fd = -1


def refusal_of(path: str) -> str:
    """Return why a recorder could not write to a path, in which ``{pid}`` is replaced, or "" if it can."""
    target = Path(path.replace("{pid}", str(os.getpid())))
    try:
        for file in (target, older_file(target)):
            _check_replaceable(file)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{target} cannot be recorded to: {error.strerror}"
    return ""


def _check_replaceable(path: Path) -> bool:
    """Return whether `path` exists. Raise ValueError if it is not a recording, or is being recorded to."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no file, and will not be recorded to")
    with path.open("rb") as file:
        # A recorder that was killed may have left an incomplete header.
        if not MAGIC.startswith(file.read(len(MAGIC))):
            raise ValueError(f"{path} is no recording, and will not be written over")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path} is being recorded to by another manager or process") from None
    return True
