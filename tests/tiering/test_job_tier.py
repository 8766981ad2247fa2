"""JobTier does everything of a tier but the I/O: jobs, refusals, cancelling, reset, quarantine, queries, removals."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from stores import found, load, store_as_is, until, wait_for, wait_for_reset
from stores import store as save

from kvcache import ReqContext, TieredOffloadingManager
from kvcache.tiering.breaker import Direction
from kvcache.tiers.base import existence, job_tier, lifecycle
from kvcache.tiers.base.catalog import SlotCatalog
from kvcache.tiers.base.existence import ExistenceCache
from kvcache.tiers.base.io_threads import LOAD, QUERY, STORE, STORE_TURN, IOThreads
from kvcache.tiers.base.job_tier import BlockOutcome, JobTier, TierContents
from kvcache.tiers.memory import MemoryTier

BLOCK_BYTES = 8
NUM_HOST = 32


class Store:
    """What survives a tier: a medium that keeps its own index, where a test can intervene."""

    def __init__(self):
        self.values = {}
        self.gate = threading.Event()
        self.gate.set()
        self.num_begun = 0
        self.queries = []
        self.fail = {}

    def hold(self, submit):
        """Close the gate, and submit a job that a thread begins."""
        self.gate.clear()
        before = self.num_begun
        submit()
        until(lambda: self.num_begun > before)

    def enter(self, name):
        self.num_begun += 1
        self.gate.wait()
        if name in self.fail:
            raise self.fail[name]


class StoreTier(JobTier):
    """Keep blocks in a `Store`; with `slots` it has an index of its own."""

    def __init__(self, store, host, slots=None, found=(), **options):
        self.store = store
        self.found = found
        self.slots = slots
        super().__init__(host, "STORE", **options)

    def open(self):
        self.store.enter("open")
        if self.slots is None:
            return None
        return TierContents(self.slots, list(self.found), range(len(self.found)))

    def exists(self, keys):
        self.store.enter("exists")
        self.store.queries.append(keys)
        return [key in self.store.values for key in keys]

    def put(self, batch):
        self.store.enter("put")
        for key, buffer in zip(batch.keys, batch.buffers, strict=True):
            self.store.values[key] = bytes(buffer)

    def get(self, batch):
        self.store.enter("get")
        outcomes = []
        for key, buffer in zip(batch.keys, batch.buffers, strict=True):
            value = self.store.values.get(key)
            if value is None:
                outcomes.append(BlockOutcome.ABSENT)
            elif value == b"bad":
                outcomes.append(BlockOutcome.CORRUPT)
            else:
                buffer[:] = value
                outcomes.append(BlockOutcome.DONE)
        return outcomes

    def get_now(self, slots, keys, buffers):
        return [True] * len(keys)

    def clear(self, generation):
        self.store.enter("clear")
        self.store.values.clear()


@pytest.fixture
def host():
    return np.zeros((NUM_HOST, BLOCK_BYTES), np.uint8)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def make(store, host, monkeypatch):
    monkeypatch.setattr(job_tier, "_SHUTDOWN_S", 0.3)
    made = []

    def make_one(**options):
        made.append(StoreTier(store, host, **{"query_deadline_s": 60.0, **options}))
        return made[-1]

    yield make_one
    store.gate.set()
    for tier in made:
        tier.shutdown()


def keys_of(text):
    return [letter.encode() for letter in text]


def ended(tier, *job_ids):
    """Wait for jobs; return their results."""
    results = {}

    def are_over():
        results.update((result.job_id, result) for result in tier.get_finished())
        return set(job_ids) <= results.keys()

    until(are_over)
    return [results[job_id] for job_id in job_ids]


@pytest.mark.parametrize("slots", [None, 8])
def test_corrupt_block_is_absent_until_stored(make, host, store, slots):
    tier = make(slots=slots, absent_s=1e-6)
    save(tier, keys_of("abc"))
    store.values[b"a"] = b"bad"
    del store.values[b"c"]
    assert found(tier, keys_of("abc")) == 3
    result = load(tier, keys_of("abc"))
    assert (result.done, result.failed, result.removed, result.error) == ([b"b"], keys_of("ac"), keys_of("ac"), "")
    assert [found(tier, [key]) for key in keys_of("abc")] == [0, 1, 0]
    assert (tier.stats().missed_blocks, tier.stats().corrupt_blocks) == (1, 1)
    assert save(tier, keys_of("a"), 3).done == [b"a"]
    assert found(tier, keys_of("ab")) == 2


def test_delete_waits_until_erased(make, store):
    tier, erased = make(slots=8), []
    save(tier, keys_of("abc"))
    tier.erase = lambda slots: (store.enter("erase"), erased.extend(slots))
    store.gate.clear()
    assert tier.delete(keys_of("ax"), timeout_s=0.01) == [b"a"]
    threading.Timer(0.02, store.gate.set).start()
    assert tier.delete(keys_of("b"), timeout_s=60) == [b"b"]
    assert erased == [0, 1]


def test_no_slot_is_erased_beside_reset(make, store):
    # Blocks of after the reset may get the slots of deleted ones at any time.
    tier, erased, is_over = make(slots=8), [], threading.Event()
    tier.erase = erased.extend
    save(tier, keys_of("abc"))
    tier.get = lambda batch: is_over.wait() and []
    tier.submit_load(9, keys_of("c"), [0])
    tier.delete(keys_of("ab"))
    tier.reset()
    assert tier._life.maintain(60)
    is_over.set()
    wait_for_reset(tier)
    assert (tier._life.maintain(60), erased) == (True, [])


@pytest.mark.parametrize("slots", [None, 8])
def test_removal_without_a_job_is_reported(make, host, slots):
    tier = make(slots=slots)
    save(tier, keys_of("ab"))
    assert found(tier, keys_of("ab")) == 2
    tier.report_removed(keys_of("ax"))
    (result,) = tier.get_finished()
    assert (result.job_id, result.done, result.removed) == (None, [], [b"a"])
    assert found(tier, keys_of("b")) == 1
    assert tier.lookup([b"a"]) == 0


def test_raising_batch_fails_keeps_held_blocks(make, host, store):
    tier = make(slots=8)
    save(tier, keys_of("ab"))
    store.fail["get"] = OSError("the cable")
    result = load(tier, keys_of("ab"))
    assert (result.done, result.failed, result.removed) == ([], keys_of("ab"), [])
    assert result.error == "OSError: the cable"
    assert tier.lookup(keys_of("ab")) == 2
    assert (tier.stats().io_errors, tier.stats().last_error) == (1, "OSError: the cable")
    # The first batch of a job fails, the last one does not.
    tier = make(slots=8, num_threads=1, max_batch_blocks=1)
    tier.put = lambda batch: [][0] if batch.keys == [b"a"] else None
    result = store_as_is(tier, keys_of("ab"))
    assert (result.done, result.failed, result.error) == ([b"b"], [b"a"], "IndexError: list index out of range")


@pytest.mark.parametrize("outcomes", [[0], [0, 9], [0, None], 7, [0, 0, 0]])
def test_lying_subclass_fails_the_batch(make, host, outcomes):
    tier = make(slots=8)
    tier.put = lambda batch: outcomes
    result = store_as_is(tier, keys_of("ab"))
    assert (result.done, result.failed, bool(result.error)) == ([], keys_of("ab"), True)
    assert tier.lookup(keys_of("ab")) == 0


def test_thread_survives_anything_raised(make, host):
    tier = make(slots=8, num_threads=1)
    tier.put = lambda batch: (_ for _ in ()).throw(SystemExit(3))
    assert store_as_is(tier, [b"a"]).error == "SystemExit: 3"
    del tier.put
    before_s = time.monotonic()
    result = save(tier, keys_of("a"), 2)
    assert result.done == [b"a"]
    assert before_s <= result.start_s <= result.end_s <= time.monotonic()


def test_full_queue_is_refused_and_counted(make, host, store):
    tier = make(slots=8, max_queued_blocks=2)
    store.gate.clear()
    assert tier.submit_store(1, keys_of("ab"), [0, 1])
    assert not tier.submit_store(2, keys_of("c"), [2])
    assert not tier.submit_load(3, keys_of("c"), [2])
    with pytest.raises(ValueError, match="job 1 is still under way"):
        tier.submit_load(1, [], [])
    assert tier.stats().refused_blocks == 2
    store.gate.set()
    wait_for(tier, 1)
    assert tier.submit_store(4, keys_of("c"), [2])


def test_long_key_fails_without_an_error(make, host):
    tier = make(slots=8, max_key_bytes=2)
    assert store_as_is(tier, [b"a", b"long"]).failed == [b"long"]
    tier.put = lambda batch: [BlockOutcome.REFUSED] * len(batch.keys)
    result = store_as_is(tier, [b"c"], 2)
    assert (result.failed, result.error) == ([b"c"], "")
    assert tier.stats().refused_blocks == 2
    assert tier.lookup([b"c"]) == 0


def test_cancelled_waiting_batches_fail_at_once(make, host, store):
    tier = make(slots=16, num_threads=1, max_batch_blocks=1)
    save(tier, keys_of("ab"))
    store.hold(lambda: tier.submit_store(2, [b"c"], [2]))
    tier.submit_load(3, keys_of("ab"), [5, 6])
    tier.submit_store(4, keys_of("de"), [3, 4])
    for job_id in (2, 3, 4, 99):
        tier.cancel(job_id)
    results = ended(tier, 3, 4)
    assert [(result.done, result.error) for result in results] == [([], ""), ([], "")]
    assert [sorted(result.failed) for result in results] == [keys_of("ab"), keys_of("de")]
    assert tier.stats().unavailable_reason == ""
    store.gate.set()
    assert wait_for(tier, 2).done == [b"c"]
    time.sleep(0.02)
    assert tier.get_finished() == []
    assert store.values.keys() == {b"a", b"b", b"c"}
    assert save(tier, keys_of("de"), 5).done == keys_of("de")


def test_loads_overtake_waiting_stores(make, host, store):
    tier = make(slots=32, num_threads=1, max_batch_blocks=1)
    save(tier, keys_of("a"))
    store.hold(lambda: tier.submit_store(2, [b"b"], [1]))
    order = []
    tier.on_stored = tier.on_loaded = lambda batch: order.extend(batch.keys)
    tier.submit_store(3, [b"c"], [2])
    tier.submit_load(4, [b"a"], [3])
    store.gate.set()
    ended(tier, 2, 3, 4)
    assert order == [b"b", b"a", b"c"]


@pytest.mark.parametrize("slots", [None, 8])
def test_reset_waits_for_older_jobs(make, host, store, slots):
    tier = make(slots=slots, num_threads=1)
    save(tier, keys_of("ab"))
    assert tier.load_now(keys_of("ab"), [[], []]) == (keys_of("ab") if slots else [])
    hung, used = threading.Event(), []
    tier.on_used = lambda *use: used.append(use)
    tier.get = lambda batch: hung.wait() and None
    tier.submit_load(2, keys_of("ab"), [5, 6])
    until(lambda: not tier._jobs.under_way[2].moves[0]._unclaimed)
    tier.submit_store(5, [b"d"], [1])
    is_marked_first = []
    tier.mark_reset = lambda: time.sleep(0.02) or is_marked_first.append(bool(store.values))
    tier.reset()
    until(lambda: not store.values)
    time.sleep(0.01)
    assert is_marked_first == [True]
    # A job that no thread has begun ends at once.
    assert [(result.job_id, result.failed) for result in tier.get_finished()] == [(5, [b"d"])]
    assert tier.lookup(keys_of("ab")) == 0
    assert not tier.submit_store(3, [b"c"], [0])
    assert (tier.pin([b"a"]), tier.load_now([b"a"], [[]]), tier.delete([b"a"])) == ([], [], [])
    tier.touch([b"a"])
    assert (used, tier.stats().unavailable_reason) == ([], "reset under way")
    hung.set()
    wait_for(tier, 2)
    wait_for_reset(tier)
    assert found(tier, keys_of("ab")) == 0
    assert save(tier, keys_of("c"), 4).done == [b"c"]
    tier.get_now = lambda *_: (tier.reset(), wait_for_reset(tier))
    assert tier.load_now([b"c"], [[]]) == []


def test_failed_reset_serves_nothing_until_retried(make, host, store, monkeypatch):
    monkeypatch.setattr(lifecycle, "RETRY_S", 0.005)
    tier = make(slots=8)
    save(tier, keys_of("ab"))
    store.fail["clear"] = OSError("read-only")
    tier.reset()
    until(lambda: tier.get_finished() == [] and "read-only" in tier.stats().unavailable_reason)
    assert tier.stats().unavailable_reason == "reset failed: OSError: read-only"
    assert tier.lookup(keys_of("ab")) == 0
    assert not tier.submit_load(2, [b"a"], [0])
    store.fail.clear()
    wait_for_reset(tier)
    assert tier.lookup(keys_of("ab")) == 0
    assert save(tier, keys_of("ab"), 3).done == keys_of("ab")


def test_store_before_reset_does_not_count(make, host, store):
    tier = make(num_threads=1)
    store.hold(lambda: tier.submit_store(1, [b"a"], [0]))
    tier.reset()
    store.gate.set()
    wait_for(tier, 1)
    wait_for_reset(tier)
    assert tier.stats().num_held == 0


def test_counters_survive_a_reset(make, host, store):
    tier, seqs = make(slots=2), []
    tier.on_stored = lambda batch: seqs.extend(batch.seqs)
    save(tier, keys_of("ab"), 1)
    save(tier, keys_of("cd"), 2)
    before = tier.stats()
    assert before.evicted_blocks == 2
    for _ in range(2):
        tier.reset()
        wait_for_reset(tier)
        after = tier.stats()
        assert (after.num_held, after.evicted_blocks, after.stored_blocks) == (0, 2, 4)
    save(tier, keys_of("ab"), 3)
    save(tier, keys_of("c"), 4)
    assert tier.stats().evicted_blocks == 3
    assert seqs == sorted(set(seqs))


def test_error_of_open_becomes_the_reason(make, host, store):
    store.fail["open"] = OSError("no such server")
    with pytest.raises(OSError, match="no such server"):
        make(slots=8)
    store.gate.clear()
    tier = make(slots=8, open_timeout_s=0.01)
    store.gate.set()
    until(lambda: tier.stats().unavailable_reason == "opening failed: OSError: no such server")
    assert tier.lookup([b"a"]) == 0


def test_tier_opening_after_shutdown_is_shut(make, store):
    store.gate.clear()
    tier, closed = make(slots=8, open_timeout_s=0.01), []
    tier.close = lambda: closed.append(True)
    tier.reset()
    tier.shutdown()
    store.gate.set()
    until(lambda: closed)
    tier.get_finished()
    tier.reset()
    assert (tier.generation, tier.stats().unavailable_reason) == (1, "shut down")


def test_failed_start_closes_medium_once(make, host, store, monkeypatch):
    closed = []
    monkeypatch.setattr(StoreTier, "close", lambda tier: closed.append(tier))
    with pytest.raises(ValueError, match="are not one slot for each"):
        make(slots=1, found=keys_of("ab"))
    assert len(closed) == 1
    until(lambda: not any(thread.name.startswith("store-") for thread in threading.enumerate()))
    tier = make(slots=4)
    store.hold(lambda: tier.submit_store(1, [b"a"], [0]))
    tier.shutdown()
    assert len(closed) == 1
    store.gate.set()
    until(lambda: len(closed) == 2)


def test_blocks_at_start_are_announced_once(make, store, monkeypatch):
    monkeypatch.setattr(job_tier, "MAX_STEP_BLOCKS", 3)
    tier = make(slots=5, found=keys_of("abcde"))
    assert [(result.job_id, result.done) for result in tier.get_finished()] == [(None, keys_of("abc"))]
    save(tier, keys_of("fghij"))
    reported = [result for _ in range(3) for result in tier.get_finished()]
    assert [key for result in reported if result.job_id is None for key in result.done] == []
    tier = make(slots=5, found=keys_of("abcde"))
    store.gate.clear()
    tier.reset()
    assert tier.get_finished() == []


def test_existence_is_asked_once_in_batches(make, store):
    store.values.update({b"a": b"", b"b": b""})
    tier = make(absent_s=10.0)
    assert tier.lookup(keys_of("abc")) is None
    assert tier.lookup(keys_of("abc")) is None
    assert found(tier, keys_of("abc")) == 2
    assert found(tier, keys_of("bca")) == 1
    assert store.queries == [keys_of("abc")]


def test_hung_existence_query_counts_as_absent(make, store):
    store.values[b"a"] = b""
    tier = make(query_deadline_s=0.02)
    store.gate.clear()
    assert tier.lookup([b"a"]) is None
    time.sleep(0.03)
    assert tier.lookup([b"a"]) == 0
    store.gate.set()
    until(lambda: tier.get_finished() == [] and tier.lookup([b"a"]) == 1)


@pytest.mark.parametrize("answer", [OSError("gone"), [True], None])
def test_failed_existence_query_counts_as_absent(make, store, answer):
    tier = make(absent_s=10.0)

    def exists(keys):
        if isinstance(answer, OSError):
            raise answer
        return answer

    tier.exists = exists
    assert found(tier, keys_of("ab")) == 0
    assert tier.stats().io_errors == 1


def test_existence_is_remembered_within_bounds(monkeypatch):
    cache = ExistenceCache(held_s=10, absent_s=1, deadline_s=5, max_keys=3)
    cache.learn(keys_of("ab"), True, 0.0)
    cache.learn(keys_of("c"), False, 0.0)
    assert cache.count_held(keys_of("abc"), 0.5) == (2, [], False)
    assert cache.count_held(keys_of("abc"), 1.5) == (3, [b"c"], False)
    assert cache.count_held(keys_of("abc"), 11) == (3, keys_of("abc"), False)
    cache.learn(keys_of("def"), True, 20.0)
    assert cache.num_held == 3
    assert cache.count_held(keys_of("a"), 20.0) == (1, [b"a"], False)
    monkeypatch.setattr(existence, "_MAX_ASKED_KEYS", 2)
    cache.ask(keys_of("xy"), 20.0)
    assert cache.count_held(keys_of("dxyz"), 20.0) == (3, [], True)
    cache.answer([b"x"], [True], 20.0)
    assert [cache.count_held([b"x"], 99.0) for _ in range(2)] == [(1, [], False), (1, [b"x"], False)]


def test_index_refuses_bad_contents():
    with pytest.raises(ValueError, match="2 keys share slots"):
        SlotCatalog(4, "lru", keys_of("ab"), [1, 1])
    with pytest.raises(ValueError, match="2 keys in 1 slots of 4"):
        SlotCatalog(4, "lru", keys_of("ab"), [1])


def test_memory_tier_comes_from_a_configuration(host):
    tier = MemoryTier.from_config({"capacity": 64, "cache_policy": "arc"}, host, {})
    try:
        assert tier.stats().num_blocks == 8
    finally:
        tier.shutdown()
    with pytest.raises(ValueError, match="unknown options of a memory tier: path"):
        MemoryTier.from_config({"path": "x"}, host, {})
    with pytest.raises(ValueError, match="a memory tier needs 'capacity'"):
        MemoryTier.from_config({}, host, {})
    with pytest.raises(ValueError, match=r"memory tier: spede; known ones: capacity, cache_policy, num_threads"):
        MemoryTier.from_config({"capacity": 64, "spede": 1}, host, {})


@pytest.mark.parametrize("name", ["cut", "on_stored", "on_loaded", "on_used", "mark_reset", "maintain", "close"])
def test_raising_hook_costs_no_job(make, host, name):
    tier = make(slots=4)
    setattr(tier, name, lambda *args: (_ for _ in ()).throw(RuntimeError("bug")))
    for job_id, text in enumerate(("abcd", "efgh", "ab"), 1):
        assert save(tier, keys_of(text), job_id).done == keys_of(text)
        tier.touch(keys_of(text))
        assert load(tier, keys_of(text)).done == keys_of(text)
    tier.reset()
    wait_for_reset(tier)
    assert save(tier, keys_of("abcd"), 20).done
    tier.shutdown()
    if name != "maintain":
        assert tier.stats().last_error == f"{name}: RuntimeError: bug"


@pytest.mark.parametrize("groups", [[[0], [0, 1]], [[0]], [[0, 1, 2]], 5, [3], [["a"]]])
def test_incomplete_cut_is_replaced(make, host, groups):
    tier = make(slots=4)
    tier.cut = lambda slots, num_blocks: groups
    assert save(tier, keys_of("ab")).done == keys_of("ab")


def test_manager_sends_what_tier_takes():
    keys = [bytes([number]) * 8 for number in range(12)]
    store = Store()
    for warm in (False, True):
        host = np.zeros((NUM_HOST, BLOCK_BYTES), np.uint8)
        tier = StoreTier(store, host, max_queued_blocks=3)
        manager = TieredOffloadingManager(16, NUM_HOST, [tier])
        context = ReqContext()
        end_s = time.monotonic() + 30
        while (num_found := manager.lookup(keys, context)) is None:
            assert time.monotonic() < end_s
            manager.on_schedule_end()
        assert num_found == (12 if warm else 0)
        if not warm:
            manager.prepare_store(keys, context)
            manager.complete_store(keys, context)
        assert manager.settle()
        (stats,) = manager.tier_stats()
        assert (stats.tier.refused_blocks, stats.dropped_blocks, stats.failed_jobs) == (0, 0, 0)
        assert (stats.promoted_blocks, stats.tier.stored_blocks) == ((12, 0) if warm else (0, 12))
        manager.shutdown()


def test_breaker_opens_half_opens_and_closes():
    breaker = Direction("reads", 1, max_failures=2, pause_s=10.0)
    assert (breaker.state, breaker.allows(0.0)) == ("closed", True)
    assert not breaker.record_failure(0.0)
    breaker.record_success()
    assert not breaker.record_failure(0.0)
    assert breaker.record_failure(1.0)
    assert (breaker.state, breaker.allows(10.9), breaker.allows(11.0)) == ("open", False, True)
    breaker.record_sent()
    assert (breaker.state, breaker.allows(12.0)) == ("half_open", False)
    assert not breaker.record_failure(12.0)
    assert (breaker.state, breaker.allows(21.9)) == ("open", False)
    breaker.record_sent()
    breaker.record_success()
    assert (breaker.state, breaker.allows(12.0)) == ("closed", True)
    at_once = Direction("reads", 1, max_failures=9, pause_s=1.0)
    assert at_once.record_failure(0.0, at_once=True)
    at_once.record_sent()
    assert not at_once.record_failure(2.0)
    assert (at_once.state, at_once.allows(2.5)) == ("open", False)


def order_of(*tasks):
    """Return the order in which one thread takes tasks that wait for it."""
    gate, order = threading.Event(), []
    threads = IOThreads(1, "test")
    threads.submit(SimpleNamespace(run=gate.wait, error=""), QUERY)
    for name, priority in tasks:
        threads.submit(SimpleNamespace(run=partial(order.append, name), error=""), priority)
    gate.set()
    assert threads.close(30)
    return order


def test_queries_precede_loads_precede_stores():
    assert order_of(("store", STORE), ("load", LOAD), ("query", QUERY)) == ["query", "load", "store"]


def test_endless_loads_do_not_starve_store():
    loads = [(f"load {i}", LOAD) for i in range(3 * STORE_TURN)]
    assert order_of(("store", STORE), *loads).index("store") < STORE_TURN
