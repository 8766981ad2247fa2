"""Directives that insert what kvcache itself declares: commands, options, metrics, counters of a manager."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer.main
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvcache.cli import build_app
from kvcache.cli.options import option_tables
from kvcache.exporters.dashboard import as_markdown_table
from kvcache.metrics import MANAGER_METRICS


def pages_of(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of Markdown for a command and those below it."""
    yield from (f"## `{name}`" if name.count(" ") < 2 else f"### `{name}`", "", command.help or "", "")
    if hasattr(command, "list_commands"):
        for child in command.list_commands(None):
            yield from pages_of(f"{name} {child}", command.get_command(None, child))
        return
    words = [argument(param) for param in command.params if param.param_type_name == "argument"]
    yield from ("```text", " ".join([name, *words, "[OPTIONS]"]), "```", "")
    for param in command.params:
        is_argument = param.param_type_name == "argument"
        names = [param.name.upper()] if is_argument else [*param.opts, *param.secondary_opts]
        names = [f"`{name}`" for name in names]
        value = "" if is_argument or param.is_flag else f" {metavar(param)}"
        yield f"{', '.join(names)}{value}"
        yield f": {param.help or ''}{default_of(param)}"
        yield ""
    if command.epilog:
        _, _, examples = command.epilog.partition("Examples:\n")
        yield from ("Examples:", "", "```text", *textwrap.dedent(examples).splitlines(), "```", "")


def argument(param: Any) -> str:
    """Return an argument as a usage line shows it."""
    name = str(param.name).upper()
    return name if param.required else f"[{name}]"


def metavar(param: Any) -> str:
    """Return the name of an option's value in the table."""
    return f"*{(param.metavar or param.type_descriptor.annotation.__name__).upper()}*"


def default_of(param: Any) -> str:
    """Return the default of an option, if it is worth showing."""
    if isinstance(param.show_default, str):
        return f" Default: `{param.show_default}`."
    value = param.default
    if param.show_default is False or value is None or value is False or callable(value) or param.required:
        return ""
    return f" Default: `{value}`."


def options() -> Iterator[str]:
    """Yield every option of a configuration, as `kvcache options` prints them."""
    for title, table in option_tables().values():
        yield from (f"## {title}", "", *table.as_markdown().splitlines(), "")


def counters() -> Iterator[str]:
    """Yield a table of everything that a manager counts."""
    yield from ("| name | kind | unit | meaning |", "|---|---|---|---|")
    for metric in MANAGER_METRICS:
        yield f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} {metric.reading} |"


SOURCES: dict[str, Callable[[], Iterable[str]]] = {
    "kvcache-commands": lambda: pages_of("kvcache", typer.main.get_command(build_app())),
    "kvcache-options": options,
    "kvcache-metrics": lambda: as_markdown_table().splitlines(),
    "kvcache-counters": counters,
}


class Generated(SphinxDirective):
    """Insert the Markdown of one source."""

    def run(self) -> list[Any]:
        """Return the parsed lines."""
        lines = StringList(list(SOURCES[self.name]()), source=self.name)
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    for name in SOURCES:
        app.add_directive(name, Generated)
    return {"parallel_read_safe": True}
