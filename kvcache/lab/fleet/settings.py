"""The options of `kvcache fleet`, checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The options of a fleet, checked; sizes in blocks."""

    engines: list[int]
    routers: list[str]
    copies: int | None
    seed: int
    store_blocks: int
    num_blocks: int
    policy: str
    block_bytes: int | None
    split: int
    store_bytes_per_s: float
    server_bytes_per_s: float
    server_keys_per_s: float
    router_events_per_s: float
    json: str | None
    plot: str | None
    is_quiet: bool
