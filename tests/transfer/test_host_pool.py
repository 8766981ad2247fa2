"""A host pool allocates its memory at construction, or raises an error; a thread prepares all but its first piece."""

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from geometries import layered, spec_of

from kvcache.transfer import numa, pinning
from kvcache.transfer.factory import cpu_gpu_handlers
from kvcache.transfer.host_pool import HostPool
from kvcache.transfer.shared_file import SharedBlocks
from kvcache.transfer.shared_pool import SharedHostPool


def test_blocks_lie_side_by_side():
    pool = HostPool(3, 10, pin=False)
    pool.block(1)[:] = torch.arange(10, dtype=torch.int8)
    assert pool.array[1].tolist() == list(range(10))
    assert pool.tensor.shape == (3, 10)
    assert pool.tensor.dtype == torch.int8
    assert not pool.tensor[0].any()
    block = pool.block(1)
    del pool
    assert block.tolist() == list(range(10))
    pool = HostPool(4, 3 << 20, pin=False)
    assert pool.address % mmap.PAGESIZE == 0
    assert pool.address % (2 << 20) == 0
    assert pool.stride_bytes == 3 << 20
    assert pool.tensor.is_contiguous()


def num_resident(pool):
    """Return how many pages of a pool have memory."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    resident = np.zeros(pool.num_bytes // mmap.PAGESIZE, np.uint8)
    assert mincore(pool.address, pool.num_bytes, resident.ctypes.data) == 0
    return resident.sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "num_blocks must be an int >= 1, got 0"),
        ((1, 0), "block_bytes must be an int >= 1, got 0"),
        ((1.5, 1), "num_blocks must be an int >= 1, got 1.5"),
        ((True, 1), "num_blocks must be an int >= 1, got True"),
        ((1 << 40, 1 << 20), "does not fit into host memory"),
    ],
)
def test_pool_of_wrong_sizes_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        HostPool(*arguments)


@pytest.mark.parametrize("block_id", [-1, 2, 1.0, True])
def test_pool_block_with_invalid_id_raises(block_id):
    pool = HostPool(2, 8, pin=False)
    with pytest.raises(ValueError, match=rf"block_id must be in 0\.\.1, got {block_id}"):
        pool.block(block_id)


@pytest.fixture
def locked(monkeypatch):
    """Memory locked by a simulated platform, as {address: bytes}; it locks at most `locked.limit` pieces."""

    class Locked(dict):
        limit = 100

        def lock(self, address, num_bytes, device):
            assert device == torch.device("cuda", 3)
            if len(self) == self.limit:
                return "out of memory"
            self[address] = num_bytes
            return ""

    locked = Locked()
    monkeypatch.setitem(pinning.PLATFORMS, "cuda", pinning.Pinning(locked.lock, locked.pop))
    monkeypatch.setattr(HostPool, "piece_bytes", 4096)
    return locked


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine can pin")
def test_pool_without_accelerator_counts_unpinned():
    with pytest.warns(RuntimeWarning, match="stays unpinned.*no accelerator") as caught:
        pool = HostPool(2, 8, pin=True)
    assert len(caught) == 1
    assert (pool.pin_failures, pool.pinned_bytes, pool.is_pinned) == (1, 0, False)
    assert pool.block(1).tolist() == [0] * 8
    with pytest.warns(RuntimeWarning, match="cannot lock memory for 'xpu' devices"):
        assert HostPool(2, 8, device=torch.device("xpu", 0)).pin_failures == 1


def test_pool_pins_pieces_close_unpins_them(locked):
    pool = HostPool(10, 1000, device=torch.device("cuda", 3))
    assert locked == {pool.address: 4096, pool.address + 4096: 4096, pool.address + 8192: 1808}
    assert pool.is_pinned
    pool.close()
    assert not locked
    assert not pool.is_pinned
    pool = HostPool(10, 1000, device=torch.device("cuda", 3))
    del pool
    assert not locked


def test_refused_piece_leaves_others_pinned(locked):
    locked.limit = 2
    with pytest.warns(RuntimeWarning, match="1808 bytes at offset 8192 cannot be locked: out of memory"):
        pool = HostPool(10, 1000, device=torch.device("cuda", 3))
    assert len(locked) == 2
    assert (pool.pin_failures, pool.pinned_bytes, pool.is_pinned) == (1, 8192, False)
    pool.close()
    assert not locked


def test_ranks_map_their_parts(locked, tmp_path, monkeypatch):
    monkeypatch.setattr(pinning, "accelerator", lambda: torch.device("cuda", 3))
    kv_caches, shared = layered(8, 64, 2), SharedBlocks(tmp_path / "pool", 4, 300, is_owner=True)
    with pytest.raises(ValueError, match="a block of rank 0 has 128 bytes, the engine's config says 127"):
        SharedHostPool(kv_caches, shared, 0, 127)
    for rank in range(2):
        pool = SharedHostPool(kv_caches, shared, rank, 150)
        store, _ = cpu_gpu_handlers(kv_caches, pool)
        # The tensors are the host's, although there is an accelerator.
        assert (pool.device, pool.pinned_bytes) == (None, 0)
        store.transfer_async(1, spec_of([rank + 1], [2]))
        store.wait([1])
        block = torch.cat([kv.tensor[rank + 1] for kv in kv_caches.tensors]).numpy().view(np.uint8)
        assert (shared.array[2, 150 * rank :][:128] == block).all()
        store.shutdown()
    shared.close()


@pytest.fixture
def slow(locked, monkeypatch):
    """As `locked`, on a platform that locks in the background: each piece after the first waits for `slow.allowed`."""
    locked.allowed = threading.Semaphore(0)

    def lock(address, num_bytes, device):
        assert not locked or locked.allowed.acquire(timeout=60)
        return locked.lock(address, num_bytes, device)

    monkeypatch.setitem(pinning.PLATFORMS, "cuda", pinning.Pinning(lock, locked.pop, lambda: True))
    return locked


def test_pool_serves_with_first_piece(slow, caplog):
    caplog.set_level("INFO")
    pool = HostPool(10, 1000, device=torch.device("cuda", 3))
    assert (len(slow), pool.pinned_bytes, pool.is_pinned) == (1, 4096, False)
    assert not pool.wait_ready(0)
    # Blocks of every piece hold their bytes, whether they were written before, while or after the piece was pinned.
    for i in range(10):
        pool.block(i)[:] = i + 1
        if i in (3, 7):
            slow.allowed.release()
    assert pool.wait_ready(60)
    assert slow == {pool.address: 4096, pool.address + 4096: 4096, pool.address + 8192: 1808}
    assert pool.is_pinned
    assert pool.tensor.tolist() == [[i + 1] * 1000 for i in range(10)]
    started, prepared = caplog.messages
    assert started == "host pool of 9.766 KiB: 4 KiB touched and 4 KiB pinned; a thread prepares the rest"
    assert prepared.startswith("host pool of 9.766 KiB: 9.766 KiB touched and 9.766 KiB pinned, in ")
    pool.close()
    assert not slow
    kept = weakref.ref(pool)
    del pool
    assert kept() is None


def test_pool_closed_while_preparing_unpins(slow):
    pool = HostPool(10, 1000, device=torch.device("cuda", 3))
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert pool._preparation.stopping.wait(60)
    slow.allowed.release()
    closing.join(60)
    assert not closing.is_alive()
    assert not slow
    assert pool.touched_bytes == 8192


def test_piece_refused_in_background_warns(slow):
    slow.limit = 2
    pool = HostPool(14, 1000, device=torch.device("cuda", 3))
    with pytest.warns(RuntimeWarning, match="4096 bytes at offset 8192 cannot be locked"):  # noqa: PT031
        slow.allowed.release(3)
        pool.wait_ready(60)
    assert (pool.pin_failures, pool.pinned_bytes, pool.touched_bytes) == (1, 8192, 14000)
    pool.close()


def test_unpinned_pool_grows_ahead_of_use(monkeypatch):
    monkeypatch.setattr(HostPool, "piece_bytes", 4 * mmap.PAGESIZE)
    pool = HostPool(30, mmap.PAGESIZE, pin=False)
    assert (pool.touched_bytes, num_resident(pool)) == (4 * mmap.PAGESIZE, 4)
    for block_ids, num_touched in (([], 4), ([0, 3], 8), ([2], 8), ([4], 12), ([20, 5], 28)):
        pool.note_use(np.array(block_ids))
        while (preparation := pool._preparation) is not None:
            preparation._thread.join(60)
        assert num_resident(pool) == num_touched
    assert pool.wait_ready(60)
    assert (pool.touched_bytes, pool.pinned_bytes) == (pool.num_bytes, 0)
    assert num_resident(pool) == 30


def test_pool_closed_early_grows_no_more(monkeypatch):
    monkeypatch.setattr(HostPool, "piece_bytes", mmap.PAGESIZE)
    pool = HostPool(4, mmap.PAGESIZE, pin=False)
    pool.close()
    pool.note_use(np.array([0]))
    assert not pool.wait_ready(60)
    assert num_resident(pool) == 1


def test_block_parts_cross_no_piece(monkeypatch):
    monkeypatch.setattr(HostPool, "piece_bytes", 4096)
    pool = HostPool(10, 1000, pin=False)
    assert [len(part) for part in pool.parts(1, 9)] == [3096, 4096, 808]
    assert [len(part) for part in pool.parts(0, 4)] == [4000]
    for i in range(10):
        pool.block(i)[:] = i
    assert torch.cat(pool.parts(1, 9)).tolist() == pool.tensor[1:9].flatten().tolist()


def test_pool_threads_run_on_devices_node(monkeypatch, tmp_path):
    cpu = min(os.sched_getaffinity(0))
    for node, cpus in ((1, f"{cpu}-{cpu}"), (2, "9000-9001,9003"), (3, "")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(numa, "_SYS", tmp_path)
    found = {}

    def run(node):
        numa.run_on_node(node)
        found[node] = os.sched_getaffinity(0)

    for node in (1, 2, 3, 4, None):
        thread = threading.Thread(target=run, args=(node,))
        thread.start()
        thread.join()
    everywhere = os.sched_getaffinity(0)
    assert found == {1: {cpu}, 2: everywhere, 3: everywhere, 4: everywhere, None: everywhere}


def test_refused_pin_spares_engines_kernel(monkeypatch):
    calls, mode, device = [], [0], torch.device("cuda", 1)
    register = Mock(side_effect=[2, 0, RuntimeError("no driver")])

    def exchange(new):
        mode[0], new._obj.value = new._obj.value, mode[0]

    def kernel(*shape, device):
        calls.append(("kernel", device))
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: (calls.append(mode[0]), register())[1], cudaHostUnregister=calls.append
    )
    monkeypatch.setattr(pinning, "_exchange_capture_mode", lambda: exchange)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(calls.append(device)))
    monkeypatch.setattr(pinning.torch, "zeros", kernel)
    assert [pinning.lock(4096, 8, device) for _ in range(3)] == ["CUDA error 2", "", "no driver"]
    pinning.unlock(4096, device)
    # Registered for its device, in a mode (2) that leaves captures valid, which the thread keeps no longer.
    assert (calls, mode) == ([device, 2, ("kernel", device), device, 2, device, 2, 4096], [0])
