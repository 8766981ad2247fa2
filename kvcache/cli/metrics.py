"""`kvcache metrics`: the table of metrics as a Grafana dashboard, as alert rules, and as Markdown."""

from __future__ import annotations

import json
from typing import Annotated

import typer

PrefixOption = Annotated[str, typer.Option(help="Of the series' names; vllm:kvcache_ under vLLM.")]


def dashboard(prefix: PrefixOption = "kvcache_") -> None:
    """Print a Grafana dashboard, to be imported as JSON."""
    from kvcache.exporters.dashboard import dashboard as make

    typer.echo(json.dumps(make(prefix), indent=2))


def rules(
    prefix: PrefixOption = "kvcache_",
    docs: Annotated[
        str | None,
        typer.Option(help="Address of these docs, for runbook_url of each alert.", metavar="URL", show_default=False),
    ] = None,
) -> None:
    """Print alert rules for Prometheus."""
    from kvcache.exporters.dashboard import rules as make

    typer.echo(make(prefix, docs), nl=False)


def table() -> None:
    """Print every metric as Markdown."""
    from kvcache.exporters.dashboard import as_markdown_table

    typer.echo(as_markdown_table(), nl=False)
