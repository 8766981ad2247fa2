"""Simulation grids: the offline optimum, cells in other processes, and the written results."""

import csv
import itertools
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from kvcache.assembly.models import model_names, model_of
from kvcache.lab.simulate.cells import OPTIMUM, Job, Plan, run_job
from kvcache.lab.simulate.grid import Cell, Grid, run_grid
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.requests import Request
from kvcache.lab.traces.trace import Trace
from kvcache.registry import POLICIES

MIN_HITS = {1000: 55019, 3000: 84953, 5000: 98448, 10000: 105710, 15000: 105710, 100000: 105710}


@pytest.fixture(scope="module")
def conversation(shared):
    with Trace(shared / "traces" / "mooncake_conversation.jsonl") as trace:
        return CompactTrace.of(trace, trace.block_size)


@pytest.mark.parametrize("num_blocks", MIN_HITS)
def test_optimum_reproduces_its_prefix_hits(conversation, num_blocks):
    assert run_job(conversation, Job(OPTIMUM, num_blocks), Plan(1)).hit_blocks == MIN_HITS[num_blocks]


def test_unbounded_cache_reproduces_its_prefix_hits(conversation):
    cell = run_job(conversation, Job(OPTIMUM, None), Plan(1))
    assert (cell.requests, cell.blocks, cell.hit_blocks) == (12031, 288500, 105710)


def test_split_optimum_keeps_block_parts():
    trace = CompactTrace.of((Request(np.array(ids), 16 * len(ids), 0, 0.0) for ids in ([1, 2], [3], [1, 2])), 16)
    assert run_job(trace, Job(OPTIMUM, 1), Plan(1)).hit_blocks == 1
    split = run_job(trace, Job(OPTIMUM, 3), Plan(2))
    assert (split.blocks, split.hit_blocks, split.hit_tokens) == (10, 3, 24)


def simulate(workload, policies, capacities, **options):
    """Return the cells of a grid in its order."""
    trace = CompactTrace.of(workload, workload.block_size)
    grid = Grid(policies, capacities)
    found = {(cell.policy, cell.num_blocks): cell for cell in run_grid(trace, grid, **options)}
    return [found[job.policy, job.num_blocks] for job in grid.cells()]


@pytest.mark.slow
def test_grid_in_processes_equals_serial_one():
    workload = ChatWorkload(num_requests=150)
    shares = []
    grid = (["lru", "min"], [300, 2000])
    here = simulate(workload, *grid, num_processes=1, progressed=shares.append)
    there = simulate(workload, *grid, num_processes=2)
    for cells in (here, there):
        assert [(cell.policy, cell.num_blocks) for cell in cells] == list(itertools.product(*grid))
    assert [cell.hit_blocks for cell in here] == [cell.hit_blocks for cell in there]
    assert [cell.evicted_blocks for cell in here] == [cell.evicted_blocks for cell in there]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert here[0].hit_blocks < here[1].hit_blocks <= here[3].hit_blocks
    assert here[0].hit_blocks < here[2].hit_blocks


def test_models_are_listed_with_layer_assumptions(run):
    status, out, err = run("plan", "--models")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert set(model_names()) <= set(rows)
    assert rows["gpt-oss-20b"] == "24 48 KiB 3.6e9 12 sliding layers, counted in full"
    assert rows["qwen3-next-80b-a3b"] == "48 24 KiB 3e9 36 recurrent layers, not counted"
    assert rows["glm-4.5-air"] == "46 184 KiB 12e9"
    assert model_of("meta-llama/Llama-4-Scout-17B-16E-Instruct").sliding_layers == 36
    assert "hits only where one was stored" in out


def chart():
    plot = pytest.importorskip("kvcache.lab.report.plot")
    cells = [
        Cell(policy, blocks, 5, 1000, 0, 0.0, 100, hits, hits / 100)
        for policy, line in (("lru", (10, 30, 50)), ("a<b>:C", (12, 29, 50)), ("min", (40, 55, 55)))
        for blocks, hits in zip((1000, 5000, 100_000), line, strict=True)
    ]
    return plot.Chart("chats & more", cells, Cell("min", None, 5, 1000, 0, 0.0, 100, 55, 0.55), 65536, "5 requests")


@pytest.mark.parametrize("split", [1, 3])
def test_keys_of_many_equal_single_ones(split):
    make_keys = KeyMaker(split)
    requests = [Request(np.arange(i, i + i % 50, dtype=np.int64), 1, 0, 0.0) for i in range(500)]
    keyed = list(make_keys.keyed(enumerate(requests)))
    assert [(gap, request.hash_ids.tolist()) for gap, request, _ in keyed] == [
        (i, request.hash_ids.tolist()) for i, request in enumerate(requests)
    ]
    assert [keys for *_, keys in keyed] == [make_keys(request.hash_ids) for request in requests]
    assert list(make_keys.keyed([])) == []


def test_policy_has_same_colour_everywhere():
    style = pytest.importorskip("kvcache.lab.report.style")
    assert style.style_of(0, "gittins") == style.style_of(3, "gittins") != style.style_of(3, "lru")
    assert style.style_of(1, "gittins + disk 4 GiB")["color"] == style.style_of(0, "gittins")["color"]
    lines = ["lru", "gittins", *(f"{name} + disk {i}" for i in range(12) for name in ("lru", "gittins"))]
    looks = [tuple(style.style_of(i, line).items()) for i, line in enumerate(lines)]
    assert len(set(looks)) == len(lines)
    colours = [style.style_of(i, name)["color"] for i in range(4) for name in (*POLICIES.names(), "mine:Policy")]
    assert len(set(colours)) == len(POLICIES.names()) + 4


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html", ".SVG"])
def test_plots_are_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    from kvcache.lab.report.plot import check_plot_target, draw

    target = tmp_path / f"out{suffix}"
    check_plot_target(str(target))
    draw(chart(), str(target))
    content = target.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
        assert len(content) > 20_000
    elif suffix.lower() == ".svg":
        assert ET.fromstring(content).tag.endswith("svg")
    else:
        page = content.decode()
        assert page.startswith("<!doctype html>")
        assert page.count("<svg") == page.count("</svg>") == 1
        assert "<h1>chats &amp; more</h1>" in page
        assert "<th>a&lt;b&gt;:C</th>" in page
        assert "<td>5,000</td><td>312.5 MiB</td><td>30.00%</td><td>29.00%</td><td>55.00%</td>" in page
        assert 'src="' not in page


@pytest.fixture
def trace(write_trace):
    return write_trace([[0, 1], [2, 3], [0, 1, 4], [2, 3], [0, 1]])


def test_grid_command_writes_all_formats(run, trace, tmp_path):
    pytest.importorskip("matplotlib")
    targets = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "svg")}
    argv = ("--policy", "lru,min", "--blocks", "3,5", "--model", "llama-3.1-8b", "--jobs", 1)
    outputs = ("--json", targets["json"], "--save", targets["csv"], "--save", targets["svg"])
    status, out, err = run("plan", trace, *argv, *outputs)
    assert (status, err) == (0, "")
    assert "blocks hit, of 11 of 512 tokens" in out
    written = f"json: {targets['json']}, csv: {targets['csv']}, plot: {targets['svg']}"
    assert out.splitlines()[-1] == written
    assert "71 engines over one link of 50 GB/s to host memory" in out
    assert "time to first token, p50 / p99" in out
    assert "prefill saved, at least (llama-3.1-8b, bf16, 400 TFLOP/s)" in out

    document = json.loads(targets["json"].read_text())
    assert document["block_bytes"] == 512 * 131072
    assert document["unbounded"]["hit_blocks"] == 6
    hits = [(cell["policy"], cell["num_blocks"], cell["hit_blocks"]) for cell in document["cells"]]
    assert hits == [("lru", 3, 2), ("lru", 5, 6), ("min", 3, 5), ("min", 5, 6)]
    assert document["cells"][1]["memory_bytes"] == 5 * 512 * 131072
    assert document["cells"][1]["saved_prefill_s"] == 6 * 512 * 2 * 8e9 / 400e12
    rows = list(csv.DictReader(targets["csv"].read_text().splitlines()))
    assert [(row["policy"], int(row["num_blocks"]), int(row["hit_blocks"])) for row in rows] == hits
    assert rows[0]["bookkeeping_p50_us"] != ""
    assert rows[3]["bookkeeping_p50_us"] == ""
    assert ET.parse(targets["svg"]).getroot().tag.endswith("svg")


def test_grid_shows_rejected_requests(run, trace):
    # All five name more than one block, which does not fit into a cache of 1; gittins rejects no request.
    status, out, err = run("plan", trace, "--policy", "lru,gittins,min", "--blocks", "1,5", "--jobs", 1)
    assert (status, err) == (0, "")
    heading = out.index("requests rejected, of 5: they name more blocks than the cache has")
    assert [line.split() for line in out[heading:].splitlines()[4:6]] == [["1", "5", "0"], ["5", "0", "0"]]
    assert "requests rejected" not in run("plan", trace, "--policy", "lru", "--blocks", "3,5", "--jobs", 1)[1]


def test_grid_with_tiers_shows_rejected_requests(run, trace):
    below = ("--tier", "ssd:16MiB@1GB/s", "--model", "2KiB")
    status, out, err = run("plan", trace, "--policy", "lru,min", "--blocks", "1", *below, "--jobs", 1)
    assert (status, err) == (0, "")
    assert "rejected" in out
    assert "min is the optimum of host memory alone: it knows no tiers" in out


@pytest.mark.slow
def test_grid_keeps_figures_of_long_names(run, trace, tmp_path):
    odd = trace.rename(tmp_path / "a[red]$x_{y$z.jsonl")
    paths = (f"kvcache.policies.{path}CachePolicy" for path in ("lru:LRU", "arc:ARC"))
    policies = ["lru", "arc", "gittins", "min", *paths]
    plot = tmp_path / "out.svg"
    status, out, err = run("plan", odd, "--policy", ",".join(policies), "--blocks", 5, "--save", plot)
    assert (status, err) == (0, "")
    assert f"{odd.name} (mooncake): blocks hit" in out
    assert ["5", *["54.55%"] * 6] in [line.split() for line in out.splitlines()]


def test_grid_without_sizes_names_blocks(run, run_json, trace, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.html"
    for sizes, memory_bytes in (
        (("--blocks", "3,5"), [None, None]),
        (("--blocks", "3,5", "--model", "2"), [3072, 5120]),
        (("--memory", "256KiB,128KiB", "--model", "128"), [131072, 262144]),
    ):
        argv = ("plan", trace, "--policy", "lru", "--jobs", 1, *sizes)
        assert [cell["memory_bytes"] for cell in run_json(*argv)["cells"]] == memory_bytes
        status, out, err = run(*argv, "--save", target)
        assert (status, err) == (0, "")
        assert ("memory" in out) == ("memory" in target.read_text()) == (memory_bytes != [None, None])


def test_call_folder_hides_no_installed_package(trace, tmp_path):
    pytest.importorskip("typer")
    (tmp_path / "kvcache").mkdir()
    (tmp_path / "kvcache" / "__init__.py").write_text("raise ImportError('not this one')")
    argv = ["plan", str(trace), "--policy", "lru,arc", "--blocks", "5", "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from kvcache.cli import main; main({argv})"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_grid_counts_skipped_bad_lines(run, trace):
    argv = ("plan", trace, "--blocks", "3,5", "--jobs", 1, "--skip-bad")
    assert "bad lines" not in run(*argv)[1]
    trace.write_text("oops\n" + trace.read_text())
    assert run(*argv)[1].splitlines()[-1] == "bad lines skipped: 1"


def test_model_sizes_blocks_of_replay(run_json, trace):
    shape = ("--model", "2x1x8,fp8,params=1e9")
    document = run_json("replay", trace, "--blocks", 5, *shape, "--block-size", ":256")
    assert document["block_bytes"] == 2 * 2 * 8 * 256
    assert document["hit_blocks"] == document["data"]["verified_blocks"] > 0
    assert document["saved_prefill_s"] == document["hit_tokens"] * 2e9 / 400e12
