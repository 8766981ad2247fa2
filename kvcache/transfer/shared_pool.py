"""A host pool in memory that other processes map, too, and a worker's handlers over its part of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import host_block_bytes
from kvcache.transfer.host_pool import HostPool, bytes_of

if TYPE_CHECKING:
    from kvcache.specs import CanonicalKVCaches
    from kvcache.transfer.base import OffloadingHandler
    from kvcache.transfer.shared_file import SharedBlocks

_LOG = logging.getLogger(__name__)


class SharedHostPool(HostPool):
    """A host pool over shared blocks, or over one part of each.

    The part of the first block starts at `first_byte`, and has `block_bytes`. See `HostPool` for the rest.
    """

    def __init__(
        self, shared: SharedBlocks, block_bytes: int, first_byte: int, device: torch.device | None = None
    ) -> None:
        self._shared = shared
        self._is_owned = False
        self.num_blocks, self.stride_bytes = num_blocks, stride_bytes = shared.array.shape
        num_bytes = (num_blocks - 1) * stride_bytes + block_bytes
        if first_byte < 0 or first_byte + block_bytes > stride_bytes:
            raise ValueError(
                f"{block_bytes} bytes from byte {first_byte} on do not fit into a shared block of {stride_bytes} bytes"
            )
        self.block_bytes = block_bytes
        self.flat = bytes_of(shared.mapping)[first_byte : first_byte + num_bytes]
        self.tensor = self.flat.as_strided((num_blocks, block_bytes), (stride_bytes, 1))
        self.prepare(None, device)

    def has_owner(self) -> bool:
        # Once owned is enough: an owner that ends takes the engine with it.
        self._is_owned = self._is_owned or self._shared.has_owner()
        if not self._is_owned:
            _LOG.error(
                "jobs are refused: no manager owns the host blocks that this worker maps as %s; restart the worker",
                self._shared.path,
            )
        return self._is_owned


def shared_pool_handlers(
    kv_caches: CanonicalKVCaches,
    shared: SharedBlocks,
    rank: int,
    rank_bytes: int,
    block_size_factor: int = 1,
    num_threads: int | None = None,
) -> tuple[SharedHostPool, OffloadingHandler, OffloadingHandler]:
    """Make a worker's pool, its rank's part of every shared block, and the two handlers over it.

    `shared` holds the blocks of all ranks, and each rank's part of a block has `rank_bytes`. Jobs are refused until a
    process owns the blocks. See `cpu_gpu_handlers` for the rest.
    """
    num_bytes = host_block_bytes(kv_caches, block_size_factor)
    if num_bytes > rank_bytes:
        raise ValueError(f"a block of rank {rank} has {num_bytes} bytes, the engine's config says {rank_bytes}")
    device = kv_caches.tensors[0].tensor.device if kv_caches.tensors else None
    pool = SharedHostPool(shared, num_bytes, rank * rank_bytes, device)
    store, load = cpu_gpu_handlers(kv_caches, pool, block_size_factor, num_threads)
    return pool, store, load
