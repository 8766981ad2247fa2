"""The device's path on a CUDA device: what only streams, events and pinned memory can show."""

import time

import pytest
import torch

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer import host_pool as memory
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import KVGeometry, host_block_bytes
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.staged import StagedCopyHandler
from kvcache.transfer.streams import DeviceStream

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_LAYERS = 8
PAGE_BYTES = 32 << 10
NUM_BLOCKS = 512


@pytest.fixture
def kv_caches():
    tensors = [
        CanonicalKVCacheTensor(
            torch.randint(-128, 128, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8, device="cuda"), PAGE_BYTES
        )
        for _ in range(NUM_LAYERS)
    ]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, PAGE_BYTES - 512 * i) for i in range(NUM_LAYERS)]])


@pytest.fixture
def pool(kv_caches):
    pool = HostPool(NUM_BLOCKS // 2, host_block_bytes(kv_caches, 2))
    yield pool
    torch.cuda.synchronize()
    pool.close()


@pytest.fixture
def handlers(kv_caches, pool):
    pair = cpu_gpu_handlers(kv_caches, pool, 2)
    yield pair
    for handler in pair:
        handler.shutdown()


def spec_of(device_ids, host_ids, first_index=0):
    return GPULoadStoreSpec(device_ids, [len(device_ids)], [first_index]), CPULoadStoreSpec(host_ids)


def finish(handler, job_id):
    handler.wait([job_id])
    (result,) = handler.get_finished()
    assert result.success
    return result


def keep_busy(milliseconds=50):
    """Queue work on the present stream that takes so long, and is seen to have ended by whoever waits for it."""
    torch.cuda._sleep(int(milliseconds * 1e6))


def test_the_pool_is_pinned(pool):
    assert pool.is_pinned
    assert pool.pin_failures == 0


def test_a_refusal_to_pin_does_not_reach_the_next_kernel(pool):
    assert memory._register(pool.address, pool.num_bytes).startswith("CUDA error ")
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_copy_may_reach_over_chunks_that_were_pinned_apart(kv_caches, monkeypatch):
    monkeypatch.setattr(memory, "_PIN_BYTES", 96 << 10)
    pool = HostPool(NUM_BLOCKS // 2, host_block_bytes(kv_caches, 2))
    assert pool.is_pinned
    store, load = cpu_gpu_handlers(kv_caches, pool, 2)
    before = [kv.tensor.clone() for kv in kv_caches.tensors]
    spec = spec_of(range(NUM_BLOCKS), range(NUM_BLOCKS // 2))
    store.transfer_async(1, spec)
    finish(store, 1)
    for kv in kv_caches.tensors:
        kv.tensor.fill_(9)
    load.transfer_async(2, spec[::-1])
    finish(load, 2)
    for i, (kv, old) in enumerate(zip(kv_caches.tensors, before, strict=True)):
        assert torch.equal(kv.tensor[:, : PAGE_BYTES - 512 * i], old[:, : PAGE_BYTES - 512 * i])
    pool.close()


def test_a_handler_that_is_dropped_in_flight_waits_for_the_device(kv_caches, pool):
    handler, _ = cpu_gpu_handlers(kv_caches, pool, 2)
    kv_caches.tensors[0].tensor.fill_(3)
    keep_busy()
    handler.transfer_async(1, spec_of(range(NUM_BLOCKS), range(NUM_BLOCKS // 2)))
    del handler
    assert bool((pool.tensor[:, :PAGE_BYTES] == 3).all())


def test_a_transfer_is_not_captured_into_a_graph(handlers, kv_caches):
    store, _ = handlers
    store.transfer_async(1, spec_of([1, 2], [0]))
    finish(store, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_caches.tensors[0].tensor.add_(1)
        store.transfer_async(2, spec_of([1, 2], [0]))
    assert [(r.job_id, r.success) for r in store.get_finished()] == [(2, False)]
    graph.replay()
    torch.cuda.synchronize()


def test_bytes_come_back_the_same(handlers, kv_caches, pool):
    store, load = handlers
    before = [kv.tensor.clone() for kv in kv_caches.tensors]
    order = torch.randperm(NUM_BLOCKS - 1).tolist()
    hosts = torch.randperm(NUM_BLOCKS // 2).tolist()
    result = [store.transfer_async(1, spec_of(order, hosts, 1)), finish(store, 1)][1]
    assert result.transfer_size == (NUM_BLOCKS - 1) * sum(PAGE_BYTES - 512 * i for i in range(NUM_LAYERS))
    assert result.transfer_time > 0
    for kv in kv_caches.tensors:
        kv.tensor.fill_(9)
    load.transfer_async(2, spec_of(order, hosts, 1)[::-1])
    finish(load, 2)
    untouched = (set(range(NUM_BLOCKS)) - set(order)).pop()
    for i, (kv, old) in enumerate(zip(kv_caches.tensors, before, strict=True)):
        n = PAGE_BYTES - 512 * i
        assert torch.equal(kv.tensor[order, :n], old[order, :n])
        assert bool((kv.tensor[:, n:] == 9).all())
        assert bool((kv.tensor[untouched] == 9).all())


def test_a_store_waits_for_the_compute_stream(handlers, kv_caches, pool):
    store, _ = handlers
    compute = torch.cuda.Stream()
    with torch.cuda.stream(compute):
        keep_busy()
        for kv in kv_caches.tensors:
            kv.tensor.fill_(3)
        store.transfer_async(1, spec_of(range(NUM_BLOCKS), range(NUM_BLOCKS // 2)))
    assert store.get_finished() == []
    finish(store, 1)
    assert bool((pool.tensor == 3).all())


def test_a_load_does_not_overwrite_what_is_still_read(handlers, kv_caches, pool):
    _, load = handlers
    pool.tensor.fill_(5)
    kv_caches.tensors[0].tensor.fill_(1)
    compute = torch.cuda.Stream()
    compute.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(compute):
        keep_busy()
        read = kv_caches.tensors[0].tensor.clone()
        load.transfer_async(1, spec_of(range(NUM_BLOCKS), range(NUM_BLOCKS // 2))[::-1])
    finish(load, 1)
    assert bool((read == 1).all())


def test_a_load_is_there_for_any_stream_once_it_is_told(handlers, kv_caches, pool):
    _, load = handlers
    for value in range(20):
        pool.tensor.fill_(value)
        load.transfer_async(value, spec_of(range(NUM_BLOCKS), range(NUM_BLOCKS // 2))[::-1])
        while not (results := load.get_finished()):
            time.sleep(1e-4)
        assert results[0].success
        with torch.cuda.stream(torch.cuda.Stream()):
            assert bool((kv_caches.tensors[0].tensor == value).all())


def test_nothing_synchronises(handlers):
    store, load = handlers
    spec = spec_of(range(NUM_BLOCKS), range(NUM_BLOCKS // 2))
    for handler, job in ((store, spec), (load, spec[::-1])):
        handler.transfer_async(0, job)
        finish(handler, 0)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        keep_busy(200)
        started = time.perf_counter()
        store.transfer_async(1, spec)
        load.transfer_async(2, spec[::-1])
        assert store.get_finished() == []
        assert load.get_finished() == []
        assert time.perf_counter() - started < 0.1
    finally:
        torch.cuda.set_sync_debug_mode(before)
    finish(store, 1)
    finish(load, 2)


def test_both_directions_overlap(kv_caches, pool):
    store, load = cpu_gpu_handlers(kv_caches, pool, 2)
    half, hosts = NUM_BLOCKS // 2, NUM_BLOCKS // 4
    out = spec_of(range(half), range(hosts))
    back = spec_of(range(half, NUM_BLOCKS), range(hosts, 2 * hosts))[::-1]

    def seconds(*jobs):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for job_id in range(8):
            for handler, job in jobs:
                handler.transfer_async(job_id, job)
        for handler, _ in jobs:
            handler.wait([7])
        elapsed = time.perf_counter() - started
        for handler, _ in jobs:
            assert all(result.success for result in handler.get_finished())
        return elapsed

    seconds((store, out), (load, back))
    alone = seconds((store, out)) + seconds((load, back))
    assert seconds((store, out), (load, back)) < 0.8 * alone


def test_staging_that_finds_no_memory_shrinks_or_is_done_without(kv_caches, pool):
    geometry = KVGeometry(kv_caches, pool, 2)
    huge = torch.cuda.get_device_properties(0).total_memory * 2
    handler = StagedCopyHandler(geometry, True, DeviceStream(geometry.device), huge)
    assert handler._staging.numel() < huge
    handler.transfer_async(1, spec_of([1, 2], [0]))
    finish(handler, 1)
    with pytest.warns(RuntimeWarning, match="no device memory for a staging buffer"):
        direct = StagedCopyHandler(geometry, True, DeviceStream(geometry.device), 1)
    expected = pool.block(0).clone()
    pool.block(0).zero_()
    direct.transfer_async(2, spec_of([1, 2], [0]))
    finish(direct, 2)
    assert torch.equal(pool.block(0), expected)


def test_tensors_on_two_devices_are_refused(kv_caches, pool):
    kv_caches.tensors[3].tensor = kv_caches.tensors[3].tensor.cpu()
    with pytest.raises(ValueError, match=r"all tensors must be on one device, got \['cpu', 'cuda:0'\]"):
        cpu_gpu_handlers(kv_caches, pool, 2)


@pytest.mark.slow
@pytest.mark.parametrize("to_host", [True, False], ids=["store", "load"])
def test_two_mib_blocks_move_at_the_rate_of_one_large_copy(to_host):
    num_blocks, num_layers = 512, 32
    page = (2 << 20) // num_layers
    tensors = [
        CanonicalKVCacheTensor(torch.zeros(2 * num_blocks, page, dtype=torch.int8, device="cuda"), page)
        for _ in range(num_layers)
    ]
    kv_caches = CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, page) for i in range(num_layers)]])
    pool = HostPool(2 * num_blocks, 2 << 20)
    handler = cpu_gpu_handlers(kv_caches, pool)[0 if to_host else 1]
    spec = spec_of(
        torch.randperm(2 * num_blocks)[:num_blocks].numpy(), torch.randperm(2 * num_blocks)[:num_blocks].numpy()
    )
    flat = torch.empty(num_blocks << 21, dtype=torch.int8, device="cuda")
    host = pool.tensor.view(-1)[: flat.numel()]
    ratios = []
    for job_id in range(7):
        torch.cuda.synchronize()
        started = time.perf_counter()
        host.copy_(flat, non_blocking=True) if to_host else flat.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        one_copy = time.perf_counter() - started
        started = time.perf_counter()
        handler.transfer_async(job_id, spec if to_host else spec[::-1])
        finish(handler, job_id)
        ratios.append(one_copy / (time.perf_counter() - started))
    handler.shutdown()
    pool.close()
    assert max(ratios) > 0.85, ratios
