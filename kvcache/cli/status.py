"""`kvcache status`: what a running engine's cache holds and has done, from its status socket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.terminal import printable
from kvcache.metrics import HistogramData

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
    path = find_socket(socket)
    found = ask(path, "status")
    _show(path, found, json)
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


def _show(path: Path, found: Any, json_target: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    head, rows = _rows(path, found)
    if json_target == "-":
        return
    on = common.console(json_target)
    on.print(Text(head))
    table = Table(box=None, show_header=False)
    for row in rows:
        table.add_row(*map(Text, row))
    on.print(table)


def _rows(path: Path, found: Any) -> tuple[str, list[list[str]]]:
    """Return what is shown of an answer: the engine's labels, and component, labels, name and value of each figure."""
    try:
        rows = []
        for part in found["parts"]:
            labels = ",".join(f"{name}={value}" for name, value in part["labels"].items())
            rows += [[part["name"], labels, name, _figure(value)] for name, value in _flat(part["stats"])]
        head = " ".join(f"{name}={value}" for name, value in found["labels"].items())
        return printable(head), [[printable(str(text)) for text in row] for row in rows]
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} gave no status of a kvcache engine") from error


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        data = HistogramData(tuple(value["bounds"]), tuple(value["counts"]), value["sum"])
        half, most = data.quantile(0.5), data.quantile(0.99)
        return f"{data.count:,} times, half within {half:.3g}, 99 % within {most:.3g}"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _flat(stats: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in stats.items():
        if isinstance(value, dict) and "bounds" not in value:
            rows += _flat(value)
        elif value is not None:
            rows.append((name, value))
    return rows
