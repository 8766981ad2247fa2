"""Host blocks in shared memory, so that a tier's threads and the workers of other processes reach the same bytes.

Shared memory outlives processes that are killed. So each process that maps a file holds a lock on it, which goes with
the process, and whoever opens a file removes those of its kind beside it that nobody holds. An owner that ends normally
removes its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import weakref
from pathlib import Path

import numpy as np

PREFIX = "kvcache-pool-"
"""What the names of files begin with that may be removed when nobody holds them."""


class SharedBlocks:
    """Host blocks in shared memory, under a path that scheduler and workers know.

    Parameters
    ----------
    path : Path
        The file; made if it is missing.
    num_blocks, block_bytes : int
        Its shape.
    is_owner : bool
        Whether to keep others from owning the same file, and to remove it at `close`, or when this process ends; a
        child that it forks leaves the file alone.

    Attributes
    ----------
    array : numpy.ndarray
        uint8, shape (num_blocks, block_bytes).

    Raises
    ------
    ValueError
        The file cannot be made, has another size, or is owned by another process.
    """

    def __init__(self, path: Path, num_blocks: int, block_bytes: int, is_owner: bool) -> None:
        num_bytes = num_blocks * block_bytes
        _remove_orphans(path)
        try:
            self._fd = _open_and_hold(path)
        except OSError as error:
            raise ValueError(f"shared pool {path} cannot be opened: {error.strerror}") from error
        try:
            if is_owner:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            length = os.fstat(self._fd).st_size
            if length not in (0, num_bytes):
                raise ValueError(f"shared pool {path} must have {num_bytes} bytes, it has {length}")
            os.ftruncate(self._fd, num_bytes)
            # Space is taken now: a page that cannot be had later would end the process.
            os.posix_fallocate(self._fd, 0, num_bytes)
            self.mapping = mmap.mmap(self._fd, num_bytes)
        except BlockingIOError:
            os.close(self._fd)
            raise ValueError(
                f"shared pool {path} belongs to another engine; give this one a pool_path of its own"
            ) from None
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise ValueError(f"shared pool {path} of {num_bytes} bytes: {error.strerror}") from error
            raise
        self.array = np.frombuffer(self.mapping, np.uint8).reshape(num_blocks, block_bytes)
        self._remove = weakref.finalize(self, _remove_own, path, os.getpid()) if is_owner else None

    def has_owner(self) -> bool:
        """Return whether anybody owns the file that is mapped here."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Give the file back; the memory goes with the last view of it."""
        if self._fd >= 0:
            if self._remove is not None:
                self._remove()
            os.close(self._fd)
            self._fd = -1


def _open_and_hold(path: Path) -> int:
    """Open or make a file and hold it; the hold lasts as long as the descriptor, or a mapping made from it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _whole_file(fcntl.F_RDLCK))
            except OSError as error:
                # Where such locks are not known (gVisor), no orphan is found either.
                if error.errno != errno.EINVAL:
                    raise
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        # It was taken for an orphan in between.
        os.close(fd)


def _remove_own(path: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        path.unlink(missing_ok=True)


def _remove_orphans(path: Path) -> None:
    for other in path.parent.glob(f"{PREFIX}*"):
        if other == path:
            continue
        try:
            fd = os.open(other, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
            other.unlink()
        except OSError:
            continue
        finally:
            os.close(fd)


def _whole_file(kind: int) -> bytes:
    # struct flock; the lock belongs to the open file, not to the process: several in one process are several.
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
