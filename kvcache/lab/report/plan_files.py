"""Write the results of a plan: JSON, CSV and plots, and the tables on the console."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.cli import common
from kvcache.lab.report.plan_tables import advice_line, print_result
from kvcache.lab.report.plot import PLOT_SUFFIXES, Chart, check_plot_target, draw
from kvcache.lab.simulate.targets import recommend

if TYPE_CHECKING:
    from kvcache.lab.simulate.cells import Cell
    from kvcache.lab.simulate.plan import Result
    from kvcache.lab.traces.requests import TraceFile

INTERRUPTED = 130
_TIER_FACTS = ("name", "bytes_per_s", "write_policy", "cache_policy", "endurance")


@dataclass(frozen=True, slots=True)
class Targets:
    """The files and plots to write."""

    json: str | None
    csv: list[str]
    plots: list[str]
    checkpoint: str | None

    @classmethod
    def read(cls, json: str | None, save: list[str] | None, checkpoint: str | None, source: Path) -> Targets:
        """Return the targets of ``--json`` and ``--save``; ValueError if one cannot be written or is `source`."""
        found = cls(json, [], [], checkpoint)
        for target in save or ():
            common.check_writable("--save", target, source)
            if target.lower().endswith(".csv"):
                found.csv.append(target)
            elif target.lower().endswith(PLOT_SUFFIXES):
                check_plot_target(target)
                found.plots.append(target)
            else:
                raise ValueError(f"--save must end in .csv, {', '.join(PLOT_SUFFIXES)}, got {target!r}")
        common.check_writable("--json", json, source)
        return found

    def __str__(self) -> str:
        named = [("json", self.json), *(("csv", one) for one in self.csv), *(("plot", one) for one in self.plots)]
        named.append(("checkpoint", self.checkpoint))
        return ", ".join(f"{kind}: {target}" for kind, target in named if target is not None)


def report(
    result: Result, trace: TraceFile, targets: Targets, wanted: dict[str, float], shows_all: bool = False
) -> None:
    """Write the files, print the recommendation for the figures `wanted`, and the tables.

    With a recommendation the tables have only the best cell of each policy, unless `shows_all`.
    Exit with `INTERRUPTED` if the plan was stopped before its end.
    """
    settings, unbounded = result.settings, result.unbounded
    advice = recommend(result, wanted) if wanted else None
    facts = [_facts(cell, result) for cell in result.cells]
    block_size = trace.block_size // settings.split
    # Files are written before the tables, whose pipe may be closed.
    if facts:
        for target in targets.csv:
            common.write_text("--save", target, _csv(facts))
    if facts and unbounded is not None:
        for target in targets.plots:
            _draw(result, unbounded, block_size, target)
    document = _document(result, trace, facts, block_size)
    if advice is not None:
        shown = None if advice["cell"] is None else _facts(advice["cell"], result)
        best = [_facts(cell, result) for cell in advice["best"]]
        document["recommended"] = {**advice, "targets": wanted, "cell": shown, "best": best}
    common.write_json(targets.json, document)
    if targets.json != "-":
        console = common.console(targets.json)
        for line in result.read:
            console.print(line, soft_wrap=True, markup=False)
        if advice is not None:
            console.print(advice_line(result, advice, wanted), soft_wrap=True, markup=False)
        if facts and unbounded is not None:
            cells = None if advice is None or shows_all else advice["best"]
            print_result(console, result, unbounded, block_size, cells)
        else:
            for cell in result.cells:
                console.print(f"{cell.policy} at {cell.num_blocks:,} blocks: {cell.block_hit_rate:.2%}", soft_wrap=True)
        for doubt in result.doubts:
            console.print(doubt, soft_wrap=True, markup=False)
        if trace.num_skipped:
            console.print(f"bad lines skipped: {trace.num_skipped:,}")
        if written := str(targets):
            console.print(written, soft_wrap=True, markup=False)
    if not result.is_complete:
        total = len(result.grid.cells()) + 1
        print(f"kvcache: stopped: {len(result.found):,} of {total:,} cells have finished", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _document(result: Result, trace: TraceFile, facts: list[dict[str, Any]], block_size: int) -> dict[str, Any]:
    settings, model, unbounded = result.settings, result.model, result.unbounded
    return {
        "source": trace.facts(),
        "complete": result.is_complete,
        "doubts": result.doubts,
        "read": result.read,
        "block_bytes": settings.block_bytes,
        "block_size": block_size,
        "groups": settings.groups and asdict(settings.groups),
        "hints": "honest" if settings.has_hints else "none",
        "sample": settings.sample,
        "elapsed_s": result.elapsed_s,
        "model": model.as_dict() if model else None,
        "tiers": [{name: getattr(tier, name) for name in _TIER_FACTS} for tier in settings.tiers],
        "no_cache": result.baseline,
        "cells": facts,
        "unbounded": _facts(unbounded, result) if unbounded else None,
    }


def _facts(cell: Cell, result: Result) -> dict[str, Any]:
    facts = asdict(cell)
    block_bytes, model = result.settings.block_bytes, result.model
    facts["memory_bytes"] = None if cell.num_blocks is None or block_bytes is None else cell.num_blocks * block_bytes
    facts["tier_bytes"] = [blocks * (block_bytes or 0) for blocks in cell.tiers]
    facts["saved_prefill_s"] = model.saved_s(cell.hit_tokens) if model else None
    return facts


def _draw(result: Result, unbounded: Cell, block_size: int, target: str) -> None:
    compact, model, settings = result.compact, result.model, result.settings
    num_blocks = compact.num_blocks * settings.split
    footnote = f"{result.title}: {len(compact):,} requests, {num_blocks:,} blocks of {block_size} tokens"
    if compact.rate < 1:
        footnote += f", 1 in {1 / compact.rate:g} sampled"
    if model is not None:
        footnote += f"; {model.name}, {model.dtype}"
    names = tuple(tier.name for tier in settings.tiers)
    title = f"Blocks hit, by policy and capacity{' of host memory' if names else ''}"
    draw(Chart(title, result.cells, unbounded, settings.block_bytes, footnote, names), target)


def _csv(cells: list[dict[str, Any]]) -> str:
    rows = []
    for cell in cells:
        row = {name: value for name, value in cell.items() if not isinstance(value, dict | list | tuple)}
        row.pop("bookkeeping_us", None)
        row.pop("serving", None)
        for name in ("p50", "p99", "max"):
            row[f"bookkeeping_{name}_us"] = (cell["bookkeeping_us"] or {}).get(name)
        for i, size in enumerate(cell["tier_bytes"], 1):
            row[f"tier{i}_bytes"] = size
        serving = cell["serving"] or {}
        row |= {name: value for name, value in serving.items() if name != "media"} | {
            "saved_prefill_s": cell["saved_prefill_s"]
        }
        for i, medium in enumerate(serving.get("media", ())):
            prefix = f"tier{i}" if i else "memory"
            row |= {f"{prefix}_{name}": value for name, value in medium.items()}
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
