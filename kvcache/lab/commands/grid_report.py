"""What a grid has found: as tables, JSON, CSV and a plot."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from kvcache.cli import common
from kvcache.lab.commands.grid import NUM_SHARDS

if TYPE_CHECKING:
    from kvcache.lab.commands.grid import Result
    from kvcache.lab.replay.cells import Cell
    from kvcache.lab.replay.requests import TraceFile

INTERRUPTED = 130
_LEAST_BLOCKS = 8  # of a shard, for an estimate worth its name


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the results go."""

    json: str | None
    csv: str | None
    plot: str | None
    checkpoint: str | None = None

    def files(self) -> str:
        """Return what has been written where, in one line."""
        named = (("json", self.json), ("csv", self.csv), ("plot", self.plot), ("checkpoint", self.checkpoint))
        return ", ".join(f"{kind}: {target}" for kind, target in named if target is not None)

    def check(self) -> None:
        """Raise ValueError if one of them cannot be written."""
        for option, target in (("--json", self.json), ("--csv", self.csv), ("--plot", self.plot)):
            common.check_writable(option, target)
        if self.json == self.csv == "-":
            raise ValueError("--json and --csv cannot both go to standard output")
        if self.plot is not None:
            from kvcache.lab.replay.plot import check_plot_target

            check_plot_target(self.plot)


def report(result: Result, trace: TraceFile, targets: Targets) -> None:
    """Write the files, print the tables, and exit with `INTERRUPTED` if the grid was stopped before its end."""
    _write(result, trace, targets)
    if not result.is_complete:
        total = len(result.wanted) + 1
        print(f"kvcache: stopped: {len(result.found):,} of {total:,} cells have finished", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _write(result: Result, trace: TraceFile, targets: Targets) -> None:
    from kvcache.lab.replay.keys import split_block_size

    options, weights = result.options, result.weights
    console = common.console(targets.json or targets.csv)
    unbounded = result.found.get(result.unbounded)
    facts = [_facts(cell, result) for cell in result.cells]
    block_size = split_block_size(trace.block_size, options.given.split)
    document = {
        "source": {
            "kind": "trace",
            "file": str(trace.path),
            "format": trace.format,
            "skipped_lines": trace.num_skipped,
        },
        "complete": result.is_complete,
        "block_bytes": options.block_bytes,
        "block_size": block_size,
        "store_threshold": options.given.store_threshold,
        "sample": options.given.sample,
        "elapsed_s": result.elapsed_s,
        "model": weights.as_dict() if weights else None,
        "tiers": [{"name": tier.name, "bytes_per_s": tier.bytes_per_s} for tier in options.tiers],
        "no_cache": result.baseline,
        "cells": facts,
        "unbounded": _facts(unbounded, result) if unbounded else None,
    }
    if facts:
        _write_csv(targets.csv, facts)
    if targets.plot is not None and facts and unbounded is not None:
        from kvcache.lab.replay.plot import Chart, draw

        names = tuple(tier.name for tier in options.tiers)
        footnote = _footnote(result, block_size)
        draw(Chart(result.title, result.cells, unbounded, options.block_bytes, footnote, names), targets.plot)
    common.write_json(targets.json, document)
    if "-" in (targets.json, targets.csv):
        return
    if facts and unbounded is not None:
        _print(console, result, unbounded, block_size)
    elif facts:
        for cell in result.cells:
            console.print(f"{cell.policy} at {cell.num_blocks:,} blocks: {cell.block_hit_rate:.2%}", soft_wrap=True)
    if trace.num_skipped:
        console.print(f"bad lines skipped: {trace.num_skipped:,}")
    if written := targets.files():
        console.print(written, soft_wrap=True, markup=False)


def _facts(cell: Cell, result: Result) -> dict[str, Any]:
    facts = cell.as_dict()
    block_bytes, weights = result.options.block_bytes, result.weights
    facts["memory_bytes"] = None if cell.num_blocks is None or block_bytes is None else cell.num_blocks * block_bytes
    facts["tier_bytes"] = [blocks * (block_bytes or 0) for blocks in cell.tiers]
    facts["saved_prefill_s"] = weights.saved_s(cell.hit_tokens) if weights else None
    return facts


def _footnote(result: Result, block_size: int) -> str:
    compact, weights = result.compact, result.weights
    blocks = (
        f"{len(compact):,} requests, {compact.num_blocks * result.options.given.split:,} blocks of {block_size} tokens"
    )
    if compact.rate < 1:
        blocks += f", 1 in {1 / compact.rate:g} sampled"
    return f"{blocks}; {weights.model.name}, {weights.model.dtype}" if weights else blocks


def _print(console: Any, result: Result, unbounded: Cell, block_size: int) -> None:
    from kvcache.lab.replay.cells import OPTIMUM

    if result.options.tiers:
        _print_tiers(console, result, unbounded, block_size)
    else:
        _print_policies(console, result, unbounded, block_size)
    for line in best_policies(result.cells, result.stack_name if result.options.tiers else None):
        console.print(line, soft_wrap=True, markup=False)
    if result.options.tiers and any(cell.policy == OPTIMUM for cell in result.cells):
        console.print(f"{OPTIMUM} is the optimum of host memory alone: it knows no tiers", soft_wrap=True)
    if result.compact.rate < 1:
        least = _LEAST_BLOCKS * NUM_SHARDS / result.compact.rate
        console.print(
            f"estimated from 1 block in {1 / result.compact.rate:g}, in {NUM_SHARDS} shards: +- is twice the standard "
            "error",
            soft_wrap=True,
        )
        if any(cell.num_blocks and cell.num_blocks < least for cell in result.cells):
            console.print(f"capacities below {least:,.0f} blocks are too small for this sample", soft_wrap=True)


def best_policies(cells: list[Cell], stack_name: Callable[[Cell], str] | None) -> Iterator[str]:
    """Yield a line for each run of capacities at which one policy hits most, with its margin to the next."""
    from kvcache.lab.replay.cells import OPTIMUM

    places: dict[tuple[tuple[int, ...], int], list[Cell]] = {}
    for cell in cells:
        if cell.policy != OPTIMUM and cell.num_blocks is not None:
            places.setdefault((cell.tiers, cell.num_blocks), []).append(cell)
    runs: list[tuple[tuple[int, ...], str, list[tuple[Cell, Cell]]]] = []
    for (tiers, _), there in sorted(places.items()):
        if len(there) < 2:
            continue
        first, second = sorted(there, key=lambda cell: -cell.block_hit_rate)[:2]
        if not runs or runs[-1][:2] != (tiers, first.policy):
            runs.append((tiers, first.policy, []))
        runs[-1][2].append((first, second))
    for _, policy, pairs in runs:
        low, high = pairs[0][0], pairs[-1][0]
        margins = [100 * (first.block_hit_rate - second.block_hit_rate) for first, second in pairs]
        rivals = ", ".join(dict.fromkeys(second.policy for _, second in pairs))
        where = f"{low.num_blocks:,}" if low is high else f"{low.num_blocks:,} to {high.num_blocks:,}"
        least, most = f"{min(margins):.2f}", f"{max(margins):.2f}"
        margin = least if least == most else f"{least} to {most}"
        below = f", tiers {stack_name(low)}" if stack_name is not None else ""
        if most == "0.00":
            yield f"best at {where} blocks{below}: no policy, {policy} and {rivals} hit alike"
            continue
        yield f"best at {where} blocks{below}: {policy}, by {margin} points over {rivals}"


def _print_policies(console: Any, result: Result, unbounded: Cell, block_size: int) -> None:
    cells, weights, block_bytes = result.cells, result.weights, result.options.block_bytes
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    by_place = {(cell.policy, cell.num_blocks): cell for cell in cells}
    places = sorted({cell.num_blocks for cell in cells if cell.num_blocks is not None})

    def memory_of(num_blocks: int | None) -> list[str]:
        if block_bytes is None:
            return []
        return [common.human_bytes(num_blocks * block_bytes) if num_blocks else ""]

    def rate(cell: Cell) -> str:
        error = f" +-{200 * cell.block_hit_error:.2f}" if cell.block_hit_error is not None else ""
        return f"{cell.block_hit_rate:.2%}{error}"

    views: list[tuple[str, Callable[[Cell], str]]] = [
        (
            f"{result.title}: blocks hit, of {unbounded.blocks:,} of {block_size} tokens",
            lambda cell: f"{cell.hit_blocks:,}",
        ),
        ("share of blocks hit", rate),
    ]
    if any(cell.rejected_requests for cell in cells):
        views.append(
            (
                f"requests rejected, of {len(result.compact):,}: they name more blocks than the cache has",
                lambda cell: "" if cell.rejected_requests is None else f"{cell.rejected_requests:,}",
            )
        )
    saved_s = weights.saved_s(unbounded.hit_tokens) if weights else None
    if weights is not None and saved_s is not None:
        unit, unit_s = ("hours", 3600) if saved_s >= 36000 else ("minutes", 60) if saved_s >= 600 else ("seconds", 1)

        def saved(cell: Cell) -> str:
            return f"{(weights.saved_s(cell.hit_tokens) or 0.0) / unit_s:,.2f}"

        views.append((f"prefill saved, at least, in {unit} ({weights})", saved))
    for heading, shown in views:
        lines = [
            (
                "no limit" if place is None else f"{place:,}",
                *memory_of(place),
                *(
                    shown(unbounded if place is None else by_place[policy, place])
                    if place is None or (policy, place) in by_place
                    else ""
                    for policy in policies
                ),
            )
            for place in (*places, None)
        ]
        heads = ("blocks", *["memory"] * (block_bytes is not None), *policies)
        console.print(heading, soft_wrap=True, markup=False)
        console.print(common.plain_table(heads, lines[:-1], lines[-1]), crop=False)


def _arbiter_line(cell: Cell, result: Result) -> str:
    """Return what the arbiter of a cell decided, and the last decision in words."""
    found = cell.arbiter or {}
    last = found["decisions"][-1] if found["decisions"] else "none"
    return (
        f"arbiter, {cell.policy} at {cell.num_blocks:,} blocks over {result.stack_name(cell)}: {found['loads']:,} "
        f"requests loaded all, {found['cuts']:,} were cut by {found['cut_blocks']:,} blocks; the last {last}"
    )


def _print_tiers(console: Any, result: Result, unbounded: Cell, block_size: int) -> None:
    block_bytes = result.options.block_bytes or 1
    media = result.media
    lines: list[tuple[str, ...]] = []
    flows: list[tuple[str, ...]] = []
    for cell in sorted(result.cells, key=lambda cell: (cell.num_blocks or 0, len(cell.tiers), cell.tiers)):
        serving = cell.serving or {}
        served = serving.get("media", [])
        where = (common.human_bytes((cell.num_blocks or 0) * block_bytes), result.stack_name(cell), cell.policy)
        hits = [f"{medium['hit_blocks'] / max(1, cell.blocks):.2%}" for medium in served]
        error = f" +-{200 * cell.block_hit_error:.2f}" if cell.block_hit_error is not None else ""
        lines.append(
            (
                *where,
                *(hits + [""] * len(media))[: len(media)],
                f"{cell.block_hit_rate:.2%}{error}",
                f"{cell.rejected_requests:,}" if cell.rejected_requests else "",
                _shown(serving.get("saved_prefill_share"), "{:.1%}"),
                _shown(serving.get("ttft_p50_s"), "{:.2f} s"),
                _shown(serving.get("ttft_p99_s"), "{:.2f} s"),
                _shown(serving.get("engine_busy"), "{:.0%}"),
                _shown(serving.get("load_s"), "{:,.0f} s"),
                _shown(serving.get("price"), "{:,.0f}"),
            )
        )
        for medium in served:
            if "read_bytes" not in medium:
                continue
            written = medium["write_bytes_per_day"]
            flows.append(
                (
                    *where,
                    medium["name"],
                    _shown(medium["read_gb_per_s"], "{:.2f}"),
                    _shown(medium["read_peak_gb_per_s"], "{:.2f}"),
                    _shown(medium["write_gb_per_s"], "{:.2f}"),
                    _shown(medium["write_peak_gb_per_s"], "{:.2f}"),
                    f"{medium['load_s']:,.0f} s",
                    "" if written is None else common.human_bytes(written),
                )
            )
    figures = ("hits", "rejected", "saved", "TTFT p50", "p99", "busy", "loads", "price")
    heads: tuple[str, ...] = ("memory", "below", "policy", *media, *figures)
    title = f"{result.title}: share of blocks hit, by medium, of {unbounded.blocks:,} of {block_size} tokens"
    console.print(f"{title}; no limit: {unbounded.block_hit_rate:.2%}", soft_wrap=True, markup=False)
    console.print(common.plain_table(*_used_columns(heads, lines)), crop=False)
    if result.baseline is not None:
        base = result.baseline
        engines = base["num_engines"]
        console.print(
            f"without a cache: TTFT p50 {_shown(base['ttft_p50_s'], '{:.2f} s')}, p99 "
            f"{_shown(base['ttft_p99_s'], '{:.2f} s')}, {engines} engine{'s' * (engines > 1)} busy "
            f"{_shown(base['engine_busy'], '{:.0%}')} ({result.weights})",
            soft_wrap=True,
        )
    for cell in result.cells:
        if cell.arbiter is not None:
            console.print(_arbiter_line(cell, result), soft_wrap=True, markup=False)
    if flows:
        heads = ("memory", "below", "policy", "medium", "read", "busiest minute", "write", "busiest minute")
        console.print("what each medium must sustain, in GB/s; loads in all; bytes written a day")
        console.print(common.plain_table((*heads, "loads", "written a day"), flows), crop=False)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _used_columns(
    heads: tuple[str, ...], lines: list[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Leave out columns that hold nothing."""
    used = [i for i in range(len(heads)) if any(line[i] for line in lines)]
    return tuple(heads[i] for i in used), [tuple(line[i] for i in used) for line in lines]


def _write_csv(target: str | None, cells: list[dict[str, Any]]) -> None:
    if target is None:
        return
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
    common.write_text("--csv", target, text.getvalue())
