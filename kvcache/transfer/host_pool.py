"""The pool of blocks in host memory: allocated once, and pinned if there is an accelerator.

Touching pages keeps page faults out of copies. Touching and pinning hundreds of GB takes minutes, so a pool serves as
soon as its first piece is ready, and a thread prepares the others: all if they are pinned, and otherwise a piece ahead
of the blocks in use, so that memory grows with use. Every block can be copied from the start: a copy of memory that is
not prepared yet is slower, but correct. So no manager needs to know which blocks are ready.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, repeat
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from kvcache.background import Background
from kvcache.options import check_int, format_size
from kvcache.transfer import numa, pinning
from kvcache.transfer.free_memory import check_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LOG = logging.getLogger(__name__)
_HUGE_PAGE_BYTES = 2 << 20
_PART_BYTES = 16 << 20
_START_BYTES = 64 << 20
"""Touched at the start of a pool that grows with use."""
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
        Memory is touched and locked in pieces of so many bytes. A copy of a device must not cross a multiple of it.
    device : torch.device or None
        The device for which the pool is pinned.
    touched_bytes, pinned_bytes : int
        The first bytes, which have been touched, and those that are page-locked.
    pin_failures : int
        How often locking was refused (a metric: 0 or 1).

    Raises
    ------
    ValueError
        A size is not positive, or the machine or its cgroup has less memory left.

    Notes
    -----
    The memory belongs to the pool's tensor and its views, and is freed with the last of them. Its pages lie on the NUMA
    node of the device, and are transparent huge pages if the system has them.
    """

    # The first piece delays the start. While a piece is locked, the driver may delay the engine's calls.
    piece_bytes = 128 << 20
    device: torch.device | None = None
    touched_bytes = 0
    pinned_bytes = 0
    pin_failures = 0
    _preparation: Background | None = None
    _wanted_bytes = 0

    def __init__(
        self, num_blocks: int, block_bytes: int, pin: bool | None = None, *, device: torch.device | None = None
    ) -> None:
        self.num_blocks = check_int("num_blocks", num_blocks)
        self.block_bytes = self.stride_bytes = check_int("block_bytes", block_bytes)
        num_bytes = num_blocks * block_bytes
        check_memory(num_bytes)
        self.flat = _map(num_bytes)
        self.tensor = self.flat.view(num_blocks, block_bytes)
        self.prepare(pin, device)

    def prepare(self, pin: bool | None, device: torch.device | None) -> None:
        """Touch and pin the first piece, and start a thread for the others; `pin` and `device` as for a pool."""
        device = pinning.accelerator() if device is None else device
        self.device = None if device is None or device.type == "cpu" else device
        self._node = None if self.device is None else numa.device_node(self.device)
        self._is_ready = threading.Event()
        self._lock = threading.Lock()
        pins = self.device is not None if pin is None else pin
        # Memory that a background thread may not lock while an engine captures graphs is locked now, all of it.
        first_bytes = self.num_bytes if pins and not pinning.can_lock_beside_captures(self.device) else self.piece_bytes
        first_bytes = first_bytes if pins else min(first_bytes, _START_BYTES)
        num_threads = min(16, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads, initializer=numa.run_on_node, initargs=(self._node,)) as threads:
            self._touch(first_bytes, threads.map)
        if pins:
            self.pin(first_bytes)
        self._pins = pins
        _LOG.info("%s", self.describe())
        if self.touched_bytes == self.num_bytes:
            self._is_ready.set()
        self._want(self.num_bytes if pins else self.touched_bytes)

    def note_use(self, block_ids: npt.NDArray[Any]) -> None:
        """Touch the memory up to a piece behind the blocks in use in the background, if that has not been done.

        Parameters
        ----------
        block_ids : numpy.ndarray of int64
            Blocks that are being copied.
        """
        if self._wanted_bytes < self.num_bytes and len(block_ids):
            self._want((int(block_ids.max()) + 1) * self.stride_bytes + self.piece_bytes)

    def _want(self, end: int) -> None:
        """Have the memory before byte `end` prepared: by the running thread, or by a new one."""
        with self._lock:
            self._wanted_bytes = max(self._wanted_bytes, min(end, self.num_bytes))
            if self._preparation is None and self.touched_bytes < self._wanted_bytes and not self._is_ready.is_set():
                # The thread must not run C code while the process ends.
                atexit.register(self._stop_preparing)
                self._preparation = Background("host-pool", self._prepare_rest)

    def _prepare_rest(self, stopping: threading.Event) -> None:
        """Touch and pin the pieces up to the wanted byte; run by the background thread."""
        started_s = time.monotonic()
        numa.run_on_node(self._node)
        try:
            while not (stopping.is_set() or self._has_prepared()):
                end = self.touched_bytes + self.piece_bytes
                self._touch(end)
                if self._pins and not self.pin_failures:
                    self.pin(end)
            _LOG.info("%s, in %.1f s beside the engine", self.describe(), time.monotonic() - started_s)
        finally:
            if stopping.is_set() or self._wanted_bytes == self.num_bytes:
                self._is_ready.set()
            atexit.unregister(self._stop_preparing)

    def _has_prepared(self) -> bool:
        """Return whether the thread has done all that is wanted; then it ends, and `_want` may start another one."""
        with self._lock:
            if is_done := self.touched_bytes >= self._wanted_bytes:
                self._preparation = None
            return is_done

    def _touch(self, end: int, run: Callable[..., Iterable[None]] = map) -> None:
        """Touch the memory from `touched_bytes` to `end`; `run` is the `map` of the threads that do it."""
        end = min(end, self.num_bytes)
        list(run(self._back, range(self.touched_bytes, end, _PART_BYTES), repeat(end)))
        self.touched_bytes = end

    def _back(self, first: int, end: int) -> None:
        """Back a part with pages without a change to its bytes, because blocks may lie there already."""
        num_bytes = min(_PART_BYTES, end - first)
        skipped = (self.address + first) % mmap.PAGESIZE
        # Linux before 5.14 refuses. Pages are then backed when they are pinned, or by the first copy.
        _LIBC.madvise(self.address + first - skipped, num_bytes + skipped, _MADV_POPULATE_WRITE)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Have the whole pool touched, and wait until the background thread has ended; return whether it has done that.

        False after `timeout_s` seconds (None: no limit), and for a pool that was closed before. See also `is_pinned`.
        """
        self._want(self.num_bytes)
        self._is_ready.wait(timeout_s)
        return self.touched_bytes == self.num_bytes

    def describe(self) -> str:
        """Return a line for a log: size, node, and how much of it is touched and pinned."""
        node = "" if self._node is None else f" on NUMA node {self._node}"
        when = "" if self._pins else " with use"
        rest = "" if self.touched_bytes == self.num_bytes else f"; a thread prepares the rest{when}"
        return (
            f"host pool of {format_size(self.num_bytes)}{node}: {format_size(self.touched_bytes)} touched and "
            f"{format_size(self.pinned_bytes)} pinned{rest}"
        )

    def __repr__(self) -> str:
        return f"HostPool(num_blocks={self.num_blocks}, block_bytes={self.block_bytes}, pinned={self.is_pinned})"

    def has_owner(self) -> bool:
        """Return whether a process manages the blocks. Without one, handlers refuse jobs."""
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
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
        if isinstance(block_id, bool) or not isinstance(block_id, Integral) or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id must be in 0..{self.num_blocks - 1}, got {block_id!r}")
        return self.tensor[block_id]

    def parts(self, first: int, stop: int) -> list[torch.Tensor]:
        """Return the bytes of the blocks from `first` to before `stop` as flat int8 tensors; no copy.

        A device can copy them: none crosses a multiple of `piece_bytes`.
        """
        start, end = first * self.stride_bytes, stop * self.stride_bytes
        cuts = range(start - start % self.piece_bytes + self.piece_bytes, end, self.piece_bytes)
        return [self.flat[low:high] for low, high in pairwise((start, *cuts, end))]

    def close(self) -> None:
        """Stop the preparation and unlock pinned memory; the memory itself is freed with the last view of it."""
        self._stop_preparing()
        if self.pinned_bytes:
            for first in range(0, self.pinned_bytes, self.piece_bytes):
                pinning.unlock(self.address + first, self.device)
            self.pinned_bytes = 0

    def _stop_preparing(self) -> None:
        preparation = self._preparation
        if preparation is not None:
            preparation.stop(None)
        self._is_ready.set()

    def __del__(self) -> None:
        if getattr(self, "pinned_bytes", 0):
            self.close()

    def pin(self, end: int | None = None) -> None:
        """Page-lock the pieces that start before byte `end` (None: all).

        If that is refused, warn once and leave the rest unpinned.
        """
        for first in range(self.pinned_bytes, min(end or self.num_bytes, self.num_bytes), self.piece_bytes):
            num_bytes = min(self.piece_bytes, self.num_bytes - first)
            error = pinning.lock(self.address + first, num_bytes, self.device)
            if error:
                # Pieces that are locked stay so: a device may be copying them.
                self.pin_failures += 1
                warnings.warn(
                    f"host memory stays unpinned, transfers will be slower: {num_bytes} bytes at offset {first} "
                    f"cannot be locked: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return
            self.pinned_bytes += num_bytes


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


def bytes_of(mapping: mmap.mmap | memoryview) -> torch.Tensor:
    """Return a mapping as an int8 tensor, which can be written to in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.int8)
