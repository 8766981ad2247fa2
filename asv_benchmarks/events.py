"""What events cost the scheduler: off, and kept or read after each request.

``python -m asv_benchmarks.events`` prints, per case, nanoseconds a key for the whole cycle of a request and the 50th
and 99th percentile of a cycle, in microseconds: CPU time of the scheduler's thread, in turns. Each figure is the lowest
decile of many short rounds. The ratios are medians over the rounds, of each case to the case "off" of the same round.
Metrics are on in every case.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from time import thread_time_ns
from typing import Any

import numpy as np

from asv_benchmarks.traces import fresh_keys, given_trace, serve
from kvcache import CPUOffloadingManager
from kvcache.control.telemetry import Telemetry
from kvcache.lab.traces.requests import Request
from kvcache.lab.traces.trace import Trace

CASES = ("off", "kept", "read")
NUM_ROUNDS = 25
NUM_REQUESTS = 3_000
_POLICY, _SPLIT, _NUM_BLOCKS = "arc", 8, 20_000


def one_round(case: str, requests: list[Request]) -> tuple[float, float, float]:
    """Return nanoseconds a key, and the median and the 99th percentile of a request's cycle in microseconds."""
    keys = fresh_keys(requests, _SPLIT)
    manager = CPUOffloadingManager(512 // _SPLIT, _NUM_BLOCKS, _POLICY, case != "off")
    cycles = np.empty(len(keys))
    with contextlib.ExitStack() as stack:
        telemetry = Telemetry(manager, time_calls=True)
        stack.callback(telemetry.close)
        step = _STEPS[case]
        gc.collect()
        gc.disable()
        for number, one in enumerate(keys):
            began = thread_time_ns()
            serve(manager, one)
            step(manager)
            cycles[number] = thread_time_ns() - began
        gc.enable()
    p50, p99 = np.quantile(cycles / 1000, (0.5, 0.99)).tolist()
    return float(cycles.sum()) / sum(map(len, keys)), p50, p99


# What the engine does after a request.
_STEPS: dict[str, Callable[[Any], object]] = {
    "off": lambda manager: None,
    "kept": lambda manager: manager.take_events(),
    "read": lambda manager: deque(manager.take_events(), 0),
}


def main() -> int:
    """Print every case and its ratios to the first."""
    path = given_trace()
    with Trace(path) as trace:
        requests = list(islice(trace, NUM_REQUESTS))
    draw = random.Random(0)
    figures = np.empty((NUM_ROUNDS, len(CASES), 3))
    for figures_of_round in figures:
        # A round leaves the heap as its events did, so no case may always come behind the same one.
        for number in draw.sample(range(len(CASES)), len(CASES)):
            figures_of_round[number] = one_round(CASES[number], requests)
    least = np.quantile(figures, 0.1, axis=0)
    ratios = np.median(figures / figures[:, :1], axis=0)
    print("case                       ns a key       p50 us       p99 us   ratio of all three")
    for case, found, over_off in zip(CASES, least, ratios, strict=True):
        shown = " ".join(f"{one:6.3f}" for one in over_off)
        print(f"{case:<24} {found[0]:10.1f} {found[1]:12.1f} {found[2]:12.1f}   {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
