"""BlockView: the blocks that each medium of a publisher holds, and their digest.

Publisher and subscribers keep one each: two short digests show whether they are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt

from kvcache.exporters.kv_events.wire import AllBlocksCleared, BlockHash, BlockStored, EventBatch

_GROUP_BYTES = 4
_INT_BYTES = 8
_WORD = 1 << 64
_MAX_PENDING = 1 << 12  # hashes whose values are added up at a time
Values = npt.NDArray[np.uint64]


class BlockView:
    """The blocks that each medium holds, as a router sees them, and their digest; for one thread.

    Notes
    -----
    The digest of a medium is the number of its blocks and the sum, modulo 2**64, of their `block_value`. It does not
    depend on the order in which blocks came.
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def media(self) -> dict[str, frozenset[tuple[bytes, int]]]:
        """Return the blocks of each medium that holds any, as (block hash, group index)."""
        found: dict[str, set[tuple[bytes, int]]] = {}
        for (medium, group_idx), hashes in self._held.items():
            if hashes:
                found.setdefault(medium, set()).update((block_hash, group_idx) for block_hash in hashes)
        return {medium: frozenset(blocks) for medium, blocks in found.items()}

    def holds(self, medium: str, block_hash: BlockHash, group_idx: int = 0) -> bool:
        """Return whether `medium` holds the block `block_hash` of the KV-cache group `group_idx`.

        A publisher with int hashes knows the last 8 bytes of `block_hash` only.
        """
        hashes = self._held.get((medium, group_idx), ())
        if isinstance(block_hash, int):
            [block_hash] = _as_bytes([block_hash])
        return block_hash in hashes or short_hash(block_hash) in hashes

    def add(self, medium: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Add `blocks`, pairs of block hash and group index, to `medium`. A block that is held changes nothing."""
        for block_hash, group_idx in blocks:
            self._change(medium, [block_hash], group_idx, 1)

    def discard(self, medium: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Remove `blocks`, pairs of block hash and group index, from `medium`. A missing block changes nothing."""
        for block_hash, group_idx in blocks:
            self._change(medium, [block_hash], group_idx, -1)

    def clear(self) -> None:
        """Empty every medium."""
        self._held: dict[tuple[str, int], set[bytes]] = {}
        self._sums: Counter[str] = Counter()
        # Hashes whose values are not in the sums yet, by sign: numpy is fast for many at a time only.
        self._pending: dict[tuple[str, int, int], list[bytes]] = {}
        self._num_pending = 0

    def digests(self) -> dict[str, tuple[int, int]]:
        """Return count and sum of each medium that holds any block."""
        self._add_up()
        counts: Counter[str] = Counter()
        for (medium, _), hashes in self._held.items():
            counts[medium] += len(hashes)
        return {medium: (count, self._sums[medium] % _WORD) for medium, count in counts.items() if count}

    def apply(self, batch: EventBatch) -> None:
        """Apply the events of `batch`, in order.

        Raises
        ------
        ValueError
            A group index is not in 0..2**32-1; nothing has changed then.
        """
        for event in batch.events:
            if not isinstance(event, AllBlocksCleared):
                _check_group(event.group_idx or 0)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
            else:
                sign = 1 if isinstance(event, BlockStored) else -1
                self._change(event.medium or "", _as_bytes(event.block_hashes), event.group_idx or 0, sign)

    def parts(self, num_hashes: int) -> Iterator[tuple[str, int, list[bytes]]]:
        """Yield medium, group index and at most `num_hashes` block hashes, until all blocks were yielded.

        The view must not change meanwhile.
        """
        for (medium, group_idx), hashes in self._held.items():
            left = iter(hashes)
            while part := [*islice(left, num_hashes)]:
                yield medium, group_idx, part

    def _change(self, medium: str, hashes: list[bytes], group_idx: int, sign: int) -> None:
        _check_group(group_idx)
        held = self._held.setdefault((medium, group_idx), set())
        changed = set(hashes) - held if sign > 0 else held.intersection(hashes)
        if sign > 0:
            held |= changed
        else:
            held -= changed
        self._pending.setdefault((medium, group_idx, sign), []).extend(changed)
        self._num_pending += len(changed)
        if self._num_pending >= _MAX_PENDING:
            self._add_up()

    def _add_up(self) -> None:
        for (medium, group_idx, sign), hashes in self._pending.items():
            self._sums[medium] += sign * _sum_of_values(hashes, group_idx)
        self._pending, self._num_pending = {}, 0


def block_value(block_hash: bytes, group_idx: int = 0) -> int:
    """Return the value of the block `block_hash` of group `group_idx` in the sum of a digest, 0 <= value < 2**64.

    Raises
    ------
    ValueError
        The group index is not in 0..2**32-1.

    Notes
    -----
    ``splitmix64`` (Steele, Lea & Flood, OOPSLA '14) folded over the key, which is the hash and then the group index as
    4 bytes, big-endian. The key is read in little-endian words of 8 bytes, the last one padded with zeros; its length
    is folded in first.
    """
    _check_group(group_idx)
    return _sum_of_values([block_hash], group_idx)


def short_hash(block_hash: bytes) -> bytes:
    """Return the last 8 bytes of a hash, zeros in front of a shorter one."""
    return block_hash[-_INT_BYTES:].rjust(_INT_BYTES, b"\0")


def as_ints(hashes: list[bytes]) -> list[BlockHash]:
    """Return the last 8 bytes of each hash as an unsigned integer, big-endian, as vLLM does."""
    found: list[BlockHash] = np.frombuffer(b"".join(map(short_hash, hashes)), ">u8").tolist()
    return found


def _as_bytes(hashes: list[BlockHash]) -> list[bytes]:
    """Return integers, signed or not, as 8 bytes."""
    return [one if isinstance(one, bytes) else (one % _WORD).to_bytes(_INT_BYTES, "big") for one in hashes]


def _sum_of_values(hashes: list[bytes], group_idx: int) -> int:
    """Return the sum of the values of blocks of one group, modulo 2**64."""
    total = 0
    for size, same in groupby(sorted(hashes, key=len), len):
        num_bytes = size + _GROUP_BYTES
        tail = group_idx.to_bytes(_GROUP_BYTES, "big") + bytes(-num_bytes % 8)
        words = np.frombuffer(tail.join(same) + tail, "<u8").reshape(-1, (size + len(tail)) // 8)
        value = _mix(np.array([num_bytes], np.uint64))
        for column in words.T:
            value = _mix(value ^ column)
        total += int(value.sum(dtype=np.uint64))
    return total % _WORD


def _mix(state: Values) -> Values:
    """Return splitmix64 of each element; unsigned arrays wrap around."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)


def _check_group(group_idx: int) -> None:
    if not isinstance(group_idx, int) or not 0 <= group_idx < 1 << 32:
        raise ValueError(f"group_idx must be an int in 0..2**32-1, got {group_idx!r}")
