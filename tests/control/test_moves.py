"""Moves between tiers are none of the engine's stores and loads, and a request stays one request whatever calls in."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import CPUOffloadingManager, OffloadingManager, ReqContext
from kvcache.testing.reference import ReferenceLRU

A, B, C, D, E, F = (letter.encode() for letter in "ABCDEF")


@pytest.fixture(params=["lru", "arc", ReferenceLRU])
def policy(request: pytest.FixtureRequest) -> Any:
    return request.param


def store(manager: CPUOffloadingManager, *keys: bytes, context: ReqContext | None = None) -> None:
    output = manager.prepare_store([*keys], context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)


def counts(manager: CPUOffloadingManager) -> dict[str, int]:
    names = ("loaded_blocks", "stored_blocks", "failed_blocks", "rejected_stores", "needed_blocks", "gated_blocks")
    return {name: number for name in names if (number := getattr(manager, name))}


def test_moves_count_as_no_engine_calls(policy: Any) -> None:
    manager = CPUOffloadingManager(16, 4, policy, store_threshold=2)
    output = manager.reserve([A, B, C], is_move=True)
    assert output is not None
    assert output.keys_to_store == [A, B, C]
    assert manager.commit([A, B], is_move=True) == [A, B]
    assert manager.abort([C], is_move=True) == 1
    manager.pin([A, B], is_move=True)
    assert manager.reserve([C, D, E], is_move=True) is None
    assert counts(manager) == {}
    # A move is no offer: the engine's first one is still gated.
    gated = manager.prepare_store([C])
    assert gated is not None
    assert gated.keys_to_store == []
    assert counts(manager) == {"needed_blocks": 1, "gated_blocks": 1}


def test_reserve_leading_takes_fitting_prefix(policy: Any) -> None:
    manager = CPUOffloadingManager(16, 6, policy)
    store(manager, A)
    manager.pin([A])
    manager.reserve([B], is_move=True)
    output = manager.reserve_leading([C, D, E, F, b"G", b"H"])
    assert output is not None
    assert output.keys_to_store == [C, D, E, F]
    assert manager.reserve_leading([b"G"]) is None


def test_reserve_leading_skips_withheld_slots(policy: Any) -> None:
    manager = CPUOffloadingManager(16, 4, policy)
    manager.withhold([2, 3])
    output = manager.reserve_leading([A, B, C, D])
    assert output is not None
    assert output.keys_to_store == [A, B]


def test_request_opened_while_opening_is_one() -> None:
    opened: list[Any] = []

    def clock() -> float:
        if not opened:
            opened.append(None)
            manager.touch([A], context)
            opened.append(context.request_keys[manager])
        return 1.0

    manager = CPUOffloadingManager(16, 4, "gittins", clock=clock)
    context = ReqContext()
    manager.touch([A], context)
    assert opened[1] is context.request_keys[manager]


def test_shutdown_closes_telemetry_before_recorder() -> None:
    class Part:
        def __init__(self, name: str) -> None:
            self.close = self.stop = lambda: calls.append(name)

    calls: list[str] = []
    manager = CPUOffloadingManager(16, 4)
    manager.telemetry, manager.recorder = Part("telemetry"), Part("recorder")
    OffloadingManager.shutdown(manager)
    assert calls == ["telemetry", "recorder"]


def test_slot_given_back_twice_frees_once(policy: Any) -> None:
    manager = CPUOffloadingManager(16, 4, policy)
    manager.withhold([1, 2])
    manager.give_back([1, 1])
    assert manager.num_free == 3
    output = manager.prepare_store([A, B, C])
    assert output is not None
    assert sorted(output.store_spec.block_ids.tolist()) == [0, 1, 3]


def test_use_refused_by_policy_counts_later() -> None:
    used: list[list[bytes]] = []

    class Failing(ReferenceLRU):
        def use(self, keys: list[bytes], first: bool) -> None:
            used.append(keys)
            if len(used) == 1:
                raise OSError("not now")

    manager = CPUOffloadingManager(16, 4, Failing)
    store(manager, A)
    context = ReqContext()
    with pytest.raises(OSError, match="not now"):
        manager.touch([A], context)
    manager.touch([A], context)
    manager.prepare_load([A], ReqContext())
    manager.reset_cache()
    store(manager, A)
    manager.touch([A], context)
    assert used == [[A]] * 4
