"""Threads that call every operation at once, with and without a GIL: no slot serves two keys, and none is lost.

A block has one writer between `prepare_store` and `complete_store`, and no writer while a thread loads it. Each thread
writes its keys into the blocks that it stores, and checks the blocks that it loads. So the test detects two
threads that got the same slot. When all threads have ended, it checks the manager's counts of blocks and references.
"""

import gc
import random
import threading

import pytest

from kvcache import BlockStateError, CPUOffloadingManager, ReqContext, Retention
from kvcache.control.reuse_filter import ReuseFilter
from kvcache.registry import POLICIES
from kvcache.testing.reference import ReferenceLRU

NUM_THREADS = 4
NUM_BLOCKS = 48
KEYS = [b"%028d\0\0\0\0" % i for i in range(160)]


class Slots:
    """The content and the current writer of each slot."""

    def __init__(self):
        self.content = [None] * NUM_BLOCKS
        self.lock = threading.RLock()  # reentrant: a finalizer may run while its thread holds the lock
        self.writers = {}

    def begin(self, block_ids, writer):
        with self.lock:
            for block_id in block_ids:
                assert block_id not in self.writers, f"slot {block_id} was given to two writers"
                self.writers[block_id] = writer

    def end(self, block_ids, keys):
        with self.lock:
            for block_id, key in zip(block_ids, keys, strict=True):
                self.content[block_id] = key
                del self.writers[block_id]

    def check(self, block_ids, keys):
        with self.lock:
            for block_id, key in zip(block_ids, keys, strict=True):
                assert block_id not in self.writers, f"slot {block_id} is written while it is loaded"
                assert self.content[block_id] == key, f"slot {block_id} holds {self.content[block_id]}, not {key}"


class Requests:
    """Random requests to one manager, from any thread."""

    def __init__(self, policy, **options):
        self.manager = CPUOffloadingManager(16, NUM_BLOCKS, policy, enable_events=True, **options)
        self.may_decline = policy == "gittins"
        self.slots = Slots()
        self.shared_context = ReqContext("shared")
        self.resident = set()

    def __call__(self, rng):
        manager = self.manager
        start, n = rng.randrange(len(KEYS) - 12), rng.randrange(1, 12)
        keys = KEYS[start : start + n]
        retention = rng.choice([None, None, Retention("end")])
        context = rng.choice([None, self.shared_context, ReqContext(str(start), retention=retention)])
        num_hits = manager.lookup(keys, context)
        self.load(keys[:num_hits], context)
        if rng.random() < 0.3:
            manager.touch(keys, context)
        self.store(keys, context, rng.random() < 0.8)
        manager.lookup(rng.choice(KEYS), context)
        operations = ["touch", "events", "stats", "get", "finish", "lists", "status", "reorder", "locate"]
        for operation in rng.sample(operations, 4):
            self.other(operation, rng, context)
        if context is not None and context is not self.shared_context:
            manager.on_request_finished(context)

    def load(self, keys, context):
        manager = self.manager
        try:
            block_ids = manager.prepare_load(keys, context).block_ids.tolist()
        except (KeyError, BlockStateError):
            return  # evicted since the look-up
        self.slots.check(block_ids, keys)
        assert all(manager.policy.get(key).ref_cnt > 0 for key in keys)
        self.slots.check(block_ids, keys)
        manager.complete_load(keys, context)

    def store(self, keys, context, success):
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return
        block_ids = output.store_spec.block_ids.tolist()
        self.slots.begin(block_ids, threading.get_ident())
        self.slots.end(block_ids, output.keys_to_store)
        self.manager.complete_store(output.keys_to_store, context, success)

    def other(self, operation, rng, context):
        manager = self.manager
        if operation == "touch":
            manager.touch(rng.choices(KEYS, k=5), context)
        elif operation == "events":
            for event in manager.take_events():
                assert all(key in KEYS for key in event.keys)
        elif operation == "stats":
            stats = manager.stats()
            assert 0 <= stats.num_free <= NUM_BLOCKS
        elif operation == "finish":
            manager.on_request_finished(self.shared_context)
        elif operation == "get":
            block = manager.policy.get(rng.choice(KEYS))
            if block is not None:
                try:
                    assert 0 <= block.block_id < NUM_BLOCKS
                    assert block.ref_cnt >= -1
                except BlockStateError:
                    pass  # evicted meanwhile
        elif operation == "lists":
            for name in ("t1", "t2", "b1", "b2"):
                blocks = getattr(manager.policy, name, ())
                assert len(blocks) <= 2 * NUM_BLOCKS
                rng.choice(KEYS) in blocks  # noqa: B015
        elif operation == "status":
            assert manager.status(rng.choice(KEYS)) in (0, 1, 2)
            assert set(manager.states(KEYS)) <= {0, 1, 2}
        elif operation == "reorder" and context is not None:
            manager.reorder(context)
        elif operation == "locate":
            block_ids = [block_id for block_id in manager.locate(KEYS) if block_id >= 0]
            assert len(set(block_ids)) == len(block_ids)

    def check(self):
        """Check the invariants that hold while no thread runs."""
        manager = self.manager
        manager.on_request_finished(self.shared_context)
        stats = manager.stats()
        assert (stats.num_referenced, stats.num_pending) == (0, 0)
        found = {key: block for key in KEYS if (block := manager.policy.get(key)) is not None}
        assert all(block.ref_cnt == 0 for block in found.values())
        block_ids = [block.block_id for block in found.values()]
        assert len(set(block_ids)) == len(block_ids) == NUM_BLOCKS - stats.num_free
        self.slots.check(block_ids, found)
        if self.may_decline:
            # Such a policy may decline new blocks and keep more valuable ones.
            manager.reset_cache()
            found = {}
        # Every slot can be allocated once more: no slot is lost or duplicated.
        fresh = [b"fresh%027d" % i for i in range(NUM_BLOCKS)]
        output = manager.prepare_store(fresh)
        assert sorted(output.store_spec.block_ids.tolist()) == list(range(NUM_BLOCKS))
        assert sorted(output.evicted_keys) == sorted(found)
        manager.complete_store(fresh, success=False)
        manager.reset_cache()
        assert manager.stats().num_free == NUM_BLOCKS


@pytest.mark.parametrize("policy", [*POLICIES.names(), ReferenceLRU])
def test_no_slot_serves_two_keys(policy, run_threads, budget):
    requests = Requests(policy, store_threshold=0)
    run_threads([requests] * NUM_THREADS, 4 * budget)
    requests.check()


@pytest.mark.parametrize("policy", [*POLICIES.names(), ReferenceLRU])
def test_slots_stay_unique_beside_finalizers(policy, run_threads, budget):
    requests = Requests(policy)
    busy = threading.local()

    class Finalized:
        """Part of a reference cycle: the garbage collector runs its finalizer, which calls the manager."""

        def __init__(self):
            self.me = self

        def __del__(self):
            if not getattr(busy, "is_set", False):
                busy.is_set = True
                try:
                    requests(random.Random(id(self)))
                finally:
                    busy.is_set = False

    def litter(rng):
        Finalized()
        requests(rng)

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        run_threads([litter] * 2, 2 * budget)
    finally:
        gc.set_threshold(*before)
        busy.is_set = True
        gc.collect()
    requests.check()


@pytest.mark.parametrize("policy", POLICIES.names())
def test_policy_alone_serves_many_threads(policy, run_threads, budget):
    from kvcache import BlockStatus

    alone = POLICIES.resolve(policy)(NUM_BLOCKS)
    lock = threading.Lock()
    next_id = iter(range(1 << 60))

    def use(rng):
        key = rng.choice(KEYS)
        alone.touch(rng.choices(KEYS, k=4))
        alone.get(rng.choice(KEYS))
        with lock:  # looking up and inserting are two calls
            if alone.get(key) is None:
                if sum(alone.get(k) is not None for k in KEYS) >= NUM_BLOCKS:
                    victims = alone.evict(2, {key})
                    assert victims is not None
                    assert len({victim for victim, _ in victims}) == 2
                block = BlockStatus(next(next_id))
                block.ref_cnt = 0
                alone.insert(key, block)
            elif rng.random() < 0.2:
                alone.remove(key)

    run_threads([use] * NUM_THREADS, 2 * budget)
    assert sum(alone.get(key) is not None for key in KEYS) <= NUM_BLOCKS


def test_reuse_filter_counts_with_many_threads(run_threads, budget):
    reuse_filter = ReuseFilter(3, 64)

    def offer(rng):
        keys = rng.choices(KEYS, k=8)
        assert len(reuse_filter.admit(keys)) == 8
        if rng.random() < 0.01:
            reuse_filter.clear()

    run_threads([offer] * NUM_THREADS, 2 * budget)
