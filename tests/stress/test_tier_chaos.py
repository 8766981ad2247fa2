"""A tier whose threads raise, hang, lose and lie, under a manager: no wrong byte, no slot in two hands, no error."""

from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
from engine import Engine

from kvcache.request import ReqContext
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base import lifecycle
from kvcache.tiers.base.job_tier import BlockOutcome, JobTier, TierContents

BUDGET = int(os.environ.get("KVCACHE_STRESS", "1"))
BLOCK_BYTES = 16
NUM_HOST = 24
NUM_KEYS = 60


class RandomEngine(Engine):
    """Make random calls of a scheduler, and check the results against its own records."""

    def __init__(self, draw, host, manager):
        super().__init__(manager, host)
        self.draw = draw
        self.loading = []
        self.storing = []
        self.asking = []
        self.num_loaded = 0

    def step(self):
        kind = self.draw.choice(["ask"] * 3 + ["load"] * 2 + ["store"] * 2 + ["end"] * 2 + ["finish", "reset"])
        if kind == "reset" and self.draw.random() > 0.02:
            kind = "ask"
        getattr(self, kind)()

    def ask(self):
        if len(self.asking) < 6:
            head = self.draw.randrange(NUM_KEYS)
            keys = [b"key-%03d" % ((head + i) % NUM_KEYS) for i in range(self.draw.randint(1, 8))]
            self.asking.append((ReqContext(), keys))
        request = self.draw.choice(self.asking)
        context, keys = request
        self.manager.status(keys[0], context)
        found = self.manager.lookup(keys, context)
        if found is None:
            return
        self.asking.remove(request)
        spec = self.manager.prepare_load(keys[:found], context)
        self.loading.append((context, keys, found, spec.block_ids.tolist()))
        self.check_bytes(keys[:found], spec.block_ids.tolist())

    def load(self):
        if not self.loading:
            return
        context, keys, found, block_ids = self.loading.pop(self.draw.randrange(len(self.loading)))
        self.check_bytes(keys[:found], block_ids)
        self.num_loaded += found
        self.manager.complete_load(keys[:found], context)
        output = self.manager.prepare_store(keys, context)
        if output is None:
            self.manager.on_request_finished(context)
            return
        ids = output.store_spec.block_ids.tolist()
        taken = {i for _, _, others in self.storing for i in others}
        assert not taken.intersection(ids), "a slot in two hands"
        self.storing.append((context, output.keys_to_store, ids))

    def store(self):
        if not self.storing:
            return
        context, keys, ids = self.storing.pop(self.draw.randrange(len(self.storing)))
        self.fill(keys, ids)
        self.manager.complete_store(keys, context, self.draw.random() < 0.95)
        self.manager.on_request_finished(context)

    def finish(self):
        if self.asking and self.draw.random() < 0.2:
            context, _ = self.asking.pop()
            self.manager.on_request_finished(context)

    def end(self):
        self.manager.on_schedule_end()

    def reset(self):
        """Complete all jobs and requests first, as the contract requires; then reset."""
        for context, keys, found, _ in self.loading:
            self.manager.complete_load(keys[:found], context)
        for context, keys, _ in self.storing:
            self.manager.complete_store(keys, context, False)
        for context, *_ in self.loading + self.storing + self.asking:
            self.manager.on_request_finished(context)
        self.loading, self.storing, self.asking = [], [], []
        self.manager.reset_cache()


class WildTier(JobTier):
    """A `JobTier` whose subclass raises, hangs, lies and is slow in its threads."""

    def __init__(self, host, seed):
        self.draw = random.Random(seed)
        self.blocks = np.zeros((48, BLOCK_BYTES), np.uint8)
        self.owners = {}
        self.rate = 0.1
        self.gate = threading.Event()
        super().__init__(host, "WILD", num_blocks=48, num_threads=3, max_batch_blocks=3)

    def open(self):
        return TierContents(48)

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
    draw = random.Random(11)
    host = np.zeros((NUM_HOST, BLOCK_BYTES), np.uint8)
    tier = WildTier(host, 12)
    config = TierConfig(deadline_s=0.02, pause_s=0.02, max_store_blocks=8)
    manager = TieredOffloadingManager(16, NUM_HOST, [(tier, config)], deadline_s=0.05)
    engine = RandomEngine(draw, host, manager)
    try:
        for step in range(8000 * BUDGET):
            tier.rate = 0.15 if step % 2000 < 1000 else 0.0
            engine.step()
            if step % 20 == 0:
                time.sleep(0.0002)
        tier.rate = 0.0
        engine.reset()
        # An overdue job releases its slots only when the tier reports its end.
        end_s = time.monotonic() + 30
        while manager.stats().num_free < NUM_HOST and time.monotonic() < end_s:
            assert manager.settle(10)
            time.sleep(0.001)
        stats, (tier_stats,) = manager.stats(), manager.tier_stats()
        assert (stats.num_pending, stats.num_referenced, stats.num_free) == (0, 0, NUM_HOST)
        assert tier_stats.promoted_blocks > 50
        assert tier_stats.tier.io_errors > 5
        assert engine.num_loaded > 500
    finally:
        manager.shutdown()
