"""KVCacheL2 beside LMCache's own `fs` adapter: MB/s of fresh objects, medians of 5 rounds in turns.

``python -m asv_benchmarks.lmcache_disk [FOLDER]``, in the environment of tests/lmcache/run.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1] / "tests" / "lmcache"
TOTAL_BYTES, TASK_OBJECTS, ROUNDS = 128 << 20, 16, 5


def rates(adapter, arrays, base, has_sync):
    """Store and load objects by tasks of 16; return MB/s of both. With sync, the file system is flushed."""
    from l2_harness import MemoryObject, answer, object_key

    keys = [object_key(base + number) for number in range(len(arrays))]
    tasks = [slice(first, first + TASK_OBJECTS) for first in range(0, len(keys), TASK_OBJECTS)]
    memory = list(map(MemoryObject, arrays))
    start_s = time.perf_counter()
    for task in tasks:
        adapter.submit_store_task(keys[task], memory[task])
        assert all(result.is_successful() for result in answer(adapter.pop_completed_store_tasks, seconds=120).values())
    if has_sync:
        os.sync()
    store_s = time.perf_counter() - start_s
    # LMCache takes all memory of L1 at its start.
    buffers = [np.ones_like(array) for array in arrays]
    memory = list(map(MemoryObject, buffers))
    start_s = time.perf_counter()
    for task in tasks:
        task_id = adapter.submit_load_task(keys[task], memory[task])
        found = answer(lambda task_id=task_id: adapter.query_load_result(task_id), seconds=120)
        assert found.popcount() == len(keys[task])
    load_s = time.perf_counter() - start_s
    assert all(np.array_equal(*pair) for pair in zip(arrays, buffers, strict=True))
    adapter.delete(keys)
    return TOTAL_BYTES / 1e6 / store_s, TOTAL_BYTES / 1e6 / load_s


def main():
    """Print a line of JSON per size of objects, with and without a flush."""
    sys.path.insert(0, str(TESTS))
    from l2_harness import PLUGIN
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        path = Path(folder)
        adapters = {"fs": create_l2_adapter(FSL2AdapterConfig(str(path / "fs")))}
        for name, options in (("kvcache", {}), ("direct", {"page_cache": False})):
            params = {"kind": "disk", "path": str(path / name), "capacity": "1GiB", **options}
            adapters[name] = create_l2_adapter(PluginL2AdapterConfig(**PLUGIN, adapter_params=params))
        for adapter in adapters.values():
            adapter.set_backend_identity("bench")
        base = 0
        for num_bytes in (256 << 10, 2 << 20):
            for has_sync in (False, True):
                figures = {name: [] for name in adapters}
                for number in range(ROUNDS):
                    rng = np.random.default_rng(base)
                    arrays = [rng.integers(0, 256, num_bytes, np.uint8) for _ in range(TOTAL_BYTES // num_bytes)]
                    names = sorted(adapters)
                    for name in names[number % 3 :] + names[: number % 3]:
                        figures[name].append(rates(adapters[name], arrays, base, has_sync))
                    base += len(arrays)
                row = {"KiB": num_bytes >> 10, "sync": has_sync}
                for name, pairs in figures.items():
                    stores, loads = zip(*pairs, strict=True)
                    row |= {
                        f"{name} store": round(statistics.median(stores)),
                        f"{name} load": round(statistics.median(loads)),
                    }
                print(json.dumps(row), flush=True)
        for adapter in adapters.values():
            adapter.close()


if __name__ == "__main__":
    main()
