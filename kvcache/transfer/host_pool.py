"""The pool of blocks in host memory: allocated once, backed by real pages at once, and pinned where CUDA is.

Paying for every page at start keeps page faults out of the first copies, and turns too little memory into an error
that can be read instead of a process that is killed an hour later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import TYPE_CHECKING

import torch

from kvcache.transfer._native.pages import touch_pages
from kvcache.transfer.free_memory import check_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_HUGE_PAGE_BYTES = 2 << 20
_TOUCH_BYTES = 1 << 30
_PIN_BYTES = 16 << 30

Progress = Callable[[str, int, int], None]
"""Called with what is being done (``"touch"``, ``"pin"``), the bytes done and the bytes in all."""


class HostPool:
    """Blocks of host memory, all bytes of one block side by side.

    Parameters
    ----------
    num_blocks : int
        Blocks, >= 1.
    block_bytes : int
        Bytes of one block, >= 1.
    pin : bool, optional
        Whether to page-lock the memory for CUDA; None: if CUDA is there. Where it cannot be locked, one warning is
        given and the pool stays unpinned.
    align_bytes : int
        Every block starts at a multiple of it; 4096 lets blocks be written to disk past the page cache.
    num_threads : int, optional
        Threads that touch the pages; None: one per CPU this process may use, at most 16.
    progress : callable, optional
        Called while pages are touched and pinned, about once a GiB.

    Attributes
    ----------
    tensor : torch.Tensor
        All blocks: int8, shape (num_blocks, block_bytes).
    flat : torch.Tensor
        All bytes, those between blocks included: int8, one dimension.
    stride_bytes : int
        From one block to the next.
    pinned_bytes : int
        Bytes that CUDA has page-locked.
    pin_failures : int
        How often locking was refused (a metric: 0 or 1).

    Raises
    ------
    ValueError
        A size is not positive, or more memory is asked for than the machine or its cgroup has left.

    Notes
    -----
    The memory belongs to the pool's tensor, and to every view of it: it goes when the last of them goes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        pin: bool | None = None,
        *,
        align_bytes: int = 1,
        num_threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_bytes", block_bytes), ("align_bytes", align_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
        if mmap.PAGESIZE % align_bytes:
            raise ValueError(f"align_bytes must divide {mmap.PAGESIZE}, got {align_bytes}")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.stride_bytes = -(-block_bytes // align_bytes) * align_bytes
        self.pinned_bytes = 0
        self.pin_failures = 0
        num_bytes = num_blocks * self.stride_bytes
        check_memory(num_bytes)
        self.flat = _map(num_bytes)
        self.tensor = self.flat.view(num_blocks, self.stride_bytes)[:, :block_bytes]
        self._touch(min(16, len(os.sched_getaffinity(0))) if num_threads is None else num_threads, progress)
        if torch.cuda.is_available() if pin is None else pin:
            self.pin(progress)

    def __repr__(self) -> str:
        return f"HostPool(num_blocks={self.num_blocks}, block_bytes={self.block_bytes}, pinned={self.is_pinned})"

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, alignment included."""
        return self.flat.numel()

    @property
    def address(self) -> int:
        """Address of the first block."""
        return self.flat.data_ptr()

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA can copy from and to all of it without a stop."""
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

    def pieces(self, first: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """Yield `num_bytes` of the pool from byte `first` on as flat tensors, each of which CUDA can copy at once.

        CUDA refuses a copy that reaches from one locked chunk into the next.
        """
        for start, length in _stretches(first, num_bytes, _PIN_BYTES):
            yield self.flat[start : start + length]

    def close(self) -> None:
        """Unlock what was pinned; the memory itself goes with the last view of it."""
        if self.pinned_bytes:
            for first, _ in _stretches(0, self.pinned_bytes, _PIN_BYTES):
                _unregister(self.address + first)
            self.pinned_bytes = 0

    def __del__(self) -> None:
        if getattr(self, "pinned_bytes", 0):
            self.close()

    def _checked(self, block_id: int) -> int:
        if isinstance(block_id, bool) or not isinstance(block_id, Integral) or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id must be in 0..{self.num_blocks - 1}, got {block_id!r}")
        return block_id

    def _touch(self, num_threads: int, progress: Progress | None) -> None:
        for first, num_bytes in _stretches(0, self.num_bytes, _TOUCH_BYTES):
            touch_pages(self.address + first, num_bytes, num_threads)
            if progress is not None:
                progress("touch", first + num_bytes, self.num_bytes)

    def pin(self, progress: Progress | None = None) -> None:
        """Page-lock the memory for CUDA; where that is refused, warn once and leave it unpinned.

        Parameters
        ----------
        progress : callable, optional
            Called with the bytes pinned so far, and all.
        """
        # One call over hundreds of GiB fails, and nothing is seen of its progress.
        for first, num_bytes in _stretches(0, self.num_bytes, _PIN_BYTES):
            error = _register(self.address + first, num_bytes)
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


def _stretches(first: int, num_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut bytes at the multiples of a chunk's size: yield where each stretch starts, and how long it is."""
    end = first + num_bytes
    while first < end:
        stop = min(end, (first // chunk_bytes + 1) * chunk_bytes)
        yield first, stop - first
        first = stop


def _map(num_bytes: int) -> torch.Tensor:
    """Return fresh zeroed memory that starts at a huge page, where the system has them."""
    mapped_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    slack = _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES else 0
    mapping = mmap.mmap(-1, mapped_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = bytes_of(mapping)
    first = -whole.data_ptr() % _HUGE_PAGE_BYTES if slack else 0
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses; small ones serve.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return whole[first : first + num_bytes]


def bytes_of(mapping: mmap.mmap) -> torch.Tensor:
    """Return a mapping as an int8 tensor, which can be written to in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.int8)


def _register(address: int, num_bytes: int) -> str:
    """Page-lock memory for CUDA; return what went wrong, or an empty string."""
    try:
        code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError, AttributeError) as error:
        return str(error) or type(error).__name__
    if int(code) == 0:
        return ""
    # CUDA tells a refusal once more, to the thread's next kernel: this one takes it, before one of the engine's does.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return f"CUDA error {int(code)}"


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
