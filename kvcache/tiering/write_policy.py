"""Write blocks down before they leave host memory, for a tier that wants evicted blocks.

A scheduler cannot wait until a block is written when its slot is needed, so blocks are written ahead: only part of host
memory may hold unwritten blocks. Beyond that, the least recently used are written, and stay readable. If a block is
evicted before it was written, the number of blocks kept clean doubles, up to the whole pool.
"""

from __future__ import annotations

from collections import OrderedDict

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
        unwritten = self._unwritten
        for key in reversed(keys):
            if key in unwritten:
                unwritten.move_to_end(key)

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
