"""Check a configuration against this machine before an engine is started.

It lists what the configuration would use, and what stands in the way.
An engine finds out after it has loaded its weights, a minute or more into its start.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.assembly.assemble import OPTION_NAMES, ExporterSettings, OffloadSettings, TierSettings
from kvcache.assembly.base import OffloadingSpec
from kvcache.options import format_size, name_unknown, parse_size

LEVELS = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check: its level (``"ok"``, ``"warning"`` or ``"error"``), what it is about, and what was found."""

    level: str
    subject: str
    text: str


def check_config(
    given: Mapping[str, Any],
    *,
    block_bytes: int = 0,
    world_size: int = 1,
    known_keys: Collection[str] = (),
    where: str = "extra_config",
) -> list[Finding]:
    """Return what a configuration would use on this machine.

    Parameters
    ----------
    given : mapping
        As `OffloadSettings.read` takes it.
    block_bytes : int
        Bytes of one offloaded block on one worker; 0: not known, then sizes are not checked.
    world_size : int
        Workers that share the host memory.
    known_keys : collection of str
        Keys that somebody else reads from the same mapping.
    where : str
        What `given` is, for messages.

    Returns
    -------
    list of Finding
        Errors do not raise; nothing is opened or created.
    """
    findings = []
    if unknown := name_unknown(given, {*OPTION_NAMES, *OffloadingSpec.option_names, *known_keys}):
        findings.append(Finding("warning", "options", f"nobody reads these keys of {where}: {unknown}"))
    try:
        settings = OffloadSettings.read(given, where)
    except ValueError as error:
        return [*findings, Finding("error", "options", str(error))]
    if where == "extra_config" and settings.tiers and given.get("spec_name") != "tiering":
        findings.append(Finding("error", "options", "tiers need spec_name 'tiering'"))
    pool_bytes = 0
    try:
        num_blocks = settings.num_blocks(block_bytes, world_size, where)
    except ValueError as error:
        if settings.cpu_bytes_to_use is None or block_bytes:
            return [*findings, Finding("error", "pool", str(error))]
        pool_bytes = settings.cpu_bytes_to_use
        findings.append(
            Finding("ok", "pool", f"{format_size(pool_bytes)}, policy {settings.cache_policy}; block size not given")
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
        yield Finding("ok", "pinned memory", "no limit stands in the way")
    if settings.tiers:
        folder = Path(settings.pool_path).parent if settings.pool_path else Path(settings.pool_folder)
        yield _room("shared memory", folder, pool_bytes)


def _check_tier(tier: TierSettings, block_bytes: int) -> Iterator[Finding]:
    subject = f"tier {tier.tier.__name__}"
    try:
        tier.tier.check_options(tier.options)
    except ValueError as error:
        yield Finding("error", subject, str(error))
        return
    yield Finding("ok", subject, f"written by {tier.config.write_policy}, jobs of at most {tier.config.deadline_s:g} s")
    if "path" not in tier.options or "capacity" not in tier.options:
        # Only a tier that names a directory and a capacity keeps its blocks on this machine.
        return
    path = Path(tier.options["path"])
    try:
        capacity_bytes = parse_size("capacity", tier.options["capacity"])
    except ValueError as error:
        yield Finding("error", subject, str(error))
        return
    if block_bytes and capacity_bytes < block_bytes:
        text = f"capacity {format_size(capacity_bytes)} is less than one block of {format_size(block_bytes)}"
        yield Finding("error", subject, text)
    used_bytes = 0
    if path.is_dir():
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            mode = oct(status.st_mode & 0o777)
            yield Finding("warning", subject, f"{path} has owner {status.st_uid} and mode {mode}: others may read it")
        used_bytes = sum(entry.stat().st_blocks * 512 for entry in path.iterdir() if entry.is_file())
        yield Finding("ok", subject, f"{path} exists and takes {format_size(used_bytes)} on disk")
    elif path.exists():
        yield Finding("error", subject, f"{path} is no directory")
        return
    yield _room(subject, path, max(0, capacity_bytes - used_bytes))


def _check_exporter(one: ExporterSettings) -> Finding:
    subject = f"exporter {one.exporter.__name__}"
    reason = one.exporter.unavailable_reason(one.options)
    # The engine starts without it.
    return Finding("warning", subject, reason) if reason else Finding("ok", subject, "can be opened")


def _room(subject: str, path: Path, num_bytes: int) -> Finding:
    """Check whether a file system has room for so many bytes; `path` itself need not exist."""
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    if not os.access(at, os.W_OK):
        return Finding("error", subject, f"{at} cannot be written by user {os.geteuid()}")
    free = shutil.disk_usage(at).free
    text = f"{format_size(num_bytes)} are needed below {path}, {format_size(free)} are free"
    return Finding("error" if free < num_bytes else "ok", subject, text)
