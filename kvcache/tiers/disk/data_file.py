"""The data file of a disk tier: a run of slots at a time, straight from and to host blocks."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcache.tiers.disk.directory import ALIGN_BYTES, DATA, TierDirectory

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks

_SECTOR_BYTES = 512
_MOST_TRIES = 100


class DataFile:
    """The slots of an open directory, read and written past the page cache (`is_direct`) if the file system allows."""

    def __init__(self, directory: TierDirectory, host_blocks: HostBlocks, read_only: bool = False) -> None:
        header = directory.header
        self.block_bytes = header.block_bytes
        self.slot_bytes = header.slot_bytes
        flags = os.O_RDONLY if read_only else os.O_RDWR
        address: int = host_blocks.ctypes.data
        # Each piece of each transfer is a multiple of the lowest bit that is set in any of them.
        granule = (address | host_blocks.strides[0] | self.block_bytes) & -(
            address | host_blocks.strides[0] | self.block_bytes
        )
        direct_fd = _open_direct(directory, flags, self.block_bytes, granule)
        self.is_direct = direct_fd is not None
        self.fd = directory.open_file(DATA, flags) if direct_fd is None else direct_fd

    def write(self, first_slot: int, rows: Sequence[memoryview]) -> None:
        """Write blocks to consecutive slots, in as many calls as it takes; OSError if that ends early."""
        offset = first_slot * self.slot_bytes
        while rows:
            written = self._move(os.pwritev, rows, offset)
            if not written:
                raise OSError(errno.EIO, f"the file takes no more bytes at offset {offset}")
            offset += written
            rows = _after(rows, written)

    def read(self, first_slot: int, rows: Sequence[memoryview]) -> int:
        """Read consecutive slots; return how many of the first blocks are whole, fewer where the file ends early."""
        start = offset = first_slot * self.slot_bytes
        while rows:
            num_read = self._move(os.preadv, rows, offset)
            if not num_read:
                break
            offset += num_read
            rows = _after(rows, num_read)
        return (offset - start) // self.block_bytes

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def _move(self, call: Callable[..., int], rows: Sequence[memoryview], offset: int) -> int:
        """Move bytes; return the number after which the next call can go on, 0 if nothing moves any more."""
        for _ in range(_MOST_TRIES):
            num_bytes = call(self.fd, rows, offset)
            if not self.is_direct or num_bytes == sum(map(len, rows)):
                return num_bytes
            # Past the page cache a call begins at a multiple, so the part behind the last one is moved again.
            if not 0 < num_bytes < ALIGN_BYTES:
                return num_bytes // ALIGN_BYTES * ALIGN_BYTES
        return 0


def _after(rows: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return buffers without their first `num_bytes`."""
    for i, row in enumerate(rows):
        if num_bytes < len(row):
            return [row[num_bytes:], *rows[i + 1 :]]
        num_bytes -= len(row)
    return []


def _open_direct(directory: TierDirectory, flags: int, block_bytes: int, granule: int) -> int | None:
    """Open the data file past the page cache, if a block can be read that way; None otherwise."""
    if granule < _SECTOR_BYTES:
        return None
    try:
        fd = directory.open_file(DATA, flags | os.O_DIRECT)
    except OSError:
        return None
    # This memory is aligned no better than the pool's.
    skew = granule % ALIGN_BYTES
    probe = memoryview(mmap.mmap(-1, block_bytes + ALIGN_BYTES))[skew : skew + block_bytes]
    try:
        os.preadv(fd, [probe], 0)
    except OSError:
        os.close(fd)
        return None
    return fd
