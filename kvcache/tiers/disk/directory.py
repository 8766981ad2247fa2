"""The folder of a disk tier: whose blocks it may hold, how many, and who writes to it.

Everything in it has a size that is fixed by the capacity, so the folder is bounded from its first byte::

    kvcache.json   format, geometry, fingerprint and epoch; replaced as a whole
    lock           held by the one writer
    data           one slot per block, aligned, nothing but payload
    records        one sealed record per slot: whose bytes these are, and their checksum
    recency        when each slot was last used, and how often: worth losing
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvcache.options import check_int

FORMAT = "kvcache disk tier"
VERSION = 1
RECORD_BYTES = 128
RECENCY_BYTES = 16
ALIGN_BYTES = 4096
_EXTENT_BYTES = 16
"""What a file system needs per slot to remember where it lies, at worst (ext4: 12)."""
_FIXED_BYTES = 128 << 10
"""The folder, the small files twice over, and the rounding of each file."""
_MAX_FINGERPRINT_BYTES = 16 << 10
_MAX_EPOCH = (1 << 32) - 1

DATA, RECORDS, RECENCY = "data", "records", "recency"
_HEADER, _NEW_HEADER, _LOCK = "kvcache.json", "kvcache.json.new", "lock"
_OURS = {DATA, RECORDS, RECENCY, _HEADER, _NEW_HEADER, _LOCK}


class TierDirectoryError(ValueError):
    """A folder cannot be used: it is not writable, in use, or holds something else."""


@dataclass(frozen=True, slots=True)
class Header:
    """What `kvcache.json` says.

    Parameters
    ----------
    block_bytes : int
        Bytes of one block.
    num_slots : int
        Blocks that fit.
    epoch : int
        Records of another epoch do not count; a reset raises it.
    fingerprint : dict
        The model, dtype and geometry whose blocks these are.
    resizing : bool
        Whether the files may still have the lengths of an earlier capacity.
    """

    block_bytes: int
    num_slots: int
    epoch: int
    fingerprint: dict[str, Any]
    resizing: bool = False

    @property
    def slot_bytes(self) -> int:
        """From one slot of `data` to the next."""
        return -(-self.block_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def file_bytes(self) -> dict[str, int]:
        """Return the length that each file of slots must have."""
        return {
            DATA: self.num_slots * self.slot_bytes,
            RECORDS: self.num_slots * RECORD_BYTES,
            RECENCY: self.num_slots * RECENCY_BYTES,
        }


def num_slots_within(capacity_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a folder of at most `capacity_bytes` holds, metadata included.

    Raises
    ------
    ValueError
        Not even one.
    """
    check_int("capacity_bytes", capacity_bytes)
    check_int("block_bytes", block_bytes)
    num_slots = (capacity_bytes - _FIXED_BYTES) // _bytes_per_slot(block_bytes)
    if num_slots < 1:
        least = capacity_for(1, block_bytes)
        raise ValueError(
            f"capacity_bytes must be >= {least} to hold one block of {block_bytes} bytes, got {capacity_bytes}"
        )
    return num_slots


def capacity_for(num_blocks: int, block_bytes: int) -> int:
    """Return the smallest `capacity_bytes` that holds `num_blocks` blocks."""
    return check_int("num_blocks", num_blocks) * _bytes_per_slot(block_bytes) + _FIXED_BYTES


def _bytes_per_slot(block_bytes: int) -> int:
    slot_bytes = -(-block_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return slot_bytes + RECORD_BYTES + RECENCY_BYTES + _EXTENT_BYTES


def folder_bytes(path: Path) -> int:
    """Return the bytes on disk of a folder and of all that is in it."""
    return sum(os.lstat(name).st_blocks * 512 for name in (path, *path.iterdir()))


class Folder:
    """An open folder: its header, and the lock if it may be written.

    Parameters
    ----------
    path : path-like
        The folder; made if it is missing, unless `read_only`.
    header : Header or None
        What it must hold: the same block size and fingerprint. Another number of slots resizes it, its highest
        slots are lost when it shrinks. None: whatever it holds.
    read_only : bool
        Neither lock nor change anything.

    Attributes
    ----------
    header : Header
        What it holds now.

    Raises
    ------
    TierDirectoryError
        The folder cannot be read or written, is locked, is no tier's, holds other blocks, or has a file of the
        wrong length.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header | None, read_only: bool = False) -> None:
        self.path = Path(path)
        self._lock_fd = -1
        try:
            if not read_only:
                if header is not None:
                    self.path.mkdir(parents=True, exist_ok=True)
                self._take_lock()
            try:
                self.header = self._open(header, read_only)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            doing = "read" if read_only else "written"
            raise TierDirectoryError(f"disk tier folder {self.path} cannot be {doing}: {error.strerror}") from error

    def open_file(self, name: str, flags: int) -> int:
        """Open one of the slot files and return its descriptor."""
        return os.open(self.path / name, flags | os.O_CLOEXEC)

    def allocate(self) -> None:
        """Take the disk space of all slots now, where the file system can: stores then neither fail for want of it
        nor wait for it to be found.

        Raises
        ------
        TierDirectoryError
            The disk is too full.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        lengths = self.header.file_bytes()
        # Asked first: an allocation that fails half-way keeps what it got, and would leave the disk full.
        taken = {name: (self.path / name).stat().st_blocks * 512 for name in lengths}
        needed = sum(max(0, length - taken[name]) for name, length in lengths.items())
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise TierDirectoryError(
                f"disk tier folder {self.path} needs {needed} bytes more on its disk, which has {free} free"
            )
        for name, num_bytes in lengths.items():
            fd = self.open_file(name, os.O_RDWR)
            try:
                # Not os.posix_fallocate: where the file system cannot, it writes to every block instead.
                failed = libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes))
            finally:
                os.close(fd)
            if failed and ctypes.get_errno() == errno.ENOSPC:
                raise TierDirectoryError(f"disk tier folder {self.path} has no room for {num_bytes} bytes of {name}")

    def is_present(self, data_fd: int) -> bool:
        """Return whether the folder still leads to the file that `data_fd` has open."""
        try:
            found = (self.path / DATA).stat()
        except OSError:
            return False
        opened = os.fstat(data_fd)
        return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)

    def write_header(self, header: Header) -> None:
        """Replace the header, so that either the old or the new one is found whatever happens."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)}, indent=1, sort_keys=True)
        new = self.path / _NEW_HEADER
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / _HEADER)
        self.header = header

    def close(self) -> None:
        """Give the lock back."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _take_lock(self) -> None:
        if not self.path.is_dir():
            raise TierDirectoryError(f"disk tier folder {self.path} does not exist")
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise TierDirectoryError(
                f"disk tier folder {self.path} is in use by {owner}; one process may write to it, others may open "
                f"it read-only"
            ) from None
        self._lock_fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _open(self, header: Header | None, read_only: bool) -> Header:
        found = self._read_header()
        if found is None:
            names = {entry.name for entry in self.path.iterdir()} - {"lost+found"}
            if header is None or read_only or not names <= _OURS:
                raise TierDirectoryError(f"folder {self.path} is no disk tier: it has no {_HEADER}")
            return self.resize(header, afresh=True)
        if header is not None:
            self._check_same(found, header)
        if read_only:
            return found
        wanted = replace(found, resizing=False, num_slots=found.num_slots if header is None else header.num_slots)
        if found.resizing or wanted.num_slots != found.num_slots:
            if not found.resizing:
                self._check_lengths(found)
            return self.resize(wanted)
        self._check_lengths(found)
        return found

    def _check_same(self, found: Header, header: Header) -> None:
        for name in ("block_bytes", "fingerprint"):
            stored, given = getattr(found, name), getattr(header, name)
            if stored != given:
                raise TierDirectoryError(
                    f"disk tier folder {self.path} holds blocks of another {name}: {stored!r}, not {given!r}; "
                    f"choose another folder, or delete this one"
                )

    def _check_lengths(self, header: Header) -> None:
        for name, num_bytes in header.file_bytes().items():
            length = (self.path / name).stat().st_size
            if length != num_bytes:
                raise TierDirectoryError(
                    f"file {self.path / name} must have {num_bytes} bytes, it has {length}; delete the folder to "
                    f"start afresh"
                )

    def resize(self, header: Header, afresh: bool = False) -> Header:
        if len(json.dumps(header.fingerprint)) > _MAX_FINGERPRINT_BYTES:
            raise TierDirectoryError(f"fingerprint must be at most {_MAX_FINGERPRINT_BYTES} bytes of JSON")
        self.write_header(replace(header, resizing=True))
        for name, num_bytes in header.file_bytes().items():
            fd = self.open_file(name, os.O_RDWR | os.O_CREAT)
            try:
                if afresh:
                    # What a lost header left behind must not come back to life.
                    os.ftruncate(fd, 0)
                os.ftruncate(fd, num_bytes)
            finally:
                os.close(fd)
        self.write_header(header)
        return header

    def _read_header(self) -> Header | None:
        try:
            text = (self.path / _HEADER).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            values = json.loads(text)
            name, version = values.pop("format"), values.pop("version")
            if (name, version) != (FORMAT, VERSION):
                raise TierDirectoryError(
                    f"folder {self.path} is of format {name!r} version {version!r}, not {FORMAT!r} version {VERSION}"
                )
            header = Header(**values)
            for name in ("block_bytes", "num_slots"):
                check_int(name, getattr(header, name))
            if type(header.epoch) is not int or not 1 <= header.epoch <= _MAX_EPOCH:
                raise ValueError(f"epoch must be an int from 1 to {_MAX_EPOCH}, got {header.epoch!r}")
            if type(header.resizing) is not bool:
                raise ValueError(f"resizing must be true or false, got {header.resizing!r}")
            return header
        except TierDirectoryError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TierDirectoryError(f"file {self.path / _HEADER} is not a disk tier's header: {error}") from error
