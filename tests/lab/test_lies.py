"""Tenants that lie about their next use: who is whose, what is said, and what it brings."""

from __future__ import annotations

import heapq
import json
import random
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvcache.lab.replay.chats import ChatWorkload
from kvcache.lab.replay.compact import CompactTrace
from kvcache.lab.replay.lies import CASES, said_by, sessions_of, table, tenants_hits, tenants_of
from kvcache.lab.replay.requests import Request


def trace_of(requests: list[list[int]]) -> CompactTrace:
    return CompactTrace.of(
        (Request(np.array(ids, dtype=np.int64), 16 * len(ids), 0, float(at_s)) for at_s, ids in enumerate(requests)), 16
    )


def test_a_session_goes_on_where_a_request_names_all_of_an_older_one() -> None:
    trace = trace_of(
        [
            [0, 1, 2],
            [0, 3, 4],  # shares the first block alone
            [0, 1, 2, 5],
            [0, 1, 6],  # all but the last block, but of the request before, which named four
            [0, 3, 7, 8],  # all but the last block of request 1
            [],
            [0, 3, 7, 8, 9],
        ]
    )
    assert sessions_of(trace).tolist() == [0, 1, 0, 3, 1, 5, 1]


def test_a_session_has_one_tenant() -> None:
    workload = ChatWorkload(num_requests=500)
    trace = CompactTrace.of(workload, workload.block_size)
    is_second, session = tenants_of(trace, 0.5), sessions_of(trace)
    assert 0.3 < is_second.mean() < 0.7
    assert all(is_second[i] == is_second[session[i]] for i in range(len(trace)))
    assert not tenants_of(trace, 0).any()
    assert tenants_of(trace, 1).all()
    with pytest.raises(ValueError, match=r"share must be in 0\.\.1, got 1\.5"):
        tenants_of(trace, 1.5)


def test_tenants_say_what_their_case_is() -> None:
    trace = trace_of([[0, 1], [0, 1, 2], [3], [4]])
    whose = [False, False, True, True]
    said = {case: said_by(trace, whose, *words, "named" in case) for case, words in CASES.items()}
    names = {case: [hint and hint.next_use for hint in hints] for case, hints in said.items()}
    assert names == {
        "no hints": [None] * 4,
        "both honest": ["soon", "end", "end", "end"],
        "B silent": ["soon", "end", None, None],
        "B always soon": ["soon", "end", "soon", "soon"],
        "the same, named": ["soon", "end", "soon", "soon"],
    }


def tools_and_people(num_requests: int = 4000) -> tuple[CompactTrace, list[bool]]:
    """Return requests of 8 agents, whose tools answer within 20 s, and of 120 people, who take minutes; and whose."""
    draw, ids = random.Random(0), count()
    waiting: list[tuple[float, int, bool, int, list[int]]] = []

    def begin(is_person: bool, at_s: float) -> None:
        turns = draw.randrange(1, 5) if is_person else draw.randrange(4, 13)
        heapq.heappush(waiting, (at_s, next(ids), is_person, turns, [next(ids) for _ in range(6)]))

    for number in range(128):
        begin(number >= 8, draw.uniform(0, 300 if number >= 8 else 60))
    requests, whose = [], []
    while len(requests) < num_requests:
        at_s, _, is_person, turns, prompt = heapq.heappop(waiting)
        requests.append(Request(np.array(prompt, dtype=np.int64), 16 * len(prompt), 0, at_s))
        whose.append(is_person)
        if turns:
            gap_s = draw.uniform(100, 600) if is_person else draw.uniform(3, 20)
            longer = [*prompt, next(ids), next(ids)]
            heapq.heappush(waiting, (at_s + gap_s, next(ids), is_person, turns - 1, longer))
        else:
            begin(is_person, at_s + draw.uniform(1, 10))
    return CompactTrace.of(requests, 16), whose


@pytest.mark.parametrize("policy", ["gittins", "lru", "amq"])
def test_a_tenant_who_always_says_soon_gains_nothing(policy: str) -> None:
    trace, whose = tools_and_people()
    hits = {
        case: tenants_hits(trace, policy, 600, whose, said_by(trace, whose, *words, "named" in case))
        for case, words in CASES.items()
    }
    assert hits["B always soon"][1] <= hits["B silent"][1] < hits["both honest"][1]
    assert hits["B always soon"][0] == hits["both honest"][0], "nor is it at the others' cost"
    assert hits["the same, named"][1] <= hits["B silent"][1]
    assert sum(hits["no hints"]) < sum(hits["both honest"])


def test_the_command_prints_a_table_and_names_what_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for at_s, ids in enumerate([[0, 1], [0, 1, 2], [3], [0, 1, 2]]):
            record = {"timestamp": 1000 * at_s, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
            file.write(json.dumps(record) + "\n")
    trace = trace_of([[0, 1], [0, 1, 2], [3], [0, 1, 2]])
    lines = list(table(trace, ["lru"], [8], 0, 0))
    assert lines[2] == "| lru | 8 |" + " 5 | 0 |" * len(CASES)
    command = [sys.executable, "-m", "kvcache.lab.replay.lies", str(path), "--policies", "lru", "--blocks", "8"]
    assert subprocess.run([*command, "--share", "0"], capture_output=True, text=True).stdout.splitlines() == lines
    failed = subprocess.run([*command, "--share", "2"], capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (2, "lies: share must be in 0..1, got 2.0\n")
