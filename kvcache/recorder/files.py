"""The files of a recording: the newest under its own name, and older ones numbered from 1 on."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
MAGIC = b"KVCLOG\r\n"
VERSION = 4
HEADER = struct.Struct("<8sII")
"""Magic, version, bytes of JSON."""
MAX_HEADER_BYTES = 1 << 20
NUM_FILES = 4
"""Files of one recording at most; the oldest is deleted first."""


def header_bytes(header: dict[str, Any]) -> bytes:
    """Return the head of a file."""
    text = json.dumps(header, sort_keys=True).encode()
    head = HEADER.pack(MAGIC, VERSION, len(text)) + text
    return head + zlib.crc32(head).to_bytes(4, "little")


def older_files(path: Path) -> Iterator[Path]:
    """Yield the older files of a recording to `path`, newest first."""
    number = 1
    while (older := path.with_name(f"{path.name}.{number}")).is_file():
        yield older
        number += 1


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins with the magic bytes of recordings."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class RotatingFile:
    """Writes frames to the newest file of a recording, and renames full files.

    Parameters
    ----------
    path : Path
        The newest file.
    max_bytes : int
        Limit of the bytes of all files.
    header : dict
        The header; each further file gets the next "segment".
    """

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
        is_there = self.path.exists() or self.path.is_symlink()
        if is_there and not stat.S_ISREG(self.path.lstat().st_mode):
            raise ValueError(f"{self.path} is no file, and will not be recorded to")
        for one in [*older, self.path] if is_there else older:
            with one.open("rb") as file:
                # A recorder that was killed may have left an incomplete header.
                if not MAGIC.startswith(file.read(len(MAGIC))):
                    raise ValueError(f"{one} is no recording, and will not be written over")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise ValueError(f"{one} is being recorded to by another manager or process") from None
        if not is_there:
            return
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
        write_all(self._fd, data)
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


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
