"""KVCacheStorage beside SGLang's HiCacheFile under its controller: MB/s of fresh pages, medians of 5 rounds in turns.

Run it in the environment of tests/sglang/run: ``.venv-sglang/bin/python tests/sglang/side_by_side.py [FOLDER]``
"""

import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_pools import Engine, mha
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

TOTAL_BYTES, ROUNDS = 64 << 20, 5
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def sync(folder):
    """Write the files of a folder to the disk, and drop them from the page cache."""
    for file in folder.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def rates(engine, folder, seed, has_sync):
    """Back pages up and prefetch them, as the controller's threads do; return MB/s of both."""
    controller, pool = engine.controller, engine.pools["kv"]
    num_pages = TOTAL_BYTES // TOKEN_BYTES // pool.page_size
    hashes = [f"{seed * num_pages + number:064x}" for number in range(num_pages)]
    indices = torch.arange(num_pages * pool.page_size)
    memory = pool.kv_buffer[:, : len(indices)].view(torch.uint8)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    before = memory.clone()
    calls = [
        (
            hashes[first : first + STORAGE_BATCH_SIZE],
            indices[first * pool.page_size :][: STORAGE_BATCH_SIZE * pool.page_size],
        )
        for first in range(0, num_pages, STORAGE_BATCH_SIZE)
    ]
    start_s = time.perf_counter()
    assert all(controller.page_set_func(*call) for call in calls)
    if has_sync:
        sync(folder)
    store_s = time.perf_counter() - start_s
    memory.zero_()
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    start_s = time.perf_counter()
    assert sum(controller.page_get_func(operation, *call) for call in calls) == num_pages
    load_s = time.perf_counter() - start_s
    assert torch.equal(memory, before)
    return TOTAL_BYTES / 1e6 / store_s, TOTAL_BYTES / 1e6 / load_s


def compare(path, page_size, has_sync, patch):
    """Return a row of the table: the median MB/s of each backend, of stores and of loads."""
    extra = {
        "kvcache": {"kind": "disk", "path": str(path / "kvcache"), "capacity": "1GiB"},
        "file": {"file_storage_path": str(path / "file")},
    }
    geometry = {"heads": 8, "num_layers": 32, "head_dim": 128, "num_tokens": TOTAL_BYTES // TOKEN_BYTES // 2}
    engines, figures = {}, {name: [] for name in extra}
    for name, options in extra.items():
        backend = "file" if name == "file" else "dynamic"
        engines[name] = Engine(patch, {"kv": mha(page_size=page_size, **geometry)}, options, backend=backend)
    for number in range(ROUNDS):
        for name in sorted(engines, reverse=number % 2 == 1):
            figures[name].append(rates(engines[name], path / name, number, has_sync))
    row = {"KiB": page_size * TOKEN_BYTES >> 10, "sync": has_sync}
    for name, pairs in figures.items():
        row[name] = [round(statistics.median(column)) for column in zip(*pairs, strict=True)]
        engines[name].close()
    return row


def main():
    logging.disable(logging.WARNING)
    # More threads of PyTorch copy flat pages more slowly on a loaded machine.
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None)
    with folder as name, pytest.MonkeyPatch.context() as patch:
        for page_size in (2, 16):
            for has_sync in (False, True):
                row = compare(Path(name, f"{page_size}-{has_sync}"), page_size, has_sync, patch)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
