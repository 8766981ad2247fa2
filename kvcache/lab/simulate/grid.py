"""Replay one trace under many policies and capacities, on all cores or on a cluster.

Only the bookkeeping is done: hits do not depend on bytes. Each cell is reported as it finishes, so an interrupted grid
keeps the finished cells.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcache.lab.simulate.cells import OPTIMUM, Cell, Job, Plan, joined, run_job
from kvcache.lab.traces.compact import CompactTrace, next_uses
from kvcache.lab.traces.requests import ReplayError
from kvcache.registry import POLICIES

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Int64Array

_POLL_S = 0.2
_MANY_IDS = 10_000_000
# Memory of a process before it replays anything, and of each block under a policy: rows, index, key and the ghosts of a
# policy that remembers four times its capacity. Measured; a policy in Python may need more.
_PROCESS_BYTES = 96 << 20
_BLOCK_BYTES = 320
_PLUGIN_BLOCK_BYTES = 1200
# The cost of a job relative to a plain replay, for the progress bar.
_OPTIMUM_WORK, _TIERED_WORK = 0.1, 4.0


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells to replay: policies at capacities over stacks of tiers.

    A stack holds the blocks of each tier; ``()`` is host memory alone. ``"min"``, the offline optimum, has no tiers.
    """

    policies: Sequence[str]
    capacities: Sequence[int]
    stacks: Sequence[tuple[int, ...]] = ((),)
    plan: Plan = field(default_factory=Plan)

    def cells(self) -> list[Job]:
        """Return the cells in the order of a report: policy by policy, tiers by tiers."""
        return [
            Job(policy, capacity, stack)
            for policy in self.policies
            for stack in self.stacks
            for capacity in self.capacities
            if not (stack and policy == OPTIMUM)
        ]

    def jobs_of(self, cell: Job) -> list[Job]:
        """Return the jobs of a cell: one for each shard."""
        return [Job(cell.policy, cell.num_blocks, cell.tiers, i) for i in range(self.plan.num_shards)]


def check_policies(policies: Sequence[str]) -> None:
    """Raise ValueError unless policies are known and distinct."""
    for i, policy in enumerate(policies):
        if policy in policies[:i]:
            raise ValueError(f"policy {policy!r} is named twice")
        if policy != OPTIMUM:
            POLICIES.resolve(policy)


def run_grid(
    trace: CompactTrace,
    grid: Grid,
    *,
    known: Collection[Job] = (),
    with_unbounded: bool = False,
    num_processes: int | None = None,
    max_memory_bytes: int | None = None,
    progressed: Callable[[float], None] | None = None,
    dask: str | None = None,
) -> Iterator[Cell]:
    """Yield the cells of a grid as they finish.

    Leave out the cells in `known`; add a cell of ``"min"`` without limit if `with_unbounded`. `num_processes` defaults
    to one per CPU; together they take at most `max_memory_bytes`, by estimate. `dask` is the address of a Dask
    scheduler, whose workers are used instead. Raise ValueError if a single cell does not fit, and ReplayError if a
    process dies.
    """
    wanted = grid.cells()
    if with_unbounded:
        wanted.append(Job(OPTIMUM, None))
    wanted = [cell for cell in wanted if cell not in known]
    jobs = [job for cell in wanted for job in grid.jobs_of(cell)]
    if not jobs:
        return
    report = progressed or (lambda share: None)
    parts: dict[Job, dict[int, Cell]] = {}
    with ExitStack() as open_now:
        if dask is not None:
            from kvcache.lab.simulate.on_dask import run_on_dask

            finished = _counted(run_on_dask(dask, trace, jobs, grid.plan), len(jobs), report)
        else:
            workers = min(len(jobs), num_processes or len(os.sched_getaffinity(0)))
            if workers <= 1 and len(trace.ids) <= _MANY_IDS:
                # Without a limit, the keys of all groups are held: count the different ids.
                num_ids = len(trace.ids) if grid.plan.groups is None else next_uses(trace)[1]
                _check_memory({job: cell_bytes(job, num_ids, grid.plan) for job in jobs}, max_memory_bytes)
                finished = _run_here(trace, jobs, grid.plan, report)
            else:
                name = open_now.enter_context(tempfile.TemporaryDirectory(prefix="kvcache-grid-"))
                finished = _run_processes(trace, jobs, grid.plan, report, workers, max_memory_bytes, Path(name))
        for job, cell in finished:
            whole = Job(job.policy, job.num_blocks, job.tiers)
            if grid.plan.num_shards == 1:
                yield cell
                continue
            shards = parts.setdefault(whole, {})
            shards[job.shard] = cell
            if len(shards) == grid.plan.num_shards:
                yield joined([shards[i] for i in range(grid.plan.num_shards)])


def cell_bytes(job: Job, num_ids: int, plan: Plan) -> int:
    """Return the approximate memory of one job if the trace names at most `num_ids` different blocks."""
    if job.policy == OPTIMUM and plan.groups is None:
        return _PROCESS_BYTES + num_ids * plan.split // 6
    each = _PLUGIN_BLOCK_BYTES if ":" in job.policy else _BLOCK_BYTES
    most = num_ids * plan.split * plan.num_groups
    return _PROCESS_BYTES + each * sum(min(blocks, most) for blocks in (job.num_blocks or most, *job.tiers))


def _check_memory(needs: Mapping[Job, int], max_memory_bytes: int | None) -> None:
    job = max(needs, key=needs.__getitem__)
    if max_memory_bytes is not None and needs[job] > max_memory_bytes:
        blocks = "no limit" if job.num_blocks is None else f"{job.num_blocks:,} blocks"
        raise ValueError(
            f"{job.policy} at {blocks} needs about {needs[job] / (1 << 20):,.0f} MiB, more than the "
            f"{max_memory_bytes / (1 << 20):,.0f} MiB it may take: sample the trace (--sample 0.1 needs a tenth)"
        )


def _asks_the_future(jobs: Sequence[Job]) -> bool:
    return any(job.policy == OPTIMUM for job in jobs)


def _work_of(job: Job) -> float:
    return _OPTIMUM_WORK if job.policy == OPTIMUM else _TIERED_WORK if job.tiers else 1.0


def _run_here(
    trace: CompactTrace, jobs: Sequence[Job], plan: Plan, report: Callable[[float], None]
) -> Iterator[tuple[Job, Cell]]:
    work = np.cumsum([0.0, *map(_work_of, jobs)])
    nexts: Int64Array | None = None
    if plan.num_shards == 1 and _asks_the_future(jobs):
        nexts, _ = next_uses(trace)
    for i, job in enumerate(jobs):

        def progressed(done: int, i: int = i) -> None:
            report(float(work[i] + (work[i + 1] - work[i]) * done / max(1, len(trace.ids))) / float(work[-1]))

        cell = run_job(trace, job, plan, progressed, nexts)
        report(float(work[i + 1] / work[-1]))
        yield job, cell


def _counted(
    finished: Iterator[tuple[Job, Cell]], total: int, report: Callable[[float], None]
) -> Iterator[tuple[Job, Cell]]:
    for done, pair in enumerate(finished, 1):
        report(done / total)
        yield pair


def _run_processes(
    trace: CompactTrace,
    jobs: Sequence[Job],
    plan: Plan,
    report: Callable[[float], None],
    workers: int,
    max_memory_bytes: int | None,
    folder: Path,
) -> Iterator[tuple[Job, Cell]]:
    if trace.folder is not None:
        folder = trace.folder
    else:
        trace.save(folder)
    distinct = len(trace.ids)
    if plan.num_shards == 1 and (len(trace.ids) > _MANY_IDS or _asks_the_future(jobs)):
        sort_bytes = None if max_memory_bytes is None else max_memory_bytes // 2
        nexts, distinct = next_uses(CompactTrace.load(folder), folder, sort_bytes)
        del nexts
    needs = {job: cell_bytes(job, -(-distinct // plan.num_shards), plan) for job in jobs}
    _check_memory(needs, max_memory_bytes)
    # The number of ids that each job has processed, and a stop flag: a running job cannot be cancelled.
    done = np.lib.format.open_memmap(folder / "done.npy", mode="w+", dtype=np.int64, shape=(len(jobs) + 1,))
    work = np.array([_work_of(job) for job in jobs]) / max(1, len(trace.ids))
    total = max(1e-9, float(work.sum()) * len(trace.ids))
    # Only a process that ends returns all of its memory.
    is_large = len(trace.ids) > _MANY_IDS
    # The processes import nothing from the working directory, which others may write to.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1 if is_large else None) as pool:
        waiting = list(enumerate(jobs))
        running: dict[Future[Cell], Job] = {}
        try:
            while waiting or running:
                room = None if max_memory_bytes is None else max_memory_bytes - sum(needs[j] for j in running.values())
                begin = [pair for pair in waiting if room is None or needs[pair[1]] <= room]
                begin = begin[: workers - len(running)] if room is None else begin[: min(1, workers - len(running))]
                with _uninterrupted():
                    for slot, job in begin:
                        running[pool.submit(_run_shared, folder, job, plan, slot)] = job
                        waiting.remove((slot, job))
                if begin and room is not None:
                    continue
                ended, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                report(min(1.0, float((done[:-1] * work).sum()) / total))
                for future in ended:
                    job = running.pop(future)
                    yield job, future.result()
        except BrokenProcessPool as error:
            raise ReplayError("a process of the grid died (out of memory?)") from error
        finally:
            done[-1] = 1
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Start processes that ignore Ctrl-C; their parent stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_shared(folder: Path, job: Job, plan: Plan, slot: int) -> Cell:
    done = np.load(folder / "done.npy", mmap_mode="r+")

    def progressed(count: int) -> None:
        done[slot] = count
        if done[-1]:
            raise ReplayError("the grid was stopped")

    trace = CompactTrace.load(folder)
    nexts = folder / "nexts.npy"
    known = np.load(nexts, mmap_mode="r") if nexts.exists() and len(trace.ids) else None
    cell = run_job(trace, job, plan, progressed, known)
    done[slot] = len(trace.ids)
    return cell
