"""The built-in specs: blocks in host memory, with or without tiers below it.

A tier's threads read and write host blocks in the scheduler's process, and handlers copy them in the workers'. So with
tiers, the pool is a file in shared memory that all of them map. A block's bytes of all ranks lie side by side in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvcache.assembly.assemble import OffloadSettings, open_manager, read_pool_path, trace_worker
from kvcache.assembly.base import HandlerOf, OffloadingConfig, OffloadingSpec
from kvcache.control.manager import OffloadingManager
from kvcache.specs import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec
from kvcache.transfer.shared_file import PREFIX, SharedBlocks

if TYPE_CHECKING:
    from kvcache.transfer.host_pool import HostPool
    from kvcache.transfer.worker import OffloadingWorker


_ALIGN_BYTES = 4096


def rank_bytes_of(num_bytes: int) -> int:
    """Return the bytes that one rank's part of a shared block takes: `num_bytes`, and what aligns the next part."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


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

    option_names = (OffloadingSpec.option_names | OffloadSettings.keys()) - {"tiers"}

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

    def trace_worker(self, worker: OffloadingWorker, labels: Mapping[str, str] | None = None) -> None:
        trace_worker(self.settings, worker, labels)

    def _read_settings(self) -> OffloadSettings:
        return OffloadSettings.read({**self.extra_config, "tiers": None})

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
        from kvcache.transfer.geometry import host_block_bytes
        from kvcache.transfer.host_pool import HostPool

        block_bytes = max(1, host_block_bytes(kv_caches, self.block_size_factor))
        device = kv_caches.tensors[0].tensor.device if kv_caches.tensors else None
        self.pool = HostPool(self.num_blocks, block_bytes, device=device)
        store, load = cpu_gpu_handlers(kv_caches, self.pool, self.block_size_factor, self.settings.num_copy_threads)
        return [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]

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

    option_names = OffloadingSpec.option_names | OffloadSettings.keys()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._part_bytes = rank_bytes_of(self.rank_bytes())
        self._pool_path = read_pool_path(self.settings, f"{PREFIX}{self._identity()}")

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
        return OffloadSettings.read(self.extra_config)

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

    def _make_handlers(self, kv_caches: CanonicalKVCaches) -> list[HandlerOf]:
        from kvcache.transfer.shared_pool import shared_pool_handlers

        config = self.config
        shared = SharedBlocks(self._pool_path, self.num_blocks, self._part_bytes * config.world_size, is_owner=False)
        self.pool, store, load = shared_pool_handlers(
            kv_caches, shared, config.rank, self._part_bytes, self.block_size_factor, self.settings.num_copy_threads
        )
        return [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]

    def _identity(self) -> str:
        text = json.dumps([self.fingerprint, self.extra_config["tiers"], self.num_blocks], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:24]
