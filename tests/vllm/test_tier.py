"""KVCacheTier under vLLM's own TieringOffloadingManager: contents, bounds, damage, faults, events, restarts."""

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine_tiering import PAGE, EngineTiering, key, keys, tier_config
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import TransferJob
from waiting import wait_until

from kvcache.tiers.base.lifecycle import State
from kvcache.tiers.disk.block_store import BlockStore
from kvcache.tiers.disk.directory import directory_bytes
from kvcache.tiers.disk.header import capacity_for
from kvcache.transfer.shared_file import private_folder

BACKPRESSURE = {
    "backpressure_cls": "EMABackpressureDetector",
    "policy_cls": "DropStorePolicy",
    # Every store counts as slow.
    "high_water_s": 1e-12,
    "low_water_s": 0.0,
    "warmup_completions": 1,
    "decay_half_life_s": 0.0,
}


@pytest.fixture
def make():
    """Make vLLM's manager over tiers; every one is shut down at the end."""
    made = []

    def build(*tiers, **options):
        made.append(EngineTiering(list(tiers), **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def disk(tmp_path):
    """Return the entry of a disk tier of so many blocks."""

    def entry(num_blocks=64, **options):
        capacity = capacity_for(num_blocks, options.pop("row_bytes", PAGE))
        return tier_config("disk", path=str(tmp_path / "kv"), capacity=capacity, **options)

    return entry


@pytest.fixture(params=["disk", "memory", "valkey"])
def entry(request, disk):
    """One entry per kind of tier."""
    if request.param == "disk":
        return disk()
    if request.param == "memory":
        return tier_config("memory", capacity=64 * PAGE)
    return tier_config("valkey", url=request.getfixturevalue("valkey_url"))


def state_after(events):
    """Return the keys that a reader of a tier's events knows."""
    known = set()
    for event in of_tier(events):
        (known.difference_update if event.removed else known.update)(event.keys)
    return known


def of_tier(events):
    return [event for event in events if event.medium is base.Medium.STORAGE]


@pytest.fixture
def hang(monkeypatch):
    """Return a context manager in which a method of the disk's store waits for its end; it yields when one waits."""

    @contextmanager
    def hanging(name):
        began, go_on, method = threading.Event(), threading.Event(), getattr(BlockStore, name)

        def wait(*args):
            began.set()
            go_on.wait()
            return method(*args)

        monkeypatch.setattr(BlockStore, name, wait)
        try:
            yield began
        finally:
            go_on.set()

    return hanging


def test_tier_evicted_blocks_return_equal(make, entry):
    engine = make(entry)
    for first in range(0, 24, 8):
        engine.write(*range(first, first + 8))
    # Host memory holds 16 of 24 blocks; the first 8 come from the tier, with checked bytes.
    assert engine.load(keys(*range(8))) == 8
    assert engine.load(keys(*range(8, 16))) == 8
    assert engine.load(keys(100)) == 0
    stats = engine.manager.get_stats().reduce()
    assert sum(value for name, value in stats.items() if "tiering_promotion_job_failures" in name) == 0
    assert not engine.tier._requests


def test_tier_drain_and_reset_keep_blocks(make, entry):
    engine = make(entry)
    engine.store(keys(*range(8)))
    # Stores are under way here.
    engine.manager.reset_cache()
    getattr(engine.manager, "on_reset_flushed", lambda: None)()
    assert not engine.manager._jobs
    assert engine.load(keys(*range(8))) == 8


def test_tier_forgetting_refuses_older_requests(make, entry):
    engine = make(entry | {"forget_on_reset": True})
    engine.write(0, 1)
    older = engine.request(keys(2, 3))

    def forget():
        engine.forget_host()
        # Until the reset is durable, the tier refuses every store.
        wait_until(lambda: engine.step() or engine.tier._controller.tier._life.state is State.OPEN)

    def stored(*numbers, context=None):
        before = engine.counters.stored_blocks
        assert engine.store(keys(*numbers), context) == keys(*numbers)
        engine.settle()
        return engine.counters.stored_blocks - before

    forget()
    later = engine.request(keys(6, 7))
    assert [engine.find(keys(*pair), context) for pair, context in (((2, 3), older), ((6, 7), later))] == [0, 0]
    assert engine.load(keys(0, 1)) == 0
    assert stored(2, 3, context=older) == 0
    # The device may hold blocks 4 and 5 from before the reset; it lacked block 6 when the request looked it up.
    assert stored(4, 5) == 0
    assert stored(6, 7, context=later) == 2
    figures = engine.manager.get_stats().reduce()
    assert sum(value for name, value in figures.items() if "job_failures" in name) == 0
    forget()
    assert (engine.load(keys(6, 7)), stored(8, 9)) == (0, 2)


def test_tier_removes_killed_engines_region(make, disk):
    killed = Path(f"/dev/shm/vllm_offload_killed-{os.getpid()}.mmap")
    killed.write_bytes(bytes(PAGE))
    private_folder().joinpath(f"record-{killed.name}").touch(0o600)
    make(disk())
    assert not killed.exists()


def test_tier_shut_down_twice_ends_once(make, disk):
    engine = make(disk())
    engine.tier.shutdown()
    engine.close()
    assert engine.spec.config.engine_id not in Path("/proc/self/maps").read_text()


class FailureCount(BackpressureDetector):
    """Counts failed stores, and never holds stores back."""

    failures = 0

    def on_store_completed(self, elapsed_s, num_bytes):
        pass

    def on_store_failed(self):
        self.failures += 1

    def is_under_pressure(self):
        return False

    def should_store(self, num_blocks):
        return True

    def reset(self):
        pass


def run(tier, context, is_load, *jobs):
    """Run jobs of blocks and chunks to their end; return success, loaded blocks and bytes of each."""
    results = []
    for job_id, (blocks, chunks) in enumerate(jobs):
        job = TransferJob(job_id, blocks, np.array(chunks, np.int32), is_load, context)
        (tier.submit_load if is_load else tier.submit_store)(job)
    assert tier.has_pending_work()
    wait_until(lambda: results.extend(tier.get_finished_jobs()) or len(results) == len(jobs))
    assert not tier._engine_jobs
    results.sort(key=lambda one: one.job_id)
    return [(one.success, sorted(one.successful_keys or ()), one.transfer_bytes) for one in results]


def test_ended_store_changes_answer(make, disk):
    tier = (engine := make(disk())).tier
    tier.on_request_finished(base.ReqContext("never announced"))
    context = engine.request(keys(0))
    assert tier.lookup(key(0), context) is base.LookupResult.MISS
    assert run(tier, context, False, (keys(0), [0])) == [(True, [], PAGE)]
    assert tier.lookup(key(0), context) is base.LookupResult.HIT


def test_tier_reports_each_job_once(make, entry):
    engine = make(entry)
    tier, view = engine.tier, engine.view
    context = engine.request()

    for number in range(4):
        view[number] = engine.content(key(number))
    assert run(tier, context, False, (keys(0, 1), [0, 1]), (keys(2, 3), [2, 3])) == [(True, [], 2 * PAGE)] * 2
    assert not tier.has_pending_work()
    assert state_after(tier.take_events()) == set(keys(0, 1, 2, 3))
    # A load of absent blocks fails for these blocks only, and no load is an event.
    assert run(tier, context, True, (keys(3, 50, 0), [8, 9, 10]), (keys(60), [11])) == [
        (False, keys(0, 3), 2 * PAGE),
        (False, [], 0),
    ]
    np.testing.assert_array_equal(view[[8, 10]], view[[3, 0]])
    assert state_after(tier.take_events()) == set()
    # The request does not wait for them again.
    assert {tier.lookup(one, context) for one in keys(50, 60)} == {base.LookupResult.MISS}
    tier.touch(keys(0), context)
    assert tier.has_pending_work()
    tier.on_schedule_end(None)
    assert not tier.has_pending_work()


def test_tier_groups_are_not_mixed(make, entry):
    engine = make(entry, num_groups=2)
    engine.store(keys(1, 2, group=0))
    engine.forget_host()
    assert engine.load(keys(1, 2, group=1)) == 0
    engine.store(keys(1, group=1))
    engine.forget_host()
    assert engine.load(keys(1, 2, group=0)) == 2
    assert engine.load(keys(1, 2, group=1)) == 1


def test_tier_full_disk_announces_removals(make, disk, tmp_path):
    engine = make(disk(16))
    for number in range(64):
        engine.write(number)
        # A use of block 0 in each request keeps it.
        engine.load(keys(0))
    assert directory_bytes(tmp_path / "kv") <= capacity_for(16, PAGE)
    assert (engine.counters.stored_blocks, engine.counters.evicted_blocks) == (64, 48)
    known = state_after(engine.events)
    assert len(known) == engine.counters.num_held == 16
    assert key(0) in known
    assert all(event.removal_expected and event.locality is None for event in of_tier(engine.events))


def test_tier_reopened_finds_blocks_with_recency(make, disk):
    engine = make(disk(16))
    for first in (0, 8):
        engine.write(*range(first, first + 8))
    engine.load(keys(*range(4)))
    engine.settle()
    engine.close()
    engine = make(disk(16))
    engine.step()
    assert state_after(engine.events) == set(keys(*range(16)))
    # Eight new blocks evict the eight that were used least recently: 4..7, then the tail of 8..15.
    engine.store(keys(*range(20, 28)))
    engine.forget_host()
    assert engine.load(keys(*range(4))) == 4
    assert engine.load(keys(4)) == engine.load(keys(15)) == 0
    assert engine.load(keys(*range(20, 28))) == 8


def test_tier_of_other_model_is_refused(make, disk):
    make(disk()).close()
    with pytest.raises(ValueError, match="other-model"):
        make(disk(), model="other-model")
    with pytest.raises(ValueError, match="another"):
        make(disk(64, row_bytes=2 * PAGE), tp=2)
    make(disk())


def test_tier_topology_ignored_if_agnostic(make, disk):
    engine = make(disk(row_bytes=4 * PAGE), tp=2, bytes_per_block=2 * PAGE, is_agnostic=True)
    engine.write(1)
    engine.close()
    engine = make(disk(row_bytes=4 * PAGE), tp=4, bytes_per_block=PAGE, is_agnostic=True)
    assert engine.load(keys(1)) == 1


def test_tier_damaged_blocks_are_never_served(make, disk, tmp_path):
    engine = make(disk(32))
    engine.store(keys(*range(8)))
    engine.forget_host()
    with next((tmp_path / "kv").glob("data*")).open("r+b") as file:
        for slot in (2, 5):
            file.seek(slot * PAGE + 100)
            file.write(bytes(64))
    # `load` checks the bytes. A block is missing in the middle, the others are kept.
    assert engine.load(keys(*range(8))) == 2
    prompt = engine.request(keys(*range(8)))
    hit, miss = base.LookupResult.HIT, base.LookupResult.MISS
    assert [engine.tier.lookup(one, prompt) for one in keys(0, 2, 3)] == [hit, miss, hit]
    assert engine.load(keys(0, 1, 3, 4, 6, 7)) == 6
    assert (engine.counters.corrupt_blocks, engine.counters.num_held) == (2, 6)
    assert state_after(engine.events) == set(keys(0, 1, 3, 4, 6, 7))
    # They are computed and stored again.
    engine.store(keys(2, 5))
    engine.forget_host()
    assert engine.load(keys(*range(8))) == 8


@pytest.mark.parametrize("fault", ["read", "write"])
def test_tier_failing_disk_costs_blocks_only(make, disk, fault, monkeypatch):
    engine = make(disk())
    engine.write(*range(4))

    def fail(*args):
        raise OSError(5, "Input/output error")

    if fault == "read":
        engine.forget_host()
        monkeypatch.setattr(BlockStore, "read", fail)
        # Every request tries once at most, then the breaker keeps requests from the disk.
        for number in range(8):
            assert engine.load(keys(*range(4))) == 0
            assert engine.counters.io_errors == min(number + 1, 3)
    else:
        monkeypatch.setattr(BlockStore, "write", fail)
        with monkeypatch.context() as patch:
            patch.setattr(engine.tier._controller.tier, "submit_store", lambda *_: False)
            assert run(engine.tier, engine.request(), False, (keys(30), [0])) == [(False, [], 0)]
        assert run(engine.tier, engine.request(), False, (keys(30), [0])) == [(False, [], 0)]
        for number in range(10, 18):
            engine.write(number)
        assert 1 <= engine.counters.io_errors <= 4
        assert engine.load(keys(*range(10, 18))) == 8
    assert getattr(engine.tier._controller.stats(), f"{fault}s") == "open"
    # The tier takes no job now.
    assert run(engine.tier, engine.request(), fault == "read", (keys(0), [0])) == [(False, [], 0)]


def test_tier_hung_disk_holds_half_memory(make, disk, hang):
    engine = make(disk(), num_chunks=16)
    # From 0.33 on, so many failed stores in a row would make vLLM stop offering blocks.
    detector = engine.tier.backpressure_detector = FailureCount()
    with hang("write"):
        # No step waits: this loop ends although the disk does not.
        for number in range(64):
            assert engine.store(keys(number)) == keys(number)
        stats = engine.tier._controller.stats()
        assert (stats.num_storing, stats.tier.stored_blocks) == (8, 0)
        assert engine.load(keys(63)) == 1
    engine.settle()
    assert (engine.counters.stored_blocks, detector.failures) == (8, 0)
    engine.tier._next_stats_s = engine.tier.clock()
    values = engine.tier.get_stats().reduce()
    assert sum(value for name, value in values.items() if "refused_blocks" in name) == 64 - 8
    assert sum(value for name, value in engine.manager.get_stats().reduce().items() if "cascade_job_fail" in name) == 0


def test_tier_keeps_bound_equal_to_default(make, disk, hang):
    # 64 is the default of other managers; here it is half of the host blocks.
    engine = make(disk(max_store_blocks=64), num_chunks=64)
    with hang("write"):
        for number in range(40):
            engine.store(keys(number))
        assert engine.tier._controller.stats().num_storing == 40
    engine.settle()


def test_tier_path_names_data_parallel_rank(make, disk, tmp_path):
    make({**disk(), "path": str(tmp_path / "kv{dp_rank}")})
    assert (tmp_path / "kv0").is_dir()


def test_tier_overdue_job_pauses_until_end(make, disk, hang):
    engine = make(disk(deadline_s=5))
    engine.store(keys(0, 1))
    engine.forget_host()
    with hang("read") as began:
        context = engine.request(keys(0))
        engine.manager.lookup(key(0), context)
        engine.step()
        assert began.wait(60)
        engine.tier.clock = lambda: time.monotonic() + 100
        engine.step()
        assert engine.tier._controller.stats().overdue_jobs == 1
        # vLLM owns the block of the overdue job until it ends, so it is not reported early.
        assert engine.manager._jobs
        assert "reads paused" in engine.counters.unavailable_reason
    assert engine.find(keys(0), context) == 1


def test_tier_load_filter_skips_disk(make, disk):
    engine = make(disk())
    engine.store(keys(0))
    engine.forget_host()
    host_only = base.TierFilter((base.TierMatcher(base.Medium.CPU),))
    assert engine.find(keys(0), engine.request(keys(0), load_tier_filter=host_only)) == 0
    assert engine.find(keys(0), engine.request(keys(0))) == 1


def test_tier_request_policy_writes_host_blocks(make, disk):
    engine = make(disk(offload_policy="request_level"), tier_config("memory", capacity=64 * PAGE))
    engine.write(0)
    assert engine.counters.stored_blocks == 1
    engine.tier._controller.tier.reset()
    wait_until(lambda: engine.step() or not engine.counters.unavailable_reason)
    engine.store(keys(0))
    engine.settle()
    assert engine.counters.stored_blocks == 2


def test_tier_lookups_of_step_are_batched(make, entry):
    engine = make(entry, num_chunks=128)
    blocks = keys(*range(48))
    engine.store(blocks)
    engine.settle()
    if engine.counters.medium == "DISK":
        # The blocks of a job are announced in the order of the prompt.
        assert [event.keys for event in of_tier(engine.events)] == [blocks]
    asked = []
    lookup = engine.tier._controller.tier.lookup
    engine.tier._controller.tier.lookup = lambda some: (asked.append(len(some)), lookup(some))[1]
    context = engine.request([*blocks, *keys(100, 101)])

    def answers_of(wanted):
        engine.step()
        asked.clear()
        return [engine.tier.lookup(one, context) for one in wanted]

    # A store over a network answers in a later step.
    expected = [base.LookupResult.HIT] * 48 + [base.LookupResult.MISS]
    wait_until(lambda: answers_of([*blocks, *keys(100)]) == expected)
    assert asked == [50]
    # vLLM asks groups with a sliding window from the end on.
    assert answers_of(blocks[::-1]) == [base.LookupResult.HIT] * 48
    assert sum(asked) < 3 * 50
    # The next step sees the stores in between.
    engine.write(100)
    assert answers_of(keys(100)) == [base.LookupResult.HIT]


def test_tier_two_tiers_serve_own_blocks(make, disk):
    engine = make(tier_config("memory", capacity=8 * PAGE), disk())
    for first in range(0, 24, 8):
        engine.write(*range(first, first + 8))
    engine.forget_host()
    assert engine.load(keys(*range(24))[:16]) == 16
    assert [tier._controller.stats().promoted_blocks for tier in engine.tiers] == [0, 16]
    assert engine.load(keys(*range(16, 24))) == 8
    assert [tier._controller.stats().promoted_blocks for tier in engine.tiers] == [8, 16]


def test_tier_codec_returns_equal_bytes(make, disk):
    engine = make(disk(codec={"type": "fp8", "dtype": "float32"}))
    # Powers of two are exact in this lossy codec.
    engine.content = lambda block: np.full(PAGE // 4, 2.0 ** block[-5], np.float32).view(np.int8)
    engine.store(keys(1, 2))
    engine.forget_host()
    assert engine.load(keys(1, 2)) == 2
    assert (engine.counters.encoded_blocks, engine.counters.decoded_blocks) == (2, 2)
    assert engine.counters.code_bytes < engine.counters.raw_bytes // 3


def test_tier_slow_stores_are_dropped(make, entry):
    engine = make({**entry, "backpressure": BACKPRESSURE})
    for number in range(4):
        engine.write(number)
    assert engine.counters.stored_blocks == 2
    # Loads go on, and a reset ends the pressure.
    engine.forget_host()
    assert engine.load(keys(0, 1)) == 2
    assert engine.load(keys(2)) == 0
    engine.write(5)
    assert engine.counters.stored_blocks == 3


def test_tier_events_are_off_by_option(make, disk):
    for entry, enable_events in ((disk(), False), (disk(enable_kv_events=False), True)):
        engine = make(entry, enable_events=enable_events)
        engine.write(1)
        assert state_after(engine.events) == set()
        engine.close()
    engine = make(disk(locality="LOCAL"))
    engine.write(2)
    assert {event.locality for event in of_tier(engine.events)} == {base.Locality.LOCAL}


def test_hints_about_foreign_memory_are_rejected(make, disk):
    kv_hints = pytest.importorskip("vllm.v1.kv_hints")
    engine = make(disk())
    actions = [kv_hints.KvHintAction("1", kind, "1.0", {}) for kind in ("kv.demote", "kv.prefetch", "kv.fetch")]
    engine.request([key(1)], kv_hints=kv_hints.KvHintsEnvelope("0.1", "m", actions))
    engine.tier._next_stats_s = 0.0
    values = engine.tier.get_stats().reduce()
    counted = {name: value for name, value in values.items() if "kvcache_hint" in name and value}
    assert sorted(counted.values()) == [1, 1, 1]
    assert sum("hint_rejected" in name for name in counted) == 2


def test_tier_metrics_are_labelled_by_place(make, disk, tmp_path):
    engine = make(disk(), {**disk(), "path": str(tmp_path / "second"), "backpressure": BACKPRESSURE})
    engine.write(1, 2)
    declared = type(engine.spec).build_metric_definitions(engine.spec.extra_config)
    for place, tier in enumerate(engine.tiers):
        tier._next_stats_s, tier.clock = 0.0, lambda: 1.0
        sent = tier.get_stats()._values
        assert tier.get_stats() is None
        assert sent.keys() <= declared.keys()
        label = f"{place + 1}:KVCacheTier"
        assert sent["vllm:kvcache_tier_written_blocks"] == {(label, "DISK"): 2}
        # vLLM labels its own metrics of tiers alike.
        assert engine.manager._metrics.tier_label(place)[0] == label
        info = tier.config_info()
        assert tuple(info) == tier.config_info_keys({})
        assert info["kvcache_capacity_bytes"] == 64 * PAGE
