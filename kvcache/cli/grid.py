"""Many policies at many capacities: the what-if of `kvcache replay`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcache.cli import common

if TYPE_CHECKING:
    from kvcache.cli.model import Weights
    from kvcache.replay.grid import Cell, CompactTrace
    from kvcache.replay.requests import Request
    from kvcache.replay.trace import Trace

_REFRESH_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the results go."""

    json: str | None
    csv: str | None
    plot: str | None

    def files(self) -> str:
        """Return what has been written where, in one line."""
        named = (("json", self.json), ("csv", self.csv), ("plot", self.plot))
        return ", ".join(f"{kind}: {target}" for kind, target in named if target is not None)

    def check(self) -> None:
        """Raise ValueError if one of them cannot be written."""
        for option, target in (("--json", self.json), ("--csv", self.csv), ("--plot", self.plot)):
            common.check_writable(option, target)
        if self.json == self.csv == "-":
            raise ValueError("--json and --csv cannot both go to standard output")
        if self.plot is not None:
            from kvcache.replay.plot import check_plot_target

            check_plot_target(self.plot)


@dataclass(frozen=True, slots=True)
class Options:
    """How every cell is replayed; `block_bytes` is None where nobody has said how large a block is."""

    block_bytes: int | None
    split: int
    store_threshold: int
    limit: int | None
    jobs: int | None
    is_quiet: bool = False


def run(
    trace: Trace,
    policies: list[str],
    capacities: list[int],
    options: Options,
    weights: Weights | None,
    targets: Targets,
) -> None:
    """Simulate the grid and report.

    Raises
    ------
    ValueError
        A policy, a capacity or a target is bad.
    CommandError
        A process of the grid died.
    """
    from kvcache.replay.grid import CompactTrace, check_grid, optimum_cell, simulate
    from kvcache.replay.keys import split_block_size
    from kvcache.replay.requests import ReplayError

    check_grid(policies, capacities)
    block_bytes, split = options.block_bytes, options.split
    block_size = split_block_size(trace.block_size, split)
    targets.check()
    console = common.console(targets.json or targets.csv)
    started = monotonic()
    with common.progress("replays", options.is_quiet) as bar:
        task = bar.add_task("reading", total=1.0, done=0, status="")
        num_cells = len(policies) * len(capacities)

        def read() -> Iterator[Request]:
            for i, request in enumerate(islice(trace, options.limit)):
                if i % _REFRESH_REQUESTS == 0:
                    bar.update(task, completed=trace.position_bytes / trace.size_bytes)
                yield request

        def progressed(share: float) -> None:
            bar.update(task, completed=share, done=int(share * num_cells))

        compact = CompactTrace.of(read(), trace.block_size)
        bar.update(task, description="simulating", completed=0.0)
        try:
            cells = simulate(compact, policies, capacities, split, options.store_threshold, options.jobs, progressed)
        except ReplayError as error:
            raise common.CommandError(str(error)) from error
        unbounded = optimum_cell(compact, None, split)
        bar.update(task, completed=1.0, done=num_cells)

    title = f"{trace.name} ({trace.format})"
    facts = [_facts(cell, block_bytes, weights) for cell in cells]
    document = {
        "source": {
            "kind": "trace",
            "file": str(trace.path),
            "format": trace.format,
            "skipped_lines": trace.num_skipped,
        },
        "block_bytes": block_bytes,
        "block_size": block_size,
        "store_threshold": options.store_threshold,
        "elapsed_s": monotonic() - started,
        "model": weights.as_dict() if weights else None,
        "cells": facts,
        "unbounded": _facts(unbounded, block_bytes, weights),
    }
    _write_csv(targets.csv, facts)
    if targets.plot is not None:
        from kvcache.replay.plot import Chart, draw

        footnote = _footnote(compact, split, block_size, weights)
        draw(Chart(title, cells, unbounded, block_bytes, footnote), targets.plot)
    common.write_json(targets.json, document)
    if "-" not in (targets.json, targets.csv):
        _print(console, title, cells, unbounded, block_bytes, block_size, weights)
        if trace.num_skipped:
            console.print(f"bad lines skipped: {trace.num_skipped:,}")
        if written := targets.files():
            console.print(written, soft_wrap=True, markup=False)


def _facts(cell: Cell, block_bytes: int | None, weights: Weights | None) -> dict[str, Any]:
    facts = cell.as_dict()
    facts["memory_bytes"] = None if cell.num_blocks is None or block_bytes is None else cell.num_blocks * block_bytes
    facts["saved_prefill_s"] = weights.saved_s(cell.hit_tokens) if weights else None
    return facts


def _footnote(compact: CompactTrace, split: int, block_size: int, weights: Weights | None) -> str:
    blocks = f"{len(compact):,} requests, {len(compact.ids) * split:,} blocks of {block_size} tokens"
    return f"{blocks}; {weights.model.name}, {weights.model.dtype}" if weights else blocks


def _print(
    console: Any,
    title: str,
    cells: list[Cell],
    unbounded: Cell,
    block_bytes: int | None,
    block_size: int,
    weights: Weights | None,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    policies = list(dict.fromkeys(cell.policy for cell in cells))
    rows: dict[int | None, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.num_blocks, []).append(cell)
    rows[None] = [unbounded] * len(policies)

    def memory_of(num_blocks: int | None) -> list[str]:
        if block_bytes is None:
            return []
        return [common.human_bytes(num_blocks * block_bytes) if num_blocks else ""]

    views: list[tuple[str, Callable[[Cell], str]]] = [
        (f"{title}: blocks hit, of {unbounded.blocks:,} of {block_size} tokens", lambda cell: f"{cell.hit_blocks:,}"),
        ("share of blocks hit", lambda cell: f"{cell.block_hit_rate:.2%}"),
    ]
    saved_s = weights.saved_s(unbounded.hit_tokens) if weights else None
    if weights is not None and saved_s is not None:
        unit, unit_s = ("hours", 3600) if saved_s >= 36000 else ("minutes", 60) if saved_s >= 600 else ("seconds", 1)

        def saved(cell: Cell) -> str:
            return f"{(weights.saved_s(cell.hit_tokens) or 0.0) / unit_s:,.2f}"

        views.append((f"prefill saved, at least, in {unit} ({weights})", saved))
    for heading, shown in views:
        lines = [
            ("no limit" if num_blocks is None else f"{num_blocks:,}", *memory_of(num_blocks), *map(shown, row))
            for num_blocks, row in rows.items()
        ]
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name, *values in zip(("blocks", *["memory"] * (block_bytes is not None), *policies), *lines, strict=True):
            # A long name is folded; a figure never is.
            table.add_column(name, justify="right", overflow="fold", min_width=max(map(len, values)))
        for line in lines[:-1]:
            table.add_row(*line)
        table.add_section()
        table.add_row(*lines[-1])
        console.print(heading, soft_wrap=True, markup=False)
        console.print(table, crop=False)


def _write_csv(target: str | None, cells: list[dict[str, Any]]) -> None:
    if target is None:
        return
    rows = [{name: value for name, value in cell.items() if name != "bookkeeping_us"} for cell in cells]
    for row, cell in zip(rows, cells, strict=True):
        for name in ("p50", "p99", "max"):
            row[f"bookkeeping_{name}_us"] = (cell["bookkeeping_us"] or {}).get(name)
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    common.write_text("--csv", target, text.getvalue())
