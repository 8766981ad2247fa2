"""Counters and gauges of a manager."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Counters since start and gauges (`num_*`, and `retained_blocks`: those at a raised priority) now.

    Everything counts blocks, but `lookups` and `rejected_stores` (calls) and `ignored_hints` (requests).
    """

    num_blocks: int
    num_free: int
    num_referenced: int
    num_pending: int
    lookups: int
    looked_up_blocks: int
    hit_blocks: int
    loaded_blocks: int
    stored_blocks: int
    evicted_blocks: int
    rejected_stores: int
    failed_blocks: int
    gated_blocks: int
    retained_blocks: int = 0
    ignored_hints: int = 0
