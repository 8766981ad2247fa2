"""Simulated fleets equal a plain Python simulation step by step; the output of the command."""

import json
import math
import random
from itertools import islice, product

import numpy as np
import pytest

from kvcache.lab.fleet.routers import ROUTERS, FleetPlan
from kvcache.lab.fleet.scaled_trace import ScaledTrace
from kvcache.lab.fleet.simulation import run_fleet
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.requests import Request
from kvcache.lab.traces.trace import Trace
from kvcache.request import ReqContext
from kvcache.testing.reference_manager import ReferenceManager

BLOCK = 16


class PlainFleet:
    """The specification: reference managers, and routers that inspect every engine."""

    def __init__(self, plan):
        self.plan = plan
        self.memories = [ReferenceManager(BLOCK, plan.num_blocks, plan.cache_policy) for _ in range(plan.num_engines)]
        self.store = ReferenceManager(BLOCK, plan.store_blocks, "lru") if plan.store_blocks else None
        num_disks = plan.num_engines if plan.disk_blocks else 0
        self.disks = [ReferenceManager(BLOCK, plan.disk_blocks, "lru") for _ in range(num_disks)]
        self.dice = random.Random(plan.seed)
        # Messages of each engine that its router has missed; None: the engine has started again.
        self.missed = [[] for _ in self.memories]
        self.free_s = [0.0] * plan.num_engines
        self.number = 0
        self.sent = {}
        # For each block, the engines that hold it; the engine that stored it last is at the end.
        self.holders = {}
        self.totals = dict.fromkeys(
            ("blocks", "local", "disk", "store", "missed", "written", "rejected", "single", "single_remembered"), 0
        )
        self.totals |= dict.fromkeys(("batched", "batched_remembered", "keys", "events"), 0)
        self.ttft_s = []

    def choose(self, now_s, ids):
        if self.plan.router == "round_robin":
            return self.number % self.plan.num_engines
        idle = min(range(self.plan.num_engines), key=lambda engine: self.free_s[engine])
        known = self.sent if self.plan.router == "prefix" else {block: of[-1] for block, of in self.holders.items()}
        depth = 0
        while depth < len(ids) and ids[depth] in known:
            depth += 1
        if not depth:
            return idle
        engine = known[ids[depth - 1]]
        waits_s = max(self.free_s[engine] - now_s, 0) - max(self.free_s[idle] - now_s, 0)
        return engine if waits_s <= depth * BLOCK * self.plan.token_s else idle

    def restart(self, engine):
        self.memories[engine].reset_cache()
        if not self.disks:
            self.missed[engine] = [None]
            if self.plan.router != "events":
                self.take(engine)

    def take(self, engine):
        """Show the router what it has missed of an engine."""
        for message in self.missed[engine]:
            stored, evicted = message or ([], [block for block, of in self.holders.items() if engine in of])
            for block in evicted:
                self.holders[block].remove(engine)
                if not self.holders[block]:
                    del self.holders[block]
            for block in stored:
                self.holders.setdefault(block, []).append(engine)
        self.missed[engine].clear()

    def serve(self, now_s, ids, input_length):
        engine = self.choose(now_s, ids)
        self.number += 1
        keys = [block.to_bytes(8, "little") for block in ids]
        totals = self.totals
        found_in, output = [], None
        for level in (self.memories[engine], *self.disks[engine : engine + 1]):
            context = ReqContext()
            found_in.append(level.lookup(keys[sum(found_in) :], context))
            level.touch(keys, context)
            output = level.prepare_store(keys, context)
            if output is not None:
                level.complete_store(output.keys_to_store, context)
            elif level is self.memories[engine]:
                totals["rejected"] += 1
            level.on_request_finished(context)
        if output is not None and (output.keys_to_store or output.evicted_keys):
            changed = [
                [int.from_bytes(key, "little") for key in keys] for keys in (output.keys_to_store, output.evicted_keys)
            ]
            self.missed[engine].append(changed)
            totals["events"] += sum(map(len, changed))
            if not (self.plan.lost and self.dice.random() < self.plan.lost):
                self.take(engine)
        local, on_disk = (*found_in, 0)[:2]
        found = 0
        rest, of_store = keys[local + on_disk :], ReqContext()
        if self.store is not None and rest:
            found = self.store.lookup(rest, of_store)
            self.store.touch(rest[:found], of_store)
            put = self.store.prepare_store(rest[found:], of_store)
            if put is not None:
                self.store.complete_store(put.keys_to_store, of_store)
                totals["written"] += len(put.keys_to_store)
            self.store.on_request_finished(of_store)
        self.sent.update(dict.fromkeys(ids, engine))
        computed = max(input_length - min((local + on_disk + found) * BLOCK, input_length), 1)
        begin_s = max(now_s, self.free_s[engine])
        self.free_s[engine] = begin_s + computed * self.plan.token_s + (on_disk + found) * self.plan.block_load_s
        self.ttft_s.append(self.free_s[engine] - now_s)
        for name, count in (("blocks", len(ids)), ("local", local), ("disk", on_disk), ("store", found)):
            totals[name] += count
        totals["missed"] += len(rest) - found
        if self.store is not None:
            self.ask(len(rest), found, begin_s - now_s)

    def ask(self, asked, found, wait_s):
        """Count queries, one step of the scheduler after another."""
        totals = self.totals
        for _ in range(int(wait_s // 0.05) + 1):
            totals["single"] += found + (found < asked)
            totals["batched"] += math.ceil(asked / 1024)
        held, absent = int(wait_s // 10.0), int(wait_s // 1.0)
        totals["single_remembered"] += found * (1 + held) + (found < asked) * (1 + absent)
        totals["batched_remembered"] += (
            math.ceil(asked / 1024) + held * math.ceil(found / 1024) + absent * math.ceil((asked - found) / 1024)
        )
        totals["keys"] += asked + held * found + absent * (asked - found)


def traffic(num_requests):
    return CompactTrace.of(ChatWorkload(num_requests, seed=3, chats_per_s=2.0), BLOCK)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("num_engines", "num_blocks", "store_blocks", "token_s", "policy"),
    [(1, 500, 0, 1e-4, "lru"), (4, 300, 2000, 1e-3, "lru"), (7, 900, 1200, 2e-2, "arc")],
)
def test_fleet_is_what_plain_python_says(router, num_engines, num_blocks, store_blocks, token_s, policy):
    faults = {"disk_blocks": 600 if num_engines == 7 else 0, "restarts": 5 if num_engines > 1 else 0}
    faults["lost"] = 0.3 if router == "events" else 0.0
    plan = FleetPlan(
        num_engines, router, num_blocks, store_blocks, policy, token_s=token_s, block_load_s=1e-3, **faults
    )
    scaled = ScaledTrace(traffic(60), 3, seed=5)
    fleet = PlainFleet(plan)
    for number, (at_s, ids, input_length) in enumerate(scaled):
        count, rest = divmod(number, len(scaled) // (plan.restarts + 1))
        if not rest and 0 < count <= plan.restarts:
            fleet.restart((count - 1) % num_engines)
        fleet.serve(at_s, ids.tolist(), input_length)
    result, totals, span_s = run_fleet(scaled, plan), fleet.totals, scaled.span_s
    found = (result.blocks, result.local_blocks, result.disk_blocks, result.store_blocks, result.missed_blocks)
    assert found == tuple(totals[name] for name in ("blocks", "local", "disk", "store", "missed"))
    assert (result.written_blocks, result.rejected_requests) == (totals["written"], totals["rejected"])
    assert result.ttft_p99_s == pytest.approx(float(np.quantile(fleet.ttft_s, 0.99)))
    assert {name: load.mean * span_s for name, load in result.queries_per_s.items()} == pytest.approx(
        {name: totals[name] for name in result.queries_per_s}
    )
    assert result.query_keys_per_s.mean * span_s == pytest.approx(totals["keys"])
    assert result.events_per_s.mean * span_s == pytest.approx(totals["events"])
    known = {"round_robin": {}, "prefix": fleet.sent, "events": fleet.holders, "known": fleet.holders}[router]
    assert result.router_entries == len(known)
    assert 0 < result.local_blocks < result.blocks


@pytest.mark.slow
def test_one_engine_hits_like_replay(shared):
    with Trace(shared / "traces" / "mooncake_conversation.jsonl") as trace:
        scaled = ScaledTrace(CompactTrace.of(trace, trace.block_size))
    assert run_fleet(scaled, FleetPlan(1, "events", 3000)).local_blocks == 18_850
    stored = run_fleet(scaled, FleetPlan(1, "round_robin", 3000, 100_000))
    assert stored.local_blocks == 18_850
    # lru at 100,000 blocks hits 104,924; the store does not see uses that hit host memory.
    assert abs(stored.local_blocks + stored.store_blocks - 104_924) < 10


@pytest.mark.slow
def test_common_store_makes_routers_alike(shared):
    with Trace(shared / "traces" / "mooncake_conversation.jsonl") as trace:
        scaled = ScaledTrace(CompactTrace.of(islice(trace, 3000), trace.block_size))
    found = {router: run_fleet(scaled, FleetPlan(8, router, 2000, 1 << 20)) for router in ROUTERS}
    assert len({result.missed_blocks for result in found.values()}) == 1
    assert found["prefix"].store_blocks < found["round_robin"].store_blocks / 2
    assert found["events"].store_blocks < found["round_robin"].store_blocks / 2


@pytest.mark.parametrize("disk_blocks", [0, 300])
def test_one_pool_hits_like_one_engine(disk_blocks):
    scaled = ScaledTrace(traffic(60), 3, seed=5)
    shared = run_fleet(scaled, FleetPlan(4, "one_pool", 100, cache_policy="gittins", disk_blocks=disk_blocks))
    alone = run_fleet(scaled, FleetPlan(1, "round_robin", 400, cache_policy="gittins", disk_blocks=4 * disk_blocks))
    assert (shared.local_blocks, shared.disk_blocks) == (alone.local_blocks, alone.disk_blocks)
    private = run_fleet(scaled, FleetPlan(4, "round_robin", 100, cache_policy="gittins", disk_blocks=disk_blocks))
    assert 0 < private.local_blocks + private.disk_blocks < shared.local_blocks + shared.disk_blocks


@pytest.mark.slow
def test_one_pool_of_agents_triples_hits(shared, run, tmp_path):
    """The figures of docs/howto/node.md."""
    argv = ("--engines", 8, "--router", "round_robin,known", "--one-pool", "--blocks", "250@25GB/s", "--model", 131072)
    found = {}
    for policy in ("lru", "gittins"):
        more = ("--copies", "1@70%", "--policy", policy, "--json", tmp_path / "out.json", "-q")
        assert run("fleet", shared / "traces" / "agentic_coding.jsonl.gz", *argv, *more)[0] == 0
        cells = json.loads((tmp_path / "out.json").read_text())["cells"]
        found |= {(policy, cell["router"]): round(100 * cell["local_share"], 1) for cell in cells}
        if policy == "lru":
            assert [round(cell["ttft_p50_s"], 1) for cell in cells] == [10.3, 3.0, 0.8]
    assert [found["lru", router] for router in ("round_robin", "known", "one_pool")] == [20.5, 43.0, 65.6]
    assert found["gittins", "one_pool"] == 70.8


def test_copies_share_what_users_share():
    # Nine requests continue a shared prompt of two blocks in different ways; the tenth request shares no blocks.
    requests = [Request(np.array([7, 8, 100 + i, 200 + i]), 64, 1, float(i)) for i in range(9)]
    requests.append(Request(np.array([50, 51]), 32, 1, 9.0))
    compact = CompactTrace.of(requests, BLOCK)
    scaled = ScaledTrace(compact, 5, seed=1)
    assert (scaled.num_shared, scaled.num_ids, len(scaled)) == (2, 2 + 5 * 20, 50)
    seen = list(scaled)
    assert [at_s for at_s, _, _ in seen] == sorted(at_s for at_s, _, _ in seen)
    assert seen[0][0] == 0.0
    assert seen[-1][0] <= 609.0
    assert len({block for _, ids, _ in seen for block in ids.tolist()}) == scaled.num_ids
    heads = {tuple(ids[:2].tolist()) for _, ids, _ in seen if len(ids) == 4}
    assert len(heads) == 1
    # A single copy equals the trace.
    once = [ids.tolist() for _, ids, _ in ScaledTrace(compact)]
    pairs = zip(once, requests, strict=True)
    back = {new: old for ids, request in pairs for new, old in zip(ids, request.hash_ids, strict=True)}
    assert [[back[new] for new in ids] for ids in once] == [request.hash_ids.tolist() for request in requests]


def test_same_seed_gives_the_same_fleet():
    plan = FleetPlan(5, "prefix", 300, 1000, token_s=1e-3)
    compact = traffic(100)
    first, again, other = (run_fleet(ScaledTrace(compact, 4, seed), plan) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_lost_events_cost_few_hits():
    """Three engines with memory, a disk and a store; engines restart, and one message in a hundred gets lost."""
    scaled = ScaledTrace(traffic(100), 6, seed=1)
    for disk_blocks in (0, 900):
        found = {
            router: run_fleet(scaled, FleetPlan(3, router, 300, 2000, disk_blocks=disk_blocks, lost=lost, restarts=6))
            for router, lost in (("round_robin", 0.0), ("events", 0.01), ("known", 0.0))
        }
        own = {router: result.local_blocks + result.disk_blocks for router, result in found.items()}
        assert own["round_robin"] < 0.8 * own["events"]
        assert own["events"] == pytest.approx(own["known"], rel=0.03)


def test_empty_trace_and_requests_are_accepted():
    nothing = run_fleet(ScaledTrace(CompactTrace.of([], BLOCK), 3), FleetPlan(2, "events", 10, 10))
    assert (nothing.requests, nothing.blocks, nothing.busy) == (0, 0, 0.0)
    short = [Request(np.empty(0, np.int64), 3, 1, float(i)) for i in range(3)]
    found = run_fleet(ScaledTrace(CompactTrace.of(short, BLOCK)), FleetPlan(2, "prefix", 10, 10))
    assert (found.requests, found.blocks, found.imbalance) == (3, 0, pytest.approx(4 / 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lost": 1.0}, "lost must be a share in 0..1 of the router events, got 1.0 of 'events'"),
        ({"lost": 0.1, "router": "known"}, "lost must be a share in 0..1 of the router events, got 0.1 of 'known'"),
    ],
)
def test_bad_plan_is_named(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        FleetPlan(**{"num_engines": 1, "router": "events", "num_blocks": 1, **options})


def test_command_shows_hits_and_traffic(run, write_trace, tmp_path):
    pytest.importorskip("matplotlib")
    draw = random.Random(1)
    users = [1000 * draw.randrange(20) for _ in range(200)]
    trace = write_trace(([0, *range(user + 1, user + 2 + i // 20)] for i, user in enumerate(users)), step_ms=500)
    target, picture = tmp_path / "out.json", tmp_path / "out.svg"
    argv = ("fleet", trace, "--engines", "2,4", "--router", "round_robin,events", "--blocks", 30, "--copies", 2)
    more = ("--store", "1MiB", "--model", "2", "--server", "10KB/s,1,100k")
    status, out, err = run(*argv, *more, "--json", target, "--plot", picture)
    assert (status, err) == (0, "")
    document = json.loads(target.read_text())
    cells = document["cells"]
    fleets = [(cell["engines"], cell["router"]) for cell in cells]
    assert fleets == list(product((2, 4), ("round_robin", "events")))
    assert all(cell["copies"] == 2 and cell["requests"] == 400 for cell in cells)
    assert all(
        cell["local_share"] + cell["disk_share"] + cell["store_share"] + cell["missed_share"] == pytest.approx(1)
        for cell in cells
    )
    assert cells[1]["router_entries"] > 0 == cells[0]["router_entries"]
    peak = cells[1]["query_keys_per_s"]["peak"]
    assert cells[1]["limits"]["store_queries"] == pytest.approx(peak)
    assert set(cells[0]["limits"]) == {"store_bytes", "store_queries"}
    assert cells[1]["limits"]["router_events"] == pytest.approx(cells[1]["events_per_s"]["peak"] / 100_000)
    text = " ".join(out.split())
    assert "4 engines, events: servers needed in the busiest minute:" in text
    assert "the store's queries break first" in text
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    # No tick is a power of ten such as 9 x 10^1, and hollow marks are named where some are drawn.
    assert "mathdefault" not in drawn
    assert "hollow" in drawn
    assert run("fleet", trace, "--engines", "2,4", "--blocks", 30, "--plot", picture)[0] == 0
    assert "hollow" not in picture.read_text()


def test_fleet_of_one_size_is_drawn(tmp_path, run, write_trace):
    pytest.importorskip("matplotlib")
    trace = write_trace([[0, 1], [0, 2], [0, 1, 3]], step_ms=1000)
    plot = tmp_path / "fleet.svg"
    argv = ("fleet", trace, "--engines", 2, "--copies", 1, "--router", "round_robin,prefix", "--plot", plot, "--quiet")
    status, out, err = run(*argv)
    assert (status, err) == (0, "")
    assert "2 engines, by router" in plot.read_text()
    # Without a store it has no traffic to print.
    assert "existence queries" not in out
