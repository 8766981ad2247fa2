"""The built-in spec: blocks in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcache.control.backend import parsed_bytes
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.control.manager import OffloadingManager
from kvcache.registry import POLICIES
from kvcache.spec.base import HandlerOf, OffloadingSpec
from kvcache.spec.config import OffloadingConfig, check_size
from kvcache.specs import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec

if TYPE_CHECKING:
    from kvcache.transfer.host_pool import HostPool

_MANAGER_OPTIONS = frozenset({"store_threshold", "max_tracker_size", "what_if", "retention_share"})


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
            check_size("num_copy_threads", self._num_copy_threads)
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
        from kvcache.transfer.factory import cpu_gpu_handlers
        from kvcache.transfer.geometry import host_block_bytes
        from kvcache.transfer.host_pool import HostPool

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
            check_size("num_cpu_blocks", num_blocks)
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
