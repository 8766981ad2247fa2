"""The pool of blocks in host memory: allocated once, backed by pages at once, and pinned if there is an accelerator.

Touching every page at start keeps page faults out of the first copies. If memory is short, the start fails with a
clear error; otherwise the kernel might kill the process an hour later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import TYPE_CHECKING

import torch

from kvcache.options import check_int
from kvcache.transfer import pinning
from kvcache.transfer.free_memory import check_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_HUGE_PAGE_BYTES = 2 << 20
_TOUCH_BYTES = 1 << 30
_PART_BYTES = 64 << 20

Progress = Callable[[str, int, int], None]
"""Called with the step (``"touch"`` or ``"pin"``), the bytes done and the bytes in total."""


class HostPool:
    """Blocks of host memory, each one contiguous.

    Parameters
    ----------
    num_blocks : int
        Blocks, >= 1.
    block_bytes : int
        Bytes of one block, >= 1.
    pin : bool, optional
        Whether to page-lock the memory for an accelerator; None: if the machine has one. If the lock is refused, the
        pool warns once and stays unpinned.
    align_bytes : int
        Every block starts at a multiple of it; with 4096, direct I/O can write blocks to disk.
    num_threads : int, optional
        Threads that touch the pages; None: one per CPU of this process, at most 16.
    progress : callable, optional
        Called after each GiB touched and each 16 GiB pinned.
    device : torch.device, optional
        The accelerator's device that copies the blocks; None: the current one.

    Attributes
    ----------
    tensor : torch.Tensor
        All blocks: int8, shape (num_blocks, block_bytes).
    flat : torch.Tensor
        All bytes, including those between blocks: int8, one dimension.
    stride_bytes : int
        From one block to the next.
    piece_bytes : int
        A copy of a device must not cross a multiple of it: memory is locked in pieces.
    device : torch.device or None
        The device for which the pool is pinned.
    pinned_bytes : int
        Bytes that are page-locked.
    pin_failures : int
        How often locking was refused (a metric: 0 or 1).

    Raises
    ------
    ValueError
        A size is not positive, or the machine or its cgroup has less memory left.

    Notes
    -----
    The memory belongs to the pool's tensor and its views, and is freed with the last of them.
    """

    # One call for hundreds of GiB fails, and reports no progress.
    piece_bytes = 16 << 30
    device: torch.device | None = None
    pinned_bytes = 0
    pin_failures = 0

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        pin: bool | None = None,
        *,
        align_bytes: int = 1,
        num_threads: int | None = None,
        progress: Progress | None = None,
        device: torch.device | None = None,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_bytes", block_bytes), ("align_bytes", align_bytes)):
            check_int(name, value)
        if mmap.PAGESIZE % align_bytes:
            raise ValueError(f"align_bytes must divide {mmap.PAGESIZE}, got {align_bytes}")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.stride_bytes = -(-block_bytes // align_bytes) * align_bytes
        num_bytes = num_blocks * self.stride_bytes
        check_memory(num_bytes)
        self.flat = _map(num_bytes)
        self.tensor = self.flat.view(num_blocks, self.stride_bytes)[:, :block_bytes]
        self._touch(min(16, len(os.sched_getaffinity(0))) if num_threads is None else num_threads, progress)
        pin_at_start(self, pin, device, progress)

    def __repr__(self) -> str:
        return f"HostPool(num_blocks={self.num_blocks}, block_bytes={self.block_bytes}, pinned={self.is_pinned})"

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, including alignment."""
        return self.flat.numel()

    @property
    def address(self) -> int:
        """Address of the first block."""
        return self.flat.data_ptr()

    @property
    def is_pinned(self) -> bool:
        """Whether all of it is page-locked, so that a device copies without blocking the caller."""
        return self.pinned_bytes == self.num_bytes

    @property
    def array(self) -> npt.NDArray[np.int8]:
        """All blocks as a numpy array, shape (num_blocks, block_bytes); no copy."""
        view: npt.NDArray[np.int8] = self.tensor.numpy()
        return view

    def block(self, block_id: int) -> torch.Tensor:
        """Return the block in slot `block_id` as an int8 tensor, shape (block_bytes,); no copy."""
        return self.tensor[self._checked(block_id)]

    def buffer(self, block_id: int) -> memoryview:
        """Return the block in slot `block_id` as a writable buffer of unsigned bytes; no copy."""
        return memoryview(self.array[self._checked(block_id)]).cast("B")

    def close(self) -> None:
        """Unlock pinned memory; the memory itself is freed with the last view of it."""
        if self.pinned_bytes:
            for first in range(0, self.pinned_bytes, self.piece_bytes):
                pinning.unlock(self.address + first, self.device)
            self.pinned_bytes = 0

    def __del__(self) -> None:
        if getattr(self, "pinned_bytes", 0):
            self.close()

    def _checked(self, block_id: int) -> int:
        if isinstance(block_id, bool) or not isinstance(block_id, Integral) or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id must be in 0..{self.num_blocks - 1}, got {block_id!r}")
        return block_id

    def _touch(self, num_threads: int, progress: Progress | None) -> None:
        with ThreadPoolExecutor(num_threads) as threads:
            for first in range(0, self.num_bytes, _TOUCH_BYTES):
                part = self.flat[first : first + _TOUCH_BYTES]
                pages = part[:: mmap.PAGESIZE].tensor_split(-(-part.numel() // _PART_BYTES))
                # torch releases the GIL, and uses no threads of its own for so few values.
                list(threads.map(torch.Tensor.zero_, pages))
                if progress is not None:
                    progress("touch", first + part.numel(), self.num_bytes)

    def pin(self, progress: Progress | None = None) -> None:
        """Page-lock the memory; if that is refused, warn once and leave it unpinned.

        Parameters
        ----------
        progress : callable, optional
            Called with ``"pin"``, the bytes pinned so far and the bytes in total.
        """
        for first in range(0, self.num_bytes, self.piece_bytes):
            num_bytes = min(self.piece_bytes, self.num_bytes - first)
            error = pinning.lock(self.address + first, num_bytes, self.device)
            if error:
                self.close()
                self.pin_failures += 1
                warnings.warn(
                    f"host memory stays unpinned, transfers will be slower: {num_bytes} bytes at offset {first} "
                    f"cannot be locked: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return
            self.pinned_bytes += num_bytes
            if progress is not None:
                progress("pin", first + num_bytes, self.num_bytes)


def pin_at_start(
    pool: HostPool, pin: bool | None, device: torch.device | None, progress: Progress | None = None
) -> None:
    """Pin a new pool as the arguments of its constructor say."""
    device = pinning.accelerator() if device is None else device
    pool.device = None if device is None or device.type == "cpu" else device
    if pool.device is not None if pin is None else pin:
        pool.pin(progress)


def _map(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory that starts at a huge page, if the system has them."""
    mapped_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    slack = _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES else 0
    mapping = mmap.mmap(-1, mapped_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = bytes_of(mapping)
    first = -whole.data_ptr() % _HUGE_PAGE_BYTES if slack else 0
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses; small pages work too.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return whole[first : first + num_bytes]


def bytes_of(mapping: mmap.mmap) -> torch.Tensor:
    """Return a mapping as an int8 tensor, which can be written to in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.int8)
