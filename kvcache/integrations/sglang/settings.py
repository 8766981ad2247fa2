"""The options in ``--hicache-storage-backend-extra-config``: those of the tier that ``kind`` names, and a few more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from kvcache.assembly.assemble import KindOptions, OffloadSettings, TierSettings, parse_kind
from kvcache.options import Component, option, parse_share
from kvcache.tiers.shared_store import SharedStoreTier

# SGLang reads these keys itself.
ENGINE_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)


def _parse_shares(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'{name} must be an object such as {{"kv": 0.8, "mamba": 0.2}}, got {value!r}')
    shares = {pool: parse_share(f"{pool!r} of {name}", share) for pool, share in value.items()}
    if not all(shares.values()) or sum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"{name} must each be above 0, and at most 1 in all, got {value!r}")
    return shares


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
    return parse_kind(config, ENGINE_KEYS, StorageOptions)


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
