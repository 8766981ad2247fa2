"""vLLM's region and both managers in a real engine on the CPU: only the GPU worker is replaced, by ours."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcache.integrations.vllm import KVCacheOffloadingSpec
from kvcache.integrations.vllm.tiered import EngineRegion
from kvcache.integrations.vllm.worker import KVCacheOffloadingWorker
from kvcache.node.client import NodeManager
from kvcache.specs import CPULoadStoreSpec

# The owner of a loaded machine may answer late. Schedulers in processes of their own import this module, too.
NodeManager.__init__.__kwdefaults__["patience_s"] = 60.0


class Region(EngineRegion):
    """vLLM's region as our worker maps host blocks."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.mapping = self._region.mmap_obj

    def has_owner(self) -> bool:
        return True


class CPUWorker(KVCacheOffloadingWorker):
    """Our worker over vLLM's region and its specs."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return super().submit_store(job_id, src_spec, CPULoadStoreSpec(dst_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return super().submit_load(job_id, CPULoadStoreSpec(src_spec.block_ids), dst_spec, expedited)


class _WithCPUWorker:
    def get_worker(self: Any, kv_caches: Any) -> Any:
        if self._worker is None:
            self._worker = CPUWorker(
                kv_caches,
                self.num_chunks,
                self.blocks_per_chunk,
                shared=Region(self),
                rank=self.config.parallel.rank,
                rank_bytes=self.cpu_page_size_per_worker,
            )
        return self._worker


class TieringOnCPU(_WithCPUWorker, TieringOffloadingSpec):
    """vLLM's manager, ``secondary_tiers`` below it."""


class KVCacheOnCPU(_WithCPUWorker, KVCacheOffloadingSpec):
    """Our manager with ``"data_plane": "vllm"``."""


class NodeRegion(Region):
    """A region that vLLM has made over the pool of a node."""

    def __init__(self, region: Any) -> None:
        self._record, self._region = None, region
        self.array, self.mapping = np.asarray(region.create_kv_memoryview()), region.mmap_obj


class NodeOnCPU(KVCacheOffloadingSpec):
    """Our manager with ``"data_plane": "vllm"`` over the pool of a node."""

    def get_worker(self, kv_caches: Any) -> Any:
        def make(kv_caches: Any, blocks_per_chunk: int, num_cpu_chunks: int, mmap_region: Any) -> CPUWorker:
            place = {"rank": self.config.parallel.rank, "rank_bytes": self.cpu_page_size_per_worker}
            return CPUWorker(kv_caches, num_cpu_chunks, blocks_per_chunk, shared=NodeRegion(mmap_region), **place)

        if self._worker is None:
            with mock.patch("vllm.v1.kv_offload.cpu.spec.CPUOffloadingWorker", make):
                self._worker = self.create_worker(kv_caches)
        return self._worker
