"""Block allocation: the abstract backend, and the backend in host memory.

A backend manages slots. If it has no free slot, the policy selects the block to evict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcache.block import BlockStatus
from kvcache.options import check_int
from kvcache.specs import CPULoadStoreSpec, LoadStoreSpec


class Backend(ABC):
    """Allocate blocks on one medium.

    Parameters
    ----------
    block_size : int
        Tokens of one block, >= 1.
    medium : str
        The medium's name, as in its `LoadStoreSpec`.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self.block_size = check_int("block_size", block_size)
        self.medium = medium

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Return how many blocks can be allocated now."""

    @abstractmethod
    def allocate_blocks(self, block_hashes: list[bytes]) -> list[BlockStatus]:
        """Return a new block with `ref_cnt` -1 for each of `block_hashes`, in this order. There is room for all."""

    @abstractmethod
    def free(self, block: BlockStatus) -> None:
        """Free `block`, an object that `allocate_blocks` returned. Called once per block."""

    def get_load_store_spec(self, block_hashes: Sequence[bytes], blocks: Sequence[BlockStatus]) -> LoadStoreSpec:
        """Return the locations of `blocks`, whose keys are `block_hashes`, for the worker."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its blocks lie")

    def reset(self) -> None:  # noqa: B027
        """Restart block ids. All blocks have been freed before. The default does nothing."""


class CPUBackend(Backend):
    """Slots of a pool in host memory.

    Parameters
    ----------
    block_size : int
        Tokens of one block, >= 1.
    num_blocks : int
        Slots, >= 1.

    Notes
    -----
    Fresh ids 0, 1, 2, ... are used first. After that, the slot freed last is reused first.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, CPULoadStoreSpec.medium())
        self.num_blocks = check_int("num_blocks", num_blocks)
        self._num_fresh_used = 0
        self._freed: list[int] = []

    def get_num_free_blocks(self) -> int:
        return self.num_blocks - self._num_fresh_used + len(self._freed)

    def allocate_blocks(self, block_hashes: list[bytes]) -> list[BlockStatus]:
        """Return a new block for each of `block_hashes`. Raise ValueError if there are fewer free slots."""
        count = len(block_hashes)
        if count > self.get_num_free_blocks():
            raise ValueError(f"{count} blocks were asked for, {self.get_num_free_blocks()} are free")
        first = self._num_fresh_used
        self._num_fresh_used = min(self.num_blocks, first + count)
        blocks = [BlockStatus(block_id) for block_id in range(first, self._num_fresh_used)]
        blocks.extend(BlockStatus(self._freed.pop()) for _ in range(count - len(blocks)))
        return blocks

    def free(self, block: BlockStatus) -> None:
        self._freed.append(block.block_id)

    def get_load_store_spec(self, block_hashes: Sequence[bytes], blocks: Sequence[BlockStatus]) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([block.block_id for block in blocks])

    def reset(self) -> None:
        """Restart at id 0."""
        self._num_fresh_used = 0
        self._freed.clear()
