"""Look into the folder of a disk tier, verify all its blocks, and pack it: what the command line does with one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.tiers.disk.data_file import BlockFile, LoadRun
from kvcache.tiers.disk.directory import DATA, Folder, capacity_for, folder_bytes, num_slots_within
from kvcache.tiers.disk.slot_table import Found, Records

Progress = Callable[[int, int], None]
"""Called with the blocks done and the blocks in all."""

_NUM_THREADS = 4
_NUM_ROWS = 8


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What a folder holds; `uses` count loads of the blocks that are held."""

    path: str
    fingerprint: dict[str, Any]
    block_bytes: int
    num_slots: int
    num_held: int
    capacity_bytes: int
    bytes_on_disk: int
    epoch: int
    uses: int
    never_used_blocks: int
    most_uses: int


def inspect_tier(path: Path) -> TierFacts:
    """Read a folder's header and index; another process may be writing to it.

    Raises
    ------
    TierDirectoryError
        The folder is no disk tier.
    """
    with _opened(path, read_only=True) as (folder, records, _):
        found = records.load()
        uses = records.recency["uses"][found.slots]
        header = folder.header
        return TierFacts(
            path=str(path),
            fingerprint=header.fingerprint,
            block_bytes=header.block_bytes,
            num_slots=header.num_slots,
            num_held=len(set(found.keys)),
            capacity_bytes=capacity_for(header.num_slots, header.block_bytes),
            bytes_on_disk=folder_bytes(path),
            epoch=header.epoch,
            uses=int(uses.sum()),
            never_used_blocks=int((uses == 0).sum()),
            most_uses=int(uses.max(initial=np.uint64(0))),
        )


def verify_tier(path: Path, wipe: bool = False, progress: Progress | None = None) -> tuple[int, int]:
    """Read every block and compare its checksum; return how many were right, and how many were not.

    Parameters
    ----------
    path : Path
        The folder. While another process writes to it, blocks that are just being replaced count as bad.
    wipe : bool
        Whether to drop bad blocks; needs the folder's lock.
    progress : callable, optional
        Hears how far it is.

    Raises
    ------
    TierDirectoryError
        The folder is no disk tier, or is in use and `wipe` is wanted.
    """
    with _opened(path, read_only=not wipe) as (_, records, file):
        found = records.load()
        order = np.argsort(found.slots)
        num_good = num_bad = 0
        groups = [order[i : i + _NUM_ROWS].tolist() for i in range(0, len(order), _NUM_ROWS)]

        def read(group: list[int], row: int) -> list[LoadRun]:
            runs = []
            for i in group:
                run = LoadRun(file, records, 0, int(found.slots[i]), [found.keys[i]], [row])
                run.may_wipe = wipe
                run.run()
                runs.append(run)
            return runs

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for first in range(0, len(groups), _NUM_THREADS):
                # Each thread reads into a row of its own.
                for runs in threads.map(read, groups[first : first + _NUM_THREADS], range(_NUM_THREADS)):
                    num_bad += sum(len(run.corrupt) for run in runs)
                    num_good += sum(len(run.done) for run in runs)
                if progress is not None:
                    progress(num_good + num_bad, len(order))
        return num_good, num_bad


def compact_tier(path: Path, capacity_bytes: int | None = None, progress: Progress | None = None) -> TierFacts:
    """Pack the most recent blocks into the first slots, give the rest of the disk space back, and say what is left.

    Parameters
    ----------
    path : Path
        The folder; nobody else may be writing to it.
    capacity_bytes : int, optional
        Its new capacity; None: as it is.
    progress : callable, optional
        Hears how far it is.

    Raises
    ------
    TierDirectoryError
        The folder is no disk tier, or is in use.
    ValueError
        The capacity is below one block.

    Notes
    -----
    It can be interrupted: a block is written to its new slot before its old record is wiped.
    """
    with _opened(path, read_only=False) as (folder, records, file):
        header = folder.header
        num_slots = header.num_slots if capacity_bytes is None else num_slots_within(capacity_bytes, header.block_bytes)
        found = records.load()
        # Of a key that stands in two slots, both may be moved: the later record still is the right one.
        kept = range(max(0, len(found.keys) - num_slots), len(found.keys))
        free = sorted(set(range(len(kept))) - {int(found.slots[i]) for i in kept}, reverse=True)
        for num_done, i in enumerate(kept):
            slot = int(found.slots[i])
            if slot >= len(kept):
                _move_block(records, file, found, i, free.pop())
            if progress is not None:
                progress(num_done + 1, len(kept))
        os.fdatasync(file.fd)
        for i in range(len(found.keys) - len(kept)):
            slot = int(found.slots[i])
            if slot >= len(kept) or slot in free:
                records.wipe(slot)
        records.flush()
        wanted = replace(header, num_slots=num_slots, resizing=True)
        folder.write_header(wanted)
        os.truncate(path / DATA, len(kept) * header.slot_bytes)
        folder.resize(replace(wanted, resizing=False))
    return inspect_tier(path)


def _move_block(records: Records, file: BlockFile, found: Found, i: int, target: int) -> None:
    slot = int(found.slots[i])
    run = LoadRun(file, records, 0, slot, [found.keys[i]], [0])
    run.run()
    if not run.done:
        return
    file.write(target, file.rows([0]))
    records.write(target, [int(found.seqs[i])], [found.keys[i]], [int(records.checksums[slot])])
    records.stamp(np.array([target]), np.array([found.times[i]], np.uint64))
    records.recency["uses"][target] = records.recency["uses"][slot]
    records.wipe(slot)


@contextmanager
def _opened(path: Path, read_only: bool) -> Iterator[tuple[Folder, Records, BlockFile]]:
    folder = Folder(path, None, read_only)
    try:
        slot_bytes = folder.header.slot_bytes
        memory = mmap.mmap(-1, _NUM_THREADS * slot_bytes)
        rows = np.frombuffer(memory, np.uint8).reshape(_NUM_THREADS, slot_bytes)[:, : folder.header.block_bytes]
        records = Records(folder, read_only)
        try:
            file = BlockFile(folder, rows, read_only)
            try:
                yield folder, records, file
            finally:
                file.close()
        finally:
            records.close()
    finally:
        folder.close()
