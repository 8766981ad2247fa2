"""`kvcache check --device` over vLLM's worker: its specs and its constructor are vLLM's, its copies ours."""

import inspect
from dataclasses import replace

import pytest
import torch
from cpu_worker_specs import CPUWorker
from vllm.v1.kv_offload.cpu import gpu_worker

from kvcache.lab.bench.copy import CopyBench
from kvcache.lab.bench.device import _compare_geometry, _measure_engine

SIGNATURE = inspect.signature(gpu_worker.CPUOffloadingWorker.__init__)


class CopyingWorker(CPUWorker):
    """Copies on the CPU as vLLM's worker does on a device; vLLM's constructor would accept its arguments."""

    skips_a_tensor = False

    def __init__(self, kv_caches, blocks_per_chunk, num_cpu_chunks):
        SIGNATURE.bind(self, kv_caches, blocks_per_chunk, num_cpu_chunks)
        if self.skips_a_tensor:
            first, *others = kv_caches.tensors
            kv_caches = replace(kv_caches, tensors=[replace(first, tensor=first.tensor.clone()), *others])
        super().__init__(kv_caches, num_cpu_chunks, blocks_per_chunk)


@pytest.mark.parametrize("skips", [False, True])
def test_compare_geometry_counts_omitted_bytes(monkeypatch, skips):
    monkeypatch.setattr(gpu_worker, "CPUOffloadingWorker", CopyingWorker)
    monkeypatch.setattr(CopyingWorker, "skips_a_tensor", skips)
    found = [_compare_geometry(torch.device("cpu"), seed, with_engine=True) for seed in range(10)]
    assert all(compared > 0 for compared, _ in found)
    assert [different > 0 for _, different in found] == [skips] * 10


@pytest.mark.parametrize("direction", ["store", "load"])
def test_copy_bench_times_both_workers(monkeypatch, direction):
    monkeypatch.setattr(gpu_worker, "CPUOffloadingWorker", CopyingWorker)
    bench = CopyBench(4096, 4, [1], num_layers=2, with_engine=True)
    rates = list(bench.measure(direction, "scattered", repeats=1, with_torch=False))
    bench.close()
    assert [rate.way for rate in rates] == ["one large copy", "kvcache, 1 thread", "vllm"]
    assert all(rate.seconds > 0 for rate in rates)


def test_measure_engine_names_workers_error():
    # torch for CPUs has no such device.
    report = _measure_engine(torch.device("cuda"), 1)
    assert report is not None
    assert report["error"]
    assert report["geometries"] is None
    assert _measure_engine(torch.device("cpu"), 1) is None
