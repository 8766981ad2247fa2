"""The choices of a plan: simulated tiers, engines, the link to host memory, prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

TierRule: TypeAlias = tuple[str, bool, str, float | str | None]


@dataclass(frozen=True, slots=True)
class TierChoice:
    """One simulated tier: name, capacities to try, rate, write policy, arbiter, cache policy and endurance."""

    name: str
    capacities_bytes: tuple[int, ...]
    bytes_per_s: float
    write_policy: str = "write_through"
    arbiter: bool = False
    cache_policy: str = "lru"
    endurance: float | str | None = None

    @property
    def rule(self) -> TierRule:
        """Its write policy, arbiter, cache policy and endurance."""
        return self.write_policy, self.arbiter, self.cache_policy, self.endurance


@dataclass(frozen=True, slots=True)
class ServingChoice:
    """Engines (None: as many as the trace needs), the rate of the link to host memory, and prices of a GiB."""

    engines: int | None = None
    link_bytes_per_s: float = 50e9
    prices: tuple[float | None, ...] = ()


NO_LIMIT = 1 << 30
"""Blocks of a tier that holds all blocks of any trace."""


def recorded_tier(number: int, tier: Mapping[str, Any]) -> TierChoice:
    """Return a tier of a recorded manager; its rate is unknown, and the recording does not hold its capacity."""
    name, policy = str(tier.get("medium", "tier")).lower(), str(tier.get("write_policy", "write_through"))
    name = f"{name} {number + 1}" if number else name
    return TierChoice(name, (), 0.0, policy, cache_policy=str(tier.get("cache_policy", "lru")))


def stacks_of(tiers: list[TierChoice], block_bytes: int) -> list[tuple[int, ...]]:
    """Return the stacks to compare, in blocks: host memory alone, then one tier more each time, in all capacities."""
    stacks: list[tuple[int, ...]] = []
    for depth in range(len(tiers) + 1):
        for sizes in product(*(tier.capacities_bytes for tier in tiers[:depth])):
            blocks = tuple(size // block_bytes for size in sizes)
            if 0 in blocks:
                raise ValueError(f"--tier must hold at least one block of {block_bytes} bytes, got {min(sizes)} bytes")
            stacks.append(blocks)
    return stacks
