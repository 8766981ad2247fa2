"""`kvcache status`: the counters and gauges of a running engine, from its status socket."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.terminal import printable
from kvcache.metrics import HistogramData
from kvcache.options import format_size

SocketOption = Annotated[
    Path | None,
    typer.Option(help="Status socket of the engine; left out: the only one of this user.", show_default=False),
]

_BREAKER_WORDS = {"closed": "works", "open": "paused", "half_open": "failing: one job tries again"}


def status(
    socket: SocketOption = None,
    next_version: Annotated[
        str | None, typer.Option(help="Only name the weights in force after the next reset.", show_default=False)
    ] = None,
    json: common.JsonOption = None,
) -> None:
    """Show the counters and gauges of a running engine."""
    from kvcache.exporters.status import ask, name_next_version

    common.check_writable("--json", json)
    path = find_socket(socket, is_pool=next_version is None)
    if next_version is not None:
        name_next_version(next_version, [path])
        common.report(json, {"version": next_version}, f"{path}: the next reset begins version {next_version}")
        return
    answer = ask(path, "status")
    head, rows = _rows(path, answer)
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{place:<{widths[0]}} {name:<{widths[1]}} {value}" for place, name, value in rows]
    common.report(json, answer, *head, *lines)


def find_socket(path: Path | None, is_pool: bool = True) -> Path:
    """Return the path given, or that of the only engine which answers; if `is_pool`, of the only pool's manager."""
    if path is not None:
        return path
    from kvcache.exporters.status import default_folder, live_sockets

    sockets = live_sockets()
    if is_pool and len(sockets) > 1:
        # The owner of a node's pool shows it, with its engines.
        sockets = [socket for socket in sockets if not _is_node_engine(socket)] or sockets
    if len(sockets) != 1:
        state = "no engine answers" if not sockets else f"{len(sockets)} engines answer"
        listed = "".join(f" --socket {socket}" for socket in sockets)
        raise ValueError(f"{state} in {default_folder()}; name one:{listed or ' --socket PATH'}")
    return sockets[0]


def _is_node_engine(path: Path) -> bool:
    """Return whether an engine answers at `path` that uses its node's pool."""
    from kvcache.exporters.status import ask

    with suppress(OSError, ValueError, TypeError, KeyError):
        return any(part["name"] == "node" for part in ask(path, "status", 1.0)["parts"])
    return False


def _rows(path: Path, found: Any) -> tuple[list[str], list[list[str]]]:
    """Return lines about the engine, and the component, name and value of each figure of an answer."""
    try:
        rows = []
        for part in found["parts"]:
            place = " ".join([part["name"], *map(str, part["labels"].values())])
            rows += [[place, name, _figure(name, value)] for name, value in _flat(part["stats"])]
        block = f"{found['block_size']} tokens"
        if found["block_bytes"]:
            block += f", {format_size(found['block_bytes'])}"
        head = [
            " ".join(f"{name}={value}" for name, value in found["labels"].items()),
            f"kvcache {found.get('config', {}).get('version', '(unknown)')}; up {found['uptime_s']:,.0f} s; "
            f"blocks of {block}; configuration: --json",
        ]
        return list(map(printable, head)), [[printable(str(text)) for text in row] for row in rows]
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} gave no status of a kvcache engine") from error


def _figure(name: str, value: Any) -> str:
    is_time = name.endswith(("_seconds", "_s")) and not name.endswith("_per_s")
    if isinstance(value, dict):
        data = HistogramData(tuple(value["bounds"]), tuple(value["counts"]), value["sum"])
        if not data.count:
            return "0"
        last = data.bounds[-1]
        half, most = (
            ("within " if bound <= last else "over ")
            + (common.format_seconds(min(bound, last)) if is_time else f"{min(bound, last):.3g}")
            for bound in (data.quantile(0.5), data.quantile(0.99))
        )
        return f"{data.count:,} times, half {half}, 99 % {most}"
    if name in ("drive_writes", "life_years") and not value:
        return "-"  # unknown before a day has passed
    if isinstance(value, int | float):
        return common.format_seconds(value) if is_time else f"{value:,}"
    return str(value)


def _flat(stats: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in stats.items():
        if isinstance(value, dict) and "bounds" not in value:
            rows += _flat(value)
        elif name in ("reads", "writes"):
            rows.append((name, _BREAKER_WORDS.get(value, value)))
        elif value is not None:
            rows.append((name, value))
    return rows
