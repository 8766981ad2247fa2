"""What the engine's /metrics shows of a manager: one table for what is declared and what is sent.

vLLM ends once a name is sent that was not declared, so both come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvcache.metrics import MANAGER_METRICS, ManagerStats
from kvcache.tiering.controller import TierControllerStats

# vLLM clears collectors of this prefix when an engine starts again in one process.
_PREFIX = "vllm:kvcache_"

# What the engine asks key by key says little (it stops at the first miss), so look-ups are left out.
_SHOWN = tuple(one for one in MANAGER_METRICS if one.name not in ("lookups", "looked_up_blocks", "hit_blocks"))
_COUNTERS = {one.name: f"{one.help} {one.reading}".strip() for one in _SHOWN if one.kind == "counter"}
_GAUGES = {one.name: one.help for one in _SHOWN if one.kind == "gauge"}
# Sums over all tiers; they stay 0 without.
_TIER_COUNTERS = {
    "tier_promoted_blocks": "Blocks that came back from a tier into host memory.",
    "tier_written_blocks": "Blocks written to a tier.",
    "tier_dropped_blocks": "Blocks to be written to a tier that were not.",
    "tier_failed_jobs": "Jobs of a tier that failed.",
    "tier_overdue_jobs": "Jobs of a tier that missed their deadline.",
    "tier_corrupt_blocks": "Blocks read from a tier that were not what had been written; they are computed again.",
    "tier_io_errors": "Reads, writes and other operations of a tier that failed.",
}
# Counted by the tier itself, not by what drives it.
_TIERS_OWN = frozenset({"tier_corrupt_blocks", "tier_io_errors"})
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
    """Turns a manager's counters since start into what changed since the last time.

    The first report names every counter, with 0 where nothing has happened, so that a rate has a beginning.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] | None = None

    def changes(
        self, stats: ManagerStats, tiers: Sequence[TierControllerStats] = ()
    ) -> OffloadingConnectorStats | None:
        """Return counters' increments and gauges' values, or None if nothing changed."""
        now: dict[str, float] = {field.name: getattr(stats, field.name) for field in fields(stats)}
        for name in _TIER_COUNTERS:
            attribute = name.removeprefix("tier_")
            now[name] = sum(getattr(tier.tier if name in _TIERS_OWN else tier, attribute) for tier in tiers)
        now["tier_num_held"] = sum(tier.tier.num_held for tier in tiers)
        now["tiers_unavailable"] = sum(
            bool(tier.tier.unavailable_reason) or (tier.reads, tier.writes) != ("closed", "closed") for tier in tiers
        )
        last, self._last = self._last, now
        if now == last:
            return None
        sent = OffloadingConnectorStats()
        for name in (*_COUNTERS, *_TIER_COUNTERS):
            if last is None or now[name] != last[name]:
                sent.increase_counter(_PREFIX + name, now[name] - (last[name] if last else 0))
        for name in (*_GAUGES, *_TIER_GAUGES):
            if last is None or now[name] != last[name]:
                sent.set_gauge(_PREFIX + name, now[name])
        return None if sent.is_empty() else sent
