"""`kvcache check`: check a configuration on this machine before an engine is started."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli import common
from kvcache.cli.model import ModelOption, read_model
from kvcache.options import parse_size
from kvcache.version import __version__

if TYPE_CHECKING:
    from kvcache.cli.findings import Finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def check(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="JSON file: extra_config, or vLLM's configuration; - is standard input.", show_default=False
        ),
    ] = None,
    device: Annotated[bool, typer.Option("--device", hidden=True)] = False,
    model: ModelOption = None,
    block_tokens: Annotated[int, typer.Option("--block-size", help="With --model: tokens of an offloaded block.")] = 16,
    block_bytes: Annotated[
        str | None, typer.Option(help="Bytes of an offloaded block on one worker.", metavar="SIZE", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers (ranks) of the engine.")] = 1,
    data_parallel_size: Annotated[
        int | None, typer.Option(help="Engines on this machine with this configuration.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Check a configuration against this machine: options, packages, memory, disk, stores."""
    common.check_writable("--json", json)
    if device:
        raise ValueError("--device was removed: use `kvcache selftest`")
    if config is None:
        raise ValueError("name the configuration to check; `kvcache selftest` tests the machine")
    # Imported when it runs, so that `kvcache --help` starts at once.
    from kvcache.assembly.models import config_path
    from kvcache.cli.findings import check_file

    common.at_least("--workers", workers, 1)
    if data_parallel_size is not None:
        common.at_least("--data-parallel-size", data_parallel_size, 1)
    num_bytes, is_latent = _block_bytes(model, block_tokens, block_bytes, workers)
    described = config_path(model.partition(",")[0].strip()) if model is not None else None
    folder = described.parent if described is not None and described.name == "config.json" else None
    _report(config, check_file(config, num_bytes, workers, is_latent, data_parallel_size, folder), strict, json)


def _report(config: Path, findings: list[Finding], strict: bool, json: str | None) -> None:
    """Show findings, and fail if one of them is an error."""
    from rich.text import Text

    table = common.facts_table(
        (Text(finding.level, style=_STYLES[finding.level]), finding.subject, Text(finding.text)) for finding in findings
    )
    document = {"version": __version__, "config": str(config), "findings": [asdict(finding) for finding in findings]}
    common.report(json, document, f"kvcache {__version__}", table)
    failing = {"error", "warning"} if strict else {"error"}
    num_failed = sum(finding.level in failing for finding in findings)
    if num_failed:
        raise common.CommandError(f"{num_failed} of {len(findings)} checks of {config} failed")


def _block_bytes(model_text: str | None, tokens: int, text: str | None, workers: int) -> tuple[int, bool | None]:
    """Return the bytes of one worker's block, and whether all workers hold the same ones (None: unknown)."""
    if text is not None:
        if model_text is not None:
            raise ValueError(f"--block-bytes excludes --model, got {text!r} and {model_text!r}")
        return parse_size("--block-bytes", text), None
    model = read_model(model_text)
    if model is None:
        return 0, None
    num_bytes = model.token_bytes * common.at_least("--block-size", tokens, 1)
    # Every worker keeps its share of the heads, or all latent values.
    return (num_bytes, True) if model.is_latent else (-(-num_bytes // workers), False)
