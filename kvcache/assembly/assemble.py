"""Parse a configuration, and open the manager that it describes, with its pool, tiers and exporters.

All specs and integrations use this module, so an option has one meaning and one error for all of them, and everything
that was opened is closed if a later step fails.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvcache.assembly.log import set_up_log
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.control.pool import MAX_BLOCKS
from kvcache.control.telemetry import Exporter, Telemetry
from kvcache.epoch import named, parse_version
from kvcache.metrics import Labels
from kvcache.options import (
    Component,
    Options,
    check_windows,
    count_from,
    option,
    parse_count,
    parse_duration,
    parse_flag,
    parse_policy,
    parse_size,
    parse_text,
    parse_threads,
    run_all,
    split,
    without_secrets,
)
from kvcache.recorder.recorder import DEFAULT_MAX_BYTES, Recorder
from kvcache.registry import EXPORTERS, TIERS, Registry
from kvcache.tiering.arbiter import check_prefill_rate
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiering.store import KeyedStore
from kvcache.tiers.base.tier import Tier
from kvcache.transfer.free_memory import check_memory
from kvcache.version import __version__

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks
    from kvcache.transfer.shared_file import SharedBlocks

_LOG = logging.getLogger(__name__)
_ALIGN_BYTES = 4096
_RANK = re.compile(r"[{](?:dp_)?rank[}]")
_OF_MANAGER = ("write_policy", "num_uses", "max_store_blocks", "arbiter", "endurance")
_WEIGHTS_VERSION = "blocks outlive the engine, and its weights have a name, such as a step of a training run"
_NEED_TIERS = ("lookup_deadline_s", "pool_folder", "pool_path", "prefill_tokens_per_s")


@dataclass(frozen=True, slots=True)
class TierSettings(Component):
    """One entry of ``tiers``: the tier's class, its own options, and how the manager uses it."""

    config: TierConfig

    def describe(self) -> dict[str, Any]:
        options = Component.describe(self)
        return {"type": options.pop("type"), **asdict(self.config), **options}

    def of_rank(self, rank: str | None) -> TierSettings:
        """Return the settings of a data-parallel rank: ``{rank}`` and ``{dp_rank}`` in ``path`` are its number.

        ValueError: the path has one of them, and `rank` is None, because the engine has not set it, or has ``{model}``.
        """
        path = getattr(self.options, "path", "")
        if "{model}" in path:
            raise ValueError(f"path of {self.cls.__name__}: only a 'node_pool' replaces {{model}}, got {path!r}")
        if not _RANK.search(path):
            return self
        if rank is None:
            raise ValueError(f"path of {self.cls.__name__}: its data-parallel rank is unknown here, got {path!r}")
        placed: dict[str, Any] = {"path": _RANK.sub(rank, path)}
        return replace(self, options=replace(self.options, **placed))


def _parse_tiers(name: str, value: Any) -> tuple[TierSettings, ...]:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(entry, Mapping | TierSettings) for entry in value):
        raise ValueError(f"{name} must be a list of dicts, at least one, got {without_secrets(value)!r}")
    return tuple(run_all(partial(parse_tier, entry) for entry in value))


def parse_tier(entry: Mapping[str, Any] | TierSettings) -> TierSettings:
    """Parse an entry of ``tiers``: its ``type`` (a name, a class or a path), the options of `TierConfig`, its own."""
    # The errors of `run_all` show no keys.
    settings: TierSettings = entry if isinstance(entry, TierSettings) else run_all([partial(_parse_entry, entry)])[0]
    return settings


def _parse_entry(entry: Mapping[str, Any]) -> TierSettings:
    choice, options = _choice_of(entry, TIERS, "a tier")
    if options.get("arbiter") is None and TIERS.resolve(choice).uses_arbiter:
        options["arbiter"] = True
    return parse_tier_of(choice, options)


def parse_tier_of(choice: Any, options: Mapping[str, Any]) -> TierSettings:
    """Parse the options of a tier; `choice` is its name, class or path."""
    tier = TIERS.resolve(choice)
    of_manager, of_tier = split(options, TierConfig.declared())
    where = f"tier {choice!r}"
    config, component = run_all((partial(TierConfig.parse, of_manager, where), partial(Component.parse, tier, of_tier)))
    return TierSettings(tier, component.options, config)


@dataclass(frozen=True)
class KindOptions(Options):
    """Options in an engine's configuration of a tier; beside them stand those of the tier that ``kind`` names."""

    kind: str = option(
        parse_text, when="always: `disk`, `memory`, `valkey`, `mooncake`, `s3`, or `package.module:Class`"
    )
    weights_version: str | int | None = option(parse_version, None, when=_WEIGHTS_VERSION)


_Kind = TypeVar("_Kind", bound=KindOptions)


def parse_kind(
    config: Mapping[str, Any], engine_keys: frozenset[str], options_type: type[_Kind]
) -> tuple[_Kind, TierSettings]:
    """Parse an engine's configuration of a tier: the engine's part by `options_type`, the other options by the tier.

    `engine_keys` are read by the engine. ValueError names each option that is missing, invalid or unknown.
    """
    options = {name: value for name, value in config.items() if name not in engine_keys}
    if options.get("kind") is None:
        raise ValueError(f"{options_type.where} needs 'kind', got {without_secrets(options)!r}")
    ours, others = split(options, options_type.declared())
    of_manager, of_tier = split(others, _OF_MANAGER)

    def refuse_manager_options() -> None:
        if of_manager:
            names = ", ".join(sorted(of_manager))
            raise ValueError(f"the engine decides what {options_type.where} stores and loads: omit {names}")

    parse_medium = partial(parse_tier_of, options["kind"], of_tier)
    _, declared, tier = run_all((refuse_manager_options, partial(options_type.parse, ours), parse_medium))
    return declared, tier


def _choice_of(entry: Mapping[str, Any], registry: Registry, kind: str) -> tuple[Any, dict[str, Any]]:
    """Return the ``type`` of an entry, and the entry's other options."""
    options = dict(entry)
    if "type" not in options:
        raise ValueError(f"{kind} needs a type, one of {', '.join(registry.names())}, got {without_secrets(options)!r}")
    return options.pop("type"), options


def _parse_windows(name: str, value: Any) -> tuple[int | None, ...]:
    return tuple(check_windows(value))


def _parse_exporters(name: str, value: Any) -> tuple[Component, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of names or dicts, got {value!r}")
    return tuple(run_all(partial(_parse_exporter, entry) for entry in value))


def _parse_exporter(entry: Any) -> Component:
    if isinstance(entry, Component):
        return entry
    entry = entry if isinstance(entry, Mapping) else {"type": entry}
    choice, options = _choice_of(entry, EXPORTERS, "an exporter")
    return Component.parse(EXPORTERS.resolve(choice), options)


@dataclass(frozen=True)
class OffloadSettings(Options):
    """The options of a pool in host memory, and of the tiers and exporters around it.

    Users write them in `extra_config`, or in an engine's own mapping; `kvcache options` prints their meaning.
    """

    where: ClassVar[str] = "extra_config"

    cpu_bytes_to_use: int | None = option(
        parse_size, None, when="always, or `num_cpu_blocks`: the host memory of all workers"
    )
    num_cpu_blocks: int | None = option(
        count_from(1, MAX_BLOCKS - 1), None, when="you count the pool in blocks instead of bytes"
    )
    cache_policy: str | type = option(
        parse_policy, "lru", when="another policy hits more on your traffic; under vLLM the default is `gittins`"
    )
    group_windows: tuple[int | None, ...] | None = option(
        _parse_windows,
        None,
        when="a model has several groups of KV caches: the window of each in blocks, null for a group without one; "
        "only `gittins` has a rule for it, other policies refuse it",
    )
    store_threshold: int = option(
        count_from(0), 0, when="most prompts are used once: 2 stores a block only when it is offered a second time"
    )
    enable_events: bool = option(parse_flag, False, when="your engine calls `take_events`")
    exporters: tuple[Component, ...] = option(
        _parse_exporters, (), when="you want metrics of this engine, or `kvcache top`"
    )
    record: str | None = option(
        parse_text, None, when="you want the calls of this engine in a file, for `kvcache rerun`"
    )
    tiers: tuple[TierSettings, ...] = option(
        _parse_tiers, (), when="blocks should outlive host memory, the process or the machine"
    )
    weights_version: str | int | None = option(parse_version, None, when=_WEIGHTS_VERSION)
    lookup_deadline_s: float = option(
        parse_duration,
        5.0,
        when="requests should wait for less time for tiers, or under vLLM for a block that is being stored",
    )
    pool_folder: str = option(parse_text, "/dev/shm", when="with tiers: shared memory is mounted elsewhere")
    prefill_tokens_per_s: dict[int, float] | None = option(
        check_prefill_rate, None, when="a tier has an `arbiter`, and its first decisions must not wait for measurements"
    )
    max_tracker_size: int = option(
        parse_count, 64_000, when="`store_threshold` must remember more keys that were offered", rare=True
    )
    num_copy_threads: int | None = option(
        parse_threads, None, when="copies without an accelerator should use more or fewer threads", rare=True
    )
    time_calls: bool = option(
        parse_flag, True, when="histograms of calls and of block ages are not worth their cost", rare=True
    )
    record_max_bytes: int = option(
        parse_size, DEFAULT_MAX_BYTES, when="a recording must take less disk, or reach further back", rare=True
    )
    record_salt: str | None = option(
        parse_text, None, when="recordings of several engines must hash a key alike", rare=True
    )
    pool_path: str | None = option(
        parse_text, None, when="with tiers: manager and workers must agree on the file of the pool", rare=True
    )

    def check_together(self, where: str) -> None:
        declared = self.declared()
        # An engine may also wait for blocks that are being stored.
        names = _NEED_TIERS if where == self.where else _NEED_TIERS[1:]
        useless = [name for name in names if getattr(self, name) != declared[name].default]
        if useless and not self.tiers:
            raise ValueError(f"{', '.join(useless)} in {where} need 'tiers'")

    @property
    def manager_options(self) -> dict[str, Any]:
        """The options that every manager takes as they are."""
        options = {name: getattr(self, name) for name in ("store_threshold", "max_tracker_size")}
        return options if self.group_windows is None else {**options, "group_windows": self.group_windows}

    def describe(self) -> dict[str, Any]:
        """Return the options in effect as JSON types, without secrets, for the log and the status."""
        return {
            "cache_policy": self.cache_policy if isinstance(self.cache_policy, str) else self.cache_policy.__name__,
            **without_secrets(self.manager_options),
            "tiers": [tier.describe() for tier in self.tiers],
            **({"lookup_deadline_s": self.lookup_deadline_s} if self.tiers else {}),
            **({} if self.weights_version is None else {"weights_version": self.weights_version}),
            "exporters": [exporter.describe() for exporter in self.exporters],
            **({"record": self.record} if self.record else {}),
        }

    def part_bytes(self, rank_bytes: int, is_shared: bool = False) -> int:
        """Return the bytes of the pool for one worker's `rank_bytes` of a block.

        The pool is a file if processes share it, as for tiers. Parts of a file are aligned.
        """
        return -(-rank_bytes // _ALIGN_BYTES) * _ALIGN_BYTES if self.tiers or is_shared else rank_bytes

    def num_blocks(self, rank_bytes: int, world_size: int = 1, where: str = "extra_config") -> int:
        """Return the blocks of the pool.

        `rank_bytes` are those of one offloaded block on one of `world_size` workers; 0: unknown. Raise ValueError
        unless exactly one of `num_cpu_blocks` and `cpu_bytes_to_use` is given, and the bytes hold one block.
        """
        if (self.num_cpu_blocks is None) == (self.cpu_bytes_to_use is None):
            raise ValueError(
                f"{where} must have one of num_cpu_blocks and cpu_bytes_to_use, "
                f"got num_cpu_blocks={self.num_cpu_blocks} and cpu_bytes_to_use={self.cpu_bytes_to_use}"
            )
        if self.cpu_bytes_to_use is None:
            return self.num_cpu_blocks or 0
        if not rank_bytes:
            raise ValueError(
                "cpu_bytes_to_use needs the refs of every group, because they hold the size of a block; "
                "without refs, set num_cpu_blocks"
            )
        block_bytes = self.part_bytes(rank_bytes) * world_size
        num_blocks = self.cpu_bytes_to_use // block_bytes
        if not num_blocks:
            raise ValueError(
                f"cpu_bytes_to_use must be at least one block of {block_bytes} bytes over all "
                f"{world_size} workers, got {self.cpu_bytes_to_use}"
            )
        return num_blocks


def open_exporters(settings: OffloadSettings, telemetry: Telemetry) -> None:
    """Open the exporters of the settings. One that cannot be opened is logged, and the engine runs without it."""
    for component in settings.exporters:
        name = component.cls.__name__
        try:
            exporter: Exporter = component.make(telemetry)
        except (OSError, ImportError, ValueError) as error:
            _LOG.error("exporter %s is not available: %s", name, error)
            continue
        telemetry.exporters.append(exporter)
        _LOG.info("%s answers at %s", name, exporter.address)


def open_tiers(
    tiers: tuple[TierSettings, ...], host_blocks: HostBlocks, fingerprint: Mapping[str, Any], rank: str | None = None
) -> list[tuple[Tier, TierConfig]]:
    """Open tiers over a pool. If one cannot be opened, the tiers before it are shut down.

    `fingerprint` identifies the model and geometry of the blocks, `rank` is that of the data-parallel engine.
    """
    with ExitStack() as undo:
        opened = []
        for settings in tiers:
            tier = settings.of_rank(rank).make(host_blocks, fingerprint)
            undo.callback(tier.shutdown)
            opened.append((tier, settings.config))
        undo.pop_all()
    return opened


def open_store(
    settings: TierSettings,
    block_bytes: int,
    fingerprint: Mapping[str, Any],
    labels: Labels = (("tier", "0"),),
    on_change: Callable[[list[bytes], list[bytes]], None] | None = None,
) -> KeyedStore:
    """Open a tier that an engine drives without our manager, for blocks of `block_bytes`; see `KeyedStore`.

    `fingerprint` identifies the model and geometry of the blocks, and metrics have the `labels`.
    ValueError: the tier cannot be opened.
    """
    identity = {**fingerprint, "block_bytes": block_bytes}
    options: Any = settings.options
    if getattr(options, "page_cache", True) is None:
        # The backends of these engines read through the page cache, too. It needs no staging row and no I/O thread.
        settings = replace(settings, options=replace(options, page_cache=True))

    def open_tier(rows: HostBlocks) -> tuple[Tier, TierConfig]:
        check_memory(rows.nbytes)
        return open_tiers((settings,), rows, identity)[0]

    return KeyedStore(open_tier, block_bytes, labels=labels, on_change=on_change)


class _PoolOwner(TieredOffloadingManager):
    """A manager that owns its host blocks."""

    shared: SharedBlocks

    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            self.shared.close()


def _open_owner(
    settings: OffloadSettings,
    shared: SharedBlocks,
    fingerprint: Mapping[str, Any],
    rank: str | None,
    options: dict[str, Any],
) -> _PoolOwner:
    """Open the tiers over shared blocks, and their manager with its `options`; if it raises, close all of them."""
    with ExitStack() as undo:
        undo.callback(shared.close)
        identity = named(fingerprint, settings.weights_version)
        tiers = open_tiers(settings.tiers, shared.array, identity, rank)
        for tier, _ in tiers:
            undo.callback(tier.shutdown)
        manager = _PoolOwner(
            tiers=tiers,
            deadline_s=settings.lookup_deadline_s,
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
            **options,
        )
        manager.shared = shared
        undo.pop_all()
    return manager


def open_manager(
    settings: OffloadSettings,
    *,
    block_size: int,
    num_blocks: int,
    enable_events: bool | None = None,
    shared: SharedBlocks | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    block_bytes: int = 0,
    labels: Mapping[str, str] | None = None,
) -> CPUOffloadingManager | TieredOffloadingManager:
    """Make the manager that settings describe, with its tiers; if it raises, close everything that it opened.

    `enable_events` overrides the settings. With tiers, `shared` has the host blocks of all ranks, which the manager's
    `shutdown` closes, and `fingerprint` identifies their model and geometry. `block_bytes` are those of one offloaded
    block over all workers, for metrics; 0: unknown, or those of `shared`. ``rank`` in `labels` is the data-parallel
    rank, also in the paths of tiers.
    """
    set_up_log()
    options = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "cache_policy": settings.cache_policy,
        "enable_events": settings.enable_events if enable_events is None else enable_events,
        "clock": clock,
        **settings.manager_options,
    }
    manager: CPUOffloadingManager | TieredOffloadingManager
    if not settings.tiers:
        manager = CPUOffloadingManager(**options)
    else:
        if shared is None:
            raise ValueError("tiers need host blocks in shared memory, got shared=None")
        manager = _open_owner(settings, shared, fingerprint or {}, (labels or {}).get("rank"), options)
        block_bytes = block_bytes or shared.array.shape[1]
    with ExitStack() as undo:
        undo.callback(manager.shutdown)
        if settings.record:
            Recorder(
                manager,
                settings.record,
                max_bytes=settings.record_max_bytes,
                salt=settings.record_salt,
                clock=None if clock is time.monotonic else clock,
            )
        config = {
            "version": __version__,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "block_bytes": block_bytes,
            **settings.describe(),
            "enable_events": settings.enable_events if enable_events is None else enable_events,
        }
        manager.telemetry = Telemetry(
            manager, block_bytes=block_bytes, labels=labels, config=config, time_calls=settings.time_calls
        )
        open_exporters(settings, manager.telemetry)
        # Ranks of one engine differ by their labels alone.
        _LOG.info("offloading starts: %s", json.dumps({**manager.telemetry.labels, **config}, default=str))
        undo.pop_all()
    return manager
