"""Hints of next use derived from a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.lab.replay import compact
from kvcache.lab.replay.cells import Plan
from kvcache.lab.replay.chats import ChatWorkload
from kvcache.lab.replay.compact import CompactTrace, next_uses
from kvcache.lab.replay.grid import Grid, run_grid
from kvcache.lab.replay.hints import derive_hints
from kvcache.lab.replay.requests import Request
from kvcache.request import NEXT_USES


def trace_of(requests: list[tuple[float, list[int]]]) -> CompactTrace:
    return CompactTrace.of(
        (Request(np.array(ids, dtype=np.int64), 16 * len(ids), 0, at_s) for at_s, ids in requests), 16
    )


def said(requests: list[tuple[float, list[int]]]) -> list[str]:
    trace = trace_of(requests)
    return [NEXT_USES[hint] for hint in derive_hints(trace, next_uses(trace)[0])]


TURNS = [
    (0.0, [0, 1, 2]),  # its tool answers in 5 s
    (1.0, [0, 7, 8]),  # shares block 0 alone with others, and ends
    (5.0, [0, 1, 2, 3]),  # a person answers in 300 s
    (305.0, [0, 1, 2, 3, 4]),
    (306.0, []),
    (310.0, [0, 1, 2, 3]),  # nothing new: what counts is its last block
]


@pytest.mark.parametrize("piece_ids", [1, 3, 1 << 18])
def test_hints_say_when_a_requests_own_blocks_come_back(monkeypatch: pytest.MonkeyPatch, piece_ids: int) -> None:
    monkeypatch.setattr(compact, "_PIECE_IDS", piece_ids)
    assert said(TURNS) == ["soon", "end", "later", "end", "end", "end"]
    assert said([*TURNS, (400.0, [0, 1, 2, 3, 9])])[-2] == "later"


def test_an_error_rate_makes_as_many_hints_wrong() -> None:
    workload = ChatWorkload(num_requests=2000)
    trace = CompactTrace.of(workload, workload.block_size)
    nexts, _ = next_uses(trace)
    right = derive_hints(trace, nexts)
    assert set(right.tolist()) == {0, 1, 2}
    wrong = derive_hints(trace, nexts, error=0.25, seed=1)
    assert 0.22 < (wrong != right).mean() < 0.28
    assert (derive_hints(trace, nexts, error=0.25, seed=1) == wrong).all()
    assert (derive_hints(trace, nexts, error=1.0) != right).all()
    with pytest.raises(ValueError, match=r"error must be a share in 0\.\.1, got 1\.5"):
        derive_hints(trace, nexts, error=1.5)


def hits(hint_error: float | None, num_processes: int = 1) -> int:
    workload = ChatWorkload(num_requests=800)
    trace = CompactTrace.of(workload, workload.block_size)
    grid = Grid(["lru"], [1500], plan=Plan(hint_error=hint_error))
    (cell,) = run_grid(trace, grid, num_processes=num_processes)
    return cell.hit_blocks


def test_honest_hints_bring_hits_and_lies_cost_some() -> None:
    assert max(hits(None), hits(1.0)) < hits(0.3) < hits(0.0)


def test_command_takes_an_error_rate(run: Any, tmp_path: Any) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n')
    status, out, _ = run("replay", path, "--hints", "0.1", "--blocks", 5, "--jobs", 1, "--json")
    assert status == 0
    assert '"hint_error": 0.1' in out
    assert "--hints must be a share of wrong hints in 0..1, got 2.0" in run("replay", path, "--hints", "2")[2]
