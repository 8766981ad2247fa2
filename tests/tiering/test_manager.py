"""The manager of a host pool with tiers below it, call by call; `test_faulty_tiers.py` has random orders of them."""

import time

import numpy as np
import pytest
from engine import Engine
from stores import Clock

from kvcache.block import BlockState, BlockStateError
from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering import promotion
from kvcache.tiering.controller import HostBudget, JobState, TierConfig, TierController, TierJob
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS, TierResult


class Bench(Engine):
    """A manager over one hand-driven tier."""

    def __init__(self, num_blocks=3, num_tier_blocks=4, lower=(), **rule):
        self.clock = Clock()
        options = {name: rule.pop(name) for name in ("cache_policy", "deadline_s") if name in rule}
        self.host = np.zeros((num_blocks, 8), np.uint8)
        self.tier = ManualTier(num_tier_blocks, self.host)
        self.manager = TieredOffloadingManager(
            16, num_blocks, [(self.tier, TierConfig(**rule)), *lower], enable_events=True, clock=self.clock, **options
        )

    def store(self, *keys, context=None):
        output = super().store(list(keys), context)
        assert output is not None
        return output

    def step(self, *, error=""):
        """End every job of the tier, and then the scheduler's step; return the keys of the jobs that it sends."""
        for job in list(self.tier.pending):
            self.tier.end(job, error)
        self.manager.on_schedule_end()
        return [job.keys for job in self.tier.pending]

    def report(self, *results):
        """End the step in which the tier reports these results."""
        self.tier.get_finished = lambda: list(results)
        self.manager.on_schedule_end()
        del self.tier.get_finished

    def on_tier(self, *keys):
        """Bring keys to the tier and out of host memory."""
        for key in keys:
            self.store(key)
            self.step()
        output = self.manager.prepare_store([b"filler%d" % i for i in range(len(self.host))])
        self.manager.complete_store(output.keys_to_store, None, False)
        return self

    def ask(self, *keys, context=None):
        """Look keys up, and end the scheduler's step."""
        answer = self.manager.lookup(list(keys), context or ReqContext())
        self.manager.on_schedule_end()
        return answer

    def asked(self, key, context):
        """Return the answers about one block: whether it is ready, and its status."""
        return self.manager.lookup(key, context), self.manager.status(key, context)

    def jobs(self):
        return [(job.is_load, job.keys) for job in self.tier.pending]

    def bytes_of(self, key, context=None):
        (block_id,) = self.manager.prepare_load([key], context).block_ids
        value = self.host[block_id].tobytes().rstrip()
        self.manager.complete_load([key], context)
        return value

    def stats(self):
        return self.manager.tier_stats()[0]

    def events(self):
        return [(event.medium, event.removed, event.keys) for event in self.manager.take_events()]


def keys_of(text):
    return [letter.encode() for letter in text]


def test_stored_block_reaches_tier_stays_readable():
    bench = Bench()
    bench.store(b"a")
    assert bench.jobs() == [(False, [b"a"])]
    assert bench.manager.lookup(b"a") is True
    assert bench.bytes_of(b"a") == b"a"
    assert bench.manager.stats().num_referenced == 1
    bench.clock.now_s += 2.0
    bench.step()
    assert bench.tier.lookup([b"a"]) == 1
    assert bench.manager.stats().num_referenced == 0
    assert bench.stats().write_seconds.sum == 2.0
    assert bench.events() == [("CPU", False, [b"a"]), ("MANUAL", False, [b"a"])]


def test_promoted_block_is_held_until_loaded():
    bench = Bench().on_tier(b"a")
    context = ReqContext()
    assert bench.asked(b"a", context) == (None, 1)
    assert bench.jobs() == []
    bench.manager.on_schedule_end()
    assert bench.jobs() == [(True, [b"a"])]
    # The engine cannot make a block ready that a tier reads into.
    bench.manager.complete_store([b"a"])
    assert bench.asked(b"a", context) == (None, 1)
    with pytest.raises(BlockStateError):
        bench.manager.prepare_load([b"a"])
    bench.step()
    assert bench.asked(b"a", context) == (True, 2)
    assert bench.manager.prepare_store(keys_of("xyz")) is None
    assert bench.bytes_of(b"a", context) == b"a"
    assert bench.manager.prepare_store(keys_of("xyz")) is not None
    assert bench.stats().promoted_blocks == 1


def test_absent_block_is_coming_once_stored():
    bench, context = Bench(), ReqContext()
    assert bench.asked(b"a", context) == (False, 0)
    bench.manager.prepare_store([b"a"])
    assert bench.asked(b"a", context) == (False, 1)
    bench.tier.lookup = lambda keys: None
    assert bench.manager.status(b"other", context) == 3
    bench.manager.complete_store([b"a"])
    assert bench.manager.lookup(key=b"a") is True
    with pytest.raises(ValueError, match="req_context must be a ReqContext or None, got 'nonsense'"):
        bench.manager.lookup(b"a", "nonsense")


@pytest.mark.parametrize("at_once", [True, False])
def test_run_over_media_is_one_job(at_once):
    bench = Bench(num_blocks=4).on_tier(b"a", b"b")
    bench.store(b"c")
    bench.step()
    context = ReqContext()
    for asked in [keys_of("abcx")] if at_once else keys_of("ab"):
        assert bench.manager.lookup(asked, context) is None
    bench.manager.on_schedule_end()
    assert bench.jobs() == [(True, keys_of("ab"))]
    bench.step()
    assert bench.manager.lookup(keys_of("abcx"), context) == 3


@pytest.mark.parametrize("in_one_step", [True, False])
def test_two_requests_share_one_promotion(in_one_step):
    bench = Bench(num_blocks=4).on_tier(b"a")
    first, second = ReqContext("1"), ReqContext("2")
    assert (bench.manager.lookup(b"a", first) if in_one_step else bench.ask(b"a", context=first)) is None
    assert bench.manager.lookup(b"a", second) is None
    # No request waits for blocks behind an absent one.
    assert bench.manager.lookup(keys_of("xa"), ReqContext()) == 0
    bench.manager.on_schedule_end()
    bench.step()
    assert bench.jobs() == []
    assert bench.manager.policy.get(b"a").ref_cnt == 2
    bench.manager.prepare_load([b"a"], first)
    assert bench.manager.policy.get(b"a").ref_cnt == 2
    bench.manager.on_request_finished(second)
    assert bench.manager.policy.get(b"a").ref_cnt == 1


def test_lookup_without_request_holds_nothing():
    bench = Bench().on_tier(b"a")
    assert bench.manager.lookup([b"a"]) is None
    bench.manager.on_schedule_end()
    bench.step()
    assert (bench.manager.lookup([b"a"]), bench.manager.stats().num_referenced) == (1, 0)


def test_other_prompts_lookup_holds_its_prefix():
    bench, context = Bench(num_blocks=4).on_tier(b"c"), ReqContext()
    bench.store(b"a", b"b")
    bench.step()
    for head in keys_of("ab"):
        assert bench.ask(head, b"c", context=context) is None
        assert bench.manager.policy.get(head).ref_cnt == 1


def test_promotion_too_large_is_cut():
    bench = Bench(num_blocks=2, num_tier_blocks=4).on_tier(*keys_of("ab"))
    bench.store(b"p")
    bench.step()
    bench.manager.prepare_load([b"p"])
    context = ReqContext()
    assert bench.ask(*keys_of("ab"), context=context) is None
    bench.step()
    assert bench.manager.lookup(keys_of("ab"), context) == 1
    bench.manager.prepare_load([b"a"], context)
    assert bench.manager.stats().promoted_loads == 1


@pytest.mark.parametrize(("error", "num_ready"), [("broken", 0), ("", 1)])
def test_failed_promotion_leaves_nothing(error, num_ready):
    bench = Bench(deadline_s=2.0).on_tier(b"a")
    context = ReqContext()
    bench.ask(b"a", context=context)
    bench.step(error=error)
    assert bench.manager.lookup([b"a"], context) == num_ready
    assert (bench.manager.stats().num_pending, bench.manager.stats().num_referenced) == (0, num_ready)
    stats = bench.stats()
    assert (stats.failed_jobs, stats.dropped_blocks) == (1 - num_ready, 0)
    bench.clock.now_s += 2
    bench.manager.on_schedule_end()
    assert bench.manager.stats().num_referenced == 0


@pytest.mark.parametrize(("error", "arbiter"), [("", True), ("half of it", True), ("", False)])
def test_half_failed_load_brings_half(error, arbiter):
    bench, context = Bench(8, arbiter=arbiter).on_tier(b"a", b"b"), ReqContext()
    bench.ask(b"a", b"b", context=context)
    bench.clock.now_s += 1
    (job,) = bench.tier.pending
    bench.report(TierResult(job.job_id, [b"a"], [b"b"], error=error))
    # It teaches a rate only if nothing failed.
    assert (bench.stats().load_blocks_per_s > 0) == (arbiter and not error)
    assert arbiter or bench.manager.lookup([b"a", b"b"], context) == 1
    assert (bench.manager.stats().num_pending, bench.stats().dropped_blocks) == (0, 0)


def test_lost_promotion_is_miss_after_deadline():
    bench = Bench(deadline_s=2.0, arbiter=True).on_tier(b"a")
    context = ReqContext()
    bench.ask(b"a", context=context)
    bench.clock.now_s += 1.9
    assert bench.manager.lookup(b"a", context) is None
    bench.clock.now_s += 0.2
    assert bench.manager.lookup(b"a", context) is False
    bench.clock.now_s += 10
    bench.manager.on_schedule_end()
    assert bench.manager.lookup(b"a", ReqContext()) is False
    assert bench.manager.stats().num_pending == 1
    stats = bench.stats()
    assert (stats.overdue_jobs, stats.stuck_blocks, stats.reads, stats.writes) == (1, 1, "open", "closed")
    # Nothing keeps the engine awake for a job that hangs, and no load waits behind it.
    assert bench.manager.controllers[0].link.load_s(0, bench.clock.now_s) == 0
    assert not bench.manager.has_pending_work()
    bench.manager.on_request_finished(context)
    waits = bench.manager.parts()[-2].stats.wait_seconds
    assert (waits.count, waits.sum) == (1, 2.0)
    bench.step()
    assert bench.manager.stats().num_pending == 0
    assert bench.manager.lookup(b"a", ReqContext()) is True
    assert bench.bytes_of(b"a") == b"a"


def test_block_arriving_late_is_not_held():
    bench, context = Bench(deadline_s=2.0).on_tier(b"a"), ReqContext()
    bench.ask(b"a", context=context)
    bench.clock.now_s += 2.0
    assert bench.ask(b"a", context=context) == 0
    bench.step()
    assert (bench.manager.lookup([b"a"], context), bench.manager.stats().num_referenced) == (1, 0)


def test_half_open_tier_gets_one_load(monkeypatch):
    monkeypatch.setattr(promotion, "MAX_JOB_BLOCKS", 1)
    bench, other = Bench(num_blocks=8, max_failures=1, pause_s=1.0).on_tier(*keys_of("abc")), ReqContext()
    bench.ask(*keys_of("ab"))
    bench.step(error="broken")
    bench.clock.now_s += 1
    assert [bench.manager.lookup(keys_of("ab"), ReqContext()), bench.ask(b"c", context=other)] == [None, None]
    assert (bench.jobs(), bench.manager.stats().num_pending) == ([(True, [b"a"])], 1)
    bench.step()
    # A request tries a key once.
    assert bench.ask(b"c", context=other) == 0


def test_slow_tier_counts_dropped_stores():
    bench = Bench(max_store_blocks=1)
    bench.store(*keys_of("abc"))
    assert bench.jobs() == [(False, [b"c"])]
    bench.store(*keys_of("de"))
    bench.step()
    assert bench.jobs() == [(False, [b"e"])]
    bench.step()
    assert bench.stats().dropped_blocks == 2


def test_breaker_tries_one_job_after_failures(caplog):
    caplog.set_level("INFO", "kvcache")
    bench = Bench(max_failures=2, pause_s=10.0, num_tier_blocks=8)
    for key in keys_of("ab"):
        bench.store(key)
        bench.step(error="no space")
    bench.store(b"c")
    assert bench.jobs() == []
    stats = bench.stats()
    assert (stats.writes, stats.reads, stats.dropped_blocks) == ("open", "closed", 3)
    bench.clock.now_s += 10
    bench.store(b"d")
    bench.store(b"e")
    assert bench.jobs() == [(False, [b"d"])]
    assert bench.stats().writes == "half_open"
    bench.step()
    assert bench.stats().writes == "closed"
    paused, resumed = caplog.records
    assert (paused.levelname, resumed.levelname) == ("WARNING", "INFO")
    assert "writes paused for 10.0 s: no space" in paused.getMessage()
    assert resumed.getMessage() == "tier MANUAL: writes resumed"


@pytest.mark.parametrize("num_uses", [1, 3])
def test_nth_use_writes_block(num_uses):
    bench = Bench(write_policy="write_through_selective", num_uses=num_uses)
    first, later = ReqContext(), ReqContext()
    bench.manager.prepare_store([b"a"], first)
    bench.manager.on_schedule_end()
    bench.manager.complete_store([b"a"])
    bench.manager.touch([b"a"], first)
    for number in range(1, 4):
        assert bench.jobs() == ([(False, [b"a"])] if number >= num_uses else [])
        bench.manager.touch([b"a"], later)
        bench.manager.on_request_finished(later)
        bench.manager.on_schedule_end()
    assert bench.stats().dropped_blocks == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_reset_counts_requests_uses_afresh(is_open):
    bench = Bench(write_policy="write_through_selective", num_uses=2)
    context = ReqContext()
    bench.store(b"a", context=context)
    bench.manager.reset_cache()
    bench.store(b"a", context=ReqContext())
    assert bench.jobs() == []
    bench.manager.touch([b"a"], context if is_open else ReqContext())
    bench.manager.on_schedule_end()
    assert bench.jobs() == [(False, [b"a"])]


def test_uses_of_gone_blocks_are_forgotten():
    num_blocks = 20_000
    manager = TieredOffloadingManager(
        16, num_blocks, [(ManualTier(8), TierConfig(write_policy="write_through_selective", num_uses=9))]
    )
    times_s = []
    for step in range(60):
        keys = [b"%d-%d" % (step, i) for i in range(2000)]
        start = time.thread_time()
        manager.prepare_store(keys, ReqContext())
        times_s.append(time.thread_time() - start)
        manager.complete_store(keys)
    assert sum(times_s[40:]) < 5 * sum(times_s[:20]), times_s


def served(bench, text):
    """Store a request's blocks; at its end they are ordered so that the prefix's tail leaves first."""
    context = ReqContext()
    bench.store(*keys_of(text), context=context)
    bench.manager.on_request_finished(context)


def test_oldest_blocks_are_written_before_eviction():
    bench = Bench(num_blocks=4, write_policy="write_back")
    served(bench, "abc")
    bench.step()
    assert (bench.jobs(), bench.tier.stats().stored_blocks) == ([], 0)
    served(bench, "d")
    assert bench.jobs() == [(False, [b"c"])]
    assert bench.manager.lookup(b"c") is True
    bench.step()
    bench.manager.touch([b"b"], ReqContext())
    served(bench, "e")
    assert ("CPU", True, [b"c"]) in bench.events()
    assert bench.tier.lookup([b"c"]) == 1
    assert bench.jobs() == [(False, [b"a"])]
    assert bench.stats().dropped_blocks == 0


def test_burst_that_loses_blocks_is_foreseen():
    bench = Bench(num_blocks=8, num_tier_blocks=64, write_policy="write_back", max_store_blocks=8)
    served(bench, "abcdefgh")
    bench.step()
    served(bench, "ijkl")
    assert bench.stats().dropped_blocks == 2
    for burst in ("mnop", "qrst", "uvwx"):
        bench.step()
        served(bench, burst)
    assert bench.stats().dropped_blocks == 2


def test_reset_is_empty_before_jobs_end():
    bench = Bench(num_blocks=8).on_tier(b"a")
    bench.ask(b"a")
    bench.store(b"b")
    assert bench.manager.prepare_store([b"d"]).keys_to_store == [b"d"]
    bench.manager.reset_cache()
    assert bench.events() == []
    bench.manager.complete_store([b"d"])
    assert [bench.manager.lookup(b"b", context) for context in (None, ReqContext())] == [False, False]
    assert bench.manager.lookup(keys_of("ab"), ReqContext()) == 0
    assert bench.manager.prepare_store([b"c"]) is None
    with pytest.raises(KeyError):
        bench.manager.prepare_load([b"b"])
    bench.step()
    assert (bench.events(), bench.tier.lookup([b"d"])) == ([], 0)
    output = bench.manager.prepare_store(keys_of("cde"))
    assert output.store_spec.block_ids.tolist() == [0, 1, 2]
    assert bench.manager.lookup(b"a", ReqContext()) is False


@pytest.mark.parametrize("is_load", [True, False])
def test_reset_does_not_await_hung_tier(is_load):
    bench = Bench().on_tier(b"a")
    if is_load:
        bench.manager.lookup(b"a", ReqContext())
    else:
        bench.store(b"b")
    bench.manager.on_schedule_end()
    (job,) = bench.tier.pending
    bench.manager.reset_cache()
    assert bench.manager.prepare_store([b"c"]) is None
    bench.clock.now_s += 5
    bench.manager.on_schedule_end()
    assert bench.manager.lookup(keys_of("ab"), ReqContext()) == 0
    assert bench.manager.prepare_store(keys_of("cde")) is None
    output = bench.manager.prepare_store(keys_of("cd"))
    assert sorted([*output.store_spec.block_ids.tolist(), *job.block_ids]) == [0, 1, 2]
    bench.manager.complete_store(keys_of("cd"))
    for other in bench.tier.pending[1:]:
        bench.tier.end(other)
    bench.manager.reset_cache()
    bench.manager.on_schedule_end()
    output = bench.manager.prepare_store(keys_of("fg"))
    assert sorted([*output.store_spec.block_ids.tolist(), *job.block_ids]) == [0, 1, 2]
    bench.manager.complete_store(keys_of("fg"))
    bench.events()
    bench.step()
    bench.step()
    assert bench.manager.lookup(keys_of("fgab"), ReqContext()) == 2
    assert not {key for _, _, keys in bench.events() for key in keys}.intersection(keys_of("abcd"))
    assert bench.manager.prepare_store(keys_of("h")).evicted_keys == []
    stats = bench.manager.stats()
    assert (stats.num_pending, stats.num_referenced, stats.num_free) == (1, 0, 0)


def test_second_tier_is_asked_next():
    clock = Clock()
    upper, lower = ManualTier(1, is_automatic=True), ManualTier(8, is_automatic=True)
    lower.medium = "LOWER"
    manager = TieredOffloadingManager(16, 3, [upper, lower], enable_events=True, clock=clock)
    for key in keys_of("abcdef"):
        output = manager.prepare_store([key])
        manager.complete_store(output.keys_to_store)
        manager.on_schedule_end()
        manager.on_schedule_end()
    events = [(event.medium, event.removed, event.keys) for event in manager.take_events()]
    assert ("MANUAL", True, [b"a"]) in events
    assert ("LOWER", False, [b"a"]) in events
    context = ReqContext()
    assert manager.lookup(b"a", context) is None
    assert manager.settle(5)
    assert manager.lookup(b"a", context) is True
    assert upper.lookup([b"a"]) == 1
    assert [stats.promoted_blocks for stats in manager.tier_stats()] == [0, 1]


def test_bad_arguments_name_the_value():
    with pytest.raises(ValueError, match=r"tiers must be Tier or \(Tier, TierConfig\), got \('disk',"):
        TieredOffloadingManager(16, 3, ["disk"])
    with pytest.raises(ValueError, match=r"deadline_s must be a number of seconds > 0 .*, got 0"):
        TieredOffloadingManager(16, 3, [], deadline_s=0)
    known = "write_through, write_back, write_through_selective"
    with pytest.raises(ValueError, match=f"write_policy must be one of {known}, got 'never'"):
        TierConfig(write_policy="never")
    with pytest.raises(ValueError, match=r"num_uses must be a whole number >= 1, .* got 0"):
        TierConfig(num_uses=0)
    with pytest.raises(ValueError, match=r"pause_s must be a number of seconds > 0 .* got -1"):
        TierConfig(pause_s=-1)
    with pytest.raises(ValueError, match="keys must be an iterable of keys"):
        TieredOffloadingManager(16, 3, []).lookup("abc")


def test_tiers_own_changes_are_events():
    bench = Bench()
    bench.report(TierResult(None, keys_of("ab")), TierResult(77, [b"c"]), TierResult(None, removed=[b"a"]))
    assert bench.events() == [("MANUAL", False, keys_of("ab")), ("MANUAL", True, keys_of("a"))]
    # A reset drops those that wait for a later step.
    bench.report(TierResult(None, [b"%d" % i for i in range(2000)]), TierResult(None, [b"c"]))
    bench.manager.reset_cache()
    bench.manager.on_schedule_end()
    assert bench.events() == []


def test_reset_withholds_only_overdue_slots():
    """Its cost is that of the job, not of the pool: no slot is reserved to keep the others apart."""
    bench = Bench(num_blocks=1000, num_tier_blocks=2000, max_store_blocks=3)
    bench.store(*(b"%d" % i for i in range(1000)))
    (job,) = bench.tier.pending
    bench.clock.now_s += 5
    bench.manager.on_schedule_end()
    asked = []
    for name in ("reserve", "abort"):
        method = getattr(bench.manager.pool, name)
        setattr(bench.manager.pool, name, lambda *args, method=method, **kw: asked.append(args) or method(*args, **kw))
    bench.manager.reset_cache()
    assert asked == []
    assert bench.manager.stats().num_free == 997
    output = bench.manager.prepare_store([b"new-%d" % i for i in range(997)])
    assert set(output.store_spec.block_ids.tolist()).isdisjoint(job.block_ids)
    bench.tier.end(job)
    bench.manager.on_schedule_end()
    assert bench.manager.stats().num_free == 3


def test_promotion_under_gittins_is_no_use():
    bench = Bench(4, 16, cache_policy="gittins")
    policy = bench.manager.policy
    bench.store(b"a", b"b", context=ReqContext())
    bench.step()
    bench.clock.now_s += 3600.0
    assert bench.store(*keys_of("wxyz"), context=ReqContext()).evicted_keys == [b"b", b"a"]
    bench.step()
    bench.clock.now_s += 3600.0
    context = ReqContext()
    assert bench.ask(b"a", b"b", context=context) is None
    bench.step()
    assert bench.manager.lookup([b"a", b"b"], context) == 2
    assert policy.touches == 2
    bench.manager.prepare_load([b"a", b"b"], context)
    bench.manager.complete_load([b"a", b"b"], context)
    assert policy.touches == 3
    policy.check()


@pytest.mark.parametrize("looks_up", ["lookup", "status"])
def test_arrived_block_next_lookup_is_ready(looks_up):
    bench, context = Bench().on_tier(*keys_of("ab")), ReqContext()
    bench.ask(*keys_of("ab"), context=context)
    look_up = getattr(bench.manager, looks_up)
    assert look_up(b"a", context) == (None if looks_up == "lookup" else 1)
    bench.manager.on_schedule_end()
    bench.tier.end(bench.tier.pending[0])
    # Without the end of a step in between.
    assert look_up(b"a", context) == (True if looks_up == "lookup" else 2)


@pytest.mark.parametrize(("seconds", "deadline_s"), [(0, 9.0), (3, 2.0), (6, 9.0)])
def test_overdue_block_is_not_coming(seconds, deadline_s):
    bench, context = Bench(deadline_s=deadline_s).on_tier(*keys_of("ab")), ReqContext()
    bench.ask(*keys_of("ab"), context=context)
    assert bench.jobs() == [(True, [b"a"])]
    if not seconds:
        bench.manager.reset_cache()
    else:
        bench.clock.now_s += seconds
        bench.manager.on_schedule_end()
        assert bench.manager.policy.get(b"a") is not None
    assert bench.manager.lookup(b"a", context) is False
    assert bench.manager.status(b"a", context) == 0
    bench.step()
    assert bench.jobs() == []


def test_job_states_follow_one_another():
    controller = TierController(ManualTier(9), TierConfig(deadline_s=5.0), 9, 1, HostBudget(9))
    job = TierJob(1, controller, False, [b"a"], [0], 5.0)
    states = [job.state]
    # A clock may begin at 0.
    assert controller.send(job, 0.0)
    for now_s in (0.0, 5.0):
        states.append(job.state)
        controller.give_up_overdue(now_s)
    assert [*states, job.state] == [JobState.UNSENT, JobState.SENT, JobState.SENT, JobState.OVERDUE]
    assert job.is_overdue


def test_refused_stores_keep_no_reference():
    bench = Bench(4)
    bench.tier.submit_store = lambda *_: False
    bench.store(*keys_of("abcd"))
    assert (bench.manager.stats().num_referenced, bench.stats().dropped_blocks) == (0, 4)


def test_committed_blocks_are_offered_once():
    bench = Bench()
    bench.manager.prepare_store(keys_of("abc"))
    bench.manager.complete_store([b"a"])
    bench.step()
    # Not again a block that is ready already, nor one that was never reserved or failed.
    bench.manager.complete_store([b"a", b"b", b"never"])
    bench.manager.complete_store([b"c"], success=False)
    assert bench.jobs() == [(False, [b"b"])]
    bench.step()
    assert (bench.stats().written_blocks, bench.stats().dropped_blocks, bench.stats().num_backlog) == (2, 0, 0)


def test_eviction_for_promotion_drops_unwritten_blocks():
    bench, take = Bench(8, 12, write_policy="write_back"), ManualTier.submit_store
    bench.tier.submit_store = lambda *_: False
    bench.store(*keys_of("12345678"))
    take(bench.tier, -1, [b"a"], [0])
    bench.step()
    before = bench.stats().dropped_blocks
    del bench.tier.submit_store
    assert bench.ask(b"a") is None
    assert (True, [b"a"]) in bench.jobs()
    assert bench.stats().dropped_blocks == before + 1


def test_reset_drops_what_waits_for_tiers():
    lower = ManualTier(12, is_automatic=True)
    bench, told = Bench(8, 12, lower=[lower]).on_tier(b"x"), []
    lower._is_automatic = False
    bench.ask(b"x")
    bench.store(*keys_of("012345"))
    bench.manager.touch([b"0"], ReqContext())
    bench.tier.touch = lambda *args: told.append(args)
    bench.manager.reset_cache()
    # A block of before that arrives during the reset is neither kept nor written.
    (load,) = (job for job in bench.tier.pending if job.is_load)
    for _ in range(3):
        assert {(stats.num_backlog, stats.dropped_blocks) for stats in bench.manager.tier_stats()} == {(0, 0)}
        bench.tier.end(load) if load in bench.tier.pending else bench.step()
        bench.manager.on_schedule_end()
    assert (told, bench.events()) == ([], [])


@pytest.mark.parametrize("error", ["", "broken"])
def test_foreign_keys_in_report_are_ignored(error):
    bench = Bench()
    bench.store(b"a", b"b")
    bench.events()
    (job,) = bench.tier.pending
    report = TierResult(job.job_id, [b"a", b"x", b"a"], [b"y", b"b"], error=error)
    bench.report(report, TierResult(10**7, [b"never"], removed=[b"a"]))
    assert bench.events() == [("MANUAL", False, [b"a"])]
    assert (bench.stats().written_blocks, bench.stats().dropped_blocks) == (1, 1)
    # Blocks that the tier refused are not offered again.
    assert list(bench.manager.controllers[0].backlog.missed) == ([b"b"] if error else [])
    assert bench.tier.pending == [job]


def test_raising_reset_serves_nothing():
    bench, attempts = Bench(pause_s=2.0).on_tier(b"a"), []
    inner, bench.tier.reset = bench.tier.reset, lambda *_: attempts.append(1) or 1 / 0
    bench.manager.reset_cache()
    for _ in range(10):
        assert bench.ask(b"a") == 0
        bench.clock.now_s += 0.5
    assert len(attempts) == 3
    assert "reset failed: reset raised" in bench.stats().tier.unavailable_reason
    bench.tier.reset = inner
    bench.clock.now_s += 2
    bench.step()
    assert bench.tier.lookup([b"a"]) == 0
    bench.store(b"a")
    bench.step()
    assert bench.tier.lookup([b"a"]) == 1


@pytest.mark.parametrize("answer", [-2, 5, 2.0, True, "2", [2]])
def test_impossible_lookup_answer_finds_nothing(answer):
    tier = ManualTier(8)
    controller = TierController(tier, TierConfig(), 16, 1, HostBudget(16))
    for scripted, expected in ((4, 4), (None, None), (answer, 0)):
        tier.lookup = lambda keys, scripted=scripted: scripted
        assert controller.lookup(keys_of("abcd"), 0.0) == expected
    assert controller.stats().tier.last_error == f"lookup returned {answer!r} for 4 keys"


def test_stuck_direction_gets_no_job():
    tier = ManualTier(8)
    config = TierConfig(max_store_blocks=4, pause_s=1.0, deadline_s=5.0)
    controller = TierController(tier, config, 16, 1, HostBudget(16))
    for number, text in enumerate(("ab", "cd")):
        assert controller.send(TierJob(number, controller, False, keys_of(text), [number, number + 2], 5.0), 0.0)
    controller.give_up_overdue(5.0)
    stats = controller.stats()
    assert (stats.overdue_jobs, stats.stuck_blocks, stats.num_storing) == (2, 4, 4)
    # After the pause, too, the tier has all blocks that it may have.
    assert [controller.may_send(False, now_s) for now_s in (5.5, 10.0)] == [False, False]
    assert (controller.may_send(True, 10.0), controller.room(False)) == (True, 0)
    while tier.pending:
        tier.end(tier.pending[0])
    assert len(controller.get_finished(100, 10.0)) == 2
    assert (controller.stats().stuck_blocks, controller.room(False)) == (0, 4)
    assert controller.may_send(False, 10.0)


def full(*keys, num_blocks=8, **rule):
    """Return a bench whose tier was full when it got keys one by one, so that its writes are paused."""
    bench = Bench(num_blocks, 4 * num_blocks, max_failures=2, pause_s=10.0, **rule)
    for key in keys:
        bench.store(key, context=ReqContext())
        bench.step(error="no space left")
    assert bench.stats().writes == "open"
    return bench


def recovered(bench):
    """End the pause and play steps; return the keys of all jobs, in order."""
    bench.clock.now_s += 10.0
    return [keys for sent in iter(bench.step, []) for keys in sent]


def test_missed_blocks_are_written_after_probe():
    bench = full(*keys_of("01234"))
    assert not bench.manager.has_pending_work()
    assert "writes paused: no space left" in bench.stats().tier.unavailable_reason
    bench.manager.touch([b"1"], ReqContext())
    # The latest used block alone, then the rest; in a job, the latest used one is stored last.
    assert recovered(bench) == [[b"1"], keys_of("0234")]
    assert (bench.stats().tier.unavailable_reason, bench.stats().dropped_blocks) == ("", 5)
    assert not bench.manager.has_pending_work()
    assert all(bench.tier.lookup([key]) for key in keys_of("01234"))


def test_write_back_blocks_are_offered_again():
    bench = full(*keys_of("01234"), num_blocks=4, write_policy="write_back")
    missed = list(bench.manager.controllers[0].backlog.missed)
    assert missed
    assert set(missed) <= {key for keys in recovered(bench) for key in keys}
    assert all(bench.tier.lookup([key]) for key in missed)


def test_failing_probe_is_one_block():
    bench = full(*keys_of("01234"))
    for _ in range(3):
        bench.clock.now_s += 10.0
        assert [bench.step(error="no space left") for _ in range(2)] == [[[b"4"]], []]
        assert (bench.stats().writes, bench.stats().dropped_blocks) == ("open", 5)
    assert recovered(bench)[0] == [b"4"]


def test_gone_missed_blocks_are_not_offered():
    bench = full(*keys_of("01234"))
    # All of host memory is replaced while the tier is paused.
    bench.store(*keys_of("abcdefgh"))
    assert sorted(key for keys in recovered(bench) for key in keys) == keys_of("abcdefgh")
    assert not bench.manager.controllers[0].backlog.missed


def test_reset_forgets_missed_blocks():
    bench = full(*keys_of("01234"))
    bench.manager.reset_cache()
    assert recovered(bench) == []
    bench.store(b"0")
    assert bench.jobs() == [(False, [b"0"])]
    assert recovered(bench) == []


def test_step_offers_bounded_number_again():
    bench = full(b"a", b"b", num_blocks=3 * MAX_STEP_BLOCKS, max_store_blocks=3 * MAX_STEP_BLOCKS)
    for first in range(0, 2500, 500):
        bench.store(*(b"%d" % i for i in range(first, first + 500)))
    bench.clock.now_s += 10.0
    sizes = [sum(map(len, sent)) for sent in iter(bench.step, [])]
    assert (sizes[0], sum(sizes)) == (1, 2502)
    assert max(sizes) <= MAX_STEP_BLOCKS
    assert bench.manager.stats().num_referenced == 0


def test_wait_for_store_ends_at_deadline():
    bench, asking, other = Bench(8, deadline_s=2.0), ReqContext("asks"), ReqContext("other")
    keys, manager = keys_of("0123"), bench.manager
    manager.prepare_store(keys, ReqContext("stores"))
    # Another request has a deadline of its own.
    for request, key, after_s in ((asking, b"0", 1.9), (asking, b"0", 0.0), (other, b"1", 0.1)):
        assert manager.status(key, request) == BlockState.PENDING
        bench.clock.now_s += after_s
        manager.on_schedule_end()
    assert [manager.status(key, asking) for key in keys] == [BlockState.ABSENT] * 4
    assert manager.status(b"1", other) == BlockState.PENDING
    manager.complete_store(keys)
    assert [manager.status(key, asking) for key in keys] == [BlockState.READY] * 4


@pytest.mark.parametrize("loads", [False, True])
def test_waits_add_up_until_load(loads):
    bench, asking = Bench(8, deadline_s=2.0).on_tier(b"1"), ReqContext("asks")
    manager = bench.manager
    manager.prepare_store([b"0"], ReqContext("stores"))
    assert manager.status(b"0", asking) == BlockState.PENDING
    bench.clock.now_s += 1.5
    manager.complete_store([b"0"])
    assert manager.status(b"0", asking) == BlockState.READY
    if loads:
        manager.prepare_load([b"0"], asking)
    assert manager.status(b"1", asking) == BlockState.PENDING
    manager.on_schedule_end()
    bench.clock.now_s += 0.5
    manager.on_schedule_end()
    # A load begins a new wait.
    assert manager.status(b"1", asking) == (BlockState.PENDING if loads else BlockState.ABSENT)
