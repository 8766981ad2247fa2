"""The options of `kvcache fleet`, checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The options of a fleet, checked; sizes in blocks."""

    engines: list[tuple[int, int]]
    """Numbers of engines, and of restarts."""
    routers: list[tuple[str, float]]
    """Routers, and the shares of messages that get lost."""
    copies: int | None
    seed: int
    store_blocks: int
    num_blocks: int
    disk_blocks: int
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
