"""vLLM's own copies to and from a device, which ``"data_plane": "vllm"`` uses."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

from kvcache.specs import CanonicalKVCaches, GPULoadStoreSpec


class EngineWorker:
    """vLLM's `CPUOffloadingWorker` over tensors without padding, with pinned memory of its own.

    ImportError if vLLM is not installed.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, num_host_blocks: int, block_size_factor: int = 1) -> None:
        base: Any = import_module("vllm.v1.kv_offload.base")
        tensors = [base.CanonicalKVCacheTensor(one.tensor, one.page_size_bytes) for one in kv_caches.tensors]
        refs = [
            [base.CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in group]
            for group in kv_caches.group_data_refs
        ]
        gpu_worker: Any = import_module("vllm.v1.kv_offload.cpu.gpu_worker")
        caches = base.CanonicalKVCaches(tensors, refs)
        self._worker = gpu_worker.CPUOffloadingWorker(caches, block_size_factor, num_host_blocks)
        self._device_spec: Any = base.GPULoadStoreSpec
        self._host_spec: Any = import_module("vllm.v1.kv_offload.cpu.common").CPULoadStoreSpec
        self._job_ids = itertools.count()

    def transfer(self, source: Any, destination: Any) -> None:
        """Copy and wait; RuntimeError if vLLM reports a failure."""
        job_id = next(self._job_ids)
        is_store = isinstance(source, GPULoadStoreSpec)
        submit = self._worker.submit_store if is_store else self._worker.submit_load
        is_taken = submit(job_id, self._spec(source), self._spec(destination))
        self._worker.wait({job_id})
        if not is_taken or not all(result.success for result in self._worker.get_finished()):
            raise RuntimeError("a transfer of vLLM's failed")

    def _spec(self, spec: Any) -> Any:
        if isinstance(spec, GPULoadStoreSpec):
            return self._device_spec(spec.block_ids, spec.group_sizes, spec.block_indices)
        return self._host_spec(spec.block_ids)

    def close(self) -> None:
        """End the copies."""
        self._worker.shutdown()
