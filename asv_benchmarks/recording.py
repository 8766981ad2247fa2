"""What recording costs: a manager with and without a recorder, turn about in one run.

``python -m asv_benchmarks.recording [TRACE]`` prints, per case, nanoseconds a key for the whole cycle of a request and
a ratio: CPU time of the scheduler's thread. A replay is cut into slices of some milliseconds; both managers take each
slice one after the other, and of each slice the least time of all rounds counts, so that what disturbs the machine for
a while disturbs nothing. Keys are made before the clock starts, for each manager its own.
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

from asv_benchmarks.traces import conversation_path, fresh_keys, given_trace, replay
from kvcache import CPUOffloadingManager, Recorder, ReqContext
from kvcache.lab.traces.requests import Request
from kvcache.lab.traces.trace import Trace

# policy, requests (None: all), keys per listed block, capacity
CASES: tuple[tuple[str, int | None, int, int], ...] = (
    ("lru", 2000, 32, 100_000),
    ("arc", 2000, 32, 100_000),
    ("arc", None, 1, 10_000),
    ("gittins", None, 1, 10_000),
)
NUM_ROUNDS = 7
SLICE_KEYS = 20_000
"""A slice of so many keys takes milliseconds."""


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


def slices_of(requests: list[Request], split: int) -> list[range]:
    """Return the requests of each slice."""
    slices, first, num_keys = [], 0, 0
    for number, request in enumerate(requests, 1):
        num_keys += split * len(request.hash_ids)
        if num_keys >= SLICE_KEYS or number == len(requests):
            slices.append(range(first, number))
            first, num_keys = number, 0
    return slices


def compare(
    requests: list[Request], policy: str, split: int, num_blocks: int, drive: Callable[..., int], num_rounds: int
) -> tuple[float, float]:
    """Return the time a key without and with a recorder, in nanoseconds."""
    slices = slices_of(requests, split)
    least = [[float("inf")] * len(slices) for _ in range(2)]
    num_keys = split * sum(len(request.hash_ids) for request in requests)
    for turn in range(num_rounds):
        managers = [CPUOffloadingManager(512 // split, num_blocks, policy) for _ in range(2)]
        keys_of = [fresh_keys(requests, split) for _ in range(2)]
        hits = [0, 0]
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(managers[1], Path(folder, "run.kvlog"), buffer_bytes="256MiB")
            gc.collect()
            gc.disable()
            for number, part in enumerate(slices):
                for is_recorded in (turn + number) % 2, (turn + number + 1) % 2:
                    keys = keys_of[is_recorded][part.start : part.stop]
                    start = thread_time()
                    hits[is_recorded] += drive(managers[is_recorded], keys)
                    spent = thread_time() - start
                    least[is_recorded][number] = min(spent, least[is_recorded][number])
            gc.enable()
            recorder.stop()
            if recorder.stats().num_lost or hits[0] != hits[1]:
                raise RuntimeError(f"{policy}: {hits} hits, {recorder.stats()}: not the same work")
    off, on = (sum(times) * 1e9 / num_keys for times in least)
    return off, on


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
        return compare(self.requests, policy, 32, 20_000, replay, 3)[is_recorded]

    track_ns_a_key.unit = "ns"  # type: ignore[attr-defined]


def main() -> int:
    """Print every case."""
    path = given_trace()
    print("case                                                 off       on   ratio")
    for policy, limit, split, num_blocks in CASES:
        with Trace(path) as trace:
            requests = list(islice(trace, limit))
        for drive in (replay, one_by_one):
            off, on = compare(requests, policy, split, num_blocks, drive, NUM_ROUNDS)
            case = f"{policy}, {len(requests)} requests x {split}, {drive.__name__}"
            print(f"{case:<44} {off:8.1f} {on:8.1f} ns {on / off:6.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
