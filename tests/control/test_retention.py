"""Hints of next use: what `end` moves under lru and arc, clocks, bad input; the policies' machines compare the rest."""

from __future__ import annotations

import logging
import re
import tracemalloc
from typing import Any

import pytest
from reference_gittins import ReferenceGittins
from reference_policies import ReferenceARC

from kvcache import (
    ARCCachePolicy,
    BackendOffloadingManager,
    CPUBackend,
    CPUOffloadingManager,
    LRUCachePolicy,
    ReqContext,
    Retention,
    TieredOffloadingManager,
)
from kvcache.testing import ReferenceManager
from kvcache.testing.reference import ReferenceLRU

A, B, C, D, E = (bytes([letter]) for letter in b"ABCDE")
MAKERS = {
    "lru": lambda: CPUOffloadingManager(16, 8, "lru"),
    "arc": lambda: CPUOffloadingManager(16, 8, "arc"),
    "lru in Python": lambda: CPUOffloadingManager(16, 8, ReferenceLRU),
    "arc in Python": lambda: CPUOffloadingManager(16, 8, ReferenceARC),
    "lru over a backend": lambda: BackendOffloadingManager(CPUBackend(16, 8), LRUCachePolicy),
    "arc over a backend": lambda: BackendOffloadingManager(CPUBackend(16, 8), ARCCachePolicy),
    "lru over tiers": lambda: TieredOffloadingManager(16, 8, [], "lru"),
    "the specification": lambda: ReferenceManager(16, 8, "lru"),
}


@pytest.fixture(params=MAKERS)
def manager(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]()


def hinted(next_use: str | None = None) -> ReqContext:
    return ReqContext(retention=Retention(next_use))


def stored(manager: Any, keys: list[bytes], context: ReqContext) -> ReqContext:
    """Touch and store keys for a request, and return it. It goes on."""
    manager.touch(keys, context)
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store, context)
    return context


def serve(manager: Any, keys: list[bytes], next_use: str | None = None) -> ReqContext:
    """Touch and store keys for a request with this hint of next use, end it, and return it."""
    context = stored(manager, keys, hinted(next_use))
    manager.on_request_finished(context)
    return context


def drained(manager: Any) -> list[bytes]:
    """Return every key in the order of eviction."""
    num_free = manager.stats().num_free
    manager.prepare_store([b"fill %d" % i for i in range(num_free)])
    output = manager.prepare_store([b"push %d" % i for i in range(8 - num_free)])
    assert output is not None
    evicted: list[bytes] = output.evicted_keys
    return evicted


def test_end_evicts_own_tail_first(manager: Any) -> None:
    serve(manager, [A, B])
    serve(manager, [C, D], "end")
    serve(manager, [E])
    assert drained(manager) == [D, C, B, A, E]


def test_soon_and_later_change_nothing(manager: Any) -> None:
    for key, next_use in ((A, "soon"), (B, None), (C, "later"), (D, "end")):
        context = serve(manager, [key], next_use)
    manager.hint([B], "later")
    manager.hint(context, "soon")
    assert drained(manager) == [D, A, B, C]


def test_end_spares_blocks_others_used(manager: Any) -> None:
    session = stored(manager, [A, B, C], hinted("end"))
    serve(manager, [A, D])
    serve(manager, [D, E], "end")
    manager.on_request_finished(session)
    assert set(drained(manager)[:3]) == {B, C, E}


@pytest.mark.parametrize("has_ended", [False, True])
def test_late_end_covers_own_blocks(manager: Any, has_ended: bool) -> None:
    serve(manager, [A])
    context = stored(manager, [A, B, C], hinted("soon"))
    serve(manager, [D])
    if has_ended:
        manager.on_request_finished(context)
        manager.hint(context, "end")
    else:
        manager.hint(context, "end")
        manager.on_request_finished(context)
    assert drained(manager)[:2] == [C, B]


def test_corrected_end_moves_nothing(manager: Any) -> None:
    context = stored(manager, [A], hinted("end"))
    serve(manager, [B])
    manager.hint(context, "later")
    manager.on_request_finished(context)
    assert drained(manager) == [B, A]


def test_end_of_keys_covers_all(manager: Any) -> None:
    serve(manager, [A, B])
    serve(manager, [A, B])
    serve(manager, [C])
    serve(manager, [D])
    manager.hint((A, b"unknown", B, C), "end")
    assert drained(manager) == [C, B, A, D]


def test_end_moves_to_oldest_of_t1() -> None:
    manager = CPUOffloadingManager(16, 8, "arc")
    serve(manager, [A, B])
    serve(manager, [A, B])
    serve(manager, [C])
    manager.hint([A, B], "end")
    assert (list(manager.policy.t1), list(manager.policy.t2)) == ([B, A, C], [])  # type: ignore[attr-defined]


def test_later_use_undoes_end(manager: Any) -> None:
    serve(manager, [A, B], "end")
    serve(manager, [C])
    manager.touch([B], ReqContext())
    assert drained(manager) == [A, C, B]


def test_block_of_another_store_stays(manager: Any) -> None:
    """The first request used A while it was absent. The second one stored B, which was evicted and stored again."""
    first, second = hinted("end"), hinted("end")
    manager.touch([A], first)
    stored(manager, [B], second)
    fill = [b"fill %d" % i for i in range(8)]
    stored(manager, fill, ReqContext())
    manager.hint(fill, "end")
    serve(manager, [A, B])
    serve(manager, [C])
    manager.on_request_finished(first)
    manager.on_request_finished(second)
    assert not {A, B} & set(drained(manager)[:5])


@pytest.mark.parametrize("fails", [False, True])
def test_block_stored_again_is_own(manager: Any, fails: bool) -> None:
    manager.prepare_store([A], ReqContext())
    manager.touch([A], ReqContext())
    manager.complete_store([A], not fails)
    if not fails:
        fill = [b"fill %d" % i for i in range(8)]
        stored(manager, fill, ReqContext())
        manager.hint(fill, "end")
    serve(manager, [B])
    serve(manager, [A], "end")
    left = drained(manager)
    assert left.index(A) < left.index(B)


def test_use_without_request_spares_block(manager: Any) -> None:
    context = stored(manager, [A, B], hinted("end"))
    manager.touch([A])
    serve(manager, [C])
    manager.on_request_finished(context)
    assert drained(manager) == [B, C, A]


def test_end_waits_for_running_request(manager: Any) -> None:
    serve(manager, [A])
    manager.hint(stored(manager, [B], ReqContext()), "end")
    assert drained(manager) == [A, B]


def test_busy_blocks_take_their_place_later(manager: Any) -> None:
    context = hinted("end")
    manager.prepare_store([A, B, C], context)
    manager.complete_store([A, B], context)
    manager.prepare_load([A], context)
    manager.on_request_finished(context)
    serve(manager, [D])
    manager.complete_load([A])
    manager.complete_store([C])
    assert drained(manager) == [C, B, A, D]


def test_end_of_nothing_is_no_fault(manager: Any) -> None:
    context = hinted("end")
    manager.hint(context, "end")
    manager.hint([], "end")
    manager.on_request_finished(context)
    manager.hint(context, "end")
    assert drained(manager) == []


def test_clock_is_unread_without_need() -> None:
    def clock() -> float:
        raise AssertionError("nobody asked for the time")

    manager = CPUOffloadingManager(16, 8, clock=clock)
    manager.hint(serve(manager, [A], "end"), "end")
    manager.touch([A])


def test_clock_without_number_is_refused() -> None:
    with pytest.raises(ValueError, match="clock must be callable, got 5"):
        CPUOffloadingManager(16, 8, clock=5)  # type: ignore[arg-type]
    times = iter((float("nan"), 1.0, float("inf"), 2.0))
    manager = CPUOffloadingManager(16, 4, "gittins", clock=lambda: next(times))
    for _ in range(2):
        with pytest.raises(ValueError, match="clock must give finite seconds"):
            manager.touch([A])
        manager.touch([A])


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

    manager = CPUOffloadingManager(16, 4, ReferenceGittins, clock=clock)
    manager.touch([b"a"])
    for times, now_ms in (([101.0, 102.0], 2000), ([101.5], 2000), ([103.0], 3000)):
        late += times
        manager.touch([b"a"])
        assert manager.policy.now_ms == now_ms  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hint", "num_ignored"),
    [
        ({"next_use": "end"}, 0),
        ({"next_use": "end", "priority": 2}, 1),
        ({"priority": [], "ttl_s": "x", "next_use": "end"}, 1),
    ],
)
def test_priority_is_counted_as_ignored(hint: dict[str, Any], num_ignored: int) -> None:
    manager = CPUOffloadingManager(16, 8)
    context = stored(manager, [A], ReqContext(kv_transfer_params={"kvcache": hint}))
    serve(manager, [B])
    manager.on_request_finished(context)
    assert drained(manager) == [A, B]
    assert manager.stats().ignored_hints == num_ignored


@pytest.mark.parametrize(
    ("hint", "named"),
    [
        ("soon", "'soon'"),
        (None, "None"),
        (3, "3"),
        ([2, 300], "a list"),
        ({"priority": 1, "until": 5}, "'until'"),
        ({1: 2}, "1"),
        ({"next_use": "tomorrow"}, "'tomorrow'"),
        ({"next_use": {}, "priority": 2}, "a dict"),
    ],
)
def test_invalid_client_hint_is_logged_once(hint: Any, named: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = CPUOffloadingManager(16, 8)
    with caplog.at_level(logging.WARNING):
        for key in (A, B, C):
            context = ReqContext(kv_transfer_params={"kvcache": hint})
            manager.touch([key], context)
            manager.prepare_store([key], context)
            manager.on_request_finished(context)

    assert manager.stats().ignored_hints == 3
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
        {"next_use": 1 << (8 * MANY)},
        {"next_use": nested(5_000)},
        {"priority": "9" * MANY, "ttl_s": nested(5_000)},
        nested(5_000),
    ],
    ids=lambda hint: type(hint).__name__,
)
def test_huge_client_hint_is_not_read(hint: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = CPUOffloadingManager(16, 8)
    contexts = [ReqContext(kv_transfer_params={"kvcache": one}) for one in (7, hint)]
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


def test_context_hint_of_wrong_type_raises() -> None:
    manager = CPUOffloadingManager(16, 8)
    context = ReqContext()
    context.retention = {"priority": 2}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"retention must be a Retention or None, got \{'priority': 2\}"):
        manager.touch([A], context)


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"kvcache": {}}, "text", 7])
def test_engine_without_hint_is_no_fault(params: Any) -> None:
    manager = CPUOffloadingManager(16, 8)
    manager.touch([A], ReqContext(kv_transfer_params=params))

    assert manager.stats().ignored_hints == 0


@pytest.mark.parametrize("bad", ["", "Soon", 1, True, ("soon",), b"end", object()])
def test_bad_value_raises_before_any_change(manager: Any, bad: Any) -> None:
    context = serve(manager, [A], "soon")
    text = r"next_use must be one of 'end', 'soon', 'later', got "
    with pytest.raises(ValueError, match=text):
        Retention(next_use=bad)
    for target in (context, [A]):
        with pytest.raises(ValueError, match=text):
            manager.hint(target, bad)
    with pytest.raises(ValueError, match="keys must be"):
        manager.hint(17, "end")
    with pytest.raises(ValueError, match="must be exact, non-empty bytes"):
        manager.hint([A, ""], "end")
    with pytest.raises(ValueError, match=r"got None"):
        manager.hint([A], None)
    assert drained(manager) == [A]


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


def test_python_policy_sees_hint_without_keys() -> None:
    for kind in (ReferenceManager, CPUOffloadingManager):
        manager = kind(16, 1, ReferenceGittins, clock=iter((3.0, 5.5)).__next__)
        for next_use in ("end", "soon"):
            manager.hint(ReqContext("no keys yet"), next_use)
        assert (manager.policy.start_ms, manager.policy.now_ms) == (0, 2500)
