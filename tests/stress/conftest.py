"""Fixtures of the stress tests: the budget, and threads that run until one of them fails."""

import os
import random
import sys
import threading
from pathlib import Path

import pytest

# For `disks`, and for `stores`, whose helpers it uses.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tiers")]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("slow")


@pytest.fixture
def budget():
    """The amount of work: 1 in CI, or the value of `KVCACHE_STRESS`."""
    return float(os.environ.get("KVCACHE_STRESS", "0.3"))


@pytest.fixture
def run_threads():
    """Call each body with random numbers repeatedly in its own thread; raise the first exception."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield _run_threads
    sys.setswitchinterval(before)


def _run_threads(bodies, seconds):
    faults, stop = [], threading.Event()
    barrier = threading.Barrier(len(bodies))

    def work(body, index):
        try:
            barrier.wait()
            step = index
            while not stop.is_set():
                body(random.Random(step))
                step += len(bodies)
        except BaseException as fault:
            faults.append(fault)
            stop.set()

    threads = [threading.Thread(target=work, args=(body, i), daemon=True) for i, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if faults:
        raise faults[0]
