"""Measure how fast blocks are copied, compared with one large copy of as many bytes and with torch's own copies.

All ways run in turn. Other load on the machine slows all of them down equally, so the ratios are reliable.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvcache.lab.bench.engine import EngineHandler
from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer.base import OffloadingHandler, TransferSpec
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.host_pool import HostPool

DIRECTIONS = ("store", "load")
LAYOUTS = ("scattered", "contiguous")
# A job uses four of five blocks of each pool, so that scattered blocks have gaps between them.
_SPREAD = 1.25


@dataclass(frozen=True, slots=True)
class CopyRate:
    """The rate of one way of copying: its shortest time.

    `ratio` is the rate over that of one large copy of as many bytes in the same direction.
    """

    way: str
    direction: str
    layout: str
    block_bytes: int
    num_blocks: int
    seconds: float
    gb_per_s: float
    ratio: float


class CopyBench:
    """Blocks of one size in two memories, and the ways to copy them.

    `threads` are the numbers of copy threads to measure; blocks on a CUDA device are copied by one. A block consists of
    `num_layers` parts, each in a tensor of its own. `with_engine` adds vLLM's own worker.
    """

    def __init__(
        self,
        block_bytes: int,
        num_blocks: int,
        threads: Sequence[int] = (1, 2),
        device: str = "cpu",
        num_layers: int = 1,
        with_engine: bool = False,
    ) -> None:
        count = int(num_blocks * _SPREAD)
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self._pool = HostPool(count, block_bytes)
        self._pool.wait_ready()
        if device == "cpu":
            self._device_pool = HostPool(count, block_bytes, pin=False)
            self._device = self._device_pool.tensor
        else:
            self._device = torch.zeros((count, block_bytes), dtype=torch.int8, device=device)
        layer_bytes = block_bytes // num_layers
        kv_caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(one, layer_bytes) for one in self._device.view(num_layers, count, layer_bytes)],
            [[CanonicalKVCacheRef(i, layer_bytes) for i in range(num_layers)]],
        )
        names = {f"kvcache, {n} thread{'s' * (n > 1)}": n for n in threads} if device == "cpu" else {"kvcache": 1}
        self._handlers = {name: cpu_gpu_handlers(kv_caches, self._pool, num_threads=n) for name, n in names.items()}
        if with_engine:
            engine = EngineHandler(kv_caches, count)
            self._handlers["vllm"] = engine, engine
        rng = np.random.default_rng(0)
        in_order = np.arange(num_blocks)
        self._ids = {
            "scattered": (rng.permutation(count)[:num_blocks], rng.permutation(count)[:num_blocks]),
            "contiguous": (in_order, in_order),
        }
        self._job_id = 0

    def close(self) -> None:
        """End the copy threads and unpin the pool."""
        for pair in self._handlers.values():
            for handler in set(pair):
                handler.shutdown()
        self._pool.close()

    def ways(self, direction: str, layout: str) -> dict[str, Callable[[], object]]:
        """Return by name the functions to time; each moves the blocks once."""
        device_ids, host_ids = self._ids[layout]
        device, host = GPULoadStoreSpec(device_ids, [len(device_ids)], [0]), CPULoadStoreSpec(host_ids)
        store = direction == "store"
        spec: TransferSpec = (device, host) if store else (host, device)
        found: dict[str, Callable[[], object]] = {
            name: partial(self._transfer, pair[not store], spec) for name, pair in self._handlers.items()
        }
        target, source = (self._pool.tensor, self._device) if store else (self._device, self._pool.tensor)
        ids = [torch.from_numpy(ids) for ids in ((host_ids, device_ids) if store else (device_ids, host_ids))]
        to, of = (side.to(tensor.device) for side, tensor in zip(ids, (target, source), strict=True))
        pairs = list(zip(ids[0].tolist(), ids[1].tolist(), strict=True))

        def one_by_one() -> None:
            for i, j in pairs:
                target[i].copy_(source[j], non_blocking=True)

        def select() -> None:
            target.index_copy_(0, to, source.index_select(0, of).to(target.device))

        return found | {"torch copy_ per block": one_by_one, "torch index_select": select}

    def one_copy(self, direction: str) -> Callable[[], object]:
        """Return a function that copies as many bytes in one piece, or one per piece of the pool."""
        num_bytes = self.num_blocks * self.block_bytes
        if self._device.is_cpu:
            addresses = (self._pool.address, self._device.data_ptr())
            target, source = addresses if direction == "store" else addresses[::-1]
            return lambda: ctypes.memmove(target, source, num_bytes)
        hosts = self._pool.parts(0, self.num_blocks)
        devices = self._device.view(-1)[:num_bytes].split_with_sizes([len(part) for part in hosts])
        ends = (hosts, devices) if direction == "store" else (devices, hosts)

        def copy() -> None:
            for target, source in zip(*ends, strict=True):
                target.copy_(source, non_blocking=True)

        return copy

    def measure(self, direction: str, layout: str, repeats: int = 5, with_torch: bool = True) -> Iterator[CopyRate]:
        """Time one large copy, then every way, in turn, `repeats` times (torch's slow ways twice); yield the best."""
        ways = {"one large copy": self.one_copy(direction)} | self.ways(direction, layout)
        if not with_torch:
            ways = {name: way for name, way in ways.items() if not name.startswith("torch")}
        best = dict.fromkeys(ways, float("inf"))
        for round_index in range(repeats):
            for name, way in ways.items():
                if round_index > 1 and name.startswith("torch"):
                    continue
                best[name] = min(best[name], seconds_of(way, self._device.device))
        for name, seconds in best.items():
            yield CopyRate(
                name,
                direction,
                layout,
                self.block_bytes,
                self.num_blocks,
                seconds,
                self.num_blocks * self.block_bytes / seconds / 1e9,
                best["one large copy"] / seconds,
            )

    def _transfer(self, handler: OffloadingHandler, spec: TransferSpec) -> None:
        self._job_id += 1
        handler.transfer_async(self._job_id, spec)
        handler.wait([self._job_id])
        (result,) = handler.get_finished()
        if not result.success:
            raise RuntimeError(f"a transfer of {self.num_blocks} blocks failed")


def seconds_of(way: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until a device has done what `way` starts, and nothing else."""

    def settle() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    settle()
    started = time.perf_counter()
    way()
    settle()
    return time.perf_counter() - started
