"""Check a configuration against this machine before an engine is started; each result is a `Finding`.

An engine finds the same faults after it has loaded its weights, a minute or more into its start.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from kvcache.assembly.assemble import OffloadSettings, TierSettings
from kvcache.assembly.spec import SpecOptions
from kvcache.cli import engine_keys
from kvcache.integrations.lmcache.settings import L2Settings
from kvcache.integrations.sglang import settings as sglang
from kvcache.integrations.vllm import settings as vllm
from kvcache.integrations.vllm.model_folder import compare_folder
from kvcache.integrations.vllm.releases import describe_release
from kvcache.node.ledger import read_ledger
from kvcache.node.link import ask_owner
from kvcache.node.protocol import differences, node_folder
from kvcache.options import LEAST_SALT, Component, OptionError, choice_of, format_size, name_unknown, parse_size
from kvcache.recorder.files import older_file, refusal_of
from kvcache.registry import EXPORTERS, REMOVED, TIERS
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.store import STAGING_BYTES
from kvcache.tiers.base.wear import SHORT_LIFE_YEARS, describe_wear
from kvcache.transfer.free_memory import check_memory
from kvcache.transfer.shared_file import leftover_files, private_folder

_WRAPPERS = ("kv_transfer_config", "kv_connector_extra_config")
_PLUGIN_KEYS = frozenset({"module_path", "class_name"})
"""The keys by which SGLang and LMCache name a plug-in's class."""
_L2_KEYS = _PLUGIN_KEYS | {"type", "adapter_params", "config_class_name", "eviction", "serde", "shared"}
_L2_KEYS |= {"persist_enabled", "affinity_tag"}
"""The keys beside `adapter_params` that LMCache reads."""
_LEAST_POOL_BYTES = 1 << 20
"""Less than a block of any model that is served."""
# Removed options are refused when they are parsed.
_SPEC_KEYS = OffloadSettings.declared().keys() | SpecOptions.declared().keys() | REMOVED.keys()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check: its level (``"ok"``, ``"warning"`` or ``"error"``), its subject, and the text."""

    level: str
    subject: str
    text: str


def check_file(
    config: Path,
    num_bytes: int,
    workers: int,
    is_latent: bool | None,
    num_engines: int | None = None,
    model: Path | None = None,
) -> list[Finding]:
    """Check a JSON file of options, or of a configuration of vLLM, SGLang or LMCache; ``-`` is standard input.

    `num_bytes` is the size of a block on one worker; 0: unknown. If `is_latent`, all workers hold the same bytes.
    `num_engines` engines of this configuration run on this machine; None: the number in the file, or 1. `model` is the
    folder of the model's files, which vLLM's directories are compared with.
    """
    config_part, transfer, is_vllm, engine = read_file(config)
    if not is_vllm and not _PLUGIN_KEYS.isdisjoint(config_part):
        return _check_plugin(config_part)
    if not is_vllm:
        return check_config(config_part, block_bytes=num_bytes, world_size=workers, num_engines=num_engines or 1)
    stated = engine.get("data_parallel_size_local") or engine.get("data_parallel_size")
    num_engines = num_engines or (stated if type(stated) is int and stated > 0 else 1)
    has_events = (engine.get("kv_events_config") or {}).get("enable_kv_cache_events") is True
    engine_block = engine.get("block_size")
    faults = [*vllm.connector_faults(transfer), *filter(None, [vllm.spec_fault(config_part)])]
    findings = [Finding("error", "connector", f"vLLM would not use kvcache: {fault}") for fault in faults]
    findings += [
        Finding(level, "options", text) for level, text in engine_keys.engine_faults(config_part, engine_block)
    ]
    compare = None if model is None else partial(compare_folder, model, engine.get("load_format", "auto"))
    sizes = {"block_bytes": num_bytes, "world_size": workers, "num_engines": num_engines}
    findings += check_config(config_part, **sizes, is_vllm=True, is_latent=is_latent, compare=compare)
    if vllm.is_engine_spec(config_part) and not engine_keys.has_accelerator():
        # `check_config` has described copies that cannot start here: the error replaces that.
        findings = [finding for finding in findings if finding.subject != "data plane"]
        findings.append(Finding("error", "data plane", engine_keys.NO_DEVICE))
    findings += [Finding(level, "options", text) for level, text in engine_keys.copy_faults(config_part, engine)]
    if config_part.get(vllm.NODE_POOL):
        findings += [Finding(level, "node pool", text) for level, text in engine_keys.node_faults(engine, has_events)]
    if fault := engine_keys.adapter_fault(config_part, engine):
        findings.append(Finding("warning", "adapters", fault))
    findings += _leftover_regions()
    findings.append(Finding(*describe_release()))
    if has_events and not config_part.get(vllm.SELF_DESCRIBING):
        findings.append(Finding("warning", "events", vllm.UNDESCRIBED))
    if has_events and (larger := vllm.larger_blocks(config_part, engine_block)):
        findings.append(Finding("warning", "events", larger))
    return findings


def check_config(
    given: Mapping[str, Any],
    *,
    block_bytes: int = 0,
    world_size: int = 1,
    num_engines: int = 1,
    is_vllm: bool = False,
    is_latent: bool | None = None,
    compare: Callable[..., Iterator[tuple[str, str]]] | None = None,
) -> list[Finding]:
    """Check a configuration: list its faults, and the resources of this machine that it would use.

    Faults are findings, not exceptions. Nothing is created; shared stores are connected to, and wait for their
    ``timeout_s`` at most. `block_bytes` are those of an offloaded block on one of `world_size` workers of each of
    `num_engines`; if they are 0, sizes are not checked. If `is_vllm`, the adapter of vLLM reads `given`, otherwise a
    built-in spec. `is_latent`: all workers hold the same bytes. `compare` is `compare_folder` for a model.
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
        node_pool = getattr(placement, vllm.NODE_POOL, None)
        # vLLM numbers its data-parallel ranks from 0. Engines of a node share one pool and its tiers.
        ranks = [str(rank) if is_vllm else None for rank in range(1 if node_pool else num_engines)]
        tiers = [settings.tiers if node_pool else tuple(tier.of_rank(r) for tier in settings.tiers) for r in ranks]
        engines = [replace(settings, tiers=placed) for placed in tiers]
        settings = engines[0]
    except ValueError as error:
        return [*findings, *_faults(error)]
    if placement is not None:
        data_plane = placement.describe_copies(block_bytes, world_size, is_latent)
        world_size = 1 if placement.shares_one_copy(is_latent) else world_size
    policy = settings.cache_policy if placement is None else placement.policy
    sized, pool_bytes = _check_size(settings, policy, block_bytes, world_size, where)
    findings.append(sized)
    if pool_bytes is None:
        return findings
    node_pool, owner, options = _owner_of(node_pool, given, settings)
    if pool_bytes:
        findings += _check_memory(pool_bytes * len(engines), engines, node_pool)
    # The owner of the pool holds these directories and ports open, so they are not opened here.
    findings += [Finding("error", "node pool", text) for text in differences(owner.get("options") or options, options)]
    findings += [] if owner else _check_observers(settings)
    for number, tier in enumerate(settings.tiers):
        subject = f"tiers[{number}] {TIERS.path_of(tier.cls)}"
        findings += _check_tier(subject, tier, block_bytes * world_size, owner.get("pid", 0))
        if compare is not None:
            findings += _compare_model(subject, tier, compare, vllm.weights_version(given, number))
    findings += _check_together([tier for engine in engines for tier in engine.tiers])
    if placement is not None:
        findings.append(Finding("ok", "data plane", data_plane))
    return findings


def _check_size(
    settings: OffloadSettings, policy: Any, block_bytes: int, world_size: int, where: str
) -> tuple[Finding, int | None]:
    """Return findings on the pool's size, and its bytes: 0 if they are unknown, None if the size is invalid."""
    try:
        num_blocks = settings.num_blocks(block_bytes, world_size, where)
    except ValueError as error:
        if block_bytes or (settings.cpu_bytes_to_use is None) == (settings.num_cpu_blocks is None):
            return Finding("error", "pool", str(error)), None
        pool_bytes = settings.cpu_bytes_to_use or 0
        if pool_bytes < _LEAST_POOL_BYTES:
            text = f"cpu_bytes_to_use is {pool_bytes} bytes, less than a block: a unit, as in '64GiB'?"
            return Finding("error", "pool", text), pool_bytes
        text = f"{format_size(pool_bytes)}, policy {policy}; a block's size is not given (--model)"
        return Finding("ok", "pool", text), pool_bytes
    pool_bytes = num_blocks * settings.part_bytes(block_bytes) * world_size
    size = f" of {format_size(block_bytes * world_size)}, {format_size(pool_bytes)} in all" if block_bytes else ""
    return Finding("ok", "pool", f"{num_blocks:,} blocks{size}, policy {policy}"), pool_bytes


def read_file(config: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], bool, Mapping[str, Any]]:
    """Return the options, what surrounds them, whether they are vLLM's, and the configuration of vLLM itself."""
    source = "standard input" if str(config) == "-" else str(config)
    try:
        text = typer.get_text_stream("stdin").read() if str(config) == "-" else config.read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    is_engine = isinstance(document, Mapping) and isinstance(document.get("kv_events_config", {}), Mapping)
    engine = document if is_engine and "kv_transfer_config" in document else {}
    where = "extra_config"
    outer: Mapping[str, Any] = {}
    for name in _WRAPPERS:
        if isinstance(document, Mapping) and name in document:
            outer, document, where = document, document[name], name
    if where != _WRAPPERS[1] and isinstance(document, Mapping) and "kv_connector" in document:
        outer, document, where = document, {}, _WRAPPERS[1]  # a connector without options
    if not isinstance(document, Mapping):
        raise ValueError(f"{where} in {source} must be an object, got {document!r:.200}")
    is_vllm = where != "extra_config" or "spec_module_path" in document or "secondary_tiers" in document
    # What surrounds them is a connector's only if they are its `kv_connector_extra_config`.
    return document, outer if where == _WRAPPERS[-1] else {}, is_vllm, engine


def _check_plugin(plugin: Mapping[str, Any]) -> list[Finding]:
    """Check the configuration of a plug-in of SGLang or LMCache."""
    checks = {"kvcache.integrations.sglang": _check_storage, "kvcache.integrations.lmcache": _check_l2}
    try:
        choice_of(*checks)("module_path of a plug-in of SGLang or LMCache", plugin.get("module_path"))
    except ValueError as error:
        return _faults(error)
    return checks[plugin["module_path"]](plugin)


def _check_l2(adapter: Mapping[str, Any]) -> list[Finding]:
    """Check an ``--l2-adapter`` of LMCache."""
    try:
        for name, value in (("type", "plugin"), ("class_name", "KVCacheL2")):
            choice_of(value)(f"{name} of an --l2-adapter", adapter.get(name))
        ours = {"kind", "exporters", *TierConfig.declared(), *TIERS.resolve("disk").options_type.declared()}
        if misplaced := sorted(ours.intersection(adapter)):
            raise ValueError(f"{', '.join(misplaced)} of an --l2-adapter must be inside adapter_params")
        settings = L2Settings.parse(adapter.get("adapter_params") or {})
        sizes = settings.sizes_found()
        num_slots = settings.num_slots(sizes) if sizes else 0
    except ValueError as error:
        return _faults(error)
    findings = [_check_exporter(exporter) for exporter in settings.exporters.exporters]
    if unknown := name_unknown(adapter, _L2_KEYS):
        findings.append(Finding("warning", "options", f"unknown keys of an --l2-adapter: {unknown}"))
    for size in sizes:
        findings += _check_tier(f"objects of {size} bytes", settings.tier_of(size, num_slots), size)
    used_bytes = sum(path.lstat().st_blocks * 512 for path in settings.path.rglob("*"))
    findings.append(_fits(STAGING_BYTES * max(1, len(sizes)), ()))
    return [*findings, _room("KVCacheL2", settings.path, max(0, settings.options.capacity - used_bytes))]


def _check_storage(config: Mapping[str, Any]) -> list[Finding]:
    """Check the extra config of a storage backend of SGLang."""
    try:
        choice_of("KVCacheStorage")("class_name of a storage backend", config.get("class_name"))
        if not config.get("backend_name"):
            raise ValueError(f"SGLang needs a 'backend_name', such as 'kvcache', got {config.get('backend_name')!r}")
        options, tier = sglang.read_config(config)
    except ValueError as error:
        return _faults(error)
    findings = [*map(_check_exporter, options.exporters), *_check_tier(options.kind, tier.of_rank("0"), 0)]
    findings.append(_fits(STAGING_BYTES * max(1, len(options.shares or ())), [tier]))
    if (used := sum((options.shares or {"": 1.0}).values())) < 0.99:
        findings.append(Finding("warning", "options", f"shares use {used:.0%} of the capacity, the rest stays empty"))
    if not config.get("interface_v1"):
        text = "without interface_v1 SGLang copies each page once more"
        findings.append(Finding("warning", "options", text))
    return findings


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


def _owner_of(
    name: str | bool | None, given: Mapping[str, Any], settings: OffloadSettings
) -> tuple[str | bool | None, dict[str, Any], dict[str, Any]]:
    """Return the name of a node's pool, what its owner answers, or {} if none serves it, and the owner's options.

    A pool that is named by its model is the one of this machine with the same options, if there is one.
    """
    if not name:
        return name, {}, {}
    before, by_model, behind = ("{model}" if name is True else str(name)).partition("{model}")
    home = Path("/dev/shm", f"kvcache-{os.geteuid()}")
    for folder in sorted(home.glob(f"node-{before}{'*' * bool(by_model)}{behind}")):
        model = folder.name.removeprefix(f"node-{before}").removesuffix(behind)
        owner, options = ask_owner(folder), vllm.node_options(given, settings, model)
        if owner and (not by_model or owner.get("options") == options):
            return folder.name.removeprefix("node-"), owner, options
    return True if by_model else name, {}, {}


def _check_node(name: str | bool, num_bytes: int) -> tuple[int, Finding]:
    """Return the memory that a node's pool has already, and the state of the pool; nothing is created."""
    home = Path("/dev/shm", f"kvcache-{os.geteuid()}")
    folder = home / f"node-{name}"
    text = f"one for all engines of this machine, {'named by the model' if name is True else folder}"
    used_bytes = 0
    try:
        if home.exists():
            private_folder()
        if name is True or not folder.exists():
            return 0, Finding("ok", "node pool", text)
        used_bytes = (node_folder(str(name)) / "pool").stat().st_blocks * 512
        fault, identity, processes = read_ledger(folder / "ledger")
        if fault:
            return used_bytes, Finding("warning", "node pool", f"{text}: starts empty, its ledger is {fault}")
    except OSError:
        return used_bytes, Finding("ok", "node pool", f"{text}; no engine has used it yet")
    except ValueError as error:
        return 0, Finding("error", "node pool", str(error))
    pool_bytes = identity["num_blocks"] * identity["block_bytes"]
    num_engines = len({process.engine for process in processes})
    text += f"; it has {format_size(pool_bytes)}, engines that use it: {num_engines}"
    # A pool is a whole number of blocks.
    if processes and not 0 <= num_bytes - pool_bytes < identity["block_bytes"]:
        return used_bytes, Finding("error", "node pool", f"{text}; an engine of {format_size(num_bytes)} is refused")
    return used_bytes, Finding("ok", "node pool", text)


def _fits(num_bytes: int, tiers: Iterable[TierSettings]) -> Finding:
    """Check whether memory has room for so many bytes, and for the tiers in memory."""
    num_bytes += sum(tier.options.arguments()["capacity"] for tier in tiers if TIERS.path_of(tier.cls) == "memory")
    try:
        check_memory(num_bytes)
    except ValueError as error:
        return Finding("error", "memory", str(error))
    return Finding("ok", "memory", f"{format_size(num_bytes)} fit into this machine's free memory")


def _check_memory(pool_bytes: int, engines: list[OffloadSettings], node_pool: str | bool | None) -> Iterator[Finding]:
    settings = engines[0]
    if node_pool:
        used_bytes, finding = _check_node(node_pool, settings.cpu_bytes_to_use or 0)
        yield finding
        pool_bytes = max(0, pool_bytes - used_bytes)
    yield _fits(pool_bytes, [tier for engine in engines for tier in engine.tiers])
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < pool_bytes:
        text = f"the limit is {format_size(limit)} (ulimit -l): pinning {format_size(pool_bytes)} may be refused"
        yield Finding("warning", "pinned memory", f"{text}, and copies are slower then")
    else:
        yield Finding("ok", "pinned memory", "unlimited")
    if settings.tiers or node_pool:
        folder = Path(settings.pool_path).parent if settings.pool_path else Path(settings.pool_folder)
        yield _room("shared memory", folder, pool_bytes)


def _answer(question: Callable[[], str]) -> str:
    """Return a component's answer, or its error as a text, so that the other findings are still reported."""
    try:
        return question()
    except Exception as error:
        return f"it cannot be checked: {type(error).__name__}: {error}"


def _check_tier(subject: str, tier: TierSettings, block_bytes: int, owner_pid: int = 0) -> Iterator[Finding]:
    if owner_pid:
        yield Finding("ok", subject, f"open in the pool's owner, process {owner_pid}")
        return
    if reason := _answer(tier.unavailable_reason):
        yield Finding("error", subject, reason)
    else:
        text = f"jobs of at most {tier.config.deadline_s:g} s"
        if tier.config.write_policy != TierConfig.write_policy:
            text = f"written by {tier.config.write_policy}, {text}"
        yield Finding("ok", subject, text)
        codec = getattr(tier.options, "codec", None)
        for doubt in (_answer(tier.doubt), "" if codec is None else _answer(codec.doubt)):
            if doubt:
                yield Finding("warning", subject, doubt)
    if 0 < len(salt := getattr(tier.options, "salt", "")) < LEAST_SALT:
        yield Finding("error", subject, f"salt has {len(salt)} characters, and must have {LEAST_SALT} or more")
    disk = _disk_of(tier)
    if disk is None:
        if tier.config.endurance is not None and ":" not in TIERS.path_of(tier.cls):
            yield Finding("error", subject, "endurance limits the writes of a disk; this tier does not wear")
        return
    if disk.capacity_bytes < disk.least_bytes(block_bytes):
        least = f"one block of {format_size(block_bytes)}" if block_bytes else format_size(disk.least_bytes(0))
        yield Finding("error", subject, f"capacity {format_size(disk.capacity_bytes)} is less than {least}")
    if disk.path.is_dir():
        status = disk.path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            mode = oct(status.st_mode & 0o777)
            yield Finding(
                "warning", subject, f"{disk.path}, owner {status.st_uid}, mode {mode}: other users may read it"
            )
        yield Finding("ok", subject, f"{disk.path} exists and takes {format_size(disk.used_bytes)} on disk")
    yield from _check_wear(subject, disk, block_bytes)
    if not disk.is_read_only and (disk.path.is_dir() or not disk.path.exists()):
        yield _room(subject, disk.path, disk.needed_bytes)


def _compare_model(subject: str, tier: TierSettings, compare: Callable[..., Any], version: Any) -> Iterator[Finding]:
    """Compare a directory with the files of a model."""
    disk, fingerprint_of = _disk_of(tier), getattr(tier.cls, "recorded_fingerprint", None)
    if disk is not None and fingerprint_of is not None and (stored := fingerprint_of(disk.path)):
        yield from (Finding(level, subject, f"{disk.path} {text}") for level, text in compare(stored, version))


def _check_wear(subject: str, disk: _Disk, block_bytes: int) -> Iterator[Finding]:
    """Check the budget of writes, and describe the life of the SSD at the last process's rate, once that is known."""
    wear = getattr(disk.tier, "recorded_wear", lambda *_: None)(disk.path, disk.capacity_bytes, block_bytes)
    if wear is None:
        return
    if disk.endurance is not None:
        try:
            wear.limit(disk.endurance)
        except ValueError as error:
            yield Finding("error", subject, str(error))
            return
    rates = wear.stats()
    if text := describe_wear(rates["drive_writes"], rates["life_years"]):
        yield Finding("warning" if rates["life_years"] < SHORT_LIFE_YEARS else "ok", subject, text)


@dataclass(frozen=True, slots=True)
class _Disk:
    """A tier with a directory and a capacity on this machine."""

    tier: type[Any]
    path: Path
    capacity_bytes: int
    is_read_only: bool
    endurance: float | str | None

    @property
    def used_bytes(self) -> int:
        # An engine with several pools of pages has a folder for each.
        return sum(entry.lstat().st_blocks * 512 for entry in self.path.rglob("*") if entry.is_file())

    @property
    def daily_bytes(self) -> float:
        endurance = self.endurance or 0.0
        return float(endurance.removesuffix("/day") if isinstance(endurance, str) else endurance * self.capacity_bytes)

    @property
    def needed_bytes(self) -> int:
        if self.is_read_only:
            return 0
        missing_bytes = getattr(self.tier, "missing_bytes", lambda *_: None)(self.path, self.capacity_bytes)
        return max(0, self.capacity_bytes - self.used_bytes) if missing_bytes is None else int(missing_bytes)

    def least_bytes(self, block_bytes: int) -> int:
        capacity_for = getattr(self.tier, "capacity_for", None)
        return block_bytes if capacity_for is None else int(capacity_for(1, block_bytes or 1))


def _disk_of(tier: TierSettings) -> _Disk | None:
    """Return the tier as one with a directory and a capacity on this machine, if it names both."""
    options = tier.options.arguments()
    if "path" not in options or "capacity" not in options:
        return None
    capacity_bytes = parse_size("capacity", options["capacity"])
    is_read_only = options.get("read_only") is True
    return _Disk(tier.cls, Path(options["path"]), capacity_bytes, is_read_only, tier.config.endurance)


def _check_together(tiers: list[TierSettings]) -> Iterator[Finding]:
    """Check whether several tiers, of one engine or more, name one directory or overfill one file system."""
    disks = [disk for disk in map(_disk_of, tiers) if disk is not None]
    for path, count in Counter(disk.path.resolve() for disk in disks if not disk.is_read_only).items():
        if count > 1:
            text = f"{count} tiers have the path {path}; a directory belongs to one tier: {{dp_rank}} names the engine"
            yield Finding("error", "tiers", text)
    by_system: dict[int, list[_Disk]] = {}
    for disk in disks:
        by_system.setdefault(_existing(disk.path).stat().st_dev, []).append(disk)
    for together in by_system.values():
        limited = [disk for disk in together if disk.endurance is not None]
        if len(limited) > 1:
            # Drive writes count the capacity of their tier, so they are a part of what the device endures already.
            is_whole = any(isinstance(disk.endurance, str) for disk in limited)
            total = format_size(sum(disk.daily_bytes for disk in limited))
            text = f"{len(limited)} tiers of one device may write {total} a day together: the device must endure that"
            yield Finding("warning" if is_whole else "ok", "tiers", text)
        free = shutil.disk_usage(_existing(together[0].path)).free
        needed = sum(disk.needed_bytes for disk in together)
        # A tier that does not fit alone has an error of its own.
        if len(together) > 1 and free < needed and all(disk.needed_bytes <= free for disk in together):
            paths = " and ".join(dict.fromkeys(str(disk.path) for disk in together))
            text = f"{paths} are on one file system: {format_size(needed)} are needed, {format_size(free)} are free"
            yield Finding("error", "tiers", text)


def _check_observers(settings: OffloadSettings) -> Iterator[Finding]:
    if settings.record:
        yield from _check_record(settings.record, settings.record_max_bytes)
    yield from map(_check_exporter, settings.exporters)
    # Each alone can be opened.
    for exporter, count in Counter((exporter.cls, str(exporter.options)) for exporter in settings.exporters).items():
        if count > 1:
            name = EXPORTERS.path_of(exporter[0])
            yield Finding("warning", f"exporter {name}", f"{name} is configured {count} times with equal options")


def _check_record(path: str, max_bytes: int) -> Iterator[Finding]:
    if importlib.util.find_spec("msgspec") is None:
        yield Finding("error", "recording", "recording needs the package msgspec: pip install 'kvcache[record]'")
    if reason := refusal_of(path):
        yield Finding("error", "recording", reason)
        return
    target = Path(path.replace("{pid}", str(os.getpid())))
    used_bytes = sum(file.stat().st_size for file in (target, older_file(target)) if file.is_file())
    yield _room("recording", target.parent, max(0, max_bytes - used_bytes))


def _check_exporter(exporter: Component) -> Finding:
    subject = f"exporter {EXPORTERS.path_of(exporter.cls)}"
    reason, path = exporter.unavailable_reason(), getattr(exporter.options, "path", None)
    if path and not reason and not os.access(folder := _existing(Path(path).parent), os.W_OK):
        reason = f"{folder} cannot be written by user {os.geteuid()}: mount a volume at {Path(path).parent}"
    # The engine starts without the exporter, so this is not an error.
    return Finding("warning", subject, reason) if reason else Finding("ok", subject, "can be opened")


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _leftover_regions() -> list[Finding]:
    """Return a warning for each file in shared memory that a killed engine left behind."""
    return [
        Finding(
            "warning",
            "shared memory",
            f"{path} holds {format_size(num_bytes)} of a killed engine; its next start, or this command, removes it: "
            f"rm {shlex.quote(str(path))}",
        )
        for path, num_bytes in leftover_files()
    ]


def _room(subject: str, path: Path, num_bytes: int) -> Finding:
    """Check whether a file system has room for so many bytes; `path` itself need not exist."""
    folder = _existing(path)
    if folder == Path("/") and path != folder:
        return Finding("warning", subject, f"nothing of {path} exists: is its file system not mounted?")
    if not folder.is_dir():
        return Finding("error", subject, f"{folder} is not a directory")
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return Finding("error", subject, f"{folder} is on a read-only file system: mount a volume at {path}")
    if not os.access(folder, os.W_OK | os.X_OK):
        who = f"user {os.geteuid()}, groups {', '.join(map(str, sorted({os.getegid(), *os.getgroups()})))}"
        return Finding("error", subject, f"{folder} cannot be written by {who}: set the volume's owner or fsGroup")
    disk = shutil.disk_usage(folder)
    text = f"{format_size(num_bytes)} are needed below {path}, {format_size(disk.free)} are free"
    if disk.total < num_bytes:
        text += f": the volume has {format_size(disk.total)} in all"
    return Finding("error" if disk.free < num_bytes else "ok", subject, text)
