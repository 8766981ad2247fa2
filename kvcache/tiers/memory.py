"""A tier in this process's memory: the specimen of a `JobTier`, a test double, and a place for blocks a pool evicts.

What it stores is lost with the process. A tier on another medium looks like it: `put` and `get` are the I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvcache.options import Options, check_int, option, parse_count, parse_policy, parse_size
from kvcache.tiering.job_tier import JobTier, TierBatch
from kvcache.tiering.tier import checked_host_blocks

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks


@dataclass(frozen=True)
class MemoryOptions(Options):
    """The options of a `MemoryTier`."""

    where: ClassVar[str] = "a memory tier"

    capacity: int = option(parse_size, when="always: bytes of memory at most")
    cache_policy: str | type = option(parse_policy, "lru", when="another policy hits more in a tier of this size")
    num_threads: int = option(parse_count, 2, when="copies are to use more, or fewer, threads", advanced=True)


class MemoryTier(JobTier):
    """Keep blocks in this process's memory.

    Parameters
    ----------
    num_blocks : int
        Blocks that it holds; the memory is taken as they are first written.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    cache_policy : str or type
        What leaves when it is full.
    num_threads : int
        Batches that are copied at the same time.
    """

    options_type = MemoryOptions

    def __init__(
        self, num_blocks: int, host_blocks: HostBlocks, *, cache_policy: str | type = "lru", num_threads: int = 2
    ) -> None:
        block_bytes = checked_host_blocks(host_blocks).shape[1]
        self._blocks = np.empty((check_int("num_blocks", num_blocks), block_bytes), np.uint8)
        super().__init__(
            host_blocks, "MEMORY", num_blocks=num_blocks, cache_policy=cache_policy, num_threads=num_threads
        )

    @classmethod
    def from_config(
        cls, options: Mapping[str, Any], host_blocks: HostBlocks, fingerprint: Mapping[str, Any]
    ) -> MemoryTier:
        values = MemoryOptions.read(options)
        block_bytes = checked_host_blocks(host_blocks).shape[1]
        return cls(values.capacity // block_bytes, host_blocks, **values.arguments("capacity"))

    def put(self, batch: TierBatch) -> None:
        for slot, buffer in zip(batch.slots or (), batch.buffers, strict=True):
            self._blocks[slot] = buffer

    def get(self, batch: TierBatch) -> None:
        for slot, block_id in zip(batch.slots or (), batch.block_ids, strict=True):
            self.host_rows[block_id] = self._blocks[slot]
