"""Fixtures that several modules need."""

import sys
import threading
import time
from pathlib import Path

import pytest

# For `geometries` and `host_stream`.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def switch_interval():
    """Return `sys.setswitchinterval`, which the end of the test undoes."""
    before = sys.getswitchinterval()
    yield sys.setswitchinterval
    sys.setswitchinterval(before)


@pytest.fixture
def take_in_threads(switch_interval):
    """Submit jobs 1..num_jobs while threads take their results; return the ids in the order in which they were taken.

    `check` is called with each result, and `advance` repeatedly in a thread of its own.
    """

    def run(handler, num_jobs, num_takers, check=lambda result: None, advance=lambda: time.sleep(0.001)):
        from geometries import spec_of

        taken, faults = [], []
        until = time.monotonic() + 60

        def repeat(step):
            try:
                while len(taken) < num_jobs and not faults and time.monotonic() < until:
                    step()
            except Exception as fault:
                faults.append(fault)

        def take():
            for result in handler.get_finished():
                check(result)
                taken.append(result.job_id)

        switch_interval(1e-6)
        threads = [threading.Thread(target=repeat, args=(step,)) for step in [take] * num_takers + [advance]]
        for thread in threads:
            thread.start()
        for job_id in range(1, num_jobs + 1):
            assert handler.transfer_async(job_id, spec_of([1, 2], [1, 2]))
        for thread in threads:
            thread.join()
        assert faults == []
        return taken

    return run
