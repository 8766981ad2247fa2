"""Blocks in an open directory: payload with its record, verified when read.

A store empties the slots' old records, then writes the payload, then the records, so a killed process leaves whole
blocks and empty slots. A run of consecutive slots moves straight from and to host blocks.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from kvcache.tiers.base.checksum import checksum, checksum_of_parts
from kvcache.tiers.disk.header import ALIGN_BYTES, DATA
from kvcache.tiers.disk.slot_table import SlotTable

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks
    from kvcache.tiers.disk.directory import TierDirectory
    from kvcache.tiers.disk.header import Generation

_SECTOR_BYTES = 512
_MOST_TRIES = 100


class BlockStore:
    """The slot table and the data file of an open directory, which is closed with the store.

    The data file is read and written past the page cache (`is_direct`) if the file system allows, unless `page_cache`.
    """

    def __init__(
        self, directory: TierDirectory, host_blocks: HostBlocks, read_only: bool, page_cache: bool = False
    ) -> None:
        self.directory = directory
        self._read_only = read_only
        self._block_bytes = directory.header.block_bytes
        self._slot_bytes = directory.header.slot_bytes
        with ExitStack() as undo:
            self.table = SlotTable(directory, read_only)
            undo.callback(self.table.close)
            flags = os.O_RDONLY if read_only else os.O_RDWR
            # Each piece of each transfer is a multiple of the lowest bit that is set in any of them.
            mixed: int = host_blocks.ctypes.data | host_blocks.strides[0] | self._block_bytes
            granule = 0 if page_cache else mixed & -mixed
            direct_fd = _open_direct(directory, flags, self._block_bytes, granule)
            self.is_direct = direct_fd is not None
            self.fd = directory.open_file(DATA, flags) if direct_fd is None else direct_fd
            undo.pop_all()

    def write(
        self, first_slot: int, seqs: list[int], keys: list[bytes], rows: list[memoryview], generation: Generation
    ) -> None:
        """Write blocks to consecutive slots, then their records; `seqs` say in which order the blocks came."""
        num_bytes, seed = self._block_bytes, generation.seed
        checks = [checksum(key, row, num_bytes, seed) for key, row in zip(keys, rows, strict=True)]
        self.table.void(first_slot, len(rows))
        self.write_payload(first_slot, rows)
        self.table.write(first_slot, seqs, keys, checks, generation)

    def read(
        self, first_slot: int, keys: list[bytes], rows: list[memoryview], generation: Generation, may_wipe: bool = True
    ) -> list[bool]:
        """Read consecutive slots, and return whether each block verified.

        A bad block's record is wiped, unless the directory is only read.
        """
        self.read_payload(first_slot, rows)
        num_bytes, seed = self._block_bytes, generation.seed
        checks = self.table.checksums[first_slot : first_slot + len(rows)].tolist()
        is_good = [
            checksum(key, row, num_bytes, seed) == check for key, row, check in zip(keys, rows, checks, strict=True)
        ]
        if may_wipe and not self._read_only:
            for i, good in enumerate(is_good):
                if not good:
                    self.table.void(first_slot + i, 1)
        return is_good

    def read_cached(self, slot: int, key: bytes, parts: list[memoryview], generation: Generation) -> bool:
        """Read a block if the page cache holds all of it; return whether it was read and verified. Never waits."""
        num_bytes = self._block_bytes
        try:
            num_read = os.preadv(self.fd, parts, slot * self._slot_bytes, os.RWF_NOWAIT)
        except (OSError, NotImplementedError):
            # A part of the block is not cached, or the file system cannot answer without waiting.
            return False
        check = int(self.table.checksums[slot])
        return num_read == num_bytes and checksum_of_parts(key, parts, num_bytes, generation.seed) == check

    def write_payload(self, first_slot: int, rows: Sequence[memoryview]) -> None:
        """Write blocks to consecutive slots, in as many calls as it takes; OSError if that ends early."""
        num_written = self._move_all(os.pwritev, first_slot, rows)
        if num_written < sum(map(len, rows)):
            raise OSError(errno.EIO, f"the file takes no more bytes after {num_written} of slot {first_slot}")

    def read_payload(self, first_slot: int, rows: Sequence[memoryview]) -> None:
        """Read consecutive slots; behind the end of the file the rows stay as they are."""
        self._move_all(os.preadv, first_slot, rows)

    def flush(self) -> None:
        """Write recency and make all blocks durable; waits for the disk."""
        self.table.flush()
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close the files and the directory."""
        with suppress(OSError):
            os.close(self.fd)
        for part in (self.table, self.directory):
            with suppress(OSError):
                part.close()

    def _move_all(self, call: Callable[..., int], first_slot: int, rows: Sequence[memoryview]) -> int:
        """Move bytes in as many calls as it takes; return how many moved before no more did."""
        start = offset = first_slot * self._slot_bytes
        while rows and (num_moved := self._move(call, rows, offset)):
            offset += num_moved
            rows = _after(rows, num_moved)
        return offset - start

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
