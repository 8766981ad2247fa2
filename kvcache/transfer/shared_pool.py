"""A host pool in memory that other processes map, too: a worker's part of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvcache.transfer.geometry import device_of, host_block_bytes
from kvcache.transfer.host_pool import HostPool, bytes_of

if TYPE_CHECKING:
    from kvcache.specs import CanonicalKVCaches
    from kvcache.transfer.shared_file import SharedBlocks

_LOG = logging.getLogger(__name__)


class SharedHostPool(HostPool):
    """The part of a worker's `rank` of shared blocks, for blocks of its `kv_caches`; each part has `rank_bytes`.

    Handlers refuse jobs until a process owns `shared`. See `HostPool` for the rest.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, shared: SharedBlocks, rank: int, rank_bytes: int, block_size_factor: int = 1
    ) -> None:
        self._shared = shared
        self._is_owned = False
        self.num_blocks, self.stride_bytes = num_blocks, stride_bytes = shared.array.shape
        self.block_bytes = block_bytes = host_block_bytes(kv_caches, block_size_factor)
        if block_bytes > rank_bytes:
            raise ValueError(f"a block of rank {rank} has {block_bytes} bytes, the engine's config says {rank_bytes}")
        first_byte = rank * rank_bytes
        if first_byte < 0 or first_byte + block_bytes > stride_bytes:
            raise ValueError(
                f"{block_bytes} bytes from byte {first_byte} on do not fit into a shared block of {stride_bytes} bytes"
            )
        num_bytes = (num_blocks - 1) * stride_bytes + block_bytes
        self.flat = bytes_of(shared.mapping)[first_byte : first_byte + num_bytes]
        self.tensor = self.flat.as_strided((num_blocks, block_bytes), (stride_bytes, 1))
        self.prepare(None, device_of(kv_caches))

    def has_owner(self) -> bool:
        # Once owned is enough: an owner that ends takes the engine with it.
        self._is_owned = self._is_owned or self._shared.has_owner()
        if not self._is_owned:
            _LOG.error(
                "jobs are refused: no manager owns the host blocks that this worker maps as %s; restart the worker",
                self._shared.path,
            )
        return self._is_owned
