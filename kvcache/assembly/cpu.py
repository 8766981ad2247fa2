"""The built-in spec: blocks in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvcache.assembly.assemble import OffloadSettings, open_manager, trace_worker
from kvcache.assembly.base import HandlerOf, OffloadingSpec
from kvcache.assembly.config import OffloadingConfig
from kvcache.control.manager import OffloadingManager
from kvcache.specs import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec

if TYPE_CHECKING:
    from kvcache.transfer.host_pool import HostPool
    from kvcache.transfer.worker import OffloadingWorker


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
