"""Keys, steps and counts of a replay; the rows that every policy must reproduce on the real trace."""

import numpy as np
import pytest

from kvcache import CPUOffloadingManager
from kvcache.lab.simulate.run import Replay
from kvcache.lab.traces.keys import KeyMaker, split_block_size
from kvcache.lab.traces.requests import Request
from kvcache.lab.traces.trace import Trace

CAPACITIES = (1000, 3000, 5000, 10000, 15000, 20000, 30000, 50000, 100000)
PREFIX_HITS = {
    "lru": (12847, 18850, 32260, 61046, 73643, 83035, 93978, 102290, 104924),
    "arc": (14158, 19232, 31653, 56515, 73854, 82345, 88537, 99205, 104755),
}
GATED_HITS = (16601, 36575, 48183, 59582, 60863, 61108, 61223, 61264, 61264)  # lru with a store_threshold of 2


def request_of(*ids, input_length=10**6):
    return Request(np.array(ids, dtype=np.int64), input_length, 0, 0.0)


def test_keys_are_new_objects_alike():
    first, again = (KeyMaker()(np.array([0, 1, -1])) for _ in range(2))
    assert first == again
    assert all(a is not b for a, b in zip(first, again, strict=True))
    assert [len(key) for key in first] == [36, 36, 36]
    assert first[0].hex() == "afcd1d7b39a820e267a6d33e82a5fef2c18bb2a7a4d64828737a5367a08f5ab500000000"


def test_split_keys_differ_from_whole_ones():
    ids = np.arange(5000)
    split = KeyMaker(4)(ids)
    assert len({*split, *KeyMaker(1)(ids)}) == 25_000
    assert split[4:8] == KeyMaker(4)(np.array([1]))


@pytest.mark.parametrize("split", [0, -2, 3, 1024, True, 2.0])
def test_split_must_divide_block_tokens(split):
    with pytest.raises(ValueError, match=f"split must divide the 512 tokens of a block, got {split}"):
        split_block_size(512, split)
    assert split_block_size(512, 32) == 16


class Recorder:
    """Replaces a manager, a payload or both, and records the calls."""

    block_size = 16

    def __init__(self, inner, calls):
        self._inner = inner
        self._calls = calls

    def __getattr__(self, name):
        def call(*args):
            self._calls.append((name, list(args[0]) if isinstance(args[0], list) else None))
            return getattr(self._inner, name)(*args) if self._inner is not None else None

        return call


def test_steps_are_those_of_a_scheduler():
    calls = []
    manager = Recorder(CPUOffloadingManager(16, 4), calls)
    replay = Replay(manager, Recorder(None, calls))
    a, b, c = KeyMaker()(np.arange(3))
    assert replay.step(request_of(0, 1), [a, b]) == 0
    calls.clear()
    assert replay.step(request_of(0, 1, 2), [a, b, c]) == 2
    assert calls == [
        ("lookup", [a, b, c]),
        ("touch", [a, b, c]),
        ("prepare_load", [a, b]),
        ("load", [a, b]),
        ("complete_load", [a, b]),
        ("prepare_store", [a, b, c]),
        ("store", [c]),
        ("complete_store", [c]),
        ("on_request_finished", None),
    ]


def test_tally_counts_blocks_tokens_and_rejections():
    manager = CPUOffloadingManager(16, 2)
    replay = Replay(manager)
    make_keys = KeyMaker()
    for ids, input_length in (((0, 1), 20), ((0, 1), 20), ((2,), 16), ((0, 3, 4), 48)):
        replay.step(request_of(*ids, input_length=input_length), make_keys(np.array(ids)))
    counted = replay.tally.as_dict()
    times = counted.pop("bookkeeping_us")
    assert counted == {
        "requests": 4,
        "tokens": 104,
        "hit_tokens": 20 + 16,
        "token_hit_rate": 36 / 104,
        "blocks": 8,
        "hit_blocks": 3,
        "block_hit_rate": 3 / 8,
        "stored_blocks": 3,
        "loaded_blocks": 3,
        "evicted_blocks": 1,
        "rejected_requests": 1,
    }
    assert 0 < times["p50"] <= times["p99"] <= times["max"] <= times["total"]
    assert manager.stats().num_referenced == manager.stats().num_pending == 0


@pytest.fixture(scope="module")
def conversation(shared):
    make_keys = KeyMaker()
    with Trace(shared / "traces" / "mooncake_conversation.jsonl") as trace:
        return [(request, make_keys(request.hash_ids)) for request in trace]


@pytest.mark.parametrize(
    "num_blocks", [pytest.param(n, marks=[pytest.mark.slow] * (n not in (1000, 10000))) for n in CAPACITIES]
)
@pytest.mark.parametrize(
    ("policy", "store_threshold", "hits"),
    [*((name, 0, hits) for name, hits in PREFIX_HITS.items()), ("lru", 2, GATED_HITS)],
)
def test_policy_reproduces_its_prefix_hits(conversation, policy, store_threshold, hits, num_blocks):
    replay = Replay(CPUOffloadingManager(512, num_blocks, policy, store_threshold=store_threshold))
    for request, keys in conversation:
        replay.step(request, keys)
    assert replay.tally.hit_blocks == hits[CAPACITIES.index(num_blocks)]
