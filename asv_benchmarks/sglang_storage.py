"""KVCacheStorage beside SGLang's own HiCacheFile, as SGLang's controller moves pages: MB/s of fresh pages.

``python -m asv_benchmarks.sglang_storage [FOLDER]``, in the environment of tests/sglang/run, prints medians of 5 rounds
in turns, of stores and of loads. With `sync`, a store also writes the files to the disk, and a load finds an empty page
cache. HiCacheFile gets flat pages, which SGLang copies; KVCacheStorage reads and writes the host pool (`interface_v1`).
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sglang"))
TOTAL_BYTES, ROUNDS, CALL_PAGES = 64 << 20, 5, 128
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def sync(folder: Path) -> None:
    """Write the files of a folder to the disk, and drop them from the page cache."""
    for file in folder.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def rates(engine: Any, folder: Path, seed: int, has_sync: bool) -> tuple[float, float]:
    """Back pages up and prefetch them, as the controller's threads do; return MB/s of both."""
    import torch

    controller, pool = engine.controller, engine.pools["kv"]
    num_pages = TOTAL_BYTES // TOKEN_BYTES // pool.page_size
    hashes = [f"{seed * num_pages + number:064x}" for number in range(num_pages)]
    indices = torch.arange(num_pages * pool.page_size).view(num_pages, -1)
    memory = pool.kv_buffer[:, : indices.numel()].view(torch.uint8)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    before = memory.clone()
    parts = [slice(first, first + CALL_PAGES) for first in range(0, num_pages, CALL_PAGES)]
    calls = [(hashes[part], indices[part].flatten()) for part in parts]
    start_s = time.perf_counter()
    if not all(controller.page_set_func(*call) for call in calls):
        raise RuntimeError(f"{folder} took not all pages")
    if has_sync:
        sync(folder)
    store_s = time.perf_counter() - start_s
    memory.zero_()
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    start_s = time.perf_counter()
    num_loaded = sum(controller.page_get_func(operation, *call) for call in calls)
    load_s = time.perf_counter() - start_s
    if num_loaded < num_pages or not torch.equal(memory, before):
        raise RuntimeError(f"{num_loaded} of {num_pages} pages came from {folder}, or they are wrong")
    return TOTAL_BYTES / 1e6 / store_s, TOTAL_BYTES / 1e6 / load_s


def compare(path: Path, page_size: int, has_sync: bool, patch: Any) -> dict[str, Any]:
    """Return a row of the table: the median MB/s of each backend, of stores and of loads."""
    from host_pools import Engine, mha

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
    row: dict[str, Any] = {"KiB": page_size * TOKEN_BYTES >> 10, "sync": has_sync}
    for name, pairs in figures.items():
        row[name] = [round(statistics.median(column)) for column in zip(*pairs, strict=True)]
        engines[name].close()
    return row


def main() -> None:
    """Print the table."""
    import pytest
    import torch

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
