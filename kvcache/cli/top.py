"""`kvcache top`: a live view of a running engine's cache, from its status socket or a `/metrics` URL."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.status import SocketOption, find_socket
from kvcache.options import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Key = tuple[str, tuple[tuple[str, str], ...]]
_WINDOWS_S = (60.0, 300.0, 900.0)
_WHAT_IF_S = 30.0
_PREFIXES = ("kvcache_", "vllm:kvcache_")
_COMMON = ("engine", "rank", "policy", "model_name")
_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Frame:
    """What was counted at one moment: values by name and labels, without those that tell engines apart."""

    time_s: float
    values: dict[Key, float]
    labels: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, **labels: str) -> float:
        """Return the sum over all components that have these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(value for (one, has), value in self.values.items() if one == name and wanted <= dict(has).items())

    def components(self, name: str) -> list[dict[str, str]]:
        """Return the labels of each component that reports this."""
        return [dict(labels) for one, labels in self.values if one == name]


@dataclass(slots=True)
class History:
    """The frames of the last quarter of an hour."""

    frames: deque[Frame] = field(default_factory=deque)

    def add(self, frame: Frame) -> None:
        """Append a frame; where a counter went back, the engine has restarted, and older frames are dropped."""
        if self.frames and frame.get("needed_blocks") < self.frames[-1].get("needed_blocks"):
            self.frames.clear()
        self.frames.append(frame)
        while frame.time_s - self.frames[0].time_s > _WINDOWS_S[-1]:
            self.frames.popleft()

    def change(self, name: str, window_s: float, **labels: str) -> tuple[float, float]:
        """Return what a counter grew by over a window, or since the first frame, and the seconds that this took."""
        last = self.frames[-1]
        first = next(one for one in self.frames if last.time_s - one.time_s <= window_s)
        return last.get(name, **labels) - first.get(name, **labels), last.time_s - first.time_s

    def ratio(self, name: str, of: str, window_s: float) -> float | None:
        """Return by what share of another counter one grew over a window; None where that did not grow."""
        whole = self.change(of, window_s)[0]
        return self.change(name, window_s)[0] / whole if whole > 0 else None

    def rate(self, name: str, **labels: str) -> float:
        """Return how much a counter grew a second, over the last ten."""
        change, seconds = self.change(name, 10.0, **labels)
        return change / seconds if seconds > 0 else 0.0


def top(
    socket: SocketOption = None,
    url: Annotated[
        str | None, typer.Option(help="Of /metrics, in place of a socket: http://host:port/metrics.", metavar="URL")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
) -> None:
    """Watch a running engine: hit rates, media, bandwidth, tiers, and what more memory would hit."""
    if socket is not None and url is not None:
        raise ValueError(f"--socket and --url exclude each other, got {socket} and {url!r}")
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval must be 0.1 to 3600 seconds, got {interval}")
    if url is not None:
        address, look, ask_what_if = url, _url_reader(url), None
    else:
        path = find_socket(socket)
        address, look, ask_what_if = str(path), _socket_reader(path), _what_if_reader(path)
    history = History()
    history.add(look())
    if once:
        time.sleep(interval)
        history.add(look())
        common.console(None).print(view(address, history, ask_what_if() if ask_what_if else None))
        return
    _watch(address, history, look, ask_what_if, interval)


def _watch(
    address: str,
    history: History,
    look: Callable[[], Frame],
    ask_what_if: Callable[[], dict[str, Any] | None] | None,
    interval_s: float,
) -> None:
    from rich.live import Live

    next_what_if_s = 0.0
    what_if: dict[str, Any] | None = None
    fault = ""
    with Live(console=common.console(None), screen=True, auto_refresh=False) as live:
        try:
            while True:
                if ask_what_if is not None and time.monotonic() >= next_what_if_s:
                    what_if = ask_what_if()
                    next_what_if_s = time.monotonic() + _WHAT_IF_S
                live.update(view(address, history, what_if, fault), refresh=True)
                time.sleep(interval_s)
                try:
                    history.add(look())
                    fault = ""
                except (OSError, ValueError) as error:
                    # An engine that restarts comes back under the same address.
                    fault = str(error)
        except KeyboardInterrupt:
            pass


# ---- where frames come from --------------------------------------------------------------------------------------


def _socket_reader(path: Path) -> Callable[[], Frame]:
    from kvcache.exporters.status import ask

    def look() -> Frame:
        found = ask(path, "samples", _TIMEOUT_S)
        values = {
            (name, tuple(labels.items())): float(value)
            for name, _, labels, value in found["samples"]
            if isinstance(value, int | float)
        }
        return Frame(found["time_s"], values, found["labels"])

    return look


def _what_if_reader(path: Path) -> Callable[[], dict[str, Any] | None]:
    from kvcache.exporters.status import ask

    def estimate() -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = ask(path, "what_if", 60.0)
        except (OSError, ValueError):
            return None  # made without
        return found

    return estimate


def _url_reader(url: str) -> Callable[[], Frame]:
    import importlib.util
    import urllib.request

    if importlib.util.find_spec("prometheus_client") is None:
        raise common.CommandError("--url needs prometheus-client: install kvcache's extra 'prometheus'")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, got {url!r}")

    def look() -> Frame:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                text = answer.read(64 << 20).decode()
        except OSError as error:
            raise OSError(f"{url} does not answer: {error}") from error
        return parse_metrics(text, time.time(), url)

    return look


def parse_metrics(text: str, time_s: float, where: str) -> Frame:
    """Return the frame that a `/metrics` page shows."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[Key, float] = {}
    common_labels: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix = next((one for one in _PREFIXES if sample.name.startswith(one)), None)
                if prefix is None or sample.name.endswith(("_created", "_bucket", "_sum", "_count")):
                    continue
                labels = dict(sample.labels)
                common_labels.update({name: labels.pop(name) for name in _COMMON if name in labels})
                key = sample.name.removeprefix(prefix).removesuffix("_total"), tuple(labels.items())
                values[key] = values.get(key, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{where} is no page of metrics: {error}") from error
    if not values:
        raise ValueError(f"{where} shows nothing of kvcache")
    return Frame(time_s, values, common_labels)


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def view(address: str, history: History, what_if: dict[str, Any] | None, fault: str = "") -> RenderableType:
    """Return what is shown."""
    from rich.console import Group
    from rich.text import Text

    frame = history.frames[-1]
    head = " ".join(f"{name}={value}" for name, value in frame.labels.items())
    lines: list[RenderableType] = [Text(f"kvcache  {head}  {address}", style="bold")]
    if fault:
        lines.append(Text(f"not answering: {fault}", style="red"))
    lines += [_hits(history), _media(history), _calls(frame)]
    if what_if is not None and what_if["uses"]:
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
        shares = [history.ratio(name, "needed_blocks", window_s) for window_s in _WINDOWS_S]
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
            labels.get("medium", "tier"),
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
            (frame.get("call_worst_seconds", **labels), labels["call"])
            for labels in frame.components("call_worst_seconds")
        ),
        reverse=True,
    )
    for seconds, name in worst[:3]:
        if seconds:
            table.add_row(name, f"{seconds * 1e3:,.2f} ms")
    return table


def _what_if(found: dict[str, Any]) -> Table:
    capacities: Iterable[int] = found["capacities"]
    here = found["num_blocks"]
    names = [f"{one:,}{'*' * (one == here)}" for one in capacities]
    table = _table("What if: share of blocks hit, by capacity (* the present one)", "policy", *names)
    for policy, ratios in found["hit_ratios"].items():
        table.add_row(f"{policy}{'*' * (policy == found['policy'])}", *[f"{ratio:.1%}" for ratio in ratios])
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
