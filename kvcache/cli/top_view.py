"""What `kvcache top` draws of a history of frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache.cli.frames import WINDOWS_S, Frame, History, WhatIf
from kvcache.cli.terminal import printable
from kvcache.options import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def view(address: str, history: History, what_if: WhatIf | None, fault: str = "") -> RenderableType:
    """Return a screen: 20 lines of at most 80 columns for an engine with one tier, the least urgent last."""
    from rich.console import Group
    from rich.text import Text

    frame = history.frames[-1]
    head = " ".join(f"{name}={value}" for name, value in frame.labels.items())
    lines: list[RenderableType] = [_line(f"kvcache  {head}  {address}", "bold")]
    if fault:
        lines.append(_line(f"not answering: {fault}", "bold red"))
    lines += [_hits(history), Text(), _media(history), Text(), _worst_calls(frame)]
    if what_if is not None:
        lines += [Text(), _what_if(what_if)]
    return Group(*lines)


def _line(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _table(*columns: str, gap: int = 2) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="underline")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _hits(history: History) -> Table:
    table = _table("share of needed blocks", "1 min", "5 min", "15 min", "since start", "now")
    rows = (
        ("loaded", "loaded_blocks"),
        ("  of these from tiers", "promoted_loaded_blocks"),
    )
    for title, name in rows:
        shares = [history.ratio(name, "needed_blocks", window_s) for window_s in WINDOWS_S]
        needed = history.frames[-1].get("needed_blocks")
        shares.append(history.frames[-1].get(name) / needed if needed else None)
        table.add_row(title, *map(_percent, shares), f"{history.rate(name):,.0f} blocks/s")
    for title, name, unit in (
        ("stored", "stored_blocks", "blocks/s"),
        ("evicted", "evicted_blocks", "blocks/s"),
        ("refused", "rejected_stores", "stores/s"),
    ):
        table.add_row(title, "", "", "", "", f"{history.rate(name):,.0f} {unit}")
    return table


def _media(history: History) -> Table:
    frame = history.frames[-1]
    table = _table("medium", "held", "of", "bytes", "read/s", "written/s", "busy", "state", gap=1)
    capacity = frame.get("capacity_blocks")
    held = capacity - frame.get("free_blocks")
    held_bytes = frame.get("capacity_bytes") * (held / capacity if capacity else 0)
    busy = frame.get("referenced_blocks") + frame.get("pending_blocks")
    table.add_row(
        "host",
        f"{held:,.0f}",
        f"{capacity:,.0f}",
        format_size(held_bytes),
        format_size(history.rate("loaded_bytes")),
        format_size(history.rate("stored_bytes")),
        f"{busy:,.0f}",
        "",
    )
    tiers = frame.components("tier_held_blocks")
    media = [labels.get("medium", "tier") for labels in tiers]
    for medium, labels in zip(media, tiers, strict=True):
        queued = ("tier_backlog_blocks", "tier_loading_blocks", "tier_storing_blocks")
        capacity = frame.get("tier_capacity_blocks", **labels)
        table.add_row(
            _foreign(f"{medium} {labels.get('tier', '')}" if media.count(medium) > 1 else medium),
            f"{frame.get('tier_held_blocks', **labels):,.0f}",
            f"{capacity:,.0f}" if capacity else "-",
            format_size(frame.get("tier_held_bytes", **labels)),
            format_size(history.rate("tier_promoted_bytes", **labels)),
            format_size(history.rate("tier_written_bytes", **labels)),
            f"{sum(frame.get(name, **labels) for name in queued):,.0f}",
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


def _worst_calls(frame: Frame) -> Text:
    worst = sorted(
        (
            (frame.get("call_worst_seconds", **labels), labels.get("call", ""))
            for labels in frame.components("call_worst_seconds")
        ),
        reverse=True,
    )
    named = ", ".join(f"{name} {seconds * 1e3:,.2f} ms" for seconds, name in worst[:3] if seconds)
    return _line(f"worst calls: {named or 'none timed'}", "")


def _what_if(found: WhatIf) -> Table:
    names = [f"{one:,}{'*' * (one == found.num_blocks)}" for one in found.capacities]
    table = _table("what if (* now): hits of", *names)
    for policy, ratios in found.hit_ratios.items():
        table.add_row(_foreign(f"{policy}{'*' * (policy == found.policy)}"), *[f"{ratio:.1%}" for ratio in ratios])
    if found.policy not in (*found.hit_ratios, "None"):
        table.add_row(_foreign(f"{found.policy}* (not estimated)"), *["-" for _ in found.capacities])
    return table


def _foreign(text: str) -> str:
    """Return text that an engine gave, to be shown as it is."""
    from rich.markup import escape

    return escape(printable(text))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
