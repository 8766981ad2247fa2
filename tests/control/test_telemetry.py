"""Telemetry: the contents of snapshots and the table of metrics; timing calls changes no answer."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from kvcache import CPUOffloadingManager, ManagerStats, ReqContext, TieredOffloadingManager
from kvcache.control.telemetry import Telemetry
from kvcache.control.watch import TIMED_CALLS
from kvcache.metrics import MANAGER_METRICS, HistogramData, Metric, Part, metrics_of
from kvcache.registry import POLICIES
from kvcache.testing.reference import ReferenceLRU
from kvcache.tiers.memory import MemoryOptions, MemoryTier


def counts(telemetry: Telemetry) -> dict[str, int]:
    parts = [part for part in telemetry.snapshot().parts if part.name == "call"]
    return {dict(part.labels)["call"]: part.stats.duration_seconds.count for part in parts}


def cycle(manager: Any, number: int, keys: int = 3) -> None:
    names = [b"%d.%d" % (number, i) for i in range(keys)]
    context = ReqContext()
    manager.touch(names, context)
    hits = manager.lookup(names, context)
    assert hits == 0
    output = manager.prepare_store(names, context)
    manager.complete_store(output.keys_to_store, context)
    assert manager.lookup(names, context) == len(output.keys_to_store)
    manager.prepare_load(output.keys_to_store, context)
    manager.complete_load(output.keys_to_store, context)
    manager.on_request_finished(context)
    manager.on_schedule_end()


@pytest.mark.parametrize("is_tiered", [False, True])
def test_every_kind_of_call_is_timed(is_tiered: bool) -> None:
    if is_tiered:
        host_blocks = np.zeros((8, 16), dtype=np.uint8)
        manager: Any = TieredOffloadingManager(16, 8, [MemoryTier(MemoryOptions(8 * 16), host_blocks)])
    else:
        manager = CPUOffloadingManager(16, 8)
    telemetry = Telemetry(manager, time_calls=True)
    cycle(manager, 1)
    manager.reset_cache()
    expected = dict.fromkeys(TIMED_CALLS, 1) | {"lookup": 2}
    assert counts(telemetry) == expected
    with pytest.raises(KeyError):
        manager.prepare_load([b"absent"])
    expected["prepare_load"] += 1
    assert counts(telemetry) == expected
    telemetry.close()
    manager.prepare_store([b"x"])
    assert counts(telemetry) == expected
    manager.shutdown()


@pytest.mark.parametrize("policy", POLICIES.names())
def test_timing_changes_no_answer(policy: str) -> None:
    timed, plain = CPUOffloadingManager(16, 16, policy), CPUOffloadingManager(16, 16, policy)
    telemetry = Telemetry(timed, time_calls=True)
    for number in range(30):
        keys = [b"%d" % (number * 7 % 40 + i) for i in range(6)]
        outputs = [manager.prepare_store(keys) for manager in (timed, plain)]
        assert outputs[0] == outputs[1]
        for manager, output in zip((timed, plain), outputs, strict=True):
            if output is not None:
                manager.complete_store(output.keys_to_store)
    assert timed.stats() == plain.stats()
    telemetry.close()


def test_eviction_ages_include_blocks_from_tiers() -> None:
    manager = CPUOffloadingManager(16, 4)
    telemetry = Telemetry(manager, time_calls=True)
    for number in range(3):
        cycle(manager, number, keys=4)
    (part,) = [part for part in telemetry.snapshot().parts if part.name == "eviction"]
    assert part.stats.age_seconds.count == 8 == manager.evicted_blocks
    telemetry.close()


def test_worst_call_is_kept_with_kind() -> None:
    manager = CPUOffloadingManager(16, 8)
    telemetry = Telemetry(manager, time_calls=True)

    class Slow(list[bytes]):
        def __iter__(self) -> Any:
            time.sleep(0.05)
            return super().__iter__()

    manager.touch(Slow([b"a"]))
    worst = {
        dict(part.labels)["call"]: part.stats.worst_seconds
        for part in telemetry.snapshot().parts
        if part.name == "call"
    }
    assert max(worst, key=lambda name: worst[name]) == "touch"
    assert worst["touch"] >= 0.05
    telemetry.close()


@pytest.mark.parametrize("policy", POLICIES.names())
def test_policies_show_fitting_quantities(policy: str) -> None:
    manager = CPUOffloadingManager(16, 4, policy)
    output = manager.prepare_store([b"a", b"b", b"c"])
    assert output is not None
    manager.complete_store(output.keys_to_store)
    found = {
        dict(one.labels)["name"]: one.value
        for one in Telemetry(manager).snapshot().samples()
        if one.name == "policy_quantity"
    }
    blocks = [value for name, value in found.items() if name in ("t1_blocks", "t2_blocks")]
    assert not blocks or sum(blocks) == len(output.keys_to_store)
    assert {"lru": 0, "arc": 5, "gittins": 2}.get(policy, len(found)) == len(found)


def test_failing_gauges_cost_no_snapshot() -> None:
    class Broken(ReferenceLRU):
        def gauges(self) -> dict[str, float]:
            raise RuntimeError("a fault")

    names = {one.name for one in Telemetry(CPUOffloadingManager(16, 4, Broken)).snapshot().samples()}
    assert "capacity_blocks" in names
    assert "policy_quantity" not in names


def test_worker_without_manager_reports_its_sources() -> None:
    telemetry = Telemetry(None, labels={"rank": "3"}, time_calls=True)
    telemetry.sources.append(lambda: [Part("own", CPUOffloadingManager(1, 2).stats())])
    snapshot = telemetry.snapshot()
    assert dict(snapshot.labels) == {"engine": "0", "rank": "3"}
    assert [sample.value for sample in snapshot.samples() if sample.name == "own_capacity_blocks"] == [2]
    telemetry.close()


@pytest.mark.parametrize(
    "labels",
    [
        *({"engine": text} for text in ("x" * 1025, "\ud800", 7, None)),
        *({name: "a"} for name in ("we ird", "__name__", "le", "", "é", "9", 7)),
    ],
)
def test_unscrapable_label_is_named(labels: dict[str, str]) -> None:
    (text,) = labels.values()
    with pytest.raises(ValueError, match=r"a label must have a name such as 'engine' .*, got") as caught:
        Telemetry(None, labels=labels)
    assert len(str(caught.value)) < 300
    assert repr(text)[:80] in str(caught.value)


def test_promotions_writes_and_waits_are_measured() -> None:
    host_blocks = np.zeros((4, 16), dtype=np.uint8)
    manager = TieredOffloadingManager(16, 4, [MemoryTier(MemoryOptions(16 * 16), host_blocks)])
    for number in range(2):
        output = manager.prepare_store([b"%d.%d" % (number, i) for i in range(4)])
        assert output is not None
        manager.complete_store(output.keys_to_store)
        assert manager.settle()
    context = ReqContext()
    keys = [b"0.%d" % i for i in range(2)]
    assert manager.lookup(keys, context) is None

    assert manager.settle()
    assert manager.lookup(keys, context) == 2
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)
    values = {(one.name, dict(one.labels).get("state")): one.value for one in Telemetry(manager).snapshot().samples()}
    assert values["promoted_loaded_blocks", None] == 2
    assert values["tier_promoted_blocks", None] == 2
    assert values["tier_written_blocks", None] == 8
    assert values["tier_held_blocks", None] == 8
    assert values["tier_reads_breaker", "closed"] == 1
    assert values["tier_reads_breaker", "open"] == 0
    assert values["tier_unavailable", None] == 0
    promotions, waits = values["tier_promotion_seconds", None], values["promotion_wait_seconds", None]
    assert isinstance(promotions, HistogramData)
    assert isinstance(waits, HistogramData)
    assert (promotions.count, waits.count) == (1, 1)
    manager.shutdown()


def test_statistics_table_names_every_field() -> None:
    assert [metric.name for metric in MANAGER_METRICS] == [field.name for field in fields(ManagerStats)]
    assert metrics_of(ManagerStats)[0] == Metric(
        "num_blocks", "gauge", "blocks", "Blocks that the pool holds.", exported="capacity_blocks", is_sized=True
    )
    assert {metric.kind for metric in MANAGER_METRICS} == {"counter", "gauge"}


def test_statistics_are_read_by_name() -> None:
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
