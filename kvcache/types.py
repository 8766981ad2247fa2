"""Keys, contexts, specs, outputs, events and errors: the words that a scheduler and a worker exchange.

They hold no behaviour beyond checking themselves, so that every other module may import them.
"""

from __future__ import annotations

import ctypes
import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, NewType, TypeVar

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Int64Array = npt.NDArray[np.int64]

T = TypeVar("T")

OffloadKey = NewType("OffloadKey", bytes)
"""A block hash followed by its KV-cache group index (4 bytes, big-endian, unsigned), as exact `bytes`."""

_GROUP_BYTES = 4
_CENTURY_S = 100 * 365 * 86_400


class BlockStateError(RuntimeError):
    """A block's reference count or state does not allow the call."""


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Join a block hash and a KV-cache group index to a key.

    Parameters
    ----------
    block_hash : bytes
        Hash of the block, at least one byte.
    group_idx : int
        KV-cache group, 0 <= group_idx < 2**32.

    Raises
    ------
    ValueError
        The hash is not bytes or empty, or the index does not fit four bytes.
    """
    if not isinstance(block_hash, bytes) or not block_hash:
        raise ValueError(f"block_hash must be non-empty bytes, got {block_hash!r}")
    if not isinstance(group_idx, int) or not 0 <= group_idx < 1 << 32:
        raise ValueError(f"group_idx must be an int in 0..2**32-1, got {group_idx!r}")
    return OffloadKey(bytes(block_hash) + group_idx.to_bytes(_GROUP_BYTES, "big"))


def get_offload_block_hash(key: bytes) -> bytes:
    """Return the block hash of a key made by `make_offload_key`."""
    return _checked_key(key)[:-_GROUP_BYTES]


def get_offload_group_idx(key: bytes) -> int:
    """Return the KV-cache group index of a key made by `make_offload_key`."""
    return int.from_bytes(_checked_key(key)[-_GROUP_BYTES:], "big")


def _checked_key(key: bytes) -> bytes:
    if not isinstance(key, bytes) or len(key) <= _GROUP_BYTES:
        raise ValueError(f"key must be bytes longer than {_GROUP_BYTES}, got {key!r}")
    return key


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a request's blocks deserve to stay: a soft hint, never a pin.

    Parameters
    ----------
    priority : int
        -1 (one-shot: first out), 0 (normal), 1, 2 or 3 (last out).
    ttl_s : float, optional
        Seconds for which a raised priority holds after the request's last call; None: until it is crowded out.

    Raises
    ------
    ValueError
        The priority is out of range, or the time is not a positive finite number.
    """

    priority: int = 0
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if type(self.priority) is not int or not -1 <= self.priority <= 3:
            raise ValueError(f"priority must be an int in -1..3, got {self.priority!r}")
        ttl_s = self.ttl_s
        if ttl_s is not None and (
            isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf
        ):
            raise ValueError(f"ttl_s must be a positive number of seconds or None, got {ttl_s!r}")

    @property
    def ttl_ns(self) -> int:
        """The time in whole nanoseconds, at least 1 and at most a century, which nobody outlives; 0: none."""
        return 0 if self.ttl_s is None else max(1, int(min(self.ttl_s, _CENTURY_S) * 1e9))


class ReqContext:
    """What is known of one request; hashed by identity.

    Parameters
    ----------
    req_id : str
        The engine's name for the request.
    kv_transfer_params : dict, optional
        What the client sent along for KV transfer.
    retention : Retention, optional
        How long the request's blocks deserve to stay.

    Notes
    -----
    A manager keeps what it must remember of a request in its context, so a context that is dropped is forgotten.
    """

    __slots__ = ("__weakref__", "_positions", "_state", "_trails", "kv_transfer_params", "req_id", "retention")

    def __init__(
        self,
        req_id: str = "",
        kv_transfer_params: dict[str, Any] | None = None,
        retention: Retention | None = None,
    ) -> None:
        if retention is not None and not isinstance(retention, Retention):
            raise ValueError(f"retention must be a Retention or None, got {retention!r}")
        self.req_id = req_id
        self.kv_transfer_params = kv_transfer_params
        self.retention = retention
        self._state: dict[type, Any] | None = None
        self._positions: dict[bytes, int] | None = None
        # One trail (the keys this request named) per manager that the request met.
        self._trails: dict[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"ReqContext(req_id={self.req_id!r})"

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        # A copy, perhaps in another process, is a request that no manager has met.
        state[1]["_trails"] = None
        return state

    def set_state(self, value: object) -> None:
        """Keep `value` for this request, under its type; a later value of the same type replaces it."""
        if self._state is None:
            self._state = {}
        self._state[type(value)] = value

    def get_state(self, cls: type[T]) -> T | None:
        """Return what `set_state` kept under `cls`, or None."""
        return None if self._state is None else self._state.get(cls)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        """Say where in the prompt a key's block ends, in tokens; ValueError where that is no int."""
        if type(end_token) is not int:
            try:
                end_token = index(end_token)
            except TypeError:
                raise ValueError(f"end_token must be an int, got {end_token!r}") from None
        if self._positions is None:
            self._positions = {}
        self._positions[key] = end_token

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Return where in the prompt a key's block ends, in tokens, or None if unknown."""
        return None if self._positions is None else self._positions.get(key)


class OffloadPolicy(enum.Enum):
    """Which of a request's blocks are offloaded."""

    BLOCK_LEVEL = "block_level"
    REQUEST_LEVEL = "request_level"


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """How one request's blocks are offloaded: only new blocks (`BLOCK_LEVEL`), or all (`REQUEST_LEVEL`)."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


class BlockStatus(ctypes.Structure):
    """One block of a pool: its slot and who is using it.

    Parameters
    ----------
    block_id : int
        Slot in the pool, int64.

    Raises
    ------
    ValueError
        The id is no int64.

    Notes
    -----
    C layout `{int32 ref_cnt; int64 block_id}`, 16 bytes. `ref_cnt` starts at -1: not ready, being written.
    """

    _fields_ = (("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int64))

    def __init__(self, block_id: int) -> None:
        super().__init__(-1, block_id)
        if self.block_id != block_id:
            raise ValueError(f"block_id must be an int64, got {block_id!r}")

    @property
    def is_ready(self) -> bool:
        """Whether the block's bytes are there to be read."""
        return bool(self.ref_cnt >= 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


def _id_array(name: str, values: Any) -> Int64Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a one-dimensional sequence of integers, got {values!r}")
    return array.astype(np.int64, copy=False)


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
        Kept as an int64 array, shape (n,).

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


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the pool in host memory."""

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
    """Where one layer's data of a block lies: the tensor, and how many bytes (padding excluded) to copy."""

    tensor_idx: int
    page_size_bytes: int


@dataclass(slots=True)
class CanonicalKVCaches:
    """An engine's KV cache: its tensors, and for each KV-cache group the refs of its layers."""

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


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

    __slots__ = ("evicted_keys", "keys_to_store", "store_spec")

    def __init__(self, keys_to_store: list[bytes], store_spec: LoadStoreSpec, evicted_keys: list[bytes]) -> None:
        self.keys_to_store = keys_to_store
        self.store_spec = store_spec
        self.evicted_keys = evicted_keys

    @property
    def block_hashes_to_store(self) -> list[bytes]:
        """The older name of `keys_to_store`."""
        return self.keys_to_store

    @property
    def block_hashes_evicted(self) -> list[bytes]:
        """The older name of `evicted_keys`."""
        return self.evicted_keys

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrepareStoreOutput):
            return NotImplemented
        return (self.keys_to_store, self.store_spec, self.evicted_keys) == (
            other.keys_to_store,
            other.store_spec,
            other.evicted_keys,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"PrepareStoreOutput(keys_to_store={self.keys_to_store!r}, store_spec={self.store_spec!r}, "
            f"evicted_keys={self.evicted_keys!r})"
        )


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that came to a medium (`removed` False) or left it (`removed` True)."""

    keys: list[bytes]
    block_size: int
    medium: str
    removed: bool

    @property
    def block_hashes(self) -> list[bytes]:
        """The older name of `keys`."""
        return self.keys


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Counters since start and gauges (`num_*`, and `retained_blocks`: those at a raised priority) now.

    Everything counts blocks, but `lookups` and `rejected_stores` (calls) and `ignored_hints` (requests).
    """

    num_blocks: int
    num_free: int
    num_referenced: int
    num_pending: int
    lookups: int
    looked_up_blocks: int
    hit_blocks: int
    loaded_blocks: int
    stored_blocks: int
    evicted_blocks: int
    rejected_stores: int
    failed_blocks: int
    gated_blocks: int
    retained_blocks: int = 0
    ignored_hints: int = 0


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
