"""The bound on what can be hit without hints: exact on traces worked out by hand, and above a policy's hits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import CPUOffloadingManager
from kvcache.lab.replay.chats import ChatWorkload
from kvcache.lab.replay.compact import CompactTrace
from kvcache.lab.replay.keys import KeyMaker
from kvcache.lab.replay.requests import Request
from kvcache.lab.replay.run import Replay

UNHINTED = Path(__file__).resolve().parents[2] / "asv_benchmarks" / "unhinted.py"

pytestmark = pytest.mark.skipif(not UNHINTED.is_file(), reason="the benchmarks are not beside the tests")


def bound_of(requests: list[Request]) -> Any:
    spec = importlib.util.spec_from_file_location("unhinted", UNHINTED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BlindBound(CompactTrace.of(requests, 16))


def requests_of(*arrivals_and_ids: tuple[float, list[int]]) -> list[Request]:
    return [Request(np.array(ids, np.int64), 16 * len(ids), 0, at_s) for at_s, ids in arrivals_and_ids]


def test_one_block_of_memory_holds_a_block_that_always_comes_back() -> None:
    bound = bound_of(requests_of(*((10.0 * i, [1]) for i in range(5))))
    assert [bound.hits(num_blocks) for num_blocks in (0, 1, 2)] == [0.0, 4.0, 4.0]


def test_blocks_of_one_kind_are_all_held_for_as_long_as_the_one_that_comes_back() -> None:
    # To hit block 1 after 10 s, block 2 is held for 10 s, too: a block of memory, on average over 20 s.
    bound = bound_of(requests_of((0.0, [1]), (0.0, [2]), (10.0, [1]), (20.0, [3])))
    assert [bound.hits(num_blocks) for num_blocks in (0, 1, 2)] == [0.0, 1.0, 1.0]


def test_last_blocks_that_never_come_back_take_no_memory_from_prompts_that_do() -> None:
    bound = bound_of(requests_of((0.0, [1, 2]), (10.0, [1, 3]), (20.0, [1, 4])))
    assert bound.hits(1) == 2.0


def test_a_block_that_a_request_names_twice_counts_once() -> None:
    bound = bound_of(requests_of((0.0, [1, 1]), (10.0, [1, 1])))
    assert bound.hits(2) == 1.0


@pytest.mark.parametrize("num_blocks", [50, 200, 800])
def test_lru_does_not_hit_more(num_blocks: int) -> None:
    requests = list(ChatWorkload(num_requests=300, block_size=64))
    make_keys = KeyMaker()
    replay = Replay(CPUOffloadingManager(64, num_blocks, "lru"))
    num_hits = sum(replay.step(request, make_keys(request.hash_ids)) for request in requests)
    assert 0 < num_hits <= bound_of(requests).hits(num_blocks)
