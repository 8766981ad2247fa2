"""Every job ends once, in order, and with the right result, also under faults."""

import gc
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from geometries import layered, spec_of
from host_stream import HostStream
from waiting import wait_until

from kvcache.specs import CPULoadStoreSpec, GPULoadStoreSpec, TransferResult
from kvcache.transfer import cpu
from kvcache.transfer._native.copy import CopyQueue
from kvcache.transfer.base import OffloadingHandler
from kvcache.transfer.cpu import CPUCopyHandler
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.geometry import KVGeometry, host_block_bytes
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.staged import StagedCopyHandler
from kvcache.transfer.worker import OffloadingWorker

ONE = spec_of([1], [1])
# Minutes of copying on a `busy` handler, for tests that inspect jobs in flight and then abandon them.
LONG_JOB = spec_of(list(range(64)) * 5000, list(range(64)) * 5000)


@pytest.fixture
def kv_caches():
    return layered(16, 64, 2)


@pytest.fixture
def pool(kv_caches):
    return HostPool(16, host_block_bytes(kv_caches), pin=False)


@pytest.fixture(params=["at once", "queued", "staged"])
def handlers(request, kv_caches, pool):
    geometry = KVGeometry(kv_caches, pool)
    if request.param == "staged":
        pair = [StagedCopyHandler(geometry, to_host, HostStream()) for to_host in (True, False)]
    else:
        inline_bytes = {"at once": 1 << 20, "queued": -1}[request.param]
        pair = [CPUCopyHandler(geometry, to_host, 2, inline_bytes) for to_host in (True, False)]
    yield pair
    for handler in pair:
        handler.shutdown(wait=False)


@pytest.fixture
def busy():
    """A handler whose queue is blocked by one job of some milliseconds, with the tensors that it reads."""
    kv_caches = layered(64, 1 << 20, 1)
    pool = HostPool(64, 1 << 20, pin=False)
    handler = CPUCopyHandler(KVGeometry(kv_caches, pool), True, 1)
    yield handler, kv_caches, pool
    handler.shutdown(wait=False)


def test_store_then_load_returns_bytes(handlers, kv_caches):
    store, load = handlers
    before = [kv.tensor.clone() for kv in kv_caches.tensors]
    start_s = time.perf_counter()
    assert store.transfer_async(1, spec_of([3, 1, 8], [5, 0, 9]))
    store.wait([1])
    (result,) = store.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (1, True, 3 * 128)
    assert result.transfer_type == ("GPU", "CPU")
    assert 0 <= result.transfer_time <= time.perf_counter() - start_s
    assert load.transfer_async(2, spec_of([10, 11, 12], [5, 0, 9])[::-1])
    load.wait([2])
    (result,) = load.get_finished()
    assert result.transfer_type == ("CPU", "GPU")
    for kv, old in zip(kv_caches.tensors, before, strict=True):
        assert torch.equal(kv.tensor[10:13], old[[3, 1, 8]])


def test_wait_returns_after_its_own_jobs(handlers):
    store, _ = handlers
    store.wait([])
    store.wait([1, 2])
    for job_id in (4, 5, 6):
        store.transfer_async(job_id, spec_of([], []) if job_id == 5 else ONE)
    store.wait([4, 5, 6, 17])
    store.wait([5])
    assert [(r.job_id, r.transfer_size) for r in store.get_finished()] == [(4, 128), (5, 0), (6, 128)]
    store.wait([5])


def test_jobs_run_in_submission_order(busy):
    handler, kv_caches, pool = busy
    for job_id in range(99, 0, -1):
        handler.transfer_async(job_id, spec_of([job_id % 64] * 40, range(40)))
    handler.wait(range(100))
    assert [result.job_id for result in handler.get_finished()] == list(range(99, 0, -1))
    assert all(torch.equal(pool.block(i), kv_caches.tensors[0].tensor[1]) for i in range(40))


@pytest.mark.parametrize("to_host", [True, False])
def test_get_finished_waits_for_loads(to_host, monkeypatch):
    waits = []
    kv_caches = layered(64, 1 << 20, 1)
    handler = CPUCopyHandler(KVGeometry(kv_caches, HostPool(64, 1 << 20, pin=False)), to_host, 1)
    monkeypatch.setattr(cpu, "_LOAD_WAIT_S", 60.0)
    queue = handler._queue
    handler._queue = SimpleNamespace(
        submit=queue.submit,
        wait=lambda *arguments: (waits.append(arguments), queue.wait(*arguments)),
        get_finished=queue.get_finished,
        close=queue.close,
    )
    sides = spec_of(range(64), range(64))
    handler.transfer_async(7, sides if to_host else sides[::-1])
    finished = [result.job_id for result in handler.get_finished()]
    assert waits == ([] if to_host else [(1, 60.0)])
    assert to_host or finished == [7]
    handler.shutdown()


def test_wait_ends_after_its_longest_time(busy):
    handler, *_ = busy
    handler.transfer_async(1, LONG_JOB)
    handler._queue.wait(1, 0.001)
    assert handler.get_finished() == []


def test_job_id_in_flight_is_refused(handlers):
    store, _ = handlers
    store.transfer_async(1, ONE)
    with pytest.raises(ValueError, match="job_id 1 is in flight"):
        store.transfer_async(1, spec_of([2], [2]))
    store.wait([1])
    assert len(store.get_finished()) == 1
    assert store.transfer_async(1, spec_of([2], [2]))


@pytest.mark.parametrize(
    ("job_id", "spec", "message"),
    [
        *((job_id, ONE, "job_id must be an int64") for job_id in ("1", None, 1 << 63, 1.5)),
        *((1, spec, "a transfer is a tuple of two") for spec in (None, "GC", ONE[1:], (None, ONE[1]))),
        (1, ONE[::-1], r"jobs are \(GPULoadStoreSpec, CPULoadStoreSpec\), got \(CPULoadStoreSpec"),
        (1, spec_of([1, 2, 16], [1, 2, 3]), "got 16"),
    ],
)
def test_refused_job_moves_no_byte(handlers, pool, job_id, spec, message):
    store, load = handlers
    pool.tensor.fill_(7)
    with pytest.raises(ValueError, match=message):
        store.transfer_async(job_id, spec)
    with pytest.raises(ValueError, match=r"jobs are \(CPULoadStoreSpec, GPULoadStoreSpec\)"):
        load.transfer_async(1, ONE)
    assert bool((pool.tensor == 7).all())
    assert store.transfer_async(1, ONE)
    store.wait([1])
    assert [result.success for result in store.get_finished()] == [True]


@pytest.mark.parametrize("num_threads", [-1, 0, 1.5, "2", 65])
def test_handlers_with_invalid_num_threads_raise(kv_caches, pool, num_threads):
    with pytest.raises(ValueError, match=f"num_threads must be .*, got {num_threads!r}"):
        cpu_gpu_handlers(kv_caches, pool, num_threads=num_threads)


def test_tensor_with_handlers_cannot_be_resized(handlers, kv_caches):
    with pytest.raises(RuntimeError, match="not resizable"):
        kv_caches.tensors[0].tensor.untyped_storage().resize_(0)


def test_tensor_memory_stays_during_copy(busy):
    handler, kv_caches, pool = busy
    tensor = kv_caches.tensors[0].tensor
    first, last = tensor[0].clone(), tensor[63].clone()
    handler.transfer_async(1, LONG_JOB)
    # The tensor releases its memory, which is large enough to be returned to the system at once.
    tensor.set_()
    handler.transfer_async(2, spec_of([0, 63], [0, 63]))
    wait_until(lambda: torch.equal(pool.block(0), first) and torch.equal(pool.block(63), last))
    handler.shutdown(wait=False)
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, False), (2, False)]


@pytest.mark.parametrize("tensor_idx", [0, 1])
def test_jobs_of_lost_tensor_fail_once(handlers, kv_caches, tensor_idx):
    store, load = handlers
    kv_caches.tensors[tensor_idx].tensor.set_()
    store.transfer_async(1, ONE)
    store.transfer_async(2, spec_of([2], [2]))
    load.transfer_async(3, spec_of([2], [2])[::-1])
    store.wait([1, 2])
    load.wait([3])
    assert [(r.job_id, r.success, r.transfer_size) for r in store.get_finished()] == [(1, False, 0), (2, False, 0)]
    assert [(r.job_id, r.success) for r in load.get_finished()] == [(3, False)]
    assert store.get_finished() == []


def test_jobs_of_ownerless_pool_are_refused(handlers, pool):
    pool.has_owner = lambda: False
    for handler, spec in zip(handlers, [ONE, ONE[::-1]], strict=True):
        assert handler.transfer_async(1, spec) is False
        assert handler.get_finished() == []
    del pool.has_owner
    assert handlers[0].transfer_async(1, ONE)


def test_shutdown_waits_for_changed_jobs(busy):
    handler, kv_caches, pool = busy
    ids, host_ids = np.arange(64), np.arange(64)
    handler.transfer_async(1, spec_of(ids, host_ids))
    handler.transfer_async(2, spec_of(ids, host_ids))
    ids[:] = 1 << 40
    host_ids[:] = -5
    handler.shutdown()
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, True), (2, True)]
    assert torch.equal(pool.tensor, kv_caches.tensors[0].tensor)
    assert handler.transfer_async(3, ONE) is False
    handler.shutdown()


def test_shutdown_at_once_fails_jobs(busy):
    handler, *_ = busy
    handler.transfer_async(0, LONG_JOB)
    for job_id in range(1, 20):
        handler.transfer_async(job_id, spec_of(range(64), range(64)))
    assert handler.get_finished() == []
    handler.shutdown(wait=False)
    results = handler.get_finished()
    assert [(r.job_id, r.success, r.transfer_size) for r in results] == [(i, False, 0) for i in range(20)]


# A process in which `queue(*options)` copies blocks from `device` to `host`.
SCRIPT = """
import resource, signal, threading, time, numpy as np
from pathlib import Path
from kvcache.transfer._native.copy import CopyQueue
from kvcache.transfer._native.plan import Geometry
num_blocks, block_bytes = {}, {}
device, host = (np.full((num_blocks, block_bytes), value, np.int8) for value in (1, 0))
device[:] += np.arange(num_blocks, dtype=np.int8)[:, None] % 100
source, target = (memory.__array_interface__["data"][0] for memory in (device, host))
geometry = Geometry([(source, num_blocks, block_bytes)], [[(0, block_bytes)]], target, block_bytes, num_blocks)
every = np.arange(num_blocks)
def queue(*options):
    return CopyQueue(geometry, True, *options)
def submit(queue, job_id, ids=every):
    return queue.submit(job_id, ids, [len(ids)], [0], ids)
def limit_memory(is_limited):
    # A thread's stack no longer fits.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft = mapped + (1 << 20) if is_limited else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
"""


def run_script(num_blocks, block_bytes, code, **environment):
    command = [sys.executable, "-c", SCRIPT.format(num_blocks, block_bytes) + code]
    return subprocess.check_output(command, env=os.environ | environment, text=True, timeout=100)


def test_close_in_threads_awaits_all_copies():
    # A copying thread was joined twice: one caller hung, or returned before the copy had ended.
    code = """
for _ in range(30):
    one = queue(2, -1)
    for job_id in range(4):
        submit(one, job_id)
    ended, returned, barrier = [], [], threading.Barrier(4)
    def close():
        barrier.wait()
        one.close()
        ended.extend(one.get_finished())
        returned.append(len(ended))
    closers = [threading.Thread(target=close, daemon=True) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(20)
    assert returned == [4] * 4, returned
"""
    run_script(64, 1 << 18, code)


@pytest.mark.slow
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_handler_dropped_in_flight_ends_first(request, in_a_cycle):
    # Disable automatic collections: one in another thread would leave no garbage for the explicit one.
    gc.disable()
    request.addfinalizer(gc.enable)
    kv_caches = layered(64, 1 << 20, 1)
    # One round was not enough to reproduce the memory being freed first.
    for _ in range(10):
        pool = HostPool(64, 1 << 20, pin=False)
        handler = CPUCopyHandler(KVGeometry(kv_caches, pool), True, 2)
        for job_id in range(5):
            handler.transfer_async(job_id, spec_of(range(64), range(64)))
        if in_a_cycle:
            # Now the garbage collector destroys the objects, in arbitrary order.
            handler.me = handler
        blocks = weakref.ref(pool.tensor)
        del pool, handler
        gc.collect()
        assert blocks() is None


def test_collector_spares_pool_during_copies(monkeypatch):
    # The collector empties every tensor in a cycle, even if it is referenced elsewhere, and maybe before the queue.
    class Mapping(mmap.mmap):
        pass

    def threads():
        return set(Path("/proc/self/task").iterdir())

    gc.disable()
    monkeypatch.setattr(mmap, "mmap", Mapping)
    try:
        pool = HostPool(64, 1 << 20, pin=False)
        (mapping,) = (one for one in gc.get_objects() if type(one) is Mapping)
        handler = CPUCopyHandler(KVGeometry(layered(64, 1 << 20, 1), pool), True, 2)
        before = threads()
        handler.transfer_async(0, LONG_JOB)
        copying = threads() - before
        left = []
        weakref.finalize(mapping, lambda: left.append(copying & threads()))
        handler.me = handler
        del pool, handler, mapping
        gc.collect()
    finally:
        gc.enable()
    assert len(copying) == 2
    assert left == [set()]


def test_copy_beside_busy_python_ends(busy, switch_interval):
    handler, *_ = busy
    spec = spec_of(range(64), range(64))
    handler.transfer_async(0, spec)
    handler.wait([0])
    handler.get_finished()
    switch_interval(5)
    # No thread hands over the GIL, so a copy that needed it would not start.
    for job_id in range(1, 4):
        handler.transfer_async(job_id, spec)
    until = time.monotonic() + 30
    ended = []
    while len(ended) < 3 and time.monotonic() < until:
        ended += handler.get_finished()
    assert [result.success for result in ended] == [True] * 3


class Interrupted(Exception):
    pass


def test_interrupted_wait_leaves_its_work(busy):
    handler, *_ = busy

    def interrupt(*_):
        raise Interrupted

    def wait_and_be_interrupted(job_id):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        handler.wait([job_id])

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # 640 MiB: copying them takes longer than the time to the interrupt.
        ids = list(range(64)) * 10
        for job_id in range(0, 6, 2):
            handler.transfer_async(job_id, spec_of(ids, ids))
            handler.transfer_async(job_id + 1, ONE)
            with pytest.raises(Interrupted):
                wait_and_be_interrupted(job_id)
            ended, until = [], time.monotonic() + 60
            while len(ended) < 2 and time.monotonic() < until:
                ended += handler.get_finished()
            assert [(r.job_id, r.success) for r in ended] == [(job_id, True), (job_id + 1, True)]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_wait_ignores_wall_clock_steps(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "stepped.c"
    # The waiter reads a wall clock that is a day ahead of the system's, as if the clock had been set back by a day.
    source.write_text("""
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now)
{
    int error = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME)
        now->tv_sec += 86400;
    return error;
}
""")
    library = tmp_path / "stepped.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    code = """
minutes = np.zeros(1 << 20, np.int64)
one = queue(1)
place = submit(one, 1, minutes)
class Interrupted(Exception): pass
def interrupt(*_): raise Interrupted
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    one.wait(place)
except Interrupted:
    one.close(abandon=True)
    print([ended[:2] for ended in one.get_finished()])
"""
    assert run_script(1, 1 << 20, code, LD_PRELOAD=str(library)) == "[(1, False)]\n"


def test_results_of_other_thread_are_whole(kv_caches, pool, take_in_threads):
    handler = CPUCopyHandler(KVGeometry(kv_caches, pool), True, 1)
    assert take_in_threads(handler, num_jobs=3000, num_takers=1) == list(range(1, 3001))


def test_fork_gets_error_instead_of_hang(kv_caches, pool):
    queue = CopyQueue(KVGeometry(kv_caches, pool).compiled, True)
    one = np.array([1])
    pid = os.fork()
    if not pid:
        try:
            queue.submit(1, one, [1], [0], one)
        except RuntimeError as error:
            os._exit(0 if "its fork" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_submit_without_threads_copies_itself():
    code = """
one = queue(2, -1)
limit_memory(True)
for job_id in range(3):
    submit(one, job_id)
limit_memory(False)
threads = len(list(Path("/proc/self/task").iterdir()))
one.wait(3)
assert [ended[:3] for ended in one.get_finished()] == [(i, True, 64) for i in range(3)]
assert (device == host).all()
one.wait(submit(one, 3))
assert len(list(Path("/proc/self/task").iterdir())) == threads + 1
"""
    run_script(8, 8, code)


def test_wait_without_thread_copies_too():
    # The job needs two threads, but only one can start: the waiting thread is the second one.
    code = """
one = queue(2, -1)
one.wait(submit(one, 0, np.array([], np.int64)))
limit_memory(True)
for job_id in range(1, 31):
    last = submit(one, job_id)
before = time.thread_time()
one.wait(last)
used = time.thread_time() - before
limit_memory(False)
seconds = sum(ended[3] for ended in one.get_finished())
assert (host == device).all()
assert used > 0.02 * seconds, (used, seconds)
"""
    run_script(64, 1 << 20, code)


def test_many_jobs_hold_only_their_specs():
    num_ids = 2000
    spec = spec_of([0] * num_ids, [0] * num_ids)
    handler = CPUCopyHandler(KVGeometry(layered(4, 1, 32), HostPool(4, 32, pin=False)), True, 1, inline_bytes=-1)
    before = resident_bytes()
    for job_id in range(10_000):
        handler.transfer_async(job_id, spec)
    held = resident_bytes() - before
    handler.shutdown(wait=False)
    # Each job holds the two int64 arrays of its specs; its runs would need 96 times that.
    assert held < 10_000 * 2 * 8 * num_ids
    assert len(handler.get_finished()) == 10_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def worker():
    worker = OffloadingWorker()
    yield worker
    worker.shutdown()


def test_worker_routes_by_media(worker, handlers):
    store, load = handlers
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)
    assert worker.transfer_async(1, ONE)
    worker.wait([1])
    assert worker.transfer_async(2, spec_of([2], [1])[::-1])
    worker.wait([1, 2])
    assert [(r.job_id, r.transfer_type) for r in worker.get_finished()] == [(1, ("GPU", "CPU")), (2, ("CPU", "GPU"))]
    worker.shutdown()
    assert worker.transfer_async(3, ONE) is False


def test_worker_names_unserved_media(worker):
    with pytest.raises(ValueError, match="no handler for transfers GPU -> CPU, known ones: none"):
        worker.transfer_async(1, ONE)
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, MinimalHandler())
    with pytest.raises(ValueError, match="GPU -> CPU have a handler already"):
        worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, MinimalHandler())
    with pytest.raises(ValueError, match="CPU -> GPU, known ones: GPU -> CPU"):
        worker.transfer_async(1, ONE[::-1])
    with pytest.raises(ValueError, match="a transfer is a tuple of two LoadStoreSpecs"):
        worker.transfer_async(1, (None, ONE[1]))


class BrokenHandler(OffloadingHandler):
    """A third party's handler that raises in every method."""

    def transfer_async(self, *arguments):
        raise RuntimeError("the medium is gone")

    wait = shutdown = transfer_async

    def get_finished(self):
        yield TransferResult(7, True, 1, 0.0, ("GPU", "GPU"))
        raise RuntimeError("the medium is gone")


class MinimalHandler(OffloadingHandler):
    """A third party's handler that defines only the methods that the contract requires."""

    transfer_async = get_finished = wait = lambda *arguments: True


def test_raising_handler_is_a_failed_job(worker):
    broken = BrokenHandler()
    broken.get_finished = list
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, broken)
    assert worker.transfer_async(5, ONE) is True
    assert worker.get_finished() == [TransferResult(5, False, 0, 0.0, ("GPU", "CPU"))]
    assert worker.get_finished() == []


def test_uncountable_result_costs_no_other(worker, caplog):
    handler, kind = MinimalHandler(), ("GPU", "CPU")
    rude = type("Rude", (), {"__repr__": lambda self: 1 / 0})()
    results = [rude, TransferResult(1, True, 8, None, kind), TransferResult(2, True, 8, 0.5, kind)]
    handler.get_finished = lambda: results
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handler)
    assert worker.get_finished() == results
    assert [record.message.split(" was ")[-1] for record in caplog.records] == ["not counted"] * 2


def test_each_series_of_errors_is_logged(worker, caplog):
    handler = MinimalHandler()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handler)
    for handler.get_finished in (None, None, list, None):  # None raises
        worker.get_finished()
    text = "MinimalHandler did not return its finished jobs"
    assert [record.message for record in caplog.records] == [text] * 2


def test_worker_counts_whole_jobs_only(worker):
    handler, kind = MinimalHandler(), ("GPU", "CPU")
    handler.get_finished = lambda: [TransferResult(1, False, 64, 9.0, kind), TransferResult(2, True, 8, 0.5, kind)]
    # A handler of two routes is asked once.
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handler)
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, handler)
    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    (part,) = worker.parts()
    assert (part.stats.jobs, part.stats.failed_jobs, part.stats.moved_bytes) == (2, 1, 8)
    assert [sum(one.counts) for one in (part.stats.duration_seconds, part.stats.size_bytes)] == [1, 1]


def test_raising_handler_costs_others_nothing(worker, kv_caches, pool, caplog):
    store, load = cpu_gpu_handlers(kv_caches, pool)
    worker.register_handler(GPULoadStoreSpec, GPULoadStoreSpec, BrokenHandler())
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)
    worker.transfer_async(1, ONE)
    worker.wait([1])
    # Results that the handler returned before it raised are reported, too.
    assert [result.job_id for result in worker.get_finished()] == [7, 1]
    assert [result.job_id for result in worker.get_finished()] == [7]
    worker.shutdown()
    assert store.transfer_async(2, ONE) is False
    assert load.transfer_async(3, ONE[::-1]) is False
    # The engine polls at every step, but each warning is logged once.
    assert [record.message for record in caplog.records] == [
        "BrokenHandler did not wait: its jobs may still be in flight",
        "BrokenHandler did not return its finished jobs",
        "BrokenHandler did not shut down",
    ]
