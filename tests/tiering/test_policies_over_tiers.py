"""Policies over tiers: a tier adds hits, is not starved, and hits as many blocks as one large memory cache."""

import os
import random
from functools import cache

import numpy as np
import pytest

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.integrations.vllm.settings import DEFAULT_POLICY
from kvcache.lab.simulate import tiered
from kvcache.lab.simulate.choices import recorded_tier
from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.simulate.simulated_tier import SimulatedTier, SimulatedTieredManager
from kvcache.lab.simulate.tiered import DiskChoice, PatientManager, patient_manager
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.requests import ReplayError, Request
from kvcache.lab.traces.trace import Trace
from kvcache.registry import POLICIES
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiers.base.tier import host_rows
from kvcache.tiers.disk.directory import directory_bytes
from kvcache.tiers.disk.header import capacity_for

HOST_BLOCKS = 150
TIER_BLOCKS = 2000
BLOCK_BYTES = 4096


def sessions(num_requests):
    """Generate requests of 30 sessions, which share a prompt of 8 blocks and grow by 1 to 6 blocks a request."""
    draw = random.Random(7)
    prompts = [list(range(8)) for _ in range(30)]
    new = 8
    for number in range(num_requests):
        user = draw.randrange(30)
        if len(prompts[user]) > 60:
            prompts[user] = list(range(8))
        num_new = draw.randint(1, 6)
        prompts[user] += range(new, new + num_new)
        new += num_new
        ids = np.array(prompts[user], np.int64)
        yield Request(ids, 16 * len(ids), 0, 1.5 * number), [b"%d" % block for block in ids]


def replayed(manager, clock):
    replay = Replay(manager, arrivals=clock)
    for request, keys in sessions(500):
        replay.step(request, keys)
    return replay.tally


@cache
def hits_over_tier(policy):
    clock = ReplayClock()
    manager = SimulatedTieredManager(16, HOST_BLOCKS, [TIER_BLOCKS], policy, tier_policy=policy, clock=clock)
    num_hits = replayed(manager, clock).hit_blocks
    return num_hits, num_hits - manager.simulated[0].loaded_blocks


def num_left_of_session(num_blocks, policy):
    """Serve a session up to `num_blocks` blocks and then others for ten hours; return its blocks in a tier of 4,000."""
    clock = ReplayClock()
    manager = SimulatedTieredManager(16, 2000, [4000], "lru", tier_policy=policy, clock=clock)
    replay = Replay(manager, arrivals=clock)
    session = [b"session %d" % i for i in range(num_blocks)]
    prompts = [session[: num_blocks * turn // 3] for turn in (1, 2, 3, 3)]
    prompts += [[b"%d %d" % (i // 4, j) for j in range(20 * (i % 4 + 1))] for i in range(1800)]
    for number, keys in enumerate(prompts):
        ids = np.arange(len(keys), dtype=np.int64)
        replay.step(Request(ids, 16 * len(ids), 0, 20.0 * number), keys)
        if number == 3:
            assert manager.simulated[0].lookup(session) == num_blocks
    return sum(manager.simulated[0].lookup([key]) for key in session)


@pytest.mark.parametrize("policy", ["gittins", "lru"])
@pytest.mark.parametrize("num_blocks", [999, 1500])
def test_long_session_leaves_tier(policy, num_blocks):
    assert num_left_of_session(num_blocks, policy) == 0


@pytest.mark.parametrize("policy", POLICIES.names())
def test_tier_never_costs_hits(policy):
    clock = ReplayClock()
    alone = replayed(CPUOffloadingManager(16, HOST_BLOCKS, policy, clock=clock), clock)

    assert hits_over_tier(policy)[0] >= alone.hit_blocks


def test_configuration_names_policies_of_tiers():
    manager = SimulatedTieredManager(16, 4, [8, 9], "gittins", tier_policy="arc", clock=ReplayClock())
    tiers = manager.configuration()["tiers"]
    assert [recorded_tier(i, tier).cache_policy for i, tier in enumerate(tiers)] == ["arc", "arc"]
    assert recorded_tier(0, {"medium": "DISK"}).cache_policy == "lru"


def test_gittins_over_tier_hits_like_lru():
    hits, memory_hits = hits_over_tier("gittins")
    lru_hits, lru_memory_hits = hits_over_tier("lru")

    assert hits >= lru_hits
    assert memory_hits > lru_memory_hits


def test_default_policy_over_disk_loads_evicted(tmp_path):
    clock = ReplayClock()
    host_blocks = host_rows(HOST_BLOCKS, BLOCK_BYTES)
    below = DiskChoice(tmp_path / "disk", TIER_BLOCKS * 2 * BLOCK_BYTES)
    with patient_manager(16, DEFAULT_POLICY, below, host_blocks, clock=clock) as manager:
        replay = Replay(manager, arrivals=clock)
        for request, keys in sessions(150):
            replay.step(request, keys)
        (stats,) = manager.tier_stats()
    tally = replay.tally
    named = {key for _, keys in sessions(150) for key in keys}

    assert tally.hit_blocks == tally.blocks - len(named)  # nothing is computed twice
    assert stats.written_blocks == len(named)
    assert stats.promoted_blocks > 0


def test_promotion_over_full_memory_brings_blocks():
    clock = ReplayClock()
    manager = SimulatedTieredManager(16, 100, [1000], "gittins", clock=clock)
    prompts = [[b"%d %d" % (i, j) for j in range(60)] for i in range(10)]
    for _ in range(2):
        for prompt in prompts:
            clock.now_s += 10.0
            context = ReqContext()
            num_hits = manager.lookup(prompt, context)
            manager.touch(prompt, context)
            output = manager.prepare_store(prompt, context)
            assert output is not None
            assert num_hits + len(output.keys_to_store) == len(prompt)
            manager.complete_store(output.keys_to_store, context)
            manager.on_request_finished(context)

    assert num_hits == 60
    assert manager.simulated[0].stored_blocks == 600


def test_replay_over_faulty_tier_ends(monkeypatch):
    monkeypatch.setattr("kvcache.lab.simulate.simulated_tier._MOST_STEPS", 100)
    monkeypatch.setattr(SimulatedTier, "submit_store", lambda *_: 1 / 0)
    clock = ReplayClock()
    with pytest.raises(ReplayError, match="has not ended its jobs after 100 steps"):
        replayed(SimulatedTieredManager(16, HOST_BLOCKS, [TIER_BLOCKS], clock=clock, cache_policy="lru"), clock)


# The whole trace over a real disk takes half a minute: KVCACHE_WHOLE_TRACE=1.
WHOLE = os.environ.get("KVCACHE_WHOLE_TRACE") == "1"
NUM_HOST, NUM_DISK, NUM_REQUESTS = (3000, 100_000, 12_031) if WHOLE else (300, 12_000, 700)


def replayed_trace(manager, trace_path, num_requests):
    replay, make_keys = Replay(manager), KeyMaker()
    with Trace(trace_path) as trace:
        for request, _ in zip(trace, range(num_requests), strict=False):
            replay.step(request, make_keys(request.hash_ids))
    return replay.tally


def test_host_over_disk_hits_like_memory(shared, tmp_path):
    path = shared / "traces" / "mooncake_conversation.jsonl"
    whole = replayed_trace(CPUOffloadingManager(512, NUM_HOST + NUM_DISK), path, NUM_REQUESTS)
    disk = DiskChoice(tmp_path / "tier", capacity_for(NUM_DISK, BLOCK_BYTES))
    with patient_manager(512, "lru", disk, host_rows(NUM_HOST, BLOCK_BYTES)) as manager:
        tally = replayed_trace(manager, path, NUM_REQUESTS)
        stats = manager.tier_stats()[0]
    print(whole.token_hit_rate, tally.token_hit_rate, tally.hit_blocks, stats)
    assert stats.promoted_blocks > 0
    assert (stats.failed_jobs, stats.overdue_jobs, stats.tier.corrupt_blocks) == (0, 0, 0)
    assert abs(whole.token_hit_rate - tally.token_hit_rate) < 0.01
    assert directory_bytes(disk.path) <= disk.capacity_bytes
    if WHOLE:
        # The disk holds all that host memory holds, so this is LRU at 100,000 blocks.
        assert tally.hit_blocks == 104_924


@pytest.mark.parametrize("write_policy", ["write_back", "write_through_selective"])
def test_other_write_policies_lose_little(shared, write_policy):
    path = shared / "traces" / "mooncake_conversation.jsonl"
    whole = replayed_trace(CPUOffloadingManager(512, 12_600), path, 1500)
    tier = ManualTier(12_000, is_automatic=True)
    rule = TierConfig(write_policy=write_policy, num_uses=1, max_store_blocks=256)
    manager = PatientManager(512, 600, [(tier, rule)])
    tally = replayed_trace(manager, path, 1500)
    assert abs(whole.token_hit_rate - tally.token_hit_rate) < 0.01
    assert manager.tier_stats()[0].dropped_blocks < 100


def test_waiting_is_not_timed_as_bookkeeping(monkeypatch):
    now = [1000]
    monkeypatch.setattr(tiered, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(PatientManager.__base__, "settle", lambda *_: now.__setitem__(0, now[0] + 500))
    monkeypatch.setattr(PatientManager.__base__, "on_schedule_end", lambda _: now.__setitem__(0, now[0] + 7))
    manager = PatientManager(512, 6, [(ManualTier(12), TierConfig())])
    before = manager.clock()
    manager.settle()
    assert manager.clock() - before == 7
    assert now == [1507]
