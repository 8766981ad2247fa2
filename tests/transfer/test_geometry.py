"""A handler copies every byte of every geometry to the place of the slow reference, and changes no other byte."""

import numpy as np
import pytest
import torch
from geometries import GUARD, NoisyPool, cases
from host_stream import HostStream
from hypothesis import given

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer._native.plan import Geometry
from kvcache.transfer.cpu import CPUCopyHandler
from kvcache.transfer.geometry import KVGeometry, host_block_bytes
from kvcache.transfer.staged import StagedCopyHandler


def copied_at_once(geometry, to_host):
    return CPUCopyHandler(geometry, to_host, 1)


def copied_by_threads(geometry, to_host):
    return CPUCopyHandler(geometry, to_host, 2, inline_bytes=-1)


def staged_block_by_block(geometry, to_host):
    pieces = [sum(layer.shape[1] for layer, _ in group) for group in geometry.segments()]
    return StagedCopyHandler(geometry, to_host, HostStream(), max(1, *pieces, 1))


def staged_many_blocks(geometry, to_host):
    return StagedCopyHandler(geometry, to_host, HostStream(), 2000)


def staged_nowhere(geometry, to_host):
    return StagedCopyHandler(geometry, to_host, HostStream(), 0)


@pytest.mark.filterwarnings("ignore:no device memory")
@pytest.mark.parametrize(
    "make_handler", [copied_at_once, copied_by_threads, staged_block_by_block, staged_many_blocks, staged_nowhere]
)
@pytest.mark.parametrize("to_host", [True, False], ids=["store", "load"])
@given(case=cases())
def test_bytes_go_where_reference_puts_them(make_handler, to_host, case):
    buffers, memory = case.expected(to_host)
    handler = make_handler(KVGeometry(case.kv_caches, case.pool, case.factor), to_host)
    spec = (case.device_spec, case.host_spec)
    assert handler.transfer_async(7, spec if to_host else spec[::-1])
    handler.wait([7])
    (result,) = handler.get_finished()
    assert result.success
    assert result.transfer_size == sum(n for *_, n in case.pieces())
    np.testing.assert_array_equal(case.pool.memory, memory)
    # Host memory grows with use.
    assert case.pool.used == set(case.host_spec.block_ids.tolist())
    for buffer, expected in zip(case.buffers, buffers, strict=True):
        np.testing.assert_array_equal(buffer.numpy(), expected)
    handler.shutdown()


@given(case=cases())
def test_touching_runs_are_merged(case):
    geometry = KVGeometry(case.kv_caches, case.pool, case.factor)
    spec = case.device_spec
    runs = geometry.compiled.runs(spec.block_ids, spec.group_sizes, spec.block_indices, case.host_spec.block_ids)
    assert runs[:, 2].sum() == sum(n for *_, n in case.pieces())
    touching = (runs[:-1, 0] + runs[:-1, 2] == runs[1:, 0]) & (runs[:-1, 1] + runs[:-1, 2] == runs[1:, 1])
    assert not touching.any()


class Fickle(list):
    """A sequence whose elements change when they are read: each must be read once."""

    def __getitem__(self, i):
        value = super().__getitem__(i)
        self[i] = -1000
        return value


@pytest.mark.parametrize(
    ("layout", "device_ids", "first_index", "host_ids", "runs"),
    [
        pytest.param(
            ([(1000, 8, 16)], [[(0, 16)]], 5000, 16, 8), [2, 3, 4, 7], 0, [0, 1, 2, 3],
            [[5000, 1032, 48], [5048, 1112, 16]], id="adjacent-blocks",
        ),
        # Block 6 of the request is the third device block of its offloaded block, block 8 the first of the next one.
        pytest.param(
            ([(0, 8, 10)], [[(0, 10)]], 1000, 40, 3, 4), [7, 5, 3], 6, [2, 0],
            [[1100, 70, 10], [1110, 50, 10], [1000, 30, 10]], id="parts-of-host-blocks",
        ),
        pytest.param(
            ([(0, 4, 100), (10, 4, 100), (30, 4, 100)], [[(0, 10), (1, 10), (2, 5)]], 1000, 25, 4), [1], 0, [3],
            [[1075, 100, 20], [1095, 130, 5]], id="layers-side-by-side",
        ),
    ],
)  # fmt: skip
def test_geometry_returns_runs_of_transfer(layout, device_ids, first_index, host_ids, runs):
    sizes, indices = Fickle([len(device_ids)]), Fickle([first_index])
    assert Geometry(*layout).runs(np.array(device_ids), sizes, indices, np.array(host_ids)).tolist() == runs


def test_hundred_thousand_blocks_in_one_transfer():
    n = 100_000
    device = torch.arange(n, dtype=torch.int32).view(torch.int8).view(n, 4).clone()
    pool = NoisyPool(np.zeros(2 * GUARD + 4 * n, np.int8), n, 4, 4)
    kv_caches = CanonicalKVCaches([CanonicalKVCacheTensor(device, 4)], [[CanonicalKVCacheRef(0, 4)]])
    handler = CPUCopyHandler(KVGeometry(kv_caches, pool), True)
    order = np.random.default_rng(0).permutation(n)
    handler.transfer_async(1, (GPULoadStoreSpec(order, [n], [0]), CPULoadStoreSpec(np.arange(n))))
    handler.wait([1])
    assert handler.get_finished()[0].transfer_size == 4 * n
    np.testing.assert_array_equal(pool.memory[GUARD:-GUARD].view(np.int32), order)


@pytest.mark.parametrize(
    ("device_ids", "sizes", "indices", "host_ids", "message"),
    [
        ([8], [1], [0], [0], r"device block's id must be in 0\.\.7, got 8"),
        ([-1], [1], [0], [0], r"device block's id must be in 0\.\.7, got -1"),
        ([0], [1], [0], [3], r"host block's id must be in 0\.\.2, got 3"),
        ([0], [1], [0], [-1], r"host block's id must be in 0\.\.2, got -1"),
        ([0, 1], [2], [3], [0], r"\[2\] device blocks per group, from \[3\] on, .* do not fill 1 host blocks"),
        ([0, 1], [2], [0], [0, 1], r"do not fill 2 host blocks"),
        ([0, 1], [1], [0], [0], r"do not fill 1 host blocks"),
        ([0], [2], [0], [0], r"add up to 1 block ids"),
        ([0], [-1], [0], [0], r"group_sizes must be >= 0"),
        ([0], [1], [-1], [0], r"block_indices be >= 0"),
        ([0], [1, 0], [0, 0], [0], r"there are 1 KV-cache groups, got 2 group_sizes and 2 block_indices"),
    ],
)
def test_runs_of_a_wrong_transfer_raise(device_ids, sizes, indices, host_ids, message):
    geometry = Geometry([(0, 8, 10)], [[(0, 10)]], 1000, 40, 3, 4)
    with pytest.raises(ValueError, match=message):
        geometry.runs(np.array(device_ids), sizes, indices, np.array(host_ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(0, 8, 10)], [[(0, 10)]], 1000, 40, 3, 1 << 62), r"in 1\.\.2147483647, got 4611686018427387904"),
        (([(0, 8, 10)], [[(0, 10)]], 1000, 40, 3, 1 << 70), r"factor must be in 1\.\.2147483647"),
        (([(0, 8, 10)], [[(0, 10)]], 1000, 40, 3, (1 << 30)), r"1073741824 device blocks of group 0 need 10737418240"),
        (([(0, 8, 1 << 62)] * 4, [[(i, 1 << 62) for i in range(4)]], 0, 40, 3), r"tensor 0 must lie within"),
        (([(0, 1, 1 << 62)] * 4, [[(i, 1 << 62) for i in range(4)]], 0, 40, 3), r"group 0 need 18446744073709551616"),
        (([(0, 8, 10)], [[(0, -10)]], 1000, 40, 3), r"must copy >= 1 bytes of each block of tensor 0, got -10"),
        (([(0, 8, -10)], [[(0, 10)]], 1000, 40, 3), r"tensor 0 must lie within"),
        (([(0, 8, 10)], [[(0, 10)]], 1 << 63, 40, 3), r"the host pool must lie within"),
        (([(0, 8, 10)], [[(0, 10)]], 0, 1 << 62, 3), r"the host pool must lie within"),
    ],
)
def test_geometry_of_numbers_that_overflow_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        Geometry(*arguments)


def test_check_beyond_int64_raises():
    geometry = Geometry([(0, 1, 1 << 61)], [[(0, 1 << 61)]], 0, 1 << 61, 1)
    with pytest.raises(ValueError, match="5 device blocks of 2305843009213693952 bytes are more than a job can move"):
        geometry.check(np.zeros(5, np.int64), [5], [0], np.zeros(5, np.int64))


def kv_caches_of(tensor, page, refs=((0, 8),)):
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(i, n) for i, n in refs]])


BLOCKS = torch.zeros(4, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("kv_caches", "factor", "message"),
    [
        (kv_caches_of(torch.zeros(4, 8), 8), 1, r"tensor 0 must be int8 .*, got torch.float32"),
        (kv_caches_of(BLOCKS, 9), 1, r"shape \(num_blocks, 9\), got \(4, 8\)"),
        (kv_caches_of(torch.zeros(32, dtype=torch.int8), 8), 1, r"shape \(num_blocks, 8\), got \(32,\)"),
        (kv_caches_of(torch.zeros(8, 4, dtype=torch.int8).t(), 8), 1, r"contiguous blocks, got strides \(1, 4\)"),
        (kv_caches_of(torch.zeros(1, 8, dtype=torch.int8).expand(4, 8), 8), 1, r"overlapping blocks: 8 bytes"),
        (kv_caches_of(torch.zeros(4, 8, dtype=torch.int8, device="meta"), 8), 1, r"on the accelerator, got meta"),
        (kv_caches_of(np.zeros((4, 8), np.int8), 8), 1, r"must be a torch.Tensor, got ndarray"),
        (kv_caches_of(BLOCKS, 8, [(1, 8)]), 1, r"names tensor 1, there are 1"),
        (kv_caches_of(BLOCKS, 8, [(0, 9)]), 1, r"copies 9 bytes .* has 1\.\.8"),
        (kv_caches_of(BLOCKS, 8, [(0, 0)]), 1, r"copies 0 bytes"),
        (kv_caches_of(BLOCKS, 8, [(0, 8.0)]), 1, r"two ints, got 0 and 8\.0"),
        (kv_caches_of(BLOCKS, 8.0), 1, r"an int for page_size_bytes, got 8\.0"),
        (kv_caches_of(BLOCKS, 8), True, r"factor must be an int >= 1, got True"),
        (kv_caches_of(BLOCKS, 8), 3, r"block has 24 bytes, the pool's blocks have 16"),
        *((kv_caches_of(BLOCKS, 8), n, f"block_size_factor must be an int >= 1, got {n!r}") for n in (0, -2, "2")),
    ],
)
def test_geometry_of_wrong_cache_raises(kv_caches, factor, message):
    pool = NoisyPool(np.zeros(2 * GUARD + 64, np.int8), 4, 16, 16)
    with pytest.raises(ValueError, match=message):
        KVGeometry(kv_caches, pool, factor)
    if "factor" in message:
        with pytest.raises(ValueError, match=message):
            host_block_bytes(kv_caches, factor)


def test_geometry_on_two_devices_raises(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    tensors = [CanonicalKVCacheTensor(BLOCKS, 8), CanonicalKVCacheTensor(BLOCKS.to("meta"), 8)]
    pool = NoisyPool(np.zeros(2 * GUARD + 64, np.int8), 4, 16, 16)
    with pytest.raises(ValueError, match=r"must be on one device, got \['cpu', 'meta'\]"):
        KVGeometry(CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, 8)]]), pool)
