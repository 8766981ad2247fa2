"""Hints of retention and next use: rules in examples, clocks, bad input; test_retention_model.py has the whole spec."""

from __future__ import annotations

import logging
import re
import tracemalloc
from typing import Any

import pytest
from reference_gittins import ReferenceGittins

from kvcache import (
    BackendOffloadingManager,
    CPUBackend,
    CPUOffloadingManager,
    LRUCachePolicy,
    ReqContext,
    Retention,
    TieredOffloadingManager,
)
from kvcache.lab.simulate.run import ReplayClock
from kvcache.testing import ReferenceManager
from kvcache.testing.reference import ReferenceLRU

POLICIES = ["lru", "arc"]
A, B, C, D, E, F, G, H = (bytes([letter]) for letter in b"ABCDEFGH")


@pytest.fixture(params=POLICIES)
def manager(request: pytest.FixtureRequest, clock: ReplayClock) -> CPUOffloadingManager:
    return CPUOffloadingManager(16, 8, request.param, clock=clock)


def serve(manager: Any, keys: list[bytes], next_use: str | None = None, **params: Any) -> ReqContext:
    """Touch and store keys for a request with this hint of next use, end it, and return it."""
    context = ReqContext(retention=None if next_use is None else Retention(next_use=next_use), **params)
    manager.touch(keys, context)
    stored(manager, keys, context)
    return context


def stored(manager: Any, keys: list[bytes], context: ReqContext) -> None:
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)


def hinted(*hint: Any) -> ReqContext:
    return ReqContext(retention=Retention(*hint) if hint else None)


def store(manager: CPUOffloadingManager, keys: list[bytes], *hint: Any) -> None:
    stored(manager, keys, hinted(*hint))


def touch(manager: CPUOffloadingManager, keys: list[bytes], *hint: Any) -> None:
    context = hinted(*hint)
    manager.touch(keys, context)
    manager.on_request_finished(context)


def load(manager: CPUOffloadingManager, keys: list[bytes], *hint: Any) -> None:
    context = hinted(*hint)
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


def test_lowest_priority_leaves_first(clock: ReplayClock) -> None:
    for policy in POLICIES:
        manager = CPUOffloadingManager(16, 8, policy, clock=clock, retention_share=1)
        for key, priority in ((A, 3), (B, 2), (C, 1), (D, 0), (E, -1), (F, 0), (G, -1), (H, 1)):
            store(manager, [key], priority)

        assert raised(manager) == 4
        assert drained(manager) == [E, G, D, F, C, H, B, A]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_call_lowers_256_at_most(policy: str, clock: ReplayClock) -> None:
    manager = CPUOffloadingManager(16, 10_000, policy, clock=clock)
    store(manager, [b"%d" % i for i in range(650)], 1, 10)
    clock.now_s += 10
    left = []
    for _ in range(4):
        manager.touch([])
        left.append(raised(manager))

    assert left == [394, 138, 0, 0]
    manager.policy.check()


def test_clock_without_number_fails_first_hint() -> None:
    manager = CPUOffloadingManager(16, 4, "lru", clock=lambda: float("nan"))
    store(manager, [A])
    with pytest.raises(ValueError, match="clock must give finite seconds, got nan"):
        store(manager, [B], 1, 10)
    store(manager, [C])
    assert manager.lookup([A, C]) == 2


def test_plain_python_policies_ignore_hints(clock: ReplayClock) -> None:
    manager = CPUOffloadingManager(16, 8, ReferenceLRU, clock=clock)
    store(manager, [A], 3)
    store(manager, [B], -1)
    store(manager, [C])

    assert raised(manager) == 0
    assert drained(manager) == [A, B, C]


def test_clock_is_unread_before_first_hint() -> None:
    def clock() -> float:
        raise AssertionError("nobody asked for the time")

    manager = CPUOffloadingManager(16, 8, clock=clock)
    store(manager, [A], 0, 10)
    store(manager, [A])
    touch(manager, [A])
    load(manager, [A])

    assert raised(manager) == 0


@pytest.mark.parametrize("operation", ["touch", "prepare_load", "prepare_store"])
def test_clock_going_back_names_both_times(operation: str, manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    store(manager, [A], 1, 10)
    before = manager.stats()
    clock.now_s = 99.5
    with pytest.raises(ValueError, match=r"clock went back from 100\.0 to 99\.5 s"):
        getattr(manager, operation)([A])

    assert manager.stats() == before
    clock.now_s = 100.0
    getattr(manager, operation)([A])


@pytest.mark.parametrize(
    ("ttl_s", "after_s", "num_raised"),
    [*((ttl_s, 1e-3, 0) for ttl_s in (1e-12, 5e-324, 1e-9)), *((ttl_s, 1e9, 1) for ttl_s in (1e12, 1.7e308, 10**400))],
)
def test_shortest_ttl_expires_longest_holds(
    ttl_s: float, after_s: float, num_raised: int, manager: CPUOffloadingManager, clock: ReplayClock
) -> None:
    store(manager, [A], 1, ttl_s)
    clock.now_s += after_s
    manager.touch([])

    assert raised(manager) == num_raised


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"retention_share": bad}, r"must be a number in 0\.\.1")
            for bad in (-0.1, 1.1, True, "half", None, float("nan"))
        ),
        ({"clock": 5}, "clock must be callable, got 5"),
    ],
)
def test_invalid_share_or_clock_raises(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUOffloadingManager(16, 8, **options)


@pytest.mark.parametrize("hint", [{"priority": 2, "ttl_s": 300}, {"next_use": "soon"}])
def test_engine_hint_counts_like_context_hint(hint: dict[str, Any], manager: CPUOffloadingManager) -> None:
    manager.prepare_store([A], ReqContext(kv_transfer_params={"kvcache": hint}))

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
        ({"next_use": "tomorrow"}, "'tomorrow'"),
    ],
)
def test_invalid_client_hint_is_logged_once(
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
def test_huge_client_hint_is_not_read(hint: Any, caplog: pytest.LogCaptureFixture) -> None:
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


def test_context_hint_of_wrong_type_raises(manager: CPUOffloadingManager) -> None:
    context = ReqContext()
    context.retention = {"priority": 2}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"retention must be a Retention or None, got \{'priority': 2\}"):
        manager.touch([A], context)


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"kvcache": {}}, "text", 7])
def test_engine_without_hint_is_no_fault(params: Any, manager: CPUOffloadingManager) -> None:
    manager.touch([A], ReqContext(kv_transfer_params=params))

    assert manager.stats().ignored_hints == 0


def test_clock_read_by_threads_goes_forward() -> None:
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


def test_end_leaves_first_soon_last(manager: CPUOffloadingManager) -> None:
    for key, next_use in ((A, "soon"), (B, None), (C, "later"), (D, "end")):
        serve(manager, [key], next_use)
    assert drained(manager) == [D, B, C, A]


def test_soon_holds_for_a_minute(manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    serve(manager, [A], "soon")
    clock.now_s += 59.9
    serve(manager, [B])
    assert manager.stats().retained_blocks == 1
    clock.now_s += 0.2
    serve(manager, [C])
    assert manager.stats().retained_blocks == 0
    assert drained(manager)[0] == A


def test_explicit_priority_precedes_next_use() -> None:
    assert Retention(2, next_use="end").priority_class == 2
    assert Retention(-1, next_use="soon").priority_class == -1
    assert Retention(0, 30, "soon").ttl_ns == 30 * 10**9
    assert Retention(2, next_use="soon").ttl_ns == 0


@pytest.mark.parametrize("bad", ["", "Soon", 1, True, ("soon",), b"end", object()])
def test_bad_value_raises_before_any_change(manager: CPUOffloadingManager, bad: Any) -> None:
    context = serve(manager, [A], "soon")
    text = r"next_use must be one of 'end', 'soon', 'later', got "
    with pytest.raises(ValueError, match=text):
        Retention(next_use=bad)
    for target in (context, [A]):
        with pytest.raises(ValueError, match=text):
            manager.hint(target, bad)
    with pytest.raises(ValueError, match="keys must be"):
        manager.hint(17, "end")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be exact, non-empty bytes"):
        manager.hint([A, ""], "end")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"got None"):
        manager.hint([A], None)  # type: ignore[arg-type]
    assert manager.stats().retained_blocks == 1


def test_python_policies_get_hints_in_order() -> None:
    heard: list[tuple[list[bytes], str]] = []

    class Listening(ReferenceLRU):
        def hint(self, keys: list[bytes], next_use: str) -> None:
            heard.append((keys, next_use))

    for policy in (Listening, ReferenceLRU):
        manager = CPUOffloadingManager(16, 4, policy)
        context = ReqContext()
        for key, position in ((B, 32), (A, 16), (C, 48)):
            context.set_offload_key_position(key, position)
            manager.prepare_store([key], context)
        manager.hint(context, "soon")
        manager.on_request_finished(context)
        manager.hint(context, "end")
        manager.hint((A,), "soon")
    assert heard == [([A, B, C], "soon"), ([A, B, C], "end"), ([A], "soon")]
    backed = BackendOffloadingManager(CPUBackend(16, 4), LRUCachePolicy)
    backed.hint(serve(backed, [A]), "end")


def test_host_pool_over_tiers_takes_hints(clock: ReplayClock) -> None:
    manager = TieredOffloadingManager(16, 4, [], clock=clock)
    context = serve(manager, [A], "soon")
    assert manager.stats().retained_blocks == 1
    manager.hint(context, "end")
    assert manager.stats().retained_blocks == 0
    with pytest.raises(ValueError, match="got 'never'"):
        manager.hint(context, "never")


def test_python_policy_sees_hint_without_keys() -> None:
    for kind in (ReferenceManager, CPUOffloadingManager):
        manager = kind(16, 1, ReferenceGittins, clock=iter((3.0, 5.5)).__next__)
        for next_use in ("end", "soon"):
            manager.hint(ReqContext("no keys yet"), next_use)
        assert (manager.policy.start_ms, manager.policy.now_ms) == (0, 2500)
