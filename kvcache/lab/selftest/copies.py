"""Compare the bytes that kvcache's handlers copy between a device and host memory, in random layouts during compute.

If a copy is not ordered against the compute stream, only the bytes show it. So a kernel writes the source while the
copy is requested, and other work reads the destination as soon as the copy is reported. A control run omits the order
and must find different bytes: otherwise, the check cannot detect a wrong order on this device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from kvcache.lab.selftest.rows import OK, WRONG, Row
from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import host_block_bytes
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.streams import DeviceStream
from kvcache.transfer.worker import OffloadingWorker

_MOST_POLLS, _LATE_S = 3, 30.0


@dataclass(slots=True)
class Compared:
    """The number of compared bytes, and of those that differed."""

    num_bytes: int = 0
    num_different: int = 0

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Count the bytes of two tensors, on any device."""
        self.num_bytes += expected.numel()
        self.num_different += int((actual.cpu() != expected.cpu()).sum())


class Geometry:
    """A random KV cache on a device: groups, layers, padding and strides; a pool; and handlers in both directions."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.rng = device, np.random.default_rng(seed)
        draw = self.rng.integers
        num_blocks, self.factor = int(draw(8, 49)), int(draw(1, 5))
        # Only one group may have blocks of several device blocks.
        sizes = [[int(draw(1, 4097)) for _ in range(draw(1, 5))] for _ in range(1 if self.factor > 1 else draw(1, 4))]
        self.layers: list[list[torch.Tensor]] = []
        for group in sizes:
            pads = [int(draw(0, 65)) for _ in group]
            if draw(2):
                # The layers of a block lie side by side.
                whole = self._random(num_blocks, sum(group) + sum(pads))
                parts = torch.split(whole, [size + pad for size, pad in zip(group, pads, strict=True)], 1)
            else:
                parts = tuple(self._random(num_blocks, size + pad) for size, pad in zip(group, pads, strict=True))
            self.layers.append(list(parts))
        self.sizes = sizes
        tensors = [layer for group in self.layers for layer in group]
        numbers = iter(range(len(tensors)))
        refs = [[CanonicalKVCacheRef(next(numbers), size) for size in group] for group in sizes]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(layer, layer.shape[1]) for layer in tensors], refs)
        num_host = sum(-(-num_blocks // self.factor) + 1 for _ in sizes)
        self.pool = HostPool(num_host, host_block_bytes(caches, self.factor), pin=device.type != "cpu", device=device)
        self.pool.wait_ready()
        self.worker = OffloadingWorker()
        store, load = cpu_gpu_handlers(caches, self.pool, self.factor)
        self.worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
        self.worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)
        self.ids = [self.rng.permutation(num_blocks)[: draw(1, num_blocks + 1)] for _ in sizes]
        indices = [int(draw(self.factor)) for _ in sizes]
        num_used = sum(-(-(index + len(ids)) // self.factor) for index, ids in zip(indices, self.ids, strict=True))
        self.job = (
            GPULoadStoreSpec(np.concatenate(self.ids), [len(ids) for ids in self.ids], indices),
            CPULoadStoreSpec(self.rng.permutation(num_host)[:num_used]),
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(-128, 128, shape, np.int8)).to(self.device)

    def move(self, is_load: bool) -> None:
        """Move the job's blocks, and return once the handler reports the end. RuntimeError: it fails or is late."""
        if not self.worker.transfer_async(0, self.job[::-1] if is_load else self.job):
            raise RuntimeError("a transfer was refused")
        end_s = time.monotonic() + _LATE_S
        # An engine asks once a step, and waits only before it uses a block again.
        for num_polls in range(1 << 30):
            if results := self.worker.get_finished():
                break
            if time.monotonic() > end_s:
                raise RuntimeError(f"a transfer has not ended after {_LATE_S:.0f} s")
            if num_polls >= _MOST_POLLS:
                self.worker.wait([0])
        if not all(result.success for result in results):
            raise RuntimeError("a transfer failed")

    def check(self, compute: Callable[[], object], compared: Compared) -> None:
        """Store values that a queued kernel writes, overwrite them after the store, load them again, and compare."""
        written = [[self._random(*layer.shape) for layer in group] for group in self.layers]
        compute()
        for layers, values in zip(self.layers, written, strict=True):
            for layer, value in zip(layers, values, strict=True):
                layer.copy_(value)
        self.move(is_load=False)
        # The store is reported, so the engine may reuse the blocks at once.
        for layers in self.layers:
            for layer in layers:
                layer.fill_(7)
        compute()
        # Queued before the load, so it must read the values from before the load.
        before = [[layer.clone() for layer in layers] for layers in self.layers]
        self.move(is_load=True)
        with torch.Stream(device=self.device) if self.device.type != "cpu" else torch.no_grad():
            # The load is reported, so work on any stream may read it.
            after = [[layer.clone() for layer in layers] for layers in self.layers]
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        for number, ids in enumerate(self.ids):
            for place, size in enumerate(self.sizes[number]):
                expected = torch.full(self.layers[number][place].shape, 7, dtype=torch.int8)
                compared.compare(before[number][place], expected)
                expected[ids, :size] = written[number][place].cpu()[ids, :size]
                compared.compare(after[number][place], expected)

    def close(self) -> None:
        """End the threads and unpin the pool."""
        self.worker.shutdown()
        self.pool.close()


def check_copies(device: torch.device, seconds: float, compute: Callable[[], object] | None = None) -> Iterator[Row]:
    """Yield a row on the copied bytes, and one on whether a wrong order is detected; takes about `seconds`.

    `compute` queues some milliseconds of work on the device; by default, it multiplies matrices.
    """
    compute = compute or multiplications(device)
    compared, end_s, num_geometries = Compared(), time.monotonic() + seconds, 0
    while num_geometries < 3 or time.monotonic() < end_s:
        _run(device, num_geometries, compute, compared)
        num_geometries += 1
    text = f"{num_geometries} random geometries: {compared.num_different} of {compared.num_bytes:,} bytes differ"
    figures = {"geometries": num_geometries, "bytes": compared.num_bytes, "different_bytes": compared.num_different}
    yield Row("copies", text, WRONG if compared.num_different else OK, figures)
    if device.type == "cpu":
        return
    control = Compared()
    with mock.patch.object(DeviceStream, "wait_for_compute", return_value=None):
        for seed in range(8):
            _run(device, seed, lambda: [compute() for _ in range(8)], control)
            if control.num_different:
                break
    text = "found by the check, as it must be" if control.num_different else "not found: the check sees no wrong order"
    yield Row("a wrong order", text, OK if control.num_different else WRONG, {"found": control.num_different > 0})


def _run(device: torch.device, seed: int, compute: Callable[[], object], compared: Compared) -> None:
    geometry = Geometry(device, seed)
    try:
        geometry.check(compute, compared)
    finally:
        geometry.close()


def multiplications(device: torch.device) -> Callable[[], object]:
    """Return a function that queues some milliseconds of work on a device."""
    size = 256 if device.type == "cpu" else 4096
    matrix = torch.ones((size, size), device=device)
    return lambda: [torch.mm(matrix, matrix) for _ in range(4)]
