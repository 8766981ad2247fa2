"""Measure a device and its link to host memory with kvcache's own handlers, and compare the bytes that they move.

The report has versions and sizes but no names of hosts or users, so that it can be sent to others.
"""

from __future__ import annotations

import logging
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcache.lab.bench.copy import DIRECTIONS, CopyBench, CopyRate, seconds_of
from kvcache.lab.bench.engine import EngineHandler
from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer import numa, pinning
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.free_memory import memory_left
from kvcache.transfer.geometry import host_block_bytes
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.worker import OffloadingWorker
from kvcache.version import __version__

_LOG = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; the default takes less than two minutes."""

    block_bytes: Sequence[int] = (64 << 10, 256 << 10, 2 << 20)
    block_counts: Sequence[int] = (1, 16, 256)
    num_layers: int = 32
    pool_bytes: int = 512 << 20
    num_geometries: int = 20
    compute_rounds: int = 4


def find_device() -> torch.device:
    """Return the accelerator's current device; on a machine without one, the CPU."""
    return pinning.accelerator() or torch.device("cpu")


def measure(
    device: torch.device,
    sizes: Sizes | None = None,
    compute: Callable[[], object] | None = None,
    show: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the report on a device, which JSON can hold.

    `compute` queues work on the device that takes some milliseconds (None: multiplications of matrices); `show` is
    called with the name of each step before it starts.
    """
    sizes = sizes or Sizes()
    show("allocation of the pool")
    pool = _measure_pool(device, sizes.pool_bytes)
    show("vLLM's worker")
    engine = _measure_engine(device, sizes.num_geometries)
    with_engine = engine is not None and not engine["error"]
    copies = []
    for block_bytes in sizes.block_bytes:
        for num_blocks in sizes.block_counts:
            show(f"copies, {num_blocks} blocks of {block_bytes} bytes")
            copies += [asdict(rate) for rate in _copies(device, block_bytes, num_blocks, sizes.num_layers, with_engine)]
    show("random geometries")
    geometries = _geometries(device, sizes.num_geometries)
    show("copies beside compute")
    return {
        "format": FORMAT,
        "environment": _environment(device),
        "pool": pool,
        "copies": copies,
        "vllm": engine,
        "geometries": geometries,
        "compute": _beside_compute(device, sizes, compute or _multiplications(device)),
    }


def _environment(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    driver = ""
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
        for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version"):
            # The version alone: the rest of the file may name the host that built the driver.
            with suppress(OSError):
                driver = driver or "".join(re.findall(r"\d+\.\d+[.\d]*", Path(path).read_text())[:1])
    return {
        "kvcache": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "driver": driver,
        "kernel": re.match(r"[\d.]*", platform.release())[0],  # type: ignore[index]
        "machine": platform.machine(),
        "device": device.type,
        "device_name": name,
        "device_numa_node": numa.device_node(device),
    }


def _numa_nodes(address: int) -> dict[str, int]:
    """Return how many pages of the mapping that holds an address lie on each NUMA node."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in Path("/proc/self/numa_maps").read_text().splitlines():
            first, _, rest = line.partition(" ")
            if int(first, 16) <= address:
                found = {node: int(pages) for node, pages in re.findall(r"\bN(\d+)=(\d+)", rest)}
    return found


def _measure_pool(device: torch.device, num_bytes: int) -> dict[str, Any]:
    left = memory_left()
    num_bytes = num_bytes if left is None else max(1 << 20, min(num_bytes, left[0] // 4))
    started_s = time.perf_counter()
    pool = HostPool(num_bytes >> 20, 1 << 20, pin=False, device=device)
    pool.wait_ready()
    touched_s = time.perf_counter() - started_s
    pinned_s = None
    if device.type != "cpu":
        pool.pin()
        pinned_s = time.perf_counter() - started_s - touched_s
    report = {
        "bytes": pool.num_bytes,
        "is_pinned": pool.is_pinned,
        "touch_gb_per_s": pool.num_bytes / touched_s / 1e9,
        "pin_gb_per_s": None if pinned_s is None else pool.num_bytes / pinned_s / 1e9,
        "pages_per_numa_node": _numa_nodes(pool.address),
    }
    pool.close()
    return report


def _measure_engine(device: torch.device, num_geometries: int) -> dict[str, Any] | None:
    """Compare the bytes that vLLM's own worker moves; None without vLLM, or on a device that its worker cannot use."""
    if device.type not in ("cuda", "xpu"):
        return None
    try:
        release = import_module("vllm.version").__version__
    except ImportError:
        return None
    try:
        return {"version": release, "error": "", "geometries": _geometries(device, num_geometries, with_engine=True)}
    except Exception as error:
        # Another release of vLLM must not cost the report on our own copies.
        _LOG.warning("the worker of vLLM %s cannot be measured", release, exc_info=True)
        return {"version": release, "error": type(error).__name__, "geometries": None}


def _geometries(device: torch.device, number: int, with_engine: bool = False) -> dict[str, int]:
    found = [_compare_geometry(device, seed, with_engine) for seed in range(number)]
    return {
        "number": number,
        "compared_bytes": sum(compared for compared, _ in found),
        "different_bytes": sum(different for _, different in found),
    }


def _copies(
    device: torch.device, block_bytes: int, num_blocks: int, num_layers: int, with_engine: bool
) -> Iterator[CopyRate]:
    """Yield the rates of scattered blocks and of one large copy, in both directions."""
    threads = [min(4, torch.get_num_threads())]
    bench = CopyBench(block_bytes, num_blocks, threads, str(device), num_layers=num_layers, with_engine=with_engine)
    for direction in DIRECTIONS:
        yield from bench.measure(direction, "scattered", with_torch=False)
    bench.close()


class _Memory:
    """A KV cache of random bytes on a device, a pool, and a worker that moves blocks between them."""

    def __init__(
        self,
        device: torch.device,
        rng: np.random.Generator,
        num_blocks: int,
        layers: Sequence[tuple[int, int]],
        factor: int,
        with_engine: bool = False,
    ) -> None:
        self.layers = [
            torch.from_numpy(rng.integers(-128, 128, (num_blocks, size + padding), np.int8)).to(device)
            for size, padding in layers
        ]
        self.sizes = [size for size, _ in layers]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(layer, layer.shape[1]) for layer in self.layers],
            [[CanonicalKVCacheRef(i, size) for i, size in enumerate(self.sizes)]],
        )
        self.pool = HostPool(-(-num_blocks // factor), host_block_bytes(caches, factor), pin=device.type != "cpu")
        self._worker = OffloadingWorker()
        store, load = (
            (EngineHandler(caches, self.pool.num_blocks, factor),) * 2
            if with_engine
            else cpu_gpu_handlers(caches, self.pool, factor)
        )
        self._worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
        self._worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)

    def start(self, source: Any, destination: Any) -> None:
        """Start the one job that may be in flight."""
        if not self._worker.transfer_async(0, (source, destination)):
            raise RuntimeError("a transfer was refused")

    def finish(self) -> None:
        """Wait for the job; RuntimeError if it failed."""
        self._worker.wait([0])
        if not all(result.success for result in self._worker.get_finished()):
            raise RuntimeError("a transfer failed")

    def close(self) -> None:
        """End the threads and unpin the pool."""
        self._worker.shutdown()
        self.pool.close()


def _compare_geometry(device: torch.device, seed: int, with_engine: bool = False) -> tuple[int, int]:
    """Store and load random blocks of a random geometry; return the bytes compared, and those that differ.

    With vLLM's worker, rows have no padding, which it does not allow.
    """
    rng = np.random.default_rng(seed)
    num_blocks, factor = int(rng.integers(4, 65)), int(rng.integers(1, 5))
    layers = [(int(rng.integers(1, 4097)), int(rng.integers(0, 65))) for _ in range(rng.integers(1, 9))]
    if with_engine:
        layers = [(64 * (1 + size // 64), 0) for size, _ in layers]
    memory = _Memory(device, rng, num_blocks, layers, factor, with_engine)
    before = [layer.cpu().clone() for layer in memory.layers]
    ids = rng.permutation(num_blocks)[: rng.integers(1, num_blocks + 1)]
    blocks = GPULoadStoreSpec(ids, [len(ids)], [0])
    host = CPULoadStoreSpec(rng.permutation(memory.pool.num_blocks)[: -(-len(ids) // factor)])
    memory.start(blocks, host)
    memory.finish()
    for layer in memory.layers:
        layer.fill_(7)
    memory.start(host, blocks)
    memory.finish()
    compared = different = 0
    for layer, old, size in zip(memory.layers, before, memory.sizes, strict=True):
        expected = torch.full_like(old, 7)
        expected[ids, :size] = old[ids, :size]
        compared += old.numel()
        different += int((layer.cpu() != expected).sum())
    memory.close()
    return compared, different


def _multiplications(device: torch.device) -> Callable[[], object]:
    size = 512 if device.type == "cpu" else 4096
    matrix = torch.ones((size, size), device=device)
    return lambda: [torch.mm(matrix, matrix) for _ in range(10)]


def _beside_compute(device: torch.device, sizes: Sizes, compute: Callable[[], object]) -> dict[str, Any]:
    """Time a store alone, compute alone and both at once, and look for bytes stored before compute wrote them."""
    num_blocks, layer_bytes = min(64, max(sizes.block_counts)), max(sizes.block_bytes) // sizes.num_layers
    layers = [(layer_bytes, 0)] * sizes.num_layers
    memory = _Memory(device, np.random.default_rng(0), num_blocks, layers, 1)
    every = np.arange(num_blocks)
    job = GPULoadStoreSpec(every, [num_blocks], [0]), CPULoadStoreSpec(every)

    def work(copies: bool, computes: bool) -> None:
        if copies:
            memory.start(*job)
        if computes:
            compute()
        memory.finish()

    ways = {"copy_s": (True, False), "compute_s": (False, True), "both_s": (True, True)}
    best = dict.fromkeys(ways, float("inf"))
    different = 0
    for value in range(sizes.compute_rounds):
        for name, way in ways.items():
            best[name] = min(best[name], seconds_of(partial(work, *way), device))
        # The store is submitted while compute that writes the blocks is still queued.
        compute()
        for layer in memory.layers:
            layer.fill_(value)
        memory.start(*job)
        memory.finish()
        different += int((memory.pool.tensor != value).sum())
    memory.close()
    return {"bytes": num_blocks * layer_bytes * sizes.num_layers, **best, "different_bytes": different}
