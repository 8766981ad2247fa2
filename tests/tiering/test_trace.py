"""A small host pool over a disk tier hits as many blocks as one large memory cache, on a real trace."""

import mmap
import os

import numpy as np
import pytest

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.simulate import tiered
from kvcache.lab.simulate.run import Replay
from kvcache.lab.simulate.tiered import DiskChoice, PatientManager, patient_manager
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.trace import Trace
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiers.disk.directory import capacity_for, directory_bytes

BLOCK_BYTES = 4096
# The whole trace over a real disk takes half a minute: KVCACHE_WHOLE_TRACE=1.
WHOLE = os.environ.get("KVCACHE_WHOLE_TRACE") == "1"
NUM_HOST, NUM_DISK, NUM_REQUESTS = (3000, 100_000, 12_031) if WHOLE else (600, 12_000, 1500)


def replayed(manager, trace_path, num_requests):
    replay, make_keys = Replay(manager), KeyMaker()
    with Trace(trace_path) as trace:
        for request, _ in zip(trace, range(num_requests), strict=False):
            replay.step(request, make_keys(request.hash_ids))
    return replay.tally


def test_host_over_disk_hits_as_much_as_one_memory_cache(shared, tmp_path):
    path = shared / "traces" / "mooncake_conversation.jsonl"
    whole = replayed(CPUOffloadingManager(512, NUM_HOST + NUM_DISK), path, NUM_REQUESTS)
    flat = np.frombuffer(mmap.mmap(-1, NUM_HOST * BLOCK_BYTES), np.uint8)
    disk = DiskChoice(tmp_path / "tier", capacity_for(NUM_DISK, BLOCK_BYTES))
    with patient_manager(512, "lru", disk, flat.reshape(NUM_HOST, BLOCK_BYTES)) as manager:
        tally = replayed(manager, path, NUM_REQUESTS)
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
    whole = replayed(CPUOffloadingManager(512, 12_600), path, 1500)
    tier = ManualTier(12_000, is_automatic=True)
    rule = TierConfig(write_policy=write_policy, num_uses=1, max_store_blocks=256)
    manager = PatientManager(512, 600, [(tier, rule)])
    tally = replayed(manager, path, 1500)
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
