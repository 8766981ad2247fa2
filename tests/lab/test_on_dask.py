"""A grid on a Dask cluster gives the same integers as on this machine, also if a worker dies."""

import os
import signal

import pytest

from kvcache.lab.simulate.cells import Job, Plan
from kvcache.lab.simulate.grid import Grid, run_grid
from kvcache.lab.simulate.on_dask import run_on_dask
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.requests import ReplayError

distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.slow,
    # Warnings of dask itself: sockets of killed workers, and its own deprecations.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        yield cluster


def counts(cells):
    return sorted((cell.policy, cell.num_blocks, cell.hit_blocks, cell.evicted_blocks or 0) for cell in cells)


def test_killed_worker_changes_no_integer(cluster):
    workload = ChatWorkload(num_requests=1500)
    policies, capacities = ["lru", "arc", "gittins", "min"], [500, 1000, 2000, 4000]
    trace = CompactTrace.of(workload, workload.block_size)
    cells = []
    for cell in run_grid(trace, Grid(policies, capacities), dask=cluster.scheduler_address):
        if not cells:
            with distributed.Client(cluster.scheduler_address) as client:
                os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        cells.append(cell)
    assert counts(cells) == counts(run_grid(trace, Grid(policies, capacities), num_processes=1))


def test_shards_of_a_sample_run_apart(cluster):
    workload = ChatWorkload(num_requests=300)
    trace = CompactTrace.of(workload, workload.block_size)
    grid = Grid(["lru"], [2000], plan=Plan(num_shards=4))
    (there,) = run_grid(trace, grid, dask=cluster.scheduler_address)
    (here,) = run_grid(trace, grid, num_processes=1)
    assert (there.hit_blocks, there.block_hit_error) == (here.hit_blocks, here.block_hit_error)
    assert here.block_hit_error


def test_scheduler_out_of_reach_is_named(monkeypatch):
    monkeypatch.setattr("kvcache.lab.simulate.on_dask._CONNECT_TIMEOUT", "200ms")
    trace = CompactTrace.of([], 16)
    with pytest.raises(ReplayError, match=r"scheduler tcp://127\.0\.0\.1:9 cannot be reached"):
        list(run_on_dask("tcp://127.0.0.1:9", trace, [Job("lru", 1)], Plan()))
