"""The data file of a disk tier and the I/O on it: a run of slots at a time, straight from and to host blocks."""

from __future__ import annotations

import errno
import mmap
import os
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from kvcache.tiers.disk.directory import ALIGN_BYTES, DATA, Generation, Header, TierDirectory
from kvcache.tiers.disk.slot_table import SlotTable, checksum

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks

MAX_RUN_BLOCKS = 32
"""Slots in one system call at most: what is done between two calls holds the GIL, and the scheduler waits for it."""
_SECTOR_BYTES = 512


class DataFile:
    """The slots of an open directory, read and written past the page cache where the file system allows it.

    Parameters
    ----------
    directory : TierDirectory
        Open.
    host_blocks : numpy.ndarray
        The pool that blocks come from and go to.
    read_only : bool
        Whether nothing will be written.

    Attributes
    ----------
    is_direct : bool
        Whether the page cache is passed by.
    fd : int
        The open file.
    """

    def __init__(self, directory: TierDirectory, host_blocks: HostBlocks, read_only: bool = False) -> None:
        header = directory.header
        self.block_bytes = header.block_bytes
        self.slot_bytes = header.slot_bytes
        self._host_blocks = host_blocks.view(np.uint8)
        flags = os.O_RDONLY if read_only else os.O_RDWR
        address: int = host_blocks.ctypes.data
        # Of the lowest bit set in any of them, every piece of every transfer is a multiple.
        granule = (address | host_blocks.strides[0] | self.block_bytes) & -(
            address | host_blocks.strides[0] | self.block_bytes
        )
        direct_fd = _open_direct(directory, flags, self.block_bytes, granule)
        self.is_direct = direct_fd is not None
        self.fd = directory.open_file(DATA, flags) if direct_fd is None else direct_fd

    def rows(self, block_ids: list[int]) -> list[memoryview]:
        """Return host blocks as buffers."""
        host_blocks = self._host_blocks
        return [host_blocks[block_id].data for block_id in block_ids]

    def write(self, first_slot: int, rows: list[memoryview]) -> None:
        """Write blocks to consecutive slots, in as many calls as it takes; OSError if that ends early."""
        offset = first_slot * self.slot_bytes
        while rows:
            written = self._whole(os.pwritev(self.fd, rows, offset), rows)
            if not written:
                raise OSError(errno.EIO, f"the file takes no more bytes at offset {offset}")
            offset += written
            rows = _after(rows, written)

    def read(self, first_slot: int, rows: list[memoryview]) -> int:
        """Read consecutive slots; return how many of the first blocks are whole, fewer where the file ends early."""
        start = offset = first_slot * self.slot_bytes
        while rows:
            num_read = self._whole(os.preadv(self.fd, rows, offset), rows)
            if not num_read:
                break
            offset += num_read
            rows = _after(rows, num_read)
        return (offset - start) // self.block_bytes

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def _whole(self, num_bytes: int, rows: list[memoryview]) -> int:
        """Return how much of what a call has moved the next one can go on from."""
        if self.is_direct and num_bytes < sum(map(len, rows)):
            return num_bytes // ALIGN_BYTES * ALIGN_BYTES
        return num_bytes


def _after(rows: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of buffers after their first `num_bytes`."""
    for i, row in enumerate(rows):
        if num_bytes < len(row):
            return [row[num_bytes:], *rows[i + 1 :]]
        num_bytes -= len(row)
    return []


class _Run:
    """Blocks in consecutive slots, to be moved by one system call."""

    is_load = False

    def __init__(
        self,
        file: DataFile,
        table: SlotTable,
        generation: Generation,
        job_id: int,
        slot: int,
        keys: list[bytes],
        block_ids: list[int],
    ) -> None:
        self.file = file
        self.table = table
        self.generation = generation
        self.job_id = job_id
        self.slot = slot
        self.keys = keys
        self.block_ids = block_ids
        self.done: list[bytes] = []
        self.error = ""


class StoreRun(_Run):
    """Write blocks, then their records; `seqs` say in which order the blocks came."""

    seqs: list[int]

    def run(self) -> None:
        rows = self.file.rows(self.block_ids)
        num_bytes = self.file.block_bytes
        seed = self.generation.seed
        checks = [checksum(key, row, num_bytes, seed) for key, row in zip(self.keys, rows, strict=True)]
        self.file.write(self.slot, rows)
        self.table.write(self.slot, self.seqs, self.keys, checks, self.generation)
        self.done = self.keys


class LoadRun(_Run):
    """Read blocks and verify what was read; a bad block's record is wiped, unless the directory is only read."""

    is_load = True
    may_wipe = True
    num_short = 0

    def run(self) -> None:
        rows = self.file.rows(self.block_ids)
        num_whole = self.file.read(self.slot, rows)
        self.num_short = len(rows) - num_whole
        num_bytes, seed = self.file.block_bytes, self.generation.seed
        checks = self.table.checksums[self.slot : self.slot + len(rows)].tolist()
        self.corrupt: list[bytes] = []
        for i, (key, row, check) in enumerate(zip(self.keys, rows, checks, strict=True)):
            if i < num_whole and checksum(key, row, num_bytes, seed) == check:
                self.done.append(key)
            else:
                self.corrupt.append(key)
                if self.may_wipe:
                    self.table.wipe(self.slot + i)


class ResetRun:
    """Let nothing that the directory holds count any more, durably."""

    is_load = False

    def __init__(self, directory: TierDirectory, header: Header) -> None:
        self.directory = directory
        self.header = header
        self.is_marked = Event()
        self.is_over = Event()
        self.error = ""

    def run(self) -> None:
        try:
            self.directory.mark_void()
            self.is_marked.set()
            self.directory.write_header(self.header)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.is_marked.set()
            self.is_over.set()


def _open_direct(directory: TierDirectory, flags: int, block_bytes: int, granule: int) -> int | None:
    """Open the data file past the page cache, if a block can be read that way; None otherwise."""
    if granule < _SECTOR_BYTES:
        return None
    try:
        fd = directory.open_file(DATA, flags | os.O_DIRECT)
    except OSError:
        return None
    # Memory that is aligned no better than the pool's own.
    skew = granule % ALIGN_BYTES
    probe = memoryview(mmap.mmap(-1, block_bytes + ALIGN_BYTES))[skew : skew + block_bytes]
    try:
        os.preadv(fd, [probe], 0)
    except OSError:
        os.close(fd)
        return None
    return fd
