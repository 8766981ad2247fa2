"""The tables of a plan on the console: hits by policy and capacity, time to first token, the load of each medium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvcache.assembly.models import COUNTED
from kvcache.cli import common
from kvcache.lab.simulate.cells import OPTIMUM
from kvcache.lab.simulate.plan import NUM_SHARDS
from kvcache.lab.simulate.targets import WRITES
from kvcache.options import format_size

if TYPE_CHECKING:
    from kvcache.lab.simulate.cells import Cell
    from kvcache.lab.simulate.plan import Result

_LEAST_BLOCKS = 8
"""Blocks that a shard of a sample must hold at least."""


def print_result(
    console: Any, result: Result, unbounded: Cell, block_size: int, best: list[Cell] | None = None
) -> None:
    """Print the tables of a plan, and the best policies; or only the lines of the `best` cells."""
    _print_serving(console, result)
    if result.settings.groups is not None:
        counted = "capacities count slots of all groups, hits are blocks of full attention"
        console.print(f"KV-cache groups {result.settings.groups}; {counted}", soft_wrap=True, markup=False)
    if best is not None:
        _print_tiers(console, result, unbounded, block_size, best)
        console.print(f"best line of each policy, of {len(result.cells):,} lines in all: --all", soft_wrap=True)
        return
    if result.settings.tiers:
        _print_tiers(console, result, unbounded, block_size, result.cells)
    else:
        _print_policies(console, result, unbounded, block_size)
    for line in best_policies(result.cells, result.size_name, result.stack_name if result.settings.tiers else None):
        console.print(line, soft_wrap=True, markup=False)
    if result.settings.tiers and any(cell.policy == OPTIMUM for cell in result.cells):
        console.print(f"{OPTIMUM} is the optimum of host memory alone: it knows no tiers", soft_wrap=True)
    if result.compact.rate < 1:
        least = _LEAST_BLOCKS * NUM_SHARDS / result.compact.rate
        console.print(
            f"estimated from 1 block in {1 / result.compact.rate:g}: +- is twice the standard error of {NUM_SHARDS} "
            "shards",
            soft_wrap=True,
        )
        if any(cell.num_blocks and cell.num_blocks < least for cell in result.cells):
            console.print(f"capacities below {least:,.0f} blocks are too small for this sample", soft_wrap=True)


def best_policies(
    cells: list[Cell], size_name: Callable[[int], str], stack_name: Callable[[Cell], str] | None
) -> Iterator[str]:
    """Yield a line for each run of capacities at which one policy is best, with its margin to the next.

    `size_name` names a capacity, and `stack_name` the tiers of a cell if the plan has tiers.
    The best policy has the shortest mean time to first token; if no model is given, the most hits.
    """
    places: dict[tuple[tuple[int, ...], int], list[Cell]] = {}
    for cell in cells:
        if cell.policy != OPTIMUM and cell.num_blocks is not None:
            places.setdefault((cell.tiers, cell.num_blocks), []).append(cell)
    by_time = all(_ttft_s(cell) is not None for there in places.values() for cell in there)
    runs: list[tuple[tuple[int, ...], str, list[tuple[Cell, Cell]]]] = []
    for (tiers, _), there in sorted(places.items()):
        if len(there) < 2:
            continue
        first, second = sorted(there, key=lambda cell: (_ttft_s(cell) if by_time else 0, -cell.block_hit_rate))[:2]
        # Capacities come in order, so a run ends where another policy is best.
        if not runs or runs[-1][:2] != (tiers, first.policy):
            runs.append((tiers, first.policy, []))
        runs[-1][2].append((first, second))
    for _, policy, pairs in runs:
        low, high = pairs[0][0], pairs[-1][0]
        sizes = dict.fromkeys(size_name(cell.num_blocks or 0) for cell in (low, high))
        where = " to ".join(sizes).replace(" blocks to ", " to ")
        if stack_name is not None:
            where += f" over {stack_name(low)}" if low.tiers else " without a tier"
        rivals = ", ".join(dict.fromkeys(second.policy for _, second in pairs))
        points = _span([100 * (first.block_hit_rate - second.block_hit_rate) for first, second in pairs])
        if by_time:
            shorter = _span([100 * (1 - (_ttft_s(first) or 0) / (_ttft_s(second) or 1)) for first, second in pairs])
            higher = "lower" if points.startswith("-") else "higher"
            margin = f"mean TTFT {shorter} % below {rivals}, hits {points.removeprefix('-')} points {higher}"
            is_equal = shorter == "0.00"
        else:
            margin, is_equal = f"by {points} points over {rivals}", points == "0.00"
        if is_equal:
            yield f"best at {where}: no policy, {policy} and {rivals} are equal"
        else:
            yield f"best at {where}: {policy}, {margin}"


def _ttft_s(cell: Cell) -> float | None:
    seconds: float | None = (cell.serving or {}).get("ttft_mean_s")
    return seconds


def _span(values: list[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def _print_serving(console: Any, result: Result) -> None:
    """Print the engines, link and prefill rate behind the times to first token, and the times without a cache."""
    base = result.baseline
    if base is None:
        return
    engines, rate = base["num_engines"], result.settings.serving.link_bytes_per_s
    console.print(
        f"{engines} engine{'s' * (engines > 1)} over one link of {rate / 1e9:g} GB/s to host memory, {result.model}; "
        f"without a cache: TTFT p50 {_time(base['ttft_p50_s'])}, p99 {_time(base['ttft_p99_s'])}, busy "
        f"{_shown(base['engine_busy'], '{:.0%}')}",
        soft_wrap=True,
    )
    if result.model is not None and result.model.layer_note and result.settings.groups is None:
        console.print(f"{result.model.name}: {result.model.layer_note}. {COUNTED}", soft_wrap=True, markup=False)


def advice_line(result: Result, advice: dict[str, Any], wanted: dict[str, float]) -> str:
    """Return the recommendation of `recommend` in one line."""
    cell: Cell | None = advice["cell"]
    if cell is None:
        return "recommended: nothing, because no line has the figures of --target"
    price = (cell.serving or {}).get("price")
    parts = [f"{result.size_name(cell.num_blocks or 0)} of memory"]
    if cell.tiers:
        parts.append(result.stack_name(cell))
    parts.append(f"policy {cell.policy}")
    for name, target in wanted.items():
        value = advice["figures"][name]
        if name == WRITES:
            parts.append(f"{value:.3g} drive writes a day (target {target:g})")
        else:
            shown = name.replace("ttft", "TTFT").replace("_", " ")
            parts.append(f"{shown} {_time(value)} (target {_time(target)})")
    if price is not None:
        parts.append(f"price {price:,.1f}")
    text = "recommended: " if advice["reached"] else "no line reaches the targets; the nearest: "
    return f"{text}{', '.join(parts)} ({advice['why']})"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else common.format_seconds(seconds)


def _print_policies(console: Any, result: Result, unbounded: Cell, block_size: int) -> None:
    cells, model, block_bytes = result.cells, result.model, result.settings.block_bytes
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    by_place = {(cell.policy, cell.num_blocks): cell for cell in cells}
    places = sorted({cell.num_blocks for cell in cells if cell.num_blocks is not None})

    def memory_of(num_blocks: int | None) -> list[str]:
        if block_bytes is None:
            return []
        return [format_size(num_blocks * block_bytes) if num_blocks else ""]

    views: list[tuple[str, Callable[[Cell], str]]] = [
        (
            f"{result.title}: blocks hit, of {unbounded.blocks:,} of {block_size} tokens",
            lambda cell: f"{cell.hit_blocks:,}",
        ),
        ("share of blocks hit", _hit_rate),
    ]
    if any(cell.rejected_requests for cell in cells):
        views.append(
            (
                f"requests rejected, of {len(result.compact):,}: they name more blocks than the cache has",
                lambda cell: "" if cell.rejected_requests is None else f"{cell.rejected_requests:,}",
            )
        )
    if model is not None and model.saved_s(1) is not None:
        views.append(("share of the prompts' tokens that need no prefill", lambda cell: f"{cell.token_hit_rate:.1%}"))
        views.append((f"prefill saved, at least ({model})", lambda cell: _time(model.saved_s(cell.hit_tokens))))
    if any(_ttft_s(cell) is not None for cell in cells):
        views.append(("time to first token, p50 / p99", _ttft_pair))
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
        console.print(plain_table(heads, lines[:-1], lines[-1]), crop=False)


def _hit_rate(cell: Cell) -> str:
    error = f" +-{200 * cell.block_hit_error:.2f}" if cell.block_hit_error is not None else ""
    return f"{cell.block_hit_rate:.2%}{error}"


def _ttft_pair(cell: Cell) -> str:
    serving = cell.serving or {}
    return f"{_time(serving['ttft_p50_s'])} / {_time(serving['ttft_p99_s'])}" if _ttft_s(cell) is not None else ""


def _arbiter_line(cell: Cell, result: Result) -> str:
    """Return the counts of an arbiter's decisions, and the last decision in words."""
    found = cell.arbiter or {}
    last = found["decisions"][-1] if found["decisions"] else "none"
    return (
        f"arbiter, {cell.policy} at {cell.num_blocks:,} blocks over {result.stack_name(cell)}: {found['loads']:,} "
        f"requests loaded all their blocks, {found['cuts']:,} loads were shortened, by {found['cut_blocks']:,} blocks; "
        f"the last request {last}"
    )


def _print_tiers(console: Any, result: Result, unbounded: Cell, block_size: int, cells: list[Cell]) -> None:
    media = result.media
    lines: list[tuple[str, ...]] = []
    flows: list[tuple[str, ...]] = []
    # Sort by media, so that policies over the same media are next to each other.
    for cell in sorted(cells, key=lambda cell: (cell.num_blocks or 0, len(cell.tiers), cell.tiers)):
        serving = cell.serving or {}
        served = serving.get("media", [])
        where = (result.size_name(cell.num_blocks or 0), result.stack_name(cell), cell.policy)
        hits = [f"{medium['hit_blocks'] / max(1, cell.blocks):.2%}" for medium in served]
        lines.append(
            (
                *where,
                *(hits + [""] * len(media))[: len(media)],
                _hit_rate(cell),
                f"{cell.rejected_requests:,}" if cell.rejected_requests else "",
                _shown(serving.get("saved_prefill_share"), "{:.1%}"),
                _time(serving.get("ttft_p50_s")),
                _time(serving.get("ttft_p99_s")),
                _shown(serving.get("engine_busy"), "{:.0%}"),
                _time(serving.get("load_s")),
                _shown(serving.get("price"), "{:,.1f}"),
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
                    _time(medium["load_s"]),
                    "" if written is None else format_size(written),
                    _shown(medium.get("drive_writes_per_day"), "{:.2f}"),
                )
            )
    figures = ("hits", "rejected", "saved", "TTFT p50", "p99", "busy", "loads", "price")
    heads: tuple[str, ...] = ("memory", "below", "policy", *media, *figures)
    title = f"{result.title}: share of blocks hit, by medium, of {unbounded.blocks:,} of {block_size} tokens"
    console.print(f"{title}; no limit: {unbounded.block_hit_rate:.2%}", soft_wrap=True, markup=False)
    console.print(plain_table(*_used_columns(heads, lines)), crop=False)
    for cell in cells:
        if cell.arbiter is not None:
            console.print(_arbiter_line(cell, result), soft_wrap=True, markup=False)
    if flows:
        heads = ("memory", "below", "policy", "medium", "read", "busiest minute", "write", "busiest minute")
        console.print("what each medium must sustain, in GB/s; time of all loads; writes, also as drive writes per day")
        console.print(plain_table((*heads, "loads", "written a day", "drives a day"), flows), crop=False)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _used_columns(
    heads: tuple[str, ...], lines: list[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Omit empty columns."""
    used = [i for i in range(len(heads)) if any(line[i] for line in lines)]
    return tuple(heads[i] for i in used), [tuple(line[i] for i in used) for line in lines]


def plain_table(heads: tuple[str, ...], lines: list[tuple[str, ...]], last: tuple[str, ...] | None = None) -> Any:
    """Return a table of figures that are never folded; `last` is set off from the other lines."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, *values in zip(heads, *lines, *([last] if last else []), strict=True):
        # A long name is folded; a figure never is.
        width = max(map(len, [*values, *name.split()]))
        table.add_column(name, justify="right", overflow="fold", min_width=width)
    for line in lines:
        table.add_row(*line)
    if last is not None:
        table.add_section()
        table.add_row(*last)
    return table
