"""The directory of a disk tier: its files, its size, and its one writer.

The files::

    kvcache.json   format, geometry, fingerprint and generation (`header`); replaced as a whole
    lock           held and signed by the one writer; names the generation that a reset made void
    data           one aligned slot per block, payload only
    records        one sealed record per slot: the block's key and checksum
    recency        time of last use and number of uses of each slot; may be lost
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvcache.background import after_fork
from kvcache.files import write_all
from kvcache.tiers.base.batch import NO_ROOM
from kvcache.tiers.base.wear import RECORD_BYTES as WEAR_BYTES
from kvcache.tiers.disk.header import (
    DATA,
    HEADER,
    MAX_HEADER_BYTES,
    RECENCY,
    RECORD_BYTES,
    RECORDS,
    Header,
    TierDirectoryError,
)

_MARK_OFFSET = 256
"""Where in `lock` the mark stands; the name of the writer comes before it."""
_MARK_BYTES = 8
_WEAR_OFFSET = _MARK_OFFSET + _MARK_BYTES
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_GET_FLAGS, _SET_FLAGS, _NO_COPY = 0x80086601, 0x40086602, 0x00800000
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_NOCOW_FL of Linux."""
# A link is refused, and opening a pipe must not wait.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK

_LOG = logging.getLogger(__name__)

_NEW_HEADER, _LOCK = "kvcache.json.new", "lock"
_BOTH = os.R_OK | os.W_OK
_OURS = {DATA, RECORDS, RECENCY, HEADER, _NEW_HEADER, _LOCK}


@contextmanager
def reported(path: Path, doing: str) -> Iterator[None]:
    """Raise a TierDirectoryError instead of what the file system or the memory of this process refuses."""
    try:
        yield
    except (OSError, MemoryError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise TierDirectoryError(f"disk tier directory {path} cannot be {doing}: {reason}") from error


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close a file descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def directory_bytes(path: Path) -> int:
    """Return the bytes on disk of a directory and its files."""
    num_bytes = 0
    for name in (path, *path.iterdir()):
        # A header that is just being replaced may be gone again.
        with suppress(FileNotFoundError):
            num_bytes += os.lstat(name).st_blocks * 512
    return num_bytes


def shared_names(path: Path) -> list[str]:
    """Return the names in a tier's directory that users other than its owner may access; "." is the directory."""
    names = []
    for name in (".", *sorted(_OURS)):
        with suppress(FileNotFoundError):
            if stat.S_IMODE(os.lstat(path / name).st_mode) & 0o077:
                names.append(name)
    return names


def writer_of(path: str | os.PathLike[str]) -> str:
    """Return an error message that names the process that writes to a directory; "" if none does, or if unknown."""
    with suppress(OSError), closing_fd(os.open(Path(path) / _LOCK, os.O_RDONLY | _FILE_FLAGS)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _in_use(path, fd)
    return ""


def refusal_of(path: str | os.PathLike[str], read_only: bool) -> str:
    """Return why a tier could not open a directory, apart from its blocks' size and model; "" if it can.

    Nothing is made or changed. A tier that only reads needs a directory that exists.
    """
    path = Path(path)
    try:
        with suppress(FileNotFoundError):
            names = {entry.name for entry in path.iterdir()} - {"lost+found"}
            if HEADER in names or (read_only and names):
                with closing(TierDirectory(path, None, read_only=True)) as directory:
                    if not read_only:
                        directory.check_lengths()
            elif not _is_ours(path, names):
                return _no_tier(path, names)
            blocked = [] if read_only else [path / name for name in names & _OURS if not os.access(path / name, _BOTH)]
            if blocked:
                return f"{min(blocked)} cannot be written by user {os.geteuid()}"
        if read_only and not (path / HEADER).exists():
            return f"disk tier directory {path} is to be read only, and holds no tier yet"
        return "" if read_only else writer_of(path)
    except NotADirectoryError:
        return f"{path} is not a directory"
    except (OSError, TierDirectoryError) as error:
        return str(error)


def clear_directory(path: Path) -> int:
    """Delete the files of a tier, of any format, except its lock; return the bytes that this frees.

    The header goes first, so the directory counts as new after an interruption.
    """
    names = {name.name for name in path.iterdir()} - {"lost+found"}
    if not names or not _is_ours(path, names):
        raise TierDirectoryError(_no_tier(path, names))
    with closing_fd(os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600)) as lock_fd:
        _lock(path, lock_fd)
        # Durable before the header goes: without a header, the lock shows whose the other files are.
        _sign(lock_fd)
        os.fsync(lock_fd)
        num_bytes = directory_bytes(path)
        for name in (HEADER, _NEW_HEADER, DATA, RECORDS, RECENCY):
            (path / name).unlink(missing_ok=True)
        return num_bytes - directory_bytes(path)


def _is_ours(path: str | os.PathLike[str], names: set[str], folder_fd: int | None = None) -> bool:
    """Return whether a folder of these files is a tier's, also after its making or its clearing was interrupted.

    The folder at `path`, or the open one `folder_fd`. Slots are written after the first header, so files of slots lie
    beside a lock that a writer has signed.
    """
    if not names <= _OURS or HEADER in names:
        return names <= _OURS
    if names <= {_LOCK, _NEW_HEADER}:
        return not names or _LOCK in names
    place = Path(path) / _LOCK if folder_fd is None else _LOCK
    try:
        with closing_fd(os.open(place, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder_fd)) as fd:
            signature = os.pread(fd, _MARK_OFFSET, 0)
    except OSError:
        return False
    return len(signature) == _MARK_OFFSET and signature.startswith(b"process ") and b" on " in signature


def _no_tier(path: str | os.PathLike[str], names: set[str]) -> str:
    """Return an error message about a folder with these names, which a tier must not use."""
    foreign = ", ".join(sorted(names - _OURS or names)[:5])
    lack = "it also holds" if HEADER in names else f"it has no {HEADER}{', but' if foreign else ''}"
    way_out = ": choose a folder below it" if foreign else ""
    return f"directory {path} is no disk tier: {lack} {foreign}".rstrip() + way_out


def _sign(lock_fd: int) -> None:
    """Write which process has the lock."""
    owner = f"process {os.getpid()} on {socket.gethostname()[:64]}\n"
    write_all(lock_fd, owner.encode()[:_MARK_OFFSET].ljust(_MARK_OFFSET, b"\0"), 0)


def _lock(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TierDirectoryError(_in_use(path, fd)) from None


def _in_use(path: str | os.PathLike[str], lock_fd: int) -> str:
    owner = os.pread(lock_fd, _MARK_OFFSET, 0).decode(errors="replace").strip(" \n\0") or "another process"
    return f"disk tier directory {path} is in use by {owner}; one process may write to it, others may open it read-only"


class TierDirectory:
    """An open directory: its header, and the lock if it may be written.

    A missing directory is made. `header` must have the block size and the fingerprint of the directory; another number
    of slots resizes it, and a directory that shrinks loses its highest slots. None: the header that is found. With
    `read_only`, nothing is locked or changed.

    A TierDirectoryError says why the directory cannot be used: it cannot be read or written, is locked, is no tier's,
    holds other blocks, or has a file that is not regular or has the wrong length.

    A forked child drops its copy of the lock and has no open directory.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header | None, read_only: bool = False) -> None:
        self.path = Path(path)
        self._read_only = read_only
        self._fd = -1
        self._lock_fd = -1
        # A child that holds the descriptor would keep the lock after its parent's end.
        after_fork(self, TierDirectory.close_in_child)
        try:
            with reported(self.path, "read" if read_only else "written"):
                if not read_only and header is not None:
                    self._make()
                # A pipe or a device under this name is an error; opening it must not wait.
                self._fd = os.open(self.path, _FOLDER_FLAGS)
                self._check_ours(may_be_new=header is not None and not read_only)
                if not read_only:
                    self._make_private(self._fd, os.fstat(self._fd), 0o700)
                    self._lock_fd = self.open_file(_LOCK, os.O_RDWR | os.O_CREAT)
                    _lock(self.path, self._lock_fd)
                    try:
                        _sign(self._lock_fd)
                    except OSError as error:
                        # A full btrfs accepts no write, not even in place. The name of an earlier writer is harmless.
                        if error.errno not in NO_ROOM or not os.pread(self._lock_fd, _MARK_OFFSET, 0):
                            raise
                self.header = self._open(header)
        except BaseException:
            self.close()
            raise

    def open_file(self, name: str, flags: int) -> int:
        """Open one of the files and return its descriptor; a link, a pipe or a device is a TierDirectoryError."""
        # Checked before it is opened, because opening a pipe may wait and opening a device may do anything.
        with suppress(FileNotFoundError):
            self._check_regular(name, os.stat(name, dir_fd=self._fd, follow_symlinks=False))
        fd = os.open(name, flags | _FILE_FLAGS, 0o600, dir_fd=self._fd)
        try:
            status = os.fstat(fd)
            self._check_regular(name, status)
            if not self._read_only:
                self._make_private(fd, status, 0o600)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check_lengths(self) -> None:
        """Raise TierDirectoryError if a file is longer than its slots: the header may be wrong and the file right."""
        if not self.header.resizing:
            self._checked_lengths(self.header, may_mend=True)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Cut one of the files."""
        with closing_fd(self.open_file(name, os.O_RDWR)) as fd:
            os.ftruncate(fd, num_bytes)

    def allocate(self) -> bool:
        """Reserve the disk space of all slots; return whether the file system can. TierDirectoryError: no room."""
        libc = ctypes.CDLL(None, use_errno=True)
        with ExitStack() as files:
            missing: list[tuple[int, str, int, int]] = []
            for name, num_bytes in self.header.file_bytes().items():
                fd = files.enter_context(closing_fd(self.open_file(name, os.O_RDWR)))
                # XFS requires free space for all blocks again, so a file that has its blocks is skipped.
                if num_missing := _missing_bytes(fd, num_bytes):
                    missing.append((fd, name, num_bytes, num_missing))
            # Check first: an allocation that fails half-way would leave the disk full.
            disk, needed = os.statvfs(self._fd), sum(num_missing for *_, num_missing in missing)
            free = disk.f_bavail * disk.f_frsize
            if needed > free:
                raise TierDirectoryError(
                    f"disk tier directory {self.path} needs {needed} bytes more on its disk, which has {free} free"
                )
            has_failed = False
            for fd, name, num_bytes, _ in missing:
                # os.posix_fallocate would write to each block if the file system cannot reserve space.
                if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
                    has_failed, number = True, ctypes.get_errno()
                    if number in NO_ROOM:
                        text = f"has no room for {num_bytes} bytes of {name}: {os.strerror(number)}"
                        raise TierDirectoryError(f"disk tier directory {self.path} {text}")
            return not has_failed

    def missing_bytes(self, num_slots: int) -> int:
        """Return how many bytes of the files have no disk space yet, for so many slots."""
        num_missing = 0
        for name, num_bytes in replace(self.header, num_slots=num_slots).file_bytes().items():
            with closing_fd(self.open_file(name, os.O_RDONLY)) as fd:
                num_missing += _missing_bytes(fd, num_bytes)
        return num_missing

    def is_present(self, data_fd: int) -> bool:
        """Return whether the path still leads to the open file `data_fd`; raise OSError if that is unknown."""
        try:
            status = (self.path / DATA).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(status, os.fstat(data_fd))

    def write_header(self, header: Header) -> None:
        """Replace the header durably. A crash leaves the old or the new one; after this call it is the new one."""
        text = header.text()
        with suppress(FileNotFoundError):
            os.unlink(_NEW_HEADER, dir_fd=self._fd)
        with closing_fd(self.open_file(_NEW_HEADER, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as fd:
            write_all(fd, text.encode(), 0)
            os.fsync(fd)
        os.replace(_NEW_HEADER, HEADER, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        _fsync_directory(self._fd)
        self.header = header

    def mark_void(self, salt: int) -> None:
        """Record that blocks under this salt are void; unlike `write_header`, this does not survive a loss of power."""
        write_all(self._lock_fd, salt.to_bytes(_MARK_BYTES, "little"), _MARK_OFFSET)

    def write_wear(self, record: bytes) -> None:
        """Write how worn the disk is, beside the lock, which `clear_directory` keeps."""
        write_all(self._lock_fd, record, _WEAR_OFFSET)

    def read_wear(self) -> bytes:
        """Return the last record of `write_wear`, or other bytes."""
        return self._read_lock(WEAR_BYTES, _WEAR_OFFSET)

    def resize(self, header: Header, afresh: bool = False) -> Header:
        """Give all files the lengths of `header`, and write `header`. The next open repeats an interrupted resize."""
        self.write_header(replace(header, resizing=True))
        # Records before payload: a killed process leaves no record of a payload that was cut off.
        for name, num_bytes in reversed(header.file_bytes().items()):
            with closing_fd(self.open_file(name, os.O_RDWR | os.O_CREAT)) as fd:
                if afresh:
                    os.ftruncate(fd, 0)
                if not os.fstat(fd).st_size:
                    _write_in_place(fd)
                os.ftruncate(fd, num_bytes)
                os.fsync(fd)
        self.write_header(header)
        return header

    def close(self) -> None:
        """Release the lock, also from children that hold its descriptor."""
        if self._lock_fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close without releasing the lock, which is the parent's."""
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._fd = -1

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            return
        with suppress(OSError), closing_fd(os.open(self.path.parent, _FOLDER_FLAGS)) as parent_fd:
            _fsync_directory(parent_fd)

    def _check_ours(self, may_be_new: bool) -> None:
        # By the descriptor: the path may lead elsewhere by now.
        names = set(os.listdir(self._fd)) - {"lost+found"}  # noqa: PTH208
        # The lock is made and signed first and never deleted: a file "data" without it is not ours.
        is_new = may_be_new and _is_ours(self.path, names, self._fd)
        if HEADER not in names and not is_new:
            raise TierDirectoryError(_no_tier(self.path, names))

    def _open(self, header: Header | None) -> Header:
        stored = self._read_header()
        if stored is None:
            if header is None:
                raise TierDirectoryError(f"directory {self.path} is no disk tier: it has no {HEADER}")
            return self.resize(header, afresh=True)
        if header is not None:
            stored.check_same(header, self.path)
        expected = stored if header is None else header
        # An interrupted reset has marked the generation of a salt as void.
        void_salt = int.from_bytes(self._read_lock(_MARK_BYTES, _MARK_OFFSET), "little")
        is_void = void_salt == stored.salt or not stored.has_weights_of(expected)
        if is_void and self._read_only:
            return stored.after_reset(expected.fingerprint)
        if self._read_only:
            return stored
        target = replace(stored, resizing=False, num_slots=expected.num_slots)
        if is_void:
            target = target.after_reset(expected.fingerprint)
        is_cut = not stored.resizing and self._drop_cut_records(stored, may_mend=header is not None)
        if stored.resizing or is_cut or target.num_slots != stored.num_slots:
            return self.resize(target)
        if is_void:
            self.write_header(target)
        return target

    def _read_lock(self, num_bytes: int, offset: int) -> bytes:
        with suppress(FileNotFoundError), closing_fd(self.open_file(_LOCK, os.O_RDONLY)) as fd:
            return os.pread(fd, num_bytes, offset)
        return b""

    def _check_regular(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise TierDirectoryError(
                f"{self.path / name} must be a regular file, its mode is {stat.filemode(status.st_mode)}"
            )

    def _make_private(self, fd: int, status: os.stat_result, mode: int) -> None:
        if not stat.S_IMODE(status.st_mode) & ~mode:
            return
        try:
            os.fchmod(fd, mode)
        except OSError as error:
            _LOG.warning(
                "disk tier directory %s holds KV data that others may read (mode %s), and that cannot be changed: %s",
                self.path,
                stat.filemode(status.st_mode),
                error.strerror,
            )

    def _drop_cut_records(self, header: Header, may_mend: bool) -> bool:
        """Drop the records whose payload was cut off; return whether any file is shorter than it must be."""
        sizes, lengths = self._checked_lengths(header, may_mend), header.file_bytes()
        if sizes == lengths:
            return False
        num_whole = min(sizes[DATA] // header.slot_bytes, sizes[RECORDS] // RECORD_BYTES)
        _LOG.warning(
            "disk tier directory %s was cut: %s; %d of %d slots are kept",
            self.path,
            ", ".join(
                f"{name} has {sizes[name]} of {most} bytes" for name, most in lengths.items() if sizes[name] < most
            ),
            num_whole,
            header.num_slots,
        )
        if sizes[RECORDS] > num_whole * RECORD_BYTES:
            self.truncate(RECORDS, num_whole * RECORD_BYTES)
        return True

    def _checked_lengths(self, header: Header, may_mend: bool) -> dict[str, int]:
        """Return the lengths of the files; raise TierDirectoryError if one is wrong and cannot be repaired."""
        sizes = {}
        for name, length in header.file_bytes().items():
            size = 0
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                self._check_regular(name, status)
                size = status.st_size
            # The header is not sealed, so its capacity may be wrong and the files right.
            if size > length or (size < length and not may_mend):
                way_out = "" if size > length else "open the tier to keep what is whole, or "
                raise TierDirectoryError(
                    f"file {self.path / name} must have {length} bytes, it has {size}; "
                    f"{way_out}delete the directory to start afresh"
                )
            sizes[name] = size
        return sizes

    def _read_header(self) -> Header | None:
        try:
            with closing_fd(self.open_file(HEADER, os.O_RDONLY)) as fd:
                body = os.pread(fd, MAX_HEADER_BYTES + 1, 0)
        except FileNotFoundError:
            return None
        try:
            if len(body) > MAX_HEADER_BYTES:
                raise ValueError(f"it has more than {MAX_HEADER_BYTES} bytes")
            return Header.parsed(json.loads(body.decode()), self.path)
        except TierDirectoryError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError, OverflowError) as error:
            raise TierDirectoryError(
                f"file {self.path / HEADER} is not a disk tier's header: {error}; "
                f"without it no block can be verified: delete the directory to start afresh"
            ) from error


def _write_in_place(fd: int) -> None:
    """Make btrfs write an empty file in place: a full disk has no other place. Our checksums replace those of btrfs."""
    flags = bytearray(8)
    with suppress(OSError):
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        fcntl.ioctl(fd, _SET_FLAGS, (int.from_bytes(flags, sys.byteorder) | _NO_COPY).to_bytes(8, sys.byteorder))


def _missing_bytes(fd: int, num_bytes: int) -> int:
    """Return how many of the first bytes of a file have no blocks; 0 without holes: compression saves blocks, too."""
    status = os.fstat(fd)
    missing = num_bytes - status.st_blocks * 512
    has_hole = not status.st_size or os.lseek(fd, 0, os.SEEK_HOLE) < num_bytes
    return missing if missing > 0 and has_hole else 0


def _fsync_directory(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot do it and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
