"""`kvcache check --device` over vLLM's worker: its specs and its constructor are vLLM's, its copies the test's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu import gpu_worker

from kvcache.lab.bench.copy import CopyBench
from kvcache.lab.bench.device import _compare_geometry, _measure_engine

SIGNATURES = {
    name: inspect.signature(getattr(gpu_worker.CPUOffloadingWorker, name))
    for name in ("__init__", "submit_store", "submit_load", "wait", "get_finished", "shutdown")
}


class CopyingWorker:
    """Copies on the CPU as vLLM's worker does on a device; a call that vLLM would refuse raises TypeError."""

    skipped_tensors = 0

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_cpu_chunks: int) -> None:
        SIGNATURES["__init__"].bind(self, kv_caches, blocks_per_chunk, num_cpu_chunks)
        self.factor = blocks_per_chunk
        self.pages = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes)[: one.tensor.shape[0]]
            for one in kv_caches.tensors[self.skipped_tensors :]
        ]
        self.chunks = [
            torch.zeros((num_cpu_chunks, page.shape[1] * self.factor), dtype=torch.int8) for page in self.pages
        ]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, source: GPULoadStoreSpec, destination: Any) -> bool:
        return self._copy(job_id, source, destination, is_store=True)

    def submit_load(self, job_id: int, source: Any, destination: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, destination, source, is_store=False)

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: Any, is_store: bool) -> bool:
        assert isinstance(device, GPULoadStoreSpec)
        for place, block in enumerate(device.block_ids.tolist(), device.block_indices[0]):
            for page, chunk in zip(self.pages, self.chunks, strict=True):
                part = chunk[host.chunk_ids[place // self.factor]].view(self.factor, -1)[place % self.factor]
                (part if is_store else page[block]).copy_(page[block] if is_store else part)
        self.finished.append(TransferResult(job_id, True))
        return True

    def wait(self, job_ids: set[int]) -> None:
        assert isinstance(job_ids, set)

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def shutdown(self) -> None:
        self.pages = []


@pytest.mark.parametrize("skipped", [0, 1])
def test_compare_geometry_counts_the_bytes_that_vllms_worker_leaves_out(monkeypatch: Any, skipped: int) -> None:
    monkeypatch.setattr(gpu_worker, "CPUOffloadingWorker", CopyingWorker)
    monkeypatch.setattr(CopyingWorker, "skipped_tensors", skipped)
    found = [_compare_geometry(torch.device("cpu"), seed, with_engine=True) for seed in range(10)]
    assert all(compared > 0 for compared, _ in found)
    assert [different > 0 for _, different in found] == [skipped > 0] * 10


@pytest.mark.parametrize("direction", ["store", "load"])
def test_copy_bench_times_vllms_worker_beside_ours(monkeypatch: Any, direction: str) -> None:
    monkeypatch.setattr(gpu_worker, "CPUOffloadingWorker", CopyingWorker)
    bench = CopyBench(4096, 4, [1], num_layers=2, with_engine=True)
    rates = list(bench.measure(direction, "scattered", repeats=1, with_torch=False))
    bench.close()
    assert [rate.way for rate in rates] == ["one large copy", "kvcache, 1 thread", "vllm"]
    assert all(rate.seconds > 0 for rate in rates)


def test_measure_engine_names_the_error_of_a_worker_that_does_not_start() -> None:
    # torch for CPUs has no such device.
    report = _measure_engine(torch.device("cuda"), 1)
    assert report is not None
    assert report["error"]
    assert report["geometries"] is None
    assert _measure_engine(torch.device("cpu"), 1) is None
