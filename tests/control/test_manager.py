"""What calls answer, in examples; `CacheMachine` compares every manager with the specification, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from kvcache import (
    BackendOffloadingManager,
    BlockStateError,
    CachePolicy,
    CPUBackend,
    CPULoadStoreSpec,
    CPUOffloadingManager,
    ManagerStats,
    OffloadingEvent,
    OffloadingManager,
    ReqContext,
)
from kvcache.testing.reference import ReferenceLRU

A, B, C, D, E, F = (letter.encode() for letter in "ABCDEF")


Make = Callable[..., Any]


def on_cpu(policy: str | type[CachePolicy]) -> Make:
    return lambda num_blocks, enable_events=False: CPUOffloadingManager(16, num_blocks, policy, enable_events)


def on_backend(policy: str | type[CachePolicy]) -> Make:
    return lambda num_blocks, enable_events=False: BackendOffloadingManager(
        CPUBackend(16, num_blocks), policy, enable_events
    )


@pytest.fixture(
    params=[on_cpu("lru"), on_cpu("arc"), on_cpu(ReferenceLRU), on_backend("lru"), on_backend("arc")],
    ids=["lru", "arc", "plain", "backend-lru", "backend-arc"],
)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def store(manager: OffloadingManager, *keys: bytes) -> list[bytes]:
    """Store keys to the end, and return what was evicted."""
    output = manager.prepare_store(keys)
    assert output is not None
    manager.complete_store(output.keys_to_store)
    return output.evicted_keys


def ids(spec: Any) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.block_ids.dtype == np.int64
    found: list[int] = spec.block_ids.tolist()
    return found


def everything(manager: Any, keys: Iterable[bytes] = (A, B, C, D, E, F)) -> tuple[Any, ...]:
    """What an observer sees without changing anything."""
    blocks = {key: manager.policy.get(key) for key in keys}
    return manager.stats(), {key: (b.ref_cnt, b.block_id) for key, b in blocks.items() if b is not None}


def test_lookup_of_one_key_is_true_once_it_is_ready(make: Make) -> None:
    manager = make(4)
    absent = manager.lookup(A)
    manager.prepare_store([A])
    written = manager.lookup(A)
    manager.complete_store([A])

    assert (absent, written, manager.lookup(A)) == (False, False, True)
    assert type(absent) is type(written) is bool


@pytest.mark.parametrize("form", [list, tuple])
def test_lookup_of_several_is_the_length_of_the_ready_run(make: Make, form: type) -> None:
    manager = make(6)
    store(manager, A, B, C, E)
    manager.prepare_store([D])

    assert manager.lookup(form([A, B, C])) == 3
    assert manager.lookup(form([A, B, F, C])) == 2
    assert manager.lookup(form([C, D, E])) == 1  # D is being written
    assert manager.lookup(form([F, A])) == 0
    assert manager.lookup(form([])) == 0
    assert manager.lookup(form([A, A, A])) == 3
    assert type(manager.lookup(form([A]))) is int


def test_load_spec_lists_ids_in_key_order(make: Make) -> None:
    manager = make(4)
    store(manager, A, B, C)

    assert ids(manager.prepare_load([C, A, B])) == [2, 0, 1]
    assert ids(manager.prepare_load([])) == []


def test_every_load_takes_a_reference_of_its_own(make: Make) -> None:
    manager = make(2)
    store(manager, A, B)
    for _ in range(500):
        manager.prepare_load([A, B, A])

    assert manager.policy.get(A).ref_cnt == 1000
    assert manager.policy.get(B).ref_cnt == 500
    assert manager.stats().num_referenced == 2
    for i in range(500):
        assert manager.prepare_store([C]) is None
        manager.complete_load([A, B, B, A, A] if i % 2 else [A])
    assert manager.policy.get(A).ref_cnt == 0
    assert manager.policy.get(B).ref_cnt == 0
    assert manager.stats().num_referenced == 0


def test_load_of_an_absent_key_takes_no_reference_at_all(make: Make) -> None:
    manager = make(4)
    store(manager, A, B)
    before = everything(manager)

    with pytest.raises(KeyError, match="not in the cache: b'F'"):
        manager.prepare_load([A, B, F])
    assert everything(manager) == before


def test_load_of_an_unready_block_takes_no_reference_at_all(make: Make) -> None:
    manager = make(4)
    store(manager, A, B)
    manager.prepare_store([C])
    before = everything(manager)

    with pytest.raises(BlockStateError, match="not ready: b'C'"):
        manager.prepare_load([A, C, B])
    assert everything(manager) == before


@pytest.mark.parametrize(
    ("keys", "error"),
    [([A, F], KeyError), ([B], BlockStateError), ([A, A, A], BlockStateError), ([A, C], BlockStateError)],
)
def test_giving_back_what_was_not_taken_changes_nothing(make: Make, keys: list[bytes], error: type[Exception]) -> None:
    manager = make(4)
    store(manager, A, B)
    manager.prepare_store([C])
    manager.prepare_load([A, A])
    before = everything(manager)

    with pytest.raises(error, match=r"b'[ABCF]'"):
        manager.complete_load(keys)
    assert everything(manager) == before


def test_stores_get_fresh_ids_in_the_order_offered(make: Make) -> None:
    manager = make(8)
    store(manager, C)
    output = manager.prepare_store([E, C, A, B, D])

    assert output.keys_to_store == [E, A, B, D]
    assert ids(output.store_spec) == [1, 2, 3, 4]
    assert output.evicted_keys == []
    assert type(output.keys_to_store) is type(output.evicted_keys) is list


def test_evicted_slots_are_reused_last_freed_first(make: Make) -> None:
    manager = make(3)
    for key in (A, B, C):
        store(manager, key)
    output = manager.prepare_store([D, E])

    assert output.evicted_keys == [A, B]
    assert ids(output.store_spec) == [1, 0]


def test_failed_store_returns_slots_in_the_order_given(make: Make) -> None:
    manager = make(4)
    manager.prepare_store([A, B, C, D])
    manager.complete_store([A])
    manager.complete_store([C, F, A, B, C, D], success=False)

    assert manager.lookup(A) is True
    assert [manager.lookup(key) for key in (B, C, D)] == [False] * 3
    assert manager.stats().failed_blocks == 3
    assert manager.stats().num_free == 3
    # Freed C (2), B (1), D (3): the last freed comes first.
    assert ids(manager.prepare_store([D, E, F]).store_spec) == [3, 1, 2]


@pytest.mark.parametrize("form", [tuple, iter, set, dict.fromkeys, lambda keys: (key for key in keys)])
def test_every_call_takes_any_iterable_of_keys(make: Make, form: Callable[[list[bytes]], Iterable[bytes]]) -> None:
    manager = make(2)
    context = ReqContext()
    assert sorted(manager.prepare_store(form([A, B]), context).keys_to_store) == [A, B]
    manager.complete_store(form([A, B]), context)
    manager.touch(form([A, B]), context)
    manager.prepare_load(form([A, B]), context)
    assert manager.stats().num_referenced == 2
    manager.complete_load(form([A, B]), context)
    assert manager.stats().num_referenced == 0


def test_outputs_keep_their_older_names(make: Make) -> None:
    manager = make(1, enable_events=True)
    store(manager, A)
    output = manager.prepare_store([B])
    (stored, removed) = manager.take_events()

    assert (output.block_hashes_to_store, output.block_hashes_evicted) == ([B], [A])
    assert (stored.block_hashes, removed.block_hashes) == ([A], [A])
    assert manager._policy is manager.policy


def test_one_event_per_batch_and_none_for_an_empty_one(make: Make) -> None:
    manager = make(2, enable_events=True)
    store(manager, A, B)
    store(manager, A)
    store(manager, C, D)
    manager.prepare_store([E])
    manager.complete_store([E], success=False)

    assert list(manager.take_events()) == [
        OffloadingEvent([A, B], 16, "CPU", False),
        OffloadingEvent([A, B] if C < D else [], 16, "CPU", True),
        OffloadingEvent([C, D], 16, "CPU", False),
        OffloadingEvent([C], 16, "CPU", True),
    ]
    assert list(manager.take_events()) == []


def test_events_exist_only_where_they_are_asked_for(make: Make) -> None:
    manager = make(1)
    store(manager, A)
    store(manager, B)

    assert list(manager.take_events()) == []


def test_events_are_the_listener_s_own(make: Make) -> None:
    manager = make(1, enable_events=True)
    store(manager, A)
    output = manager.prepare_store([B])
    output.evicted_keys.clear()

    assert [event.keys for event in manager.take_events()] == [[A], [A]]


def test_stats_count_blocks_and_calls(make: Make) -> None:
    manager = make(4)
    store(manager, A, B)  # 2 stored
    store(manager, C, D)
    store(manager, E)  # 1 evicted
    assert manager.lookup([B, C, A]) == 2
    manager.lookup(A)
    manager.prepare_load([B, B, C])
    assert manager.prepare_store([A, F, b"G"]) is None
    manager.prepare_store([A])  # 1 evicted
    manager.prepare_store([F])  # 1 evicted
    manager.complete_store([F], success=False)

    assert manager.stats() == ManagerStats(
        num_blocks=4,
        num_free=1,
        num_referenced=2,
        num_pending=1,
        lookups=2,
        looked_up_blocks=4,
        hit_blocks=2,
        loaded_blocks=3,
        stored_blocks=5,
        evicted_blocks=3,
        rejected_stores=1,
        failed_blocks=1,
        gated_blocks=0,
        needed_blocks=10,
    )
