"""Bad input to a manager is refused with the value that was bad, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest

from kvcache import (
    BackendOffloadingManager,
    BlockStateError,
    BlockStatus,
    CPUBackend,
    CPULoadStoreSpec,
    CPUOffloadingManager,
    ReqContext,
)
from kvcache.control.pool import BlockPool
from kvcache.keys import make_offload_key
from kvcache.testing.reference import ReferenceLRU, Victims

A, B, C, D = b"A", b"B", b"C", b"D"
METHODS = ["lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store"]


@pytest.fixture(params=["lru", "arc", ReferenceLRU], ids=["lru", "arc", "plain"])
def manager(request: pytest.FixtureRequest) -> CPUOffloadingManager:
    """Four slots: A is being read, B is ready, C is being written, one is free."""
    manager = CPUOffloadingManager(16, 4, request.param, enable_events=True)
    manager.prepare_store([A, B, C])
    manager.complete_store([A, B])
    manager.prepare_load([A])
    list(manager.take_events())
    return manager


def seen(manager: CPUOffloadingManager) -> tuple[Any, ...]:
    blocks = {key: manager.policy.get(key) for key in (A, B, C, D)}
    states = {key: (block.ref_cnt, block.block_id) for key, block in blocks.items() if block is not None}
    return manager.stats(), states, list(manager.take_events())


class Bytes(bytes):
    """A key that is not exact bytes."""


IS_NO_KEY = "key must be exact, non-empty bytes, got "
IS_NO_LIST = "keys must be an iterable of keys, got "
# Arguments by method: a look-up of several keys ends at the first miss, but always reads the first key.
BAD_CALLS = [
    *((method, [bad, B] if method == "lookup" else [B, D, bad], IS_NO_KEY, bad)
      for method in METHODS for bad in (b"", "A", None, 7, 1.5, bytearray(b"A"), memoryview(b"A"), (A,), Bytes(b"D"))),
    *((method, bad, IS_NO_LIST, bad) for method in METHODS[1:] for bad in (A, "A", None, 7)),
    *(("lookup", bad, "key.* must be ", bad) for bad in (b"", "A", None, 7)),
]  # fmt: skip


def short(value: object) -> str:
    """Return an id without an address: pytest-xdist needs the same ids in all processes."""
    return repr(value).partition(" at 0x")[0][:20]


@pytest.mark.parametrize(("method", "keys", "message", "bad"), BAD_CALLS, ids=short)
def test_invalid_keys_raise_before_any_change(
    manager: CPUOffloadingManager, method: str, keys: Any, message: str, bad: object
) -> None:
    before = seen(manager)
    with pytest.raises(ValueError, match=message) as error:
        getattr(manager, method)(keys, ReqContext())
    assert repr(bad) in str(error.value)
    assert seen(manager) == before


@pytest.mark.parametrize("method", METHODS)
def test_invalid_request_raises_before_any_change(manager: CPUOffloadingManager, method: str) -> None:
    before = seen(manager)
    with pytest.raises(ValueError, match="req_context must be a ReqContext or None, got 'request 7'"):
        getattr(manager, method)([B], "request 7")
    assert seen(manager) == before


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "4", None])
@pytest.mark.parametrize("name", ["lru", "arc", ReferenceLRU])
def test_sizes_must_be_positive_ints(name: Any, bad: Any) -> None:
    with pytest.raises(ValueError, match="num_blocks must be an int >= 1") as error:
        CPUOffloadingManager(16, bad, name)
    assert repr(bad) in str(error.value)
    with pytest.raises(ValueError, match="block_size must be an int >= 1") as error:
        CPUOffloadingManager(bad, 16, name)
    assert repr(bad) in str(error.value)


def popped(policy: ReferenceLRU, *keys: bytes) -> Victims:
    return [(key, policy.blocks.pop(key)) for key in keys]


# What `evict` answers where A, B, C and D are held, A is in use and D is protected.
FAULTS: dict[str, Callable[[ReferenceLRU, int], Victims]] = {
    "too few": lambda policy, n: popped(policy, *list(policy.blocks)[: n - 1]),
    "too many": lambda policy, n: popped(policy, *list(policy.blocks)[1 : n + 2]),
    "the same twice": lambda policy, n: [(B, policy.blocks[B])] * n,
    "one in use": lambda policy, n: popped(policy, *(A, B)[:n]),
    "one protected": lambda policy, n: popped(policy, *(B, D)[:n]),
    "one unknown": lambda policy, n: [*popped(policy, B), (b"unknown", BlockStatus(3))][:n],
    "one made up": lambda policy, n: [(B, BlockStatus(1)), (C, BlockStatus(2))][:n],
    "one kept": lambda policy, n: [*popped(policy, B), (C, policy.blocks[C])][:n],
    "one copied": lambda policy, n: [*popped(policy, B), (C, BlockStatus(policy.blocks.pop(C).block_id))][:n],
    "one dropped in silence": lambda policy, n: popped(policy, A, B, C)[1:n],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_eviction_is_named_loses_nothing(fault: str) -> None:
    class Faulty(ReferenceLRU):
        def evict(self, n: int, protected: Container[bytes]) -> Victims:
            return FAULTS[fault](self, n)

    manager = CPUOffloadingManager(16, 4, Faulty, enable_events=True)
    manager.prepare_store([A, B, C, D])
    manager.complete_store([A, B, C, D])
    manager.prepare_load([A])
    list(manager.take_events())
    before = seen(manager)

    with pytest.raises(BlockStateError, match=r"Faulty\.evict returned"):
        manager.prepare_store([D, b"E", b"F"])
    assert seen(manager) == before


def test_finished_request_needs_its_context(manager: CPUOffloadingManager) -> None:
    with pytest.raises(ValueError, match="req_context must be a ReqContext, got None"):
        manager.on_request_finished(None)


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_blocks must be < 2\*\*30, got 1073741824"):
        CPUOffloadingManager(16, 1 << 30)


def test_backend_without_ids_gets_blocks_back() -> None:
    class Silent(CPUBackend):
        def get_load_store_spec(self, block_hashes: object, blocks: object) -> CPULoadStoreSpec:
            raise NotImplementedError("nowhere")

    backend = Silent(16, 4)
    manager = BackendOffloadingManager(backend)
    with pytest.raises(NotImplementedError, match="nowhere"):
        manager.prepare_store([A, B])
    assert (backend.get_num_free_blocks(), manager.stats().num_pending) == (4, 0)


def test_policy_without_units_refuses_windows() -> None:
    assert type(CPUOffloadingManager(16, 8, "gittins", group_windows=[None]).policy).__name__ == "GittinsCachePolicy"
    manager, context = CPUOffloadingManager(16, 8, "gittins", group_windows=(None, 1)), ReqContext()
    assert manager.configuration()["group_windows"] == [None, 1]
    keys = [make_offload_key(key, group) for group in (0, 1) for key in (A, B)]
    context.set_offload_key_positions(dict(zip(keys, [16, 32] * 2, strict=True)))
    manager.touch(keys[:2], context)
    # Group 1 needs its last block only.
    output = manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == [*keys[:2], keys[3]]
    for policy, backend, name in (("lru", None, "LRUCachePolicy"), ("gittins", CPUBackend(16, 8), "custom backend")):
        with pytest.raises(ValueError, match=f"{name} has no rule for several KV-cache groups"):
            BlockPool(8, policy, backend=backend, group_windows=[None, 1])
