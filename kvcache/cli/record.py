"""`kvcache record`: begin and end a recording of a running engine, through its status socket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.status import SocketOption, find_socket
from kvcache.cli.terminal import printable
from kvcache.options import format_size, parse_size


def start(
    file: Annotated[Path, typer.Argument(help="Where the engine writes it.", show_default=False)],
    socket: SocketOption = None,
    max_bytes: Annotated[
        str, typer.Option(help="Bytes of all files of the recording; beyond them the oldest go.")
    ] = "1GiB",
    salt: Annotated[
        str | None, typer.Option(help="What keys are hashed with; left out: drawn at random.", show_default=False)
    ] = None,
    json: common.JsonOption = None,
) -> None:
    """Begin to record every call of an engine's manager."""
    options = {} if salt is None else {"salt": salt}
    # The engine's working directory is another.
    path = file.absolute()
    _ask(socket, json, action="start", file=str(path), max_bytes=parse_size("--max-bytes", max_bytes), **options)


def stop(socket: SocketOption = None, json: common.JsonOption = None) -> None:
    """End the recording, when everything so far is written."""
    _ask(socket, json, action="stop")


def show(socket: SocketOption = None, json: common.JsonOption = None) -> None:
    """Show the state of the recording."""
    _ask(socket, json, action="stats")


def _ask(socket: Path | None, json_target: str | None, **options: Any) -> None:
    from kvcache.exporters.status import ask

    common.check_writable("--json", json_target)
    path = find_socket(socket)
    answer = ask(path, "record", **options)
    try:
        lines = _lines(answer, options["action"])
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} gave no answer about a recording") from error
    common.report(json_target, answer, *map(printable, lines))


def _lines(found: dict[str, Any], action: str) -> list[str]:
    if found["file"] is None:
        return ["nothing is being recorded"]
    verb = "has been recorded" if action == "stop" else "is being recorded"
    lines = [f"{found['file']} {verb}: {found['num_records']:,} records, {format_size(found['num_bytes'])}"]
    if found["num_lost"]:
        lines.append(f"  {found['num_lost']:,} records were lost")
    if found["error"]:
        lines.append(f"  nothing more is written: {found['error']}")
    return lines
