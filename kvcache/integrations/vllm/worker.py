"""The worker's half: runs vLLM's jobs on our handlers and returns their results.

vLLM cannot handle a failed job: it asserts that every submission is accepted and every result a success. A failed copy
is logged and reported as failed. vLLM then ends, which is better than serving bytes that never arrived.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker

from kvcache.specs import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult
from kvcache.transfer.factory import cpu_gpu_handlers, load_handler
from kvcache.transfer.geometry import device_of, host_block_bytes
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.shared_file import SharedBlocks
from kvcache.transfer.shared_pool import SharedHostPool
from kvcache.transfer.worker import OffloadingWorker as TransferWorker

# vLLM's log configuration covers loggers below its own name only.
logger = init_logger(f"vllm.{__name__}")


class KVCacheOffloadingWorker(OffloadingWorker):
    """Copy blocks for one rank of the engine; `kv_caches` is vLLM's description, whose fields are those of ours.

    With tiers, `shared` holds the engine's host blocks, which the worker closes, and `rank` and `rank_bytes` are this
    worker's part of each. Without, the worker allocates its own. If the engine runs on the CPU, at most
    `num_copy_threads` threads copy in each direction. ValueError: the pool does not fit into host memory, or a tensor
    is not as vLLM specifies it.
    """

    _expedited: TransferWorker | None = None

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        num_blocks: int,
        blocks_per_chunk: int,
        num_copy_threads: int | None = None,
        shared: SharedBlocks | None = None,
        rank: int = 0,
        rank_bytes: int = 0,
    ) -> None:
        self._shared = shared
        self._pool: HostPool
        if shared is None:
            block_bytes = host_block_bytes(kv_caches, blocks_per_chunk)
            self._pool = HostPool(num_blocks, block_bytes, device=device_of(kv_caches))
        else:
            self._pool = SharedHostPool(kv_caches, shared, rank, rank_bytes, blocks_per_chunk)
        store, load = cpu_gpu_handlers(kv_caches, self._pool, blocks_per_chunk, num_copy_threads)
        self.transfers = TransferWorker()
        self.transfers.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
        self.transfers.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)
        self._make_load_handler = partial(load_handler, kv_caches, self._pool, blocks_per_chunk, num_copy_threads)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: CPULoadStoreSpec) -> bool:
        return self._submit(self.transfers, job_id, device_spec(src_spec), dst_spec)

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: Any, expedited: bool = False) -> bool:
        if expedited and self._expedited is None:
            # A step waits for these loads, so they have a queue of their own. Few engines use them.
            self._expedited = TransferWorker()
            self._expedited.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, self._make_load_handler())
        transfers = self._expedited if expedited and self._expedited is not None else self.transfers
        return self._submit(transfers, job_id, src_spec, device_spec(dst_spec))

    def _submit(self, transfers: TransferWorker, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        try:
            if transfers.transfer_async(job_id, (src_spec, dst_spec)):
                return True
            reason = "the worker was shut down, or no scheduler on this node owns its host blocks (tiers need one node)"
        except ValueError as error:
            reason = str(error)
        logger.critical(
            "kvcache cannot copy job %d (%s to %s); vLLM ends, because it cannot handle a failed copy: %s",
            job_id,
            src_spec.medium(),
            dst_spec.medium(),
            reason,
        )
        return False

    def get_finished(self) -> list[TransferResult]:
        results = [result for transfers in self._each() for result in transfers.get_finished()]
        for result in results:
            if not result.success:
                logger.critical(
                    "kvcache failed to copy job %d (%s to %s); vLLM ends, because it cannot handle a failed copy",
                    result.job_id,
                    *result.transfer_type,
                )
        return results

    def wait(self, job_ids: set[int]) -> None:
        for transfers in self._each():
            transfers.wait(job_ids)

    def _each(self) -> list[TransferWorker]:
        return [self.transfers] if self._expedited is None else [self._expedited, self.transfers]

    def shutdown(self) -> None:
        for transfers in self._each():
            transfers.shutdown(wait=False)
        self._pool.close()
        if self._shared is not None:
            self._shared.close()


def device_spec(spec: Any) -> GPULoadStoreSpec:
    """Convert vLLM's spec of device blocks to ours."""
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)
