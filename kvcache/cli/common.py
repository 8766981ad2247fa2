"""What the commands share: options, sizes and lists given as text, tables, progress and machine-readable output."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvcache.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

Number = TypeVar("Number", int, float)

_REFRESH_S = 0.25
_LINE_S = 30.0
_WIDE = 200


class CommandError(Exception):
    """A command has failed; its message is for the user."""


JsonOption = Annotated[
    str | None, typer.Option("--json", help="Write the result as JSON; - is standard output.", metavar="FILE")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvcache {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """Offload the KV cache of large language models: try it, replay traces, measure."""


def add_command(app: typer.Typer, name: str, run: Callable[..., None], examples: str = "") -> None:
    """Mount a command; lists of commands show the first paragraph of its docstring, `examples` end its help."""
    summary = inspect.cleandoc(run.__doc__ or "").partition("\n\n")[0]
    # \b keeps the lines of a paragraph as they are.
    epilog = f"\b\nExamples:\n{textwrap.indent(inspect.cleandoc(examples), '  ')}" if examples else None
    app.command(name, short_help=" ".join(summary.split()), epilog=epilog)(run)


def at_least(option: str, value: Number, least: int) -> Number:
    """Return `value` if it is at least `least`; ValueError naming the option otherwise."""
    if not value >= least:
        raise ValueError(f"{option} must be >= {least}, got {value}")
    return value


def console(json_target: str | None) -> Console:
    """Return where people read: standard error where standard output is taken by JSON."""
    from rich.console import Console

    return Console(stderr=json_target == "-", highlight=False)


def report_console(json_target: str | None) -> Console:
    """Return `console` for a report of many columns, which is not cut to 80 where no terminal shows it."""
    on = console(json_target)
    if not on.is_terminal and "COLUMNS" not in os.environ:
        on.width = _WIDE
    return on


def format_seconds(seconds: float) -> str:
    """Return a time in units that a person reads: three digits up to two minutes, then the two largest units.

    >>> format_seconds(0.00419), format_seconds(9864)
    ('4.19 ms', '2 h 44 min')
    """
    if seconds >= 120:
        minutes, left_s = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        days, left_h = divmod(hours, 24)
        if days:
            return f"{days:,} d {left_h} h"
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left_s:02} s"
    if seconds >= 1 or not seconds:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


class Bar:
    """One task on a progress bar, drawn four times a second at most, and only between two pieces of the work.

    Where standard error is no terminal, it is a line every half minute.
    """

    def __init__(self, name: str, unit: str, is_quiet: bool, total: float | None = 1.0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        on = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn(f"{{task.fields[done]:,}} {unit}"),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=on,
            disable=is_quiet or not on.is_terminal,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(name, total=total, done=0, status="")
        self._name, self._unit = name, unit
        self._due_s = 0.0
        self._line_due_s = math.inf if is_quiet or on.is_terminal else monotonic() + _LINE_S

    def __enter__(self) -> Bar:
        self._progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def is_due(self) -> bool:
        """Return whether it is time to show something new."""
        return monotonic() >= self._due_s

    def show(
        self, completed: float, done: int, status: str = "", total: float | None = None, name: str | None = None
    ) -> None:
        """Show how much of `total` is completed, and how many units are done; `name` replaces the name of the task."""
        self._name = name or self._name
        self._progress.update(
            self._task, description=self._name, completed=completed, total=total, done=done, status=status, refresh=True
        )
        now_s = monotonic()
        self._due_s = now_s + _REFRESH_S
        if now_s >= self._line_due_s:
            print(f"kvcache: {self._name}: {done:,} {self._unit}, {status}", file=sys.stderr, flush=True)
            self._line_due_s = now_s + _LINE_S


def check_writable(option: str, target: str | None, source: Path | None = None) -> None:
    """Find out before the work is done whether its result can be written, and is not the file that the work reads."""
    if target is None or target == "-":
        return
    path = Path(target)
    existed = path.exists()
    if existed and source is not None and source.exists() and path.samefile(source):
        raise ValueError(f"{option} must be another file than the one that is read, got {target!r}")
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{option} cannot be written: {target!r}: {error.strerror}") from error
    if not existed:
        path.resolve().unlink()


def facts_table(rows: Iterable[tuple[Any, ...]]) -> Any:
    """Return a table of names and values without lines."""
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def report(json_target: str | None, document: dict[str, Any], *shown: Any) -> None:
    """Print what people read, unless JSON takes standard output, and write `document` as `write_json` does."""
    if json_target != "-":
        on = console(json_target)
        for text in shown:
            on.print(text, soft_wrap=isinstance(text, str), markup=False, emoji=False)
    write_json(json_target, document)


def write_json(target: str | None, document: dict[str, Any]) -> None:
    """Write `document` as `write_text` does."""
    if target is not None:
        write_text("--json", target, json.dumps(document, indent=2) + "\n")


def write_text(option: str, target: str, text: str) -> None:
    """Write `text` to a file, or to standard output where `target` is ``-``; CommandError if that fails."""
    try:
        if target == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            Path(target).write_text(text, encoding="utf-8")
    except BrokenPipeError:
        raise  # its reader has had enough
    except OSError as error:
        raise CommandError(f"{option} cannot be written: {target!r}: {error.strerror}") from error
