"""Streams: where a device's copies are queued, and how their ends are seen.

The staged handler knows this interface only, so that its arithmetic is tested where there is no device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch


class Mark(ABC):
    """A place in a stream."""

    @abstractmethod
    def is_past(self) -> bool:
        """Whether the stream has done everything before this place; raises what the device raised."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the stream has done everything before this place."""

    @abstractmethod
    def seconds_since(self, earlier: Mark) -> float:
        """Return the time from an earlier place of the same stream to this one; both are past."""


class DeviceStream(ABC):
    """Runs copies one after the other, off the caller's thread."""

    device: torch.device

    @abstractmethod
    def after_compute(self) -> None:
        """Let what is queued from here on wait for what the engine has queued on its own stream so far."""

    @abstractmethod
    def queueing(self) -> AbstractContextManager[object]:
        """Return a context within which torch queues its work here."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return the present end of the stream as a place."""

    @abstractmethod
    def send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return an array on the device, copied there in the stream's order without a stop."""


class CudaMark(Mark):
    """A place in a CUDA stream: an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_past(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        if not isinstance(earlier, CudaMark):
            raise ValueError(f"earlier must be a place in a CUDA stream, got {earlier!r}")
        return float(earlier._event.elapsed_time(self._event)) * 1e-3


class CudaStream(DeviceStream):
    """A stream of a CUDA device beside the engine's own.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def after_compute(self) -> None:
        # A stream that waits for one under capture is captured with it, and the copies would run at every replay.
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a transfer cannot be captured into a CUDA graph: submit it before or after")
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def queueing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaMark(event)

    def send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        # The allocator of pinned memory keeps it from being reused until the stream has read it.
        pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = values
        return pinned.to(self.device, non_blocking=True)
