"""Keys, contexts, specs and blocks: the words that scheduler and worker exchange."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

from kvcache import (
    BlockIDsLoadStoreSpec,
    BlockStatus,
    CPULoadStoreSpec,
    CPUOffloadingManager,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    Retention,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)


@pytest.mark.parametrize("group_idx", [0, 1, 255, 256, (1 << 32) - 1])
@pytest.mark.parametrize("block_hash", [b"h", b"\x00", bytes(range(200))])
def test_key_is_hash_and_group(block_hash: bytes, group_idx: int) -> None:
    key = make_offload_key(block_hash, group_idx)

    assert type(key) is bytes
    assert key == block_hash + group_idx.to_bytes(4, "big")
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group_idx


@pytest.mark.parametrize(
    ("block_hash", "group_idx", "bad"),
    [(b"", 0, "b''"), ("h", 0, "'h'"), (b"h", -1, "-1"), (b"h", 1 << 32, "4294967296"), (b"h", 1.0, "1.0")],
)
def test_what_makes_no_key_is_refused(block_hash: Any, group_idx: Any, bad: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        make_offload_key(block_hash, group_idx)
    assert bad in str(error.value)
    for part in (get_offload_block_hash, get_offload_group_idx):
        for short in (b"", b"1234", "12345", None):
            with pytest.raises(ValueError, match="key must be bytes longer than 4"):
                part(short)


def test_context_keeps_one_state_per_type() -> None:
    context = ReqContext("7")
    assert context.get_state(int) is None
    context.set_state(1)
    context.set_state("one")
    context.set_state(2)

    assert (context.get_state(int), context.get_state(str), context.get_state(float)) == (2, "one", None)


def test_context_knows_positions_by_key() -> None:
    context = ReqContext()
    assert context.get_offload_key_position(b"k") is None
    context.set_offload_key_position(b"k", 512)
    context.set_offload_key_position(b"k", np.int64(1024))
    for bad in ("16", 16.0, None):
        with pytest.raises(ValueError, match=f"end_token must be an int, got {bad!r}"):
            context.set_offload_key_position(b"k", bad)

    assert context.get_offload_key_position(bytes(bytearray(b"k"))) == 1024
    assert context.get_offload_key_position(b"l") is None


@pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), copy.copy, copy.deepcopy])
def test_copied_context_is_a_new_request(copied: Any) -> None:
    manager = CPUOffloadingManager(16, 4)
    manager.prepare_store([b"k"])
    manager.complete_store([b"k"])
    context = ReqContext("r", {"a": 1}, Retention("soon"))
    context.set_offload_key_position(b"k", 16)
    context.set_state(7)
    manager.touch([b"k"], context)

    other = copied(context)
    assert (other.req_id, other.kv_transfer_params, other.retention) == ("r", {"a": 1}, Retention("soon"))
    assert (other.get_offload_key_position(b"k"), other.get_state(int)) == (16, 7)
    assert other.request_keys == {}
    manager.on_request_finished(other)
    assert context.request_keys[manager].num_seen == 1


def test_contexts_are_told_apart_by_identity() -> None:
    first, second = ReqContext("same"), ReqContext("same")

    assert first != second
    assert len({first, second, first}) == 2
    assert (first.req_id, first.kv_transfer_params, first.retention) == ("same", None, None)


def test_manager_forgets_dropped_context() -> None:
    manager = CPUOffloadingManager(16, 4)
    context = ReqContext()
    manager.prepare_store([b"a"], context)
    gone = weakref.ref(context)
    del context
    gc.collect()

    assert gone() is None


def test_request_is_offloaded_by_block() -> None:
    assert RequestOffloadingContext().policy is OffloadPolicy.BLOCK_LEVEL
    assert RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL).policy is OffloadPolicy.REQUEST_LEVEL


def test_block_status_subclass_starts_unready() -> None:
    class Placed(BlockStatus):
        def __init__(self, block_id: int, node: str) -> None:
            super().__init__(block_id)
            self.node = node

    block = Placed(-5 << 40, "east")
    assert (block.ref_cnt, block.block_id, block.is_ready, block.node) == (-1, -5 << 40, False, "east")
    block.ref_cnt = 0
    assert block.is_ready is True
    block.ref_cnt += 2
    assert (block.ref_cnt, block.is_ready) == (2, True)
    raw = ctypes.string_at(ctypes.addressof(block), ctypes.sizeof(block))
    assert len(raw) == 16
    assert int.from_bytes(raw[:4], "little", signed=True) == 2
    assert int.from_bytes(raw[8:], "little", signed=True) == -5 << 40


@pytest.mark.parametrize("block_id", [1 << 63, -(1 << 63) - 1, 1 << 70])
def test_block_ids_beyond_int64_are_refused(block_id: int) -> None:
    with pytest.raises(ValueError, match=f"block_id must be an int64, got {block_id}"):
        BlockStatus(block_id)


@pytest.mark.parametrize("given", [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.int32), []])
def test_specs_hold_ids_as_int64(given: Any) -> None:
    spec = CPULoadStoreSpec(given)

    assert (spec.block_ids.dtype, spec.block_ids.shape) == (np.int64, (len(given),))
    assert repr(spec) == repr(np.array(given, np.int64))
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    assert isinstance(spec, LoadStoreSpec)


@pytest.mark.parametrize("bad", [[[1, 2]], [1.5], ["a"], 3, [True]])
def test_specs_take_ids_only(bad: Any) -> None:
    with pytest.raises(ValueError, match="block_ids must be"):
        CPULoadStoreSpec(bad)


@pytest.mark.parametrize(
    ("bad", "named"), [([3, -1], "-1"), (np.array([-7]), "-7"), ([1 << 63], "9223372036854775808")]
)
def test_no_block_has_such_an_id(bad: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"id must be an int64 >= 0, got {named}"):
        CPULoadStoreSpec(bad)
    with pytest.raises(ValueError, match=f"id must be an int64 >= 0, got {named}"):
        GPULoadStoreSpec(bad, [len(bad)], [0])


def test_media_are_named_without_an_instance() -> None:
    assert (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium()) == ("CPU", "GPU")
    with pytest.raises(TypeError):
        LoadStoreSpec()  # type: ignore[abstract]


def test_device_spec_orders_blocks_by_group() -> None:
    spec = GPULoadStoreSpec([5, 6, 9], group_sizes=[2, 1], block_indices=[3, 0])

    assert (spec.block_ids.tolist(), list(spec.group_sizes), list(spec.block_indices)) == ([5, 6, 9], [2, 1], [3, 0])
    for bad in (([2], [0]), ([2, 2], [0, 0]), ([2, 1], [0]), ([4, -1], [0, 0]), ([2, 1], [0, -1])):
        with pytest.raises(ValueError, match=r"group_sizes|block_indices"):
            GPULoadStoreSpec([5, 6, 9], *bad)
