"""`kvcache bench engine` compares medians of first tokens, and its engines must answer alike."""

import pytest

from kvcache.cli.common import CommandError
from kvcache.lab.bench.vllm_turns import prompts
from kvcache.lab.commands.bench_engine import medians


def lines_of(engine, seconds, token=5):
    return [
        {"engine": engine, "turn": turn, "user": user, "seconds": value, "token": token}
        for turn, times in enumerate(seconds)
        for user, value in enumerate(times)
    ]


def test_medians_compare_turns_of_their_kind():
    lines = [
        *lines_of("without", [[1.0, 3.0], [4.0, 4.0], [6.0, 8.0]]),
        *lines_of("kvcache", [[2.0, 3.0], [0.5, 0.5], [0.5, 2.5]]),
        *lines_of("restart", [[0.5, 1.5]]),
        *lines_of("lmcache", [[3.0, 5.0], [1.0, 1.0], [2.0, 1.0]]),
        *lines_of("lmcache restart", [[7.0, 9.0]]),
    ]
    assert medians(lines) == {
        "first turns": {"without": 2.0, "kvcache": 2.5, "lmcache": 4.0, "ratio": 1.25},
        "later turns": {"without": 5.0, "kvcache": 0.5, "lmcache": 1.0, "ratio": 0.1},
        "after a restart": {"without": 2.0, "kvcache": 1.0, "lmcache": 8.0, "ratio": 0.5},
    }


def test_medians_other_token_raises():
    lines = [*lines_of("without", [[1.0], [1.0]]), *lines_of("restart", [[1.0]], token=6)]
    with pytest.raises(CommandError, match="restart: another token in turn 0 of user 0"):
        medians(lines)


def test_prompts_continue_each_users_chat():
    (first, other, second, _) = (prompt for _, _, prompt in prompts(2, 2, 7, 3))
    assert len(first) == 10
    assert second[:10] == first
    assert len(second) == 13
    assert other != first
