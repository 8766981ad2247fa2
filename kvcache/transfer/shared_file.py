"""Host blocks in shared memory: a tier's threads and the workers of other processes reach the same bytes.

Shared memory outlives killed processes. So each process locks the files that it maps until it ends, and a process that
opens a file removes the unlocked pool files beside it. An owner that ends normally removes its own file. The files
contain KV data of prompts, so only their own user can read them or choose their names.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from kvcache.background import after_fork
from kvcache.transfer.free_memory import check_memory

PREFIX = "kvcache-pool-"
"""Prefix of the names of files that may be removed when no process locks them."""

_RECORD_PREFIX = "record-"
_LOCK_TIMEOUT_S = 2.0
_OWNER_TIMEOUT_S = 0.5
_HUGE_PAGE_BYTES = 2 << 20
_PART_BYTES = 64 << 20
_MOST_HUGE_PAGE_S = 2.0
_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
_MAP_FIXED = 0x10
_LIBC = ctypes.CDLL(None)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def private_folder(parent: Path = Path("/dev/shm")) -> Path:
    """Return this user's own folder for pool files; create it if it is missing.

    ValueError if it belongs to another user, is open to others, or is not a folder.
    """
    return make_private(_folder_of_user(parent))


def make_private(folder: Path) -> Path:
    """Create a folder for this user only, unless it exists; ValueError as of `private_folder`."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        status = folder.lstat()
    except OSError as error:
        raise ValueError(f"no folder for shared pools can be made at {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{folder} must be a folder")
    _check_private(f"folder {folder}", status)
    return folder


def _folder_of_user(parent: Path) -> Path:
    return parent / f"kvcache-{os.geteuid()}"


class SharedBlocks:
    """Host blocks in shared memory, in a file whose path the scheduler and the workers share.

    A missing file is created, a missing folder is not. `array` is the memory as uint8, shape (num_blocks, block_bytes).
    With `is_owner`, this process is the only owner of the file, and removes it at `close` or when it ends. A forked
    child neither owns nor removes the file.

    A ValueError says why the file cannot be used: it cannot be created, is not a regular file, belongs to another user,
    is open to others, has another size, is locked, or is owned by another process.

    A process that maps the file has a shared lock of its open file (OFD), which lasts as long as the mapping. A process
    that removes or opens a file first takes the lock (to remove it, the exclusive one), and then checks that the name
    still refers to this file. So only its owner can remove a file in use. An advisory lock (``flock``) of a second
    open file marks the owner.
    """

    def __init__(self, path: Path, num_blocks: int, block_bytes: int, is_owner: bool) -> None:
        num_bytes = num_blocks * block_bytes
        if num_bytes > sys.maxsize:
            raise ValueError(f"shared pool {path} of {num_bytes} bytes is too large for a file")
        self.path = path
        self._is_owner = is_owner
        self._owner_fd = -1
        _check_folder(path.parent)
        for other in path.parent.glob(f"{PREFIX}*"):
            if other != path:
                remove_unmapped(other)
        if not path.exists():
            check_memory(num_bytes, path.parent)
        self._fd = _open_and_hold(path, lambda fd: _lock_whole(fd, fcntl.F_RDLCK))
        try:
            # A second open file: locks belong to open files, and a forked child keeps the mapped one.
            self._owner_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
            if is_owner and not _try_for(_OWNER_TIMEOUT_S, lambda: _flock(self._owner_fd, fcntl.LOCK_EX)):
                raise ValueError(f"shared pool {path} belongs to another engine; give this one a pool_path of its own")
            length = os.fstat(self._fd).st_size
            if length not in (0, num_bytes):
                raise ValueError(f"shared pool {path} must have {num_bytes} bytes, it has {length}")
            os.ftruncate(self._fd, num_bytes)
            self.mapping = _map(self._fd, num_bytes)
            if not length:
                _back_with_huge_pages(self.mapping)
            # Allocate now: a page that is missing later would kill the process.
            os.posix_fallocate(self._fd, 0, num_bytes)
        except BaseException as error:
            if is_owner and isinstance(error, OSError):
                _remove_own(path, os.fstat(self._fd), os.getpid())
            self._close_files()
            if isinstance(error, OSError):
                raise ValueError(f"shared pool {path} of {num_bytes} bytes: {error.strerror}") from error
            raise
        self.array = np.frombuffer(self.mapping, np.uint8).reshape(num_blocks, block_bytes)
        inode = os.fstat(self._fd)
        self._remove = weakref.finalize(self, _remove_own, path, inode, os.getpid()) if is_owner else None
        # A child would keep the ownership after its parent has ended.
        after_fork(self, SharedBlocks._disown)

    def has_owner(self) -> bool:
        """Return whether a process owns the mapped file."""
        if self._is_owner:
            return True
        if not _flock(self._owner_fd, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._owner_fd, fcntl.LOCK_UN)
        return False

    def unlink(self) -> None:
        """Unlink the file if this process owns it; existing mappings stay valid."""
        if self._remove is not None:
            self._remove()

    def close(self) -> None:
        """Close the file; the memory is freed with its last view."""
        self.unlink()
        self._close_files()

    def _disown(self) -> None:
        self._is_owner = False
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
            self._owner_fd = -1

    def _close_files(self) -> None:
        for fd in (self._owner_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._owner_fd = self._fd = -1


class FileRecord:
    """Note that this process uses `path`, a file in shared memory that another library makes and removes.

    A killed process leaves such a file behind. The record is a file in the user's own folder beside `path`, locked as
    long as the process lives. So a later process knows which files are left over (`leftover_files`). Each process makes
    its record before it opens `path`.
    """

    def __init__(self, path: Path) -> None:
        record = private_folder(path.parent) / f"{_RECORD_PREFIX}{path.name}"
        # A process that looks for leftover files holds the other lock for a moment, and may remove the record.
        fd = _open_and_hold(record, lambda fd: _flock(fd, fcntl.LOCK_SH))
        self.close = weakref.finalize(self, _close_record, path, record, fd, os.getpid())
        """End the use. The record goes with its last user if the file is gone, and otherwise with the file."""


def _close_record(path: Path, record: Path, fd: int, pid: int) -> None:
    if not path.exists() and _flock(fd, fcntl.LOCK_EX):
        _remove_own(record, os.fstat(fd), pid)
    os.close(fd)


def leftover_files(parent: Path = Path("/dev/shm"), remove: bool = False) -> list[tuple[Path, int]]:
    """Return the recorded files of killed processes that no process uses, with their bytes; remove them if asked to.

    A file counts only if a process of this user recorded it, all that did have ended, the file belongs to this user,
    and no process maps it or has it open.
    """
    folder, files = _folder_of_user(parent), []
    with contextlib.suppress(OSError, ValueError):
        _check_private(f"folder {folder}", folder.lstat())
        for record in sorted(folder.glob(f"{_RECORD_PREFIX}*")):
            fd = os.open(record, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # The lock is held until the file is gone: its name may be used again by an engine that starts now.
                if _flock(fd, fcntl.LOCK_EX):
                    path = parent / record.name.removeprefix(_RECORD_PREFIX)
                    num_bytes = _unused_bytes(path)
                    if num_bytes:
                        files.append((path, num_bytes))
                    if remove and num_bytes is not None:
                        path.unlink(missing_ok=True)
                        record.unlink()
            finally:
                os.close(fd)
    return files


def _unused_bytes(path: Path) -> int | None:
    """Return the size of a file that no process uses, 0 if it is missing, and None if it may not be removed."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    return status.st_size if is_ours and not _is_in_use(path.name) else None


def _is_in_use(name: str) -> bool:
    """Return whether a process that this one can look into maps a file of this name or has it open."""
    for process in Path("/proc").glob("[0-9]*"):
        # The process has ended, or has more rights than this one, so it is not an engine of this user.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if f"/{name}" in (process / "maps").read_text(errors="replace"):
                return True
            # A process that starts has opened the file, and not mapped it yet.
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if f"/{name}" in str(descriptor.readlink()):
                        return True
    return False


def _map(fd: int, num_bytes: int) -> memoryview:
    """Map a file at a multiple of a huge page; it stays mapped as long as the memoryview or a view of it."""
    whole = memoryview(mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    skipped = -start % _HUGE_PAGE_BYTES
    # The file takes the place of a part of the anonymous memory, which is unmapped as a whole.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _LIBC.mmap(start + skipped, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != start + skipped:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return whole[skipped : skipped + num_bytes]


def _back_with_huge_pages(memory: memoryview) -> None:
    """Back fresh shared memory with huge pages, as far as the system has them.

    Small pages take four times as long to make, a fault each in every process, and more CPU in direct I/O. Linux before
    6.1 refuses. Where it finds no huge page, it moves other memory, so this takes 2 s of CPU time at most.
    """
    started_s = time.thread_time()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for first in range(0, len(memory), _PART_BYTES):
        end = min(first + _PART_BYTES, len(memory))
        # A huge page is made only where there is a page. If memory is missing, a plain access kills the process.
        for place in range(first, end, _HUGE_PAGE_BYTES):
            if _LIBC.madvise(start + place, 1, _MADV_POPULATE_READ):
                return
        _LIBC.madvise(start + first, end - first, _MADV_COLLAPSE)
        if time.thread_time() - started_s > _MOST_HUGE_PAGE_S:
            return


def _open_and_hold(path: Path, lock: Callable[[int], bool]) -> int:
    """Open or create a file and `lock` it; the lock lasts as long as the descriptor, or a mapping made from it."""
    while True:
        fd = _open(path)
        try:
            if not _try_for(_LOCK_TIMEOUT_S, partial(lock, fd)):
                raise ValueError(f"shared pool {path} is locked by another process")
            if _is_at(path, os.fstat(fd)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        # Another process removed it as an orphan in between.
        os.close(fd)


def _open(path: Path) -> int:
    """Create a file, or open an existing one if it is regular, private to this user and not a link."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        except OSError as error:
            raise ValueError(f"shared pool {path} cannot be made: {error.strerror}") from error
        try:
            # Without blocking: the name may be that of a FIFO.
            fd = os.open(path, flags | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ValueError(f"shared pool {path} cannot be opened: {reason}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise ValueError(f"shared pool {path} must be a regular file with one name")
            _check_private(f"shared pool {path}", status)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _check_folder(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise ValueError(f"shared pools cannot be made in {folder}: {error.strerror}") from error
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ValueError(f"shared pools cannot be made in {folder}: any user may rename files in it")


def _check_private(name: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ValueError(f"{name} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise ValueError(f"{name} is open to other users: its mode is {stat.S_IMODE(found.st_mode):03o}")


def _is_at(path: Path, inode: os.stat_result) -> bool:
    try:
        return os.path.samestat(inode, path.lstat())
    except FileNotFoundError:
        return False


def _remove_own(path: Path, inode: os.stat_result, owner_pid: int) -> None:
    if os.getpid() == owner_pid and _is_at(path, inode):
        path.unlink(missing_ok=True)


def remove_unmapped(path: Path) -> None:
    """Remove a pool's file of this user if no process maps it."""
    with contextlib.suppress(OSError):
        # Opening a FIFO or a device must not block.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            # Checked under the lock: the name may refer to a new file by now.
            if is_ours and _lock_whole(fd, fcntl.F_WRLCK) and _is_at(path, status):
                path.unlink()
        finally:
            os.close(fd)


def _try_for(seconds: float, attempt: Callable[[], bool]) -> bool:
    """Return whether an attempt succeeds within `seconds`: a process that tests a lock holds it for a moment."""
    end = time.monotonic() + seconds
    while not attempt():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_whole(fd: int, kind: int) -> bool:
    # struct flock. The lock belongs to the open file, so one process can have several.
    whole = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        # A system without such locks (gVisor) removes no orphans.
        if error.errno != errno.EINVAL or kind == fcntl.F_WRLCK:
            raise
    return True
