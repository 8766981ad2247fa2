"""Simulated tiers: the same hits by medium as over real disks, and their costs and savings."""

import csv
import json
import os
import re
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache.lab.simulate.cells import Job, Plan, run_job
from kvcache.lab.simulate.run import Replay
from kvcache.lab.simulate.serving import Flow, Medium, Serving, engines_for, price_of, weigh
from kvcache.lab.simulate.simulated_tier import SimulatedTier
from kvcache.lab.simulate.targets import recommend
from kvcache.lab.simulate.tiered import PatientManager
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.trace import Trace
from kvcache.tiering.controller import TierConfig
from kvcache.tiers.base.tier import host_rows
from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

BLOCK_BYTES = 4096
# Whole traces over real disks take minutes: KVCACHE_WHOLE_TRACE=1.
WHOLE = os.environ.get("KVCACHE_WHOLE_TRACE") == "1"


@contextmanager
def over_disks(folder, block_size, num_blocks, disks, policy):
    host_blocks = host_rows(num_blocks, BLOCK_BYTES)
    config = TierConfig(deadline_s=60.0, max_store_blocks=1024)
    with ExitStack() as open_now:
        tiers = []
        for i, blocks in enumerate(disks):
            size = capacity_for(blocks, BLOCK_BYTES)
            tier = DiskTier(
                DiskOptions(path=folder / str(i), capacity=size, cache_policy=policy, preallocate=False), host_blocks
            )
            open_now.callback(tier.shutdown)
            assert tier.num_blocks == blocks
            tiers.append((tier, config))
        yield PatientManager(block_size, num_blocks, tiers, policy, deadline_s=60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "num_requests", "num_blocks", "disks"),
    [
        ("mooncake_conversation.jsonl", "lru", 1200, 600, [3000, 9000]),
        ("mooncake_conversation.jsonl", "arc", 600, 300, [2000]),
        ("agentic_coding.jsonl.gz", "arc", 250, 700, [1500, 4000]),
    ],
)
def test_simulation_hits_what_real_tiers_hit(shared, tmp_path, name, policy, num_requests, num_blocks, disks):
    with Trace(shared / "traces" / name) as trace:
        requests = list(islice(trace, None if WHOLE else num_requests))
        block_size = trace.block_size
    make_keys = KeyMaker()
    with over_disks(tmp_path, block_size, num_blocks, disks, policy) as manager:
        replay = Replay(manager)
        for request in requests:
            replay.step(request, make_keys(request.hash_ids))
        below = [stats.promoted_blocks for stats in manager.tier_stats()]
    compact = CompactTrace.of(requests, block_size)
    serving = Serving(BLOCK_BYTES, tuple(Medium(f"medium {i}", 1e9) for i in range(1 + len(disks))), None)
    plan = Plan(serving=serving, rules=(("write_through", False, policy, None),) * len(disks))
    cell = run_job(compact, Job(policy, num_blocks, tuple(disks)), plan)
    simulated = [medium["hit_blocks"] for medium in cell.serving["media"]]
    real = [replay.tally.hit_blocks - sum(below), *below]
    assert sum(simulated) == sum(real)
    assert all(count > 0 for count in simulated)
    if len(disks) > 1:
        # If a prompt is larger than half of the pool, the disks' speed decides which tier's blocks arrive first: 6 % of
        # the lower tier's hits on a loaded machine. Their sum is exact, above.
        assert simulated == pytest.approx(real, rel=0.15)
    else:
        assert simulated == real


@pytest.mark.slow
def test_tier_below_memory_hits_like_memory(shared):
    with Trace(shared / "traces" / "mooncake_conversation.jsonl") as trace:
        compact = CompactTrace.of(trace, trace.block_size)
    cell = run_job(compact, Job("lru", 3000, (20_000,)), Plan())
    # The tier also holds the blocks of memory, so the sum of hits equals lru at 20,000 blocks.
    assert [medium["hit_blocks"] for medium in cell.serving["media"]] == [18_850, 83_035 - 18_850]


def flow(hits, hit_tokens):
    return Flow(np.array(hits), np.zeros_like(hits), np.array(hit_tokens))


def test_requests_queue_for_link_and_engine():
    serving = Serving(100, (Medium("memory", 1000.0), Medium("disk", 100.0)), 0.01)
    arrivals, lengths = np.array([0.0, 0.0, 100.0]), np.array([100, 100, 100])
    # Prefill of 100 tokens takes 1 s. Ten blocks take 10 s from disk, then 1 s from memory.
    facts = weigh(arrivals, lengths, flow([[0, 0], [0, 0], [0, 10]], [0, 0, 50]), serving)
    # The requests take 1 s, 2 s (after the first), and 10 + 1 + 0.5 s.
    assert (facts["ttft_p50_s"], facts["ttft_p99_s"]) == pytest.approx((2.0, 2 + 0.98 * 9.5))
    assert facts["load_s"] == pytest.approx(11.0)
    assert facts["saved_prefill_s"] == pytest.approx(0.5)
    assert facts["saved_prefill_share"] == pytest.approx(50 / 300)
    assert facts["engine_busy"] == pytest.approx(2.5 / 100)
    assert [medium["read_gb_per_s"] for medium in facts["media"]] == pytest.approx([1e-8, 1e-8])
    assert facts["media"][1]["read_peak_gb_per_s"] == pytest.approx(1000 / 60 / 1e9)


def test_two_engines_serve_two_requests():
    serving = Serving(100, (Medium("memory", 1e9),), 0.01, num_engines=2)
    facts = weigh(np.array([0.0, 0.0, 0.0, 1e3]), np.array([100] * 4), flow([[0]] * 4, [0] * 4), serving)
    assert (facts["ttft_p50_s"], facts["ttft_p99_s"]) == pytest.approx((1.0, 2.0), rel=0.02)


def test_trace_without_times_gives_no_rates():
    serving = Serving(100, (Medium("memory", 1e9),), 0.01)
    facts = weigh(np.zeros(2), np.array([100, 100]), flow([[1], [1]], [10, 10]), serving)
    assert (facts["ttft_p50_s"], facts["media"][0]["read_gb_per_s"], facts["load_s"]) == (None, None, 200 / 1e9)


def test_engines_suffice_without_a_cache():
    assert engines_for(np.array([0.0, 100.0]), 10_000, 0.01) == 2
    assert engines_for(np.array([0.0]), 10_000, 0.01) == 1


def test_price_is_that_of_all_media():
    serving = Serving(1 << 30, (Medium("memory", 1.0, 4.0), Medium("disk", 1.0, 0.5)), None)
    assert price_of((2, 10), serving) == 13.0
    assert price_of((2,), Serving(1 << 30, (Medium("memory", 1.0),), None)) is None


# Its block of 512 tokens takes 16 KiB.
MODEL = ("--model", "2x1x8,fp8,params=1e9")
PRICED = ("--model", "128,params=8e9", "--serving", "engines=1,price=4/1", "--jobs", 1)


@pytest.fixture
def trace(write_trace):
    return write_trace([[0, 1], [2, 3], [4, 5], [0, 1, 6], [2, 3], [4, 5]], step_ms=1000)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("ttft_p99=9", "recommended: 128 KiB of memory, policy lru, TTFT p99 "),
        ("ttft_p99=9,dwpd=1e9", "recommended: 128 KiB of memory, policy lru, TTFT p99 "),
        (
            "ttft_p50=1e-9,ttft_p99=9",
            "no line reaches the targets; the nearest: 128 KiB of memory, nvme 1 MiB, policy lru",
        ),
    ],
)
def test_plan_with_target_recommends_one_line(run, run_json, trace, target, line):
    argv = ("plan", trace, "--blocks", "2,3", *PRICED, "--tier", "nvme:1MiB@6GB/s", "--target", target)
    status, out, err = run(*argv)
    assert (status, err) == (0, "")
    assert out.count("recommended: ") + out.count("no line reaches") == 1
    assert line in out
    recommended = run_json(*argv)["recommended"]
    assert recommended["reached"] == line.startswith("recommended")
    assert recommended["cell"]["num_blocks"] == 2
    assert set(recommended["figures"]) == set(recommended["targets"])


@pytest.mark.slow
def test_plan_plot_shows_time_price_writes(run, trace, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ("plan", trace, "--policy", "lru,min", *PRICED)
    headings = ("TTFT p99", "drive writes a day", "price")
    for blocks in ("2", "2,3"):
        target = tmp_path / f"{blocks}.svg"
        assert run(*argv, "--blocks", blocks, "--tier", "nvme:1MiB@6GB/s", "--save", target)[0] == 0
        drawn = target.read_text()
        assert all(f"<!-- {heading}" in drawn for heading in headings)
        assert run("plan", trace, "--blocks", blocks, "--save", target)[0] == 0
        assert not any(f"<!-- {heading}" in target.read_text() for heading in headings)


def test_command_shows_hits_by_medium(run, trace, tmp_path):
    targets = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html")}
    argv = ("plan", trace, "--blocks", "2,3", *MODEL, "--serving", "price=4000000000/1/0.5")
    tiers = ("--tier", "nvme:32KiB@6GB/s", "--tier", "1MiB@2GB/s")
    pytest.importorskip("matplotlib")
    outputs = ("--json", targets["json"], "--save", targets["csv"], "--save", targets["html"])
    status, out, err = run(*argv, *tiers, *outputs, "--jobs", 1)
    assert (status, err) == (0, "")
    assert "nvme 32 KiB + tier 2 1 MiB" in " ".join(out.split())
    assert "without a cache: TTFT p50" in out
    assert "what each medium must sustain" in out
    document = json.loads(targets["json"].read_text())
    hits = {
        (cell["num_blocks"], *cell["tiers"]): [medium["hit_blocks"] for medium in cell["serving"]["media"]]
        for cell in document["cells"]
    }
    # 32 KiB are two blocks of 16 KiB; the trace repeats six blocks.
    expected = {(): [0], (2,): [0, 0], (2, 64): [0, 0, 6]}
    assert hits == {(num_blocks, *below): found for below, found in expected.items() for num_blocks in (2, 3)}
    assert document["cells"][-1]["serving"]["price"] == pytest.approx((3 * 4e9 + 2 * 1 + 64 * 0.5) / 65536)
    rows = list(csv.DictReader(targets["csv"].read_text().splitlines()))
    assert [row["tier2_hit_blocks"] for row in rows] == ["", "", "", "", "6", "6"]
    assert rows[4]["tier2_read_gb_per_s"] != ""
    page = targets["html"].read_text()
    assert "nvme 32 KiB + tier 2 1 MiB" in page
    assert re.findall("<h2>(.*)</h2>", page) == ["blocks hit", "TTFT p99, s", "drive writes a day", "price"]
    assert f"<td>{float(rows[4]['price']):,.0f}</td>" in page.partition("<h2>price")[2]


@pytest.mark.parametrize(("rule", "policy"), [("", "lru"), (",cache_policy=gittins", "gittins")])
def test_plan_simulates_policy_of_tier(run, trace, tmp_path, monkeypatch, rule, policy):
    made, target = [], tmp_path / "out.json"
    make = SimulatedTier.__init__

    def noted(tier, num_blocks, cache_policy="lru", **options):
        made.append(cache_policy)
        make(tier, num_blocks, cache_policy, **options)

    monkeypatch.setattr(SimulatedTier, "__init__", noted)
    argv = ("plan", trace, "--blocks", 2, "--policy", "gittins", *MODEL, "--tier", f"1MiB@1GB/s{rule}", "--jobs", 1)
    assert run(*argv, "--json", target)[0] == 0
    assert made == [policy]
    assert json.loads(target.read_text())["tiers"][0]["cache_policy"] == policy


@pytest.mark.parametrize(("rate", "loads", "cuts"), [("1GB/s", 3, 0), ("1KB/s", 0, 3)])
def test_arbiter_computes_blocks_of_slow_tier(run, trace, tmp_path, rate, loads, cuts):
    target = tmp_path / "out.json"
    argv = ("plan", trace, "--blocks", 2, *MODEL, "--tier", f"1MiB@{rate},arbiter", "--jobs", 1)
    status, out, err = run(*argv, "--json", target)
    assert (status, err) == (0, "")
    alone, over = json.loads(target.read_text())["cells"]
    assert alone["arbiter"] is None
    # Prefill of 512 tokens takes 2.56 ms; loading a block of 16 KiB takes 16 us, or 16 s.
    assert (over["arbiter"]["loads"], over["arbiter"]["cuts"]) == (loads, cuts)
    assert over["arbiter"]["cut_blocks"] == 2 * cuts
    assert over["hit_blocks"] == 2 * loads
    last = "computes: loading 32.8 s" if cuts else "loads 2 of 2 blocks"
    assert over["arbiter"]["decisions"][-1].startswith(last)
    line = f"{cuts} loads were shortened, by {2 * cuts} blocks; the last request {last}"
    assert line in " ".join(out.split())


def test_arbiter_counts_loads_that_wait(run_json, tmp_path):
    path = tmp_path / "trace.jsonl"
    # 20 prompts, and the same prompts at once a minute later, when their blocks are in the tier.
    lines = [
        {"timestamp": at_ms, "input_length": 1024, "output_length": 1, "hash_ids": [2 * i, 2 * i + 1]}
        for at_ms in (0, 60_000)
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Two blocks of 16 KiB load in 2.05 ms and compute in 5.12 ms. The third request would wait longer than that.
    argv = ("plan", path, "--blocks", 2, *MODEL, "--jobs", 1, "--serving", "engines=20")
    cells = [run_json(*argv, "--tier", f"1MiB@16MB/s{rule}")["cells"][1] for rule in ("", ",arbiter")]
    assert [cell["hit_blocks"] for cell in cells] == [40, 4]
    assert (cells[1]["arbiter"]["loads"], cells[1]["arbiter"]["cuts"]) == (2, 18)
    assert cells[1]["serving"]["ttft_p99_s"] < 0.3 * cells[0]["serving"]["ttft_p99_s"]


@pytest.mark.parametrize(
    ("policy", "stored"), [("write_through", 6), ("write_back", 5), ("write_through_selective", 0)]
)
def test_write_policy_writes_simulated_tier(run_json, trace, policy, stored):
    tier = f"1MiB@1GB/s,{policy}"
    _, over = run_json("plan", trace, "--blocks", 2, *MODEL, "--jobs", 1, "--tier", tier)["cells"]
    tier = over["serving"]["media"][1]
    assert round(tier["write_bytes_per_day"] * 5 / 86_400 / 16384) == stored
    assert tier["drive_writes_per_day"] == pytest.approx(tier["write_bytes_per_day"] / (1 << 20))


def test_plan_keeps_endurance_of_tier(run, trace, tmp_path):
    argv = ("plan", trace, "--blocks", 2, *MODEL, "--jobs", 1, "--json", tmp_path / "out.json")
    written = []
    for rule in ("", ",endurance=1000", ",endurance=1", ",endurance=1KiB/day"):
        assert run(*argv, "--tier", f"1MiB@1GB/s{rule}")[0] == 0
        document = json.loads((tmp_path / "out.json").read_text())
        written.append(document["cells"][-1]["serving"]["media"][-1]["write_bytes_per_day"])
    assert written[0] == written[1] > written[2] >= 0
    assert written[3] == 0
    status, *texts = run(*argv, "--tier", "1MiB@1GB/s,endurance=often")
    assert status == 2
    assert "endurance must be drive writes a day" in "".join(texts)


def test_equal_costs_are_ranked_by_time():
    def cell(policy, ttft_s, rate, num_blocks=2):
        serving = {"ttft_mean_s": ttft_s, "ttft_p99_s": 1.0, "price": 8.0, "media": []}
        return SimpleNamespace(policy=policy, serving=serving, num_blocks=num_blocks, tiers=(), block_hit_rate=rate)

    cells = [cell("lru", 0.4, 0.5), cell("arc", 0.3, 0.5), cell("gittins", 0.3, 0.6), cell("lru", 0.1, 0.9, 4)]
    advice = recommend(SimpleNamespace(cells=cells), {"ttft_p99": 2.0})
    assert advice["cell"] is cells[2]
    assert advice["best"] == [cells[2], cells[1], cells[0]]
    assert advice["why"].startswith("cheapest of the 4 lines that reach the targets; 3 lines cost the same")
    missed = recommend(SimpleNamespace(cells=cells), {"ttft_p99": 0.5})
    assert (missed["reached"], missed["cell"]) == (False, cells[2])
    assert "smallest factor, 2" in missed["why"]


def test_target_prints_best_line_each(run, trace):
    tier = ("--tier", "nvme:1MiB@6GB/s", "--target", "ttft_p99=9")
    argv = ("plan", trace, "--blocks", "2,3,4", "--policy", "lru,arc", *PRICED, *tier)
    out, whole = (run(*argv, *more)[1] for more in ((), ("--all",)))
    for text in (out, whole):
        assert [line.partition(",")[0] for line in text.splitlines()[:2]] == [
            "6 requests",
            "recommended: 128 KiB of memory",
        ]
    assert [sum(f"{blocks} KiB" in line for line in out.splitlines()[1:]) for blocks in (192, 256)] == [0, 0]
    assert any("256 KiB" in line for line in whole.splitlines()[1:])
