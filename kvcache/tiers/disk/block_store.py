"""Blocks in an open directory: payload with its record, written in this order and verified when read."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from kvcache.tiering.checksum import checksum
from kvcache.tiers.disk.data_file import DataFile
from kvcache.tiers.disk.slot_table import SlotTable

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks
    from kvcache.tiers.disk.directory import Generation, TierDirectory


class BlocksRead(NamedTuple):
    """The result of a read: whether each block verified, and how many blocks lie beyond the end of the file."""

    is_good: list[bool]
    num_short: int


class BlockStore:
    """The slot table and the data file of an open directory, which is closed with the store."""

    def __init__(self, directory: TierDirectory, host_blocks: HostBlocks, read_only: bool) -> None:
        self.directory = directory
        self._read_only = read_only
        with ExitStack() as undo:
            self.table = SlotTable(directory, read_only)
            undo.callback(self.table.close)
            self.file = DataFile(directory, host_blocks, read_only)
            undo.pop_all()

    def write(
        self, first_slot: int, seqs: list[int], keys: list[bytes], rows: list[memoryview], generation: Generation
    ) -> None:
        """Write blocks to consecutive slots, then their records; `seqs` say in which order the blocks came."""
        num_bytes, seed = self.file.block_bytes, generation.seed
        checks = [checksum(key, row, num_bytes, seed) for key, row in zip(keys, rows, strict=True)]
        self.file.write(first_slot, rows)
        self.table.write(first_slot, seqs, keys, checks, generation)

    def read(
        self, first_slot: int, keys: list[bytes], rows: list[memoryview], generation: Generation, may_wipe: bool = True
    ) -> BlocksRead:
        """Read consecutive slots and verify them; a bad block's record is wiped, unless the directory is only read."""
        num_whole = self.file.read(first_slot, rows)
        num_bytes, seed = self.file.block_bytes, generation.seed
        checks = self.table.checksums[first_slot : first_slot + len(rows)].tolist()
        is_good = [
            i < num_whole and checksum(key, row, num_bytes, seed) == check
            for i, (key, row, check) in enumerate(zip(keys, rows, checks, strict=True))
        ]
        if may_wipe and not self._read_only:
            for i, one in enumerate(is_good):
                if not one:
                    self.table.wipe(first_slot + i)
        return BlocksRead(is_good, len(rows) - num_whole)

    def flush(self) -> None:
        """Write recency and make all blocks durable; waits for the disk."""
        self.table.flush()
        os.fdatasync(self.file.fd)

    def close(self) -> None:
        """Close the files and the directory."""
        for part in (self.file, self.table, self.directory):
            with suppress(OSError):
                part.close()
