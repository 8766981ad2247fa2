"""The handler for tensors in host memory, over the compiled copy queue."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvcache.options import check_int
from kvcache.specs import TransferResult
from kvcache.transfer._native.copy import CopyQueue
from kvcache.transfer.base import OffloadingHandler, TransferSpec, check_job_id, checked_specs
from kvcache.transfer.geometry import KVGeometry

_LOAD_WAIT_S = 0.01


class CPUCopyHandler(OffloadingHandler):
    """Copies between an engine's tensors in host memory and the pool, in threads that do not need the GIL.

    Blocks go to the pool if `to_host`, and come from it otherwise. At most `num_threads` threads copy; None: one per
    CPU, at most 4, and fewer for small jobs. A job of at most `inline_bytes` runs in the caller's thread if no other is
    in flight, because passing it to a thread takes longer; -1: never.

    A destination block that a job names twice holds the bytes of either source.
    """

    def __init__(
        self, geometry: KVGeometry, to_host: bool, num_threads: int | None = None, inline_bytes: int = 128 << 10
    ) -> None:
        if num_threads is not None:
            check_int("num_threads", num_threads)
        self._geometry = geometry
        self._to_host = to_host
        self._queue = CopyQueue(geometry.compiled, to_host, num_threads or 0, inline_bytes)
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        self._closed = False

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        device, host = checked_specs(spec, self._to_host)
        with self._lock:
            if self._closed or not self._geometry.pool.has_owner():
                return False
            check_job_id(job_id, self._places)
            self._places[job_id] = self._queue.submit(
                job_id,
                device.block_ids,
                device.group_sizes,
                device.block_indices,
                host.block_ids,
                self._geometry.is_lost(),
            )
            self._geometry.pool.note_use(host.block_ids)
        return True

    def get_finished(self) -> list[TransferResult]:
        if self._places and not self._to_host:
            # A request waits for it, and an engine asks once a step: a short load must end in the step that began it.
            with self._lock:
                last = max(self._places.values(), default=0)
            self._queue.wait(last, _LOAD_WAIT_S)
        finished = self._queue.get_finished()
        if not finished:
            return []
        kind = ("GPU", "CPU") if self._to_host else ("CPU", "GPU")
        # The submitting thread holds the lock until it has noted the place of its job.
        with self._lock:
            for job_id, *_ in finished:
                del self._places[job_id]
        return [
            TransferResult(job_id, success, num_bytes if success else 0, seconds, kind)
            for job_id, success, num_bytes, seconds in finished
        ]

    def wait(self, job_ids: Iterable[int]) -> None:
        self._queue.wait(max((self._places.get(job_id, 0) for job_id in job_ids), default=0))

    def shutdown(self, wait: bool = True) -> None:
        with self._lock:
            self._closed = True
        self._queue.close(not wait)
