"""Statistics, documentation and exporters come from one table."""

from __future__ import annotations

from dataclasses import fields

from kvcache import CPUOffloadingManager, ManagerStats
from kvcache.metrics import MANAGER_METRICS, Metric, metrics_of


def test_every_field_of_the_statistics_is_in_the_table() -> None:
    assert [metric.name for metric in MANAGER_METRICS] == [field.name for field in fields(ManagerStats)]
    assert metrics_of(ManagerStats)[0] == Metric(
        "num_blocks", "gauge", "blocks", "Blocks that the pool holds.", exported="capacity_blocks", is_sized=True
    )
    assert {metric.kind for metric in MANAGER_METRICS} == {"counter", "gauge"}


def test_statistics_are_read_from_the_pool_by_name() -> None:
    manager = CPUOffloadingManager(16, 4)
    manager.prepare_store([b"a", b"b"])
    manager.complete_store([b"a", b"b"])
    manager.prepare_load([b"a"])
    stats = manager.stats()
    assert stats == ManagerStats(
        num_blocks=4, num_free=2, num_referenced=1, loaded_blocks=1, stored_blocks=2, needed_blocks=3
    )
    # A manager without tiers has no counters of tiers.
    assert all(getattr(stats, metric.name) == getattr(manager, metric.name, 0) for metric in MANAGER_METRICS)
