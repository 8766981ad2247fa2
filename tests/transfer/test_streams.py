"""The order of the device's work: streams that run late and in any interleaving, and what is asked of CUDA's own."""

from collections import deque
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache.specs import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvcache.transfer.cuda import StagedCopyHandler
from kvcache.transfer.geometry import KVGeometry
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.streams import CudaStream, DeviceStream, StreamEvent


class LateStreamEvent(StreamEvent):
    def __init__(self, stream, place):
        self.stream, self.place = stream, place

    def is_done(self):
        return self.stream.done >= self.place

    def wait(self):
        while not self.is_done():
            if not self.stream.step():
                self.stream.compute.step()

    def elapsed_s(self, earlier):
        return 0.0


class LateStream(DeviceStream, TorchDispatchMode):
    """A stream of host tensors that does nothing when it is told to, and one thing at each `step`, as a device does."""

    def __init__(self, compute=None):
        super().__init__()
        self.device = torch.device("cpu")
        self.compute = compute
        self.work = deque()
        self.done = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self.work.append(partial(func, *args, **kwargs))
        return kwargs.get("out", args[0])

    def wait_for_compute(self):
        place = self.compute.record_event()
        self.work.append(place.is_done)

    def queueing(self):
        return self

    def record_event(self):
        return LateStreamEvent(self, self.done + len(self.work))

    def send(self, values):
        return torch.from_numpy(values.copy())

    def step(self):
        """Do one thing, unless it waits for another stream; say whether it was done."""
        with torch.inference_mode():
            if not self.work or self.work[0]() is False:
                return False
        self.work.popleft()
        self.done += 1
        return True


NUM_BLOCKS, PAGE_BYTES, NUM_LAYERS = 6, 8, 3
SPEC = (GPULoadStoreSpec([4, 1, 2, 5], [4], [1]), CPULoadStoreSpec([3, 0, 2]))


class Engine:
    """A KV cache, a pool, a handler per direction and the compute stream, all late."""

    def __init__(self, staging_bytes):
        self.tensors = [torch.zeros(NUM_BLOCKS, PAGE_BYTES, dtype=torch.int8) for _ in range(NUM_LAYERS)]
        kv_caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in self.tensors],
            [[CanonicalKVCacheRef(i, PAGE_BYTES) for i in range(NUM_LAYERS)]],
        )
        self.pool = HostPool(4, 2 * NUM_LAYERS * PAGE_BYTES, pin=False)
        self.compute = LateStream()
        self.streams = [LateStream(self.compute) for _ in range(2)]
        geometry = KVGeometry(kv_caches, self.pool, 2)
        self.store, self.load = (
            StagedCopyHandler(geometry, to_host, stream, staging_bytes)
            for to_host, stream in zip((True, False), self.streams, strict=True)
        )

    def fill(self, value):
        """Let the compute stream write to every block."""
        with self.compute:
            for tensor in self.tensors:
                tensor.fill_(value)

    def step(self, which):
        [self.compute, *self.streams][which].step()


steps = st.lists(st.integers(0, 2), max_size=60)
staging = st.sampled_from([NUM_LAYERS * PAGE_BYTES, 2 * NUM_LAYERS * PAGE_BYTES, 1 << 10])


@given(staging, steps, steps)
def test_a_store_reads_what_was_computed_before_it_and_nothing_later(staging_bytes, early, late):
    engine = Engine(staging_bytes)
    engine.fill(1)
    for which in early:
        engine.step(which)
    engine.store.transfer_async(1, SPEC)
    for which in late:
        engine.step(which)
        if results := engine.store.get_finished():
            break
    else:
        engine.store.wait([1])
        results = engine.store.get_finished()
    # The engine may write to the blocks again once it has heard of the end.
    engine.fill(2)
    while engine.compute.step():
        pass
    assert [(r.job_id, r.success) for r in results] == [(1, True)]
    moved = engine.pool.tensor.view(4, 2, -1)[[3, 0, 0, 2], [1, 0, 1, 0]]
    assert bool((moved == 1).all())
    assert int(engine.pool.tensor.sum()) == moved.numel()


@given(staging, steps)
def test_a_load_comes_after_what_is_still_read_and_is_there_once_it_is_told(staging_bytes, late):
    engine = Engine(staging_bytes)
    for tensor in engine.tensors:
        tensor.fill_(1)
    engine.pool.tensor.fill_(7)
    read = torch.zeros_like(engine.tensors[0])
    with engine.compute:
        read.copy_(engine.tensors[0])
    engine.load.transfer_async(1, SPEC[::-1])
    results = []
    for which in late:
        engine.step(which)
        results += engine.load.get_finished()
        if results:
            break
    else:
        engine.load.wait([1])
        results += engine.load.get_finished()
    assert [(r.job_id, r.success) for r in results] == [(1, True)]
    assert bool((read == 1).all())
    for tensor in engine.tensors:
        assert tensor.amin(1).tolist() == tensor.amax(1).tolist() == [1, 7, 7, 1, 7, 7]


@given(staging, steps)
def test_jobs_of_one_direction_share_the_staging_buffer_in_turn(staging_bytes, late):
    engine = Engine(staging_bytes)
    for block_id in range(NUM_BLOCKS):
        for tensor in engine.tensors:
            tensor[block_id] = block_id
    for job_id in range(3):
        block_ids = [(2 * job_id + i) % NUM_BLOCKS for i in range(4)]
        engine.store.transfer_async(job_id, (GPULoadStoreSpec(block_ids, [4], [0]), CPULoadStoreSpec([job_id, 3])))
    told = []
    for which in late:
        engine.step(which)
        told += [result.job_id for result in engine.store.get_finished()]
    engine.store.shutdown()
    told += [result.job_id for result in engine.store.get_finished()]
    assert told == [0, 1, 2]
    assert engine.pool.tensor.view(4, 2, -1).amax(2).tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]


class FakeCuda:
    """What `CudaStream` asks of torch.cuda, as a log."""

    def __init__(self, monkeypatch):
        log = self.log = []
        self.capturing = False

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self, stream):
                log.append(f"record on {stream.name}")

            def query(self):
                return True

            def elapsed_time(self, end):
                return 250.0

        class Stream:
            def __init__(self, device=None, name="ours"):
                self.name = f"{name} of {device}"

            def wait_stream(self, other):
                log.append(f"{self.name} waits for {other.name}")

        def current_stream(device):
            return Stream(device, "the engine's")

        for name, value in {
            "Event": Event,
            "Stream": Stream,
            "current_stream": current_stream,
            "stream": lambda stream: nullcontext(log.append(f"queue on {stream.name}")),
            "device": lambda device: nullcontext(log.append(f"look at {device}")),
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_cuda_is_asked_about_the_tensors_device_whichever_is_the_current_one(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    stream = CudaStream(torch.device("cuda", 3))
    stream.wait_for_compute()
    with stream.queueing():
        start = stream.record_event()
    assert stream.record_event().elapsed_s(start) == 0.25
    assert start.is_done()
    assert cuda.log == [
        "look at cuda:3",
        "ours of cuda:3 waits for the engine's of cuda:3",
        "queue on ours of cuda:3",
        "record on ours of cuda:3",
        "record on ours of cuda:3",
    ]


def test_copies_do_not_become_part_of_a_cuda_graph(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    stream = CudaStream(torch.device("cuda", 0))
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
        stream.wait_for_compute()
    assert cuda.log == ["look at cuda:0"]
