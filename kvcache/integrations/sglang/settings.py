"""The options in ``--hicache-storage-backend-extra-config``: those of the tier that ``kind`` names, and a few more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvcache.assembly.assemble import KindOptions, OffloadSettings, TierSettings, parse_kind
from kvcache.options import (
    Component,
    Options,
    name_unknown,
    option,
    parse_count,
    parse_flag,
    parse_share,
    parse_text,
    run_all,
)
from kvcache.tiers.shared_store import SharedStoreTier

POOL_NAMES = ("kv", "mamba", "swa", "auxiliary_swa", "indexer", "draft", "draft_indexer", "draft_swa")
_LONG_NAME = "deepseek_v4_"
"""Prefix of the names of several pools of SGLang. Beside them, the pool ``kv`` may have no bytes of its own."""


def _parse_shares(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'{name} must be an object such as {{"kv": 0.8, "mamba": 0.2}}, got {value!r}')
    shares = {pool: parse_share(f"{pool!r} of {name}", share) for pool, share in value.items()}
    if not all(shares.values()) or sum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"{name} must each be above 0, and at most 1 in all, got {value!r}")
    own = [pool for pool in shares if not str(pool).startswith(_LONG_NAME)]
    if unknown := name_unknown(own, POOL_NAMES):
        raise ValueError(f"{name} must name host pools of SGLang ({', '.join(POOL_NAMES)}), got {unknown}")
    if "kv" not in shares and len(own) == len(shares):
        raise ValueError(f"{name} must name the host pools, 'kv' among them, got {value!r}")
    return shares


def _parse_switch(name: str, value: object) -> bool:
    # SGLang tests the truth of the value, so the text "0" would be true.
    if type(value) not in (bool, int) or value not in (0, 1):
        raise ValueError(f"{name} must be a bool, 0 or 1, got {value!r}")
    return bool(value)


def _parse_tokens(name: str, value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, as SGLang reads it, got {value!r}")
    return parse_count(name, value, 0)


def _parse_seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} must be a number of seconds, as SGLang reads it, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class EngineKeys(Options):
    """The keys that SGLang reads itself."""

    where: ClassVar[str] = "SGLang's storage backend"

    backend_name: str | None = option(parse_text, None, when="always: a name for SGLang's log")
    module_path: str | None = option(parse_text, None, when="always: `kvcache.integrations.sglang`")
    class_name: str | None = option(parse_text, None, when="always: `KVCacheStorage`")
    interface_v1: bool = option(_parse_switch, False, when="always: 1; without it, pages are copied once more")
    prefetch_threshold: int | None = option(_parse_tokens, None, when="shorter prefixes should be prefetched, too")
    prefetch_timeout_base: float | None = option(_parse_seconds, None, when="a prefetch may take longer")
    prefetch_timeout_per_ki_token: float | None = option(_parse_seconds, None, when="a prefetch may take longer")
    hicache_storage_pass_prefix_keys: bool = option(parse_flag, False, when="uses should be counted exactly")
    tp_lcm_size: int | None = option(_parse_tokens, None, when="engines of several tensor-parallel sizes share")
    allocator: str | None = option(parse_text, None, when="host pools should be in `/dev/shm`: `shm`")
    file_storage_path: str | None = option(parse_text, None, when="never: SGLang adds its `--file-storage-path`")


@dataclass(frozen=True)
class StorageOptions(KindOptions):
    """The options of a `KVCacheStorage`."""

    where: ClassVar[str] = "SGLang's storage backend"

    shares: dict[str, float] | None = option(
        _parse_shares, None, when="a model has several host pools, and their shares of `capacity` must be others"
    )
    exporters: tuple[Component, ...] = option(
        OffloadSettings.declared()["exporters"].metadata["parse"], (), when="metrics are to show the tiers"
    )


def read_config(config: Mapping[str, Any]) -> tuple[StorageOptions, TierSettings]:
    """Parse the extra config; raise ValueError naming each option that is missing, invalid or unknown."""
    keys = frozenset(EngineKeys.declared())
    checks = partial(EngineKeys.parse_part, config), partial(parse_kind, config, keys, StorageOptions)
    parsed: tuple[StorageOptions, TierSettings] = run_all(checks)[1]
    return parsed


def check_latent(settings: TierSettings, num_ranks: int) -> None:
    """Raise ValueError if the `num_ranks` processes of a model with latent attention cannot share the tier."""
    if num_ranks > 1 and not issubclass(settings.cls, SharedStoreTier):
        raise ValueError(
            f"{settings.cls.__name__} belongs to one process, but all {num_ranks} ranks of a model with latent "
            "attention (MLA) must load what rank 0 stores: use the kind 'valkey' or 'mooncake', or a tensor-parallel "
            "size of 1"
        )


def part_of(settings: TierSettings, folder: str, share: float, num_ranks: int) -> TierSettings:
    """Return the settings of one rank's tier for one pool: a folder of its own, and a share of the capacity."""
    changes: dict[str, Any] = {}
    if path := getattr(settings.options, "path", None):
        changes["path"] = str(Path(path) / folder)
    if capacity := getattr(settings.options, "capacity", None):
        changes["capacity"] = max(1, int(capacity * share / num_ranks))
    return replace(settings, options=replace(settings.options, **changes))
