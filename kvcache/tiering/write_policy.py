"""Which blocks one tier is still to be given: a backlog, blocks that are written late, and blocks that it missed.

A scheduler cannot wait until a block is written when its slot is needed, so a tier that wants evicted blocks is written
ahead: only part of host memory may hold unwritten blocks. Beyond that, the least recently used are written, and stay
readable. If a block is evicted before it was written, the number of blocks kept clean doubles, up to the whole pool.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

_FIRST_SHARE = 4
"""At first, one slot in so many is free or holds a written block."""


class DirtyBlocks:
    """The blocks of host memory that were not given to one tier."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_ahead = max(1, num_blocks // _FIRST_SHARE)
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: list[bytes]) -> None:
        """Add blocks that became ready; keys are in prefix order."""
        self._unwritten.update(dict.fromkeys(reversed(keys)))

    def touch(self, keys: list[bytes]) -> None:
        """Record a use of `keys`, in prefix order; unknown keys are ignored."""
        _touch(self._unwritten, keys)

    def remove(self, keys: list[bytes]) -> int:
        """Remove blocks that left host memory; return how many of them were never written."""
        lost = [key for key in keys if key in self._unwritten]
        for key in lost:
            del self._unwritten[key]
        if lost:
            self._num_ahead = min(self._num_blocks, 2 * self._num_ahead)
        return len(lost)

    def take_due(self, num_most: int) -> list[bytes]:
        """Remove and return at most `num_most` blocks to write now, least recently used first."""
        num_due = min(num_most, len(self._unwritten) - (self._num_blocks - self._num_ahead))
        return [self._unwritten.popitem(last=False)[0] for _ in range(num_due)]

    def clear(self) -> None:
        """Forget all blocks."""
        self._unwritten = OrderedDict()


class Backlog:
    """The blocks that wait to be written to one tier, longest waiting first.

    With ``"write_back"``, `dirty` holds the blocks that are not due yet. `missed` holds blocks that were not written
    because the tier failed: those that are still in host memory are offered again once it works.
    """

    def __init__(self, num_blocks: int, is_write_back: bool) -> None:
        self.dirty = DirtyBlocks(num_blocks) if is_write_back else None
        self.missed: OrderedDict[bytes, None] = OrderedDict()
        self.num_dropped = 0
        self._max_blocks = num_blocks
        self._keys: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def offer(self, keys: Iterable[bytes]) -> None:
        """Add keys; if there are too many, drop those that wait longest."""
        self._keys.extend(keys)
        while len(self._keys) > self._max_blocks:
            self._keys.popleft()
            self.num_dropped += 1

    def take(self, num_most: int) -> list[bytes]:
        """Remove and return at most `num_most` keys, each once."""
        return list(dict.fromkeys([self._keys.popleft() for _ in range(min(num_most, len(self._keys)))]))

    def take_missed(self, num_most: int) -> list[bytes]:
        """Remove and return at most `num_most` missed blocks, those of the latest uses; the latest is the last."""
        return [self.missed.popitem()[0] for _ in range(min(num_most, len(self.missed)))][::-1]

    def drop(self, is_paused: bool) -> None:
        """Drop the keys that wait; if the tier's writes are paused, they are offered again afterwards."""
        self.num_dropped += len(self._keys)
        if is_paused:
            self.miss(self._keys)
        self._keys.clear()

    def miss(self, keys: Iterable[bytes]) -> None:
        """Keep keys that the tier failed to write, at most as many as host memory has blocks."""
        for key in keys:
            self.missed[key] = None
            self.missed.move_to_end(key)
        while len(self.missed) > self._max_blocks:
            self.missed.popitem(last=False)

    def touch(self, keys: list[bytes]) -> None:
        """Record a use of `keys`, in prefix order."""
        if self.dirty is not None:
            self.dirty.touch(keys)
        if self.missed:
            _touch(self.missed, keys)

    def remove(self, keys: list[bytes]) -> None:
        """Record keys that left host memory; blocks that were still to be written count as dropped."""
        if self.dirty is not None:
            self.num_dropped += self.dirty.remove(keys)
        if self.missed:
            for key in keys:
                self.missed.pop(key, None)

    def clear(self) -> None:
        """Forget all blocks."""
        self._keys.clear()
        self.missed.clear()
        if self.dirty is not None:
            self.dirty.clear()


def _touch(blocks: OrderedDict[bytes, None], keys: list[bytes]) -> None:
    for key in reversed(keys):
        if key in blocks:
            blocks.move_to_end(key)
