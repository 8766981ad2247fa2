"""Check a configuration against this machine before an engine is started.

An engine finds the same faults after it has loaded its weights, a minute or more into its start.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.assembly.assemble import ExporterSettings, OffloadSettings, TierSettings
from kvcache.assembly.base import SpecOptions
from kvcache.options import OptionError, format_size, name_unknown, parse_size
from kvcache.registry import SPECS
from kvcache.tiering.controller import TierConfig

DEFAULT_KEYS = OffloadSettings.keys() | SpecOptions.keys()
"""Keys of `extra_config` that the built-in specs read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check: its level (``"ok"``, ``"warning"`` or ``"error"``), its subject, and the text."""

    level: str
    subject: str
    text: str


def check_config(
    given: Mapping[str, Any],
    *,
    block_bytes: int = 0,
    world_size: int = 1,
    known_keys: Collection[str] = DEFAULT_KEYS,
    where: str = "extra_config",
    read: Callable[[Mapping[str, Any]], OffloadSettings] | None = None,
) -> list[Finding]:
    """Check a configuration: list its faults, and the resources of this machine that it would use.

    Faults are findings, not exceptions. Nothing is created; shared stores are connected to, and wait for their
    ``timeout_s`` at most.

    Parameters
    ----------
    block_bytes, world_size : int
        Bytes of one offloaded block on one worker (0: unknown, then sizes are not checked), and number of workers.
    known_keys : collection of str
        Keys that kvcache or the engine reads from `given`; others are warned about.
    read : callable, optional
        Reads `given` as the engine's adapter does, or raises ValueError; None: as the built-in specs do.
    """
    findings = []
    if unknown := name_unknown(given, known_keys):
        findings.append(Finding("warning", "options", f"unknown keys of {where}: {unknown}"))
    try:
        settings = OffloadSettings.read(given, where) if read is None else read(given)
    except ValueError as error:
        problems = error.problems if isinstance(error, OptionError) else [str(error)]
        return [*findings, *(Finding("error", "options", problem) for problem in problems)]
    if read is None:
        findings += _check_spec(given.get("spec_name", "cpu"), settings)
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
                f"{format_size(pool_bytes)}, policy {settings.cache_policy}; a block's size is not given (--model)",
            )
        )
    else:
        pool_bytes = num_blocks * block_bytes * world_size
        size = f" of {format_size(block_bytes * world_size)}, {format_size(pool_bytes)} in all" if block_bytes else ""
        findings.append(Finding("ok", "pool", f"{num_blocks:,} blocks{size}, policy {settings.cache_policy}"))
    if pool_bytes:
        findings += _check_memory(pool_bytes, settings)
    findings += [_check_exporter(one) for one in settings.exporters]
    for tier in settings.tiers:
        findings += _check_tier(tier, block_bytes * world_size)
    return findings


def _check_spec(spec_name: object, settings: OffloadSettings) -> Iterator[Finding]:
    try:
        SPECS.resolve(spec_name)
    except ValueError as error:
        yield Finding("error", "options", str(error))
    if settings.tiers and spec_name == "cpu":
        yield Finding("error", "options", "tiers need spec_name 'tiering'")


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
    subject = f"tier {tier.tier.__name__}"
    if reason := tier.tier.unavailable_reason(tier.options):
        yield Finding("error", subject, reason)
    else:
        text = f"jobs of at most {tier.config.deadline_s:g} s"
        if tier.config.write_policy != TierConfig.write_policy:
            text = f"written by {tier.config.write_policy}, {text}"
        yield Finding("ok", subject, text)
    if "path" not in tier.options or "capacity" not in tier.options:
        # Only a tier that names a directory and a capacity keeps its blocks on this machine.
        return
    path = Path(tier.options["path"])
    capacity_bytes = parse_size("capacity", tier.options["capacity"])
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


def _check_exporter(one: ExporterSettings) -> Finding:
    subject = f"exporter {one.exporter.__name__}"
    reason = one.exporter.unavailable_reason(one.options)
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
