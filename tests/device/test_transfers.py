"""Transfers on a device, a GPU or the simulated one: bytes, order, lifetime, and what the host does not wait for."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from bench import (
    ALL,
    BACK,
    DEVICE,
    LATE,
    NUM_BLOCKS,
    NUM_LAYERS,
    OUT,
    PART_BYTES,
    finish,
    keep_busy,
    kv_caches_of,
    layer_bytes,
    new_stream,
    no_synchronisation,
    poll,
    spec_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache.transfer import pinning
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import KVGeometry
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.staged import StagedCopyHandler
from kvcache.transfer.streams import DeviceStream


def test_bytes_return_after_store_and_load(bench):
    before = bench.read_layers()
    order = torch.randperm(NUM_BLOCKS - 1).tolist()
    spec = spec_of(order, torch.randperm(NUM_BLOCKS // 2).tolist(), 1)
    bench.store.transfer_async(1, spec)
    assert finish(bench.store, 1).transfer_size == (NUM_BLOCKS - 1) * PART_BYTES
    bench.fill(9)
    bench.load.transfer_async(2, spec[::-1])
    finish(bench.load, 2)
    assert torch.equal(bench.read_layers()[order], before[order])
    for i, layer in enumerate(bench.layers):
        assert bool((layer.cpu()[:, layer_bytes(i) :] == 9).all())
        assert bool((layer.cpu()[NUM_BLOCKS - 1] == 9).all())


def test_single_blocks_return_after_load(bench):
    before = bench.read_layers()
    specs = [spec_of([3 * job_id], [job_id], 1) for job_id in range(4)]
    for job_id, spec in enumerate(specs):
        bench.store.transfer_async(job_id, spec)
    bench.store.wait(range(4))
    for job_id in range(4):
        assert torch.equal(bench.read_block(job_id)[1], before[3 * job_id])
    bench.fill(9)
    for job_id, spec in enumerate(specs):
        bench.load.transfer_async(job_id, spec[::-1])
    bench.load.wait(range(4))
    assert torch.equal(bench.read_layers()[:12:3], before[:12:3])


def test_store_waits_for_the_compute_stream(bench):
    with new_stream():
        keep_busy()
        bench.fill(3)
        bench.store.transfer_async(1, ALL)
    finish(bench.store, 1)
    assert bool((bench.read_host() == 3).all())


def test_each_store_waits_for_compute(bench):
    for value in range(4):
        keep_busy(20)
        bench.layers[0][2 * value : 2 * value + 2].fill_(value)
        bench.store.transfer_async(value, spec_of([2 * value, 2 * value + 1], [value]))
    for value in range(4):
        bench.store.wait([value])
        assert bool((bench.read_block(value)[:, : layer_bytes(0)] == value).all())
    assert [r.success for r in bench.store.get_finished()] == [True] * 4


def test_load_spares_blocks_still_read(bench):
    bench.fill_host(5)
    bench.fill(1)
    with new_stream():
        keep_busy()
        read = bench.layers[0].clone()
        bench.load.transfer_async(1, ALL[::-1])
    finish(bench.load, 1)
    assert bool((read.cpu() == 1).all())


def test_reported_load_is_seen_by_streams(bench):
    for value in range(3):
        bench.fill_host(value)
        bench.load.transfer_async(value, ALL[::-1])
        assert poll(bench.load)[0].success
        with torch.Stream(device=DEVICE):
            assert bool((bench.layers[0].cpu() == value).all())


def test_successive_jobs_keep_ids_and_staging(bench):
    before = bench.read_layers()
    pairs = [(NUM_BLOCKS - 1 - 2 * i, NUM_BLOCKS - 2 - 2 * i) for i in range(NUM_BLOCKS // 2)]
    for job_id, pair in enumerate(pairs):
        bench.store.transfer_async(job_id, spec_of(pair, [job_id]))
    seen = []
    while len(seen) < len(pairs):
        for result in poll(bench.store):
            assert torch.equal(bench.read_block(result.job_id), before[list(pairs[result.job_id])])
            seen.append(result.job_id)
    assert seen == list(range(len(pairs)))


def test_job_beyond_staging_returns_its_bytes(bench):
    before = bench.read_layers()
    store, load = bench.handlers(staging_bytes=3 * NUM_LAYERS * layer_bytes(0))
    store.transfer_async(1, ALL)
    finish(store, 1)
    assert torch.equal(bench.read_host().reshape(NUM_BLOCKS, PART_BYTES), before)
    bench.fill(9)
    load.transfer_async(1, ALL[::-1])
    finish(load, 1)
    assert torch.equal(bench.read_layers(), before)


def test_both_directions_share_no_memory(bench):
    bench.fill_host(7)
    bench.fill(1)
    torch.accelerator.synchronize()
    bench.store.transfer_async(1, OUT)
    bench.load.transfer_async(1, BACK)
    finish(bench.store, 1)
    finish(bench.load, 1)
    assert bool((bench.read_host()[: NUM_BLOCKS // 4] == 1).all())
    for i, layer in enumerate(bench.layers):
        assert bool((layer.cpu()[NUM_BLOCKS // 2 :, : layer_bytes(i)] == 7).all())


def test_nothing_synchronises(bench):
    for handler, spec in ((bench.store, OUT), (bench.load, BACK)):
        handler.transfer_async(0, spec)
        finish(handler, 0)
    torch.accelerator.synchronize()
    with no_synchronisation():
        keep_busy(200)
        bench.store.transfer_async(1, OUT)
        bench.load.transfer_async(2, BACK)
        results = bench.store.get_finished() + bench.load.get_finished()
    bench.store.wait([1])
    bench.load.wait([2])
    results += bench.store.get_finished() + bench.load.get_finished()
    assert sorted((r.job_id, r.success) for r in results) == [(1, True), (2, True)]


def test_both_directions_overlap(bench):
    with bench.store._stream.queueing():
        keep_busy(500)
    bench.store.transfer_async(1, OUT)
    bench.load.transfer_async(1, BACK)
    # The store's stream does nothing until the load has ended.
    if LATE:
        LATE.weight(bench.store._stream._stream.stream_id, 0.0)
    finish(bench.load, 1)
    assert bench.store.get_finished() == []
    finish(bench.store, 1)


def test_wait_returns_after_all_its_jobs(bench):
    for job_id in range(3):
        keep_busy(50)
        bench.store.transfer_async(job_id, spec_of([2 * job_id, 2 * job_id + 1], [job_id]))
    bench.store.wait([2, 0, 1, 77])
    assert [(r.job_id, r.success) for r in bench.store.get_finished()] == [(0, True), (1, True), (2, True)]


def test_wait_returns_once_bytes_arrived(bench):
    bench.fill(3)
    keep_busy(200)
    bench.store.transfer_async(1, ALL)
    bench.store.wait([1])
    assert bool((bench.read_host() == 3).all())


def test_transfer_time_equals_copy_time(bench):
    bench.store.transfer_async(1, ALL)
    result = finish(bench.store, 1)
    assert 0 < result.transfer_time < 10


def test_dropped_handler_waits_for_device(bench):
    handler, _ = bench.handlers()
    bench.fill(3)
    keep_busy()
    handler.transfer_async(1, ALL)
    del handler
    assert bool((bench.read_host() == 3).all())


def test_shutdown_returns_after_the_last_copy(bench):
    keep_busy(200)
    bench.store.transfer_async(1, ALL)
    bench.store.shutdown(wait=False)
    bench.fill_host(4)
    torch.accelerator.synchronize()
    assert bool((bench.pool.tensor == 4).all())
    assert [(r.job_id, r.success) for r in bench.store.get_finished()] == [(1, False)]


def test_half_failed_job_ends_halfway(bench):
    copy_many, calls = bench.store._stream.copy_many, []

    def second_fails(targets, sources):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no")
        copy_many(targets, sources)

    bench.store._stream.copy_many = second_fails
    keep_busy(200)
    bench.store.transfer_async(1, ALL)
    assert len(calls) == 2
    results = bench.store.get_finished() or (bench.store.wait([1]), bench.store.get_finished())[1]
    assert [(r.job_id, r.success) for r in results] == [(1, False)]
    # The blocks are free again, so the engine writes to them.
    bench.fill(9)
    bench.fill_host(4)
    torch.accelerator.synchronize()
    assert bool((bench.pool.tensor == 4).all())


@contextmanager
def capture(stream=None):
    """Capture a graph on a stream; the current one if None."""
    if LATE:
        stream_id = (stream or torch.accelerator.current_stream(DEVICE)).stream_id
        LATE.capture(stream_id, True)
        try:
            yield
        finally:
            LATE.capture(stream_id, False)
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream and torch.cuda.ExternalStream(stream.native_handle)):
            yield
        graph.replay()


def test_transfer_submitted_during_a_capture_fails(bench):
    bench.store.transfer_async(1, spec_of([1, 2], [0]))
    finish(bench.store, 1)
    with capture():
        bench.store.transfer_async(2, spec_of([3, 4], [0]))
    before = bench.pool.block(0).clone()
    torch.accelerator.synchronize()
    assert [(r.job_id, r.success) for r in bench.store.get_finished()] == [(2, False)]
    assert torch.equal(bench.pool.block(0), before)


@pytest.mark.skipif(LATE is None, reason="needs a simulated capture of another stream")
def test_transfer_during_own_capture_fails(bench):
    own = bench.store._stream._stream
    with capture(own):
        bench.store.transfer_async(1, spec_of([1, 2], [0]))
        assert LATE.pending(own.stream_id) == 0
    assert [(r.job_id, r.success) for r in bench.store.get_finished()] == [(1, False)]


@pytest.mark.skipif(LATE is None, reason="needs a simulated capture of another stream")
def test_job_in_flight_survives_capture(bench):
    keep_busy(10_000)
    bench.store.transfer_async(1, ALL)
    with capture(torch.Stream(device=DEVICE)):
        assert bench.store.get_finished() == []
    finish(bench.store, 1)


def test_other_current_device_changes_nothing(bench):
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    torch.accelerator.set_device_index(1)
    try:
        store, load = bench.handlers()
        bench.fill(3)
        store.transfer_async(1, ALL)
        finish(store, 1)
        bench.fill_host(5)
        load.transfer_async(1, ALL[::-1])
        finish(load, 1)
        assert torch.accelerator.current_device_index() == 1
        pool = HostPool(2, 4096, device=DEVICE)
        assert pool.is_pinned
        pool.close()
    finally:
        torch.accelerator.set_device_index(0)
    assert bool((bench.layers[0].cpu() == 5).all())


def test_copies_are_correct_during_pinning(bench, monkeypatch):
    allowed = threading.Semaphore(1)
    lock = pinning.lock

    def slow_lock(*arguments):
        assert allowed.acquire(timeout=60)
        return lock(*arguments)

    bench.pool.close()
    monkeypatch.setattr(pinning, "lock", slow_lock)
    monkeypatch.setattr(HostPool, "piece_bytes", 2 * 4096 * (layer_bytes(0) // 512))
    bench.pool = HostPool(NUM_BLOCKS // 2, bench.pool.block_bytes)
    num_pieces = -(-bench.pool.num_bytes // HostPool.piece_bytes)
    assert (num_pieces > 2, bench.pool.is_pinned) == (True, False)
    bench.store, bench.load = bench.handlers()
    try:
        for _ in range(num_pieces - 1):
            # The first round runs before the second piece is pinned, the others while or after the next one is.
            test_bytes_return_after_store_and_load(bench)
            allowed.release()
    finally:
        allowed.release(num_pieces)
    assert bench.pool.wait_ready(60)
    assert bench.pool.is_pinned
    test_bytes_return_after_store_and_load(bench)
    bench.pool.close()
    monkeypatch.undo()
    bench.pool.pin()


def test_refused_pin_spares_next_kernel(bench):
    assert pinning.lock(bench.pool.address, bench.pool.num_bytes, DEVICE) != ""
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_staging_shrinks_if_memory_is_short(bench):
    geometry = KVGeometry(bench.kv_caches, bench.pool, 2)
    huge = 1 << 20 if LATE else torch.cuda.get_device_properties(0).total_memory * 2
    if LATE:
        LATE.capacity(LATE.used() + huge // 2)
    try:
        handler = StagedCopyHandler(geometry, True, DeviceStream(DEVICE), huge)
    finally:
        if LATE:
            LATE.capacity(1 << 30)
    assert handler._gathers[0].staging.numel() < huge
    handler.transfer_async(1, spec_of([1, 2, 5], [0, 3]))
    finish(handler, 1)
    expected = bench.read_host()[0].clone()
    with pytest.warns(RuntimeWarning, match="no device memory for a staging buffer"):
        direct = StagedCopyHandler(geometry, True, DeviceStream(DEVICE), 1)
    bench.fill_host(0, 0)
    direct.transfer_async(2, spec_of([1, 2, 5], [0, 3]))
    finish(direct, 2)
    assert torch.equal(bench.read_host()[0], expected)


def test_tensors_on_two_devices_are_refused(bench):
    bench.kv_caches.tensors[3].tensor = bench.layers[3].cpu()
    with pytest.raises(ValueError, match=rf"all tensors must be on one device, got \['cpu', '{DEVICE}'\]"):
        bench.handlers()


class Calls(TorchDispatchMode):
    """Counts the operators that torch runs, on the device and on the host."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("to_host", [True, False], ids=["store", "load"])
def test_scattered_blocks_cost_few_calls(bench, to_host):
    layers = [torch.zeros(256, 64, dtype=torch.int8, device=DEVICE) for _ in range(32)]
    pool = HostPool(256, 64 * 32)
    handler = cpu_gpu_handlers(kv_caches_of(layers, [64] * 32), pool)[0 if to_host else 1]
    spec = spec_of(torch.randperm(256)[:64].numpy(), 2 * torch.randperm(128)[:64].numpy())
    with Calls() as calls:
        handler.transfer_async(1, spec if to_host else spec[::-1])
    finish(handler, 1)
    assert calls.num_calls <= 120
    pool.close()


@pytest.mark.skipif(LATE is not None, reason="measures a GPU")
@pytest.mark.parametrize("to_host", [True, False], ids=["store", "load"])
def test_large_blocks_move_at_full_rate(to_host):
    num_blocks, num_layers = 512, 32
    page = (2 << 20) // num_layers
    layers = [torch.zeros(2 * num_blocks, page, dtype=torch.int8, device=DEVICE) for _ in range(num_layers)]
    pool = HostPool(2 * num_blocks, 2 << 20)
    handler = cpu_gpu_handlers(kv_caches_of(layers, [page] * num_layers), pool)[0 if to_host else 1]
    order = torch.randperm(2 * num_blocks)
    spec = spec_of(order[:num_blocks].numpy(), order[num_blocks:].numpy())
    flat = torch.empty(num_blocks << 21, dtype=torch.int8, device=DEVICE)
    host = pool.flat[: flat.numel()]
    ratios = []
    for job_id in range(7):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        host.copy_(flat, non_blocking=True) if to_host else flat.copy_(host, non_blocking=True)
        torch.accelerator.synchronize()
        one_copy = time.perf_counter() - started
        started = time.perf_counter()
        handler.transfer_async(job_id, spec if to_host else spec[::-1])
        finish(handler, job_id)
        ratios.append(one_copy / (time.perf_counter() - started))
    handler.shutdown()
    pool.close()
    assert max(ratios) > 0.85, ratios
