"""Events match look-ups: a look-up hits every block that was announced as stored, and no block announced as removed.

Checked after every step, with resets, failed stores, and tiers that fail, reject and evict. Without tiers, the events
are compared with those of the reference (`kvcache.testing.machine`).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache import MemoryTier, ReqContext, TierConfig, TieredOffloadingManager
from kvcache.tiers.memory import MemoryOptions

KEYS = [b"block %2d" % number + bytes(4) for number in range(14)]
BLOCK_BYTES = 8
runs = st.tuples(st.integers(0, 10), st.integers(1, 7)).map(lambda run: KEYS[run[0] : run[0] + run[1]])


class MoodyTier(MemoryTier):
    """A tier that fails and rejects jobs on demand."""

    fails_get = fails_put = refuses = False

    def get(self, batch):
        if self.fails_get:
            raise OSError("cannot read")
        return super().get(batch)

    def put(self, batch):
        if self.fails_put:
            raise OSError("cannot write")
        return super().put(batch)

    def submit_store(self, job_id, keys, block_ids):
        return not self.refuses and super().submit_store(job_id, keys, block_ids)


class AnnouncedMachine(RuleBasedStateMachine):
    """Compare a router's view, built from events alone, with look-ups of every key."""

    @initialize(num_blocks=st.integers(1, 9), tier_blocks=st.integers(1, 12))
    def start(self, num_blocks, tier_blocks):
        self.tier = MoodyTier(
            MemoryOptions(tier_blocks * BLOCK_BYTES**2), np.zeros((num_blocks, BLOCK_BYTES), np.uint8)
        )
        rule = TierConfig(write_policy=self.write_policy, max_failures=2, pause_s=1e-6, deadline_s=30)
        self.manager = TieredOffloadingManager(16, num_blocks, [(self.tier, rule)], self.policy, True)
        self.view = {}
        self.loading = []

    def teardown(self):
        if hasattr(self, "manager"):
            self.manager.shutdown()

    @rule(keys=runs, success=st.booleans(), with_request=st.booleans())
    def store(self, keys, success, with_request):
        context = ReqContext() if with_request else None
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            # A written block is announced when it becomes ready, not earlier.
            self.look_up_all()
            self.manager.complete_store(output.keys_to_store, context, success)
        if context is not None:
            self.manager.on_request_finished(context)

    @rule(keys=runs, stays=st.booleans())
    def load(self, keys, stays):
        context = ReqContext()
        num_hits = self.manager.lookup(keys, context)
        if num_hits is None:
            self.settle()
            num_hits = self.manager.lookup(keys, context) or 0
        loaded = keys[:num_hits]
        self.manager.prepare_load(loaded, context)
        if stays:
            self.loading.append(loaded)
        else:
            self.manager.complete_load(loaded, context)
        self.manager.on_request_finished(context)

    @rule()
    def end_loads(self):
        for keys in self.loading:
            self.manager.complete_load(keys)
        self.loading.clear()

    @rule(keys=runs)
    def touch(self, keys):
        self.manager.touch(keys)

    @rule()
    def reset(self):
        self.end_loads()
        self.manager.reset_cache()
        # The manager records no event for a reset; a gap in the numbers shows it.
        self.view.clear()

    @rule(fails_get=st.booleans(), fails_put=st.booleans(), refuses=st.booleans())
    def change_mood(self, fails_get, fails_put, refuses):
        self.tier.fails_get, self.tier.fails_put, self.tier.refuses = fails_get, fails_put, refuses

    @invariant()
    def look_up_all(self):
        if not hasattr(self, "manager"):
            return
        self.settle()
        for event in self.manager.take_events():
            held = self.view.setdefault(event.medium, set())
            for key in event.keys:
                if event.removed:
                    assert key in held, f"{key!r} was announced removed from {event.medium}, and never stored"
                    held.remove(key)
                else:
                    held.add(key)
        in_memory, below = self.view.get("CPU", set()), self.view.get("MEMORY", set())
        is_read = self.manager.tier_stats()[0].reads != "open"
        for key in KEYS:
            context = ReqContext()
            answer = self.manager.lookup(key, context)
            self.manager.on_request_finished(context)
            if key in in_memory:
                assert answer is True, f"{key!r} is announced in memory, and look-up answers {answer}"
            elif key not in below:
                assert answer is False, f"{key!r} is not announced, and look-up answers {answer}"
            elif is_read:
                assert answer is None, f"{key!r} is announced in the tier, and look-up answers {answer}"

    def settle(self):
        assert self.manager.settle(30)


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
def test_announced_tier_blocks_can_be_loaded(policy, write_policy):
    machine = type("Machine", (AnnouncedMachine,), {"policy": policy, "write_policy": write_policy}).TestCase
    machine.settings = settings(max_examples=40, stateful_step_count=25)
    machine("runTest").runTest()
