"""Compare the compiled manager with the plain-Python one on the conversation trace, in one run.

``python -m asv_benchmarks.side_by_side [TRACE]`` prints, per case, the best of three interleaved pairs: CPU seconds,
nanoseconds a key for the whole cycle of a request, and the ratio. Keys are made before the clock starts.
"""

from __future__ import annotations

import gc
import sys
from itertools import islice
from time import process_time
from typing import Any

from asv_benchmarks.plain_manager import PlainManager
from asv_benchmarks.traces import fresh_keys, given_trace, replay
from kvcache import CPUOffloadingManager
from kvcache.lab.traces.requests import Request
from kvcache.lab.traces.trace import Trace

# policy, requests (None: all), keys per listed block, capacity, the ratio that is asked for
CASES: tuple[tuple[str, int | None, int, int, float], ...] = (
    ("lru", 2000, 32, 100_000, 10.0),
    ("arc", None, 1, 10_000, 5.0),
)
NUM_PAIRS = 3


def seconds(manager: Any, requests: list[Request], split: int) -> tuple[float, int, int]:
    """Return the CPU time of one replay, its prefix hits and its keys."""
    keys = fresh_keys(requests, split)
    gc.collect()
    gc.disable()
    start = process_time()
    hits = replay(manager, keys)
    spent = process_time() - start
    gc.enable()
    return spent, hits, sum(map(len, keys))


def compare(requests: list[Request], policy: str, split: int, num_blocks: int) -> tuple[float, float, int]:
    """Return the best time of the compiled and of the plain manager, and the number of keys."""
    compiled, plain = [], []
    num_keys = 0
    for _ in range(NUM_PAIRS):
        ours, our_hits, num_keys = seconds(CPUOffloadingManager(512 // split, num_blocks, policy), requests, split)
        theirs, their_hits, _ = seconds(PlainManager(512 // split, num_blocks, policy), requests, split)
        if our_hits != their_hits:
            raise RuntimeError(f"{policy}: {our_hits} hits compiled, {their_hits} plain: not the same work")
        compiled.append(ours)
        plain.append(theirs)
    return min(compiled), min(plain), num_keys


def main() -> int:
    """Print every case; 1 if a ratio falls short."""
    path = given_trace()
    short = 0
    print("case                                    compiled           plain   ratio  asked")
    for policy, limit, split, num_blocks, asked in CASES:
        with Trace(path) as trace:
            requests = list(islice(trace, limit))
        ours, theirs, num_keys = compare(requests, policy, split, num_blocks)
        case = f"{policy}, {len(requests)} requests x {split}, {num_blocks}"
        costs = [f"{spent:6.3f} s {spent / num_keys * 1e9:5.0f} ns" for spent in (ours, theirs)]
        print(f"{case:<34} {costs[0]} {costs[1]} {theirs / ours:7.1f} {asked:6.1f}", flush=True)
        short += theirs / ours < asked
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
