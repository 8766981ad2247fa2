"""One record per slot of a disk tier: the block's key and checksum, and its last use.

A record is sealed and written in place after its payload, so a restart reads one array, and a torn record is invalid.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcache.files import write_all
from kvcache.tiers.disk.directory import TierDirectory
from kvcache.tiers.disk.header import RECENCY, RECENCY_BYTES, RECORD_BYTES, RECORDS, Generation

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_KEY_BYTES = 88
_NUM_WORDS = RECORD_BYTES // 8 - 1
# Each word is mixed before it is multiplied. Otherwise flips of the top bits of two words would cancel out. A change of
# one word always changes the sum (mixing and odd factors lose nothing), a change of several except in one of 2**64.
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_FACTORS = np.frombuffer(hashlib.shake_128(b"kvcache").digest(8 * _NUM_WORDS), "<u8") | np.uint64(1)
_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("checksum", "<u8"),
        ("length", "<u4"),
        ("epoch", "<u4"),
        ("key_bytes", "<u2"),
        ("pad", "<u2"),
        ("pad2", "<u4"),
        ("key", f"V{MAX_KEY_BYTES}"),
        ("seal", "<u8"),
    ]
)
_RECENCY_DTYPE = np.dtype([("stamp", "<u8"), ("uses", "<u8")])
_READ_RECORDS = 1 << 15
_MAX_STAMP = 1 << 62
_PAGE_ROWS = 4096 // RECENCY_BYTES

assert (_DTYPE.itemsize, _RECENCY_DTYPE.itemsize) == (RECORD_BYTES, RECENCY_BYTES)


def _seals(rows: npt.NDArray[np.void], seed: int) -> npt.NDArray[np.uint64]:
    words = rows.view(np.uint64).reshape(len(rows), _NUM_WORDS + 1)
    # Seals of two seeds differ by the same number in each record, so a record of one generation fails in the other.
    words = words[:, :_NUM_WORDS]
    words = (words ^ (words >> np.uint64(32))) * _MIX
    words ^= words >> np.uint64(29)
    seals: npt.NDArray[np.uint64] = words @ _FACTORS + np.uint64(seed)
    return seals


class Found(NamedTuple):
    """The blocks of the records, least recently used first; `slots` is int64, `seqs` and `times` uint64."""

    keys: list[bytes]
    slots: npt.NDArray[np.int64]
    seqs: npt.NDArray[np.uint64]
    times: npt.NDArray[np.uint64]


class SlotTable:
    """The records of one generation, and the recency, of an open directory.

    `checksums` are uint64, one per slot, valid if the slot holds a block. `recency` has the ``stamp`` (a clock, larger
    is later) and the ``uses`` of each slot; it is changed in memory and written by `flush`. `has_space` marks the
    slots that are known to have space on disk: without preallocation, there may be no room for the others.
    """

    def __init__(self, directory: TierDirectory, read_only: bool = False) -> None:
        header = directory.header
        self._num_slots = header.num_slots
        self.generation = header.generation
        self._block_bytes = header.block_bytes
        self.checksums = np.zeros(self._num_slots, np.uint64)
        self.recency = np.zeros(self._num_slots, _RECENCY_DTYPE)
        # Whether the file may hold a valid record of a slot.
        self._is_recorded = np.zeros(self._num_slots, np.bool_)
        self.has_space = np.zeros(self._num_slots, np.bool_)
        self._is_dirty = np.zeros(-(-self._num_slots // _PAGE_ROWS), np.bool_)
        flags = os.O_RDONLY if read_only else os.O_RDWR
        self._fd = directory.open_file(RECORDS, flags)
        try:
            self._recency_fd = directory.open_file(RECENCY, flags)
        except BaseException:
            os.close(self._fd)
            raise

    def load(self) -> Found:
        """Read which block lies in which slot, and the recency.

        Records that are torn, cut off or of another generation are ignored. A key has two records if its older slot
        was reused but not written yet; the later record is the right one.
        """
        body = _read(self._recency_fd, self._num_slots * RECENCY_BYTES, 0)
        flat = np.frombuffer(body[: len(body) // RECENCY_BYTES * RECENCY_BYTES], _RECENCY_DTYPE)
        self.recency[: len(flat)] = flat
        # Stamps are not sealed. The clock goes on from the largest one and must not overflow after damage.
        self.recency["stamp"][self.recency["stamp"] > _MAX_STAMP] = 0
        parts, places = [], []
        for first in range(0, self._num_slots, _READ_RECORDS):
            count = min(_READ_RECORDS, self._num_slots - first)
            body = _read(self._fd, count * RECORD_BYTES, first * RECORD_BYTES)
            rows = np.frombuffer(body[: len(body) // RECORD_BYTES * RECORD_BYTES], _DTYPE)
            valid = np.flatnonzero(self._is_valid(rows))
            parts.append(rows if len(valid) == len(rows) else rows[valid])
            places.append(valid + first)
        rows, slots = np.concatenate(parts), np.concatenate(places)
        self.checksums[slots] = rows["checksum"]
        self._is_recorded[slots] = self.has_space[slots] = True
        times = np.maximum(np.minimum(rows["seq"], np.uint64(_MAX_STAMP)), self.recency["stamp"][slots])
        order = np.argsort(times, kind="stable")
        # Keys are made in the order of their use, so a walk over them reads memory forward.
        keys: list[bytes] = []
        for first in range(0, len(order), _READ_RECORDS):
            keys.extend(_keys(rows[order[first : first + _READ_RECORDS]]))
        return Found(keys, slots[order], rows["seq"][order], times[order])

    def _is_valid(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        valid: npt.NDArray[np.bool_] = (
            (_seals(rows, self.generation.seed) == rows["seal"])
            & (rows["epoch"] == self.generation.epoch)
            & (rows["length"] == self._block_bytes)
            & (rows["key_bytes"] > 0)
            & (rows["key_bytes"] <= MAX_KEY_BYTES)
        )
        return valid

    def void(self, first_slot: int, num_slots: int) -> None:
        """Write that consecutive slots are empty, before their payload is written over.

        If the process is killed meanwhile, their blocks are misses; under the old records they would count as corrupt.
        Does nothing if they are empty on disk already.
        """
        last_slot = first_slot + num_slots
        if self._is_recorded[first_slot:last_slot].any():
            write_all(self._fd, bytes(RECORD_BYTES * num_slots), first_slot * RECORD_BYTES)
            self._is_recorded[first_slot:last_slot] = False

    def write(
        self, first_slot: int, seqs: list[int], keys: list[bytes], checks: list[int], generation: Generation
    ) -> None:
        """Write the records of consecutive slots whose payload has been written."""
        num_bytes, epoch = self._block_bytes, generation.epoch
        records = [
            (seq, check, num_bytes, epoch, len(key), 0, 0, key, 0)
            for seq, key, check in zip(seqs, keys, checks, strict=True)
        ]
        rows = np.array(records, _DTYPE)
        rows["seal"] = _seals(rows, generation.seed)
        # Before the write, which may fail half-way.
        self._is_recorded[first_slot : first_slot + len(checks)] = True
        write_all(self._fd, rows.tobytes(), first_slot * RECORD_BYTES)
        self.checksums[first_slot : first_slot + len(checks)] = checks
        self.recency["uses"][first_slot : first_slot + len(checks)] = 0
        self.has_space[first_slot : first_slot + len(checks)] = True

    def stamp(self, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.uint64] | int) -> None:
        """Set when slots were last used; on disk with the next `flush`."""
        self.recency["stamp"][slots] = stamps
        self._is_dirty[slots // _PAGE_ROWS] = True

    def count_use(self, first_slot: int, num_slots: int) -> None:
        """Count that consecutive slots were read; on disk with the next `flush`."""
        last_slot = first_slot + num_slots
        self.recency["uses"][first_slot:last_slot] += np.uint64(1)
        self._is_dirty[first_slot // _PAGE_ROWS : (last_slot - 1) // _PAGE_ROWS + 1] = True

    def flush(self) -> None:
        """Write the recency that changed, and make all records durable."""
        dirty = np.flatnonzero(self._is_dirty)
        for page in dirty.tolist():
            self._is_dirty[page] = False
            rows = self.recency[page * _PAGE_ROWS : (page + 1) * _PAGE_ROWS]
            write_all(self._recency_fd, rows.tobytes(), page * 4096)
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the files."""
        os.close(self._fd)
        os.close(self._recency_fd)


def _keys(rows: npt.NDArray[np.void]) -> list[bytes]:
    lengths = rows["key_bytes"]
    if not len(rows):
        return []
    longest = int(lengths.max())
    column = np.ascontiguousarray(rows["key"]).view(np.uint8).reshape(len(rows), MAX_KEY_BYTES)[:, :longest]
    padded: list[bytes] = np.ascontiguousarray(column).view(f"V{longest}").ravel().tolist()
    if int(lengths.min()) == longest:
        return padded
    return [key[:num_bytes] for key, num_bytes in zip(padded, lengths.tolist(), strict=True)]


def _read(fd: int, num_bytes: int, offset: int) -> bytes:
    body = os.pread(fd, num_bytes, offset)
    while len(body) < num_bytes and (more := os.pread(fd, num_bytes - len(body), offset + len(body))):
        body += more
    return body
