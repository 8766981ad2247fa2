"""`kvcache bench copy` over vLLM's worker: its specs and its constructor are vLLM's, its copies ours."""

import inspect

import pytest
from cpu_worker_specs import CPUWorker
from vllm.v1.kv_offload.cpu import gpu_worker

from kvcache.lab.bench.copy import CopyBench

SIGNATURE = inspect.signature(gpu_worker.CPUOffloadingWorker.__init__)


class CopyingWorker(CPUWorker):
    """Copies on the CPU as vLLM's worker does on a device; vLLM's constructor would accept its arguments."""

    def __init__(self, kv_caches, blocks_per_chunk, num_cpu_chunks):
        SIGNATURE.bind(self, kv_caches, blocks_per_chunk, num_cpu_chunks)
        super().__init__(kv_caches, num_cpu_chunks, blocks_per_chunk)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_copy_bench_times_both_workers(monkeypatch, direction):
    monkeypatch.setattr(gpu_worker, "CPUOffloadingWorker", CopyingWorker)
    bench = CopyBench(4096, 4, [1], num_layers=2, with_engine=True)
    rates = list(bench.measure(direction, "scattered", repeats=1, with_torch=False))
    bench.close()
    assert [rate.way for rate in rates] == ["one large copy", "kvcache, 1 thread", "vllm"]
    assert all(rate.seconds > 0 for rate in rates)
