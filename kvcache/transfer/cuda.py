"""The handler for device memory: layers are gathered on the device, so that what crosses the link is whole blocks.

A copy across the link costs some microseconds to start, whatever its size. One per block and layer would cost more
than the bytes; gathering runs at the speed of device memory, which is not what is short.
"""

from __future__ import annotations

import bisect
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvcache.specs import CPULoadStoreSpec, GPULoadStoreSpec, TransferResult
from kvcache.transfer._native.plan import Geometry
from kvcache.transfer.base import OffloadingHandler, TransferSpec, check_job_id, checked_specs

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.transfer.geometry import KVGeometry
    from kvcache.transfer.streams import DeviceStream, StreamEvent

_log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
_DIRECT_BLOCKS = 4096
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(slots=True)
class _Job:
    job_id: int
    num_bytes: int
    start: StreamEvent | None = None
    end: StreamEvent | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Device blocks of one group that go together, and the host blocks that they share."""

    group_idx: int
    blocks: slice
    device_ids: npt.NDArray[np.int64]
    first_index: int
    host_ids: npt.NDArray[np.int64]


class StagedCopyHandler(OffloadingHandler):
    """Copies between tensors in device memory and the pool, on a stream of its own.

    Parameters
    ----------
    geometry : KVGeometry
        The tensors, the pool, and where the bytes of a block lie in both.
    to_host : bool
        Whether blocks go to the pool (a store) or come from it (a load).
    stream : DeviceStream
        Where this direction's copies run.
    staging_bytes : int
        Device memory for gathering layers. Where so much is not free, half of it, and so on; where not even one block
        fits, layers are copied one by one, with a warning.

    Notes
    -----
    A job waits for everything the engine had queued on its current stream when it was submitted: a store then reads
    what was computed, and a load does not overwrite what is still read. Once `get_finished` has told a load's end,
    work that the engine queues on any stream sees its bytes. Between the submission and the end of a job the engine
    itself must neither write the blocks that a store reads nor read the blocks that a load writes.
    """

    def __init__(
        self, geometry: KVGeometry, to_host: bool, stream: DeviceStream, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self._geometry = geometry
        self._to_host = to_host
        self._stream = stream
        self._jobs: dict[int, _Job] = {}
        self._closed = False
        compiled = geometry.compiled
        num_groups = len(geometry.kv_caches.group_data_refs)
        self._part_bytes = [compiled.part_bytes(i) for i in range(num_groups)]
        self._segments = [geometry.segments(i) for i in range(num_groups)]
        # Blocks of a group whose layers lie side by side already are whole.
        gathered = [n for n, parts in zip(self._part_bytes, self._segments, strict=True) if len(parts) > 1]
        self._staging: torch.Tensor | None = None
        if gathered:
            # Of the stream's own memory: what the allocator hands out elsewhere may still be in use there.
            with stream.queueing():
                self._staging = _allocate(staging_bytes, max(gathered), stream.device)
        # The staging buffer as a device of its own: in it, the blocks of a chunk follow each other.
        self._staged = Geometry(
            [(0, 0x7FFFFFFF, max(n, 1)) for n in self._part_bytes],
            [[(i, n)] if n else [] for i, n in enumerate(self._part_bytes)],
            geometry.pool.address,
            geometry.pool.stride_bytes,
            geometry.pool.num_blocks,
            geometry.block_size_factor,
        )
        self._storages = geometry.storages()
        self._bases = [base for base, _ in self._storages]

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if self._closed:
            return False
        check_job_id(job_id, self._jobs)
        device, host = checked_specs(spec, self._to_host)
        num_bytes = self._geometry.compiled.check(
            device.block_ids, device.group_sizes, device.block_indices, host.block_ids
        )
        job = _Job(job_id, num_bytes, failed=self._geometry.is_lost())
        self._jobs[job_id] = job
        try:
            if not job.failed:
                self._stream.wait_for_compute()
                # Tensors that an engine made in inference mode can be written to in that mode only.
                with self._stream.queueing(), torch.inference_mode():
                    job.start = self._stream.record_event()
                    ids = self._sent(device)
                    for chunk in self._chunks(device, host):
                        self._queue(chunk, ids)
        except Exception:
            _log.exception("transfer %s failed while it was queued", job_id)
            job.failed = True
        finally:
            # What was queued before a fault still runs: the job has ended when that has.
            job.end = self._end_event(job)
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        kind = ("GPU", "CPU") if self._to_host else ("CPU", "GPU")
        for job in self._jobs.values():
            seconds = 0.0
            try:
                if job.end is not None and not job.end.is_done():
                    break
                if job.start is not None and job.end is not None:
                    seconds = job.end.elapsed_s(job.start)
            except Exception:
                _log.exception("transfer %s failed on the device", job.job_id)
                job.failed = True
            results.append(
                TransferResult(job.job_id, not job.failed, 0 if job.failed else job.num_bytes, seconds, kind)
            )
        for result in results:
            del self._jobs[result.job_id]
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        # A copy: another thread may take finished jobs meanwhile.
        for job in reversed(list(self._jobs.values())):
            if job.job_id in wanted and job.end is not None:
                try:
                    job.end.wait()
                except Exception:
                    _log.exception("transfer %s failed on the device", job.job_id)
                    job.failed = True
                return

    def shutdown(self, wait: bool = True) -> None:
        # What is queued on a device cannot be cancelled: abandoned jobs run on, and end as failed.
        self._closed = True
        for job in list(self._jobs.values()):
            job.failed |= not wait
        self.wait(self._jobs)

    def __del__(self) -> None:
        # Memory that goes with the handler would be handed on while the device still copies.
        if getattr(self, "_jobs", None):
            self.wait(self._jobs)

    def _end_event(self, job: _Job) -> StreamEvent | None:
        if job.start is None:
            return None
        try:
            return self._stream.record_event()
        except Exception:
            _log.exception("transfer %s failed while it was queued", job.job_id)
            job.failed = True
            return None

    def _chunks(self, device: GPULoadStoreSpec, host: CPULoadStoreSpec) -> Iterator[_Chunk]:
        factor = self._geometry.block_size_factor
        first_device = first_host = 0
        for group_idx, (size, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            skip = index % factor
            step = self._chunk_blocks(group_idx)
            for first in range(0, size, step):
                n = min(step, size - first)
                low, high = (skip + first) // factor, -(-(skip + first + n) // factor)
                blocks = slice(first_device + first, first_device + first + n)
                yield _Chunk(
                    group_idx,
                    blocks,
                    device.block_ids[blocks],
                    skip + first,
                    host.block_ids[first_host + low : first_host + high],
                )
            first_device += size
            first_host += -(-(skip + size) // factor) if size else 0

    def _is_staged(self, group_idx: int) -> bool:
        return self._staging is not None and len(self._segments[group_idx]) > 1

    def _chunk_blocks(self, group_idx: int) -> int:
        if self._staging is None or not self._is_staged(group_idx):
            return _DIRECT_BLOCKS
        return self._staging.numel() // self._part_bytes[group_idx]

    def _sent(self, device: GPULoadStoreSpec) -> torch.Tensor | None:
        """Return a job's device blocks on the device, once for all of its chunks; None where no group is staged."""
        if any(size and self._is_staged(group_idx) for group_idx, size in enumerate(device.group_sizes)):
            return self._stream.send(device.block_ids)
        return None

    def _queue(self, chunk: _Chunk, sent: torch.Tensor | None) -> None:
        if self._staging is None or sent is None or not self._is_staged(chunk.group_idx):
            self._move_directly(chunk)
            return
        ids = sent[chunk.blocks]
        num_bytes = len(chunk.device_ids) * self._part_bytes[chunk.group_idx]
        staging = self._staging[:num_bytes].view(len(chunk.device_ids), -1)
        if self._to_host:
            for layer, offset in self._segments[chunk.group_idx]:
                word, source, target = _words(layer, staging, offset)
                torch.index_select(source.view(word), 0, ids, out=target.view(word))
            self._cross(chunk)
        else:
            self._cross(chunk)
            for layer, offset in self._segments[chunk.group_idx]:
                word, target, source = _words(layer, staging, offset)
                target.view(word).index_copy_(0, ids, source.view(word))

    def _cross(self, chunk: _Chunk) -> None:
        """Queue the copies between the staging buffer and the pool: one per stretch of adjacent host blocks."""
        assert self._staging is not None
        order = np.arange(len(chunk.device_ids))
        for host, offset, n in self._runs(self._staged, chunk, order):
            self._copy(host, self._staging[offset : offset + n])

    def _move_directly(self, chunk: _Chunk) -> None:
        for host, address, n in self._runs(self._geometry.compiled, chunk, chunk.device_ids):
            base, storage = self._storages[bisect.bisect_right(self._bases, address) - 1]
            self._copy(host, storage[address - base : address - base + n])

    def _runs(self, geometry: Geometry, chunk: _Chunk, device_ids: npt.NDArray[np.int64]) -> list[list[int]]:
        sizes, indices = [0] * len(self._part_bytes), [0] * len(self._part_bytes)
        sizes[chunk.group_idx], indices[chunk.group_idx] = len(device_ids), chunk.first_index
        runs: list[list[int]] = geometry.runs(device_ids, sizes, indices, chunk.host_ids).tolist()
        return runs

    def _copy(self, host_address: int, device: torch.Tensor) -> None:
        first = host_address - self._geometry.pool.address
        for host in self._geometry.pool.pieces(first, device.numel()):
            part, device = device[: host.numel()], device[host.numel() :]
            if self._to_host:
                host.copy_(part, non_blocking=True)
            else:
                part.copy_(host, non_blocking=True)


def _words(layer: torch.Tensor, staging: torch.Tensor, offset: int) -> tuple[torch.dtype, torch.Tensor, torch.Tensor]:
    """Return one layer's bytes in the tensor and in the staging buffer, and the widest word both can be viewed as."""
    part = staging[:, offset : offset + layer.shape[1]]
    word = math.gcd(
        8, layer.shape[1], layer.stride(0), layer.storage_offset(), layer.data_ptr(), staging.shape[1], offset
    )
    return _WORDS[word], layer, part


def _allocate(num_bytes: int, part_bytes: int, device: torch.device) -> torch.Tensor | None:
    while num_bytes >= part_bytes:
        try:
            return torch.empty(num_bytes, dtype=torch.int8, device=device)
        except torch.OutOfMemoryError:
            num_bytes //= 2
    warnings.warn(
        f"no device memory for a staging buffer of {part_bytes} bytes or more: layers are copied one by one, "
        "transfers will be slower",
        RuntimeWarning,
        stacklevel=4,
    )
    return None
