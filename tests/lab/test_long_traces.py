"""Grids of long traces: finished cells are kept, memory is bounded, and a sample estimates the whole trace."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvcache.lab.report.plan_tables import best_policies
from kvcache.lab.simulate.cells import Cell, Job, Plan
from kvcache.lab.simulate.checkpoint import Checkpoint
from kvcache.lab.simulate.grid import Grid, cell_bytes, run_grid
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.trace import Trace


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for i, request in enumerate(ChatWorkload(num_requests=400, seed=1)):
            record = {"chat_id": i, "parent_chat_id": -1, "type": "text", "turn": 1, "timestamp": request.arrival_s}
            record |= {"input_length": request.input_length, "hash_ids": request.hash_ids.tolist()}
            file.write(json.dumps(record) + "\n")
    return path


def cell(policy, num_blocks, rate=0.5, tiers=(), ttft_s=None):
    serving = None if ttft_s is None else {"ttft_mean_s": ttft_s}
    return Cell(policy, num_blocks, 5, 1000, 0, 0.0, 100, int(100 * rate), rate, tiers=tiers, serving=serving)


def test_checkpoint_returns_its_results(tmp_path):
    path = tmp_path / "cells"
    facts = {"trace": "abc", "split": 1}
    cells = [cell("lru", 10), cell("min", None), cell("arc", 10, tiers=(4, 5))]
    with Checkpoint(path, facts) as checkpoint:
        for each in cells:
            checkpoint.add(each)
    # A process that dies while it writes leaves a partial line.
    with path.open("a") as file:
        file.write('{"policy": "arc", "num_')
    with Checkpoint(path, facts) as checkpoint:
        assert list(checkpoint.cells.values()) == cells
        assert list(checkpoint.cells) == [Job("lru", 10), Job("min", None), Job("arc", 10, (4, 5))]
        checkpoint.add(cell("arc", 10))
    with Checkpoint(path, facts) as checkpoint:
        assert len(checkpoint.cells) == 4


@pytest.mark.parametrize(
    "body", [b"hello\n", b"no newline at the end", b"two\nlines", b"\n{", b"\xff\xfe\x00", b'{"a": 1}']
)
def test_foreign_checkpoint_is_refused_and_kept(tmp_path, body):
    path = tmp_path / "cells"
    path.write_bytes(body)
    with pytest.raises(ValueError, match="is no checkpoint of a grid"):
        Checkpoint(path, {"trace": "abd"})
    assert path.read_bytes() == body


def test_damaged_checkpoint_line_is_named(tmp_path):
    path = tmp_path / "cells"
    Checkpoint(path, {"trace": "abc"}).__exit__()
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="line 2 is no cell"):
        Checkpoint(path, {"trace": "abc"})


def test_cut_checkpoint_header_begins_afresh(tmp_path):
    path = tmp_path / "cells"
    Checkpoint(path, {"trace": "abc"}).__exit__()
    header = path.read_bytes()
    for num_bytes in (1, len(header) - 1):
        path.write_bytes(header[:num_bytes])
        Checkpoint(path, {"trace": "abc"}).__exit__()
        assert path.read_bytes() == header


def test_finished_cells_are_not_replayed_again(run, chats, tmp_path):
    path = tmp_path / "cells"
    argv = ("plan", chats, "--blocks", "500,1000", "--jobs", 1, "--checkpoint", path, "--json")
    first = json.loads(run(*argv, "--policy", "lru")[1])
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 3
    # Finished cells are read from the file, not computed again.
    lines[1] = lines[1].replace('"rejected_requests": 0', '"rejected_requests": 77')
    path.write_text("\n".join([*lines, ""]))
    second = json.loads(run(*argv, "--policy", "lru,arc")[1])
    assert [c["hit_blocks"] for c in second["cells"][:2]] == [c["hit_blocks"] for c in first["cells"]]
    assert 77 in [c["rejected_requests"] for c in second["cells"]]
    assert len(path.read_text().splitlines()) == 1 + 5
    status, _, err = run(*argv, "--policy", "lru", "--block-size", ":8")
    assert status == 2
    assert "is of another split" in err


SLOW = """
import time
from kvcache.testing.reference import ReferenceLRU

class Slow(ReferenceLRU):
    def touch(self, keys):
        time.sleep(0.05)
        super().touch(keys)
"""


def test_interrupt_loses_no_finished_cell(chats, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    checkpoint, table = tmp_path / "cells", tmp_path / "out.csv"
    argv = ["plan", str(chats), "--policy", "lru,slow:Slow", "--blocks", "500,1000", "--jobs", "2"]
    argv += ["--checkpoint", str(checkpoint), "--save", str(table)]
    process = subprocess.Popen(
        [sys.executable, "-c", f"from kvcache.cli import main; main({argv})"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while time.monotonic() < until and not (checkpoint.exists() and len(checkpoint.read_text().splitlines()) >= 3):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.startswith("kvcache: stopped: 2 of 5 cells have finished")
    assert [line.split(",")[:2] for line in table.read_text().splitlines()[1:]] == [["lru", "500"], ["lru", "1000"]]
    assert "lru at 500 blocks" in out


@pytest.fixture
def compact():
    workload = ChatWorkload(num_requests=60)
    return CompactTrace.of(workload, workload.block_size)


def test_cell_beyond_memory_is_refused(compact):
    message = r"MiB, more than the 50 MiB .*: sample the trace \(--sample 0.1 needs a tenth"
    with pytest.raises(ValueError, match=message):
        list(run_grid(compact, Grid(["lru"], [10_000_000]), num_processes=1, max_memory_bytes=50 << 20))


@pytest.mark.slow
def test_parallel_cells_fit_into_memory(compact):
    grid = Grid(["lru", "arc"], [200, 400])
    room = cell_bytes(Job("lru", 400), len(compact.ids), Plan())
    one_by_one, here = (
        {(c.policy, c.num_blocks): c.hit_blocks for c in run_grid(compact, grid, **options)}
        for options in ({"num_processes": 2, "max_memory_bytes": room}, {"num_processes": 1})
    )
    assert one_by_one == here


@pytest.mark.slow
def test_sample_is_near_the_whole(shared, tmp_path):
    grid = Grid(["lru", "min"], [10_000], plan=Plan(num_shards=8))
    with Trace(shared / "traces" / "mooncake_conversation.jsonl") as trace:
        sampled = CompactTrace.spool(trace, trace.block_size, tmp_path, 0.1)
    assert 0.08 < len(sampled.ids) / sampled.num_blocks < 0.12
    assert (sampled.num_blocks, sampled.num_tokens) == (288_500, 144_793_823)
    cells = {(c.policy, c.num_blocks): c for c in run_grid(sampled, grid, with_unbounded=True, num_processes=1)}
    exact = {("lru", 10_000): 61046, ("min", 10_000): 105710, ("min", None): 105710}
    assert cells.keys() == exact.keys()
    for place, hits in exact.items():
        found = cells[place]
        assert abs(found.block_hit_rate - hits / 288_500) < max(4 * found.block_hit_error, 0.005)
        assert found.blocks == 288_500


def test_sample_shows_its_error(run, chats):
    status, out, err = run("plan", chats, "--blocks", "5000", "--sample", "0.5", "--jobs", 1)
    assert (status, err) == (0, "")
    assert "+-" in out
    assert "estimated from 1 block in 2: +- is twice the standard error of 8 shards" in out


def test_best_policy_has_its_margin():
    cells = [cell("lru", 10, 0.2), cell("arc", 10, 0.3), cell("min", 10, 0.9)]
    cells += [cell("lru", 20, 0.35), cell("arc", 20, 0.4), cell("lru", 40, 0.5), cell("arc", 40, 0.45)]
    cells += [cell("lru", 80, 0.6), cell("arc", 80, 0.6)]
    assert list(best_policies(cells, "{} blocks".format, None)) == [
        "best at 10 to 20 blocks: arc, by 5.00 to 10.00 points over lru",
        "best at 40 to 80 blocks: lru, by 0.00 to 5.00 points over arc",
    ]
    assert list(best_policies(cells[:1], str, None)) == []


def test_best_policies_prefer_shorter_time():
    cells = [cell("lru", 10, 0.2, ttft_s=3.0), cell("arc", 10, 0.3, ttft_s=4.0)]
    assert list(best_policies(cells, "{} MiB".format, lambda _: "")) == [
        "best at 10 MiB without a tier: lru, mean TTFT 25.00 % below arc, hits 10.00 points lower"
    ]
