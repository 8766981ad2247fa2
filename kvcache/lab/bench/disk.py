"""Measure a disk tier: its rates in both directions, with checksums, and how long calls block the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvcache.lab.bench.tier import move
from kvcache.tiers.base.tier import host_rows
from kvcache.tiers.disk.directory import shared_names
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

Progress = Callable[[str, int, int], None]
"""Called with the name of the step, the blocks done and the blocks in all."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Rates in bytes a second, CPU seconds a GB, and times of single calls in the caller's thread in seconds.

    `shared_names` are files that other users may read, on file systems without modes.
    """

    block_bytes: int
    num_blocks: int
    num_threads: int
    is_direct: bool
    store_bytes_per_s: float
    load_bytes_per_s: float
    store_cpu_s_per_gb: float
    load_cpu_s_per_gb: float
    call_s_p50: float
    call_s_p99: float
    call_s_max: float
    shared_names: list[str]


def measure_disk(
    path: Path,
    block_bytes: int,
    num_blocks: int,
    num_threads: int = 4,
    job_blocks: int = 16,
    in_flight: int = 64,
    progress: Progress | None = None,
) -> DiskRates:
    """Write `num_blocks` blocks to a new tier in `path` and read them back; the folder is removed at the end.

    At most `in_flight` blocks are under way, in jobs of `job_blocks`. `progress` is called with the name of the step,
    the blocks done and the blocks in all.
    """
    if path.exists():
        raise ValueError(f"the folder to measure in must not exist, got {path}")
    host_blocks = host_rows(in_flight, block_bytes)
    host_blocks[:] = np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8)
    keys = [i.to_bytes(8, "big") for i in range(num_blocks)]
    tier = DiskTier(
        DiskOptions(
            path=str(path),
            capacity=DiskTier.capacity_for(num_blocks, block_bytes),
            num_threads=num_threads,
            flush_interval_s=60,
        ),
        host_blocks,
    )
    calls: list[float] = []
    try:
        rates, cpu = [], []
        num_bytes = num_blocks * block_bytes
        for name, submit in (("store", tier.submit_store), ("load", tier.submit_load)):
            start, cpu_start = time.perf_counter(), time.process_time()
            moved = partial(progress, name) if progress else None
            move(tier, submit, keys, job_blocks, in_flight, calls, moved)
            # The flush belongs to the time of the stores: without it the page cache would be measured.
            if name == "store":
                tier.flush()
            rates.append(num_bytes / (time.perf_counter() - start))
            cpu.append((time.process_time() - cpu_start) / (num_bytes / 1e9))
        is_direct = tier.is_direct
        shared = shared_names(path)
    finally:
        tier.shutdown()
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    calls.sort()
    return DiskRates(
        block_bytes,
        num_blocks,
        num_threads,
        is_direct,
        rates[0],
        rates[1],
        cpu[0],
        cpu[1],
        calls[len(calls) // 2],
        calls[len(calls) * 99 // 100],
        calls[-1],
        shared,
    )
