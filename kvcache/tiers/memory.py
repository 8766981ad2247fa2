"""A tier in this process's memory: the smallest `JobTier`, and a test double. Its blocks are lost with the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvcache.options import Component, Options, option, parse_policy, parse_size, parse_threads
from kvcache.tiers.base.codec import make_codec, parse_codec, stored_form
from kvcache.tiers.base.job_tier import JobTier, TierBatch
from kvcache.transfer.free_memory import check_memory

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks


@dataclass(frozen=True)
class MemoryOptions(Options):
    """The options of a `MemoryTier`."""

    where: ClassVar[str] = "a memory tier"

    capacity: int = option(parse_size, when="always: bytes of memory at most")
    cache_policy: str | type = option(parse_policy, "lru", when="another policy hits more in a tier of this size")
    num_threads: int = option(parse_threads, 2, when="copies should use more, or fewer, threads", rare=True)
    codec: Component | None = option(parse_codec, None, when="blocks must take fewer bytes in the tier")


class MemoryTier(JobTier):
    """Keep blocks in this process's memory.

    Parameters
    ----------
    options : MemoryOptions
        Its capacity, taken as blocks are first written, and the rest; see :doc:`/howto/options`.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    fingerprint : mapping, optional
        Identifies the model and the geometry of the blocks.

    Raises
    ------
    ValueError
        The capacity is below one block.
    """

    options_type = MemoryOptions

    def __init__(
        self, options: MemoryOptions, host_blocks: HostBlocks, fingerprint: Mapping[str, Any] | None = None
    ) -> None:
        codec = make_codec(options.codec, host_blocks)
        block_bytes, _ = stored_form(codec, host_blocks, None)
        num_blocks = options.capacity // block_bytes
        if not num_blocks:
            raise ValueError(f"capacity in a memory tier must be >= {block_bytes}, one block, got {options.capacity}")
        check_memory(num_blocks * block_bytes)
        self._blocks = np.empty((num_blocks, block_bytes), np.uint8)
        super().__init__(
            host_blocks,
            "MEMORY",
            codec=codec,
            fingerprint=fingerprint,
            num_blocks=num_blocks,
            cache_policy=options.cache_policy,
            num_threads=options.num_threads,
        )

    def put(self, batch: TierBatch) -> None:
        for slot, buffer in zip(batch.slots or (), batch.buffers, strict=True):
            self._blocks[slot] = buffer

    def get(self, batch: TierBatch) -> None:
        for slot, buffer in zip(batch.slots or (), batch.buffers, strict=True):
            buffer[:] = self._blocks[slot].data
