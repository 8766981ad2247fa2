"""The built-in tiers keep the contract of all tiers, and the manager keeps its own over tiers that do not."""

import random

import numpy as np
import pytest

from kvcache.request import ReqContext
from kvcache.testing.tier_contract import TierContract
from kvcache.testing.tiers import Faults, FaultyTier, ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.disk.directory import capacity_for
from kvcache.tiers.disk.tier import DiskTier


class TestDiskTier(TierContract):
    survives_restart = True

    def open_tier(self, path, host_blocks, num_blocks):
        return DiskTier(path, capacity_for(num_blocks, self.block_bytes), host_blocks)


class TestBufferedDiskTier(TestDiskTier):
    block_bytes = 1000


class TestManualTier(TierContract):
    def open_tier(self, path, host_blocks, num_blocks):
        return ManualTier(num_blocks, host_blocks, is_automatic=True)


class TestFaultyTierWithoutFaults(TierContract):
    def open_tier(self, path, host_blocks, num_blocks):
        return FaultyTier(ManualTier(num_blocks, host_blocks, is_automatic=True), Faults(), host_blocks)


ALL_FAULTS = {
    "errors": Faults(error_rate=0.3),
    "refusals": Faults(refuse_rate=0.4),
    "flips": Faults(flip_rate=0.3),
    "short": Faults(short_rate=0.5),
    "lost": Faults(lost_rate=0.05),
    "late": Faults(late_rate=0.5, delay_s=7.0),
    "reordered": Faults(late_rate=0.5, delay_s=2.0, is_reordering=True),
    "unknown": Faults(unknown_rate=0.5),
    "all": Faults(0.1, 0.1, 0.1, 0.1, 0.02, 0.2, 3.0, True, 0.1),
}


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("name", ALL_FAULTS)
def test_no_wrong_byte_and_no_endless_wait_whatever_the_tier_does(name, write_policy):
    clock = [0.0]
    host = np.zeros((12, 8), np.uint8)
    inner = ManualTier(40, host, is_automatic=True)
    tier = FaultyTier(inner, ALL_FAULTS[name], host, seed=3, clock=lambda: clock[0])
    rule = TierConfig(write_policy=write_policy, pause_s=3.0, max_store_blocks=4)
    manager = TieredOffloadingManager(16, 12, [(tier, rule)], clock=lambda: clock[0])
    draw = random.Random(5)
    num_loaded = 0
    waiting = []
    for _ in range(600):
        clock[0] += 0.25
        if len(waiting) < 3:
            head = draw.randrange(12)
            keys = [b"%02d-%d" % (head, i) for i in range(draw.randint(1, 6))]
            waiting.append((ReqContext(), keys, clock[0]))
        for request in list(waiting):
            context, keys, since_s = request
            num_hits = manager.lookup(keys, context)
            if num_hits is None:
                assert clock[0] - since_s <= 6, "a request waits past its deadline"
                continue
            waiting.remove(request)
            spec = manager.prepare_load(keys[:num_hits], context)
            for key, block_id in zip(keys, spec.block_ids.tolist(), strict=False):
                assert host[block_id].tobytes() == key.ljust(8)
            num_loaded += num_hits
            manager.complete_load(keys[:num_hits], context)
            output = manager.prepare_store(keys, context)
            if output is not None:
                for key, block_id in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
                    host[block_id] = np.frombuffer(key.ljust(8), np.uint8)
                manager.complete_store(output.keys_to_store, context)
            manager.on_request_finished(context)
        manager.on_schedule_end()
    assert tier.num_faults > 0
    assert num_loaded > 150
    for _ in range(4):
        clock[0] += 30
        manager.on_schedule_end()
    stats, stuck = manager.stats(), manager.tier_stats()[0].stuck_blocks
    assert stats.num_pending + stats.num_referenced <= stuck
    assert (stuck > 0) == bool(tier.lost)
