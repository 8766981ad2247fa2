"""Many policies at many capacities, with tiers below or without: the what-if of `kvcache replay`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcache.cli import common
from kvcache.lab.commands.below import parse_prices, parse_rate, stacks_of
from kvcache.options import parse_count, parse_size

if TYPE_CHECKING:
    from kvcache.cli.model import Weights
    from kvcache.lab.commands.below import TierChoice
    from kvcache.lab.commands.replay_options import BlockSize, ReplayOptions
    from kvcache.lab.replay.cells import Cell, Job
    from kvcache.lab.replay.compact import CompactTrace
    from kvcache.lab.replay.grid import Grid
    from kvcache.lab.replay.requests import Request, TraceFile
    from kvcache.lab.replay.serving import Serving

_REFRESH_REQUESTS = 1000
_PLAIN_S = 30.0
NUM_SHARDS = 8
"""A sample is replayed in so many shards, whose spread tells how far it is off."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is `given`, parsed: which cells there are, and how each is replayed."""

    given: ReplayOptions
    capacities: list[int]
    tiers: list[TierChoice]
    block_bytes: int | None
    max_memory_bytes: int | None
    prices: list[float | None]
    memory_bytes_per_s: float
    engines: int | None


def read_options(given: ReplayOptions, size: BlockSize, capacities: list[int], tiers: list[TierChoice]) -> Options:
    """Check and parse what the command line says."""
    return Options(
        given=given,
        capacities=capacities,
        tiers=tiers,
        block_bytes=size.known_bytes,
        max_memory_bytes=None if given.max_memory is None else parse_size("--max-memory", given.max_memory),
        prices=parse_prices(given.price, 1 + len(tiers)),
        memory_bytes_per_s=parse_rate("--memory-rate", given.memory_rate),
        engines=None if given.engines is None else parse_count("--engines", given.engines),
    )


@dataclass(slots=True)
class Result:
    """What is known of a grid when it ends, or is stopped."""

    title: str
    grid: Grid
    options: Options
    weights: Weights | None
    compact: CompactTrace
    found: dict[Job, Cell]
    wanted: list[Job]
    unbounded: Job
    baseline: dict[str, Any] | None
    is_complete: bool
    elapsed_s: float

    @property
    def cells(self) -> list[Cell]:
        """The finished cells, in the grid's order."""
        return [self.found[job] for job in self.wanted if job in self.found]

    @property
    def media(self) -> list[str]:
        """Host memory and the tiers below it, as reports call them."""
        return ["memory", *(tier.name for tier in self.options.tiers)]

    def stack_name(self, cell: Cell) -> str:
        """Return what lies below host memory in a cell."""
        block_bytes = self.options.block_bytes or 1
        named = [
            f"{tier.name} {common.human_bytes(blocks * block_bytes)}"
            for tier, blocks in zip(self.options.tiers, cell.tiers, strict=False)
        ]
        return " + ".join(named) or "none"


def run(trace: TraceFile, options: Options, weights: Weights | None) -> Result:
    """Simulate the grid; Ctrl-C ends it with what has finished so far."""
    from kvcache.lab.replay.cells import OPTIMUM, Job, Plan
    from kvcache.lab.replay.checkpoint import Checkpoint
    from kvcache.lab.replay.compact import CompactTrace
    from kvcache.lab.replay.grid import Grid, check_grid
    from kvcache.lab.replay.keys import split_block_size

    given = options.given
    check_grid(given.policies, options.capacities)
    split_block_size(trace.block_size, given.split)
    stacks = stacks_of(options.tiers, options.block_bytes) if options.block_bytes else [()]
    num_shards = 1 if given.sample == 1 else NUM_SHARDS
    started = monotonic()
    with ExitStack() as open_now:
        folder = Path(open_now.enter_context(tempfile.TemporaryDirectory(prefix="kvcache-trace-")))
        progress = open_now.enter_context(_Progress(given.quiet))

        def read() -> Iterator[Request]:
            for i, request in enumerate(islice(trace, given.limit)):
                if i % _REFRESH_REQUESTS == 0:
                    progress.update("reading", trace.position_bytes / trace.size_bytes, f"{i:,} requests")
                yield request

        compact = CompactTrace.spool(read(), trace.block_size, folder, given.sample, given.seed)
        serving = _serving(options, weights, compact)
        plan = Plan(given.split, given.store_threshold, num_shards, serving, given.arbiter)
        grid = Grid(given.policies, options.capacities, stacks, plan)
        wanted, unbounded = grid.cells(), Job(OPTIMUM, None)
        found: dict[Job, Cell] = {}
        add = None
        if given.checkpoint is not None:
            checkpoint = open_now.enter_context(Checkpoint(given.checkpoint, _facts_of(compact, grid)))
            found = {job: cell for job, cell in checkpoint.cells.items() if job in [*wanted, unbounded]}
            add = checkpoint.add
        is_complete = _simulate(compact, grid, options, found, len(wanted) + 1, add, progress)
    return Result(
        f"{trace.name} ({trace.format})",
        grid,
        options,
        weights,
        compact,
        found,
        wanted,
        unbounded,
        _baseline(compact, serving),
        is_complete,
        monotonic() - started,
    )


def _simulate(
    compact: CompactTrace,
    grid: Grid,
    options: Options,
    found: dict[Job, Cell],
    total: int,
    add: Callable[[Cell], None] | None,
    progress: _Progress,
) -> bool:
    """Replay the cells that `found` lacks, up to `total`, into it; return False if Ctrl-C has ended it before."""
    from kvcache.lab.replay.cells import Job
    from kvcache.lab.replay.grid import run_grid
    from kvcache.lab.replay.requests import ReplayError

    before = len(found)

    def progressed(share: float) -> None:
        status = f"{len(found):,} of {total:,} cells"
        progress.update("simulating", before / total + share * (1 - before / total), status)

    try:
        for cell in run_grid(
            compact,
            grid,
            known=found,
            with_unbounded=True,
            num_processes=options.given.jobs,
            max_memory_bytes=options.max_memory_bytes or common.usable_bytes(),
            progressed=progressed,
            runner=_runner(options.given.dask),
        ):
            found[Job(cell.policy, cell.num_blocks, cell.tiers)] = cell
            if add is not None:
                add(cell)
    except KeyboardInterrupt:
        return False
    except ReplayError as error:
        raise common.CommandError(str(error)) from error
    return True


class _Progress:
    """A bar on a terminal; elsewhere a line every half a minute, so that a log shows that something moves."""

    def __init__(self, is_quiet: bool) -> None:
        self._bar = common.progress("%", is_quiet)
        self._task: Any = None
        self._is_plain = not is_quiet and not self._bar.console.is_terminal
        self._due = monotonic() + _PLAIN_S

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        self._task = self._bar.add_task("reading", total=1.0, done=0, status="")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bar.stop()

    def update(self, stage: str, share: float, status: str) -> None:
        self._bar.update(self._task, description=stage, completed=share, done=int(100 * share), status=status)
        if self._is_plain and monotonic() >= self._due:
            print(f"kvcache: {stage}: {share:.0%}, {status}", file=sys.stderr, flush=True)
            self._due = monotonic() + _PLAIN_S


def _runner(dask: str | None) -> Any:
    if dask is None:
        return None
    from kvcache.lab.replay.on_dask import DaskRunner

    return DaskRunner(dask)


def _serving(options: Options, weights: Weights | None, compact: CompactTrace) -> Serving | None:
    if options.block_bytes is None or not (options.tiers or weights):
        return None
    from kvcache.lab.replay.serving import Medium, Serving, engines_for

    rates = [options.memory_bytes_per_s, *(tier.bytes_per_s for tier in options.tiers)]
    names = ["memory", *(tier.name for tier in options.tiers)]
    media = tuple(map(Medium, names, rates, options.prices))
    token_s = weights.saved_s(1) if weights else None
    engines = options.engines
    if engines is None:
        engines = 1 if token_s is None else engines_for(compact.arrivals_s, compact.num_tokens, token_s)
    return Serving(options.block_bytes, media, token_s, engines)


def _baseline(compact: CompactTrace, serving: Serving | None) -> dict[str, Any] | None:
    """Return what serving without any cache would be like, where that can be known."""
    if serving is None or serving.token_prefill_s is None or compact.rate < 1:
        return None
    from kvcache.lab.replay.serving import weigh_nothing

    return weigh_nothing(compact.arrivals_s, compact.input_lengths, serving)


def _facts_of(compact: CompactTrace, grid: Grid) -> dict[str, Any]:
    from kvcache.lab.replay.grid import facts_of

    weighed = repr(grid.plan.serving)
    return {"trace": compact.digest, **facts_of(grid), "weighed_by": weighed}
