"""OffloadingConfig: the facts that an engine's scheduler and workers must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcache.options import check_int
from kvcache.specs import CanonicalKVCacheRef


@dataclass(frozen=True, slots=True)
class OffloadingGroup:
    """One KV-cache group: layers whose blocks share block ids.

    Parameters
    ----------
    block_size : int
        Tokens of one device block on one rank, >= 1.
    layer_names : tuple of str
        The layers.
    refs : tuple of CanonicalKVCacheRef, optional
        Where a worker's layers lie; needed if the pool's size is given in bytes.
    """

    block_size: int
    layer_names: tuple[str, ...] = ()
    refs: tuple[CanonicalKVCacheRef, ...] = ()

    def __post_init__(self) -> None:
        check_int("block_size of a group", self.block_size)
        for name, kind in (("layer_names", str), ("refs", CanonicalKVCacheRef)):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, kind) for value in values):
                raise ValueError(f"{name} of a group must be a sequence of {kind.__name__}, got {values!r}")
            object.__setattr__(self, name, tuple(values))


@dataclass(frozen=True, slots=True)
class OffloadingConfig:
    """The facts that scheduler and workers must agree on; can be pickled.

    Parameters
    ----------
    groups : tuple of OffloadingGroup
        The KV-cache groups, at least one.
    hash_block_size : int
        Tokens that one block hash stands for.
    decode_context_parallel_size, prefill_context_parallel_size : int
        Ranks over which a block's tokens are spread.
    rank, world_size : int
        This worker's number, and the number of workers.
    model_name, dtype : str
        Identify the bytes: configurations that differ in them share no blocks.
    extra_config : dict
        Options of the spec.

    Raises
    ------
    ValueError
        `groups` is empty, or a number is out of range.
    """

    groups: tuple[OffloadingGroup, ...]
    hash_block_size: int
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    rank: int = 0
    world_size: int = 1
    model_name: str = ""
    dtype: str = ""
    extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups or not all(isinstance(group, OffloadingGroup) for group in self.groups):
            raise ValueError(f"groups must be OffloadingGroups, at least one, got {self.groups!r}")
        for name in ("hash_block_size", "decode_context_parallel_size", "prefill_context_parallel_size", "world_size"):
            check_int(name, getattr(self, name))
        check_int("rank", self.rank, 0, self.world_size - 1)
        if not isinstance(self.extra_config, Mapping):
            raise ValueError(f"extra_config must be a dict, got {self.extra_config!r}")
