"""Host blocks in shared memory, so that a tier's threads and the workers of other processes reach the same bytes."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np


class SharedBlocks:
    """Host blocks in shared memory, under a path that scheduler and workers know.

    Parameters
    ----------
    path : Path
        The file; made if it is missing.
    num_blocks, block_bytes : int
        Its shape.
    is_owner : bool
        Whether to keep others from owning the same file, and to remove it at `close`.

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
        self._path = path
        self._is_owner = is_owner
        num_bytes = num_blocks * block_bytes
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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

    def close(self) -> None:
        """Give the file back; the memory goes with the last view of it."""
        if self._fd >= 0:
            if self._is_owner:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
