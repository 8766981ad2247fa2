"""No scheduler call does more than a step's work, however many blocks are under way and wherever they lie.

Work is counted, or timed by the thread's own CPU time in ratios of one run, so a loaded machine changes nothing.
"""

import time

import numpy as np
import pytest

from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering import controller as controller_module
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS


class CountingTier(ManualTier):
    """Counts the keys of each call."""

    keys_asked = num_lookups = largest_job = keys_loaded = 0

    def lookup(self, keys):
        self.num_lookups += 1
        self.keys_asked += len(keys)
        return super().lookup(keys)

    def submit_load(self, job_id, keys, block_ids):
        self.largest_job = max(self.largest_job, len(keys))
        self.keys_loaded += len(keys)
        return super().submit_load(job_id, keys, block_ids)


def world(num_keys, in_host, num_tiers=1):
    """Return a manager that holds the blocks for which `in_host` is true in host memory, the others in tiers."""
    tiers = [CountingTier(4 * num_keys, is_automatic=True) for _ in range(num_tiers)]
    pairs = [(tier, TierConfig(max_store_blocks=4096)) for tier in tiers]
    manager = TieredOffloadingManager(16, 2 * num_keys + 100, pairs, deadline_s=1000.0)
    keys = [b"%08d" % i for i in range(num_keys)]
    for i, tier in enumerate(tiers):
        tier.submit_store(-1, keys[i::num_tiers], [0] * len(keys[i::num_tiers]))
        tier.get_finished()
    host = [key for i, key in enumerate(keys) if in_host(i)]
    if host:
        manager.complete_store(manager.prepare_store(host).keys_to_store)
    assert manager.settle()
    return manager, tiers, keys


def served(manager, keys):
    """Look keys up until they are there; return the answer, the steps, and the CPU time of all calls."""
    context, steps = ReqContext(), 0
    start_s = time.thread_time()
    while (found := manager.lookup(keys, context)) is None:
        manager.on_schedule_end()
        steps += 1
    time_s = time.thread_time() - start_s
    manager.on_request_finished(context)
    return found, steps, time_s


@pytest.mark.parametrize("num_tiers", [1, 2])
@pytest.mark.parametrize("in_host", [lambda i: False, lambda i: i % 2 == 0, lambda i: i % 100 < 50])
def test_lookup_asks_tier_in_few_calls(in_host, num_tiers):
    manager, tiers, keys = world(6000, in_host, num_tiers)
    for tier in tiers:
        tier.keys_asked = tier.num_lookups = 0
    assert manager.lookup(keys, ReqContext()) is None
    assert sum(tier.num_lookups for tier in tiers) <= 65
    if num_tiers == 1:
        assert tiers[0].keys_asked <= MAX_STEP_BLOCKS
    assert served(manager, keys)[0] == 6000


def test_lookup_of_alternating_blocks_is_linear():
    def per_key_s(num_keys):
        manager, _, keys = world(num_keys, lambda i: i % 2 == 0)
        found, steps, time_s = served(manager, keys)
        assert found == num_keys
        return time_s / steps / num_keys

    # Each step looks at the whole prefix once: a step's time a key must not grow.
    assert min(per_key_s(12_000) for _ in range(3)) < 3 * min(per_key_s(3_000) for _ in range(3))


def test_step_of_large_promotion_is_bounded():
    manager, (tier,), keys = world(10 * MAX_STEP_BLOCKS, lambda i: False)
    prompts = {ReqContext(): keys[first::2] for first in range(2)}
    while None in [manager.lookup(prompt, context) for context, prompt in prompts.items()]:
        before = tier.keys_loaded
        manager.on_schedule_end()
        assert tier.keys_loaded - before <= MAX_STEP_BLOCKS
    assert tier.largest_job <= MAX_STEP_BLOCKS
    assert tier.keys_loaded == len(keys)


def test_tier_results_are_processed_in_steps(monkeypatch):
    monkeypatch.setattr(controller_module, "MAX_STEP_BLOCKS", 4)
    tier = ManualTier(100)
    manager = TieredOffloadingManager(16, 100, [(tier, TierConfig(max_store_blocks=64))])
    for i in range(20):
        manager.complete_store(manager.prepare_store([b"%d" % i]).keys_to_store)
        manager.on_schedule_end()
    for job in list(tier.pending):
        tier.end(job)
    (controller,) = manager.controllers
    assert len(controller.get_finished(4, 0.0)) == 2
    assert controller.has_reports
    assert manager.has_pending_work()


@pytest.mark.parametrize("num_tiers", [1, 2])
@pytest.mark.parametrize("num_blocks", [2, 3, 4, 16, 64])
def test_hung_tiers_never_take_whole_pool(num_blocks, num_tiers):
    clock = [0.0]
    host = np.zeros((num_blocks, 8), np.uint8)
    tiers = [ManualTier(1000, host) for _ in range(num_tiers)]
    config = TierConfig(max_store_blocks=1000, pause_s=1.0)
    manager = TieredOffloadingManager(16, num_blocks, [(tier, config) for tier in tiers], clock=lambda: clock[0])
    for first, tier in enumerate(tiers):
        keys = [b"below-%d" % i for i in range(first, 66, num_tiers)]
        tier.submit_store(-1, keys, [0] * len(keys))
        tier.end(tier.pending[0])
    for number in range(200):
        clock[0] += 0.5
        context = ReqContext()
        manager.lookup([b"below-%d" % (number % 64 + i) for i in range(2)], context)
        manager.on_schedule_end()
        manager.on_request_finished(context)
        output = manager.prepare_store([b"new-%d" % number])
        assert output is not None, f"no block left at step {number}: {manager.stats()}"
        manager.complete_store(output.keys_to_store)
    stats = manager.stats()
    assert stats.num_pending + stats.num_referenced <= max(1, 3 * num_blocks // 4) < num_blocks


@pytest.mark.parametrize("is_load", [True, False])
def test_job_past_its_deadline_is_cancelled(is_load):
    clock = [0.0]
    tier = ManualTier(10)
    cancelled = []
    tier.cancel = cancelled.append
    manager = TieredOffloadingManager(16, 8, [(tier, TierConfig(deadline_s=2.0))], clock=lambda: clock[0])
    if is_load:
        tier.submit_store(-1, [b"a"], [0])
        tier.end(tier.pending[0])
        manager.lookup([b"a"], ReqContext())
    else:
        manager.complete_store(manager.prepare_store([b"a"]).keys_to_store)
    manager.on_schedule_end()
    manager.on_schedule_end()
    clock[0] = 2.0
    for _ in range(3):
        manager.on_schedule_end()
    assert cancelled == [job.job_id for job in tier.pending]


def test_tier_uses_are_sent_in_steps():
    manager, (tier,), keys = world(2 * MAX_STEP_BLOCKS + 10, lambda i: True)
    told = []
    tier.touch = lambda keys, req_context=None: told.append(keys)
    tier.on_request_finished = told.append
    context = ReqContext()
    manager.prepare_load(keys[:1])
    manager.touch(keys, context)
    manager.on_request_finished(context)
    assert told == []
    steps = 0
    while manager.has_pending_work():
        before = len(told)
        manager.on_schedule_end()
        steps += 1
        assert len(told) - before <= 2
    assert told == [keys[:1], keys[MAX_STEP_BLOCKS + 10 :], keys[10 : MAX_STEP_BLOCKS + 10], keys[:10], context]
    assert steps == 3
