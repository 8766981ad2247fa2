"""Run the jobs of a grid, cells or shards of a sample, on a Dask cluster.

All workers get the trace once. If a worker dies, Dask runs its jobs elsewhere. Counts do not depend on the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.lab.simulate.cells import Cell, Job, Plan, run_job
from kvcache.lab.traces.requests import ReplayError

if TYPE_CHECKING:
    from kvcache.lab.traces.compact import CompactTrace

_MAX_ROUNDS = 5
_CONNECT_TIMEOUT = "10s"


def run_on_dask(address: str, trace: CompactTrace, jobs: Sequence[Job], plan: Plan) -> Iterator[tuple[Job, Cell]]:
    """Yield each job with its cell, as they finish on a Dask scheduler such as ``tcp://10.0.0.1:8786``.

    Its workers need the same kvcache, and the module of a policy that is named by its path. Raise ReplayError if the
    scheduler cannot be reached or jobs are lost repeatedly.
    """
    from distributed import Client

    # Files are mapped on this machine only.
    arrays: dict[str, Any] = {
        name: np.array(getattr(trace, name)) for name in ("ids", "bounds", "input_lengths", "arrivals_s")
    }
    whole = replace(trace, **arrays, folder=None)
    try:
        client = Client(address, timeout=_CONNECT_TIMEOUT)
    except (OSError, ValueError) as error:
        raise ReplayError(f"the Dask scheduler {address} cannot be reached: {error}") from error
    with client:
        left = list(jobs)
        for _ in range(_MAX_ROUNDS):
            lost: list[Job] = []
            yield from _round(client, whole, left, plan, lost)
            if not lost:
                return
            left = lost
    raise ReplayError(f"{len(left)} jobs were lost on the Dask cluster {_MAX_ROUNDS} times (out of memory?)")


def _round(
    client: Any, trace: CompactTrace, jobs: Sequence[Job], plan: Plan, lost: list[Job]
) -> Iterator[tuple[Job, Cell]]:
    from concurrent.futures import CancelledError

    from distributed import KilledWorker, as_completed
    from distributed.client import FutureCancelledError

    sent = client.scatter(trace, broadcast=True, hash=False)
    futures = {client.submit(run_job, sent, job, plan, pure=False): job for job in jobs}
    try:
        for future in as_completed(futures):
            try:
                cell = future.result()
            except (CancelledError, FutureCancelledError, KilledWorker):
                lost.append(futures[future])
            else:
                yield futures[future], cell
    finally:
        client.cancel(list(futures), force=True)
