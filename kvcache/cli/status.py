"""`kvcache status`: what a running engine's cache holds and has done, from its status socket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli import common

SocketOption = Annotated[
    Path | None,
    typer.Option(help="Status socket of the engine; left out: the only one of this user.", show_default=False),
]


def status(
    socket: SocketOption = None,
    json: common.JsonOption = None,
) -> None:
    """Show what a running engine's cache holds and has done."""
    from kvcache.exporters.status import ask

    common.check_writable("--json", json)
    found = ask(find_socket(socket), "status")
    if json != "-":
        _show(found, json)
    common.write_json(json, found)


def find_socket(path: Path | None) -> Path:
    """Return the path given, or that of the only engine which answers."""
    if path is not None:
        return path
    from kvcache.exporters.status import default_folder, live_sockets

    found = live_sockets()
    if len(found) != 1:
        state = "no engine answers" if not found else f"{len(found)} engines answer"
        listed = "".join(f" --socket {one}" for one in found)
        raise ValueError(f"{state} in {default_folder()}; name one:{listed or ' --socket PATH'}")
    return found[0]


def _show(found: dict[str, Any], json_target: str | None) -> None:
    from rich.table import Table

    from kvcache.metrics import HistogramData

    on = common.console(json_target)
    on.print(" ".join(f"{name}={value}" for name, value in found["labels"].items()), markup=False)
    table = Table(box=None, show_header=False)
    for part in found["parts"]:
        labels = ",".join(f"{name}={value}" for name, value in part["labels"].items())
        for name, value in _flat(part["stats"]):
            if isinstance(value, dict):
                data = HistogramData(tuple(value["bounds"]), tuple(value["counts"]), value["sum"])
                half, most = data.quantile(0.5), data.quantile(0.99)
                value = f"{data.count:,} times, half within {half:.3g}, 99 % within {most:.3g}"
            elif isinstance(value, int | float):
                value = f"{value:,}"
            table.add_row(part["name"], labels, name, str(value))
    on.print(table, markup=False)


def _flat(stats: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in stats.items():
        if isinstance(value, dict) and "bounds" not in value:
            rows += _flat(value)
        elif value is not None:
            rows.append((name, value))
    return rows
