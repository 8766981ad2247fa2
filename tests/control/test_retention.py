"""Retention hints: main rules in examples, clocks, bad input; test_retention_model.py compares all with the spec."""

from __future__ import annotations

import logging
import re
import tracemalloc
from typing import Any

import pytest

from kvcache import CachePolicy, CPUOffloadingManager, ReqContext, Retention
from kvcache.lab.simulate.run import ReplayClock
from kvcache.testing import REFERENCE_POLICIES

POLICIES = ["lru", "arc", "mq", "amq", "lfuda"]
A, B, C, D, E, F, G, H = (bytes([letter]) for letter in b"ABCDEFGH")


@pytest.fixture(params=POLICIES)
def manager(request: pytest.FixtureRequest, clock: ReplayClock) -> CPUOffloadingManager:
    return CPUOffloadingManager(16, 8, request.param, clock=clock)


def store(manager: CPUOffloadingManager, keys: list[bytes], *hint: Any) -> list[bytes]:
    """Store keys for a request with this hint, end it, and return what was evicted."""
    context = ReqContext(retention=Retention(*hint) if hint else None)
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return output.evicted_keys


def touch(manager: CPUOffloadingManager, keys: list[bytes], *hint: Any) -> None:
    context = ReqContext(retention=Retention(*hint) if hint else None)
    manager.touch(keys, context)
    manager.on_request_finished(context)


def load(manager: CPUOffloadingManager, keys: list[bytes], *hint: Any) -> None:
    context = ReqContext(retention=Retention(*hint) if hint else None)
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)
    manager.on_request_finished(context)


def drained(manager: CPUOffloadingManager) -> list[bytes]:
    """Return every key in the order of eviction."""
    num_blocks = manager.stats().num_blocks - manager.stats().num_free
    manager.prepare_store([b"fill %d" % i for i in range(manager.stats().num_free)])
    output = manager.prepare_store([b"push %d" % i for i in range(num_blocks)])
    assert output is not None
    return output.evicted_keys


def raised(manager: CPUOffloadingManager) -> int:
    return manager.stats().retained_blocks


def test_priorities_leave_from_the_lowest_to_the_highest(clock: ReplayClock) -> None:
    for policy in POLICIES:
        manager = CPUOffloadingManager(16, 8, policy, clock=clock, retention_share=1)
        for key, priority in ((A, 3), (B, 2), (C, 1), (D, 0), (E, -1), (F, 0), (G, -1), (H, 1)):
            store(manager, [key], priority)

        assert raised(manager) == 4
        assert drained(manager) == [E, G, D, F, C, H, B, A]


@pytest.mark.parametrize("use", [touch, load, store])
@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_a_hint_never_lowers_what_another_asked_for(use: Any, priority: int, manager: CPUOffloadingManager) -> None:
    store(manager, [A], 2)
    store(manager, [B], 1)
    use(manager, [A], priority)

    assert drained(manager) == [B, A]


def test_the_time_counts_from_the_end_of_the_request(manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    context = ReqContext(retention=Retention(1, 10))
    manager.complete_store(manager.prepare_store([A], context).keys_to_store, context)
    clock.now_s += 8
    manager.on_request_finished(context)
    clock.now_s += 8
    manager.touch([])
    assert raised(manager) == 1
    clock.now_s += 2
    manager.touch([])

    assert raised(manager) == 0


def test_beyond_the_share_those_nearest_their_end_fall_first(manager: CPUOffloadingManager) -> None:
    # Half of eight blocks.
    for key, ttl_s in ((A, 50), (B, 20), (C, 40), (D, 10)):
        store(manager, [key], 1, ttl_s)
    store(manager, [E], 1, 30)
    assert raised(manager) == 4
    store(manager, [F], 1)
    store(manager, [G])
    store(manager, [H])

    assert raised(manager) == 4
    assert sorted(drained(manager)[:4]) == [B, D, G, H]


def test_at_most_256_fall_in_one_call(clock: ReplayClock) -> None:
    manager = CPUOffloadingManager(16, 10_000, "lru", clock=clock)
    store(manager, [b"%d" % i for i in range(650)], 1, 10)
    clock.now_s += 10
    left = []
    for _ in range(4):
        manager.touch([])
        left.append(raised(manager))

    assert left == [394, 138, 0, 0]
    manager.policy.check()


def test_a_clock_that_gives_no_number_is_refused_at_the_first_hint() -> None:
    manager = CPUOffloadingManager(16, 4, "lru", clock=lambda: float("nan"))
    store(manager, [A])
    with pytest.raises(ValueError, match="clock must give finite seconds, got nan"):
        store(manager, [B], 1, 10)
    store(manager, [C])
    assert manager.lookup([A, C]) == 2


def test_plain_python_policies_ignore_hints(clock: ReplayClock) -> None:
    policy: type[CachePolicy] = REFERENCE_POLICIES["lru"]
    manager = CPUOffloadingManager(16, 8, policy, clock=clock)
    store(manager, [A], 3)
    store(manager, [B], -1)
    store(manager, [C])

    assert raised(manager) == 0
    assert drained(manager) == [A, B, C]


def test_the_clock_is_not_asked_before_the_first_hint() -> None:
    def clock() -> float:
        raise AssertionError("nobody asked for the time")

    manager = CPUOffloadingManager(16, 8, clock=clock)
    store(manager, [A], 0, 10)
    store(manager, [A])
    touch(manager, [A])
    load(manager, [A])

    assert raised(manager) == 0


@pytest.mark.parametrize("operation", ["touch", "prepare_load", "prepare_store"])
def test_a_clock_that_goes_back_is_an_error_that_names_both_times(
    operation: str, manager: CPUOffloadingManager, clock: ReplayClock
) -> None:
    store(manager, [A], 1, 10)
    before = manager.stats()
    clock.now_s = 99.5
    with pytest.raises(ValueError, match=r"clock went back from 100\.0 to 99\.5 s"):
        getattr(manager, operation)([A])

    assert manager.stats() == before
    clock.now_s = 100.0
    getattr(manager, operation)([A])


@pytest.mark.parametrize("ttl_s", [1e-12, 5e-324, 1e-9])
def test_the_shortest_time_ends(ttl_s: float, manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    store(manager, [A], 1, ttl_s)
    clock.now_s += 1e-3
    manager.touch([])

    assert raised(manager) == 0


@pytest.mark.parametrize("ttl_s", [1e12, 1.7e308, 10**400])
def test_the_longest_time_holds(ttl_s: float, manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    store(manager, [A], 1, ttl_s)
    clock.now_s += 1e9
    manager.touch([])

    assert raised(manager) == 1


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "0.5", None, float("nan")])
def test_a_share_that_is_none_is_an_error(share: Any) -> None:
    with pytest.raises(ValueError, match=r"retention_share must be a number in 0\.\.1"):
        CPUOffloadingManager(16, 8, retention_share=share)


def test_a_hint_from_the_engine_counts_like_one_from_the_context(manager: CPUOffloadingManager) -> None:
    context = ReqContext(kv_transfer_params={"kvcache": {"priority": 2, "ttl_s": 300}})
    manager.prepare_store([A], context)

    assert raised(manager) == 1
    assert manager.stats().ignored_hints == 0


@pytest.mark.parametrize(
    ("hint", "named"),
    [
        ("soon", "'soon'"),
        (None, "None"),
        (3, "3"),
        ([2, 300], "a list"),
        ({"priority": 9}, "9"),
        ({"priority": "2"}, "'2'"),
        ({"priority": {}}, "a dict"),
        ({"ttl_s": 0}, "0"),
        ({"priority": 1, "until": 5}, "'until'"),
        ({1: 2}, "1"),
    ],
)
def test_invalid_hint_of_client_is_ignored_counted_and_logged_once(
    hint: Any, named: str, manager: CPUOffloadingManager, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for key in (A, B, C):
            context = ReqContext(kv_transfer_params={"kvcache": hint})
            manager.touch([key], context)
            manager.prepare_store([key], context)
            manager.on_request_finished(context)

    assert manager.stats().ignored_hints == 3
    assert raised(manager) == 0
    assert len(caplog.records) == 1
    assert re.search(f"ignoring a retention hint: .*got {re.escape(named)}$", caplog.messages[0])


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


MANY = 1_000_000


@pytest.mark.parametrize(
    "hint",
    [
        "x" * MANY,
        ["x"] * MANY,
        {"x" * MANY: 1},
        {str(number): 1 for number in range(MANY // 10)},
        {"next_use": "x" * MANY},
        {"next_use": b"x" * MANY},
        {"priority": 1 << (8 * MANY)},
        {"ttl_s": -(1 << (8 * MANY))},
        {"ttl_s": "9" * MANY},
        {"priority": nested(5_000)},
        nested(5_000),
    ],
    ids=lambda hint: type(hint).__name__,
)
def test_huge_hint_of_client_is_ignored_without_reading_it(hint: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = CPUOffloadingManager(16, 8)
    contexts = [ReqContext(kv_transfer_params={"kvcache": one}) for one in ({"priority": 9}, hint)]
    manager.touch([A], contexts[0])
    tracemalloc.start()
    try:
        manager.touch([A], contexts[1])
        assert tracemalloc.get_traced_memory()[1] < 20_000, "the hint was copied or formatted"
    finally:
        tracemalloc.stop()

    assert manager.stats().ignored_hints == 2
    caplog.clear()
    CPUOffloadingManager(16, 8).touch([A], contexts[1])
    assert len(caplog.messages[0]) < 300


def test_a_hint_of_the_wrong_type_set_on_a_context_is_an_error(manager: CPUOffloadingManager) -> None:
    context = ReqContext()
    context.retention = {"priority": 2}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"retention must be a Retention or None, got \{'priority': 2\}"):
        manager.touch([A], context)


def test_a_clock_that_cannot_be_asked_is_an_error() -> None:
    with pytest.raises(ValueError, match="clock must be callable, got 5"):
        CPUOffloadingManager(16, 8, clock=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"kvcache": {}}, "text", 7])
def test_no_hint_from_the_engine_is_no_fault(params: Any, manager: CPUOffloadingManager) -> None:
    manager.touch([A], ReqContext(kv_transfer_params=params))

    assert manager.stats().ignored_hints == 0


def test_a_clock_that_another_thread_read_later_has_not_gone_back() -> None:
    late: list[float] = []

    def clock() -> float:
        if not late:
            return 100.0
        # Between this reading and its use another thread reads 102 and is done first.
        now_s = late.pop(0)
        if now_s == 101.0:
            manager.touch([b"b"])
        return now_s

    manager = CPUOffloadingManager(16, 4, clock=clock)
    manager.touch([b"a"], ReqContext(retention=Retention(1)))
    late += [101.0, 102.0]
    manager.touch([b"a"])
    late += [101.5]
    with pytest.raises(ValueError, match=r"clock went back from 102\.0 to 101\.5 s"):
        manager.touch([b"a"])
