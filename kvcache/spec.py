"""From configuration to a manager and handlers: what an engine builds once for its scheduler and once per worker.

The two share nothing but the configuration, so everything that both must agree on is computed from it here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.backend import parsed_bytes
from kvcache.manager import CPUOffloadingManager, OffloadingManager
from kvcache.registry import POLICIES, SPECS
from kvcache.types import CanonicalKVCacheRef, CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec

if TYPE_CHECKING:
    from kvcache.transfer.base import OffloadingHandler
    from kvcache.transfer.memory import HostPool

_LOG = logging.getLogger(__name__)
_MANAGER_OPTIONS = frozenset({"store_threshold", "max_tracker_size", "what_if", "retention_share"})

HandlerOf = tuple[type[LoadStoreSpec], type[LoadStoreSpec], "OffloadingHandler"]
"""Source and destination of a handler's jobs, and the handler."""


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
        Where a worker's layers lie; needed where the pool's size is given in bytes.
    """

    block_size: int
    layer_names: tuple[str, ...] = ()
    refs: tuple[CanonicalKVCacheRef, ...] = ()

    def __post_init__(self) -> None:
        _check_size("block_size of a group", self.block_size)
        for name, kind in (("layer_names", str), ("refs", CanonicalKVCacheRef)):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, kind) for value in values):
                raise ValueError(f"{name} of a group must be a sequence of {kind.__name__}, got {values!r}")
            object.__setattr__(self, name, tuple(values))


@dataclass(frozen=True, slots=True)
class OffloadingConfig:
    """What scheduler and workers must agree on; it pickles.

    Parameters
    ----------
    groups : tuple of OffloadingGroup
        The KV-cache groups, at least one.
    hash_block_size : int
        Tokens that one block hash stands for.
    decode_context_parallel_size, prefill_context_parallel_size : int
        Ranks that a block's tokens are spread over.
    rank, world_size : int
        Which worker this is, of how many.
    model_name, dtype : str
        What the bytes are: two configurations that differ in them share no blocks.
    extra_config : dict
        Options of the spec.

    Raises
    ------
    ValueError
        There is no group, or a number is out of range.
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
            _check_size(name, getattr(self, name))
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {self.rank!r}")
        if not isinstance(self.extra_config, Mapping):
            raise ValueError(f"extra_config must be a dict, got {self.extra_config!r}")


class OffloadingSpec(ABC):
    """Makes the manager for a scheduler, or the handlers for a worker.

    Parameters
    ----------
    config : OffloadingConfig
        What both sides agree on. Of `extra_config` every spec reads ``block_size`` (tokens of one offloaded block; by
        default that of a device block) and ``offload_prompt_only`` (default True).

    Attributes
    ----------
    config : OffloadingConfig
        As given.
    extra_config : dict
        Its options.
    gpu_block_size : tuple of int
        Tokens of one device block over all context-parallel ranks, per group.
    hash_block_size : int
        Tokens that one block hash stands for.
    block_size_factor : int
        Device blocks in one offloaded block.
    offload_prompt_only : bool
        Whether only the blocks of prompts are offloaded.
    option_names : set of str
        What this very class reads of `extra_config`; keys beyond it are logged. A subclass that has none of its own
        is not asked.

    Raises
    ------
    ValueError
        A size does not divide another that it must divide, an option is of the wrong kind, or there are ``tiers``
        that this class does not read.
    """

    option_names: ClassVar[Set[str]] = frozenset({"spec_name", "block_size", "offload_prompt_only"})

    def __init__(self, config: OffloadingConfig) -> None:
        if not isinstance(config, OffloadingConfig):
            raise ValueError(f"config must be an OffloadingConfig, got {config!r}")
        self.config = config
        self.extra_config = config.extra_config
        names = vars(type(self)).get("option_names")
        if names is not None:
            if "tiers" not in names and self.extra_config.get("tiers") is not None:
                raise ValueError("tiers need spec_name 'tiering'")
            warn_of_unknown("extra_config", self.extra_config, names)
        self.hash_block_size = config.hash_block_size
        spread = config.decode_context_parallel_size * config.prefill_context_parallel_size
        self.gpu_block_size = tuple(group.block_size * spread for group in config.groups)
        for i, size in enumerate(self.gpu_block_size):
            if size % self.hash_block_size:
                raise ValueError(
                    f"the device block size of group {i}, {config.groups[i].block_size} tokens on each of {spread} "
                    f"context-parallel ranks, must be a multiple of hash_block_size {self.hash_block_size}"
                )
        self.block_size_factor = self._factor()
        self.offload_prompt_only = self._option("offload_prompt_only", bool, True)

    @property
    def block_size(self) -> int:
        """Tokens of one offloaded block; of the first group, where groups differ."""
        return self.gpu_block_size[0] * self.block_size_factor

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's manager, the same one at every call."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerOf]:
        """Yield the worker's handlers for its KV cache, as `OffloadingWorker.register_handler` takes them.

        Raises
        ------
        ValueError
            The KV cache does not fit the configuration.
        """

    def _factor(self) -> int:
        size: int | None = self._option("block_size", int, None)
        if size is None:
            return 1
        if len(set(self.gpu_block_size)) > 1:
            raise ValueError(f"block_size {size} needs one device block size, the groups have {self.gpu_block_size}")
        if size < 1 or size % self.gpu_block_size[0]:
            raise ValueError(f"block_size must be a multiple of the device's {self.gpu_block_size[0]}, got {size}")
        return size // self.gpu_block_size[0]

    def _option(self, name: str, kind: type, default: Any) -> Any:
        value = self.extra_config.get(name, default)
        if value is not default and type(value) is not kind:
            article = "an" if kind is int else "a"
            raise ValueError(f"{name} in extra_config must be {article} {kind.__name__}, got {value!r}")
        return value


class CPUOffloadingSpec(OffloadingSpec):
    """Offload to host memory.

    Parameters
    ----------
    config : OffloadingConfig
        Its `extra_config` gives the pool's size as ``num_cpu_blocks``, or as ``cpu_bytes_to_use``: bytes over all
        workers, an int or a size such as ``"4GiB"``, which needs every group's refs. It may give ``cache_policy``
        (default ``"lru"``), ``enable_events`` (default False) and ``num_copy_threads`` (per direction; default by the
        CPUs). ``store_threshold``, ``max_tracker_size``, ``what_if`` and ``retention_share`` go to the
        `CPUOffloadingManager`, which checks them.

    Attributes
    ----------
    num_blocks : int
        Blocks of the pool.
    pool : HostPool or None
        A worker's pool, once `get_handlers` has made it.

    Raises
    ------
    ValueError
        See `OffloadingSpec`; or the pool's size is missing, given twice, or less than one block.
    """

    option_names = OffloadingSpec.option_names | {
        "num_cpu_blocks",
        "cpu_bytes_to_use",
        "cache_policy",
        "enable_events",
        "num_copy_threads",
        *_MANAGER_OPTIONS,
    }

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.num_blocks = self._num_blocks()
        self.pool: HostPool | None = None
        self._cache_policy = self.extra_config.get("cache_policy", "lru")
        POLICIES.resolve(self._cache_policy)
        self._enable_events = self._option("enable_events", bool, False)
        self._num_copy_threads = self._option("num_copy_threads", int, None)
        if self._num_copy_threads is not None:
            _check_size("num_copy_threads", self._num_copy_threads)
        given = {name: self.extra_config.get(name) for name in _MANAGER_OPTIONS}
        self._manager_options = {name: value for name, value in given.items() if value is not None}
        self._manager: CPUOffloadingManager | None = None
        self._handlers: list[HandlerOf] | None = None
        self._kv_caches: CanonicalKVCaches | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = CPUOffloadingManager(
                self.block_size,
                self.num_blocks,
                self._cache_policy,
                enable_events=self._enable_events,
                **self._manager_options,
            )
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerOf]:
        if self._handlers is None:
            self._check_groups(kv_caches)
            self._handlers = self._make_handlers(kv_caches)
            self._kv_caches = kv_caches
        elif kv_caches is not self._kv_caches:
            raise ValueError("this spec's handlers belong to another KV cache: make a spec for each worker")
        return iter(self._handlers)

    def _make_handlers(self, kv_caches: CanonicalKVCaches) -> list[HandlerOf]:
        # The scheduler's half of the process pays nothing for torch.
        from kvcache.transfer.geometry import host_block_bytes
        from kvcache.transfer.handler import cpu_gpu_handlers
        from kvcache.transfer.memory import HostPool

        self.pool = HostPool(self.num_blocks, max(1, host_block_bytes(kv_caches, self.block_size_factor)))
        store, load = cpu_gpu_handlers(kv_caches, self.pool, self.block_size_factor, self._num_copy_threads)
        return [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]

    def _check_groups(self, kv_caches: CanonicalKVCaches) -> None:
        groups = self.config.groups
        if len(kv_caches.group_data_refs) != len(groups):
            raise ValueError(f"the config has {len(groups)} KV-cache groups, got {len(kv_caches.group_data_refs)}")
        for i, (group, refs) in enumerate(zip(groups, kv_caches.group_data_refs, strict=True)):
            if group.refs and list(group.refs) != list(refs):
                raise ValueError(f"the config has {list(group.refs)} in group {i}, got {list(refs)}")

    def _num_bytes(self) -> int | None:
        value = self.extra_config.get("cpu_bytes_to_use")
        try:
            return None if value is None else parsed_bytes(value)
        except ValueError as error:
            raise ValueError(f"cpu_bytes_to_use in extra_config: {error}") from None

    def _num_blocks(self) -> int:
        num_blocks: int | None = self._option("num_cpu_blocks", int, None)
        num_bytes = self._num_bytes()
        if num_blocks is not None and num_bytes is None:
            _check_size("num_cpu_blocks", num_blocks)
            return num_blocks
        if num_blocks is not None or num_bytes is None:
            raise ValueError(
                "extra_config must have one of num_cpu_blocks and cpu_bytes_to_use, "
                f"got num_cpu_blocks={num_blocks} and cpu_bytes_to_use={num_bytes}"
            )
        sizes = [sum(ref.page_size_bytes for ref in group.refs) for group in self.config.groups]
        if not all(sizes):
            raise ValueError(
                "cpu_bytes_to_use needs the refs of every group, which say how large a block is; "
                "give num_cpu_blocks where they are not known"
            )
        block_bytes = max(sizes) * self.block_size_factor * self.config.world_size
        if num_bytes < block_bytes:
            raise ValueError(
                f"cpu_bytes_to_use must be at least one block of {block_bytes} bytes over all workers, got {num_bytes}"
            )
        return num_bytes // block_bytes


def make_spec(config: OffloadingConfig) -> OffloadingSpec:
    """Make the spec that ``spec_name`` in the configuration's `extra_config` names.

    Parameters
    ----------
    config : OffloadingConfig
        Its ``spec_name`` (default ``"cpu"``) is a known name, a class or ``"package.module:Class"``.

    Raises
    ------
    ValueError
        The name is not known (the message lists the known ones), or the spec refuses the configuration.
    """
    found = SPECS.resolve(config.extra_config.get("spec_name", "cpu"))
    if not issubclass(found, OffloadingSpec):
        raise ValueError(f"spec {found.__name__} must be an OffloadingSpec")
    return found(config)


def warn_of_unknown(where: str, options: Mapping[str, Any], known: Set[str]) -> None:
    """Log a warning of options that are not known: an engine's other components may read them, or nobody does."""
    unknown = sorted(str(name) for name in options.keys() - known)
    if not unknown:
        return
    import difflib

    close = [difflib.get_close_matches(name, sorted(known), n=1) for name in unknown]
    told = [f"{name} (did you mean {hit[0]!r}?)" if hit else name for name, hit in zip(unknown, close, strict=True)]
    _LOG.warning("kvcache does not know these keys of %s: %s", where, ", ".join(told))


def _check_size(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")
