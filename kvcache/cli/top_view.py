"""What `kvcache top` draws of a history of frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache.cli.frames import WINDOWS_S, Frame, History, WhatIf
from kvcache.cli.terminal import printable
from kvcache.options import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def view(address: str, history: History, what_if: WhatIf | None, fault: str = "") -> RenderableType:
    """Return what is shown."""
    from rich.console import Group
    from rich.text import Text

    frame = history.frames[-1]
    head = " ".join(f"{name}={value}" for name, value in frame.labels.items())
    lines: list[RenderableType] = [Text(printable(f"kvcache  {head}  {address}"), style="bold")]
    if fault:
        lines.append(Text(printable(f"not answering: {fault}"), style="red"))
    lines += [_hits(history), _media(history), _calls(frame)]
    if what_if is not None:
        lines.append(_what_if(what_if))
    return Group(*lines)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _hits(history: History) -> Table:
    table = _table("Hits", "share of needed blocks", "1 min", "5 min", "15 min", "since start", "now a second")
    rows = (
        ("loaded", "loaded_blocks"),
        ("  brought back by tiers", "promoted_loaded_blocks"),
    )
    for title, name in rows:
        shares = [history.ratio(name, "needed_blocks", window_s) for window_s in WINDOWS_S]
        needed = history.frames[-1].get("needed_blocks")
        shares.append(history.frames[-1].get(name) / needed if needed else None)
        table.add_row(title, *map(_percent, shares), f"{history.rate(name):,.0f} blocks")
    for title, name in (("stored", "stored_blocks"), ("evicted", "evicted_blocks"), ("refused", "rejected_stores")):
        table.add_row(title, "", "", "", "", f"{history.rate(name):,.0f}")
    return table


def _media(history: History) -> Table:
    frame = history.frames[-1]
    table = _table("Media", "medium", "held", "of", "bytes", "read/s", "written/s", "waiting", "state")
    capacity = frame.get("capacity_blocks")
    held = capacity - frame.get("free_blocks")
    held_bytes = frame.get("capacity_bytes") * (held / capacity if capacity else 0)
    busy = frame.get("referenced_blocks") + frame.get("pending_blocks")
    table.add_row(
        "host memory",
        f"{held:,.0f}",
        f"{capacity:,.0f}",
        format_size(held_bytes),
        format_size(history.rate("loaded_bytes")),
        format_size(history.rate("stored_bytes")),
        f"{busy:,.0f} in use",
        "",
    )
    for labels in frame.components("tier_held_blocks"):
        table.add_row(
            _foreign(labels.get("medium", "tier")),
            f"{frame.get('tier_held_blocks', **labels):,.0f}",
            f"{frame.get('tier_capacity_blocks', **labels):,.0f}",
            format_size(frame.get("tier_held_bytes", **labels)),
            format_size(history.rate("tier_promoted_bytes", **labels)),
            format_size(history.rate("tier_written_bytes", **labels)),
            f"{frame.get('tier_backlog_blocks', **labels):,.0f} backlog",
            _state(frame, labels),
        )
    return table


def _state(frame: Frame, labels: dict[str, str]) -> str:
    paused = [
        way
        for way in ("reads", "writes")
        if not frame.get(f"tier_{way}_breaker", state="closed", **labels) and frame.components(f"tier_{way}_breaker")
    ]
    if paused:
        return f"[red]{' and '.join(paused)} paused[/red]"
    if frame.get("tier_unavailable", **labels):
        return "[red]unavailable[/red]"
    corrupt = frame.get("tier_corrupt_blocks", **labels)
    return f"[yellow]{corrupt:,.0f} corrupt[/yellow]" if corrupt else "[green]works[/green]"


def _calls(frame: Frame) -> Table:
    table = _table("Worst calls in the scheduler's thread so far", "call", "took")
    worst = sorted(
        (
            (frame.get("call_worst_seconds", **labels), labels.get("call", ""))
            for labels in frame.components("call_worst_seconds")
        ),
        reverse=True,
    )
    for seconds, name in worst[:3]:
        if seconds:
            table.add_row(_foreign(name), f"{seconds * 1e3:,.2f} ms")
    return table


def _what_if(found: WhatIf) -> Table:
    names = [f"{one:,}{'*' * (one == found.num_blocks)}" for one in found.capacities]
    table = _table("What if: share of blocks hit, by capacity (* the present one)", "policy", *names)
    for policy, ratios in found.hit_ratios.items():
        table.add_row(_foreign(f"{policy}{'*' * (policy == found.policy)}"), *[f"{ratio:.1%}" for ratio in ratios])
    return table


def _foreign(text: str) -> str:
    """Return text that an engine gave, to be shown as it is."""
    from rich.markup import escape

    return escape(printable(text))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
