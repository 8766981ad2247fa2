"""A tier whose threads raise, hang, lose and lie, under a manager: no wrong byte, no slot in two hands, no error."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
from store_faults import BLOCK_BYTES, NUM_HOST, Traffic
from stores import blocks, until

from kvcache.tiers.base import lifecycle
from kvcache.tiers.base.job_tier import BlockOutcome, JobTier, TierContents

BUDGET = float(os.environ.get("KVCACHE_STRESS", "1"))
NUM_BLOCKS = 256


class WildTier(JobTier):
    """A `JobTier` whose subclass raises, hangs, lies and is slow in its threads."""

    def __init__(self, host, seed):
        self.draw = random.Random(seed)
        self.blocks = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.owners = {}
        self.rate = 0.1
        self.gate = threading.Event()
        super().__init__(host, "WILD", num_blocks=NUM_BLOCKS, num_threads=3, max_batch_blocks=3)

    def open(self):
        return TierContents(NUM_BLOCKS)

    def chaos(self, batch):
        chance = self.draw.random()
        if chance < self.rate / 4:
            raise OSError("chaos")
        if chance < self.rate / 2:
            self.gate.wait(0.05)
        elif chance < self.rate:
            return [BlockOutcome.DONE] * (len(batch.keys) + 1)
        return None

    def put(self, batch):
        lie = self.chaos(batch)
        for key, slot, buffer in zip(batch.keys, batch.slots, batch.buffers, strict=True):
            self.blocks[slot] = buffer
            self.owners[slot] = key
        return lie

    def get(self, batch):
        lie = self.chaos(batch)
        outcomes = []
        for key, slot, buffer in zip(batch.keys, batch.slots, batch.buffers, strict=True):
            buffer[:] = self.blocks[slot]
            is_right = self.owners.get(slot) == key and self.draw.random() > self.rate
            outcomes.append(BlockOutcome.DONE if is_right else self.draw.choice([1, 2]))
        return lie or outcomes

    def clear(self, generation):
        if self.draw.random() < self.rate:
            raise OSError("clear")
        self.owners.clear()


def test_wild_medium_gives_no_wrong_byte(monkeypatch):
    monkeypatch.setattr(lifecycle, "RETRY_S", 0.01)
    host = blocks(NUM_HOST, BLOCK_BYTES)
    tier = WildTier(host, 12)
    traffic = Traffic(tier, host, seed=11, deadline_s=0.02, pause_s=0.02)
    manager = traffic.manager
    try:
        for step in range(round(3000 * BUDGET)):
            tier.rate = 0.15 if step % 1000 < 500 else 0.0
            traffic.step()
            if step % 700 == 699:
                manager.reset_cache()
        tier.rate = 0.0
        manager.reset_cache()
        # An overdue job releases its slots only when the tier reports its end.
        until(lambda: manager.settle(10) and manager.stats().num_free == NUM_HOST)
        stats, (tier_stats,) = manager.stats(), manager.tier_stats()
        assert (stats.num_pending, stats.num_referenced) == (0, 0)
        assert (traffic.num_wrong, traffic.num_late) == (0, 0)
        assert tier_stats.promoted_blocks > 50
        assert tier_stats.tier.io_errors > 5
        assert traffic.num_answers > 500
    finally:
        manager.shutdown()
