"""Cost of telemetry to the scheduler's thread: CPU time of a trace's bookkeeping with telemetry over that without.

``python -m asv_benchmarks.telemetry TRACE.jsonl`` replays a trace (``hash_ids`` in each line) through managers
without telemetry, with timed calls, and with scrapes as well, turn by turn in one process. It prints each CPU time
over that of the first: the median over all turns.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.status import StatusServer, ask

TURN_REQUESTS = 1000
NUM_TURNS = 60
NUM_BLOCKS = 30_000


def replay(manager: Any, requests: list[list[bytes]]) -> float:
    """Return the CPU seconds that the manager's calls for some requests took in this thread."""
    # New objects, as an engine's requests bring them; made before the clock starts.
    fresh = [([bytes(bytearray(key)) for key in keys], ReqContext()) for keys in requests]
    start = time.thread_time_ns()
    for keys, context in fresh:
        hits = manager.lookup(keys, context)
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
        output = manager.prepare_store(keys[hits:], context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        manager.on_schedule_end()
    return (time.thread_time_ns() - start) * 1e-9


def scrape(path: Path, stop: threading.Event) -> None:
    """Ask once a second for all that is counted."""
    while not stop.wait(1.0):
        ask(path, "samples")


def ratios(requests: list[list[bytes]]) -> dict[str, float]:
    """Return the cost of each kind of telemetry over the cost without telemetry."""
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "status.sock"
        managers: dict[str, Any] = {name: CPUOffloadingManager(16, NUM_BLOCKS) for name in ("off", "timed", "scraped")}
        telemetries = [Telemetry(managers[name], time_calls=True) for name in ("timed", "scraped")]
        telemetries[1].exporters.append(StatusServer(telemetries[1], path))
        thread = threading.Thread(target=scrape, args=(path, stop))
        thread.start()
        took: dict[str, list[float]] = {name: [] for name in managers}
        gc.collect()
        gc.disable()
        for turn in range(NUM_TURNS + 10):
            first = turn * TURN_REQUESTS % (len(requests) - TURN_REQUESTS)
            part = requests[first : first + TURN_REQUESTS]
            for name, manager in managers.items():
                took[name].append(replay(manager, part))
        gc.enable()
        stop.set()
        thread.join()
        for telemetry in telemetries:
            telemetry.close()
    off = took["off"][10:]
    return {
        name: statistics.median(one / other for one, other in zip(times[10:], off, strict=True))
        for name, times in took.items()
    }


def main(path: str) -> None:
    """Print the ratios for a trace."""
    with Path(path).open(encoding="utf-8") as lines:
        requests = [[b"%036d" % number for number in json.loads(line)["hash_ids"]] for line in lines]
    keys = sum(map(len, requests)) / len(requests)
    print(f"{len(requests):,} requests of {keys:.1f} keys on average")
    for name, ratio in ratios(requests).items():
        print(f"{name:8} {ratio:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
