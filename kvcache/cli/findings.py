"""Check a configuration against this machine before an engine is started; each result is a `Finding`.

An engine finds the same faults after it has loaded its weights, a minute or more into its start.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kvcache.assembly.assemble import OffloadSettings, TierSettings
from kvcache.assembly.spec import SpecOptions
from kvcache.integrations.vllm import settings as vllm
from kvcache.integrations.vllm.releases import describe_release
from kvcache.options import Component, OptionError, format_size, name_unknown, parse_size
from kvcache.tiering.controller import TierConfig

_WRAPPERS = ("kv_transfer_config", "kv_connector_extra_config")
_SPEC_KEYS = OffloadSettings.keys() | SpecOptions.keys()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check: its level (``"ok"``, ``"warning"`` or ``"error"``), its subject, and the text."""

    level: str
    subject: str
    text: str


def check_file(config: Path, num_bytes: int, workers: int, is_latent: bool | None) -> list[Finding]:
    """Check a JSON file of options, or of a configuration of vLLM that contains them; ``-`` is standard input.

    `num_bytes` are those of a block on one of the workers; 0: unknown. `is_latent`: all workers hold the same bytes.
    """
    given, transfer, is_vllm, has_events, engine_block = _read(config)
    if not is_vllm:
        return check_config(given, block_bytes=num_bytes, world_size=workers)
    faults = [fault for fault in (vllm.connector_fault(transfer), vllm.spec_fault(given)) if fault]
    findings = [Finding("error", "connector", f"vLLM would not use kvcache: {fault}") for fault in faults]
    findings += check_config(given, block_bytes=num_bytes, world_size=workers, is_vllm=True, is_latent=is_latent)
    findings.append(Finding(*describe_release("eviction_policy" in given)))
    if has_events and not given.get(vllm.SELF_DESCRIBING):
        findings.append(Finding("warning", "events", vllm.UNDESCRIBED))
    if has_events and (larger := vllm.larger_blocks(given, engine_block)):
        findings.append(Finding("warning", "events", larger))
    return findings


def check_config(
    given: Mapping[str, Any],
    *,
    block_bytes: int = 0,
    world_size: int = 1,
    is_vllm: bool = False,
    is_latent: bool | None = None,
) -> list[Finding]:
    """Check a configuration: list its faults, and the resources of this machine that it would use.

    Faults are findings, not exceptions. Nothing is created; shared stores are connected to, and wait for their
    ``timeout_s`` at most. `block_bytes` are those of an offloaded block on one of `world_size` workers; if they are 0,
    sizes are not checked. If `is_vllm`, the adapter of vLLM reads `given`, otherwise a built-in spec. `is_latent`: all
    workers hold the same bytes.
    """
    findings = []
    where = vllm.WHERE if is_vllm else "extra_config"
    if unknown := vllm.unknown_keys(given) if is_vllm else name_unknown(given, _SPEC_KEYS):
        findings.append(Finding("warning", "options", f"unknown keys of {where}: {unknown}"))
    if not is_vllm:
        findings += _check_spec(given)
    placement: vllm.Placement | None = None
    try:
        if is_vllm:
            placement = vllm.read_config(given)
        settings = OffloadSettings.parse_part(given) if placement is None else placement.settings
    except ValueError as error:
        return [*findings, *_faults(error)]
    if placement is not None:
        data_plane = placement.describe_copies(block_bytes, world_size, is_latent)
        world_size = 1 if placement.shares_one_copy(is_latent) else world_size
    policy = settings.cache_policy if placement is None else placement.policy
    pool_bytes = 0
    try:
        num_blocks = settings.num_blocks(block_bytes, world_size, where)
    except ValueError as error:
        if settings.cpu_bytes_to_use is None or block_bytes:
            return [*findings, Finding("error", "pool", str(error))]
        pool_bytes = settings.cpu_bytes_to_use
        findings.append(
            Finding(
                "ok",
                "pool",
                f"{format_size(pool_bytes)}, policy {policy}; a block's size is not given (--model)",
            )
        )
    else:
        pool_bytes = num_blocks * block_bytes * world_size
        size = f" of {format_size(block_bytes * world_size)}, {format_size(pool_bytes)} in all" if block_bytes else ""
        findings.append(Finding("ok", "pool", f"{num_blocks:,} blocks{size}, policy {policy}"))
    if pool_bytes:
        findings += _check_memory(pool_bytes, settings)
    findings += [_check_exporter(one) for one in settings.exporters]
    for tier in settings.tiers:
        findings += _check_tier(tier, block_bytes * world_size)
    if placement is not None:
        findings.append(Finding("ok", "data plane", data_plane))
    return findings


def _read(config: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], bool, bool, object]:
    """Return the options, what surrounds them, whether they are vLLM's, KV events are on, and its ``block_size``."""
    source = "standard input" if str(config) == "-" else str(config)
    try:
        text = typer.get_text_stream("stdin").read() if str(config) == "-" else config.read_text(encoding="utf-8")
        given = json.loads(text)
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


def _check_spec(given: Mapping[str, Any]) -> list[Finding]:
    try:
        spec = SpecOptions.parse_part(given)
    except ValueError as error:
        return _faults(error)
    is_wrong = spec.spec_name == "cpu" and given.get("tiers") is not None
    return [Finding("error", "options", "tiers need spec_name 'tiering'")] if is_wrong else []


def _faults(error: ValueError) -> list[Finding]:
    problems = error.problems if isinstance(error, OptionError) else [str(error)]
    return [Finding("error", "options", problem) for problem in problems]


def _check_memory(pool_bytes: int, settings: OffloadSettings) -> Iterator[Finding]:
    from kvcache.transfer.free_memory import check_memory

    try:
        check_memory(pool_bytes)
    except ValueError as error:
        yield Finding("error", "memory", str(error))
    else:
        yield Finding("ok", "memory", f"{format_size(pool_bytes)} fit into this machine's free memory")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < pool_bytes:
        text = f"the limit is {format_size(limit)} (ulimit -l): pinning {format_size(pool_bytes)} may be refused"
        yield Finding("warning", "pinned memory", f"{text}, and copies are slower then")
    else:
        yield Finding("ok", "pinned memory", "unlimited")
    if settings.tiers:
        folder = Path(settings.pool_path).parent if settings.pool_path else Path(settings.pool_folder)
        yield _room("shared memory", folder, pool_bytes)


def _check_tier(tier: TierSettings, block_bytes: int) -> Iterator[Finding]:
    subject = f"tier {tier.cls.__name__}"
    if reason := tier.unavailable_reason():
        yield Finding("error", subject, reason)
    else:
        text = f"jobs of at most {tier.config.deadline_s:g} s"
        if tier.config.write_policy != TierConfig.write_policy:
            text = f"written by {tier.config.write_policy}, {text}"
        yield Finding("ok", subject, text)
    options = tier.options.arguments()
    if "path" not in options or "capacity" not in options:
        # Only a tier that names a directory and a capacity keeps its blocks on this machine.
        return
    path = Path(options["path"])
    capacity_bytes = parse_size("capacity", options["capacity"])
    if block_bytes and capacity_bytes < block_bytes:
        text = f"capacity {format_size(capacity_bytes)} is less than one block of {format_size(block_bytes)}"
        yield Finding("error", subject, text)
    used_bytes = 0
    if path.is_dir():
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            mode = oct(status.st_mode & 0o777)
            yield Finding("warning", subject, f"{path}, owner {status.st_uid}, mode {mode}: other users may read it")
        used_bytes = sum(entry.stat().st_blocks * 512 for entry in path.iterdir() if entry.is_file())
        yield Finding("ok", subject, f"{path} exists and takes {format_size(used_bytes)} on disk")
    elif path.exists():
        yield Finding("error", subject, f"{path} is not a directory")
        return
    yield _room(subject, path, max(0, capacity_bytes - used_bytes))


def _check_exporter(exporter: Component) -> Finding:
    subject = f"exporter {exporter.cls.__name__}"
    reason = exporter.unavailable_reason()
    # The engine starts without the exporter, so this is not an error.
    return Finding("warning", subject, reason) if reason else Finding("ok", subject, "can be opened")


def _room(subject: str, path: Path, num_bytes: int) -> Finding:
    """Check whether a file system has room for so many bytes; `path` itself need not exist."""
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    if at == Path("/") and path != at:
        return Finding("warning", subject, f"nothing of {path} exists: is its file system not mounted?")
    if not os.access(at, os.W_OK):
        return Finding("error", subject, f"{at} cannot be written by user {os.geteuid()}")
    free = shutil.disk_usage(at).free
    text = f"{format_size(num_bytes)} are needed below {path}, {format_size(free)} are free"
    return Finding("error" if free < num_bytes else "ok", subject, text)
