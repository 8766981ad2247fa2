"""A manager with tiers is never seen, or left, half done: other threads and finalizers run between its calls only."""

import contextlib
import gc
import random
from concurrent.futures import ThreadPoolExecutor
from threading import RLock

import numpy as np
import pytest

from kvcache import BlockStateError, ReqContext, TieredOffloadingManager
from kvcache.tiers.memory import MemoryOptions, MemoryTier

NUM_BLOCKS = 16
LOADING = RLock()


def open_manager(policy="lru"):
    host_blocks = np.zeros((NUM_BLOCKS, 64), np.uint8)
    tier = MemoryTier(MemoryOptions(4 * host_blocks.nbytes), host_blocks)
    return TieredOffloadingManager(16, NUM_BLOCKS, [tier], policy)


def act(manager, draw):
    """Serve a request; between two calls, another thread may evict what the first one found."""
    keys = [b"key-%d" % draw.randrange(6 * NUM_BLOCKS) for _ in range(draw.randint(1, 5))]
    context = ReqContext()
    num_hits = manager.lookup(keys, context) or 0
    # An engine drops its loads before a reset: `complete_load` after it would release a reference of a new job.
    with LOADING, contextlib.suppress(KeyError, BlockStateError):
        manager.prepare_load(keys[:num_hits], context)
        manager.complete_load(keys[:num_hits], context)
    output = manager.prepare_store(keys, context)
    if output is not None:
        manager.complete_store(output.keys_to_store, context, draw.random() < 0.9)
    manager.touch(keys, context)
    if draw.random() < 0.01:
        with LOADING:
            manager.reset_cache()
    manager.on_request_finished(context)
    manager.on_schedule_end()


def check_idle(manager):
    """Fail if a reference or a reservation is left once all jobs have ended."""
    assert manager.settle()
    assert (manager.pool.num_referenced, manager.pool.num_pending) == (0, 0)
    manager.policy.check()
    manager.shutdown()


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_calls_of_threads_leave_no_reference(policy):
    manager = open_manager(policy)

    def run(seed):
        draw = random.Random(seed)
        for _ in range(300):
            act(manager, draw)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(run, seed) for seed in range(4)]:
            done.result()
    check_idle(manager)


def test_finalizers_run_between_manager_calls():
    manager = open_manager()
    draw = random.Random(0)
    num_run = 0

    class Finalizer:
        def __init__(self):
            self.me = self

        def __del__(self):
            nonlocal num_run
            num_run += 1
            context = ReqContext()
            manager.lookup([b"key-1", b"key-2"], context)
            manager.touch([b"key-1"], context)
            manager.on_request_finished(context)  # it may hold blocks that it waits for

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Finalizer()
            act(manager, draw)
    finally:
        gc.set_threshold(*before)
    assert num_run
    check_idle(manager)


def test_call_inside_a_call_is_refused():
    manager = open_manager()
    refused = []

    def clock():
        with contextlib.suppress(BlockStateError):
            manager.touch([b"key"])
            return 0.0
        refused.append(True)
        return 0.0

    manager.clock = clock
    manager.on_schedule_end()
    assert refused
    manager.shutdown()
