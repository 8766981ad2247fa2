"""The what-if of running traffic: exact while all keys are sampled, close when few are, bounded, and nearly free."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import (
    BackendOffloadingManager,
    CPUBackend,
    CPUOffloadingManager,
    LRUCachePolicy,
    OffloadingManager,
    ReqContext,
    WhatIf,
)
from kvcache.control.curve import sampler_for
from kvcache.core.index import key_hash
from kvcache.core.sampler import Sampler
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.trace import Trace
from kvcache.testing.reference import ReferenceLRU

PLAIN = "kvcache.testing.reference:ReferenceLRU"


def serve(manager: OffloadingManager, requests: Sequence[Sequence[bytes]]) -> int:
    """Take requests through a manager as a scheduler does and return the prefix hits."""
    num_hits = 0
    for request in requests:
        keys = list(request)
        context = ReqContext()
        hits = manager.lookup(keys, context)
        assert isinstance(hits, int)
        num_hits += hits
        manager.touch(keys, context)
        output = manager.prepare_store(keys, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
    return num_hits


def chats(num_requests: int, seed: int = 0) -> list[list[bytes]]:
    make_keys = KeyMaker()
    return [make_keys(request.hash_ids) for request in ChatWorkload(num_requests=num_requests, seed=seed)]


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def what_if_of(manager: CPUOffloadingManager, requests: Sequence[Sequence[bytes]], **options: Any) -> WhatIf:
    serve(manager, requests)
    return manager.what_if(**options)


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["chats", "conversation"])
def test_curves_are_close_to_exact_replays(workload: str, request: pytest.FixtureRequest) -> None:
    num_blocks, capacities, requests = 7000, (3000, 5000, 10_000, 15_000), chats(3000, seed=1)
    if workload == "conversation":
        num_blocks, capacities, make_keys = 10_000, (3000, 10_000, 20_000, 50_000), KeyMaker()
        with Trace(request.getfixturevalue("shared") / "traces" / "mooncake_conversation.jsonl") as trace:
            requests = [make_keys(one.hash_ids) for one in trace]
    found = what_if_of(CPUOffloadingManager(16, num_blocks, what_if=True), requests, capacities=capacities)
    assert (found.sample_rate, list(found.hit_ratios)) == (0.25, ["lru"])
    uses = sum(map(len, requests))
    exact = [serve(CPUOffloadingManager(16, capacity), requests) / uses for capacity in capacities]
    errors = np.abs(np.array(found.hit_ratios["lru"]) - exact)
    assert errors.mean() <= 0.02
    # The key of the hash decides whether a hot prefix is sampled; the error of a bad draw is larger than it says.
    assert (errors <= 0.02 + 4 * np.array(found.standard_errors)).all()


def test_all_keys_sampled_means_no_error() -> None:
    requests = chats(300)
    longest = max(map(len, requests))
    capacities = (longest, 2 * longest, 5000, 10_000)
    found = what_if_of(CPUOffloadingManager(16, 1000, what_if=True), requests, capacities=capacities)
    uses = sum(map(len, requests))
    assert (found.sample_rate, found.sampled_uses, found.uses, found.requests) == (1.0, uses, uses, 300)
    assert found.standard_errors == (0.0,) * 4
    hits = [serve(CPUOffloadingManager(16, capacity), requests) for capacity in capacities]
    assert [round(ratio * uses) for ratio in found.hit_ratios["lru"]] == hits


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 3)), max_size=30), st.integers(6, 20))
def test_run_distances_equal_served_lru(paths: list[tuple[int, int, int]], capacity: int) -> None:
    # A request is a stem and then a branch of its own, so that heads are shared and tails are not.
    requests = [[key(100 * stem + at + (10 * branch if at > 2 else 0)) for at in range(n)] for stem, n, branch in paths]
    manager = CPUOffloadingManager(1, capacity, what_if=1024)
    hits = serve(manager, requests)
    uses = sum(map(len, requests))
    assert manager.what_if().hits_at(capacity) == (hits / uses if uses else 0.0)


def test_sample_holds_all_uses_of_keys() -> None:
    sampler = Sampler(1024, 63)
    requests = chats(100)
    for keys in requests:
        sampler.take_keys(keys)
    hashes, numbers, uses, num_requests = sampler.snapshot()
    limit = 1 << (64 - sampler.num_halvings)
    counted = Counter(key_hash(key) for keys in requests for key in keys)
    assert Counter(hashes.tolist()) == {value: count for value, count in counted.items() if value < limit}
    assert (uses, num_requests) == (sum(map(len, requests)), 100)
    assert sampler.num_halvings >= 3
    assert not sampler.is_window
    assert (np.diff(numbers) >= 0).all()
    assert (numbers[0] >= 1, numbers[-1] <= 100) == (True, True)


def test_log_takes_twelve_bytes_a_use() -> None:
    max_uses = 100_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        sampler = Sampler(max_uses, 3)
        for request in range(150):
            sampler.take_keys([key(number) for number in range(1000 * request, 1000 * request + 4000)])
            assert sampler.num_sampled <= max_uses
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Other threads of the process (a test runner's) may allocate a little of their own meanwhile.
    assert 12 * max_uses < grown <= 12 * max_uses + 65536
    assert sampler.num_halvings == 3


def test_full_log_forgets_the_oldest_half() -> None:
    # 100 blocks: the rate may not fall, or the capacity would be lost in the sample.
    manager = CPUOffloadingManager(16, 100, what_if=1024)
    old = [[key(number) for number in range(8)]] * 100
    new = [[key(1000 + 8 * request + at) for at in range(8)] for request in range(200)]
    assert what_if_of(manager, old).hit_ratios["lru"][-1] == pytest.approx(0.99)
    found = what_if_of(manager, new)
    assert isinstance(manager.observer, Sampler)
    assert (manager.observer.is_window, found.sample_rate) == (True, 1.0)
    assert 512 <= found.uses == found.sampled_uses <= 1024
    assert found.requests == found.uses // 8
    assert found.hit_ratios["lru"] == (0.0,) * 6
    assert any("older ones have been dropped" in note for note in found.notes)
    # A window warms up before it counts.
    found = what_if_of(CPUOffloadingManager(16, 100, what_if=1024), old * 3)
    assert all(ratios == (1.0,) * 6 for ratios in found.hit_ratios.values())


def test_one_hot_key_never_fills_log() -> None:
    sampler = Sampler(1024, 63)
    for _ in range(10_000):
        sampler.take_keys([b"hot"])
    assert sampler.num_sampled <= 1024
    for number in range(100_000):
        sampler.take_keys([key(number)])
    assert sampler.num_sampled <= 1024


def test_hot_keys_do_not_tilt_curve() -> None:
    # Ten keys make half of all uses: sampled or not, they are hits.
    hot = [key(number) for number in range(10)]
    requests = [hot + [key(100 * request + at) for at in range(10)] for request in range(1, 2000)]
    # At half of the keys: 10,000 uses of cold ones and, should all ten be sampled, 20,000 of hot ones.
    found = what_if_of(CPUOffloadingManager(16, 10_000, what_if=32_768), requests)
    assert found.sample_rate <= 1 / 2
    assert not found.notes
    assert found.hits_at(4000) == pytest.approx(0.5, abs=0.03)


def test_requests_count_once_they_finish() -> None:
    manager = CPUOffloadingManager(16, 100, what_if=True)
    keys = [key(number) for number in range(5)]
    context = ReqContext()
    manager.lookup(keys, context)
    manager.on_request_finished(context)
    assert manager.what_if().requests == 0  # a look-up is no use
    manager.touch(keys[:3], context)
    manager.touch(keys[:3], context)
    output = manager.prepare_store(keys[:4], context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)
    assert (manager.what_if().uses, manager.what_if().notes) == (0, ("no request has finished yet",))
    manager.on_request_finished(context)
    assert (manager.what_if().uses, manager.what_if().requests) == (4, 1)
    manager.touch(keys[:2])
    manager.touch(keys[:2])
    found = manager.what_if()
    assert (found.uses, found.requests) == (8, 3)
    assert found.hits_at(100) == 0.5


def test_reset_forgets_the_sample() -> None:
    manager = CPUOffloadingManager(16, 1000, what_if=1024)
    serve(manager, chats(100))
    assert manager.what_if().sample_rate < 1
    manager.reset_cache()
    found = manager.what_if()
    assert (found.uses, found.requests, found.sample_rate) == (0, 0, 1.0)
    assert set(found.hit_ratios["lru"]) == {0.0}


def test_sampling_changes_no_answer() -> None:
    requests = chats(100)
    managers = [CPUOffloadingManager(16, 700, "arc", True, what_if=what_if) for what_if in (False, 1024)]
    assert serve(managers[0], requests) == serve(managers[1], requests)
    assert managers[0].stats() == managers[1].stats()
    assert list(managers[0].take_events()) == list(managers[1].take_events())


def test_python_policies_are_sampled_alike() -> None:
    requests = chats(60)
    compiled = CPUOffloadingManager(16, 700, what_if=1024)
    plain = CPUOffloadingManager(16, 700, PLAIN, what_if=1024)
    backend = BackendOffloadingManager(CPUBackend(16, 700), what_if=1024)
    found = [what_if_of(manager, requests) for manager in (compiled, plain)]
    serve(backend, requests)
    found.append(backend.what_if())
    assert found[0].hit_ratios == found[1].hit_ratios == found[2].hit_ratios
    assert [one.policy for one in found] == ["lru", None, "lru"]


def test_twice_the_memory_is_one_line() -> None:
    # Rounds over 150 blocks: 100 hold none of them till they come again, 200 hold all.
    requests = [[key(number)] for number in range(150)] * 4
    found = what_if_of(CPUOffloadingManager(16, 100, what_if=True), [*requests, *([[b"a"]] * 50)])
    assert found.capacities == (25, 50, 100, 200, 400, 800)
    assert found.hits_at(100) == found.hits_at(149) == 49 / 650
    assert found.hits_at(150) == found.hits_at(200) == (49 + 450) / 650
    assert found.gain(200) == pytest.approx(450 / 49)
    assert "twice the memory: +918.4% hits of lru" in str(found)
    caption, heads = str(found).splitlines()[:2]
    assert caption == "share of blocks hit, by capacity, * the present one"
    assert heads.split() == ["blocks", "25", "50", "100*", "200", "400", "800"]
    assert "estimated from 650 of 650 uses in 650 requests, 1 key in 1" in str(found)


def test_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be an int >= 1, got 0"):
        CPUOffloadingManager(16, 100, what_if=True).what_if().hits_at(0)


@pytest.mark.parametrize("policy", ["arc", "gittins", PLAIN])
def test_other_policy_shows_what_it_loaded(policy: str) -> None:
    manager = CPUOffloadingManager(16, 8, policy, what_if=True)
    keys = [key(number) for number in range(4)]
    serve(manager, [keys])
    context = ReqContext()
    manager.lookup(keys, context)
    manager.prepare_load(keys[:3], context)
    manager.complete_load(keys[:3], context)
    manager.on_request_finished(context)
    found = manager.what_if()
    stats = manager.stats()
    assert found.loaded_ratio == stats.loaded_blocks / stats.needed_blocks == 3 / stats.needed_blocks
    [line] = [line for line in str(found).splitlines() if ", loaded" in line]
    assert line.split()[-6:] == ["-", "-", f"{found.loaded_ratio:.1%}", "-", "-", "-"]
    assert line.startswith("own policy" if policy == PLAIN else policy)


def test_nothing_hit_and_nothing_to_gain() -> None:
    found = CPUOffloadingManager(16, 100, what_if=True).what_if()
    assert found.gain(200) == 0.0
    found = what_if_of(CPUOffloadingManager(16, 1, what_if=True), [[b"a"], [b"b"]] * 2)
    assert found.gain(2) == math.inf
    assert found.capacities == (1, 2, 4, 8)


@pytest.mark.parametrize("wrong", [0, 1, 1023, -5, 1 << 30, 2.5, "yes", None])
def test_bad_sample_sizes_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="what_if must be an int in 1024") as caught:
        CPUOffloadingManager(16, 100, what_if=wrong)
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacities": []}, "capacities must not be empty"),
        ({"capacities": [0, 1]}, "a capacity must be an int in 1..1073741823, got 0"),
        ({"capacities": [1.5]}, "a capacity must be .*, got 1.5"),
        ({"capacities": [20, 10]}, r"capacities must ascend, got \(20, 10\)"),
        ({"capacities": [10, 10]}, r"capacities must ascend, got \(10, 10\)"),
    ],
)
def test_bad_questions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUOffloadingManager(16, 100, what_if=True).what_if(**options)


def test_manager_without_sampler_explains_itself() -> None:
    with pytest.raises(ValueError, match="make it with what_if=True"):
        CPUOffloadingManager(16, 100).what_if()


def test_trails_without_keys_are_refused() -> None:
    class BlockCache:
        def open_request(self) -> object:
            return object()

    class Hiding(ReferenceLRU):
        def native(self, num_blocks: int) -> Any:
            return BlockCache()

    assert sampler_for(False, 10) is None
    with pytest.raises(ValueError, match="an observer needs requests that have `keys`, got object"):
        CPUOffloadingManager(16, 10, Hiding, what_if=True)


@pytest.mark.parametrize("arguments", [(1, 0), (0, 0), (1 << 30, 0), (2.0, 0), (10, -1), (10, 64), (10, 1.0)])
def test_sampler_checks_its_sizes(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be an int"):
        Sampler(*arguments)


def test_filter_costs_twentieth_of_bookkeeping() -> None:
    # New objects for every round, as an engine makes them; but request_keys_by_pool as warm as a request leaves them.
    rounds_of_requests = [chats(500) for _ in range(5)]
    cache = LRUCachePolicy(3000).native(3000)
    request_keys_by_pool = []
    for keys in rounds_of_requests[0][:40]:
        request_keys_by_pool.append(cache.open_request())
        cache.touch(keys, request_keys_by_pool[-1])

    def serving(requests: list[list[bytes]]) -> float:
        manager = CPUOffloadingManager(16, 3000)
        start = process_time()
        serve(manager, requests)
        return (process_time() - start) / sum(map(len, requests))

    def sampling() -> float:
        # Long enough for the log to be full several times.
        sampler = Sampler(8192, 20)
        start = process_time()
        for _ in range(20):
            for request_keys in request_keys_by_pool:
                sampler.take(request_keys)
        return (process_time() - start) / sampler.snapshot()[2]

    rounds = [(serving(requests), sampling()) for requests in rounds_of_requests]
    assert min(spent for _, spent in rounds) <= 0.05 * min(spent for spent, _ in rounds)
