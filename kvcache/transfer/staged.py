"""The handler for device memory: gathers layers on the device, so that whole blocks cross the link.

Starting a copy over the link takes microseconds, whatever its size. One copy per block and layer would spend more
time on starting than on the bytes; gathering runs at the speed of device memory, which is not scarce.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Iterable
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
    from kvcache.transfer.streams import DeviceStream

    Ints = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
_CHUNK_BLOCKS = 4096
# One block's layers cross the link as they are: gathering needs as many calls, and the ids on the device.
_UNSTAGED_BLOCKS = 1
# While a graph is captured in another thread, asking for an event may raise although the copies run. A device that
# raises for so long is lost, and copies nothing any more.
_LOST_S = 10.0
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(slots=True)
class _Job:
    job_id: int
    num_bytes: int
    failed: bool = False
    start: torch.Event | None = None  # None: nothing is queued
    end: torch.Event | None = None  # None: not recorded yet


class _Gather:
    """Copies all layers of a group between their tensors and the staging buffer, one call a layer.

    All layers use one word, the widest one whose size divides every offset, stride and length.
    """

    def __init__(self, segments: list[tuple[torch.Tensor, int]], part_bytes: int, staging: torch.Tensor) -> None:
        sizes = [part_bytes, staging.data_ptr()]
        for layer, offset in segments:
            sizes += [layer.shape[1], layer.stride(0), int(layer.storage_offset()), layer.data_ptr(), offset]
        word = _WORDS[math.gcd(8, *sizes)]
        self.staging = staging
        self.capacity = min(_CHUNK_BLOCKS, staging.numel() // part_bytes)
        self._layers = [layer.view(word) for layer, _ in segments]
        self._widths = [layer.shape[1] for layer in self._layers]
        num_words = part_bytes // word.itemsize
        self._rows = staging[: self.capacity * part_bytes].view(word).view(self.capacity, num_words)

    def queue(self, ids: torch.Tensor, into_staging: bool) -> None:
        """Queue the copies of the device blocks `ids`, which lie one after the other in the staging buffer."""
        parts = self._rows[: len(ids)].split_with_sizes(self._widths, 1)
        for layer, part in zip(self._layers, parts, strict=True):
            if into_staging:
                torch.index_select(layer, 0, ids, out=part)
            else:
                layer.index_copy_(0, ids, part)


class StagedCopyHandler(OffloadingHandler):
    """Copies between tensors in device memory and the pool, on a stream of its own.

    Blocks go to the pool if `to_host`, and come from it otherwise. Layers are gathered in `staging_bytes` of device
    memory. If the device has less, the buffer shrinks by halves; below one block, layers are copied one by one, with a
    warning.

    A job waits for all work on the engine's current stream at submission: a store reads finished results, and a load
    does not overwrite blocks that are still read. After `get_finished` has returned a load, work on any stream sees
    its bytes. Until a job has ended, the engine must not write blocks that a store reads, nor read blocks that a load
    writes. Every method may be called in any thread.
    """

    def __init__(
        self, geometry: KVGeometry, to_host: bool, stream: DeviceStream, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self._geometry = geometry
        self._to_host = to_host
        self._stream = stream
        # Held while work is queued, too: a job is in the table only once its end is recorded.
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._closed = False
        self._raises_since: float | None = None
        segments = geometry.segments()
        part_bytes = [sum(layer.shape[1] for layer, _ in pieces) for pieces in segments]
        # A group whose layers lie side by side is copied without staging.
        layered = [i for i, pieces in enumerate(segments) if len(pieces) > 1]
        self._gathers: dict[int, _Gather] = {}
        if layered:
            # The allocator ties memory to a stream: elsewhere its last owner may still use it.
            with stream.queueing():
                staging = _allocate(staging_bytes, max(part_bytes[i] for i in layered), stream.device)
            if staging is not None:
                self._gathers = {i: _Gather(segments[i], part_bytes[i], staging) for i in layered}
        # The staging buffer as a device of its own, in which the blocks of a chunk follow each other.
        self._staged = Geometry(
            [(0, 0x7FFFFFFF, max(n, 1)) for n in part_bytes],
            [[(i, n)] if n else [] for i, n in enumerate(part_bytes)],
            geometry.pool.address,
            geometry.pool.stride_bytes,
            geometry.pool.num_blocks,
            geometry.block_size_factor,
        )
        self._storages = geometry.storages()
        self._bases = np.array([base for base, _ in self._storages], np.int64)

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        device, host = checked_specs(spec, self._to_host)
        with self._lock:
            if self._closed or not self._geometry.pool.has_owner():
                return False
            check_job_id(job_id, self._jobs)
            num_bytes = self._geometry.compiled.check(
                device.block_ids, device.group_sizes, device.block_indices, host.block_ids
            )
            job = _Job(job_id, num_bytes, failed=self._geometry.is_lost())
            try:
                if not job.failed:
                    self._stream.wait_for_compute()
                    # Tensors made in inference mode can be written in that mode only.
                    with self._stream.queueing(), torch.inference_mode():
                        job.start = self._stream.record_event()
                        self._queue(device, host)
                    job.end = self._stream.record_event()
            except Exception:
                _log.exception("transfer %s failed while it was queued", job_id)
                job.failed = True
            finally:
                self._jobs[job_id] = job
            self._geometry.pool.note_use(host.block_ids)
        return True

    def get_finished(self) -> list[TransferResult]:
        kind = ("GPU", "CPU") if self._to_host else ("CPU", "GPU")
        results = []
        with self._lock:
            for job in self._jobs.values():
                if not self._has_ended(job):
                    break
                num_bytes = 0 if job.failed else job.num_bytes
                results.append(TransferResult(job.job_id, not job.failed, num_bytes, _seconds(job), kind))
            for result in results:
                del self._jobs[result.job_id]
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        waited_ids = set(job_ids)
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.job_id in waited_ids and job.start is not None]
        while jobs:
            # The stream runs jobs in order: the last one ends last.
            try:
                with self._lock:
                    end = self._end_of(jobs[-1])
                end.synchronize()
                return
            except Exception as error:
                if self._is_lost(error):
                    return
                time.sleep(0.001)

    def shutdown(self, wait: bool = True) -> None:
        # Work queued on a device cannot be cancelled: abandoned jobs run to their end, and are reported as failed.
        with self._lock:
            self._closed = True
            for job in self._jobs.values():
                job.failed |= not wait
            job_ids = list(self._jobs)
        self.wait(job_ids)

    def __del__(self) -> None:
        # The memory is freed with the handler, so no copy may be in flight.
        if getattr(self, "_jobs", None):
            self.wait(self._jobs)

    def _has_ended(self, job: _Job) -> bool:
        if job.start is None:
            return True
        try:
            ended = bool(self._end_of(job).query())
            self._raises_since = None
        except Exception as error:
            ended = self._is_lost(error)
            job.failed |= ended
        return ended

    def _end_of(self, job: _Job) -> torch.Event:
        if job.end is None:
            # The submission failed half-way; its queued copies still run.
            job.end = self._stream.record_event()
        return job.end

    def _is_lost(self, error: Exception) -> bool:
        """Return whether the device has raised for so long that it is lost; log the first error."""
        now_s = time.monotonic()
        if self._raises_since is None:
            self._raises_since = now_s
            _log.error("the device raises when asked for a transfer's end; asking again", exc_info=error)
        return now_s - self._raises_since >= _LOST_S

    def _queue(self, device: GPULoadStoreSpec, host: CPULoadStoreSpec) -> None:
        """Queue the copies of a job in chunks: as many blocks of a group as the staging buffer holds."""
        factor = self._geometry.block_size_factor
        sent = None
        first_device = first_host = 0
        for group_idx, (size, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            gather = self._gathers.get(group_idx)
            step = _CHUNK_BLOCKS if gather is None else gather.capacity
            skip = index % factor
            for first in range(skip, skip + size, step):
                end = min(first + step, skip + size)
                blocks = slice(first_device + first - skip, first_device + end - skip)
                host_ids = host.block_ids[first_host + first // factor : first_host + -(-end // factor)]
                if gather is None or end - first <= _UNSTAGED_BLOCKS:
                    runs = self._runs(self._geometry.compiled, group_idx, device.block_ids[blocks], first, host_ids)
                    self._cross(runs, self._storages, self._bases)
                    continue
                if sent is None:
                    # Once for all chunks.
                    sent = self._stream.send(device.block_ids)
                if self._to_host:
                    gather.queue(sent[blocks], True)
                runs = self._runs(self._staged, group_idx, np.arange(end - first), first, host_ids)
                self._cross(runs, [(0, gather.staging)], np.zeros(1, np.int64))
                if not self._to_host:
                    gather.queue(sent[blocks], False)
            first_device += size
            first_host += -(-(skip + size) // factor) if size else 0

    def _runs(self, geometry: Geometry, group_idx: int, device_ids: Ints, first_index: int, host_ids: Ints) -> Ints:
        num_groups = len(self._geometry.kv_caches.group_data_refs)
        sizes, indices = [0] * num_groups, [0] * num_groups
        sizes[group_idx], indices[group_idx] = len(device_ids), first_index
        pool = self._geometry.pool
        return _cut(geometry.runs(device_ids, sizes, indices, host_ids), pool.address, pool.piece_bytes)

    def _cross(self, runs: Ints, storages: list[tuple[int, torch.Tensor]], bases: Ints) -> None:
        """Queue the copies over the link: one per stretch of adjacent bytes."""
        hosts, addresses, sizes = runs.T
        owners = np.searchsorted(bases, addresses, side="right") - 1
        pool = self._geometry.pool
        for owner in np.unique(owners).tolist():
            base, storage = storages[owner]
            mine = owners == owner
            device_parts = _parts(storage, addresses[mine] - base, sizes[mine])
            host_parts = _parts(pool.flat, hosts[mine] - pool.address, sizes[mine])
            if self._to_host:
                self._stream.copy_many(host_parts, device_parts)
            else:
                self._stream.copy_many(device_parts, host_parts)


def _seconds(job: _Job) -> float:
    if job.start is None or job.end is None:
        return 0.0
    try:
        return job.start.elapsed_time(job.end) * 1e-3
    except Exception:
        # A platform may have no timing. The copy has ended anyway.
        return 0.0


def _cut(runs: Ints, first_address: int, piece_bytes: int) -> Ints:
    """Return runs of (host address, device address, bytes), cut where their host bytes cross a piece of the pool."""
    places = runs[:, 0] - first_address
    if not (places // piece_bytes != (places + runs[:, 2] - 1) // piece_bytes).any():
        return runs
    cut = []
    for host, device, remaining in runs.tolist():
        while remaining:
            n = min(remaining, piece_bytes - (host - first_address) % piece_bytes)
            cut.append((host, device, n))
            host, device, remaining = host + n, device + n, remaining - n
    return np.array(cut, np.int64)


def _parts(whole: torch.Tensor, firsts: Ints, sizes: Ints) -> list[torch.Tensor]:
    """Return ``whole[first : first + size]`` of every pair, with one call of torch for all."""
    order = np.argsort(firsts)
    firsts, sizes = firsts[order], sizes[order]
    lengths = np.empty(2 * len(order) + 1, np.int64)
    lengths[1::2] = sizes
    lengths[::2] = np.append(firsts, whole.numel()) - np.append(0, firsts + sizes)
    if (lengths < 0).any():
        # A job may name a block twice.
        parts = tuple(whole[first : first + n] for first, n in zip(firsts.tolist(), sizes.tolist(), strict=True))
    else:
        parts = whole.split_with_sizes(lengths.tolist())[1::2]
    return [parts[place] for place in np.argsort(order).tolist()]


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
