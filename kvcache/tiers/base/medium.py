"""Medium: the hooks that a tier on one medium implements. `JobTier` calls them, and does the rest of a tier.

Which thread calls what
-----------------------
The caller's thread (the scheduler's) calls the methods of `Tier` and the hooks `cut`, `mark_reset`, `on_stored`,
`on_loaded`, `on_used` and `has_space`, which must not wait. I/O threads call `get`, `put` and `exists`, a batch at a
time and several at once. One control thread, which never waits behind a batch that hangs, calls `open`, `clear`,
`maintain` and `close`. An exception in an I/O method fails the batch and is reported; it never reaches the scheduler.

Two kinds of media
------------------
A tier that owns its space (`open` returns `TierContents`, or `num_blocks` is given) has a `SlotCatalog`: the slot of
each block, and which block is evicted when the tier is full. A medium that keeps its own index is asked with `exists`
by a `RemoteCatalog`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcache.tiers.base.catalog import TierContents

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvcache.tiers.base.batch import TierBatch


class Medium:
    """The I/O of a `JobTier`; `num_blocks` is 0 if the medium keeps its own index."""

    medium: str
    num_blocks: int
    max_batch_blocks: int

    @abstractmethod
    def get(self, batch: TierBatch) -> Sequence[int] | None:
        """Fill the buffers of `batch`; return a `BlockOutcome` (DONE, ABSENT, CORRUPT) per key, None for all done."""

    @abstractmethod
    def put(self, batch: TierBatch) -> Sequence[int] | None:
        """Store the buffers of `batch`; return a `BlockOutcome` (DONE, HELD, REFUSED) per key, None for all done."""

    def get_now(self, slots: list[int], keys: list[bytes], buffers: list[list[memoryview]]) -> list[bool]:
        """Fill the buffers of blocks that can be read without waiting; return whether each was read and verified.

        Each block has buffers that together are as long as it. `JobTier.load_now` calls this from any thread.
        """
        return [False] * len(keys)

    def exists(self, keys: list[bytes]) -> Sequence[bool]:
        """Return per key whether the medium holds it; only asked where the tier has no index of its own."""
        raise NotImplementedError(f"{type(self).__name__} neither opens with contents nor answers exists")

    def open(self) -> TierContents | None:
        """Connect, and return the contents of a tier that owns its space; None: the medium keeps its own index.

        If it raises, it has to close its files and connections itself.
        """
        return TierContents(self.num_blocks) if self.num_blocks else None

    def clear(self, generation: int) -> None:
        """Forget every block for good, before `generation` begins. It is called again until it does not raise."""

    def has_space(self) -> npt.NDArray[np.bool_] | None:
        """Return per slot whether a store has found space there; None if all slots have space. Must not wait."""
        return None

    def erase(self, slots: list[int]) -> None:
        """Make sure that the deleted blocks in `slots` are not found after a restart."""

    def maintain(self) -> None:
        """Do periodic work; called every `maintain_interval_s` and once at the end."""

    def close(self) -> None:
        """Release resources; called once, after the last batch."""

    def cut(self, slots: list[int] | None, num_blocks: int) -> list[list[int]]:
        """Return the positions 0 .. `num_blocks` - 1 of a job's blocks in groups, one for each batch.

        `slots` are those of the blocks, in a tier that owns its space.
        """
        return consecutive(num_blocks, self.max_batch_blocks)

    def mark_reset(self) -> None:
        """Do the part of a reset that must be done before `reset` returns; the tier serves nothing by then."""

    def on_stored(self, batch: TierBatch) -> None:
        """Called when `batch` was written without an error."""

    def on_loaded(self, batch: TierBatch) -> None:
        """Called when `batch` was read without an error."""

    def on_used(self, slots: list[int], last_seq: int) -> None:
        """Called when the blocks in `slots` were used; the first one is the most recent, as of number `last_seq`."""


def consecutive(num_blocks: int, size: int) -> list[list[int]]:
    """Return the positions 0 .. `num_blocks` - 1 in groups of `size`; the last one may be smaller."""
    positions = list(range(num_blocks))
    return [positions[first : first + size] for first in range(0, num_blocks, size)]
