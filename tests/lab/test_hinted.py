"""Honest hints of a trace: who sends which, when, and what they bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.lab.simulate.hinted import honest_hints
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.requests import Request

SYSTEM = [1, 2]


def trace_of(gap_s: float, num_sessions: int = 200) -> CompactTrace:
    """Return sessions of two requests behind one system prompt; each answer takes 2 s."""
    requests = []
    for i in range(num_sessions):
        ids = [*SYSTEM, 10 + 2 * i, 11 + 2 * i]
        requests += [(1000.0 * i, ids[:3]), (1000.0 * i + gap_s, ids)]
    found = [Request(np.array(ids, np.int64), 16 * len(ids), 120, at_s) for at_s, ids in requests]
    return replace(CompactTrace.of(found, 16), output_lengths=np.full(len(found), 120, np.int64))


@pytest.mark.parametrize(
    ("gap_s", "delay_s", "said"),
    [(10.0, 2.0, {"soon", "later"}), (1.0, 1.0, {"soon", "later"}), (90.0, 2.0, {"later"})],
)
def test_hints_come_at_end_of_answer(gap_s: float, delay_s: float, said: set[str]) -> None:
    trace = trace_of(gap_s)
    hints = honest_hints(trace)
    first = hints[::2]
    assert {hint.next_use for (hint,) in first} == said
    assert {round(hint.at_s - at_s, 6) for (hint,), at_s in zip(first, trace.arrivals_s[::2], strict=True)} == {delay_s}


def test_ends_are_sent_a_minute_later() -> None:
    trace = trace_of(10.0)
    last = honest_hints(trace)[1::2]
    ends = [hint for hints in last for hint in hints if hint.next_use == "end"]
    assert 140 <= len(ends) < 180
    assert all(hints[0].next_use == "later" for hints in last)
    assert {round(hints[-1].at_s - hints[0].at_s, 6) for hints in last if len(hints) == 2} == {60.0}


@pytest.mark.parametrize("hints", ["none", "honest"])
def test_plan_shows_what_hints_bring(shared: Path, run_json: Callable[..., Any], hints: str) -> None:
    path = shared / "traces" / "mooncake_conversation.jsonl"
    options = ["--policy", "gittins", "--blocks", "10000", "--hints", hints, "--jobs", "1", "--quiet"]
    document = run_json("plan", path, *options)
    assert document["hints"] == hints
    assert document["cells"][0]["hit_blocks"] == {"none": 65892, "honest": 80927}[hints]


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--hints", "all"], "--hints must be honest or none"), (["--hints", "honest", "--sample", "0.5"], "whole trace")],
)
def test_plan_refuses_impossible_hints(run: Callable[..., Any], options: list[str], text: str) -> None:
    status, _, err = run("plan", "trace.jsonl", *options)
    assert (status, text in err) == (2, True)
