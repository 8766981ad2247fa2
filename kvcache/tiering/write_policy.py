"""Write blocks down before they leave host memory, for a tier that wants evicted blocks.

A scheduler cannot wait for a block to be written when its slot is needed. So blocks are written ahead: only so many in
host memory may be unwritten, and beyond that the least recently used are written, and stay readable. What leaves
unwritten all the same came in a larger burst, or left in another order; from then on twice as much is written ahead,
at most all.
"""

from __future__ import annotations

from collections import OrderedDict

_FIRST_SHARE = 4
"""One slot in so many is free or holds a block that was written, to begin with."""


class DirtyBlocks:
    """The blocks of host memory that one tier has not been given."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_ahead = max(1, num_blocks // _FIRST_SHARE)
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: list[bytes]) -> None:
        """Note blocks that became ready; keys are in prefix order."""
        self._unwritten.update(dict.fromkeys(reversed(keys)))

    def touch(self, keys: list[bytes]) -> None:
        """Note a use, in prefix order; other keys are ignored."""
        unwritten = self._unwritten
        for key in reversed(keys):
            if key in unwritten:
                unwritten.move_to_end(key)

    def remove(self, keys: list[bytes]) -> int:
        """Note blocks that left host memory; return how many of them were never written."""
        lost = [key for key in keys if key in self._unwritten]
        for key in lost:
            del self._unwritten[key]
        if lost:
            self._num_ahead = min(self._num_blocks, 2 * self._num_ahead)
        return len(lost)

    def take_due(self, num_most: int) -> list[bytes]:
        """Return at most so many blocks that are to be written now, least recently used first; they count as given."""
        num_due = min(num_most, len(self._unwritten) - (self._num_blocks - self._num_ahead))
        return [self._unwritten.popitem(last=False)[0] for _ in range(num_due)]

    def clear(self) -> None:
        """Forget all blocks."""
        self._unwritten = OrderedDict()
