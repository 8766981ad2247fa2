"""A disk that is busy or hangs never blocks the scheduler's thread.

The test bounds the longest call of a round: wall time less the time in which the thread could run and no core was free.
So it counts waits for a disk or a lock, but not the machine's other work. The best of several rounds counts, because
the holder of a lock may have waited for a core, too.
"""

import gc
import mmap
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine import Engine
from stores import until

from kvcache.request import ReqContext
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base import job_tier
from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

BLOCK_BYTES = 16384
NUM_BLOCKS = 1024
REQUEST_BLOCKS = 256
LIMIT_S = 0.002
MAX_ROUNDS = 10
SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")


def waited_for_a_core_s():
    return int(SCHEDULER_STATISTICS.read_text().split()[1]) / 1e9 if SCHEDULER_STATISTICS.exists() else 0.0


class Timed:
    """Calls a manager; keeps the longest time that a call has kept the thread."""

    def __init__(self, manager):
        self.manager = manager
        self.longest_s = 0.0

    def __getattr__(self, name):
        method = getattr(self.manager, name)

        def call(*args):
            waited = waited_for_a_core_s()
            start = time.perf_counter()
            answer = method(*args)
            taken = time.perf_counter() - start
            self.longest_s = max(self.longest_s, taken - (waited_for_a_core_s() - waited))
            return answer

        return call


def rounds(manager):
    """Give out timed managers, three at least, until one round has kept within the limit; fail after too many."""
    longest = []
    for _ in range(MAX_ROUNDS):
        timed = Timed(manager)
        yield timed
        longest.append(timed.longest_s)
        if len(longest) >= 3 and min(longest) < LIMIT_S:
            return
    pytest.fail(f"the longest calls of each round, in seconds: {longest}")


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(job_tier, "_SHUTDOWN_S", 0.2)
    flat = np.frombuffer(mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES), np.uint8)
    tier = DiskTier(
        DiskOptions(path=tmp_path / "tier", capacity=capacity_for(4096, BLOCK_BYTES)),
        flat.reshape(NUM_BLOCKS, BLOCK_BYTES),
    )
    rule = TierConfig(deadline_s=20.0, pause_s=60.0, max_store_blocks=256)
    manager = TieredOffloadingManager(16, NUM_BLOCKS, [(tier, rule)], deadline_s=0.5)
    yield tier, manager
    manager.shutdown()


def keys_of(request):
    return [b"%08d-%04d" % (request, i) for i in range(REQUEST_BLOCKS)]


def serve(timed, number):
    """Take one request through, as a scheduler does; return how many of its blocks were there, and the wait."""
    context, keys = ReqContext(), keys_of(number)
    start = time.monotonic()
    while (num_hits := timed.lookup(keys, context)) is None:
        timed.on_schedule_end()
        assert time.monotonic() - start < 60, "a request waits for ever"
        time.sleep(0.001)
    waited_s = time.monotonic() - start
    engine = Engine(timed)
    engine.load(keys[:num_hits], context)
    engine.store(keys, context)
    timed.on_request_finished(context)
    timed.on_schedule_end()
    return num_hits, waited_s


def test_busy_disk_spares_scheduler(world):
    _, manager = world
    for round_number, timed in enumerate(rounds(manager)):
        for number in range(12):
            serve(timed, number + 4 * round_number)
    assert manager.settle(20)
    assert manager.tier_stats()[0].written_blocks > REQUEST_BLOCKS


def test_hung_disk_spares_scheduler(world):
    tier, manager = world
    for number in range(6):
        serve(manager, number)
    assert manager.settle(20)
    # From here on, because a block that a busy disk wrote late would keep request 0 in host memory.
    (controller,) = manager.controllers
    controller.config = replace(controller.config, deadline_s=0.3)
    released = threading.Event()

    def hang(*args):
        released.wait()
        raise OSError("the mount came back")

    tier._store.read_payload = tier._store.write_payload = hang
    waits, hits = [], []
    try:
        for timed in rounds(manager):
            waits += [serve(timed, number)[1] for number in range(100, 106)]
            num_hits, waited_s = serve(timed, 0)
            hits.append(num_hits)
            waits.append(waited_s)
            timed.tier_stats()
        stats = manager.tier_stats()[0]
    finally:
        released.set()
    assert max(waits) < 30
    assert hits[0] == 0
    assert (stats.reads, stats.writes) == ("open", "open")
    assert stats.overdue_jobs >= 2
    assert stats.dropped_blocks > 0
    until(lambda: manager.on_schedule_end() or not manager.tier_stats()[0].stuck_blocks)
    assert (manager.stats().num_pending, manager.stats().num_referenced) == (0, 0)
