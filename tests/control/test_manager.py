"""What calls answer, in examples; `CacheMachine` compares every manager with the specification, call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache import (
    BackendOffloadingManager,
    BlockStateError,
    CPUBackend,
    CPUOffloadingManager,
    OffloadingManager,
    ReqContext,
)
from kvcache.testing.reference import ReferenceLRU

A, B, C, D, E, F = (letter.encode() for letter in "ABCDEF")
Make = Callable[..., Any]


@pytest.fixture(params=[("CPU", "lru"), ("CPU", "arc"), ("CPU", ReferenceLRU), ("backend", "lru"), ("backend", "arc")])
def make(request: pytest.FixtureRequest) -> Make:
    kind, policy = request.param

    def make_manager(num_blocks: int, enable_events: bool = False) -> OffloadingManager:
        if kind == "backend":
            return BackendOffloadingManager(CPUBackend(16, num_blocks), policy, enable_events)
        return CPUOffloadingManager(16, num_blocks, policy, enable_events)

    return make_manager


def store(manager: OffloadingManager, *keys: bytes) -> list[bytes]:
    """Store keys to the end, and return what was evicted."""
    output = manager.prepare_store(keys)
    assert output is not None
    manager.complete_store(output.keys_to_store)
    return output.evicted_keys


def everything(manager: Any) -> tuple[Any, ...]:
    """Return all that a caller can observe without a change."""
    blocks = {key: manager.policy.get(key) for key in (A, B, C, D, E, F)}
    return manager.stats(), {key: (b.ref_cnt, b.block_id) for key, b in blocks.items() if b is not None}


@pytest.mark.parametrize(
    ("method", "keys", "error", "message"),
    [
        ("prepare_load", [A, B, F], KeyError, "not in the cache: b'F'"),
        ("prepare_load", [A, C, B], BlockStateError, "not ready: b'C'"),
        ("complete_load", [A, F], KeyError, "not in the cache: b'F'"),
        ("complete_load", [B], BlockStateError, "fewer references than are given back: b'B'"),
        ("complete_load", [A, A, A], BlockStateError, "fewer references than are given back: b'A'"),
        ("complete_load", [A, C], BlockStateError, "fewer references than are given back: b'C'"),
    ],
)
def test_load_in_wrong_state_changes_nothing(
    make: Make, method: str, keys: list[bytes], error: type[Exception], message: str
) -> None:
    manager = make(4)
    store(manager, A, B)
    manager.prepare_store([C])
    manager.prepare_load([A, A])
    before = everything(manager)

    with pytest.raises(error, match=message):
        getattr(manager, method)(keys)
    assert everything(manager) == before


def test_request_that_only_ends_uses_positions(make: Make) -> None:
    manager, context = make(2), ReqContext()
    store(manager, A, B)
    context.set_offload_key_positions({A: 16})
    manager.on_request_finished(context, use_positions=True)
    assert store(manager, C) == [B]


def test_outputs_keep_their_older_names(make: Make) -> None:
    manager = make(1, enable_events=True)
    store(manager, A)
    output = manager.prepare_store([B])
    (stored, removed) = manager.take_events()

    assert (output.block_hashes_to_store, output.block_hashes_evicted) == ([B], [A])
    assert (stored.block_hashes, removed.block_hashes) == ([A], [A])
    assert manager._policy is manager.policy


def test_refused_store_needs_no_hash() -> None:
    """A request that is compared by value, as data classes are, has no hash."""

    class Comparable(ReqContext):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Comparable)

    manager, context = CPUOffloadingManager(16, 1), Comparable()
    assert [manager.prepare_store([b"a", b"b"], context) for _ in range(2)] == [None, None]
    assert manager.stats().needed_blocks == 2
