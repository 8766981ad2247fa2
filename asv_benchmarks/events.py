"""What events cost the scheduler, which takes them after each request: off, kept, read, published, and subscribed to.

``python -m asv_benchmarks.events`` prints, per case, nanoseconds a key for the whole cycle of a request and the 50th
and 99th percentile of a cycle, in microseconds: CPU time of the scheduler's thread, turn about, best of five rounds.
Metrics are on from "published" on. A subscriber is a process of its own, as a router is; what scrapes is a thread here.
Needs the extra ``events``.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from time import thread_time, thread_time_ns
from typing import Any

import numpy as np

from asv_benchmarks.traces import conversation_path, fresh_keys, serve
from kvcache import CPUOffloadingManager
from kvcache.control.telemetry import Telemetry
from kvcache.replay.requests import Request
from kvcache.replay.trace import Trace

CASES = ("off", "kept", "read", "published", "subscriber and scrapes", "subscriber stands still")
NUM_ROUNDS = 5
NUM_REQUESTS = 12_000
_POLICY, _SPLIT, _NUM_BLOCKS = "arc", 8, 20_000


def one_round(case: str, requests: list[Request]) -> tuple[float, float, float]:
    """Return nanoseconds a key, and the median and the 99th percentile of a request's cycle in microseconds."""
    keys = fresh_keys(requests, _SPLIT)
    manager = CPUOffloadingManager(512 // _SPLIT, _NUM_BLOCKS, _POLICY, case != "off")
    cycles = np.empty(len(keys))
    with contextlib.ExitStack() as stack:
        publisher = _publisher(case, manager, stack) if case in CASES[3:] else None
        is_read = case == "read"
        gc.collect()
        gc.disable()
        start = thread_time()
        for number, one in enumerate(keys):
            began = thread_time_ns()
            serve(manager, one)
            events = manager.take_events()
            if publisher is not None:
                publisher.publish(events)
            elif is_read:
                for _ in events:
                    pass
            cycles[number] = thread_time_ns() - began
        spent = thread_time() - start
        gc.enable()
    p50, p99 = np.quantile(cycles / 1000, (0.5, 0.99)).tolist()
    return spent * 1e9 / sum(map(len, keys)), p50, p99


def _publisher(case: str, manager: CPUOffloadingManager, stack: contextlib.ExitStack) -> Any:
    """Return a publisher, and start who listens to it until the stack is left."""
    from kvcache.exporters.kv_events import KVEventPublisher

    publisher = KVEventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=512 // _SPLIT)
    stack.callback(publisher.close)
    telemetry = Telemetry(manager, time_calls=True)
    stack.callback(telemetry.close)
    if case == "published":
        return publisher
    subscriber = subprocess.Popen(
        [sys.executable, "-c", _SUBSCRIBER, publisher.endpoint, str(int(case == "subscriber stands still"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stack.enter_context(subscriber)
    assert subscriber.stdin is not None
    assert subscriber.stdout is not None
    stack.callback(subscriber.stdin.close)
    joined = threading.Thread(target=subscriber.stdout.readline)
    joined.start()
    while joined.is_alive():
        publisher.publish_cleared()
        joined.join(0.02)
    if case == "subscriber and scrapes":
        stop = threading.Event()
        scraper = threading.Thread(target=_scrape, args=(telemetry, stop))
        scraper.start()
        stack.callback(scraper.join)
        stack.callback(stop.set)
    return publisher


# It prints a line when its first message has come. One that stands still reads nothing more: what it is sent piles up
# to the high-water mark, and is then dropped for it. Both end with the benchmark.
_SUBSCRIBER = """
import sys, threading, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
stands_still = sys.argv[2] == "1"
if stands_still:
    socket.setsockopt(zmq.RCVHWM, 1)
socket.connect(sys.argv[1])
socket.recv_multipart()
print("joined", flush=True)
ended = threading.Thread(target=sys.stdin.read)
ended.start()
while ended.is_alive():
    if stands_still:
        ended.join()
    elif socket.poll(100):
        socket.recv_multipart()
socket.context.destroy(linger=0)
"""


def _scrape(telemetry: Telemetry, stop: threading.Event) -> None:
    """Take a snapshot of all that is counted once a second; the first one at once, as a round may be shorter."""
    while True:
        telemetry.snapshot().as_dict()
        if stop.wait(1.0):
            return


def main() -> int:
    """Print every case and its ratios to the first."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else conversation_path()
    if path is None:
        print("events: name the conversation trace, or its folder in KVCACHE_SHARED", file=sys.stderr)
        return 2
    with Trace(path) as trace:
        requests = list(islice(trace, NUM_REQUESTS))
    rounds = [[one_round(case, requests) for case in CASES] for _ in range(NUM_ROUNDS)]
    best = np.array(rounds).min(axis=0)
    print("case                       ns a key       p50 us       p99 us   ratio of all three")
    for case, figures in zip(CASES, best, strict=True):
        ratios = " ".join(f"{one:6.3f}" for one in figures / best[0])
        print(f"{case:<24} {figures[0]:10.1f} {figures[1]:12.1f} {figures[2]:12.1f}   {ratios}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
