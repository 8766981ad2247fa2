"""An engine's KV tensors and the host pool, checked once and passed to the compiled planner.

Every job relies on these checks: the copying code has only addresses.
"""

from __future__ import annotations

from numbers import Integral

import torch

from kvcache.options import check_int
from kvcache.specs import CanonicalKVCaches
from kvcache.transfer._native.plan import Geometry
from kvcache.transfer.host_pool import HostPool


def host_block_bytes(kv_caches: CanonicalKVCaches, block_size_factor: int = 1) -> int:
    """Return the bytes of a block in the host pool: all layers of the largest group, unpadded, times the factor."""
    check_int("block_size_factor", block_size_factor)
    sizes = [sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs]
    return max(sizes, default=0) * block_size_factor


def device_of(kv_caches: CanonicalKVCaches) -> torch.device | None:
    """Return the device of an engine's tensors, None without tensors."""
    return kv_caches.tensors[0].tensor.device if kv_caches.tensors else None


class KVGeometry:
    """The layout of a block, in the engine's tensors and in the pool.

    A host block holds its device blocks one after the other, and each device block the layers of its group in the
    order of the refs. So a part of a host block is contiguous, too.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, pool: HostPool, block_size_factor: int = 1) -> None:
        self.kv_caches = kv_caches
        self.pool = pool
        self.block_size_factor = block_size_factor
        self.tensors = [_checked_tensor(i, kv.tensor, kv.page_size_bytes) for i, kv in enumerate(kv_caches.tensors)]
        devices = {tensor.device for tensor in self.tensors}
        if len(devices) > 1:
            raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
        self.device = devices.pop() if devices else torch.device("cpu")
        for group_idx, refs in enumerate(kv_caches.group_data_refs):
            for ref in refs:
                _check_ref(group_idx, ref.tensor_idx, ref.page_size_bytes, self.tensors)
        need = host_block_bytes(kv_caches, block_size_factor)
        if need > pool.block_bytes:
            raise ValueError(f"an offloaded block has {need} bytes, the pool's blocks have {pool.block_bytes}")
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.compiled = Geometry(
            [(tensor.data_ptr(), tensor.shape[0], tensor.stride(0)) for tensor in self.tensors],
            [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs],
            pool.address,
            pool.stride_bytes,
            pool.num_blocks,
            block_size_factor,
            # A tuple: the garbage collector empties the lists of a cycle, even while they are used.
            tuple(_held_memory(tensor) for tensor in (*self.tensors, pool.tensor)),
        )

    def segments(self) -> list[list[tuple[torch.Tensor, int]]]:
        """Return the pieces of device blocks as tensors, by group, each with its offset in the host block.

        Adjacent layers are one piece; a tensor has shape (num_blocks, bytes).
        """
        owners = {tensor.data_ptr(): tensor for tensor in reversed(self.tensors)}
        return [
            [
                (owners[address].as_strided((num_blocks, n_bytes), (stride, 1)), offset)
                for address, num_blocks, stride, offset, n_bytes in pieces
            ]
            for pieces in self.compiled.segments()
        ]

    def storages(self) -> list[tuple[int, torch.Tensor]]:
        """Return the memory of all tensors as (address, bytes), by address, each once."""
        return sorted({whole.data_ptr(): whole for whole in map(_whole, self.tensors)}.items())

    def is_lost(self) -> bool:
        """Whether a tensor has left the memory it had, as after ``set_``."""
        return [tensor.data_ptr() for tensor in self.tensors] != self._addresses


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(tensor.untyped_storage())


def _held_memory(tensor: torch.Tensor) -> object:
    """Return an object that keeps a tensor's memory in place: copies in flight know its address only.

    A tensor can get other memory (``set_``, ``data``), so its storage is referenced. A storage can be resized, unless
    numpy has a view of it, so host memory gets one. The garbage collector empties the tensors of a cycle even if they
    are referenced elsewhere, but it does not look into an array.
    """
    whole = _whole(tensor)
    return whole.numpy() if whole.is_cpu else whole


def _checked_tensor(index: int, tensor: torch.Tensor, page_size_bytes: int) -> torch.Tensor:
    name = f"KV-cache tensor {index}"
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if not isinstance(page_size_bytes, Integral):
        raise ValueError(f"{name} must have an int for page_size_bytes, got {page_size_bytes!r}")
    if tensor.dtype != torch.int8:
        raise ValueError(f"{name} must be int8 (view it as bytes), got {tensor.dtype}")
    if tensor.dim() != 2 or tensor.shape[1] != page_size_bytes:
        raise ValueError(f"{name} must have shape (num_blocks, {page_size_bytes}), got {tuple(tensor.shape)}")
    if not tensor.is_cpu and tensor.device.type != getattr(torch.accelerator.current_accelerator(), "type", None):
        raise ValueError(f"{name} must be in host memory or on the accelerator, got {tensor.device}")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} must have contiguous blocks, got strides {tensor.stride()}")
    if tensor.shape[0] > 1 and tensor.stride(0) < page_size_bytes:
        raise ValueError(f"{name} has overlapping blocks: {page_size_bytes} bytes at stride {tensor.stride(0)}")
    return tensor


def _check_ref(group_idx: int, tensor_idx: int, page_size_bytes: int, tensors: list[torch.Tensor]) -> None:
    if not isinstance(tensor_idx, Integral) or not isinstance(page_size_bytes, Integral):
        raise ValueError(f"a ref of group {group_idx} must be two ints, got {tensor_idx!r} and {page_size_bytes!r}")
    if not 0 <= tensor_idx < len(tensors):
        raise ValueError(f"group {group_idx} names tensor {tensor_idx}, there are {len(tensors)}")
    limit = tensors[tensor_idx].shape[1]
    if not 1 <= page_size_bytes <= limit:
        raise ValueError(
            f"group {group_idx} copies {page_size_bytes} bytes of each block of tensor {tensor_idx}, "
            f"which has 1..{limit}"
        )
