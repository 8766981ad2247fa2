"""A host pool in memory that other processes map, too, and a worker's handlers over its part of it."""

from __future__ import annotations

import logging
import mmap
from typing import TYPE_CHECKING

import torch

from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import host_block_bytes
from kvcache.transfer.host_pool import HostPool, bytes_of

if TYPE_CHECKING:
    from kvcache.specs import CanonicalKVCaches
    from kvcache.transfer.base import OffloadingHandler, TransferSpec
    from kvcache.transfer.shared_file import SharedBlocks

_LOG = logging.getLogger(__name__)


class SharedHostPool(HostPool):
    """A host pool over an existing mapping; its blocks may be one part each of the mapping's blocks.

    The first block starts at `first_byte`, and each next one `stride_bytes` further. See `HostPool` for the rest.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        num_blocks: int,
        block_bytes: int,
        first_byte: int,
        stride_bytes: int,
        pin: bool | None = None,
        device: torch.device | None = None,
    ) -> None:
        num_bytes = (num_blocks - 1) * stride_bytes + block_bytes
        if first_byte < 0 or block_bytes > stride_bytes or first_byte + num_bytes > len(mapping):
            raise ValueError(
                f"{num_blocks} blocks of {block_bytes} bytes, {stride_bytes} apart from byte {first_byte} on, do not "
                f"fit into {len(mapping)} bytes"
            )
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.stride_bytes = stride_bytes
        self.flat = bytes_of(mapping)[first_byte : first_byte + num_bytes]
        self.tensor = self.flat.as_strided((num_blocks, block_bytes), (stride_bytes, 1))
        self.prepare(pin, device)


def _refuse_until_owned(handler: OffloadingHandler, shared: SharedBlocks) -> None:
    """Let a handler take no job until a process owns the shared blocks: nothing else would read them."""

    def transfer_async(job_id: int, spec: TransferSpec) -> bool:
        if not shared.has_owner():
            _LOG.error(
                "job %d is refused: no manager owns the host blocks that this worker maps as %s; restart the worker",
                job_id,
                shared.path,
            )
            return False
        # Once owned is enough: an owner that ends takes the engine with it.
        vars(handler).pop("transfer_async", None)
        return handler.transfer_async(job_id, spec)

    handler.transfer_async = transfer_async  # type: ignore[method-assign]


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
    num_blocks, stride_bytes = shared.array.shape
    device = kv_caches.tensors[0].tensor.device if kv_caches.tensors else None
    pool = SharedHostPool(shared.mapping, num_blocks, num_bytes, rank * rank_bytes, stride_bytes, device=device)
    store, load = cpu_gpu_handlers(kv_caches, pool, block_size_factor, num_threads)
    for handler in (store, load):
        _refuse_until_owned(handler, shared)
    return pool, store, load
