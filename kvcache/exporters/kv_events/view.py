"""BlockView: the blocks that each medium of a publisher holds, and their digest.

Publisher and subscribers keep one each, so that two short digests show whether they are equal.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.exporters.kv_events.block_set import BlockSet
from kvcache.exporters.kv_events.wire import AllBlocksCleared, BlockStored, EventBatch


class BlockView:
    """The blocks that each medium holds, as a router sees them, and their digest; for one thread.

    Notes
    -----
    The digest of a medium is the number of its blocks and the sum, modulo 2**64, of their `block_value`: independent of
    the order in which blocks came.
    """

    def __init__(self) -> None:
        self._held: dict[str, BlockSet] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def media(self) -> dict[str, frozenset[tuple[bytes, int]]]:
        """Return the blocks of each medium that holds any, as (block hash, group index).

        Returns
        -------
        dict of str to frozenset
            Medium to (block hash, group index) pairs.
        """
        return {medium: held.blocks_held() for medium, held in self._held.items() if held}

    def holds(self, medium: str, block_hash: bytes, group_idx: int = 0) -> bool:
        """Return whether a medium holds a block.

        Parameters
        ----------
        medium : str
            The medium.
        block_hash : bytes
            The block.
        group_idx : int
            Its KV-cache group.

        Returns
        -------
        bool
            Whether it is held.
        """
        held = self._held.get(medium)
        return held is not None and held.holds(block_hash, group_idx)

    def add(self, medium: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Note blocks that came to a medium; those that it holds already change nothing.

        Parameters
        ----------
        medium : str
            The medium.
        blocks : iterable of (bytes, int)
            Block hash and group index.
        """
        held = self._held.setdefault(medium, BlockSet())
        for block_hash, group_idx in blocks:
            held.add([block_hash], group_idx)

    def discard(self, medium: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Note blocks that left a medium; those that it does not hold change nothing.

        Parameters
        ----------
        medium : str
            The medium.
        blocks : iterable of (bytes, int)
            Block hash and group index.
        """
        held = self._held.setdefault(medium, BlockSet())
        for block_hash, group_idx in blocks:
            held.discard([block_hash], group_idx)

    def clear(self) -> None:
        """Empty every medium."""
        self._held.clear()

    def digests(self) -> dict[str, tuple[int, int]]:
        """Return count and sum of each medium that holds any block.

        Returns
        -------
        dict of str to (int, int)
            Medium to count and sum.
        """
        return {medium: (len(held), held.sum) for medium, held in self._held.items() if held}

    def apply(self, batch: EventBatch) -> None:
        """Apply one batch of events, in order.

        Parameters
        ----------
        batch : EventBatch
            The next batch.

        Raises
        ------
        ValueError
            A group index is not in 0..2**32-1; nothing has changed then.
        """
        for event in batch.events:
            if not isinstance(event, AllBlocksCleared) and not 0 <= (event.group_idx or 0) < 1 << 32:
                raise ValueError(f"group_idx must be an int in 0..2**32-1, got {event.group_idx!r}")
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                continue
            held = self._held.setdefault(event.medium or "", BlockSet())
            change = held.add if isinstance(event, BlockStored) else held.discard
            change(event.block_hashes, event.group_idx or 0)
