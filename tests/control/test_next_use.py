"""Hints of next use: what a request says when it begins, and what is said later, sentence by sentence."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from reference_gittins import ReferenceGittins

from kvcache import CPUOffloadingManager, LRUCachePolicy, ReqContext, Retention
from kvcache.control.backend import CPUBackend
from kvcache.control.cpu import BackendOffloadingManager
from kvcache.lab.simulate.run import ReplayClock
from kvcache.testing.reference import ReferenceLRU
from kvcache.testing.reference_manager import ReferenceManager
from kvcache.tiering.manager import TieredOffloadingManager

QUEUE_POLICIES = ["lru", "arc", "mq", "amq", "lfuda"]
A, B, C, D = b"A", b"B", b"C", b"D"


@pytest.fixture(params=QUEUE_POLICIES)
def manager(request: pytest.FixtureRequest, clock: ReplayClock) -> CPUOffloadingManager:
    return CPUOffloadingManager(16, 4, request.param, clock=clock)


def serve(manager: Any, keys: list[bytes], next_use: str | None = None, **params: Any) -> ReqContext:
    context = ReqContext(retention=None if next_use is None else Retention(next_use=next_use), **params)
    manager.touch(keys, context)
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return context


def drained(manager: Any) -> list[bytes]:
    """Return every key in the order of eviction."""
    return [key for i in range(4) for key in manager.prepare_store([b"push %d" % i]).evicted_keys]


def test_an_end_leaves_first_and_what_comes_soon_last(manager: CPUOffloadingManager) -> None:
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
    assert drained(manager)[:2] == [A, B]


def test_a_priority_of_its_own_comes_before_the_next_use() -> None:
    assert Retention(2, next_use="end").priority_class == 2
    assert Retention(-1, next_use="soon").priority_class == -1
    assert Retention(0, 30, "soon").ttl_ns == 30 * 10**9
    assert Retention(2, next_use="soon").ttl_ns == 0


def test_a_client_says_it_through_the_engine(manager: CPUOffloadingManager) -> None:
    serve(manager, [A], kv_transfer_params={"kvcache": {"next_use": "soon"}})
    assert manager.stats().retained_blocks == 1
    serve(manager, [B], kv_transfer_params={"kvcache": {"next_use": "tomorrow"}})
    assert manager.stats().ignored_hints == 1


@pytest.mark.parametrize("bad", ["", "Soon", 1, True, ("soon",), b"end", object()])
def test_a_bad_value_is_named_before_anything_changes(manager: CPUOffloadingManager, bad: Any) -> None:
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


def test_policies_in_python_take_what_is_said_later_or_ignore_it() -> None:
    heard: list[tuple[list[bytes], str]] = []

    class Listening(ReferenceLRU):
        def hint(self, keys: list[bytes], next_use: str) -> None:
            heard.append((keys, next_use))

    for policy in (Listening, ReferenceLRU):
        manager = CPUOffloadingManager(16, 4, policy)
        context = serve(manager, [A, B])
        manager.hint(context, "end")
        manager.hint((A,), "soon")
    assert heard == [([A, B], "end"), ([A], "soon")]
    backed = BackendOffloadingManager(CPUBackend(16, 4), LRUCachePolicy)
    backed.hint(serve(backed, [A]), "end")


def test_the_prompts_order_is_that_of_the_positions() -> None:
    heard: list[list[bytes]] = []

    class Listening(ReferenceLRU):
        def hint(self, keys: list[bytes], next_use: str) -> None:
            heard.append(keys)

    manager = CPUOffloadingManager(16, 4, Listening)
    context = ReqContext()
    for key, position in ((B, 32), (A, 16), (C, 48)):
        context.set_offload_key_position(key, position)
        manager.prepare_store([key], context)
    manager.hint(context, "soon")
    assert heard == [[A, B, C]]


def test_the_host_pool_over_tiers_takes_hints(clock: ReplayClock) -> None:
    manager = TieredOffloadingManager(16, 4, [], clock=clock)
    context = serve(manager, [A], "soon")
    assert manager.stats().retained_blocks == 1
    manager.hint(context, "end")
    assert manager.stats().retained_blocks == 0
    with pytest.raises(ValueError, match="got 'never'"):
        manager.hint(context, "never")


def test_a_copy_of_a_context_knows_no_manager(manager: CPUOffloadingManager) -> None:
    copied = pickle.loads(pickle.dumps(serve(manager, [A], "soon")))
    assert copied.retention == Retention(next_use="soon")
    assert copied.request_keys == {}


def test_hint_for_a_request_without_keys_is_a_moment_that_a_policy_in_python_sees() -> None:
    managers = [kind(16, 1, ReferenceGittins, clock=lambda: 3.0) for kind in (ReferenceManager, CPUOffloadingManager)]
    for manager in managers:
        manager.hint(ReqContext("no keys yet"), "end")
    assert [manager.policy.start_ms is None for manager in managers] == [False, False]
