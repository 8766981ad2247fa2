"""Random geometries and transfers, with a slow reference implementation for every handler.

The reference copies one layer of one block at a time, without runs, so it is easy to verify.
"""

from dataclasses import dataclass

import numpy as np
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


def layered(num_blocks, page_bytes, num_layers):
    """Return one group of layers with random bytes."""
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(rng.integers(-128, 128, (num_blocks, page_bytes), np.int8)) for _ in range(num_layers)]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
        [[CanonicalKVCacheRef(i, page_bytes) for i in range(num_layers)]],
    )


def spec_of(device_ids, host_ids):
    return GPULoadStoreSpec(device_ids, [len(device_ids)], [0]), CPULoadStoreSpec(host_ids)


class NoisyPool:
    """A host pool surrounded by noise."""

    is_pinned = False
    piece_bytes = 100

    def __init__(self, memory, num_blocks, block_bytes, stride_bytes):
        self.memory = memory
        self.num_blocks, self.block_bytes, self.stride_bytes = num_blocks, block_bytes, stride_bytes
        self.flat = torch.from_numpy(memory)[GUARD:-GUARD]
        self.tensor = self.flat.view(num_blocks, stride_bytes)[:, :block_bytes]
        self.address = self.tensor.data_ptr()
        self.used = set()

    def has_owner(self):
        return True

    def note_use(self, block_ids):
        assert 0 <= block_ids.min(initial=0) <= block_ids.max(initial=0) < self.num_blocks
        self.used.update(block_ids.tolist())


@dataclass
class Case:
    """One transfer: the memory of all tensors, and the blocks to move."""

    buffers: list[torch.Tensor]
    owners: list[int]  # by tensor: the index of its buffer
    kv_caches: CanonicalKVCaches
    pool: NoisyPool
    factor: int
    device_spec: GPULoadStoreSpec
    host_spec: CPULoadStoreSpec

    def pieces(self):
        """Yield (tensor, row, host block, host offset, bytes), one layer of one device block after the other."""
        first = first_host = 0
        spec = self.device_spec
        for refs, size, index in zip(self.kv_caches.group_data_refs, spec.group_sizes, spec.block_indices, strict=True):
            part_bytes = sum(ref.page_size_bytes for ref in refs)
            skip = index % self.factor
            for k in range(size):
                host = self.host_spec.block_ids[first_host + (skip + k) // self.factor]
                offset = (skip + k) % self.factor * part_bytes
                for ref in refs:
                    yield ref.tensor_idx, spec.block_ids[first + k], host, offset, ref.page_size_bytes
                    offset += ref.page_size_bytes
            first += size
            first_host += -(-(skip + size) // self.factor) if size else 0

    def expected(self, to_host):
        """Return what the device buffers and the pool's memory hold after the transfer."""
        buffers = [buffer.numpy().copy() for buffer in self.buffers]
        memory = self.pool.memory.copy()
        for tensor_idx, row, host, offset, n in self.pieces():
            tensor, buffer = self.kv_caches.tensors[tensor_idx].tensor, buffers[self.owners[tensor_idx]]
            start = tensor.storage_offset() + row * tensor.stride(0)
            at = GUARD + host * self.pool.stride_bytes + offset
            if to_host:
                memory[at : at + n] = buffer[start : start + n]
            else:
                buffer[start : start + n] = memory[at : at + n]
        return buffers, memory


@st.composite
def cases(draw):
    """Draw a geometry, noise for all of its memory, and a transfer; no device or host block is named twice."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_blocks = draw(st.integers(1, 12))
    width = draw(st.sampled_from([1, 2, 4, 8, 16]))
    buffers, owners, tensors = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        # Several tensors in one buffer lie side by side, block after block: their rows have a wider stride.
        pages = [width * draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 3)))]
        stride = sum(pages) + width * draw(st.integers(0, 3))
        rows = num_blocks + draw(st.integers(0, 2))
        offset = guard = width * draw(st.integers(0, GUARD // width))
        buffer = torch.from_numpy(rng.integers(-128, 128, 2 * guard + rows * stride, dtype=np.int8))
        for page in pages:
            tensors.append(CanonicalKVCacheTensor(buffer.as_strided((rows, page), (stride, 1), offset), page))
            owners.append(len(buffers))
            offset += page
        buffers.append(buffer)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.integers(0, len(tensors) - 1), unique=True, max_size=len(tensors)))
        pages = [tensors[i].page_size_bytes for i in chosen]
        sizes = [draw(st.integers(1, page)) if draw(st.booleans()) else page for page in pages]
        groups.append(list(map(CanonicalKVCacheRef, chosen, sizes)))
    kv_caches = CanonicalKVCaches(tensors, groups)
    factor = draw(st.integers(1, 4))
    sizes, indices, need = [], [], 0
    for _ in groups:
        sizes.append(draw(st.integers(0, num_blocks - sum(sizes))))
        indices.append(draw(st.integers(0, 9)))
        need += -(-(indices[-1] % factor + sizes[-1]) // factor) if sizes[-1] else 0
    block_bytes = max(1, host_block_bytes(kv_caches, factor)) + draw(st.sampled_from([0, 0, 3]))
    stride = block_bytes + draw(st.sampled_from([0, 0, 5]))
    num_host = need + draw(st.integers(0, 3)) or 1
    memory = rng.integers(-128, 128, 2 * GUARD + num_host * stride, dtype=np.int8)
    device_ids, host_ids = (
        draw(st.permutations(range(n))) if draw(st.booleans()) else range(n) for n in (num_blocks, num_host)
    )
    return Case(
        buffers,
        owners,
        kv_caches,
        NoisyPool(memory, num_host, block_bytes, stride),
        factor,
        GPULoadStoreSpec(device_ids[: sum(sizes)], sizes, indices),
        CPULoadStoreSpec(host_ids[:need]),
    )
