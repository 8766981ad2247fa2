"""The `kvcache` command: one file per command, mounted here by a line each.

Command modules import only light things at the top, so that `kvcache --help` and shell completion answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from kvcache.assembly.log import set_up_log
from kvcache.cli.terminal import printable
from kvcache.registry import REMOVED, how_to_install

if TYPE_CHECKING:
    import typer

_EXIT_FAILED = 1
_EXIT_BAD_INPUT = 2


def build_app() -> typer.Typer:
    """Return the Typer application with every command mounted."""
    import typer

    from kvcache.cli import check, common, metrics, node, options, record, status, tier, top
    from kvcache.cli.lab import LabGroup

    app = typer.Typer(
        help="Offload the KV cache of large language models: try it, replay traces, measure.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=LabGroup,
    )
    app.callback()(common.root)
    # Listed in this order by --help, after the commands of the laboratory.
    for run in (check.check, node.node, options.options, status.status, top.top):
        common.add_command(app, run.__name__, run)
    app.add_typer(typer.Typer(help="Measure this machine.", no_args_is_help=True, cls=LabGroup), name="bench")
    app.add_typer(typer.Typer(help="Make traces of requests.", no_args_is_help=True, cls=LabGroup), name="trace")
    for name, text, commands in (
        (
            "record",
            "Record the calls of a running engine, for `kvcache rerun`.",
            (record.start, record.stop, record.show),
        ),
        (
            "tier",
            "Look into a disk tier, verify it, pack it, clear it.",
            (tier.inspect, tier.verify, tier.compact, tier.clear),
        ),
        (
            "metrics",
            "What can be watched: dashboard, alert rules, table.",
            (metrics.dashboard, metrics.rules, metrics.table),
        ),
    ):
        group = typer.Typer(help=text, no_args_is_help=True)
        group.callback()(lambda: None)
        for command in commands:
            common.add_command(group, command.__name__, command)
        app.add_typer(group, name=name)
    return app


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line; every expected error ends as one line.

    SystemExit, always: 0 after success, 1 after a failure, 2 after bad input.
    """
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        _fail(f"the command line needs {error.name}{how_to_install(error)}", _EXIT_FAILED)
    argv = sys.argv[1:] if argv is None else argv
    for flag in (arg.partition("=")[0] for arg in argv):
        if flag.startswith("--") and flag in REMOVED:
            _fail(f"{flag} was removed: {REMOVED[flag]}", _EXIT_BAD_INPUT)
    set_up_log()
    # A user's policy, "module:Class", may lie in the current folder. It comes last, so that files there do not replace
    # installed packages, in spawned processes either.
    if "" not in sys.path:
        sys.path.append("")
    try:
        app(args=_with_json_target(argv), prog_name="kvcache")
    except Exception as error:
        status = _status_of(error)
        if status is None and "KVCACHE_TRACEBACK" in os.environ:
            raise
        if isinstance(error, ModuleNotFoundError) and (error.name == "torch" or how_to_install(error)):
            _fail(
                f"this command needs the package {error.name}, which is not installed{how_to_install(error)}",
                _EXIT_FAILED,
            )
        if status is None:
            hint = "a fault of kvcache or of a plug-in; KVCACHE_TRACEBACK=1 shows where"
            _fail(f"{type(error).__name__}: {error} ({hint})", _EXIT_FAILED)
        _fail(str(error) or type(error).__name__, status)
    sys.exit(0)


def _with_json_target(argv: list[str]) -> list[str]:
    """Add `-`, standard output, to a `--json` without a value."""
    last = len(argv) - 1
    bare = {i for i, arg in enumerate(argv) if arg == "--json" and (i == last or argv[i + 1].startswith("--"))}
    return [part for i, arg in enumerate(argv) for part in ([arg, "-"] if i in bare else [arg])]


def _status_of(error: Exception) -> int | None:
    """Return the exit status of an error that a user can cause; None for a fault of kvcache."""
    from kvcache.block import BlockStateError
    from kvcache.cli.common import CommandError

    if isinstance(error, ValueError):
        return _EXIT_BAD_INPUT
    if isinstance(error, CommandError | BlockStateError | OSError | MemoryError):
        return _EXIT_FAILED
    return None


def _fail(message: str, status: int) -> NoReturn:
    print(f"kvcache: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        # Buffered text would fail again at exit, and the exit status would be Python's own, 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    sys.exit(status)
