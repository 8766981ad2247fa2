"""A host pool in memory that other processes map, too."""

from __future__ import annotations

import mmap

import torch

from kvcache.transfer.host_pool import HostPool, bytes_of


class SharedHostPool(HostPool):
    """A host pool over a mapping that exists, of which its blocks may be one part each.

    Parameters
    ----------
    mapping : mmap.mmap
        The memory.
    num_blocks, block_bytes : int
        As for `HostPool`.
    first_byte : int
        Where the first block starts.
    stride_bytes : int
        From one block to the next.
    pin : bool, optional
        As for `HostPool`.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        num_blocks: int,
        block_bytes: int,
        first_byte: int,
        stride_bytes: int,
        pin: bool | None = None,
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
        self.pinned_bytes = 0
        self.pin_failures = 0
        self.flat = bytes_of(mapping)[first_byte : first_byte + num_bytes]
        self.tensor = self.flat.as_strided((num_blocks, block_bytes), (stride_bytes, 1))
        # Every page is read, not written: another process may keep its blocks there already.
        self.flat[:: mmap.PAGESIZE].count_nonzero()
        if torch.cuda.is_available() if pin is None else pin:
            self.pin()
