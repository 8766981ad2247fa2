"""Run many transfers of every kind and report leaks of memory, Python objects, threads and files.

Run as ``python tests/isolated/transfer_leaks.py NUM_JOBS``; prints one line of JSON.
"""

import contextlib
import gc
import json
import resource
import sys
import tracemalloc
from pathlib import Path

import torch

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer.cpu import CPUCopyHandler
from kvcache.transfer.geometry import KVGeometry
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.worker import OffloadingWorker


def make_worker():
    tensors = [CanonicalKVCacheTensor(torch.zeros(16, 64, dtype=torch.int8), 64) for _ in range(2)]
    kv_caches = CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, 64) for i in range(2)]])
    geometry = KVGeometry(kv_caches, HostPool(16, 128, pin=False))
    worker = OffloadingWorker()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, CPUCopyHandler(geometry, True, 2))
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, CPUCopyHandler(geometry, False, 2, inline_bytes=-1))
    return worker


def run_jobs(worker, first, num_jobs):
    ended = 0
    for job_id in range(first, first + num_jobs):
        blocks = [(job_id + i) % 16 for i in range(job_id % 9)]
        spec = GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(blocks)
        worker.transfer_async(job_id, spec if job_id % 2 else spec[::-1])
        if job_id % 7 == 0:
            with contextlib.suppress(ValueError):
                worker.transfer_async(-1, (GPULoadStoreSpec([99], [1], [0]), CPULoadStoreSpec([0])))
        if job_id % 50 == 0:
            ended += len(worker.get_finished())
    worker.wait(range(first, first + num_jobs))
    return ended + len(worker.get_finished())


def state():
    gc.collect()
    return {
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def main(num_jobs):
    worker = make_worker()
    tenth = num_jobs // 10
    ended = run_jobs(worker, 0, tenth)
    before = state()
    ended += run_jobs(worker, tenth, num_jobs - 2 * tenth)
    after = state()
    # Trace Python's own objects in a separate run, because tracing takes memory, too.
    tracemalloc.start()
    run_jobs(worker, -100, 100)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    ended += run_jobs(worker, num_jobs - tenth, tenth)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    worker.shutdown()
    threads = state()["threads"]
    for _ in range(20):
        other = make_worker()
        run_jobs(other, 0, 20)
        other.shutdown()
        del other
    left = {name: after[name] - before[name] for name in before}
    left |= {"traced_bytes": traced, "threads_after_shutdown": state()["threads"] - threads}
    print(json.dumps({"ended": ended, "left": left}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
