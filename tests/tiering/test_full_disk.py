"""Blocks that a tier missed while its writes failed are offered again, by a probe first, the latest used ones first."""

import numpy as np
from stores import Clock

from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS

NUM_BLOCKS = 8


class World:
    """A manager over a tier that is full for a while."""

    def __init__(self, num_blocks=NUM_BLOCKS, **rule):
        self.clock, self.is_full, self.num_dropped = Clock(), False, 0
        self.tier = ManualTier(4 * num_blocks, np.zeros((num_blocks, 4), np.uint8))
        config = TierConfig(max_failures=2, pause_s=10.0, **rule)
        self.manager = TieredOffloadingManager(16, num_blocks, [(self.tier, config)], clock=self.clock)

    def store(self, *keys):
        output = self.manager.prepare_store(list(keys), ReqContext())
        self.manager.complete_store(output.keys_to_store)

    def step(self):
        """End the jobs under way, then the step; return the keys of the jobs that it sends."""
        for job in list(self.tier.pending):
            self.tier.end(job, "no space left" if self.is_full else "")
        self.manager.on_schedule_end()
        return [job.keys for job in self.tier.pending]

    def fill(self, *keys):
        """Store blocks while the tier is full, until its writes are paused."""
        self.is_full = True
        for key in keys:
            self.store(key)
            self.step()
        self.num_dropped = self.stats().dropped_blocks
        assert self.stats().writes == "open"
        assert self.num_dropped == len(keys)

    def stats(self):
        return self.manager.tier_stats()[0]

    def recover(self):
        """End the pause and play steps; return the keys of all jobs, in order."""
        self.is_full = False
        self.clock.now_s += 10.0
        jobs = []
        while sent := self.step():
            jobs += sent
        return jobs


KEYS = [b"%d" % i for i in range(5)]


def test_missed_blocks_are_written_after_probe():
    world = World()
    world.fill(*KEYS)
    assert not world.manager.has_pending_work()
    assert "writes paused: no space left" in world.stats().tier.unavailable_reason
    world.manager.touch([b"1"], ReqContext())
    # The latest used block alone, then the rest; in a job, the latest used one is stored last.
    assert world.recover() == [[b"1"], [b"0", b"2", b"3", b"4"]]
    assert world.stats().tier.unavailable_reason == ""
    assert world.stats().dropped_blocks == world.num_dropped
    assert not world.manager.has_pending_work()
    assert all(world.tier.lookup([key]) for key in KEYS)


def test_write_back_blocks_are_offered_again():
    world = World(num_blocks=4, write_policy="write_back")
    world.is_full = True
    for key in KEYS:
        world.store(key)
        world.step()
    assert world.stats().writes == "open"
    missed = list(world.manager.controllers[0].backlog.missed)
    assert missed
    sent = [key for keys in world.recover() for key in keys]
    assert set(missed) <= set(sent)
    assert all(world.tier.lookup([key]) for key in missed)


def test_failing_probe_is_one_block():
    world = World()
    world.fill(*KEYS)
    for _ in range(3):
        world.clock.now_s += 10.0
        assert world.step() == [[KEYS[-1]]]
        assert world.step() == []
        assert world.stats().writes == "open"
    assert world.stats().dropped_blocks == world.num_dropped
    assert world.recover()[0] == [KEYS[-1]]


def test_gone_missed_blocks_are_not_offered():
    world = World()
    world.fill(*KEYS)
    # All of host memory is replaced while the tier is paused.
    world.store(*(b"new%d" % i for i in range(NUM_BLOCKS)))
    sent = [key for keys in world.recover() for key in keys]
    assert sorted(sent) == [b"new%d" % i for i in range(NUM_BLOCKS)]
    assert not world.manager.controllers[0].backlog.missed


def test_reset_forgets_missed_blocks():
    world = World()
    world.fill(*KEYS)
    world.manager.reset_cache()
    assert world.recover() == []
    world.store(KEYS[0])
    assert [job.keys for job in world.tier.pending] == [[KEYS[0]]]
    assert world.recover() == []


def test_step_offers_bounded_number_again():
    world = World(num_blocks=3 * MAX_STEP_BLOCKS, max_store_blocks=3 * MAX_STEP_BLOCKS)
    world.fill(b"a", b"b")
    for first in range(0, 2500, 500):
        world.store(*(b"%d" % i for i in range(first, first + 500)))
    world.is_full = False
    world.clock.now_s += 10.0
    sizes = []
    while sent := world.step():
        sizes.append(sum(map(len, sent)))
    assert sizes[0] == 1
    assert max(sizes) <= MAX_STEP_BLOCKS
    assert sum(sizes) == 2502
    assert world.manager.stats().num_referenced == 0
