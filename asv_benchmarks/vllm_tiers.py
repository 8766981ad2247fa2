"""KVCacheTier over a disk beside vLLM's fs tier: look-ups, stores and loads; it takes a minute.

``python -m asv_benchmarks.vllm_tiers FOLDER`` drives both tiers as vLLM's manager does, in turns, without a device.
Look-ups are timed until each key has its answer: in the scheduler's thread, and on the clock. Stores and loads are jobs
of a prompt's chunks, several under way, past the page cache where FOLDER allows it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.tiers.disk.header import capacity_for

TESTS = Path(__file__).parents[1] / "tests" / "vllm"
NUM_KEYS = 10_000
JOB_CHUNKS = 32


def lookup_s(num_rounds: int, folder: Path) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield by tier the scheduler's seconds and all seconds of looking up all keys of a request."""
    from engine_tiering import keys
    from vllm.v1.kv_offload import base

    times: dict[str, dict[str, list[float]]] = {"in steps": {}, "in all": {}}
    blocks = keys(*range(NUM_KEYS))
    with both_tiers(folder, 4096, NUM_KEYS) as engines:
        for engine in engines.values():
            run_jobs(engine.tier, blocks, range(NUM_KEYS), is_load=False)
        for _ in range(num_rounds):
            for name, engine in engines.items():
                context = engine.request(blocks)
                in_steps, start_s = 0.0, time.perf_counter()
                tier, num_left = engine.tier, NUM_KEYS
                while num_left:
                    step_s = time.perf_counter()
                    tier.get_finished_jobs()
                    answers = [tier.lookup(key, context) for key in blocks]
                    tier.on_schedule_end(base.ScheduleEndContext([], []))
                    in_steps += time.perf_counter() - step_s
                    num_left = NUM_KEYS - answers.count(base.LookupResult.HIT)
                    time.sleep(0)
                times["in all"].setdefault(name, []).append(time.perf_counter() - start_s)
                times["in steps"].setdefault(name, []).append(in_steps)
                engine.manager.on_request_finished(context)
    yield from times.items()


def transfer_s(
    num_rounds: int, folder: Path, chunk_bytes: int, total_bytes: int, num_threads: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield by tier the seconds of storing and of loading `total_bytes`."""
    from engine_tiering import keys

    times: dict[str, dict[str, list[float]]] = {"store": {}, "load": {}}
    num_chunks = total_bytes // chunk_bytes
    with both_tiers(folder, chunk_bytes, num_chunks * (num_rounds + 1), num_threads) as engines:
        for engine in engines.values():
            engine.view[:] = np.random.default_rng(0).integers(-128, 128, engine.view.shape, np.int8)
        for number in range(-1, num_rounds):
            blocks = keys(*range((number + 1) * num_chunks, (number + 2) * num_chunks))
            for kind in times:
                for name, engine in list(engines.items())[:: 1 if number % 2 else -1]:
                    start_s = time.perf_counter()
                    run_jobs(engine.tier, blocks, range(num_chunks), is_load=kind == "load")
                    if number >= 0:
                        times[kind].setdefault(name, []).append(time.perf_counter() - start_s)
    yield from times.items()


@contextmanager
def both_tiers(folder: Path, chunk_bytes: int, num_blocks: int, num_threads: int = 4) -> Iterator[dict[str, Any]]:
    """Make vLLM's manager over its fs tier, and over ours."""
    from engine_tiering import EngineTiering, tier_config

    num_chunks = min(num_blocks, max(1, (1 << 30) // chunk_bytes))
    capacity = capacity_for(num_blocks, chunk_bytes)
    options = {"max_store_blocks": num_blocks, "num_threads": num_threads}
    with tempfile.TemporaryDirectory(dir=folder) as path:
        entries = {
            "fs": {"type": "fs", "root_dir": f"{path}/fs"},
            "KVCacheTier": tier_config("disk", path=f"{path}/kv", capacity=capacity, **options),
        }
        engines = {
            name: EngineTiering([entry], num_chunks, bytes_per_block=chunk_bytes, enable_events=False)
            for name, entry in entries.items()
        }
        try:
            yield engines
        finally:
            for engine in engines.values():
                engine.close()
            shutil.rmtree(path, ignore_errors=True)


def run_jobs(tier: Any, blocks: list[Any], chunks: range, is_load: bool) -> None:
    """Store or load `blocks` in jobs of a prompt's chunks, and poll as steps of the scheduler do."""
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.tiering.base import TransferJob

    submit: Callable[[TransferJob], None] = tier.submit_load if is_load else tier.submit_store
    num_jobs = 0
    for first in range(0, len(blocks), JOB_CHUNKS):
        part = blocks[first : first + JOB_CHUNKS]
        ids = np.array(chunks[first : first + len(part)], np.int32)
        context = base.ReqContext(f"job-{first}")
        submit(TransferJob(first, part if is_load else set(part), ids, is_load, context))
        num_jobs += 1
    while num_jobs:
        for result in tier.get_finished_jobs():
            assert result.success
            num_jobs -= 1
        time.sleep(0.0005)


def main() -> int:
    """Print a line per measurement: both medians, and the tiers' ratio of speed (of time, for look-ups)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kib", default="256,2048", help="sizes of chunks; empty: look-ups only")
    parser.add_argument("--threads", type=int, default=4, help="num_threads of the disk tier")
    parser.add_argument("--mib", type=int, default=256, help="bytes of a round")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(TESTS))

    for name, times in lookup_s(arguments.rounds, arguments.folder):
        fs, ours = (statistics.median(times[tier]) for tier in ("fs", "KVCacheTier"))
        print(f"look-up of {NUM_KEYS:,}, {name:8}  fs {fs * 1e3:8.2f} ms  ours {ours * 1e3:8.2f} ms  {ours / fs:6.3f}")
    for kib in map(int, filter(None, arguments.kib.split(","))):
        sizes = kib << 10, arguments.mib << 20
        for name, times in transfer_s(arguments.rounds, arguments.folder, *sizes, arguments.threads):
            fs, ours = (arguments.mib / 1024 / statistics.median(times[tier]) for tier in ("fs", "KVCacheTier"))
            print(f"{name:5} {kib:5} KiB             fs {fs:8.2f} GiB/s  ours {ours:8.2f} GiB/s  {ours / fs:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
