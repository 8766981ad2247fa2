"""Two tiers that refuse, fail, lie, come late and reset badly: no slot used twice, no leaked reference, no old byte."""

import random

import numpy as np
import pytest
from engine import Engine
from stores import Clock

from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import TierResult

NUM_BLOCKS = 8
PROMPTS = [[letter.encode() for letter in text] for text in ("abcd", "abef", "ghij", "klm", "gnop")]


def raising(name):
    """Return a method of `ManualTier` that raises at times."""

    def call(self, *arguments):
        if self.happens():
            raise RuntimeError(name)
        return getattr(ManualTier, name)(self, *arguments)

    return call


class UnrulyTier(ManualTier):
    """Refuses and fails on demand; `in_use` has the host blocks of the jobs that it has not reported.

    A share `rate` of its calls raises, or answers nonsense.
    """

    touch, on_request_finished, stats = raising("touch"), raising("on_request_finished"), raising("stats")

    def __init__(self, medium, host):
        super().__init__(12, host)
        self.medium = medium
        self.in_use = {}
        self.refuses = self.is_unknown = self.reset_fails = False
        self.draw, self.rate = random.Random(medium), 0.0

    def happens(self):
        return self.draw.random() < self.rate

    def lookup(self, keys):
        if self.happens():
            return self.draw.choice((None, -1, len(keys), len(keys) + 1, "many"))
        return None if self.is_unknown else super().lookup(keys)

    def _taken(self, job_id, block_ids, is_taken):
        if is_taken:
            self.in_use[job_id] = block_ids
            if self.happens():
                raise RuntimeError("taken, and then it raised")
        return is_taken

    def submit_store(self, job_id, keys, block_ids):
        return self._taken(job_id, block_ids, not self.refuses and super().submit_store(job_id, keys, block_ids))

    def submit_load(self, job_id, keys, block_ids):
        return self._taken(job_id, block_ids, not self.refuses and super().submit_load(job_id, keys, block_ids))

    def get_finished(self):
        if self.happens():
            raise RuntimeError("get_finished")
        results = super().get_finished()
        for result in results:
            del self.in_use[result.job_id]
        if self.happens():
            # One twice, and some of nobody's jobs.
            results += [*results[:1], None, TierResult(10**7, [b"never"]), TierResult(None, removed=[b"a"])]
        return results

    def reset(self, version=None):
        if self.reset_fails:
            raise OSError("the reset failed")
        super().reset(version)


class World(Engine):
    """An engine of three requests over a manager with two tiers; block contents name the key and the reset before."""

    def __init__(self, **rule):
        self.clock, self.epoch = Clock(), 0
        self.host = np.zeros((NUM_BLOCKS, 4), np.uint8)
        self.tiers = [UnrulyTier("UPPER", self.host), UnrulyTier("LOWER", self.host)]
        config = TierConfig(deadline_s=3.0, pause_s=2.0, max_failures=2, max_store_blocks=4, **rule)
        self.manager = TieredOffloadingManager(
            16,
            NUM_BLOCKS,
            [(tier, config) for tier in self.tiers],
            enable_events=True,
            deadline_s=4.0,
            clock=self.clock,
        )
        self.requests = []

    def content(self, key):
        return np.frombuffer(key * 3 + bytes([self.epoch]), np.uint8)

    def slots_in_use(self):
        return {block_id for tier in self.tiers for ids in tier.in_use.values() for block_id in ids}

    def fill(self, keys, block_ids):
        assert self.slots_in_use().isdisjoint(block_ids)
        super().fill(keys, block_ids)

    def request(self, draw):
        """Begin a request, or take one a step further."""
        if len(self.requests) < 3 and draw.random() < 0.5:
            self.requests.append((ReqContext(), draw.choice(PROMPTS)))
            return
        if not self.requests:
            return
        context, keys = self.requests[draw.randrange(len(self.requests))]
        num_hits = self.manager.lookup(keys, context)
        if num_hits is None:
            if draw.random() < 0.05:
                self.end(context, keys)
            return
        self.load(keys[:num_hits], context)
        self.manager.touch(keys, context)
        self.store(keys, context, draw.random() < 0.9)
        self.end(context, keys)

    def end(self, context, keys):
        self.requests.remove((context, keys))
        self.manager.on_request_finished(context)

    def step(self):
        self.manager.on_schedule_end()
        # Each slot that a tier uses is referenced or reserved, or withheld, by the manager.
        stats = self.manager.stats()
        assert stats.num_free <= NUM_BLOCKS - len(self.slots_in_use())

    def end_jobs(self, error=""):
        for tier in self.tiers:
            for job in list(tier.pending):
                tier.end(job, error)

    def act(self, draw):
        kind = draw.random()
        tier = draw.choice(self.tiers)
        if kind < 0.45:
            self.request(draw)
        elif kind < 0.65:
            self.step()
        elif kind < 0.9:
            if tier.pending:
                tier.end(draw.choice(tier.pending), "broken" if draw.random() < 0.15 else "")
        elif kind < 0.94:
            self.clock.now_s += draw.choice((0.5, 1.0, 3.0))
        elif kind < 0.99:
            name = draw.choice(("refuses", "is_unknown", "reset_fails"))
            setattr(tier, name, draw.random() < 0.2)
        else:
            self.reset()

    def reset(self):
        self.manager.reset_cache()
        self.epoch += 1

    def check_nothing_is_left(self):
        """End all requests and jobs, then see that every slot is free or holds an unreferenced block."""
        for tier in self.tiers:
            tier.refuses = tier.is_unknown = tier.reset_fails = False
            tier.rate = 0.0
        for context, keys in list(self.requests):
            self.end(context, keys)
        for _ in range(12):
            self.clock.now_s += 1.0
            self.end_jobs()
            self.step()
        stats = self.manager.stats()
        assert (stats.num_referenced, stats.num_pending) == (0, 0)
        assert len(self.manager.prepare_store([b"%d" % i for i in range(NUM_BLOCKS)]).keys_to_store) == NUM_BLOCKS


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
def test_random_faults_leave_nothing_behind(write_policy):
    num_loads = 0
    for seed in range(40):
        draw, world = random.Random(seed), World(write_policy=write_policy)
        for step in range(400):
            # The manager pauses a tier that fails all the time.
            for tier in world.tiers:
                tier.rate = 0.05 if seed % 2 and step % 100 < 50 else 0.0
            world.act(draw)
        world.check_nothing_is_left()
        num_loads += world.manager.stats().promoted_loads
    assert num_loads > 100


def test_block_arriving_late_is_not_held(world):
    world.tiers[0].submit_store(-1, [b"a"], [0])
    world.host[0] = world.content(b"a")
    world.end_jobs()
    world.step()
    context = ReqContext()
    assert world.manager.lookup([b"a"], context) is None
    world.step()
    world.clock.now_s += 4.0
    world.step()
    assert world.manager.lookup([b"a"], context) == 0
    world.end_jobs()
    world.step()
    assert world.manager.lookup([b"a"], context) == 1
    world.end_jobs()
    world.step()
    assert world.manager.stats().num_referenced == 0


def test_refused_stores_keep_no_reference(world):
    for tier in world.tiers:
        tier.refuses = True
    world.store(PROMPTS[0])
    assert world.manager.stats().num_referenced == 0
    assert [stats.dropped_blocks for stats in world.manager.tier_stats()] == [4, 4]


@pytest.mark.parametrize("num_done", [0, 1])
def test_failed_load_frees_its_blocks(world, num_done):
    for tier in world.tiers:
        tier.submit_store(-1, [b"a", b"b"], [0, 0])
    world.end_jobs()
    world.step()
    context = ReqContext()
    world.manager.lookup([b"a", b"b"], context)
    world.step()
    # The first tier that holds the blocks loads them.
    (job,) = world.tiers[0].pending + world.tiers[1].pending
    world.tiers[0].get_finished = lambda: [TierResult(job.job_id, job.keys[:num_done], job.keys[num_done:])]
    world.manager.on_schedule_end()
    assert world.manager.lookup([b"a", b"b"], context) == num_done
    assert world.manager.stats().num_free == NUM_BLOCKS - num_done
    assert [stats.dropped_blocks for stats in world.manager.tier_stats()] == [0, 0]


def test_committed_blocks_are_offered_once(world):
    world.manager.prepare_store([b"a", b"b", b"c"])
    world.manager.complete_store([b"a"])
    world.end_jobs()
    world.step()
    # Not again a block that is ready already, nor one that was never reserved or failed.
    world.manager.complete_store([b"a", b"b", b"never"])
    world.manager.complete_store([b"c"], success=False)
    assert [job.keys for tier in world.tiers for job in tier.pending] == [[b"b"], [b"b"]]
    world.end_jobs()
    world.step()
    stats = world.manager.tier_stats()
    assert [(tier.written_blocks, tier.dropped_blocks, tier.num_backlog) for tier in stats] == [(2, 0, 0)] * 2


def test_eviction_for_promotion_drops_unwritten_blocks():
    world = World(write_policy="write_back")
    world.store([b"%d" % i for i in range(NUM_BLOCKS)])
    world.tiers[0].refuses = world.tiers[1].refuses = True
    ManualTier.submit_store(world.tiers[0], -1, [b"a"], [0])
    world.tiers[0].in_use[-1] = []
    world.tiers[0].end(world.tiers[0].pending[-1])
    world.manager.lookup([b"a"], ReqContext())
    before = world.manager.tier_stats()[0].dropped_blocks
    world.tiers[0].refuses = False
    world.step()
    assert [job.is_load for job in world.tiers[0].pending][-1:] == [True]
    assert world.manager.tier_stats()[0].dropped_blocks == before + 1


def test_reset_drops_what_waits_for_tiers(world):
    world.tiers[0].submit_store(-1, [b"x"], [0])
    world.end_jobs()
    world.step()
    world.manager.lookup([b"x"], ReqContext())
    world.step()
    world.store([b"%d" % i for i in range(6)])
    world.manager.touch([b"0"], ReqContext())
    told = []
    world.tiers[0].touch = lambda *args: told.append(args)
    world.reset()
    assert [stats.num_backlog for stats in world.manager.tier_stats()] == [0, 0]
    # A block of before that arrives during the reset is neither kept nor written.
    (load,) = (job for job in world.tiers[0].pending if job.is_load)
    world.tiers[0].end(load)
    world.step()
    assert [stats.num_backlog for stats in world.manager.tier_stats()] == [0, 0]
    world.end_jobs()
    world.step()
    world.step()
    assert told == []
    assert list(world.manager.take_events()) == []
    assert [stats.dropped_blocks for stats in world.manager.tier_stats()] == [0, 0]


@pytest.mark.parametrize("error", ["", "broken"])
def test_foreign_keys_in_report_are_ignored(world, error):
    world.store([b"a", b"b"])
    list(world.manager.take_events())
    (job,) = world.tiers[0].pending
    report = TierResult(job.job_id, [b"a", b"x", b"a"], [b"y", b"b"], error=error)
    world.tiers[0].get_finished = lambda: [report, TierResult(10**7, [b"never"], removed=[b"a"])]
    world.step()
    world.tiers[0].get_finished = list
    events = [(event.medium, event.removed, event.keys) for event in world.manager.take_events()]
    assert events == [("UPPER", False, [b"a"])]
    stats = world.manager.tier_stats()[0]
    assert (stats.written_blocks, stats.dropped_blocks) == (1, 1)
    # Blocks that the tier refused are not offered again.
    assert list(world.manager.controllers[0].backlog.missed) == ([b"b"] if error else [])
    assert world.tiers[0].pending == [job]
