"""Tiers that raise, hang, lose, answer late and lie, under a manager: no wrong byte, no slot in two hands, no error.

The test records the expected bytes of every host block, and the jobs that each tier still runs.
``KVCACHE_STRESS=10 make stress`` makes more than a hundred thousand steps.
"""

from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
import pytest

from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering import lifecycle
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.job_tier import BlockOutcome, JobTier, TierContents
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiering.tier import TierResult

BUDGET = int(os.environ.get("KVCACHE_STRESS", "1"))
BLOCK_BYTES = 16
NUM_HOST = 24
NUM_KEYS = 60


def payload(key):
    return np.frombuffer(key.ljust(BLOCK_BYTES, b"."), np.uint8)


def raising(name):
    """Return a method of `ManualTier` that raises at random."""

    def call(self, *arguments):
        if self.happens():
            raise RuntimeError(name)
        return getattr(ManualTier, name)(self, *arguments)

    return call


class ChaosTier(ManualTier):
    """A tier under the test's control: every call may raise or return an invalid answer, and jobs end at random."""

    touch, reset, stats = raising("touch"), raising("reset"), raising("stats")

    def __init__(self, draw, num_blocks, host):
        super().__init__(num_blocks, host, is_automatic=False)
        self.draw = draw
        self.rate = 0.0
        self.num_faults = 0

    def happens(self, rate=1.0):
        if self.draw.random() < self.rate * rate:
            self.num_faults += 1
            return True
        return False

    def lookup(self, keys):
        if self.happens():
            return self.draw.choice([None, -1, len(keys) + 1, len(keys), "many"])
        if self.happens():
            raise RuntimeError("lookup")
        return super().lookup(keys)

    def on_request_finished(self, req_context):
        super().on_request_finished(req_context)
        if self.happens():
            raise RuntimeError("on_request_finished")

    def submit(self, submit, *job):
        if self.happens():
            return False
        taken = submit(*job)
        if self.happens(0.3):
            raise RuntimeError("taken, and then it raised")
        return taken

    def submit_store(self, job_id, keys, block_ids):
        return self.submit(super().submit_store, job_id, keys, block_ids)

    def submit_load(self, job_id, keys, block_ids):
        return self.submit(super().submit_load, job_id, keys, block_ids)

    def get_finished(self):
        if self.happens():
            raise RuntimeError("get_finished")
        results = super().get_finished()
        if self.happens():
            results.append(TierResult(self.draw.randrange(10_000_000, 20_000_000), [b"never"]))
        if self.happens():
            results.append(TierResult(None, [], [], [b"key-%03d" % self.draw.randrange(NUM_KEYS)]))
        if results and self.happens():
            results.append(results[0])
        if self.happens():
            results.append(None)
        return results

    def move_on(self):
        """End some jobs, including late ones; a failed load leaves garbage."""
        for job in list(self.pending):
            if self.draw.random() < 0.5:
                continue
            error = "failed" if self.happens() else ""
            if error and job.is_load:
                for block_id in job.block_ids:
                    self._host_blocks[block_id] = 0xEE
            self.end(job, error)


class Engine:
    """Make random calls of a scheduler, and check the results against its own records."""

    def __init__(self, draw, host, manager, tiers):
        self.draw, self.host, self.manager, self.tiers = draw, host, manager, tiers
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

    def check_bytes(self, keys, block_ids):
        busy = {i for tier in self.tiers for job in tier.pending if job.is_load for i in job.block_ids}
        for key, block_id in zip(keys, block_ids, strict=True):
            assert block_id not in busy, f"{key!r} lies where a tier reads into"
            assert np.array_equal(self.host[block_id], payload(key)), f"wrong bytes of {key!r}"

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
        taken = {i for tier in self.tiers for job in tier.pending for i in job.block_ids}
        taken.update(i for _, _, others in self.storing for i in others)
        assert not taken.intersection(ids), "a slot in two hands"
        self.storing.append((context, output.keys_to_store, ids))

    def store(self):
        if not self.storing:
            return
        context, keys, ids = self.storing.pop(self.draw.randrange(len(self.storing)))
        for key, block_id in zip(keys, ids, strict=True):
            self.host[block_id] = payload(key)
        self.manager.complete_store(keys, context, self.draw.random() < 0.95)
        self.manager.on_request_finished(context)

    def finish(self):
        if self.asking and self.draw.random() < 0.2:
            context, _ = self.asking.pop()
            self.manager.on_request_finished(context)

    def end(self):
        for tier in self.tiers:
            tier.move_on()
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


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("num_tiers", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_chaos_gives_no_wrong_byte_and_raises_nothing(write_policy, num_tiers, seed):
    draw = random.Random(f"{write_policy}-{num_tiers}-{seed}")
    now_s = [0.0]
    host = np.zeros((NUM_HOST, BLOCK_BYTES), np.uint8)
    tiers = [ChaosTier(draw, 40 * (i + 1), host) for i in range(num_tiers)]
    config = TierConfig(write_policy=write_policy, deadline_s=4.0, pause_s=2.0, max_store_blocks=6)
    manager = TieredOffloadingManager(
        16, NUM_HOST, [(tier, config) for tier in tiers], enable_events=True, deadline_s=3.0, clock=lambda: now_s[0]
    )
    engine = Engine(draw, host, manager, tiers)
    for step in range(6000 * BUDGET):
        # Alternate between quiet and faulty periods: the manager pauses a tier that fails all the time.
        for tier in tiers:
            tier.rate = 0.08 if step % 1500 < 700 else 0.0
        now_s[0] += draw.choice([0.0, 0.05, 0.2])
        engine.step()
        if step % 50 == 0:
            manager.tier_stats()
            list(manager.take_events())
    assert sum(tier.num_faults for tier in tiers) > 50 * BUDGET
    assert engine.num_loaded > 200 * BUDGET
    assert sum(one.promoted_blocks for one in manager.tier_stats()) > 0
    for tier in tiers:
        tier.rate = 0.0
    engine.reset()
    for _ in range(60):
        now_s[0] += 5
        engine.end()
    stats = manager.stats()
    lost = sum(one.stuck_blocks for one in manager.tier_stats())
    assert (stats.num_pending, stats.num_referenced) == (0, 0)
    assert NUM_HOST - stats.num_free <= lost <= 3 * NUM_HOST // 4


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
    tier.pending, tier.move_on = [], lambda: None
    config = TierConfig(deadline_s=0.02, pause_s=0.02, max_store_blocks=8)
    manager = TieredOffloadingManager(16, NUM_HOST, [(tier, config)], deadline_s=0.05)
    engine = Engine(draw, host, manager, [tier])
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
