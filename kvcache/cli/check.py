"""`kvcache check`: check a configuration on this machine before an engine is started."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.model import ModelOption, read_model
from kvcache.options import parse_size

if TYPE_CHECKING:
    from kvcache.assembly.check import Finding

_WRAPPERS = ("kv_transfer_config", "kv_connector_extra_config")
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def check(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="JSON file: extra_config, or vLLM's configuration; - is standard input.", show_default=False
        ),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="Check the pods of a Kubernetes manifest (YAML) instead.", metavar="FILE", show_default=False
        ),
    ] = None,
    device: Annotated[
        bool,
        typer.Option(
            "--device",
            help="Measure the accelerator, or the CPU if there is none; --json is kvcache-device.json by default.",
        ),
    ] = False,
    model: ModelOption = None,
    block_tokens: Annotated[int, typer.Option("--block-size", help="With --model: tokens of an offloaded block.")] = 16,
    block_bytes: Annotated[
        str | None, typer.Option(help="Bytes of an offloaded block on one worker.", metavar="SIZE", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers (ranks) of the engine.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Check a configuration against this machine: options, packages, memory, disk, stores."""
    common.check_writable("--json", json)
    if (config is not None) + (manifest is not None) + device != 1:
        raise ValueError("name one thing to check: a configuration, --manifest FILE, or --device")
    if device:
        # By name: no file outside `lab` imports it.
        import_module("kvcache.lab.commands.check_device").check_device(json)
    if manifest is not None:
        from kvcache.cli.manifest import check_manifest

        _report(manifest, check_manifest(manifest), strict, json)
    if config is not None:
        common.at_least("--workers", workers, 1)
        num_bytes, is_latent = _block_bytes(model, block_tokens, block_bytes, workers)
        _report(config, _findings(config, num_bytes, workers, is_latent), strict, json)


def _findings(config: Path, num_bytes: int, workers: int, is_latent: bool | None) -> list[Finding]:
    from kvcache.assembly.check import Finding, check_config

    given, transfer, is_vllm, has_events, engine_block = _read(config)
    if not is_vllm:
        return check_config(given, block_bytes=num_bytes, world_size=workers)
    from kvcache.integrations.vllm import settings
    from kvcache.integrations.vllm.releases import describe_release

    faults = [fault for fault in (settings.connector_fault(transfer), settings.spec_fault(given)) if fault]
    findings = [Finding("error", "connector", f"vLLM would not use kvcache: {fault}") for fault in faults]
    findings += check_config(
        given,
        block_bytes=num_bytes,
        world_size=1 if settings.shares_one_copy(given, is_latent) else workers,
        known_keys=settings.known_keys(given),
        where=settings.WHERE,
        read=settings.read_config,
    )
    if all(one.level != "error" or one.subject != "options" for one in findings):
        text = settings.describe_data_plane(given, num_bytes, workers, is_latent)
        findings.append(Finding("ok", "data plane", text))
    findings.append(Finding(*describe_release("eviction_policy" in given)))
    if has_events and not given.get(settings.SELF_DESCRIBING):
        findings.append(Finding("warning", "events", settings.UNDESCRIBED))
    if has_events and (larger := settings.larger_blocks(given, engine_block)):
        findings.append(Finding("warning", "events", larger))
    return findings


def _report(config: Path, findings: list[Finding], strict: bool, json: str | None) -> None:
    """Show findings, and fail if one of them is an error."""
    from rich.text import Text

    table = common.facts_table(
        (Text(one.level, style=_STYLES[one.level]), one.subject, Text(one.text)) for one in findings
    )
    common.report(json, {"config": str(config), "findings": [asdict(finding) for finding in findings]}, table)
    failing = {"error", "warning"} if strict else {"error"}
    num_failed = sum(finding.level in failing for finding in findings)
    if num_failed:
        raise common.CommandError(f"{num_failed} of {len(findings)} checks of {config} failed")


def _read(config: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], bool, bool, object]:
    """Return the options, what surrounds them, whether they are vLLM's, KV events are on, and its ``block_size``."""
    source = "standard input" if str(config) == "-" else str(config)
    try:
        text = typer.get_text_stream("stdin").read() if str(config) == "-" else config.read_text(encoding="utf-8")
        given = json_module.loads(text)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    events = given.get("kv_events_config") if isinstance(given, Mapping) else None
    has_events = isinstance(events, Mapping) and events.get("enable_kv_cache_events") is True
    engine_block = given.get("block_size") if isinstance(events, Mapping) else None
    where = "extra_config"
    outer: Mapping[str, Any] = {}
    for name in _WRAPPERS:
        if isinstance(given, Mapping) and name in given:
            outer, given, where = given, given[name], name
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} in {source} must be an object, got {given!r:.200}")
    is_vllm = where != "extra_config" or "spec_module_path" in given or "secondary_tiers" in given
    # What surrounds them is a connector's only if they are its `kv_connector_extra_config`.
    return given, outer if where == _WRAPPERS[-1] else {}, is_vllm, has_events, engine_block


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
