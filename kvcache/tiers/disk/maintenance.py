"""Inspect the directory of a disk tier, verify its blocks, and pack it, for the command line."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.tiers.disk.block_store import BlockStore
from kvcache.tiers.disk.directory import TierDirectory, directory_bytes, reported, shared_names
from kvcache.tiers.disk.header import DATA, RECORD_BYTES, RECORDS, capacity_for, num_slots_within
from kvcache.tiers.disk.slot_table import Found

Progress = Callable[[int, int], None]
"""Called with the blocks done and the blocks in all."""

_NUM_THREADS = 4
_NUM_ROWS = 8


@dataclass(frozen=True, slots=True)
class TierFacts:
    """The contents of a directory; `uses` counts loads of the blocks in it.

    `shared_names` are the files that users other than the owner may read or write, "." for the directory itself.
    """

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
    shared_names: list[str]


def inspect_tier(path: Path) -> TierFacts:
    """Read a directory's header and index; another process may be writing to it."""
    with _opened(path, read_only=True) as (store, _):
        blocks_found = store.table.load()
        uses = store.table.recency["uses"][blocks_found.slots]
        header = store.directory.header
        return TierFacts(
            path=str(path),
            fingerprint=header.fingerprint,
            block_bytes=header.block_bytes,
            num_slots=header.num_slots,
            num_held=len(set(blocks_found.keys)),
            capacity_bytes=capacity_for(header.num_slots, header.block_bytes),
            bytes_on_disk=directory_bytes(path),
            epoch=header.epoch,
            uses=int(uses.sum()),
            never_used_blocks=int((uses == 0).sum()),
            most_uses=int(uses.max(initial=np.uint64(0))),
            shared_names=shared_names(path),
        )


def verify_tier(path: Path, wipe: bool = False, progress: Progress | None = None) -> tuple[int, int]:
    """Read every block and compare its checksum; return how many were right, and how many were not.

    While another process writes to the directory, blocks that are just being replaced count as bad. `wipe` drops bad
    blocks, and needs the directory's lock.
    """
    with _opened(path, read_only=not wipe) as (store, rows):
        generation = store.table.generation
        blocks_found = store.table.load()
        order = np.argsort(blocks_found.slots)
        num_good = num_bad = 0
        groups = [order[i : i + _NUM_ROWS].tolist() for i in range(0, len(order), _NUM_ROWS)]

        def read(group: list[int], row: memoryview) -> list[bool]:
            is_good = []
            for i in group:
                is_good += store.read(int(blocks_found.slots[i]), [blocks_found.keys[i]], [row], generation, wipe)
            return is_good

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for first in range(0, len(groups), _NUM_THREADS):
                # Each thread reads into a row of its own.
                for is_good in threads.map(read, groups[first : first + _NUM_THREADS], rows):
                    num_good += sum(is_good)
                    num_bad += len(is_good) - sum(is_good)
                if progress is not None:
                    progress(num_good + num_bad, len(order))
        return num_good, num_bad


def compact_tier(path: Path, capacity_bytes: int | None = None, progress: Progress | None = None) -> TierFacts:
    """Pack the most recent blocks into the first slots, and release the rest of the disk space.

    No other process may be writing to the directory. `capacity_bytes` is its new capacity; None: it stays. The work can
    be interrupted: a block is written to its new slot before its old record is wiped.
    """
    with _opened(path, read_only=False) as (store, rows):
        directory, table = store.directory, store.table
        header = directory.header
        num_slots = header.num_slots if capacity_bytes is None else num_slots_within(capacity_bytes, header.block_bytes)
        blocks_found = table.load()
        # Of a key that stands in two slots, both may be moved: the later record still is the right one.
        kept = range(max(0, len(blocks_found.keys) - num_slots), len(blocks_found.keys))
        free = sorted(set(range(len(kept))) - {int(blocks_found.slots[i]) for i in kept}, reverse=True)
        for num_done, i in enumerate(kept):
            slot = int(blocks_found.slots[i])
            if slot >= len(kept):
                _move_block(store, rows[0], blocks_found, i, free.pop())
            if progress is not None:
                progress(num_done + 1, len(kept))
        os.fdatasync(store.fd)
        # Blocks that are dropped lie in slots that were written over, or are cut off.
        table.flush()
        new_header = replace(header, num_slots=num_slots, resizing=True)
        directory.write_header(new_header)
        directory.truncate(RECORDS, len(kept) * RECORD_BYTES)
        directory.truncate(DATA, len(kept) * header.slot_bytes)
        directory.resize(replace(new_header, resizing=False))
    return inspect_tier(path)


def _move_block(store: BlockStore, row: memoryview, blocks_found: Found, i: int, target: int) -> None:
    slot, key, table = int(blocks_found.slots[i]), blocks_found.keys[i], store.table
    if not store.read(slot, [key], [row], table.generation)[0]:
        return
    store.write(target, [int(blocks_found.seqs[i])], [key], [row], table.generation)
    table.stamp(np.array([target]), np.array([blocks_found.times[i]], np.uint64))
    table.recency["uses"][target] = table.recency["uses"][slot]
    table.void(slot, 1)


@contextmanager
def _opened(path: Path, read_only: bool) -> Iterator[tuple[BlockStore, list[memoryview]]]:
    """Open a directory, and memory for one block per thread."""
    with ExitStack() as undo, reported(path, "used"):
        directory = TierDirectory(path, None, read_only)
        undo.callback(directory.close)
        slot_bytes = directory.header.slot_bytes
        memory = mmap.mmap(-1, _NUM_THREADS * slot_bytes)
        blocks = np.frombuffer(memory, np.uint8).reshape(_NUM_THREADS, slot_bytes)
        blocks = blocks[:, : directory.header.block_bytes]
        store = BlockStore(directory, blocks, read_only)
        undo.callback(store.close)
        yield store, [block.data for block in blocks]
