"""Page-locking host memory, which lets a device copy from and to it without stopping the caller.

torch has no call for this that works on every accelerator: each platform adds its functions to `PLATFORMS`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch


class Pinning(NamedTuple):
    """How one platform locks memory."""

    lock: Callable[[int, int, torch.device], str]
    """Takes an address, a number of bytes and the device; returns an error message, or an empty string."""

    unlock: Callable[[int], None]
    """Takes an address that was locked."""

    locks_beside_captures: Callable[[], bool] = lambda: False
    """Whether `lock` leaves a graph valid that another thread captures meanwhile."""


def accelerator() -> torch.device | None:
    """Return the current device of the accelerator, or None if the machine has none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else torch.device(device.type, torch.accelerator.current_device_index())


def lock(address: int, num_bytes: int, device: torch.device | None) -> str:
    """Page-lock memory for copies of a device; return an error message, or an empty string."""
    if device is None:
        return "there is no accelerator"
    if device.type not in PLATFORMS:
        return f"kvcache cannot lock memory for {device.type!r} devices"
    return PLATFORMS[device.type].lock(address, num_bytes, device)


def can_lock_beside_captures(device: torch.device | None) -> bool:
    """Return whether a background thread may call `lock`: an engine captures graphs in another one."""
    return device is not None and device.type in PLATFORMS and PLATFORMS[device.type].locks_beside_captures()


def unlock(address: int, device: torch.device | None) -> None:
    """Release memory that `lock` has locked for the device."""
    if device is not None:
        PLATFORMS[device.type].unlock(address)


def _cuda_lock(address: int, num_bytes: int, device: torch.device) -> str:
    try:
        with torch.cuda.device(device), _relaxed_capture():
            code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)  # type: ignore[no-untyped-call]
            if int(code) == 0:
                return ""
            # CUDA reports the refusal again to this thread's next kernel, which should not be the engine's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, AttributeError) as error:
        return str(error) or type(error).__name__
    return f"CUDA error {int(code)}"


@cache
def _exchange_capture_mode() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Allow this thread calls that invalidate, in CUDA's default mode, the captures of other threads."""
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


def _cuda_unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


PLATFORMS = {"cuda": Pinning(_cuda_lock, _cuda_unlock, lambda: _exchange_capture_mode() is not None)}
"""The functions by type of device."""
