"""The accelerator's stream on which the copies of one direction run.

Only `torch.accelerator` is used, so any device with streams and events works: CUDA, ROCm, XPU, NPU, PrivateUse1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch


class DeviceStream:
    """A stream of one device of the accelerator, beside the streams of the engine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device=device)

    def wait_for_compute(self) -> None:
        """Order the work queued from here on after all work on the engine's current stream.

        RuntimeError if a graph is being captured: the transfer would become part of it, and run again at every replay.
        """
        compute = torch.accelerator.current_stream(self.device)
        # torch hands out streams from a pool of 32, so the captured stream may be ours.
        if _is_capturing(compute) or _is_capturing(self._stream):
            raise RuntimeError("a transfer cannot be captured into a graph: submit it before or after the capture")
        self._stream.wait_stream(compute)

    def queueing(self) -> AbstractContextManager[object]:
        """Return a context in which torch queues its work on this stream; one thread at a time may enter it."""
        return self._stream

    def record_event(self) -> torch.Event:
        """Record an event behind all work queued so far; events can be subtracted."""
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(self._stream)
        return event

    def send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return a copy of an array on the device; call it in `queueing`, it does not block."""
        # torch does not reuse pinned memory before the stream has read it.
        pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = values
        return pinned.to(self.device, non_blocking=True)

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queue one copy per pair of tensors; call it in `queueing`, it does not block on pinned memory."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _is_capturing(stream: torch.Stream) -> bool:
    if hasattr(stream, "is_capturing"):  # torch >= 2.13
        return bool(stream.is_capturing())
    with stream:
        return stream.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
