"""The device's handler over host tensors: copies, ends of jobs, threads and faults."""

import itertools
from unittest.mock import Mock

import geometries
import pytest
import torch
from geometries import spec_of
from host_stream import HostStream

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvcache.transfer import staged
from kvcache.transfer.geometry import KVGeometry
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.staged import StagedCopyHandler


def layered(num_layers=4):
    return geometries.layered(32, 16, num_layers)


def make_handler(kv_caches=None, to_host=True, stream=None, staging_bytes=1 << 20):
    pool = HostPool(32, 64, pin=False)
    geometry = KVGeometry(kv_caches or layered(), pool)
    return StagedCopyHandler(geometry, to_host, stream or HostStream(), staging_bytes), pool


@pytest.fixture
def stalled():
    """A handler with job 1 in flight, and its stream, on which nothing is done yet."""
    stream = HostStream(done=0)
    handler, _ = make_handler(stream=stream)
    handler.transfer_async(1, spec_of([1], [1]))
    return handler, stream


class LinkStream(HostStream):
    """Records the size of each copy over the link."""

    def __init__(self):
        super().__init__()
        self.crossed = []

    def copy_many(self, targets, sources):
        self.crossed += [target.numel() for target in targets]
        super().copy_many(targets, sources)


@pytest.mark.parametrize(
    ("device_ids", "host_ids", "staging_bytes", "crossed"),
    [
        pytest.param([9, 3, 5, 7], [2, 3, 4, 8], 1 << 20, [3 * 64, 64], id="adjacent-host-blocks"),
        pytest.param([*range(12)], [*range(12)], 5 * 64 + 63, [5 * 64, 5 * 64, 2 * 64], id="larger-than-staging"),
        pytest.param([9], [2], 1 << 20, [16] * 4, id="one-block-is-not-staged"),
    ],
)
def test_store_crosses_link_in_few_copies(device_ids, host_ids, staging_bytes, crossed):
    stream = LinkStream()
    handler, pool = make_handler(kv_caches := layered(), stream=stream, staging_bytes=staging_bytes)
    handler.transfer_async(1, spec_of(device_ids, host_ids))
    assert stream.crossed == crossed
    # The ids are sent once for all chunks.
    sent = [f"send {len(device_ids)}"] if len(device_ids) > 1 else []
    assert stream.log == ["wait for compute", "record event", *sent, "record event"]
    for device_id, host_id in zip(device_ids, host_ids, strict=True):
        assert torch.equal(pool.block(host_id), torch.cat([kv.tensor[device_id] for kv in kv_caches.tensors]))
    assert {kv.tensor._version for kv in kv_caches.tensors} == {0}, "a store wrote to the engine's blocks"


@pytest.mark.parametrize(
    ("width", "padding", "offset", "word"),
    [(16, 0, 0, torch.int64), (12, 4, 0, torch.int32), (16, 0, 2, torch.int16), (15, 1, 0, torch.int8)],
)
def test_layers_are_gathered_in_widest_word(width, padding, offset, word):
    flats = [torch.zeros(4 * (width + padding) + 8, dtype=torch.int8)[offset:] for _ in range(3)]
    layers = [flat[: 4 * (width + padding)].view(4, -1)[:, :width] for flat in flats]
    gather = staged._Gather(
        [(layer, i * width) for i, layer in enumerate(layers)], 3 * width, torch.zeros(1 << 10, dtype=torch.int8)
    )
    assert {layer.dtype for layer in gather._layers} == {word}


def test_contiguous_blocks_need_no_staging():
    handler, _ = make_handler(layered(num_layers=1), staging_bytes=0)
    assert handler._gathers == {}
    whole = torch.zeros(4, 24, dtype=torch.int8)
    side_by_side = [CanonicalKVCacheTensor(whole[:, 8 * i : 8 * i + 8], 8) for i in range(3)]
    handler, _ = make_handler(
        CanonicalKVCaches(side_by_side, [[CanonicalKVCacheRef(i, 8) for i in range(3)]]), staging_bytes=0
    )
    assert handler._gathers == {}


def test_host_block_named_twice_keeps_either():
    handler, pool = make_handler(kv_caches := layered(num_layers=1))
    handler.transfer_async(1, spec_of([1, 5, 9], [2, 7, 2]))
    assert handler.get_finished()[0].success
    assert torch.equal(pool.block(7)[:16], kv_caches.tensors[0].tensor[5])
    assert any(torch.equal(pool.block(2)[:16], kv_caches.tensors[0].tensor[i]) for i in (1, 9))


def test_get_finished_keeps_submission_order():
    stream = HostStream(done=0)
    handler, _ = make_handler(stream=stream)
    for job_id in (5, 3, 4):
        handler.transfer_async(job_id, spec_of([job_id], [job_id]))
    assert handler.get_finished() == []
    stream.done = 3
    assert [r.job_id for r in handler.get_finished()] == [5]
    handler.wait([3, 99])
    assert [(r.job_id, r.transfer_time) for r in handler.get_finished()] == [(3, pytest.approx(1e-6))]
    handler.wait([99, 5])
    assert handler.get_finished() == []
    handler.shutdown()
    assert [r.success for r in handler.get_finished()] == [True]
    assert handler.transfer_async(6, spec_of([1], [1])) is False


def test_failed_job_waits_for_earlier_ones(stalled, monkeypatch, caplog):
    handler, stream = stalled
    with monkeypatch.context() as patch:
        patch.setattr(stream, "record_event", Mock(side_effect=RuntimeError("the device is gone")))
        handler.transfer_async(2, spec_of([2], [2]))
    assert handler.get_finished() == []
    stream.done = 1 << 60
    assert [(result.job_id, result.success) for result in handler.get_finished()] == [(1, True), (2, False)]


def test_shutdown_fails_jobs_after_their_end(stalled):
    handler, stream = stalled
    handler.shutdown(wait=False)
    assert stream.done >= 2
    assert [(r.job_id, r.success, r.transfer_size) for r in handler.get_finished()] == [(1, False, 0)]


def test_unqueued_job_fails_alone(caplog):
    stream = HostStream()
    handler, pool = make_handler(stream=stream)

    def no_memory(*arguments):
        raise torch.OutOfMemoryError("out of device memory")

    stream.copy_many = no_memory
    assert handler.transfer_async(1, spec_of([1], [1])) is True
    del stream.copy_many
    assert handler.transfer_async(2, spec_of([2], [2])) is True
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, False), (2, True)]
    assert not pool.block(1).any()
    assert "out of device memory" in caplog.text


def test_job_stays_while_its_event_raises(stalled, monkeypatch, caplog):
    handler, stream = stalled
    # As if another thread captured a graph: the copy is still running.
    stream.broken = True
    assert handler.get_finished() == handler.get_finished() == []
    monkeypatch.setattr(staged.time, "sleep", lambda seconds: setattr(stream, "broken", False))
    handler.wait([1])
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, True)]
    assert caplog.text.count("asking again") == 1


def test_raising_device_fails_its_jobs(stalled, monkeypatch, caplog):
    handler, stream = stalled
    handler.transfer_async(2, spec_of([2], [2]))
    stream.broken = True
    now_s = 0.0

    def sleep(seconds):
        nonlocal now_s
        now_s += 0.5

    monkeypatch.setattr(staged.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(staged.time, "sleep", sleep)
    # An answer in between ends the count.
    for seconds, stream.broken in ((0.0, True), (6.0, False), (6.0, True)):
        now_s += seconds
        assert handler.get_finished() == []
    handler.wait([1, 2])
    assert now_s == 22.0
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, False), (2, False)]
    assert "the device is gone" in caplog.text


def test_unrecorded_end_event_is_recorded_later(monkeypatch):
    stream = HostStream(done=0)
    handler, _ = make_handler(stream=stream)
    record = stream.record_event
    numbers = itertools.count(1)

    def second_fails():
        if next(numbers) in (2, 3):
            raise RuntimeError("no event")
        return record()

    monkeypatch.setattr(stream, "record_event", second_fails)
    handler.transfer_async(1, spec_of([1], [1]))
    assert handler.get_finished() == handler.get_finished() == []
    stream.done = 1 << 60
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, False)]


def test_platform_without_timing_reports_zero_seconds(stalled, monkeypatch):
    handler, stream = stalled
    stream.done = 2
    monkeypatch.delattr("host_stream.HostEvent.elapsed_time")
    assert [(r.success, r.transfer_time) for r in handler.get_finished()] == [(True, 0.0)]


@pytest.mark.parametrize("made_in_inference_mode", ["the engine's tensors", "the pool and the handler", "all of it"])
def test_inference_mode_and_normal_tensors_mix(made_in_inference_mode):
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


def test_dropped_handler_waits_for_its_jobs():
    stream = HostStream(done=0)
    handler, _ = make_handler(stream=stream)
    handler.transfer_async(1, spec_of([1], [1]))
    handler.transfer_async(2, spec_of([2], [2]))
    del handler
    assert stream.done == 4


def test_staging_shrinks_until_it_fits(monkeypatch):
    asked, empty = [], torch.empty

    def allocate(n, **options):
        asked.append(n)
        if n > 200:
            raise torch.OutOfMemoryError("no")
        return empty(n, **options)

    monkeypatch.setattr(staged.torch, "empty", allocate)
    assert staged._allocate(1000, 64, torch.device("cpu")).numel() == 125
    assert asked == [1000, 500, 250, 125]


def test_handler_without_staging_copies_by_layer():
    kv_caches = layered()
    with pytest.warns(RuntimeWarning, match="no device memory for a staging buffer of 64 bytes or more"):
        handler, pool = make_handler(kv_caches, staging_bytes=63)
    handler.transfer_async(1, spec_of([3, 4], [7, 1]))
    assert handler.get_finished()[0].transfer_size == 128
    for i, kv in enumerate(kv_caches.tensors):
        assert torch.equal(pool.block(7)[16 * i : 16 * i + 16], kv.tensor[3])
        assert torch.equal(pool.block(1)[16 * i : 16 * i + 16], kv.tensor[4])


@pytest.mark.parametrize("num_takers", [1, 2])
def test_threads_take_each_result_once(num_takers, take_in_threads):
    stream = HostStream(done=0)
    handler, _ = make_handler(stream=stream)
    num_jobs = 600

    def check(result):
        # A job must not be reported before the device has run it.
        assert result.success
        assert 2 * result.job_id <= stream.done

    def advance():
        stream.done = max(stream.places - 3, 0) if stream.places < 2 * num_jobs else 1 << 60

    taken = take_in_threads(handler, num_jobs, num_takers, check, advance)
    assert sorted(taken) == list(range(1, num_jobs + 1))
    assert num_takers > 1 or taken == sorted(taken)
