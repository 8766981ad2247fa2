"""vLLM's own copies to and from a device, which ``"data_plane": "vllm"`` uses."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from kvcache.specs import CanonicalKVCaches, GPULoadStoreSpec, TransferResult
from kvcache.transfer.base import OffloadingHandler, TransferSpec


class EngineHandler(OffloadingHandler):
    """vLLM's `CPUOffloadingWorker`, for both directions, over tensors without padding and pinned memory of its own.

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

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        is_store = isinstance(spec[0], GPULoadStoreSpec)
        submit = self._worker.submit_store if is_store else self._worker.submit_load
        return bool(submit(job_id, *map(self._spec, spec)))

    def _spec(self, spec: Any) -> Any:
        if isinstance(spec, GPULoadStoreSpec):
            return self._device_spec(spec.block_ids, spec.group_sizes, spec.block_indices)
        return self._host_spec(spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        # vLLM may leave size, time and media out.
        return [TransferResult(one.job_id, one.success, 0, 0.0, ("", "")) for one in self._worker.get_finished()]

    def wait(self, job_ids: Iterable[int]) -> None:
        self._worker.wait(set(job_ids))

    def shutdown(self, wait: bool = True) -> None:
        self._worker.shutdown()
