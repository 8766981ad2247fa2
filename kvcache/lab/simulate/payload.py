"""Real bytes for a replay: blocks are generated from their keys, moved by the handlers, and compared after loading.

The "device" is memory beside the pool, far smaller than the working set, so every hit is a copy from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.lab.traces.requests import Closable, DataMismatchError, TransferFailedError
from kvcache.specs import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
)
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.worker import OffloadingWorker

if TYPE_CHECKING:
    import numpy.typing as npt

_WORD_BYTES = 8
_PATTERN_SEED = 20
# The bytes of one job: few enough to stay in the CPU's cache until they are compared.
_JOB_BYTES = 2 << 20


class VerifiedPayload(Closable):
    """Store blocks whose bytes follow from their keys, and compare every byte of every loaded block.

    A block is a fixed random pattern, xored with eight bytes of its key: a block in the wrong slot differs in every
    word, a torn block in a part. Loads land in slots that hold the bare pattern, so a missing copy is found as well.
    While one job is copied, the next is made or compared. `block_bytes` must be a multiple of 8.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if type(block_bytes) is not int or block_bytes < 1 or block_bytes % _WORD_BYTES:
            raise ValueError(f"block_bytes must be a multiple of {_WORD_BYTES}, got {block_bytes!r}")
        self.pool = HostPool(num_blocks, block_bytes)
        self.verified_blocks = 0
        self._job_blocks = max(1, _JOB_BYTES // block_bytes)
        # Two halves to store from, and two to load into.
        self._device = HostPool(4 * self._job_blocks, block_bytes, pin=False)
        self._words = self._device.array.view(np.uint64)
        random = np.random.default_rng(_PATTERN_SEED)
        self._pattern = random.integers(0, 1 << 64, block_bytes // _WORD_BYTES, dtype=np.uint64)
        self._words[:] = self._pattern
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(self._device.tensor, block_bytes)], [[CanonicalKVCacheRef(0, block_bytes)]]
        )
        store, load = cpu_gpu_handlers(caches, self.pool)
        self._worker = OffloadingWorker()
        self._worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
        self._worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)
        self._num_jobs = 0
        self._ended: dict[int, TransferResult] = {}
        self._moved = {"store": (0, 0.0), "load": (0, 0.0)}

    def close(self) -> None:
        """Shut down the handlers and release the memory."""
        self._worker.shutdown()
        self.pool.close()

    def store(self, keys: Sequence[bytes], spec: BlockIDsLoadStoreSpec) -> None:
        """Generate the blocks of `keys` on the device and store them where `spec` says."""
        seeds = _seeds(keys)
        jobs: list[int] = []
        for n, first in enumerate(range(0, len(keys), self._job_blocks)):
            if n >= 2:
                self._finish(jobs[n - 2], "store")
            part = seeds[first : first + self._job_blocks]
            rows = self._rows(n % 2, len(part))
            np.bitwise_xor(self._pattern, part[:, None], out=self._words[rows])
            jobs.append(self._submit(rows, spec.block_ids[first : first + len(part)], to_host=True))
        for job in jobs[-2:]:
            self._finish(job, "store")

    def load(self, keys: Sequence[bytes], spec: BlockIDsLoadStoreSpec) -> None:
        """Load blocks and compare their bytes.

        Raise DataMismatchError with the key of a wrong block, and TransferFailedError if a job fails.
        """
        seeds = _seeds(keys)
        step = self._job_blocks
        jobs: list[tuple[int, int]] = []
        for n, first in enumerate(range(0, len(keys), step)):
            rows = self._rows(2 + n % 2, min(step, len(keys) - first))
            jobs.append((first, self._submit(rows, spec.block_ids[first : first + step], to_host=False)))
            if n >= 1:
                self._compare(n - 1, jobs[n - 1], keys, seeds, spec)
        if jobs:
            self._compare(len(jobs) - 1, jobs[-1], keys, seeds, spec)

    def as_dict(self) -> dict[str, Any]:
        """Return bytes, rates (decimal GB/s while copying) and compared blocks for a report."""
        report: dict[str, Any] = {"verified_blocks": self.verified_blocks}
        for kind, (num_bytes, seconds) in self._moved.items():
            report[f"{kind}_bytes"] = num_bytes
            report[f"{kind}_gb_per_s"] = num_bytes / seconds / 1e9 if seconds else 0.0
        return report

    def _rows(self, quarter: int, count: int) -> slice:
        first = quarter * self._job_blocks
        return slice(first, first + count)

    def _submit(self, rows: slice, block_ids: npt.NDArray[np.int64], to_host: bool) -> int:
        self._num_jobs += 1
        device = GPULoadStoreSpec(np.arange(rows.start, rows.stop), [rows.stop - rows.start], [0])
        host = CPULoadStoreSpec(block_ids)
        self._worker.transfer_async(self._num_jobs, (device, host) if to_host else (host, device))
        return self._num_jobs

    def _finish(self, job_id: int, kind: str) -> None:
        self._worker.wait([job_id])
        self._ended.update((result.job_id, result) for result in self._worker.get_finished())
        result = self._ended.pop(job_id)
        if not result.success:
            raise TransferFailedError(f"a {kind} of blocks failed (job {job_id})")
        num_bytes, seconds = self._moved[kind]
        self._moved[kind] = (num_bytes + result.transfer_size, seconds + result.transfer_time)

    def _compare(
        self,
        n: int,
        job: tuple[int, int],
        keys: Sequence[bytes],
        seeds: npt.NDArray[np.uint64],
        spec: BlockIDsLoadStoreSpec,
    ) -> None:
        first, job_id = job
        self._finish(job_id, "load")
        part = seeds[first : first + self._job_blocks]
        words = self._words[self._rows(2 + n % 2, len(part))]
        # Reset correct blocks to the bare pattern for the next load.
        words ^= part[:, None]
        equal = words == self._pattern
        if not equal.all():
            row, word = divmod(int(np.argmin(equal)), equal.shape[1])
            found = int(words[row, word] ^ part[row])
            expected = int(self._pattern[word] ^ part[row])
            raise DataMismatchError(
                f"block {int(spec.block_ids[first + row])} of key {keys[first + row].hex()} differs from what was "
                f"stored at byte {word * _WORD_BYTES}: expected {expected:016x}, got {found:016x}"
            )
        self.verified_blocks += len(part)


def _seeds(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    heads = b"".join([key[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0") for key in keys])
    return np.frombuffer(heads, dtype=np.uint64)
