"""The worker's half: vLLM's jobs to our handlers, and their ends back.

vLLM knows no failed job: it asserts that every submission is taken and every result a success. So a copy that fails is
told as it is, after a line that says why, and the engine ends: better than bytes that never arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker

from kvcache.assembly.assemble import OffloadSettings, trace_worker
from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
)
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import host_block_bytes
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.worker import OffloadingWorker as TransferWorker

# vLLM shows what is logged below its own name.
logger = init_logger(f"vllm.{__name__}")


class KVCacheOffloadingWorker(OffloadingWorker):
    """Copy blocks for one rank of the engine.

    Parameters
    ----------
    kv_caches : vllm.v1.kv_offload.base.CanonicalKVCaches
        The rank's KV cache; its tensors are shared, not copied.
    num_blocks : int
        Blocks of the host pool.
    blocks_per_chunk : int
        Device blocks in one offloaded block.
    num_copy_threads : int, optional
        At most so many per direction, where the engine runs on the CPU; None: by the CPUs.
    make_pool : callable, optional
        Makes the pool from the bytes of one block; None: memory of the worker's own.

    Raises
    ------
    ValueError
        The pool does not fit into host memory, or a tensor is not what vLLM promises.
    """

    def __init__(
        self,
        kv_caches: Any,
        num_blocks: int,
        blocks_per_chunk: int,
        num_copy_threads: int | None = None,
        make_pool: Callable[[int], HostPool] | None = None,
    ) -> None:
        self.kv_caches = canonical_kv_caches(kv_caches)
        block_bytes = host_block_bytes(self.kv_caches, blocks_per_chunk)
        self._pool = HostPool(num_blocks, block_bytes) if make_pool is None else make_pool(block_bytes)
        store, load = cpu_gpu_handlers(self.kv_caches, self._pool, blocks_per_chunk, num_copy_threads)
        self._transfers = TransferWorker()
        self._transfers.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
        self._transfers.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: CPULoadStoreSpec) -> bool:
        return self._submit(job_id, device_spec(src_spec), dst_spec)

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: Any, expedited: bool = False) -> bool:
        return self._submit(job_id, src_spec, device_spec(dst_spec))

    def trace(self, settings: OffloadSettings, labels: Mapping[str, str]) -> None:
        """Follow copies where `exporters` say so, until `shutdown`.

        Parameters
        ----------
        settings : OffloadSettings
            What the user wrote.
        labels : mapping of str to str
            What tells this worker from others.
        """
        trace_worker(settings, self._transfers, labels)

    def refusal(self) -> str:
        """Return why no job can be taken; empty if it can."""
        return ""

    def _submit(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        reason = self.refusal()
        try:
            if not reason and self._transfers.transfer_async(job_id, (src_spec, dst_spec)):
                return True
            reason = reason or "it has been shut down"
        except ValueError as error:
            reason = str(error)
        logger.critical(
            "kvcache cannot copy job %d (%s to %s), and vLLM has no way to go on without: %s",
            job_id,
            src_spec.medium(),
            dst_spec.medium(),
            reason,
        )
        return False

    def get_finished(self) -> list[TransferResult]:
        results = self._transfers.get_finished()
        for result in results:
            if not result.success:
                logger.critical(
                    "kvcache lost job %d (%s to %s): its bytes did not arrive, and vLLM has no way to go on without",
                    result.job_id,
                    *result.transfer_type,
                )
        return results

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        self._transfers.shutdown(wait=False)
        self._pool.close()


def device_spec(spec: Any) -> GPULoadStoreSpec:
    """Return vLLM's device blocks in our words."""
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)


def canonical_kv_caches(kv_caches: Any) -> CanonicalKVCaches:
    """Return vLLM's KV cache in our words; tensors are shared, not copied."""
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(entry.tensor, entry.page_size_bytes) for entry in kv_caches.tensors],
        group_data_refs=[
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )
