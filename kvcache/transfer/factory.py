"""Makes the two handlers for an engine's tensors, in host memory or on an accelerator."""

from __future__ import annotations

from kvcache.specs import CanonicalKVCaches
from kvcache.transfer.base import OffloadingHandler
from kvcache.transfer.cpu import CPUCopyHandler
from kvcache.transfer.geometry import KVGeometry
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.staged import STAGING_BYTES, StagedCopyHandler
from kvcache.transfer.streams import DeviceStream


def cpu_gpu_handlers(
    kv_caches: CanonicalKVCaches,
    pool: HostPool,
    block_size_factor: int = 1,
    num_threads: int | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> tuple[OffloadingHandler, OffloadingHandler]:
    """Make the two handlers between an engine's KV cache and a host pool.

    Return the handler of stores (``"GPU"`` to ``"CPU"``) and that of loads. The tensors of `kv_caches` are all on
    one device, and the blocks of `pool` hold `block_size_factor` device blocks each. In host memory, at most
    `num_threads` threads copy in each direction. On an accelerator, `staging_bytes` of device memory per direction
    gather layers. ValueError: a tensor's dtype, shape, strides or device is wrong, a ref does not fit its tensor, or a
    block does not fit the pool.
    """
    geometry = KVGeometry(kv_caches, pool, block_size_factor)
    return (_handler(geometry, True, num_threads, staging_bytes), _handler(geometry, False, num_threads, staging_bytes))


def load_handler(
    kv_caches: CanonicalKVCaches, pool: HostPool, block_size_factor: int = 1, num_threads: int | None = None
) -> OffloadingHandler:
    """Make one more handler of loads, whose jobs do not wait for those of `cpu_gpu_handlers`."""
    return _handler(KVGeometry(kv_caches, pool, block_size_factor), False, num_threads, STAGING_BYTES)


def _handler(geometry: KVGeometry, to_host: bool, num_threads: int | None, staging_bytes: int) -> OffloadingHandler:
    if geometry.device.type == "cpu":
        return CPUCopyHandler(geometry, to_host, num_threads)
    return StagedCopyHandler(geometry, to_host, DeviceStream(geometry.device), staging_bytes)
