"""What hints bring on a trace: who gives which hint, the table, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache import Retention
from kvcache.lab.replay import retention

PROMPTS = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [5, 6], [0, 3, 7], [0]]


def test_a_server_raises_what_continues_an_earlier_prompt_beyond_the_first_block() -> None:
    hints = [hint is not None for hint in retention.raised_chats(PROMPTS)]

    assert hints == [False, False, True, False, True, False]
    assert list(retention.raised_chats(PROMPTS))[2] == Retention(1, 600)


def test_a_server_takes_the_others_for_one_shot() -> None:
    priorities = [hint.priority for hint in retention.first_turns_one_shot(PROMPTS) if hint is not None]

    assert priorities == [-1, -1, 1, -1, 1, -1]


def test_the_oracle_knows_whose_new_blocks_are_never_named_again() -> None:
    hints = list(retention.ended_chats(PROMPTS))

    assert hints == [None, None, Retention(-1), Retention(-1), Retention(-1), Retention(-1)]


def test_the_table_has_a_row_per_policy_and_capacity(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as file:
        for i, ids in enumerate(PROMPTS):
            record = {"timestamp": i * 1000, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
            file.write(json.dumps(record) + "\n")

    assert list(retention.table(str(trace), ["lru"], [3, 100]))[2:] == [
        "| lru | 3 | 5 | 5 | 5 | 5 | 6 |",
        "| lru | 100 | 7 | 7 | 7 | 7 | 7 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--policies", "sieve"], "unknown policy 'sieve'"),
        (["--blocks", "0"], "num_blocks must be an int >= 1, got 0"),
        (["--blocks", "many"], "'many'"),
        ([], "cannot open trace"),
    ],
)
def test_bad_input_ends_the_command_with_the_value(arguments: list[str], fault: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    if arguments:
        trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n')
    command = [sys.executable, "-m", "kvcache.lab.replay.retention", str(trace), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert fault in done.stderr
    assert "Traceback" not in done.stderr


# The row of docs/howto/retention.md that shows most.
@pytest.mark.parametrize(
    ("who", "hits"), [("none", 18850), ("server: chats raised", 19661), ("oracle: ended chats", 45728)]
)
def test_hits_on_the_conversation_trace(who: str, hits: int, shared: Path) -> None:
    with retention.Trace(shared / "traces" / "mooncake_conversation.jsonl") as trace:
        found = list(trace)
    make_keys = retention.KeyMaker()
    requests = [(request.arrival_s, make_keys(request.hash_ids)) for request in found]
    hints = retention.HINTS[who]([request.hash_ids.tolist() for request in found])

    assert retention.prefix_hits(requests, hints, "lru", 3000, 512) == hits
