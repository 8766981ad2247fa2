"""What-if: one trace under many policies and capacities, on all cores.

Bookkeeping alone, since hits do not depend on the bytes. Every cell of the grid is a process's own replay.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.replay.keys import KeyMaker, split_block_size
from kvcache.replay.optimum import optimal_hits
from kvcache.replay.requests import ReplayError, Request
from kvcache.replay.run import Replay, check_policy

if TYPE_CHECKING:
    from kvcache.replay.requests import Int64Array, RequestSource

OPTIMUM = "min"
"""The name of the offline optimum, which stands among the policies of a grid and serves nobody."""

_ARRAYS = ("ids", "bounds", "input_lengths")
_POLL_S = 0.2
_PROGRESS_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class CompactTrace:
    """A whole trace in three arrays, which processes share through files.

    Parameters
    ----------
    ids : numpy.ndarray
        The ids of all requests, one after the other; int64.
    bounds : numpy.ndarray
        Where each request begins in `ids`, and where the last one ends; int64, shape (requests + 1,).
    input_lengths : numpy.ndarray
        Tokens of each prompt; int64, shape (requests,).
    block_size : int
        Tokens of one id.
    """

    ids: Int64Array
    bounds: Int64Array
    input_lengths: Int64Array
    block_size: int

    @classmethod
    def of(cls, requests: Iterable[Request], block_size: int) -> CompactTrace:
        """Gather requests."""
        parts, lengths = [], []
        for request in requests:
            parts.append(request.hash_ids)
            lengths.append(request.input_length)
        bounds = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return cls(ids, bounds, np.array(lengths, dtype=np.int64), block_size)

    def __len__(self) -> int:
        return len(self.input_lengths)

    def __iter__(self) -> Iterator[Request]:
        bounds = self.bounds.tolist()
        for i, length in enumerate(self.input_lengths.tolist()):
            yield Request(self.ids[bounds[i] : bounds[i + 1]], length, 0, 0.0)

    def split(self, parts: int) -> CompactTrace:
        """Return the trace with every id as `parts` ids of as many blocks; ids are renumbered."""
        block_size = split_block_size(self.block_size, parts)
        _, dense = np.unique(self.ids, return_inverse=True)
        ids = (dense.astype(np.int64)[:, None] * parts + np.arange(parts)).ravel()
        return CompactTrace(ids, self.bounds * parts, self.input_lengths, block_size)

    def save(self, folder: Path) -> None:
        """Write the arrays to `folder`."""
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path, block_size: int) -> CompactTrace:
        """Map what `save` wrote."""
        ids, bounds, input_lengths = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
        return cls(ids, bounds, input_lengths, block_size)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one capacity; the counts that the optimum does not have are None."""

    policy: str
    num_blocks: int | None
    requests: int
    tokens: int
    hit_tokens: int
    token_hit_rate: float
    blocks: int
    hit_blocks: int
    block_hit_rate: float
    stored_blocks: int | None = None
    evicted_blocks: int | None = None
    rejected_requests: int | None = None
    bookkeeping_us: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        return asdict(self)


def check_grid(policies: Sequence[str], capacities: Sequence[int]) -> None:
    """Raise if a policy is not known or named twice, or the capacities are not positive and ascending.

    Raises
    ------
    ValueError
        With the value that is wrong.
    """
    for i, policy in enumerate(policies):
        if policy in policies[:i]:
            raise ValueError(f"policy {policy!r} is named twice")
        if policy != OPTIMUM:
            check_policy(policy)
    previous = 0
    for capacity in capacities:
        if type(capacity) is not int or capacity <= previous:
            raise ValueError(f"capacities must be ints >= 1 and ascend, got {capacity!r} after {previous}")
        previous = capacity


def simulate(
    trace: RequestSource,
    policies: Sequence[str],
    capacities: Sequence[int],
    split: int = 1,
    store_threshold: int = 0,
    num_processes: int | None = None,
    progressed: Callable[[float], None] | None = None,
) -> list[Cell]:
    """Replay a trace under every policy at every capacity.

    Parameters
    ----------
    trace : RequestSource
        The requests; gathered into a `CompactTrace` if they are none.
    policies : sequence of str
        Names, ``"package.module:Class"``, or ``"min"`` for the offline optimum.
    capacities : sequence of int
        Blocks, ascending.
    split : int
        Keys that one listed id becomes.
    store_threshold : int
        Offers after which a key is stored; does not bear on ``"min"``.
    num_processes : int, optional
        Processes; None: one per CPU that this process may use. One cell, or one process, runs in the caller's.
    progressed : callable, optional
        Hears a few times a second which share of the work is done.

    Returns
    -------
    list of Cell
        Policy by policy, in the order given.

    Raises
    ------
    ValueError
        See `check_grid`, or `split` does not divide the tokens of a block.
    ReplayError
        A process died.

    Notes
    -----
    Processes are spawned, so a script that calls this needs ``if __name__ == "__main__":``.
    """
    check_grid(policies, capacities)
    split_block_size(trace.block_size, split)
    compact = trace if isinstance(trace, CompactTrace) else CompactTrace.of(trace, trace.block_size)
    jobs = [(policy, capacity) for policy in policies for capacity in capacities]
    workers = min(len(jobs), num_processes or len(os.sched_getaffinity(0)))
    tell = progressed or (lambda share: None)
    total = max(1, len(jobs) * len(compact))
    if workers <= 1:
        cells: list[Cell] = []
        for policy, capacity in jobs:
            before = len(cells) * len(compact)
            cells.append(
                run_cell(compact, policy, capacity, split, store_threshold, partial(_tell_share, tell, before, total))
            )
        return cells
    with tempfile.TemporaryDirectory(prefix="kvcache-grid-") as name:
        folder = Path(name)
        compact.save(folder)
        # Requests done of each job, and behind them whether to stop: a job that has begun cannot be cancelled.
        done = np.lib.format.open_memmap(folder / "done.npy", mode="w+", dtype=np.int64, shape=(len(jobs) + 1,))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            try:
                with _uninterrupted():
                    futures = [
                        pool.submit(
                            _run_shared, folder, compact.block_size, policy, capacity, split, store_threshold, i
                        )
                        for i, (policy, capacity) in enumerate(jobs)
                    ]
                _watch(futures, lambda: tell(float(done[:-1].sum()) / total))
                return [future.result() for future in futures]
            except BrokenProcessPool as error:
                raise ReplayError("a process of the grid died (out of memory?); nothing was kept") from error
            finally:
                done[-1] = 1
                pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Start processes that hear no Ctrl-C, wherever they stand: their parent does, and stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell_share(tell: Callable[[float], None], before: int, total: int, done: int) -> None:
    tell((before + done) / total)


def _watch(futures: list[Future[Cell]], tell: Callable[[], None]) -> None:
    pending = set(futures)
    while pending:
        ended, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        for future in ended:
            future.result()
        tell()


def _run_shared(
    folder: Path, block_size: int, policy: str, num_blocks: int, split: int, store_threshold: int, slot: int
) -> Cell:
    done = np.load(folder / "done.npy", mmap_mode="r+")

    def progressed(count: int) -> None:
        done[slot] = count
        if done[-1]:
            raise ReplayError("the grid was stopped")

    return run_cell(CompactTrace.load(folder, block_size), policy, num_blocks, split, store_threshold, progressed)


def run_cell(
    trace: CompactTrace,
    policy: str,
    num_blocks: int,
    split: int,
    store_threshold: int,
    progressed: Callable[[int], None],
) -> Cell:
    """Replay the trace under one policy at one capacity, in this process."""
    if policy == OPTIMUM:
        cell = optimum_cell(trace, num_blocks, split, progressed)
    else:
        block_size = split_block_size(trace.block_size, split)
        replay = Replay(CPUOffloadingManager(block_size, num_blocks, policy, store_threshold=store_threshold))
        make_keys = KeyMaker(split)
        for done, request in enumerate(trace):
            if done % _PROGRESS_REQUESTS == 0:
                progressed(done)
            replay.step(request, make_keys(request.hash_ids))
        counted = replay.tally.as_dict()
        del counted["loaded_blocks"]
        cell = Cell(policy, num_blocks, **counted)
    progressed(len(trace))
    return cell


def optimum_cell(
    trace: CompactTrace, num_blocks: int | None, split: int, progressed: Callable[[int], None] | None = None
) -> Cell:
    """Return what the offline optimum hits; with `num_blocks` None, what an unbounded cache hits."""
    trace = trace.split(split) if split > 1 else trace
    hits = np.array(optimal_hits(trace, num_blocks, progressed), dtype=np.int64)
    hit_tokens = int(np.minimum(hits * trace.block_size, trace.input_lengths).sum())
    tokens, hit_blocks, blocks = int(trace.input_lengths.sum()), int(hits.sum()), len(trace.ids)
    return Cell(
        policy=OPTIMUM,
        num_blocks=num_blocks,
        requests=len(trace),
        tokens=tokens,
        hit_tokens=hit_tokens,
        token_hit_rate=hit_tokens / max(1, tokens),
        blocks=blocks,
        hit_blocks=hit_blocks,
        block_hit_rate=hit_blocks / max(1, blocks),
    )
