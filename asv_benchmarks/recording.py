"""What recording costs: a manager with and without a recorder, turn about in one run.

``python -m asv_benchmarks.recording`` prints, per case, nanoseconds a key for the whole cycle of a request and a ratio:
CPU time of the scheduler's thread, best of five pairs. Keys are made before the clock starts.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import thread_time
from typing import Any

from asv_benchmarks.traces import conversation_path, fresh_keys, replay
from kvcache import CPUOffloadingManager, Recorder, ReqContext
from kvcache.replay.requests import Request
from kvcache.replay.trace import Trace

# policy, requests (None: all), keys per listed block, capacity
CASES: tuple[tuple[str, int | None, int, int], ...] = (
    ("lru", 2000, 32, 100_000),
    ("arc", 2000, 32, 100_000),
    ("arc", None, 1, 10_000),
    ("gittins", None, 1, 10_000),
)
NUM_PAIRS = 5


def one_by_one(manager: Any, keys_of_requests: list[list[bytes]]) -> int:
    """Ask key by key, as vLLM does, and store what is missing; return the hits."""
    total = 0
    for keys in keys_of_requests:
        context = ReqContext()
        status = manager.status
        num_hits = 0
        for key in keys:
            if status(key) != 2:
                break
            num_hits += 1
        manager.prepare_load(keys[:num_hits], context)
        manager.complete_load(keys[:num_hits], context)
        output = manager.prepare_store(keys, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        total += num_hits
    return total


def nanoseconds(
    requests: list[Request], policy: str, split: int, num_blocks: int, is_recorded: bool, drive: Callable[..., int]
) -> tuple[float, int]:
    """Return the time a key of one replay, and its hits."""
    keys = fresh_keys(requests, split)
    manager = CPUOffloadingManager(512 // split, num_blocks, policy)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(manager, Path(folder, "run.kvlog"), buffer_bytes="256MiB") if is_recorded else None
        gc.collect()
        gc.disable()
        start = thread_time()
        hits = drive(manager, keys)
        spent = thread_time() - start
        gc.enable()
        if recorder is not None:
            recorder.stop()
            if recorder.stats().num_lost:
                raise RuntimeError("records were lost: not the same work")
    return spent * 1e9 / sum(map(len, keys)), hits


def compare(
    requests: list[Request], policy: str, split: int, num_blocks: int, drive: Callable[..., int]
) -> tuple[float, float]:
    """Return the best times a key without and with a recorder."""
    off, on = [], []
    for _ in range(NUM_PAIRS):
        plain, hits = nanoseconds(requests, policy, split, num_blocks, False, drive)
        recorded, recorded_hits = nanoseconds(requests, policy, split, num_blocks, True, drive)
        if hits != recorded_hits:
            raise RuntimeError(f"{policy}: {hits} hits, {recorded_hits} recorded: not the same work")
        off.append(plain)
        on.append(recorded)
    return min(off), min(on)


class Recording:
    """The cycle of a request, a key, with and without a recorder."""

    params = (("lru", "arc"), (False, True))
    param_names = ("policy", "is_recorded")

    def setup(self, policy: str, is_recorded: bool) -> None:
        path = conversation_path()
        if path is None:
            raise NotImplementedError
        with Trace(path) as trace:
            self.requests = list(islice(trace, 500))

    def track_ns_a_key(self, policy: str, is_recorded: bool) -> float:
        return min(nanoseconds(self.requests, policy, 32, 20_000, is_recorded, replay)[0] for _ in range(3))

    track_ns_a_key.unit = "ns"  # type: ignore[attr-defined]


def main() -> int:
    """Print every case."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else conversation_path()
    if path is None:
        print("recording: name the conversation trace, or its folder in KVCACHE_SHARED", file=sys.stderr)
        return 2
    print("case                                                 off       on   ratio")
    for policy, limit, split, num_blocks in CASES:
        with Trace(path) as trace:
            requests = list(islice(trace, limit))
        for drive in (replay, one_by_one):
            off, on = compare(requests, policy, split, num_blocks, drive)
            case = f"{policy}, {len(requests)} requests x {split}, {drive.__name__}"
            print(f"{case:<44} {off:8.1f} {on:8.1f} ns {on / off:6.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
