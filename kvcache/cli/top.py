"""`kvcache top`: a live view of a running engine's cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli import common
from kvcache.cli.frames import WINDOWS_S, Frame, History, read_socket
from kvcache.cli.status import SocketOption, find_socket
from kvcache.cli.terminal import printable
from kvcache.options import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def top(
    socket: SocketOption = None,
    url: Annotated[str | None, typer.Option(hidden=True)] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
) -> None:
    """Watch a running engine: hit rates, media, bandwidth and tiers.

    Where standard output is no terminal, frames follow one another as plain text.
    """
    if url is not None:
        raise ValueError(f"--url was removed: use `curl {url}`, or the dashboard of `kvcache metrics dashboard`")
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval must be 0.1 to 3600 seconds, got {interval}")
    path = find_socket(socket)
    look = partial(read_socket, path)
    history = History()
    history.add(look())
    if once:
        # Rates need two looks.
        time.sleep(interval)
        history.add(look())
        common.report_console(None).print(view(str(path), history))
        return
    _watch(str(path), history, look, interval)


def _watch(address: str, history: History, look: Callable[[], Frame], interval_s: float) -> None:
    from rich.live import Live

    fault = ""
    on = common.report_console(None)
    with Live(console=on, screen=True, auto_refresh=False) if on.is_terminal else nullcontext(on) as shown:
        try:
            while True:
                frame = view(address, history, fault)
                if isinstance(shown, Live):
                    shown.update(frame, refresh=True)
                else:
                    shown.print(frame, "")
                    on.file.flush()
                time.sleep(interval_s)
                try:
                    history.add(look())
                    fault = ""
                except (OSError, ValueError) as error:
                    # An engine that restarts comes back under the same address.
                    fault = str(error)
        except KeyboardInterrupt:
            pass


def view(address: str, history: History, fault: str = "") -> RenderableType:
    """Return a screen: 21 lines of at most 80 columns for an engine with one tier, the least urgent last."""
    from rich.console import Group
    from rich.text import Text

    frame = history.frames[-1]
    head = " ".join(f"{name}={value}" for name, value in frame.labels.items())
    lines: list[RenderableType] = [_line(f"kvcache  {head}  {address}", "bold")]
    if fault:
        lines.append(_line(f"not answering: {fault}", "bold red"))
    lines += [_hits(history), Text(), *_pool(history), Text(), _worst_calls(frame)]
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
    for title, name in (("loaded", "loaded_blocks"), ("  of these from tiers", "promoted_loaded_blocks")):
        shares = [history.ratio(name, "needed_blocks", window_s) for window_s in WINDOWS_S]
        shares.append(history.frames[-1].share(name))
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
    # Two tiers of one medium need their number, too.
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


def _pool(history: History) -> list[RenderableType]:
    """Return the pool with its tiers; of a node's owner its engines, too; of an engine over it, the use of the pool."""
    frame = history.frames[-1]
    if frame.components("node_round_trips"):
        is_lost = bool(frame.get("node_unavailable"))
        text = f"{history.rate('node_round_trips'):,.0f} messages/s, {frame.get('node_outages'):,.0f} outages"
        shared = f"{history.rate('node_shared_hit_blocks'):,.0f} blocks/s found that other engines stored"
        return [_line(f"node's pool: {'unavailable; ' * is_lost}{text}; {shared}", "red" if is_lost else "")]
    engines = frame.components("engine_held_blocks")
    if not engines:
        return [_media(history)]
    table = _table("engine", "holds", "writes", "others' blocks found/s", "in all", "messages/s", "outages", gap=1)
    for labels in sorted(engines, key=lambda labels: labels.get("number", "").zfill(2)):
        table.add_row(
            _foreign(labels.get("number", "")),
            *(f"{frame.get(f'engine_{name}_blocks', **labels):,.0f}" for name in ("held", "writing")),
            f"{history.rate('engine_shared_hit_blocks', **labels):,.0f}",
            f"{frame.get('engine_shared_hit_blocks', **labels):,.0f}",
            f"{history.rate('engine_round_trips', **labels):,.0f}",
            f"{frame.get('engine_outages', **labels):,.0f}",
        )
    return [_media(history), table]


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
    if corrupt := frame.get("tier_corrupt_blocks", **labels):
        return f"[yellow]{corrupt:,.0f} corrupt[/yellow]"
    drive_writes = frame.get("tier_drive_writes", **labels)
    return f"[green]{drive_writes:.2g} drives/day[/green]" if drive_writes else "[green]works[/green]"


def _worst_calls(frame: Frame) -> Text:
    name = "call_worst_seconds"
    calls = [(frame.get(name, **labels), labels.get("call", "")) for labels in frame.components(name)]
    worst = sorted(calls, reverse=True)[:3]
    named = ", ".join(f"{call} {seconds * 1e3:,.2f} ms" for seconds, call in worst if seconds)
    return _line(f"worst calls: {named or 'none timed'}", "")


def _foreign(text: str) -> str:
    """Return text that an engine gave, to be shown as it is."""
    from rich.markup import escape

    return escape(printable(text))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
