"""Engines over two tiers that refuse, fail, lie, raise, come late and reset badly, in random orders.

No slot is used twice, no reference leaks, no old byte is loaded, nothing reaches the scheduler; while no tier lies,
events name the blocks that are held. Each walk ends in two futures: every job completes, or none ever does. In both,
every request ends.
"""

import random

import numpy as np
import pytest
from engine import Engine
from stores import Clock

from kvcache.block import READY
from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import TierResult

NUM_BLOCKS, DEADLINE_S, MAX_ROUNDS = 8, 4.0, 16
PROMPTS = [[letter.encode() for letter in text] for text in ("abcd", "abef", "ghij", "klm", "gnop")]
KEYS = sorted({key for keys in PROMPTS for key in keys})
# What each method answers in the place of its answer; an empty list: it raises.
NONSENSE = {
    "lookup": [None, -1, 99, "three", 2.0, True, [1]],
    "submit_store": [np.zeros(2), "no"],
    "submit_load": [np.zeros(2), "no"],
    "get_finished": [
        *(None, 7, "ab", [None], [TierResult(12345, [b"a"])], [TierResult(None, ["a"])], [TierResult("one", [b"a"])]),
        *([TierResult(1, [b"zz", b"yy"], [b"zz"]), TierResult(1, [b"zz"])], [TierResult(2, 5)]),
        [TierResult(None, removed=[b"a"])],
    ],
    "stats": [None, 3],
    **{name: [] for name in ("cancel", "reset", "touch", "on_request_finished", "shutdown")},
}


def unruly(name):
    """Return a method of `ManualTier` that at times raises, or answers nonsense; a job is taken all the same."""

    def call(self, *arguments):
        is_job, fails = name.startswith("submit"), self.draw.random() < self.rates.get(name, 0.0)
        if is_job and self.is_refusing:
            return False
        if not fails or is_job:
            answer = getattr(ManualTier, name)(self, *arguments)
            if is_job and answer:
                self.in_use[arguments[0]] = arguments[2]
            elif name == "get_finished":
                for result in answer:
                    del self.in_use[result.job_id]
        if fails:
            answer = self.draw.choice([RuntimeError(name), *NONSENSE[name]])
            if isinstance(answer, Exception):
                raise answer
        return answer

    return call


class UnrulyTier(ManualTier):
    """Refuses on demand; `in_use` has the blocks of jobs not reported, `rates` the share of each method's faults."""

    locals().update({name: unruly(name) for name in NONSENSE})

    def __init__(self, medium, host):
        super().__init__(12, host)
        self.medium, self.in_use, self.is_refusing = medium, {}, False
        self.draw, self.rates = random.Random(medium), {}

    def end_all(self, error=""):
        for job in list(self.pending):
            self.end(job, error)


class Request:
    """One request: it asks, loads, and stores what it computed, each in a step of its own."""

    def __init__(self, keys):
        self.context, self.keys, self.state = ReqContext(), keys, "asks"

    def step(self, world, success=True):
        manager, context, keys = world.manager, self.context, self.keys
        if self.state == "asks":
            num_hits = manager.lookup(keys, context)
            if num_hits is not None:
                self.loaded, self.state = keys[:num_hits], "loads"
                world.check_bytes(self.loaded, manager.prepare_load(self.loaded, context).block_ids)
        elif self.state == "loads":
            # Nothing has written to the slots meanwhile.
            world.check_bytes(self.loaded, [manager.policy.get(key).block_id for key in self.loaded])
            manager.complete_load(self.loaded, context)
            manager.touch(keys, context)
            output = manager.prepare_store(keys, context)
            self.stored, self.state = ([], "over") if output is None else (output.keys_to_store, "stores")
            if self.stored:
                world.fill(self.stored, output.store_spec.block_ids)
        else:
            manager.complete_store(self.stored, context, success)
            self.state = "over"
        if self.state == "over":
            world.end(self)


class World(Engine):
    """Three requests at a time over a manager with two tiers; block contents name the key and the reset before."""

    def __init__(self, seed, **rule):
        self.clock, self.draw, self.epoch = Clock(), random.Random(seed), 0
        self.host = np.zeros((NUM_BLOCKS, 4), np.uint8)
        self.tiers = [UnrulyTier("UPPER", self.host), UnrulyTier("LOWER", self.host)]
        config = TierConfig(deadline_s=3.0, pause_s=2.0, max_failures=2, max_store_blocks=4, **rule)
        pairs = [(tier, config) for tier in self.tiers]
        policy = ("lru", "arc", "gittins")[seed // 3 % 3]
        options = {"enable_events": True, "deadline_s": DEADLINE_S, "clock": self.clock, "cache_policy": policy}
        self.manager = TieredOffloadingManager(16, NUM_BLOCKS, pairs, **options)
        self.requests, self.announced = [], {}

    def content(self, key):
        return np.frombuffer(key * 3 + bytes([self.epoch]), np.uint8)

    def slots_in_use(self):
        return {block_id for tier in self.tiers for ids in tier.in_use.values() for block_id in ids}

    def fill(self, keys, block_ids):
        assert self.slots_in_use().isdisjoint(block_ids)
        super().fill(keys, block_ids)

    def end(self, request):
        self.requests.remove(request)
        self.manager.on_request_finished(request.context)

    def step(self):
        self.manager.on_schedule_end()
        # Each slot that a tier uses is referenced or reserved, or withheld, by the manager.
        assert self.manager.stats().num_free <= NUM_BLOCKS - len(self.slots_in_use())

    def act(self):
        kind, tier = self.draw.random(), self.draw.choice(self.tiers)
        if kind < 0.5:
            if len(self.requests) < 3 and self.draw.random() < 0.3:
                self.requests.append(Request(self.draw.choice(PROMPTS)))
            elif self.requests:
                request = self.draw.choice(self.requests)
                request.step(self, self.draw.random() < 0.9)
                if request.state == "asks" and self.draw.random() < 0.05:
                    self.end(request)
        elif kind < 0.68:
            self.step()
        elif kind < 0.9:
            if tier.pending:
                tier.end(self.draw.choice(tier.pending), "broken" if self.draw.random() < 0.15 else "")
        elif kind < 0.94:
            self.clock.now_s += self.draw.choice((0.5, 1.0, 3.0))
        elif kind < 0.99:
            tier.is_refusing = self.draw.random() < 0.2
            self.manager.tier_stats()
        else:
            self.reset()

    def reset(self):
        # The engine drops its loads and stores before a reset; requests that ask go on.
        for request in [request for request in self.requests if request.state != "asks"]:
            self.end(request)
        self.manager.reset_cache()
        self.epoch += 1
        # There is no event of a reset: a gap in the numbers shows it.
        self.announced.clear()

    def check_events(self):
        """See that events name the blocks of host memory, and those of a tier once its jobs are reported."""
        held = {"CPU": {key for key, state in zip(KEYS, self.manager.pool.states(KEYS), strict=True) if state == READY}}
        for tier in self.tiers:
            if not tier.in_use:
                held[tier.medium] = {key for key in KEYS if ManualTier.lookup(tier, [key])}
        for event in self.manager.take_events():
            known = self.announced.setdefault(event.medium, set())
            assert known.issuperset(event.keys) or not event.removed
            (known.difference_update if event.removed else known.update)(event.keys)
        assert {medium: self.announced.get(medium, set()) for medium in held} == held

    def check_ends(self, is_completing):
        """Play on, and see that all requests end; if jobs complete, before any deadline."""
        for _ in range(MAX_ROUNDS):
            for request in list(self.requests):
                request.step(self)
            for tier in self.tiers if is_completing else ():
                tier.end_all()
            self.step()
            self.clock.now_s += 0 if is_completing else 0.5 * DEADLINE_S
        assert self.requests == []

    def check_nothing_is_left(self):
        """End all jobs, then see that every slot is free or holds an unreferenced block."""
        for _ in range(12):
            self.clock.now_s += 1.0
            for tier in self.tiers:
                tier.end_all()
            self.step()
        stats = self.manager.stats()
        assert (stats.num_referenced, stats.num_pending) == (0, 0)
        assert len(self.manager.prepare_store([b"%d" % i for i in range(NUM_BLOCKS)]).keys_to_store) == NUM_BLOCKS


@pytest.mark.parametrize("is_completing", [True, False])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
def test_random_faults_leave_nothing_behind(write_policy, is_completing):
    num_loads = 0
    for seed in range(3 * len(NONSENSE)):
        world = World(seed, write_policy=write_policy)
        # No faults, some everywhere, or one method that fails for good.
        rates = ({}, dict.fromkeys(NONSENSE, 0.05), {list(NONSENSE)[seed // 3]: 1.0})[seed % 3]
        for step in range(500):
            for tier in world.tiers:
                # The manager pauses a tier that fails all the time.
                tier.rates = rates if step % 100 < 50 else {}
            world.act()
            # Until the last job from before a reset has ended, the pool is as it was.
            if not rates and world.manager._is_open:
                world.check_events()
        for tier in world.tiers:
            tier.is_refusing, tier.rates = False, {}
        world.check_ends(is_completing)
        world.check_nothing_is_left()
        num_loads += world.manager.stats().promoted_loads
        for tier in world.tiers:
            tier.rates = rates
        world.manager.shutdown()
    assert num_loads > 50
