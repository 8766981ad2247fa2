"""The data file of a disk tier and the I/O on it: a run of slots at a time, straight from and to host blocks."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvcache.tiers.disk.directory import ALIGN_BYTES, DATA, Folder
from kvcache.tiers.disk.slot_table import Records, checksum

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks

MAX_RUN_BLOCKS = 32
"""Slots in one system call at most: what is done between two calls holds the GIL, and the scheduler waits for it."""
_SECTOR_BYTES = 512


class BlockFile:
    """The slots of an open folder, read and written past the page cache where the file system allows it.

    Parameters
    ----------
    folder : Folder
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

    def __init__(self, folder: Folder, host_blocks: HostBlocks, read_only: bool = False) -> None:
        header = folder.header
        self.block_bytes = header.block_bytes
        self.slot_bytes = header.slot_bytes
        self._host_blocks = host_blocks.view(np.uint8)
        flags = os.O_RDONLY if read_only else os.O_RDWR
        address: int = host_blocks.ctypes.data
        # Of the lowest bit set in any of them, every piece of every transfer is a multiple.
        granule = (address | host_blocks.strides[0] | self.block_bytes) & -(
            address | host_blocks.strides[0] | self.block_bytes
        )
        direct_fd = _open_direct(folder, flags, self.block_bytes, granule)
        self.is_direct = direct_fd is not None
        self.fd = folder.open_file(DATA, flags) if direct_fd is None else direct_fd

    def rows(self, block_ids: list[int]) -> list[memoryview]:
        """Return host blocks as buffers."""
        host_blocks = self._host_blocks
        return [host_blocks[block_id].data for block_id in block_ids]

    def write(self, first_slot: int, rows: list[memoryview]) -> None:
        """Write blocks to consecutive slots; OSError if not every byte was taken."""
        written = os.pwritev(self.fd, rows, first_slot * self.slot_bytes)
        if written != len(rows) * self.block_bytes:
            raise OSError(errno.ENOSPC, f"{written} of {len(rows) * self.block_bytes} bytes were written")

    def read(self, first_slot: int, rows: list[memoryview]) -> int:
        """Read consecutive slots; return how many of the first blocks are whole, fewer where the file ends early."""
        return os.preadv(self.fd, rows, first_slot * self.slot_bytes) // self.block_bytes

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


class _Run:
    """Blocks in consecutive slots, to be moved by one system call."""

    is_load = False

    def __init__(
        self, file: BlockFile, records: Records, job_id: int, slot: int, keys: list[bytes], block_ids: list[int]
    ) -> None:
        self.file = file
        self.records = records
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
        checks = [checksum(key, row, num_bytes) for key, row in zip(self.keys, rows, strict=True)]
        self.file.write(self.slot, rows)
        self.records.write(self.slot, self.seqs, self.keys, checks)
        self.done = self.keys


class LoadRun(_Run):
    """Read blocks and verify what was read; a bad block's record is wiped, unless the folder is only read."""

    is_load = True
    may_wipe = True

    def run(self) -> None:
        rows = self.file.rows(self.block_ids)
        num_whole = self.file.read(self.slot, rows)
        num_bytes = self.file.block_bytes
        checks = self.records.checksums[self.slot : self.slot + len(rows)].tolist()
        self.corrupt: list[bytes] = []
        for i, (key, row, check) in enumerate(zip(self.keys, rows, checks, strict=True)):
            if i < num_whole and checksum(key, row, num_bytes) == check:
                self.done.append(key)
            else:
                self.corrupt.append(key)
                if self.may_wipe:
                    self.records.wipe(self.slot + i)


class ResetRun:
    """Let no record of the folder count any more."""

    is_load = False

    def __init__(self, folder: Folder, records: Records, epoch: int) -> None:
        self.folder = folder
        self.records = records
        self.epoch = epoch
        self.error = ""

    def run(self) -> None:
        self.folder.write_header(replace(self.folder.header, epoch=self.epoch))
        self.records.set_epoch(self.epoch)


def _open_direct(folder: Folder, flags: int, block_bytes: int, granule: int) -> int | None:
    """Open the data file past the page cache, if a block can be read that way; None otherwise."""
    if granule < _SECTOR_BYTES:
        return None
    try:
        fd = folder.open_file(DATA, flags | os.O_DIRECT)
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
