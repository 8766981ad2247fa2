"""Build the laboratory's commands for `kvcache.cli`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from kvcache.cli import common


def build_command(name: str, module: str) -> Any:
    """Return the command `name` from the module of this package that defines a function of that name."""
    command: Any = import_module(f"{__package__}.{module}")
    run: Callable[..., None] = getattr(command, name.replace("-", "_"))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    common.add_command(app, name, run, getattr(command, "EXAMPLES", ""))
    return get_command(app)
