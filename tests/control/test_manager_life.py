"""A manager's life: sizes, processes, views of its blocks. `CacheMachine` checks calls and their results."""

from __future__ import annotations

import pickle

import pytest

from kvcache import (
    BackendOffloadingManager,
    BlockStateError,
    BlockStatus,
    CPUBackend,
    CPUOffloadingManager,
)

A, B, C, D, E, F = (letter.encode() for letter in "ABCDEF")


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_cache_holds_a_million_blocks(name: str) -> None:
    manager = CPUOffloadingManager(16, 1 << 20, name)
    keys = [i.to_bytes(8, "little") for i in range((1 << 20) + 1024)]
    for start in range(0, len(keys), 1024):
        batch = keys[start : start + 1024]
        output = manager.prepare_store(batch)
        assert output is not None
        assert output.evicted_keys == (keys[:1024] if start == 1 << 20 else [])
        manager.complete_store(batch)

    assert manager.lookup(keys[1024:]) == 1 << 20
    assert manager.stats().num_free == 0
    assert manager.prepare_load(keys[1024:1026] + keys[-2:]).block_ids.tolist() == [1024, 1025, 1, 0]
    manager.policy.check()


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_compiled_policies_and_managers_refuse_pickling(name: str) -> None:
    manager = CPUOffloadingManager(16, 2, name)

    for victim in (manager, manager.policy, BackendOffloadingManager(CPUBackend(16, 2), name)):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(victim)


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_compiled_block_is_read_only_view(name: str) -> None:
    manager = CPUOffloadingManager(16, 1, name)
    manager.prepare_store([A])
    block = manager.policy.get(A)
    assert isinstance(block, BlockStatus)
    assert (block.ref_cnt, block.block_id, block.is_ready) == (-1, 0, False)
    manager.complete_store([A])
    manager.prepare_load([A])
    assert (block.ref_cnt, block.is_ready) == (1, True)
    with pytest.raises(AttributeError):
        block.ref_cnt = 0
    manager.complete_load([A])
    manager.prepare_store([B])
    manager.complete_store([B])

    for field in ("ref_cnt", "block_id", "is_ready"):
        with pytest.raises(BlockStateError, match="left the cache"):
            getattr(block, field)
    manager.prepare_store([A])
    with pytest.raises(BlockStateError):
        _ = block.ref_cnt  # the key is back in another block
    block = manager.policy.get(A)
    manager.complete_store([A], success=False)
    with pytest.raises(BlockStateError, match="left the cache"):
        _ = block.ref_cnt


def test_manager_has_few_attributes() -> None:
    # From CPython 3.11 on, an instance keeps 30 attributes inline: with 32, a request's calls took a tenth longer.
    assert len(vars(CPUOffloadingManager(16, 8, enable_events=True, store_threshold=2))) <= 30
