"""A disk with a budget of writes: whole runs are written, those that are read again first, and never too many."""

import random
from itertools import pairwise

import pytest
from engine import Engine

from kvcache import CPUOffloadingManager, ReqContext, TieredOffloadingManager, make_offload_key
from kvcache.assembly.assemble import parse_tier
from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.simulate.simulated_tier import SimulatedTier, SimulatedTieredManager
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.trace import Trace
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.endurance import BudgetBacklog, RunValues
from kvcache.tiers.base.wear import DAY_S, Wear

HOUR_S = 3600.0


class Bench(Engine):
    """A manager of 64 blocks over a simulated disk of 1,000, and requests of one user or of many."""

    def __init__(self, endurance, policy="lru", host_blocks=64, disk_blocks=1000):
        self.now_s = 0.0
        rule = ("write_through", False, "lru", endurance)
        super().__init__(
            SimulatedTieredManager(16, host_blocks, [disk_blocks], policy, clock=lambda: self.now_s, rules=[rule])
        )
        self.tier = self.manager.simulated[0]

    def request(self, keys, part=None):
        """Serve a prompt, whose new blocks are stored in parts of so many; return the hits."""
        context = ReqContext("request")
        num_hits = self.manager.lookup(keys, context)
        self.load(keys[:num_hits], context)
        part = part or max(1, len(keys))
        for begin in range(num_hits, len(keys), part):
            self.store(keys[begin : begin + part], context)
        self.manager.on_request_finished(context)
        return num_hits

    def stats(self):
        return self.manager.tier_stats()[0]


def keys_of(user, num_blocks):
    return [b"%d/%d" % (user, i) for i in range(num_blocks)]


@pytest.mark.parametrize("part", [None, 3])
def test_rich_budget_writes_everything(part):
    bench = Bench(1000.0)
    for user in range(5):
        bench.request(keys_of(user, 10), part)
    assert bench.tier.stored_blocks == 50
    assert bench.stats().declined_blocks == 0


def test_run_beyond_budget_loses_tail():
    # A day of one drive write grants 1,000 blocks, and a minute 0.7.
    bench = Bench(1.0, host_blocks=200)
    bench.now_s = 15 * 60.0
    bench.request(keys_of(0, 30))
    assert bench.tier.lookup(keys_of(0, 30)) == bench.tier.stored_blocks == 11
    assert bench.stats().declined_blocks == 19
    # Later parts of a run with a hole would never be read.
    bench.now_s += HOUR_S
    context = ReqContext("long")
    bench.manager.lookup(keys_of(1, 100), context)
    for begin in (0, 50):
        output = bench.manager.prepare_store(keys_of(1, 100)[begin : begin + 50], context)
        bench.manager.complete_store(output.keys_to_store, context)
        bench.now_s += HOUR_S
    bench.manager.on_request_finished(context)
    assert bench.tier.lookup(keys_of(1, 100)) == 41


def test_keys_named_again_choose_nothing():
    """A call that names declined blocks again does not make the blocks behind them worth a write."""
    bench = Bench(1.0, host_blocks=200)
    context = ReqContext("declined")
    for keys in (keys_of(0, 10), keys_of(0, 10), keys_of(0, 20)[10:]):
        output = bench.manager.prepare_store(keys, context)
        bench.manager.complete_store(output.keys_to_store, context)
        bench.now_s += HOUR_S
    bench.manager.on_request_finished(context)
    assert bench.tier.stored_blocks == 0


def test_declined_head_follows_tail():
    bench = Bench(1.0)
    bench.request(keys_of(0, 20))
    assert bench.tier.lookup(keys_of(0, 20)) == 0
    bench.now_s = HOUR_S
    bench.request(keys_of(0, 30))
    assert bench.tier.lookup(keys_of(0, 30)) == 30


def test_hits_alone_are_written_once_granted():
    bench = Bench(1.0)
    bench.request(keys_of(0, 20))
    bench.now_s = HOUR_S
    assert bench.request(keys_of(0, 20)) == 20
    assert bench.tier.lookup(keys_of(0, 20)) == 20


def test_poor_budget_prefers_runs_that_return():
    """Chats return after an hour, one-shot prompts of another length never do."""
    bench, draw = Bench(12.0), random.Random(3)
    hits = {"chat": 0, "once": 0}
    chats = dict.fromkeys(range(12), 8)
    num_once = 0
    for step in range(2000):
        bench.now_s += 60.0
        if step % 5:
            num_once += 1
            hits["once"] += bench.request(keys_of(1000 + num_once, 40))
            continue
        user = draw.randrange(12)
        hits["chat"] += bench.request(keys_of(user, chats[user]))
        chats[user] = chats[user] + 1 if chats[user] < 16 else 8
    unlimited = 2000 / 5 * 12 + 1600 * 40
    assert bench.tier.stored_blocks < unlimited / 2
    assert hits["chat"] > 0.6 * 400 * 11


def test_poor_budget_skips_last_blocks():
    """The last block of a turn is not full, so the next turn has another one in its place."""
    bench, draw = Bench(40.0, disk_blocks=2000), random.Random(4)
    lengths = dict.fromkeys(range(40), 4)
    num_last = num_before = 0
    for step in range(3000):
        bench.now_s += 1.0
        user = draw.choice(list(lengths))
        lengths[user] += draw.randrange(1, 4)
        keys = [*keys_of(user, lengths[user]), b"last %d" % step]
        bench.request(keys)
        num_last += bench.tier.lookup(keys[-1:])
        num_before += bench.tier.lookup(keys[-2:-1])
        if lengths[user] > 40:
            del lengths[user]
            lengths[100 + step] = 4
    assert num_last < 0.2 * num_before
    assert num_before > 100


def test_skipped_last_block_precedes_later():
    """A last block that is not worth a write is written with the request's later blocks, so it leaves no hole."""
    wear = Wear(100_000, 1, clock=lambda: 0.0)
    # Ten blocks a second.
    wear.limit(8.64)
    choice = BudgetBacklog(64, wear)
    for user in range(20):
        for last in (b"last", b"other"):
            context = ReqContext("request")
            choice.choose([*keys_of(user, 19), b"%d" % user + last], context, lambda keys: 0, 0)
            choice.end_request(context)
    wear.spend(540)
    context, keys, num_declined = ReqContext("parts"), keys_of(99, 40), choice.num_declined
    assert choice.choose(keys[:20], context, lambda keys: 0, 0) == keys[:19]
    assert choice.choose(keys[20:], context, lambda keys: 0, 0) == keys[19:39]
    assert choice.num_declined == num_declined
    assert choice.choose([], context, lambda keys: 0, 0) == []
    assert choice.num_declined == num_declined + 1


def test_runs_used_repeatedly_are_better():
    """Two kinds of runs are used again; those of one kind are used once more after that."""
    values = RunValues(100_000)
    once, often = [], []
    for user in range(0, 100, 2):
        once.append(values.observe(keys_of(user, 10), 0))
        values.observe(keys_of(user, 50), 0)
        often.append(values.observe(keys_of(user + 1, 30), 0))
        values.observe(keys_of(user + 1, 90), 0)
        values.observe(keys_of(user + 1, 90), 0)
    assert values.is_worth(often[-1], 0.1)
    assert not values.is_worth(once[-1], 0.1)


@pytest.mark.parametrize("policy", ["lru", "gittins"])
@pytest.mark.parametrize("num_days", [1, 10])
def test_budget_holds_each_day(policy, num_days):
    """Bursts after idle hours, restarts and kills: never more than granted, never more than a day's worth ahead."""
    bench, draw = Bench(1.0, policy), random.Random(num_days)
    written, record = 0, b""
    day_totals = [0]
    for hour in range(24 * num_days):
        bench.now_s = hour * HOUR_S
        for _ in range(draw.choice([0, 0, 30])):
            bench.now_s += 30.0
            before = bench.tier.stored_blocks
            bench.request(keys_of(draw.randrange(200), draw.randrange(1, 30)))
            written += bench.tier.stored_blocks - before
            assert written <= 1000 * (bench.now_s + 60) / DAY_S + 1
            record, num_kept = bench.tier.wear.record()
            bench.tier.wear.keep(num_kept)
        action = draw.choice(["stop", "kill", "go on", "go on"])
        if action != "go on":
            record = bench.tier.wear.record(is_last=True)[0] if action == "stop" else record
            now_s, bench = bench.now_s, Bench(1.0, policy)
            bench.now_s = now_s
            bench.tier.wear.restore(record)
        if hour % 24 == 23:
            day_totals.append(written)
    assert max(after - before for before, after in pairwise(day_totals)) <= 2000
    assert written > 500 * (num_days - 1)


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_no_budget_hits_as_memory_alone(policy):
    bench, draw = Bench(1e-6, policy), random.Random(1)
    alone = Engine(CPUOffloadingManager(16, 64, policy, clock=lambda: bench.now_s))
    for _ in range(1500):
        bench.now_s += 1.0
        keys = keys_of(draw.randrange(40), draw.randrange(1, 12))
        assert alone.serve(keys) == bench.request(keys)
    assert bench.tier.stored_blocks == 0


def test_blocks_without_request_are_chosen():
    bench = Bench(1000.0)
    output = bench.manager.prepare_store(keys_of(0, 5))
    bench.manager.complete_store(output.keys_to_store)
    bench.manager.settle()
    assert bench.tier.stored_blocks == 5


def test_failed_store_is_not_written():
    bench = Bench(1000.0)
    context = ReqContext("failed")
    output = bench.manager.prepare_store(keys_of(0, 5), context)
    bench.manager.complete_store(output.keys_to_store, context, success=False)
    bench.manager.on_request_finished(context)
    assert bench.tier.stored_blocks == 0


def test_reset_forgets_chosen_blocks():
    bench = Bench(1000.0)
    context = ReqContext("running")
    output = bench.manager.prepare_store(keys_of(0, 5), context)
    bench.manager.reset_cache()
    bench.manager.settle()
    bench.manager.complete_store(output.keys_to_store, context)
    bench.manager.on_request_finished(context)
    assert bench.tier.stored_blocks == 0
    bench.request(keys_of(1, 5))
    assert bench.tier.stored_blocks == 5


def test_late_store_is_written():
    bench = Bench(1000.0)
    context = ReqContext("ended")
    output = bench.manager.prepare_store(keys_of(0, 5), context)
    bench.manager.on_request_finished(context)
    bench.manager.complete_store(output.keys_to_store, None)
    bench.manager.settle()
    assert bench.tier.stored_blocks == 5


def test_units_of_groups_pass_limited_disk():
    """Above a disk with a budget, a model with a sliding window stores and finds blocks as before."""
    now_s, draw = 0.0, random.Random(5)
    manager = SimulatedTieredManager(
        16,
        60,
        [500],
        "gittins",
        clock=lambda: now_s,
        rules=[("write_through", False, "lru", 20.0)],
        group_windows=[None, 2],
    )
    engine, num_loaded = Engine(manager), 0
    for _ in range(400):
        now_s += 5.0
        user, length = draw.randrange(12), draw.randrange(1, 10)
        context = ReqContext("request")
        anchors, windowed = ([make_offload_key(key, group) for key in keys_of(user, length)] for group in (0, 1))
        for keys in (anchors, windowed):
            for place, key in enumerate(keys):
                context.set_offload_key_position(key, 16 * (place + 1))
        num_hits = manager.lookup(anchors, context)
        while num_hits and manager.lookup(windowed[max(0, num_hits - 2) : num_hits], context) < min(2, num_hits):
            num_hits -= 1
        loaded = [*anchors[:num_hits], *windowed[max(0, num_hits - 2) : num_hits]]
        engine.load(loaded, context)
        num_loaded += len(loaded)
        engine.store([*anchors[num_hits:], *windowed[num_hits:]], context)
        manager.on_request_finished(context)
        manager.policy.check()
    stats = manager.tier_stats()[0]
    assert manager.stats().num_referenced == 0
    assert 0 < stats.written_blocks <= 500 * 20 * 2060 / DAY_S
    assert stats.declined_blocks > 0
    assert num_loaded > 500


def test_endurance_refuses_other_rules():
    with pytest.raises(ValueError, match="omit write_policy 'write_back'"):
        TierConfig(write_policy="write_back", endurance=3.0)
    with pytest.raises(ValueError, match="endurance limits the writes of a disk"):
        TieredOffloadingManager(16, 8, [(ManualTier(8), TierConfig(endurance=3.0))])


def test_endurance_is_option_of_tier():
    pytest.importorskip("xxhash")
    settings = parse_tier({"type": "disk", "path": "kv", "capacity": "1GiB", "endurance": "6TiB/day"})
    assert settings.config.endurance == f"{6 << 40}/day"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "host_blocks", "shares"),
    [
        ("mooncake_conversation.jsonl", "lru", 4096, {0.5: 0.82, 0.25: 0.59, 0.125: 0.41}),
        ("mooncake_conversation.jsonl", "gittins", 4096, {0.5: 0.77, 0.25: 0.45, 0.125: 0.25}),
        ("agentic_coding.jsonl.gz", "lru", 2000, {0.5: 0.52, 0.25: 0.3, 0.125: 0.145}),
        ("agentic_coding.jsonl.gz", "gittins", 2000, {0.5: 0.49, 0.25: 0.27, 0.125: 0.13}),
    ],
)
def test_budget_keeps_share_of_gain(shared, name, policy, host_blocks, shares):
    with Trace(shared / "traces" / name) as trace:
        requests = list(trace)
    make_keys = KeyMaker()

    def replayed(endurance, disk_blocks=8 * host_blocks):
        clock = ReplayClock()
        wear_rule = [("write_through", False, "lru", endurance)]
        manager = SimulatedTieredManager(512, host_blocks, [disk_blocks], policy, clock=clock, rules=wear_rule)
        replay = Replay(manager, arrivals=clock)
        for request in requests:
            replay.step(request, make_keys(request.hash_ids))
        return replay.tally.hit_blocks, manager.simulated[0].stored_blocks

    all_hits, all_written = replayed(None)
    alone, _ = replayed(1e-9)
    seconds = requests[-1].arrival_s - requests[0].arrival_s
    for share, least in shares.items():
        per_day = share * all_written / seconds * DAY_S
        hits, written = replayed(per_day / (8 * host_blocks))
        assert written <= all_written * share * 1.02 + 1
        assert (hits - alone) / (all_hits - alone) >= least


def test_simulated_wear_counts_whole_medium():
    wear = Wear(4000, 1 << 20, clock=lambda: 0.0)
    wear.limit(f"{1 << 30}/day")
    assert SimulatedTier(10, wear=wear).wear.per_day == 1024


def test_blocks_under_way_use_budget():
    """Chosen blocks that are not ready, or that a failing tier missed, are within the budget, too."""
    bench = Bench(1.0)
    bench.now_s = HOUR_S
    contexts = [ReqContext(f"request {user}") for user in range(3)]
    for user, context in enumerate(contexts):
        bench.manager.prepare_store(keys_of(user, 20), context)
    # One hour grants 42 blocks, and the first minute 0.7.
    choice = bench.manager.controllers[0].backlog
    assert len(choice.due) == 42
    bench.manager.complete_store(keys_of(0, 20), contexts[0], success=False)
    assert len(choice.due) == 22
    for user in (1, 2):
        bench.manager.complete_store(keys_of(user, 20), contexts[user])
    bench.manager.settle()
    assert bench.tier.stored_blocks == 22
    backlog = bench.manager.controllers[0].backlog
    backlog.miss(keys_of(1, 20))
    bench.request(keys_of(4, 5))
    assert bench.tier.lookup(keys_of(4, 5)) == 0
