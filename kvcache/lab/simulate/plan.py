"""Simulate a plan: every policy at every capacity over every stack of tiers, with progress and a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcache.cli import common
from kvcache.lab.simulate.cells import OPTIMUM, Cell, Job, Plan
from kvcache.lab.simulate.checkpoint import Checkpoint
from kvcache.lab.simulate.choices import NO_LIMIT
from kvcache.lab.simulate.grid import Grid, check_policies, run_grid
from kvcache.lab.simulate.reading import doubts, lines_read, read_trace
from kvcache.lab.simulate.serving import Medium, Serving, engines_for, weigh_nothing
from kvcache.lab.traces.requests import ReplayError
from kvcache.options import format_size
from kvcache.transfer.free_memory import memory_left

if TYPE_CHECKING:
    from kvcache.assembly.models import Model
    from kvcache.lab.simulate.choices import ServingChoice, TierChoice
    from kvcache.lab.simulate.groups import Groups
    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import TraceFile

# Without a limit, a simulation uses this share of the free memory.
_MEMORY_SHARE = 0.8
NUM_SHARDS = 8
"""A sample is replayed in so many shards; their spread gives its error."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a plan, checked; `jobs` is a number of processes or the address of a Dask scheduler."""

    policies: list[str]
    capacities: list[int]
    tiers: list[TierChoice]
    stacks: list[tuple[int, ...]]
    serving: ServingChoice
    split: int
    block_bytes: int | None
    sample: float
    seed: int
    checkpoint: str | None
    jobs: int | str | None
    is_quiet: bool
    groups: Groups | None = None
    has_hints: bool = False


@dataclass(slots=True)
class Result:
    """A plan that has ended or was stopped."""

    title: str
    grid: Grid
    settings: Settings
    model: Model | None
    compact: CompactTrace
    found: dict[Job, Cell]
    unbounded: Cell | None
    baseline: dict[str, Any] | None
    is_complete: bool
    elapsed_s: float
    doubts: list[str]
    read: list[str]

    @property
    def cells(self) -> list[Cell]:
        """The finished cells, in the grid's order."""
        return [self.found[job] for job in self.grid.cells() if job in self.found]

    @property
    def media(self) -> list[str]:
        """Host memory and the tiers below it, as reports call them."""
        return ["memory", *(tier.name for tier in self.settings.tiers)]

    def size_name(self, num_blocks: int) -> str:
        """Return a capacity in bytes, or in blocks if their size is unknown."""
        block_bytes = self.settings.block_bytes
        return f"{num_blocks:,} blocks" if block_bytes is None else format_size(num_blocks * block_bytes)

    def stack_name(self, cell: Cell) -> str:
        """Return the names and sizes of the tiers of a cell."""
        named = [
            f"{tier.name} {'without limit' if blocks == NO_LIMIT else self.size_name(blocks)}"
            for tier, blocks in zip(self.settings.tiers, cell.tiers, strict=False)
        ]
        return " + ".join(named) or "none"


def run(trace: TraceFile, settings: Settings, model: Model | None) -> Result:
    """Simulate the grid; after Ctrl-C the result holds the cells that have finished."""
    check_policies(settings.policies)
    num_shards = 1 if settings.sample == 1 else NUM_SHARDS
    started = monotonic()
    with ExitStack() as open_now:
        folder = Path(open_now.enter_context(tempfile.TemporaryDirectory(prefix="kvcache-trace-")))
        bar = open_now.enter_context(common.Bar("reading", "%", settings.is_quiet))

        compact = read_trace(trace, folder, bar, settings.sample, settings.seed)
        serving = _serving(settings, model, compact)
        rules = tuple(tier.rule for tier in settings.tiers)
        how = Plan(settings.split, num_shards, serving, rules, settings.groups, settings.has_hints)
        grid = Grid(settings.policies, settings.capacities, settings.stacks, how)
        wanted, unbounded = grid.cells(), Job(OPTIMUM, None)
        found: dict[Job, Cell] = {}
        add = None
        # After the trace is read: a checkpoint belongs to the digest of the trace.
        if settings.checkpoint is not None:
            checkpoint = open_now.enter_context(Checkpoint(settings.checkpoint, _facts_of(compact, how)))
            found = {job: cell for job, cell in checkpoint.cells.items() if job in [*wanted, unbounded]}
            add = checkpoint.add
        is_complete = _simulate(compact, grid, settings, found, len(wanted) + 1, add, bar)
    return Result(
        f"{trace.name} ({trace.format})" + (", clients send honest hints" if settings.has_hints else ""),
        grid,
        settings,
        model,
        compact,
        found,
        found.get(unbounded),
        _baseline(compact, serving),
        is_complete,
        monotonic() - started,
        doubts(
            compact,
            trace.num_untimed,
            1 - found[unbounded].token_hit_rate if unbounded in found else 1.0,
            (serving and serving.token_prefill_s and (serving.token_prefill_s, serving.num_engines)) or None,
        ),
        lines_read(trace, compact),
    )


def _simulate(
    compact: CompactTrace,
    grid: Grid,
    settings: Settings,
    found: dict[Job, Cell],
    total: int,
    add: Callable[[Cell], None] | None,
    bar: common.Bar,
) -> bool:
    """Replay the cells that `found` lacks, `total` in all, into it; return False if Ctrl-C stopped it."""
    before = len(found)

    def progressed(share: float) -> None:
        status = f"{len(found):,} of {total:,} cells"
        share = before / total + share * (1 - before / total)
        bar.show(share, int(100 * share), status, name="simulating")

    try:
        for cell in run_grid(
            compact,
            grid,
            known=found,
            with_unbounded=True,
            num_processes=settings.jobs if isinstance(settings.jobs, int) else None,
            max_memory_bytes=usable_bytes(),
            progressed=progressed,
            dask=settings.jobs if isinstance(settings.jobs, str) else None,
        ):
            # A cell is kept as soon as it has ended, so that Ctrl-C loses none.
            found[Job(cell.policy, cell.num_blocks, cell.tiers)] = cell
            if add is not None:
                add(cell)
    except KeyboardInterrupt:
        return False
    except ReplayError as error:
        raise common.CommandError(str(error)) from error
    return True


def usable_bytes() -> int | None:
    """Return most of the memory that is free, or None where the system does not say."""
    left = memory_left()
    return None if left is None else int(left[0] * _MEMORY_SHARE)


def _serving(settings: Settings, model: Model | None, compact: CompactTrace) -> Serving | None:
    if settings.block_bytes is None:
        return None
    rates = [settings.serving.link_bytes_per_s, *(tier.bytes_per_s for tier in settings.tiers)]
    names = ["memory", *(tier.name for tier in settings.tiers)]
    media = tuple(map(Medium, names, rates, settings.serving.prices))
    token_s = model.saved_s(1) if model else None
    engines = settings.serving.engines
    if engines is None:
        engines = 1 if token_s is None else engines_for(compact.arrivals_s, compact.num_tokens, token_s)
    return Serving(settings.block_bytes, media, token_s, engines)


def _baseline(compact: CompactTrace, serving: Serving | None) -> dict[str, Any] | None:
    """Return the figures of serving without any cache, or None if they are unknown."""
    if serving is None or serving.token_prefill_s is None or compact.rate < 1:
        return None
    return weigh_nothing(compact.arrivals_s, compact.input_lengths, serving)


def _facts_of(compact: CompactTrace, plan: Plan) -> dict[str, Any]:
    """Return everything that cells depend on, except policy and capacities."""
    facts: dict[str, Any] = {
        "trace": compact.digest,
        "split": plan.split,
        "store_threshold": 0,
        "num_shards": plan.num_shards,
        "rules": [list(rule) for rule in plan.rules],
        "weighed_by": repr(plan.serving),
    }
    if plan.groups is not None:
        facts["groups"] = repr(plan.groups)
    if plan.has_hints:
        facts["hints"] = "honest"
    return facts
