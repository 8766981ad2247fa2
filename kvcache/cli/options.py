"""`kvcache options`: every option of a configuration, with its default and the reason to set it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache.options import Options
from kvcache.registry import CODECS, EXPORTERS, TIERS, did_you_mean


def options(
    part: Annotated[
        str | None, typer.Argument(help="Print one part only, such as pool, tiers or disk.", show_default=False)
    ] = None,
) -> None:
    """Print the options of a configuration as Markdown: value, default, and when to set each."""
    tables = option_tables()
    if part is not None and part not in tables:
        raise ValueError(f"unknown part {part!r}, known ones: {', '.join(tables)}{did_you_mean(part, tables)}")
    for name, (title, table) in tables.items():
        if part in (None, name):
            typer.echo(f"## {title}\n\n{table.as_markdown()}")


def option_tables() -> dict[str, tuple[str, type[Options]]]:
    """Return a title and the options of each part of a configuration; a part whose package is missing is left out."""
    from kvcache.assembly.assemble import OffloadSettings
    from kvcache.assembly.spec import SpecOptions
    from kvcache.tiering.controller import TierConfig

    tables: dict[str, tuple[str, type[Options]]] = {
        "pool": ("The pool", OffloadSettings),
        "spec": ("The spec", SpecOptions),
        "tiers": ("Every entry of `tiers`", TierConfig),
    }
    for registry in (TIERS, CODECS, EXPORTERS):
        for name in registry.names():
            try:
                table = registry.resolve(name).options_type
            except ValueError:
                continue
            if table.declared():
                tables[name] = (f"{registry.kind.capitalize()} `{name}`", table)
    return tables
