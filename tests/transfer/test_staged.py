"""The device's path, with host tensors in the device's place: what it gathers, how it ends, what it cannot do."""

import pytest
import torch
from host_stream import HostStream

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer import cuda as staged
from kvcache.transfer.cuda import StagedCopyHandler
from kvcache.transfer.geometry import KVGeometry
from kvcache.transfer.host_pool import HostPool


def layered(num_blocks=32, page_bytes=16, num_layers=4):
    tensors = [
        CanonicalKVCacheTensor(torch.randint(-128, 128, (num_blocks, page_bytes), dtype=torch.int8), page_bytes)
        for _ in range(num_layers)
    ]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, page_bytes) for i in range(num_layers)]])


def make_handler(kv_caches, to_host=True, stream=None, staging_bytes=1 << 20):
    pool = HostPool(32, 64, pin=False)
    return StagedCopyHandler(KVGeometry(kv_caches, pool), to_host, stream or HostStream(), staging_bytes), pool


def spec_of(device_ids, host_ids):
    return GPULoadStoreSpec(device_ids, [len(device_ids)], [0]), CPULoadStoreSpec(host_ids)


def test_whole_blocks_cross_the_link_and_adjacent_ones_as_one(monkeypatch):
    handler, _ = make_handler(layered())
    crossed = []
    monkeypatch.setattr(handler, "_copy", lambda host, device: crossed.append(device.numel()))
    handler.transfer_async(1, spec_of([9, 3, 5, 7], [2, 3, 4, 8]))
    assert crossed == [3 * 64, 64]


def test_the_staging_buffer_bounds_a_chunk(monkeypatch):
    stream = HostStream()
    handler, _ = make_handler(layered(), stream=stream, staging_bytes=5 * 64 + 63)
    queue, chunks = handler._queue, []
    monkeypatch.setattr(handler, "_queue", lambda chunk, ids: [queue(chunk, ids), chunks.append(len(chunk.device_ids))])
    handler.transfer_async(1, spec_of(range(12), range(12)))
    assert chunks == [5, 5, 2]
    # The ids go to the device once for all of them.
    assert stream.log == ["wait for compute", "record event", "send 12", "record event"]


def test_layers_are_gathered_in_the_widest_words_that_fit():
    tensor = torch.zeros(4, 64, dtype=torch.int8)
    staging = torch.zeros(4, 48, dtype=torch.int8)
    offset = -tensor.data_ptr() % 8
    assert offset == 0
    assert staged._words(tensor[:, 8:24], staging, 16)[0] == torch.int64
    assert staged._words(tensor[:, 4:20], staging, 16)[0] == torch.int32
    assert staged._words(tensor[:, 8:24], staging, 2)[0] == torch.int16
    assert staged._words(tensor[:, 8:23], staging, 16)[0] == torch.int8


def test_a_block_in_one_piece_needs_no_staging():
    handler, _ = make_handler(layered(num_layers=1), staging_bytes=0)
    assert handler._staging is None
    whole = torch.zeros(4, 24, dtype=torch.int8)
    side_by_side = [CanonicalKVCacheTensor(whole[:, 8 * i : 8 * i + 8], 8) for i in range(3)]
    handler, _ = make_handler(
        CanonicalKVCaches(side_by_side, [[CanonicalKVCacheRef(i, 8) for i in range(3)]]), staging_bytes=0
    )
    assert handler._staging is None


def test_a_job_waits_for_the_compute_stream_before_it_copies():
    for to_host in (True, False):
        stream = HostStream()
        handler, _ = make_handler(layered(), to_host, stream)
        spec = spec_of([1], [2])
        handler.transfer_async(1, spec if to_host else spec[::-1])
        assert stream.log == ["wait for compute", "record event", "send 1", "record event"]


def test_ends_are_told_in_order_once_the_device_is_there():
    stream = HostStream(done=0)
    handler, _ = make_handler(layered(), stream=stream)
    for job_id in (5, 3, 4):
        handler.transfer_async(job_id, spec_of([job_id], [job_id]))
    assert handler.get_finished() == []
    stream.done = 3
    assert [r.job_id for r in handler.get_finished()] == [5]
    handler.wait([3, 99])
    assert [(r.job_id, r.transfer_time) for r in handler.get_finished()] == [(3, 1.0)]
    handler.wait([99, 5])
    assert handler.get_finished() == []
    handler.shutdown()
    assert [r.success for r in handler.get_finished()] == [True]
    assert handler.transfer_async(6, spec_of([1], [1])) is False


def test_abandoned_jobs_end_as_failed_once_the_device_is_through():
    stream = HostStream(done=0)
    handler, _ = make_handler(layered(), stream=stream)
    handler.transfer_async(1, spec_of([1], [1]))
    handler.shutdown(wait=False)
    assert stream.done >= 2
    assert [(r.job_id, r.success, r.transfer_size) for r in handler.get_finished()] == [(1, False, 0)]


def test_a_job_that_cannot_be_queued_fails_alone(monkeypatch, caplog):
    handler, pool = make_handler(layered())
    copy = handler._copy

    def no_memory(*arguments):
        raise torch.OutOfMemoryError("out of device memory")

    monkeypatch.setattr(handler, "_copy", no_memory)
    assert handler.transfer_async(1, spec_of([1], [1])) is True
    monkeypatch.setattr(handler, "_copy", copy)
    assert handler.transfer_async(2, spec_of([2], [2])) is True
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, False), (2, True)]
    assert not pool.block(1).any()
    assert "out of device memory" in caplog.text


def test_a_device_that_breaks_fails_its_jobs_without_raising(caplog):
    stream = HostStream(done=0)
    handler, _ = make_handler(layered(), stream=stream)
    handler.transfer_async(1, spec_of([1], [1]))
    handler.transfer_async(2, spec_of([2], [2]))
    stream.broken = True
    handler.wait([1, 2])
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, False), (2, False)]
    assert "the device is gone" in caplog.text


def test_a_tensor_that_went_away_fails_its_job():
    kv_caches = layered()
    handler, _ = make_handler(kv_caches)
    kv_caches.tensors[1].tensor.set_()
    handler.transfer_async(1, spec_of([1], [1]))
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, False)]


@pytest.mark.parametrize("made_in_inference_mode", ["the engine's tensors", "the pool and the handler", "all of it"])
def test_inference_mode_and_its_absence_go_together(made_in_inference_mode):
    with torch.inference_mode(made_in_inference_mode != "the pool and the handler"):
        kv_caches = layered()
    with torch.inference_mode(made_in_inference_mode != "the engine's tensors"):
        store, pool = make_handler(kv_caches)
        load = StagedCopyHandler(KVGeometry(kv_caches, pool), False, HostStream())
    store.transfer_async(1, spec_of([1, 4], [2, 0]))
    load.transfer_async(2, spec_of([3, 5], [2, 0])[::-1])
    assert [r.success for r in store.get_finished() + load.get_finished()] == [True, True]
    assert all(torch.equal(kv.tensor[[3, 5]], kv.tensor[[1, 4]]) for kv in kv_caches.tensors)
    pool.block(3).fill_(1)


def test_a_handler_that_is_dropped_in_flight_waits_for_the_device():
    stream = HostStream(done=0)
    handler, _ = make_handler(layered(), stream=stream)
    handler.transfer_async(1, spec_of([1], [1]))
    handler.transfer_async(2, spec_of([2], [2]))
    del handler
    assert stream.done == 4


def test_ten_thousand_jobs_in_flight_are_neither_slow_nor_lost():
    stream = HostStream(done=0)
    handler, _ = make_handler(layered(num_layers=1), stream=stream)
    for job_id in range(10_000):
        handler.transfer_async(job_id, spec_of([], []))
    stream.done = 1 << 60
    assert [result.job_id for result in handler.get_finished()] == list(range(10_000))


def test_a_refused_job_moves_no_byte():
    handler, pool = make_handler(layered())
    pool.tensor.fill_(7)
    with pytest.raises(ValueError, match="got 32"):
        handler.transfer_async(1, spec_of([1, 32], [1, 2]))
    assert bool((pool.tensor == 7).all())
    assert handler.get_finished() == []
    handler._stream.done = 0
    handler.transfer_async(1, spec_of([1], [1]))
    with pytest.raises(ValueError, match="job_id 1 is in flight"):
        handler.transfer_async(1, spec_of([1], [1]))


def test_staging_shrinks_until_it_fits_the_device(monkeypatch):
    asked, empty = [], torch.empty

    def allocate(n, **options):
        asked.append(n)
        if n > 200:
            raise torch.OutOfMemoryError("no")
        return empty(n, **options)

    monkeypatch.setattr(staged.torch, "empty", allocate)
    assert staged._allocate(1000, 64, torch.device("cpu")).numel() == 125
    assert asked == [1000, 500, 250, 125]


def test_without_room_for_staging_layers_go_one_by_one(monkeypatch):
    kv_caches = layered()
    with pytest.warns(RuntimeWarning, match="no device memory for a staging buffer of 64 bytes or more"):
        handler, pool = make_handler(kv_caches, staging_bytes=63)
    handler.transfer_async(1, spec_of([3, 4], [7, 1]))
    assert handler.get_finished()[0].transfer_size == 128
    for i, kv in enumerate(kv_caches.tensors):
        assert torch.equal(pool.block(7)[16 * i : 16 * i + 16], kv.tensor[3])
        assert torch.equal(pool.block(1)[16 * i : 16 * i + 16], kv.tensor[4])
