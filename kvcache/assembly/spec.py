"""The specs, which make a scheduler's manager and a worker's handlers: their interface, and the two built-in ones.

Scheduler and workers share only the configuration, so everything that both must agree on is computed from it here. A
tier's threads read and write host blocks in the scheduler's process, and handlers copy them in the workers'. So with
tiers, the pool is a file in shared memory that all of them map. A block's bytes of all ranks lie side by side in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.control.manager import OffloadingManager
from kvcache.options import Options, check_int, name_unknown, option, parse_count, parse_flag
from kvcache.registry import REMOVED, SPECS
from kvcache.specs import CanonicalKVCacheRef, CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec
from kvcache.transfer.shared_file import PREFIX, SharedBlocks, private_folder

if TYPE_CHECKING:
    from kvcache.transfer.base import OffloadingHandler
    from kvcache.transfer.host_pool import HostPool

_LOG = logging.getLogger(__name__)


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


def _parse_spec(name: str, value: Any) -> Any:
    return SPECS.resolve(value) and value


@dataclass(frozen=True)
class SpecOptions(Options):
    """The options that every spec reads."""

    where: ClassVar[str] = "extra_config"

    spec_name: str | type = option(_parse_spec, "cpu", when="`tiers` are set: `tiering`; or the spec is your own")
    block_size: int | None = option(
        parse_count, None, when="you want longer copies and accept coarser hits: tokens of a block"
    )
    offload_prompt_only: bool = option(parse_flag, True, when="generated tokens are used again, too")


HandlerOf = tuple[type[LoadStoreSpec], type[LoadStoreSpec], "OffloadingHandler"]
"""Source and destination of a handler's jobs, and the handler."""


class OffloadingSpec(ABC):
    """Make the manager for a scheduler, or the handlers for a worker.

    Parameters
    ----------
    config : OffloadingConfig
        The same for scheduler and workers. Every spec reads ``block_size`` (tokens of one offloaded block; default:
        those of a device block) and ``offload_prompt_only`` (default True) from its `extra_config`.

    Attributes
    ----------
    config : OffloadingConfig
        The argument.
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
        The keys of `extra_config` that this class reads; others are warned about. A subclass that does not define
        its own `option_names` warns about nothing.

    Raises
    ------
    ValueError
        A size is not a multiple of another as it must be, an option is invalid, or ``tiers`` are given to a class
        that does not read them.
    """

    option_names: ClassVar[Set[str]] = SpecOptions.declared().keys()

    def __init__(self, config: OffloadingConfig) -> None:
        if not isinstance(config, OffloadingConfig):
            raise ValueError(f"config must be an OffloadingConfig, got {config!r}")
        self.config = config
        self.extra_config = config.extra_config
        names = vars(type(self)).get("option_names")
        if names is not None:
            if "tiers" not in names and self.extra_config.get("tiers") is not None:
                raise ValueError("tiers need spec_name 'tiering' and make_spec, or a TieringOffloadingSpec")
            if unknown := name_unknown(self.extra_config, names | REMOVED.keys()):
                # No error, because other components of the engine may read them.
                _LOG.warning("kvcache does not know these keys of extra_config: %s", unknown)
        self.hash_block_size = config.hash_block_size
        spread = config.decode_context_parallel_size * config.prefill_context_parallel_size
        self.gpu_block_size = tuple(group.block_size * spread for group in config.groups)
        for i, size in enumerate(self.gpu_block_size):
            if size % self.hash_block_size:
                raise ValueError(
                    f"the device block size of group {i}, {config.groups[i].block_size} tokens on each of {spread} "
                    f"context-parallel ranks, must be a multiple of hash_block_size {self.hash_block_size}"
                )
        options = SpecOptions.parse_part(self.extra_config)
        self.block_size_factor = self._factor(options.block_size)
        self.offload_prompt_only = options.offload_prompt_only

    @property
    def block_size(self) -> int:
        """Tokens of one offloaded block; if groups differ, of the first group."""
        return self.gpu_block_size[0] * self.block_size_factor

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's manager, the same one at every call."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerOf]:
        """Yield the worker's handlers for its `kv_caches`, as `OffloadingWorker.register_handler` takes them.

        Each comes behind the types of the source and the destination of its jobs.

        Raises
        ------
        ValueError
            The KV cache does not fit the configuration.
        """

    def _factor(self, size: int | None) -> int:
        if size is None:
            return 1
        if len(set(self.gpu_block_size)) > 1:
            raise ValueError(f"block_size {size} needs groups of one device block size, got {self.gpu_block_size}")
        if size % self.gpu_block_size[0]:
            raise ValueError(f"block_size must be a multiple of the device's {self.gpu_block_size[0]}, got {size}")
        return size // self.gpu_block_size[0]


def make_spec(config: OffloadingConfig) -> OffloadingSpec:
    """Return the spec that ``spec_name`` in the `extra_config` of `config` names.

    It is a known name (default ``"cpu"``), a class or ``"package.module:Class"``. ValueError: the name is unknown (the
    message lists the known ones), or the spec refuses the configuration.
    """
    spec: OffloadingSpec = SPECS.resolve(config.extra_config.get("spec_name", "cpu"))(config)
    return spec


class CPUOffloadingSpec(OffloadingSpec):
    """Offload to host memory.

    Parameters
    ----------
    config : OffloadingConfig
        Its `extra_config` holds the pool's size as ``num_cpu_blocks``, or as ``cpu_bytes_to_use``: bytes over all
        workers, which need every group's refs. The other options are those of
        `kvcache.assembly.assemble.OffloadSettings`, without tiers.

    Attributes
    ----------
    settings : OffloadSettings
        The parsed `extra_config`.
    num_blocks : int
        Blocks of the pool.
    pool : HostPool or None
        A worker's pool, once `get_handlers` has made it.

    Raises
    ------
    ValueError
        See `OffloadingSpec`; or the pool's size is missing, given twice, or less than one block.
    """

    option_names = (OffloadingSpec.option_names | OffloadSettings.declared().keys()) - {"tiers"}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = self._read_settings()
        self.num_blocks = self.settings.num_blocks(self.rank_bytes(), config.world_size)
        self.pool: HostPool | None = None
        self._manager: OffloadingManager | None = None
        self._handlers: list[HandlerOf] | None = None
        self._kv_caches: CanonicalKVCaches | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerOf]:
        if self._handlers is None:
            self._check_groups(kv_caches)
            self._handlers = self._make_handlers(kv_caches)
            self._kv_caches = kv_caches
        elif kv_caches is not self._kv_caches:
            raise ValueError("the handlers of this spec belong to another KV cache; make one spec per worker")
        return iter(self._handlers)

    def _read_settings(self) -> OffloadSettings:
        return OffloadSettings.parse_part({**self.extra_config, "tiers": None})

    def rank_bytes(self) -> int:
        """Return the bytes of an offloaded block on one worker, or 0 if the config has no refs."""
        sizes = [sum(ref.page_size_bytes for ref in group.refs) for group in self.config.groups]
        return max(sizes) * self.block_size_factor if all(sizes) else 0

    def _make_manager(self) -> OffloadingManager:
        return open_manager(
            self.settings,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            block_bytes=self.rank_bytes() * self.config.world_size,
        )

    def _make_handlers(self, kv_caches: CanonicalKVCaches) -> list[HandlerOf]:
        # Imported here because a scheduler does not need torch.
        from kvcache.transfer.factory import cpu_gpu_handlers

        self.pool = self._make_pool(kv_caches)
        store, load = cpu_gpu_handlers(kv_caches, self.pool, self.block_size_factor, self.settings.num_copy_threads)
        return [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]

    def _make_pool(self, kv_caches: CanonicalKVCaches) -> HostPool:
        from kvcache.transfer.geometry import device_of, host_block_bytes
        from kvcache.transfer.host_pool import HostPool

        block_bytes = max(1, host_block_bytes(kv_caches, self.block_size_factor))
        return HostPool(self.num_blocks, block_bytes, device=device_of(kv_caches))

    def _check_groups(self, kv_caches: CanonicalKVCaches) -> None:
        groups = self.config.groups
        if len(kv_caches.group_data_refs) != len(groups):
            raise ValueError(f"the config has {len(groups)} KV-cache groups, got {len(kv_caches.group_data_refs)}")
        for i, (group, refs) in enumerate(zip(groups, kv_caches.group_data_refs, strict=True)):
            if group.refs and list(group.refs) != list(refs):
                raise ValueError(f"the config has {list(group.refs)} in group {i}, got {list(refs)}")


class TieringOffloadingSpec(CPUOffloadingSpec):
    """Offload to host memory, and from there to tiers below it.

    Parameters
    ----------
    config : OffloadingConfig
        Its `extra_config` lists the ``tiers`` (see `kvcache.assembly.assemble.parse_tier`), and may set the
        options of tiers of `kvcache.assembly.assemble.OffloadSettings`. Every group needs its refs, because they hold
        the size of a block. The rest is as for `CPUOffloadingSpec`.

    Raises
    ------
    ValueError
        See `CPUOffloadingSpec`; or a tier's options are invalid.
    """

    option_names = OffloadingSpec.option_names | OffloadSettings.declared().keys()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._part_bytes = self.settings.part_bytes(self.rank_bytes())
        path, folder = self.settings.pool_path, Path(self.settings.pool_folder)
        self._pool_path = Path(path) if path else private_folder(folder) / f"{PREFIX}{self._identity()}"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What makes these blocks different from those of another model, dtype or geometry."""
        config = self.config
        return {
            "model": config.model_name,
            "dtype": config.dtype,
            "groups": [
                [group.block_size, list(group.layer_names), [ref.page_size_bytes for ref in group.refs]]
                for group in config.groups
            ],
            "block_size_factor": self.block_size_factor,
            "world_size": config.world_size,
            "context_parallel": [config.decode_context_parallel_size, config.prefill_context_parallel_size],
        }

    def _read_settings(self) -> OffloadSettings:
        if self.extra_config.get("tiers") is None:
            raise ValueError("tiers in extra_config must be a list of dicts, got None")
        if not self.rank_bytes():
            raise ValueError("tiers need the refs of every group, because they hold the size of a block")
        return OffloadSettings.parse_part(self.extra_config)

    def _make_manager(self) -> OffloadingManager:
        block_bytes = self._part_bytes * self.config.world_size
        shared = SharedBlocks(self._pool_path, self.num_blocks, block_bytes, is_owner=True)
        return open_manager(
            self.settings,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            shared=shared,
            fingerprint=self.fingerprint,
        )

    def _make_pool(self, kv_caches: CanonicalKVCaches) -> HostPool:
        from kvcache.transfer.shared_pool import SharedHostPool

        config = self.config
        shared = SharedBlocks(self._pool_path, self.num_blocks, self._part_bytes * config.world_size, is_owner=False)
        return SharedHostPool(kv_caches, shared, config.rank, self._part_bytes, self.block_size_factor)

    def _identity(self) -> str:
        text = json.dumps([self.fingerprint, self.extra_config["tiers"], self.num_blocks], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:24]
