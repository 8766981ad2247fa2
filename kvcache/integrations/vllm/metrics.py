"""What the engine's /metrics shows of a manager: one table for what is declared and what is sent.

vLLM ends once a name is sent that was not declared, so both come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvcache.metrics import ManagerStats
from kvcache.tiering.controller import TierControllerStats

# vLLM clears collectors of this prefix when an engine starts again in one process.
_PREFIX = "vllm:kvcache_"

_COUNTERS = {
    "looked_up_blocks": "Blocks that requests asked for.",
    "hit_blocks": "Blocks asked for that were there and ready.",
    "loaded_blocks": "Blocks loaded from host memory.",
    "stored_blocks": "Blocks stored to host memory.",
    "evicted_blocks": "Blocks that made room for others.",
    "rejected_stores": "Stores refused because no room could be made.",
    "gated_blocks": "Blocks not stored because they were not offered often enough (store_threshold).",
    "ignored_hints": "Retention hints in kv_transfer_params that made no sense.",
}
_GAUGES = {
    "num_blocks": "Blocks that host memory holds.",
    "num_free": "Blocks of host memory that hold nothing.",
    "num_referenced": "Blocks being loaded now.",
    "num_pending": "Blocks being stored now.",
    "retained_blocks": "Blocks held at a raised priority.",
    "hit_rate": "Of the blocks that were loaded, stored or gated, the share that was loaded: what the engine did not "
    "have itself and was spared computing.",
}
# Sums over all tiers; they stay 0 without.
_TIER_COUNTERS = {
    "tier_promoted_blocks": "Blocks that came back from a tier into host memory.",
    "tier_written_blocks": "Blocks written to a tier.",
    "tier_dropped_blocks": "Blocks to be written to a tier that were not.",
    "tier_failed_jobs": "Jobs of a tier that failed.",
    "tier_overdue_jobs": "Jobs of a tier that missed their deadline.",
}
_TIER_GAUGES = {
    "tier_num_held": "Blocks that tiers hold.",
    "tiers_unavailable": "Tiers that are not working, or left alone after failures.",
}


def metric_definitions() -> dict[str, Any]:
    """Return what `MetricsSource` may send, as vLLM wants it declared."""
    return {
        **{
            _PREFIX + name: OffloadingCounterMetadata(documentation=text)
            for name, text in (_COUNTERS | _TIER_COUNTERS).items()
        },
        **{
            _PREFIX + name: OffloadingGaugeMetadata(documentation=text)
            for name, text in (_GAUGES | _TIER_GAUGES).items()
        },
    }


class MetricsSource:
    """Turns a manager's counters since start into what changed since the last time."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def changes(
        self, stats: ManagerStats, tiers: Sequence[TierControllerStats] = ()
    ) -> OffloadingConnectorStats | None:
        """Return counters' increments and gauges' values, or None if nothing changed."""
        now: dict[str, float] = {field.name: getattr(stats, field.name) for field in fields(stats)}
        now["hit_rate"] = hit_rate(stats)
        for name in _TIER_COUNTERS:
            now[name] = sum(getattr(tier, name.removeprefix("tier_")) for tier in tiers)
        now["tier_num_held"] = sum(tier.tier.num_held for tier in tiers)
        now["tiers_unavailable"] = sum(
            bool(tier.tier.unavailable_reason) or (tier.reads, tier.writes) != ("open", "open") for tier in tiers
        )
        last = self._last
        if now == last:
            return None
        self._last = now
        sent = OffloadingConnectorStats()
        for name in (*_COUNTERS, *_TIER_COUNTERS):
            increment = now[name] - last.get(name, 0)
            if increment:
                sent.increase_counter(_PREFIX + name, increment)
        for name in (*_GAUGES, *_TIER_GAUGES):
            if now[name] != last.get(name):
                sent.set_gauge(_PREFIX + name, now[name])
        return None if sent.is_empty() else sent


def hit_rate(stats: ManagerStats) -> float:
    """Return the share of blocks that were loaded, of those that had to be loaded or computed; 0.0 if none."""
    needed = stats.loaded_blocks + stats.stored_blocks + stats.gated_blocks
    return stats.loaded_blocks / needed if needed else 0.0
