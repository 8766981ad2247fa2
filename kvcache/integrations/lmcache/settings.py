"""The options of `KVCacheL2`, and how its capacity is shared between object sizes. Needs no LMCache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from kvcache.assembly.assemble import OffloadSettings, TierSettings, parse_tier_of
from kvcache.options import choice_of, split
from kvcache.tiering.controller import TierConfig
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

MAX_SIZES = 16
"""Object sizes of one directory at most; objects of further sizes are not stored."""
_PREFIX = "objects-"
_USELESS = ("arbiter", "codec", "endurance", "max_store_blocks", "num_uses", "read_only", "write_policy")


@dataclass(frozen=True, slots=True)
class L2Settings:
    """The parsed ``adapter_params``: options of one tier for the whole directory, `exporters` and `weights_version`."""

    tier: TierSettings
    exporters: OffloadSettings

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> L2Settings:
        """Parse ``adapter_params``; ValueError names each option that is missing, unknown or invalid."""
        if not isinstance(params, Mapping):
            raise ValueError(f"adapter_params must be an object, got {params!r:.200}")
        ours, of_tier = split(params, {"kind", "exporters", "weights_version"})
        choice_of("disk")("kind of a KVCacheL2", ours.pop("kind", None))
        # LMCache's server has no data-parallel rank, so the path may not name one.
        settings = cls(parse_tier_of("disk", of_tier).of_rank(None), OffloadSettings.parse(ours, "adapter_params"))
        tier, declared = settings.tier, {**TierConfig.declared(), **DiskTier.options_type.declared()}
        values = {**tier.config.arguments(), **tier.options.arguments()}
        if useless := [name for name in _USELESS if values[name] != declared[name].default]:
            raise ValueError(f"a KVCacheL2 does not support {', '.join(useless)}")
        settings.num_slots([4096])
        return settings

    @property
    def options(self) -> DiskOptions:
        """The options of the whole directory."""
        return cast("DiskOptions", self.tier.options)

    @property
    def path(self) -> Path:
        """The directory of all sizes."""
        return Path(self.options.path)

    @property
    def names_bytes(self) -> int:
        """Bytes of the file of names at most; it is written twice when it is replaced."""
        return max(16 << 10, min(16 << 20, self.options.capacity // 128))

    def num_slots(self, sizes: Collection[int]) -> int:
        """Return how many objects of each size fit: the same number of every size. ValueError: not one of each."""
        one, two = (sum(DiskTier.capacity_for(n, size) for size in sizes) for n in (1, 2))
        num_slots = (self.options.capacity - 2 * self.names_bytes - (2 * one - two)) // (two - one)
        if num_slots < 1:
            least = one + 2 * self.names_bytes
            reason = f"capacity {self.options.capacity} of a KVCacheL2 must be >= {least} for objects"
            raise ValueError(f"{reason} of {list(sizes)}")
        return num_slots

    def tier_of(self, size: int, num_slots: int) -> TierSettings:
        """Return the settings of the tier of one size."""
        path, capacity = str(self.path / f"{_PREFIX}{size}"), DiskTier.capacity_for(num_slots, size)
        return replace(self.tier, options=replace(self.options, path=path, capacity=capacity))

    def sizes_found(self) -> list[int]:
        """Return the object sizes that the directory holds."""
        names = [entry.name.removeprefix(_PREFIX) for entry in self.path.glob(f"{_PREFIX}*")]
        return sorted(int(name) for name in names if name.isdecimal() and int(name) > 0)
