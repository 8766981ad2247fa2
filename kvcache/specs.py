"""Data that managers, handlers and engines exchange: load and store specs, outputs, results, and an engine's KV cache.

They hold no behaviour beyond checking themselves, so that every other module may import them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Int64Array = npt.NDArray[np.int64]


def _id_array(name: str, values: Any) -> Int64Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a one-dimensional sequence of integers, got {values!r}")
    return array.astype(np.int64)


class LoadStoreSpec(ABC):
    """Where blocks lie, for the worker that copies them."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium that the blocks lie on."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks named by their ids.

    Parameters
    ----------
    block_ids : array_like of int
        Kept as an int64 array of their own, shape (n,).

    Raises
    ------
    ValueError
        The ids are not a one-dimensional sequence of integers, or one is no int64 >= 0.
    """

    __slots__ = ("block_ids",)

    def __init__(self, block_ids: Any) -> None:
        self.block_ids: Int64Array = _id_array("block_ids", block_ids)
        if self.block_ids.size and self.block_ids.min() < 0:
            bad = next(block_id for block_id in np.asarray(block_ids).tolist() if not 0 <= block_id < 1 << 63)
            raise ValueError(f"a block's id must be an int64 >= 0, got {bad}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(np.array_equal(self.block_ids, other.block_ids))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.block_ids)


def block_ids_of(spec: LoadStoreSpec) -> Int64Array:
    """Return the block ids of a spec of host memory."""
    return cast("BlockIDsLoadStoreSpec", spec).block_ids


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the pool in host memory.

    Parameters
    ----------
    block_ids : array_like of int
        Slots of the pool; kept as an int64 array, shape (n,).
    """

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        """Return ``"CPU"``."""
        return "CPU"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the engine's own KV cache, ordered by KV-cache group.

    Parameters
    ----------
    block_ids : array_like of int
        Device blocks of all groups, group after group; shape (n,).
    group_sizes : sequence of int
        Blocks per group; their sum is n.
    block_indices : sequence of int
        Per group, the logical index (in device blocks) of its first block within the request. Where an offloaded
        block spans several device blocks, the first one may start in the middle of an offloaded block.

    Raises
    ------
    ValueError
        The sizes do not add up to the number of ids, the lengths differ, or a value is negative.
    """

    __slots__ = ("block_indices", "group_sizes")

    def __init__(self, block_ids: Any, group_sizes: Sequence[int], block_indices: Sequence[int]) -> None:
        super().__init__(block_ids)
        self.group_sizes = tuple(_id_array("group_sizes", group_sizes).tolist())
        self.block_indices = tuple(_id_array("block_indices", block_indices).tolist())
        if min(self.group_sizes, default=0) < 0 or sum(self.group_sizes) != len(self.block_ids):
            raise ValueError(
                f"group_sizes must be >= 0 and add up to {len(self.block_ids)} block ids, got {self.group_sizes}"
            )
        if min(self.block_indices, default=0) < 0 or len(self.block_indices) != len(self.group_sizes):
            raise ValueError(
                f"block_indices must be >= 0, one per group ({len(self.group_sizes)}), got {self.block_indices}"
            )

    def __eq__(self, other: object) -> bool:
        same_blocks = super().__eq__(other)
        if same_blocks is not True or not isinstance(other, GPULoadStoreSpec):
            return same_blocks
        return (self.group_sizes, self.block_indices) == (other.group_sizes, other.block_indices)

    __hash__ = None

    @staticmethod
    def medium() -> str:
        """Return ``"GPU"``."""
        return "GPU"


@dataclass(slots=True)
class CanonicalKVCacheTensor:
    """One tensor of an engine's KV cache, seen as bytes.

    Parameters
    ----------
    tensor : torch.Tensor
        int8, shape (num_blocks, page_size_bytes); any row stride.
    page_size_bytes : int
        Bytes of one block in this tensor, padding included.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """Where one layer's data of a block lies: the tensor, and how many bytes (padding excluded) to copy.

    Parameters
    ----------
    tensor_idx : int
        Index into `CanonicalKVCaches.tensors`.
    page_size_bytes : int
        Bytes to copy, padding excluded.
    """

    tensor_idx: int
    page_size_bytes: int


@dataclass(slots=True)
class CanonicalKVCaches:
    """An engine's KV cache: its tensors, and for each KV-cache group the refs of its layers.

    Parameters
    ----------
    tensors : list of CanonicalKVCacheTensor
        The cache's tensors.
    group_data_refs : list of list of CanonicalKVCacheRef
        For each KV-cache group, the refs of its layers.
    """

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


@dataclass(slots=True)
class PrepareStoreOutput:
    """What `prepare_store` decided.

    Parameters
    ----------
    keys_to_store : list of bytes
        The keys to write, in the order offered.
    store_spec : LoadStoreSpec
        Where to write them, in the same order.
    evicted_keys : list of bytes
        The keys that made room, oldest first.
    """

    keys_to_store: list[bytes]
    store_spec: LoadStoreSpec
    evicted_keys: list[bytes]

    @property
    def block_hashes_to_store(self) -> list[bytes]:
        """The older name of `keys_to_store`."""
        return self.keys_to_store

    @property
    def block_hashes_evicted(self) -> list[bytes]:
        """The older name of `evicted_keys`."""
        return self.evicted_keys


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of one transfer.

    Parameters
    ----------
    job_id : int
        As given to `transfer_async`.
    success : bool
        Whether every byte arrived.
    transfer_size : int
        Bytes moved.
    transfer_time : float
        Seconds from the start of the copy to its end.
    transfer_type : tuple of (str, str)
        Source and destination medium.
    """

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float
    transfer_type: tuple[str, str]
