"""Load or compute: whatever a link is like, a request's first token comes about as soon as the better of the two."""

import gc
import itertools
import math
import weakref
from dataclasses import replace

import pytest
from stores import Clock

from kvcache import ReqContext, TierConfig, TieredOffloadingManager
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.arbiter import CostFit, Link, LoadArbiter, check_prefill_rate
from kvcache.tiering.controller import HostBudget, TierController, TierJob

BLOCK_TOKENS = 16
BLOCK_BYTES = 2 << 20
STEP_S = 1e-4


class ThrottledTier(ManualTier):
    """A tier behind a link with a latency and a rate, on a clock of the test; loads use the link one at a time."""

    medium = "THROTTLED"

    def __init__(self, num_blocks, latency_s, block_s, clock):
        super().__init__(num_blocks)
        self.latency_s, self.block_s, self.stalled_until_s = latency_s, block_s, 0.0
        self.clock = clock
        self.free_s = 0.0
        self.times = {}

    def submit_load(self, job_id, keys, block_ids):
        now_s = self.clock()
        begin_s = max(now_s + self.latency_s, self.free_s, self.stalled_until_s)
        self.free_s = begin_s + self.block_s * len(keys)
        self.times[job_id] = (now_s, self.free_s)
        return super().submit_load(job_id, keys, block_ids)

    def next_end_s(self):
        """Return the time when the next load ends, or None."""
        return min((end_s for _, end_s in self.times.values()), default=None)

    def get_finished(self):
        now_s = self.clock()
        for job in list(self.pending):
            if job.job_id not in self.times or self.times[job.job_id][1] <= now_s:
                self.end(job)
        results = []
        for result in super().get_finished():
            start_s, end_s = self.times.pop(result.job_id or 0, (None, None))
            results.append(replace(result, start_s=start_s, end_s=end_s))
        return results


class Engine:
    """One request at a time over a throttled tier that holds every prompt: time to first token on a simulated clock."""

    def __init__(self, latency_s, block_s, token_s, arbiter=True, given=None, by_key=False, **config):
        self.clock = Clock()
        self.tier = ThrottledTier(100_000, latency_s, block_s, self.clock)
        rule = TierConfig(arbiter=arbiter, deadline_s=1e6, max_store_blocks=100_000, **config)
        options = {"deadline_s": 1e6, "clock": self.clock, "prefill_tokens_per_s": given}
        self.manager = TieredOffloadingManager(BLOCK_TOKENS, 4096, [(self.tier, rule)], **options)
        self.token_s = token_s
        self.by_key = by_key
        self.names = itertools.count()

    def prompt(self, num_blocks):
        """Return the keys of a prompt that is in the tier alone."""
        name = next(self.names)
        keys = [b"%08d.%08d\0\0\0\0" % (name, i) for i in range(num_blocks)]
        assert self.tier.submit_store(-1 - name, keys, [0] * len(keys))
        self.tier.end(self.tier.pending[-1])
        return keys

    def lookup(self, keys, context):
        if not self.by_key:
            return self.manager.lookup(keys, context)
        num_hits, is_pending = 0, False
        for key in keys:
            status = self.manager.status(key, context)
            if status == 0:
                break
            is_pending |= status in (1, 3)
            num_hits += 1
        return None if is_pending else num_hits

    def first_token_s(self, keys, tail_tokens=1):
        """Return the seconds until all is loaded or computed, and check that an answer is kept."""
        begin_s = self.clock.now_s
        context = ReqContext()
        if self.by_key:
            for i, key in enumerate(keys, 1):
                context.set_offload_key_position(key, i * BLOCK_TOKENS)
        while (num_hits := self.lookup(keys, context)) is None:
            self.clock.now_s += STEP_S
            self.manager.on_schedule_end()
            end_s = self.tier.next_end_s()
            if end_s is not None and end_s > self.clock.now_s:
                limit_s = self.clock.now_s + (2.0 if self.by_key else 0.02)
                self.clock.now_s = min(end_s, limit_s)
                self.manager.on_schedule_end()
        assert self.lookup(keys, context) == num_hits
        self.manager.prepare_load(keys[:num_hits], context)
        self.manager.complete_load(keys[:num_hits], context)
        first, last = num_hits * BLOCK_TOKENS, len(keys) * BLOCK_TOKENS + tail_tokens
        seconds = sum(self.token_s(position) for position in range(first, last))
        self.clock.now_s += seconds
        self.manager.report_prefill(first, last - first, seconds)
        self.manager.on_request_finished(context)
        waited_s = self.clock.now_s - begin_s
        self.clock.now_s += 0.5
        self.manager.on_schedule_end()
        return waited_s

    def bounds_s(self, num_blocks, tail_tokens=1):
        """Return the time to first token of "always load" and of "never load"."""
        tokens = num_blocks * BLOCK_TOKENS
        tail_s = sum(self.token_s(position) for position in range(tokens, tokens + tail_tokens))
        load_s = self.tier.latency_s + num_blocks * self.tier.block_s + 2 * STEP_S
        return load_s + tail_s, sum(map(self.token_s, range(tokens))) + tail_s


def flat(tokens_per_s):
    return lambda position: 1 / tokens_per_s


def growing(tokens_per_s, doubles_at):
    return lambda position: (1 + position / doubles_at) / tokens_per_s


LENGTHS = [1, 2, 5, 13, 34, 89, 233, 610]
# Seconds a block at 50 MB/s.
THROTTLED_S = BLOCK_BYTES / 50e6


def ratios(engine, lengths):
    for length in lengths:
        always_s, never_s = engine.bounds_s(length)
        yield length, engine.first_token_s(engine.prompt(length)) / min(always_s, never_s)


@pytest.mark.parametrize(("is_given", "by_key"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("latency_s", "block_s", "token_s", "given"),
    [
        # 50 MB/s, and an engine that is slower, faster, and about as fast.
        (0.002, THROTTLED_S, flat(200), 200),
        (0.002, THROTTLED_S, flat(5000), 5000),
        (0.002, THROTTLED_S, flat(16 / THROTTLED_S * 1.03), 16 / THROTTLED_S * 1.03),
        # Short prefixes are computed, long ones loaded: by latency, and by attention.
        (0.5, 0.002, flat(2000), 2000),
        (0.002, THROTTLED_S, growing(500, 3000), {0: 500, 3000: 250}),
    ],
    ids=["load", "compute", "even", "latency", "attention"],
)
def test_first_token_is_near_better_way(latency_s, block_s, token_s, given, is_given, by_key):
    engine = Engine(latency_s, block_s, token_s, given=given if is_given else None, by_key=by_key)
    # Two lengths of either kind, to learn from.
    for length in (8, 200, 16, 400, 8, 200):
        engine.first_token_s(engine.prompt(length), tail_tokens=64)
        engine.clock.now_s += 60
    before = engine.manager.stats()
    worst = {length: ratio for length, ratio in ratios(engine, LENGTHS) if ratio > 1.1}
    assert worst == {}
    after = engine.manager.stats()
    assert after.arbiter_loads + after.arbiter_cuts == 6 + len(LENGTHS)
    assert after.arbiter_give_ups == before.arbiter_give_ups


@pytest.mark.parametrize(("arbiter", "expected"), [(True, 1.0), (False, 4.0)])
def test_arbiter_is_what_makes_the_difference(arbiter, expected):
    engine = Engine(0.0, THROTTLED_S, flat(4 * 16 / THROTTLED_S), arbiter=arbiter, given=4 * 16 / THROTTLED_S)
    engine.first_token_s(engine.prompt(100))
    always_s, never_s = engine.bounds_s(100)
    assert engine.first_token_s(engine.prompt(100)) / never_s == pytest.approx(expected, rel=0.02)
    assert always_s / never_s == pytest.approx(4, rel=0.02)


def test_slow_link_is_left_until_fast():
    engine = Engine(0.001, 0.001, flat(2000), given=2000)
    assert [round(ratio, 2) for _, ratio in ratios(engine, [100] * 3)] == [1.0] * 3
    engine.tier.block_s = 0.05
    slow = [ratio for _, ratio in ratios(engine, [100] * 8)]
    # A load that takes longer than computing would have is given up, at twice the time.
    assert max(slow) < 2.1
    assert max(slow[3:]) < 1.1
    engine.tier.block_s = 0.001
    fast = []
    for _ in range(6):
        engine.clock.now_s += 10
        fast += [ratio for _, ratio in ratios(engine, [100])]
    # Nobody waited for what found that out.
    assert max(fast[3:]) < 1.1


@pytest.mark.parametrize(("by_key", "ratio"), [(False, 2.0), (True, 3.5)])
def test_request_on_stalled_tier_computes(by_key, ratio):
    engine = Engine(0.001, 0.001, flat(2000), given=2000, by_key=by_key)
    list(ratios(engine, [100] * 3))
    engine.tier.stalled_until_s = engine.clock.now_s + 1000
    compute_s = engine.bounds_s(100)[1]
    first_s = engine.first_token_s(engine.prompt(100))
    # By key, this engine asks again after 2 s.
    assert first_s == pytest.approx(ratio * compute_s, rel=0.1)
    # While a job is late, no other request waits for the tier.
    assert engine.first_token_s(engine.prompt(100)) == pytest.approx(compute_s, rel=0.01)
    assert engine.manager.stats().arbiter_give_ups == 1


def test_answer_is_kept_within_a_request():
    engine = Engine(0.001, 0.001, flat(2000), given=2000)
    list(ratios(engine, [100] * 3))
    manager, keys, context = engine.manager, engine.prompt(100), ReqContext()
    assert manager.lookup(keys, context) is None
    manager.arbiter.prefill.a = 1e-9  # computing now costs nothing
    manager.on_schedule_end()
    engine.clock.now_s = engine.tier.next_end_s()
    manager.on_schedule_end()
    assert manager.lookup(keys, context) == 100
    cut = ReqContext()
    keys = engine.prompt(100)
    assert manager.lookup(keys, cut) == 0
    manager.arbiter.prefill.a = 1.0  # and now more than anything
    assert manager.lookup(keys, cut) == 0
    manager.on_request_finished(cut)
    assert manager.lookup(keys, cut) is None


def test_first_loads_slow_are_tried_again():
    engine = Engine(0.0005, 0.0026, flat(1000), given=1000)
    engine.tier.stalled_until_s = engine.clock.now_s + 0.21
    list(ratios(engine, [1]))
    assert engine.manager.controllers[0].link.load_s(1, engine.clock.now_s) > 0.2
    engine.clock.now_s += 0.5
    # Both loads that are tried next are as fast as the link, which two samples in a row show.
    assert [round(ratio, 1) for _, ratio in ratios(engine, [1, 1, 1, 100])] == [1.0] * 4


def test_prefix_computed_sooner_is_not_loaded():
    # A block of 16 tokens takes 8 ms to compute and 1 ms to load, behind a latency of 100 ms: 14 of them are even.
    engine = Engine(0.1, 0.001, flat(2000), given=2000)
    for length in (20, 200, 20, 200):
        engine.first_token_s(engine.prompt(length))
    asked, look_up, held = [], engine.tier.lookup, engine.prompt(10)
    engine.tier.lookup = lambda keys: asked.append(list(keys))  # type: ignore[method-assign]
    before = engine.manager.stats().arbiter_cuts
    # It waits for no answer, and its decision is kept when one has come.
    context, link = ReqContext(), engine.manager.controllers[0].link
    link.probe_s = -math.inf
    answers = [engine.manager.lookup(held, context), engine.manager.lookup(held, context)]
    assert (answers, len(asked)) == ([0, 0], 1)
    assert engine.manager.arbiter.decisions[-1] == "computes: loading 0.11 s, computing 0.08 s"
    assert engine.manager.stats().arbiter_cuts == before + 1
    # A probe asks in the background, until the tier answers.
    for number in (2, 3):
        engine.manager.on_schedule_end()
        assert (len(asked), asked[-1], engine.tier.times) == (number, held, {})
    engine.tier.lookup = look_up  # type: ignore[method-assign]
    engine.manager.on_schedule_end()
    assert [job.keys for job in engine.tier.pending] == [held]
    assert link.probe_s == engine.clock.now_s + 10
    engine.tier.lookup = lambda keys: None  # type: ignore[method-assign]
    assert engine.manager.lookup(engine.prompt(40), ReqContext()) is None


def test_request_waits_for_answer_once():
    engine = Engine(0.1, 0.001, flat(2000), given=2000)
    for length in (20, 200, 20, 200):
        engine.first_token_s(engine.prompt(length))
    keys, context, look_up = engine.prompt(100), ReqContext(), engine.tier.lookup
    engine.tier.lookup = lambda keys: None  # type: ignore[method-assign]
    begin_s = engine.clock.now_s
    answers = []
    # 100 blocks take 0.8 s to compute.
    for engine.clock.now_s in (begin_s, begin_s + 0.79, begin_s + 0.81, begin_s + 0.82):
        answers.append(engine.manager.lookup(keys, context))
    assert answers == [None, None, 0, 0]
    assert engine.manager.stats().arbiter_give_ups == 1
    engine.tier.lookup = look_up  # type: ignore[method-assign]
    assert engine.manager.lookup(keys, context) == 0


def test_tier_without_arbiter_is_always_loaded():
    clock = Clock()
    slow = ThrottledTier(100, 0.0, 1.0, clock)
    other = ThrottledTier(100, 0.0, 100.0, clock)
    tiers = [(slow, TierConfig(arbiter=True)), (other, TierConfig())]
    manager = TieredOffloadingManager(16, 64, tiers, clock=clock, prefill_tokens_per_s=16)
    assert manager.arbiter is not None
    slow.submit_store(-1, [b"a", b"b"], [0, 0])
    other.submit_store(-1, [b"c", b"d"], [0, 0])
    manager.on_schedule_end()
    manager.controllers[0].link = link_of(3.0)
    # Two blocks at 3 s each, for four of a second each.
    assert manager.lookup([b"a", b"b", b"c", b"d"], ReqContext()) == 0
    assert manager.arbiter.decisions[-1] == "computes: loading 6 s, computing 4 s"
    assert manager.lookup([b"c", b"d"], ReqContext()) is None
    manager.controllers[0].link = link_of(1.5)
    assert manager.lookup([b"a", b"b", b"c", b"d"], ReqContext()) is None
    assert manager.arbiter.decisions[-1] == "loads 4 of 4 blocks: loading 3 s, computing 4 s"


def link_of(block_s):
    link = Link()
    for _ in range(3):
        link.fit.record(1, 0, block_s)
    return link


def media(*blocks_s):
    """Return a controller for each medium, with links of these seconds a block."""
    config = TierConfig(arbiter=True)
    controllers = [TierController(ManualTier(9), config, 99, 2, HostBudget(99)) for _ in blocks_s]
    for controller, block_s in zip(controllers, blocks_s, strict=True):
        controller.link = link_of(block_s)
    return controllers


def decide(arbiter, now_s=0.0, **num_blocks):
    """Return how many blocks of parts with these sources to load, and the decision."""
    sources = [source for source, count in num_blocks["parts"] for _ in range(count)]
    keys = [b"%d" % i for i in range(len(sources))]
    return arbiter.num_to_load(ReqContext(), keys, 0, sources, False, now_s), arbiter.decisions[-1]


def test_prefix_is_cut_between_media():
    fast, slow = media(0.1, 2.0)
    arbiter = LoadArbiter(10, [fast, slow], 10.0)
    # 10 tokens a block take a second.
    parts = [(fast, 5), (slow, 5)]
    assert decide(arbiter, parts=parts) == (5, "loads 5 of 10 blocks: loading 10 s, computing 10 s")
    # Blocks in host memory behind it make the slow load worth while.
    assert decide(arbiter, parts=[*parts, (None, 20)])[0] == 30


def test_media_share_one_link_in_turn():
    one, two = media(1.0, 1.0)
    arbiter = LoadArbiter(10, [one, two], 1.0)
    parts = [(one, 4), (two, 4), (one, 4)]
    assert decide(arbiter, parts=parts) == (12, "loads 12 of 12 blocks: loading 8 s, computing 120 s")
    one.link.sent(100, 0.0)
    assert "loading 108 s" in decide(arbiter, parts=parts)[1]
    # Blocks that are on their way for another request need no place in the queue.
    job = TierJob(1, one, True, [], [], 0.0)
    assert "loading 40 s" in decide(arbiter, 60.0, parts=[(job, 4)])[1]


@pytest.mark.parametrize(("latency_s", "block_s"), [(0.0, 0.01), (0.2, 0.0), (0.05, 0.004)])
def test_link_learns_latency_and_rate(latency_s, block_s):
    link, now_s = Link(), 0.0
    assert link.is_blind
    for num_blocks in (10, 40, 5, 80):
        link.sent(num_blocks, now_s)
        end_s = now_s + latency_s + block_s * num_blocks
        link.ended(num_blocks, num_blocks, now_s, end_s, end_s)
        now_s = end_s + 1
    assert link.load_s(1000, now_s) == pytest.approx(latency_s + 1000 * block_s, rel=0.01)
    assert link.latency_s == pytest.approx(latency_s, abs=1e-3)


def test_jobs_on_shared_link_teach_together():
    link = Link()
    for round_ in range(3):
        begin_s = 10.0 * round_
        for _ in range(4):
            link.sent(10, begin_s)
        # All end at once, after the time of all.
        for _ in range(4):
            link.ended(10, 10, begin_s, begin_s + 4.0, begin_s + 4.0)
    assert link.load_s(10, 100.0) == pytest.approx(1.0)


def test_only_unfinished_blocks_are_awaited():
    link = Link()
    for start_s, others in ((0.0, ()), (2.0, (1,))):
        for num_blocks in (10, *others):
            link.sent(num_blocks, start_s)
        link.ended(10, 10, start_s, start_s + 1, start_s + 1)
    assert link.load_s(0, 3.0) == pytest.approx(1 / link.blocks_per_s)


def test_failed_jobs_teach_nothing():
    link = Link()
    link.sent(10, 0.0)
    link.ended(10, 0, 0.0, 9.0, 9.0)
    link.sent(10, 9.0)
    link.ended(10, 0, 0.0, 20.0, 20.0)
    assert link.is_blind
    assert link.load_s(1, 50.0) == 0.0
    for end_s in (math.inf, 51.0):
        link.sent(10, 50.0)
        link.ended(10, 10, 50.0, end_s, 51.0)
    assert link.load_s(20, 52.0) == 2.0


def test_fit_follows_second_odd_sample():
    fit = CostFit()
    for seconds, expected in ((5.0, 5.0), (0.1, 2.75), (0.1, 0.1), (0.11, 0.1), (3.0, 1.0)):
        fit.record(100, 0, seconds)
        assert fit(100, 0) == pytest.approx(expected, rel=0.15)


def test_prefill_rate_is_learned_by_position():
    arbiter = LoadArbiter(16)
    for first, num in ((0, 100), (1000, 500), (4000, 2000), (100, 50)):
        arbiter.report_prefills([(first, num)], sum(1e-3 * (1 + p / 2000) for p in range(first, first + num)))
    assert arbiter.compute_s(0, 1000) == pytest.approx(1.25, rel=0.05)
    assert arbiter.compute_s(9000, 10000) == pytest.approx(5.75, rel=0.05)
    given = LoadArbiter(16, (), {0: 1000, 4000: 500})
    given.report_prefills([(0, 100)], 50.0)
    assert [given.compute_s(first, first + 1) for first in (0, 4000)] == pytest.approx([1e-3, 2e-3], rel=1e-3)


@pytest.mark.parametrize("value", [0, -1, math.inf, True, "fast", {}, {"a": 1}, {0: 1, 10: 2}, {-1: 5}, {0: "x"}, [1]])
def test_bad_prefill_rate_is_named(value):
    with pytest.raises(ValueError, match=r"prefill_tokens_per_s must be tokens a second > 0"):
        check_prefill_rate("prefill_tokens_per_s", value)


BAD_REPORTS = {
    0: (-1, 10**200, 10**400, math.nan),
    1: (0, 10**400, math.inf),
    2: (0.0, 1e308, 10**400, math.inf),
}


@pytest.mark.parametrize(("place", "value"), [(i, value) for i, values in BAD_REPORTS.items() for value in values])
def test_impossible_report_is_ignored(place, value):
    engine = Engine(0.01, 0.01, flat(1000))
    report = [0, 5, 1.0]
    report[place] = value
    engine.manager.report_prefill(*report)
    assert engine.manager.arbiter.prefill.num_samples == 0
    engine.manager.report_prefill(0, 1000, 1.0)
    assert engine.manager.arbiter.compute_s(0, 1000) == pytest.approx(1.0)


def test_call_without_request_is_not_arbitrated():
    engine = Engine(0.0, 1.0, flat(1e6), given=1e6)
    engine.manager.controllers[0].link = link_of(1.0)
    assert engine.manager.lookup(engine.prompt(4)) is None
    assert engine.manager.lookup(engine.prompt(4), ReqContext()) == 0
    # A reset forgets the blocks to probe the link with.
    engine.manager.reset_cache()
    engine.manager.on_schedule_end()
    assert not engine.tier.pending


@pytest.mark.parametrize("position", [-1, 10**400, -(10**400), 1 << 62, "16", None, 1.5, math.nan])
@pytest.mark.parametrize("by_key", [False, True])
def test_impossible_position_counts_as_unknown(position, by_key):
    engine = Engine(0.01, 0.01, flat(1000), given=1000, by_key=by_key)
    keys, context = engine.prompt(3), ReqContext()
    context.set_offload_key_positions({key: (i + 1) * BLOCK_TOKENS for i, key in enumerate(keys)} | {keys[1]: position})
    assert engine.lookup(keys, context) is None
    assert engine.manager.status(keys[0], context) == 1
    engine.clock.now_s += 1.0
    engine.tier.end(engine.tier.pending[-1]) if engine.tier.pending else None
    engine.manager.on_schedule_end()
    engine.manager.on_request_finished(context)


def test_living_context_frees_its_manager():
    engine = Engine(0.01, 0.01, flat(1000), write_policy="write_through_selective")
    keys, context = engine.prompt(2), ReqContext()
    assert engine.manager.lookup(keys, context) is None
    engine.manager.touch(keys, context)
    left = [weakref.ref(one) for one in (engine.manager, engine.manager.arbiter, engine.tier)]
    del engine
    gc.collect()
    assert [one() for one in left] == [None, None, None]
