"""Streams of a device: they run copies in order, and record events that say how far they are.

The CUDA handler uses this interface only, so that its arithmetic is tested where there is no device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch


class StreamEvent(ABC):
    """An event recorded in a stream: done once the stream has done everything that was queued before it."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether the stream has reached the event; raise what the device raised."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the stream has reached the event."""

    @abstractmethod
    def elapsed_s(self, earlier: StreamEvent) -> float:
        """Return the seconds between an earlier event of the same stream and this one; both are done."""


class DeviceStream(ABC):
    """Runs copies one after the other, off the caller's thread."""

    device: torch.device

    @abstractmethod
    def wait_for_compute(self) -> None:
        """Order what is queued from here on after everything that the engine has queued on its own stream."""

    @abstractmethod
    def queueing(self) -> AbstractContextManager[object]:
        """Return a context within which torch queues its work on this stream."""

    @abstractmethod
    def record_event(self) -> StreamEvent:
        """Record an event behind everything that is queued now."""

    @abstractmethod
    def send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return an array on the device, copied there in the stream's order without blocking."""


class CudaStreamEvent(StreamEvent):
    """An event of a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def elapsed_s(self, earlier: StreamEvent) -> float:
        if not isinstance(earlier, CudaStreamEvent):
            raise ValueError(f"earlier must be an event of a CUDA stream, got {earlier!r}")
        return float(earlier._event.elapsed_time(self._event)) * 1e-3


class CudaStream(DeviceStream):
    """A stream of a CUDA device beside the engine's own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def wait_for_compute(self) -> None:
        # A stream that waits for one under capture is captured with it, and the copies would run at every replay.
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a transfer cannot be captured into a CUDA graph: submit it before or after")
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def queueing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record_event(self) -> StreamEvent:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaStreamEvent(event)

    def send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        # The allocator of pinned memory keeps it from being reused until the stream has read it.
        pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = values
        return pinned.to(self.device, non_blocking=True)
