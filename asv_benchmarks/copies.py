"""Copy rates between an engine's tensors and the host pool, and the fixed cost of a transfer."""

from time import perf_counter

import numpy as np

from kvcache.lab.bench.copy import CopyBench
from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer.cpu import CPUCopyHandler
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import KVGeometry
from kvcache.transfer.host_pool import HostPool

JOB_BYTES = 64 << 20


class Copy:
    """Up to 1,000 blocks, as seconds and as a ratio to one large copy of as many bytes."""

    params = (
        [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20],
        ["store", "load"],
        ["scattered", "contiguous"],
    )
    param_names = ("block_bytes", "direction", "layout")

    def setup(self, block_bytes, direction, layout):
        self.bench = CopyBench(block_bytes, min(1000, JOB_BYTES // block_bytes))
        ways = self.bench.ways(direction, layout)
        self.one_thread, self.two_threads = ways["kvcache, 1 thread"], ways["kvcache, 2 threads"]
        self.one_copy = self.bench.one_copy(direction)

    def teardown(self, block_bytes, direction, layout):
        self.bench.close()

    def time_one_large_copy(self, block_bytes, direction, layout):
        self.one_copy()

    def time_one_thread(self, block_bytes, direction, layout):
        self.one_thread()

    def time_two_threads(self, block_bytes, direction, layout):
        self.two_threads()

    def track_ratio_one_thread(self, block_bytes, direction, layout):
        return self._ratio(self.one_thread)

    def track_ratio_two_threads(self, block_bytes, direction, layout):
        return self._ratio(self.two_threads)

    def _ratio(self, way):
        pairs = [(self._seconds(self.one_copy), self._seconds(way)) for _ in range(5)]
        return min(one for one, _ in pairs) / min(other for _, other in pairs)

    def _seconds(self, way):
        started = perf_counter()
        way()
        return perf_counter() - started


class Transfer:
    """The caller's cost of a job that moves almost no bytes: 1,000 blocks of 32 layers."""

    num_blocks = 1000
    num_layers = 32

    def setup(self):
        pages = [HostPool(2 * self.num_blocks, 16, pin=False).tensor for _ in range(self.num_layers)]
        kv_caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(page, 16) for page in pages],
            [[CanonicalKVCacheRef(i, 8) for i in range(self.num_layers)]],
        )
        pool = HostPool(2 * self.num_blocks, 8 * self.num_layers, pin=False)
        self.geometry = KVGeometry(kv_caches, pool)
        self.at_once = CPUCopyHandler(self.geometry, True, 1, inline_bytes=1 << 30)
        self.queued, _ = cpu_gpu_handlers(kv_caches, pool, num_threads=1)
        rng = np.random.default_rng(0)
        ids = [rng.permutation(2 * self.num_blocks)[: self.num_blocks] for _ in range(2)]
        self.spec = (GPULoadStoreSpec(ids[0], [self.num_blocks], [0]), CPULoadStoreSpec(ids[1]))
        self.one_block = (GPULoadStoreSpec([5], [1], [0]), CPULoadStoreSpec([7]))

    def teardown(self):
        self.queued.shutdown()

    def time_whole_job(self):
        self.at_once.transfer_async(0, self.spec)
        self.at_once.get_finished()

    def time_one_block(self):
        self.at_once.transfer_async(0, self.one_block)
        self.at_once.get_finished()

    def time_queue_and_wait(self):
        self.queued.transfer_async(0, self.spec)
        self.queued.wait([0])
        self.queued.get_finished()

    def time_runs(self):
        device, host = self.spec
        self.geometry.compiled.runs(device.block_ids, device.group_sizes, device.block_indices, host.block_ids)
