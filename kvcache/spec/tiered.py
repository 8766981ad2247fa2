"""From configuration to a host pool with tiers below it.

A tier's threads read and write host blocks in the scheduler's process, and handlers copy them in the workers'; so the
pool is a file in shared memory that all of them map. A block's bytes of all ranks lie side by side in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.control.manager import OffloadingManager
from kvcache.registry import TIERS
from kvcache.spec.base import HandlerOf
from kvcache.spec.config import OffloadingConfig
from kvcache.spec.cpu import CPUOffloadingSpec
from kvcache.specs import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec
from kvcache.tiering.controller import RULE_OPTIONS, TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiering.tier import Tier
from kvcache.transfer.shared_file import PREFIX, SharedBlocks

if TYPE_CHECKING:
    from kvcache.control.observers.what_if import WhatIf
    from kvcache.tiering.tier import HostBlocks
    from kvcache.transfer.shared_pool import SharedHostPool

_ALIGN_BYTES = 4096


def make_tiers(options: Any, host_blocks: HostBlocks, fingerprint: Mapping[str, Any]) -> list[tuple[Tier, TierConfig]]:
    """Make the tiers that ``extra_config["tiers"]`` lists.

    Parameters
    ----------
    options : list of dict
        Per tier its ``type`` (a name, a class or ``"package.module:Class"``), the options of `TierConfig`, and the
        tier's own.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    fingerprint : mapping
        What makes blocks of one model and geometry different from another's.

    Raises
    ------
    ValueError
        A type is not known, or an option is missing, unknown or bad.
    """
    checked = _checked_tiers(options)
    tiers: list[tuple[Tier, TierConfig]] = []
    try:
        for found, rule, own in checked:
            tiers.append((found.from_config(own, host_blocks, fingerprint), rule))
    except BaseException:
        for tier, _ in tiers:
            tier.shutdown()
        raise
    return tiers


def check_tiers(options: Any) -> None:
    """Raise the ValueError of `make_tiers` that can be told before there is a pool."""
    _checked_tiers(options)


def _checked_tiers(options: Any) -> list[tuple[type[Tier], TierConfig, dict[str, Any]]]:
    if not isinstance(options, list | tuple) or not options or not all(isinstance(one, Mapping) for one in options):
        raise ValueError(f"tiers in extra_config must be a list of dicts, at least one, got {options!r}")
    checked = []
    for one in options:
        own = dict(one)
        if "type" not in own:
            raise ValueError(f"a tier needs a type, one of {', '.join(TIERS.names())}, got {own!r}")
        found = TIERS.resolve(own.pop("type"))
        if not issubclass(found, Tier):
            raise ValueError(f"tier {found.__name__} must be a Tier")
        rule = TierConfig(**{name: own.pop(name) for name in RULE_OPTIONS if name in own})
        checked.append((found, rule, own))
    return checked


class _Manager(TieredOffloadingManager):
    """A manager that owns its host blocks."""

    shared: SharedBlocks

    def what_if(self, policies: Any = None, capacities: Any = None) -> WhatIf:
        """Estimate for the host pool; see `CPUOffloadingManager.what_if`."""
        return self._host.what_if(policies, capacities)

    def shutdown(self) -> None:
        super().shutdown()
        self.shared.close()


def rank_bytes_of(num_bytes: int) -> int:
    """Return the bytes that one rank's part of a shared block takes: `num_bytes`, and what aligns the next part."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def tiered_manager(
    path: Path, block_bytes: int, tiers: Any, fingerprint: Mapping[str, Any], *, num_blocks: int, **options: Any
) -> TieredOffloadingManager:
    """Make a scheduler's manager, with its tiers, over a pool in shared memory that it owns until its `shutdown`.

    Parameters
    ----------
    path : Path
        The pool's file.
    block_bytes : int
        Bytes of one block of all ranks: `rank_bytes_of` times the ranks.
    tiers : list of dict
        As for `make_tiers`.
    fingerprint : mapping
        What makes blocks of one model and geometry different from another's.
    num_blocks : int
        Blocks of the pool.
    **options
        For `TieredOffloadingManager`.

    Raises
    ------
    ValueError
        The pool belongs to another engine, or a tier's options are bad.
    """
    shared = SharedBlocks(path, num_blocks, block_bytes, is_owner=True)
    opened: list[tuple[Tier, TierConfig]] = []
    try:
        opened = make_tiers(tiers, shared.array, fingerprint)
        manager = _Manager(num_blocks=num_blocks, tiers=opened, **options)
    except BaseException:
        for tier, _ in opened:
            tier.shutdown()
        shared.close()
        raise
    manager.shared = shared
    return manager


def worker_pool(
    path: Path, num_blocks: int, block_bytes: int, rank_bytes: int, rank: int, world_size: int
) -> tuple[SharedHostPool, SharedBlocks]:
    """Return one rank's part of the pool that `tiered_manager` owns, whichever of the two is made first, and the whole.

    Parameters
    ----------
    path : Path
        The pool's file.
    num_blocks : int
        Blocks of the pool.
    block_bytes : int
        Bytes of one block of this rank, at most `rank_bytes`.
    rank_bytes : int
        Bytes from one rank's part of a block to the next.
    rank, world_size : int
        Which part this is, of how many.

    Raises
    ------
    ValueError
        The file has another size.
    """
    from kvcache.transfer.shared_pool import SharedHostPool

    shared = SharedBlocks(path, num_blocks, rank_bytes * world_size, is_owner=False)
    pool = SharedHostPool(shared.mapping, num_blocks, block_bytes, rank * rank_bytes, rank_bytes * world_size)
    return pool, shared


class TieringOffloadingSpec(CPUOffloadingSpec):
    """Offload to host memory, and from there to tiers below it.

    Parameters
    ----------
    config : OffloadingConfig
        Its `extra_config` lists the ``tiers`` (see `make_tiers`), and may give ``pool_path``, a file in shared memory
        (default: in ``/dev/shm``, by the configuration), and ``lookup_deadline_s``. Every group needs its refs: they
        say how large a block is. The rest is as for `CPUOffloadingSpec`.

    Raises
    ------
    ValueError
        See `CPUOffloadingSpec`; or a tier's options are bad.
    """

    option_names = CPUOffloadingSpec.option_names | {"tiers", "pool_path", "lookup_deadline_s"}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._tiers = self.extra_config.get("tiers")
        _checked_tiers(self._tiers)
        sizes = [sum(ref.page_size_bytes for ref in group.refs) for group in config.groups]
        if not all(sizes):
            raise ValueError("tiers need the refs of every group, which say how large a block is")
        self._rank_bytes = rank_bytes_of(max(sizes) * self.block_size_factor)
        path = self._option("pool_path", str, None)
        self._pool_path = Path(path or f"/dev/shm/{PREFIX}{self._identity()}")
        deadline_s = self.extra_config.get("lookup_deadline_s", 5.0)
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not deadline_s > 0:
            raise ValueError(f"lookup_deadline_s in extra_config must be a number > 0, got {deadline_s!r}")
        self._deadline_s = deadline_s
        self._tiered: TieredOffloadingManager | None = None

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

    def get_manager(self) -> OffloadingManager:
        if self._tiered is None:
            self._tiered = tiered_manager(
                self._pool_path,
                self._rank_bytes * self.config.world_size,
                self._tiers,
                self.fingerprint,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                cache_policy=self._cache_policy,
                enable_events=self._enable_events,
                deadline_s=self._deadline_s,
                **self._manager_options,
            )
        return self._tiered

    def _make_handlers(self, kv_caches: CanonicalKVCaches) -> list[HandlerOf]:
        from kvcache.transfer.factory import cpu_gpu_handlers
        from kvcache.transfer.geometry import host_block_bytes
        from kvcache.transfer.guarded import GuardedHandler

        needed = host_block_bytes(kv_caches, self.block_size_factor)
        if needed > self._rank_bytes:
            raise ValueError(f"an offloaded block has {needed} bytes, the config's refs make it {self._rank_bytes}")
        config = self.config
        self.pool, shared = worker_pool(
            self._pool_path, self.num_blocks, needed, self._rank_bytes, config.rank, config.world_size
        )
        handlers = cpu_gpu_handlers(kv_caches, self.pool, self.block_size_factor, self._num_copy_threads)
        # A file of an engine that ended meanwhile is nobody's: what is copied there would never reach a tier.
        complaint = f"no manager owns the host blocks that this worker maps as {self._pool_path}; start it anew"
        store, load = (GuardedHandler(handler, shared.has_owner, complaint) for handler in handlers)
        return [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]

    def _identity(self) -> str:
        text = json.dumps([self.fingerprint, self._tiers, self.num_blocks], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:24]
