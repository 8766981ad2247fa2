"""A pool that is there at once, or says clearly why it is not."""

import mmap

import numpy as np
import pytest
import torch

from kvcache.transfer import host_pool as memory
from kvcache.transfer.host_pool import HostPool


def test_views_share_the_blocks_bytes():
    pool = HostPool(3, 10, pin=False)
    pool.block(1)[:] = torch.arange(10, dtype=torch.int8)
    assert bytes(pool.buffer(1)) == bytes(range(10))
    assert pool.array[1].tolist() == list(range(10))
    pool.buffer(2)[0] = 255
    assert pool.tensor[2, 0] == -1
    assert pool.tensor.shape == (3, 10)
    assert pool.tensor.dtype == torch.int8
    assert not pool.tensor[0].any()


def test_blocks_lie_side_by_side_from_a_page_on():
    pool = HostPool(4, 3 << 20, pin=False)
    assert pool.address % mmap.PAGESIZE == 0
    assert pool.address % (2 << 20) == 0
    assert pool.stride_bytes == 3 << 20
    assert pool.tensor.is_contiguous()


def test_aligned_blocks_start_at_a_multiple():
    pool = HostPool(4, 5000, pin=False, align_bytes=4096)
    assert pool.stride_bytes == 8192
    assert pool.block(3).data_ptr() - pool.address == 3 * 8192
    assert pool.block(3).shape == (5000,)
    assert pool.num_bytes == 4 * 8192


def test_a_view_outlives_its_pool():
    block = HostPool(2, 1 << 20, pin=False).block(1)
    block.fill_(3)
    assert int(block.sum(dtype=torch.int64)) == 3 << 20


@pytest.mark.parametrize("num_threads", [1, 3, 64])
def test_every_page_is_there_from_the_start(num_threads):
    num_pages = 1000
    pool = HostPool(num_pages, mmap.PAGESIZE, pin=False, num_threads=num_threads)
    resident = np.zeros(num_pages, np.uint8)
    libc_mincore(pool.address, num_pages * mmap.PAGESIZE, resident.ctypes.data)
    assert resident.tolist() == [1] * num_pages


def libc_mincore(address, num_bytes, out):
    import ctypes

    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(address, num_bytes, out) == 0


def test_progress_is_told():
    told = []
    HostPool(2, 1 << 20, pin=False, progress=lambda *step: told.append(step))
    assert told == [("touch", 2 << 20, 2 << 20)]


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
def test_wrong_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        HostPool(*arguments)


def test_alignment_divides_a_page():
    with pytest.raises(ValueError, match="align_bytes must divide 4096, got 3"):
        HostPool(1, 1, align_bytes=3)


@pytest.mark.parametrize("block_id", [-1, 2, 1.0, True])
def test_a_block_that_is_not_there_is_refused(block_id):
    pool = HostPool(2, 8, pin=False)
    with pytest.raises(ValueError, match=rf"block_id must be in 0\.\.1, got {block_id}"):
        pool.block(block_id)
    with pytest.raises(ValueError, match=rf"got {block_id}"):
        pool.buffer(block_id)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can pin here")
def test_memory_that_cannot_be_pinned_stays_and_is_counted():
    with pytest.warns(RuntimeWarning, match="stays unpinned") as caught:
        pool = HostPool(2, 8, pin=True)
    assert len(caught) == 1
    assert (pool.pin_failures, pool.pinned_bytes, pool.is_pinned) == (1, 0, False)
    assert pool.block(1).tolist() == [0] * 8


def test_pinning_goes_chunk_by_chunk_and_is_undone(monkeypatch):
    locked, told = [], []
    monkeypatch.setattr(memory, "_PIN_BYTES", 4096)
    monkeypatch.setattr(memory, "_register", lambda address, n: locked.append((address, n)) or "")
    monkeypatch.setattr(memory, "_unregister", lambda address: locked.append(address))
    pool = HostPool(10, 1000, pin=True, progress=lambda *step: told.append(step))
    assert [n for _, n in locked] == [4096, 4096, 1808]
    assert told[1:] == [("pin", 4096, 10000), ("pin", 8192, 10000), ("pin", 10000, 10000)]
    assert pool.is_pinned
    first = pool.address
    pool.close()
    assert locked[3:] == [first, first + 4096, first + 8192]
    assert not pool.is_pinned


def test_a_chunk_that_cannot_be_pinned_unpins_the_others(monkeypatch):
    locked = set()

    def register(address, n):
        if len(locked) == 2:
            return "out of memory"
        locked.add(address)
        return ""

    monkeypatch.setattr(memory, "_PIN_BYTES", 4096)
    monkeypatch.setattr(memory, "_register", register)
    monkeypatch.setattr(memory, "_unregister", locked.remove)
    with pytest.warns(RuntimeWarning, match="1808 bytes at offset 8192 cannot be locked: out of memory"):
        pool = HostPool(10, 1000, pin=True)
    assert not locked
    assert pool.pin_failures == 1


def test_a_refusal_to_pin_is_taken_from_the_engines_next_kernel(monkeypatch):
    class Runtime:
        def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
            return 2

    kernels, zeros = [], torch.zeros

    def kernel(*shape, device=None, **options):
        if device is None:
            return zeros(*shape, **options)
        kernels.append(device)
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "zeros", kernel)
    with pytest.warns(RuntimeWarning, match="cannot be locked: CUDA error 2"):
        pool = HostPool(2, 8, pin=True)
    assert kernels == ["cuda"]
    assert pool.pin_failures == 1


def test_a_stretch_is_cut_where_one_locked_chunk_ends(monkeypatch):
    monkeypatch.setattr(memory, "_PIN_BYTES", 4096)
    pool = HostPool(10, 1000, pin=False)
    pieces = list(pool.pieces(3000, 6000))
    assert [(piece.data_ptr() - pool.address, piece.numel()) for piece in pieces] == [
        (3000, 1096),
        (4096, 4096),
        (8192, 808),
    ]
    assert [piece.numel() for piece in pool.pieces(4096, 4096)] == [4096]
    assert list(pool.pieces(0, 0)) == []
