"""Random geometries and transfers, with a slow reference implementation for every handler.

The reference copies one layer of one block at a time, without runs, so it is easy to verify.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer.geometry import host_block_bytes

GUARD = 64


def layered(num_blocks: int, page_bytes: int, num_layers: int) -> CanonicalKVCaches:
    """Return one group of layers with random bytes."""
    tensors = [
        CanonicalKVCacheTensor(torch.randint(-128, 128, (num_blocks, page_bytes), dtype=torch.int8), page_bytes)
        for _ in range(num_layers)
    ]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, page_bytes) for i in range(num_layers)]])


def spec_of(device_ids: Sequence[int], host_ids: Sequence[int]) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    return GPULoadStoreSpec(device_ids, [len(device_ids)], [0]), CPULoadStoreSpec(host_ids)


@dataclass
class NoisyPool:
    """A host pool surrounded by noise."""

    memory: npt.NDArray[np.int8]
    num_blocks: int
    block_bytes: int
    stride_bytes: int
    is_pinned: bool = False
    piece_bytes: int = 100
    flat: torch.Tensor = field(init=False)
    tensor: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.flat = torch.from_numpy(self.memory)[GUARD:-GUARD]
        self.tensor = self.flat.view(self.num_blocks, self.stride_bytes)[:, : self.block_bytes]

    @property
    def address(self) -> int:
        """Address of the first block."""
        return self.tensor.data_ptr()


@dataclass
class Case:
    """One transfer: the memory of all tensors, and the blocks to move."""

    buffers: list[torch.Tensor]
    kv_caches: CanonicalKVCaches
    pool: NoisyPool
    factor: int
    group_sizes: list[int]
    block_indices: list[int]
    device_ids: list[int]
    host_ids: list[int]

    @property
    def device_spec(self) -> GPULoadStoreSpec:
        """The spec of the device's blocks."""
        return GPULoadStoreSpec(self.device_ids, self.group_sizes, self.block_indices)

    @property
    def host_spec(self) -> CPULoadStoreSpec:
        """The spec of the host's blocks."""
        return CPULoadStoreSpec(self.host_ids)

    def pieces(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (tensor, row, host block, host offset, bytes), one layer of one device block after the other."""
        first = first_host = 0
        for refs, size, index in zip(self.kv_caches.group_data_refs, self.group_sizes, self.block_indices, strict=True):
            part_bytes = sum(ref.page_size_bytes for ref in refs)
            skip = index % self.factor
            for k in range(size):
                host = self.host_ids[first_host + (skip + k) // self.factor]
                offset = (skip + k) % self.factor * part_bytes
                for ref in refs:
                    yield ref.tensor_idx, self.device_ids[first + k], host, offset, ref.page_size_bytes
                    offset += ref.page_size_bytes
            first += size
            first_host += -(-(skip + size) // self.factor) if size else 0

    def expected(self, to_host: bool) -> tuple[list[npt.NDArray[np.int8]], npt.NDArray[np.int8]]:
        """Return what the device buffers and the pool's memory hold after the transfer."""
        buffers = [buffer.numpy().copy() for buffer in self.buffers]
        memory = self.pool.memory.copy()
        rows = self.pool.stride_bytes
        for tensor_idx, row, host, offset, n in self.pieces():
            tensor = self.kv_caches.tensors[tensor_idx].tensor
            storage = tensor.untyped_storage().data_ptr()
            owner = [buffer.untyped_storage().data_ptr() for buffer in self.buffers].index(storage)
            start = tensor.storage_offset() + row * tensor.stride(0)
            at = GUARD + host * rows + offset
            if to_host:
                memory[at : at + n] = buffers[owner][start : start + n]
            else:
                buffers[owner][start : start + n] = memory[at : at + n]
        return buffers, memory


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a geometry, noise for all of its memory, and a transfer; no device or host block is named twice."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_blocks = draw(st.integers(1, 12))
    width = draw(st.sampled_from([1, 2, 4, 8, 16]))
    buffers, tensors = [], []
    for _ in range(draw(st.integers(1, 3))):
        # Several tensors in one buffer lie side by side, block after block: their rows have a wider stride.
        pages = [width * draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 3)))]
        stride = sum(pages) + width * draw(st.integers(0, 3))
        rows = num_blocks + draw(st.integers(0, 2))
        guard = width * draw(st.integers(0, GUARD // width))
        buffer = torch.from_numpy(rng.integers(-128, 128, 2 * guard + rows * stride, dtype=np.int8))
        buffers.append(buffer)
        offset = guard
        for page in pages:
            tensors.append(CanonicalKVCacheTensor(buffer.as_strided((rows, page), (stride, 1), offset), page))
            offset += page
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.integers(0, len(tensors) - 1), unique=True, max_size=len(tensors)))
        groups.append(
            [
                CanonicalKVCacheRef(i, draw(st.integers(1, tensors[i].page_size_bytes)))
                if draw(st.booleans())
                else CanonicalKVCacheRef(i, tensors[i].page_size_bytes)
                for i in chosen
            ]
        )
    kv_caches = CanonicalKVCaches(tensors, groups)
    factor = draw(st.integers(1, 4))
    device_ids = draw(st.permutations(range(num_blocks))) if draw(st.booleans()) else list(range(num_blocks))
    sizes, indices, need = [], [], 0
    left = num_blocks
    for _ in groups:
        size = draw(st.integers(0, left))
        index = draw(st.integers(0, 9))
        left -= size
        sizes.append(size)
        indices.append(index)
        need += -(-(index % factor + size) // factor) if size else 0
    block_bytes = max(1, host_block_bytes(kv_caches, factor)) + draw(st.sampled_from([0, 0, 3]))
    stride = block_bytes + draw(st.sampled_from([0, 0, 5]))
    num_host = need + draw(st.integers(0, 3)) or 1
    host_ids = draw(st.permutations(range(num_host))) if draw(st.booleans()) else list(range(num_host))
    memory = rng.integers(-128, 128, 2 * GUARD + num_host * stride, dtype=np.int8)
    return Case(
        buffers,
        kv_caches,
        NoisyPool(memory, num_host, block_bytes, stride),
        factor,
        sizes,
        indices,
        list(device_ids[: sum(sizes)]),
        list(host_ids[:need]),
    )
