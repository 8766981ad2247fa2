"""A stream for host tensors: the device's path without a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from kvcache.transfer.streams import DeviceStream, StreamEvent


class HostStreamEvent(StreamEvent):
    """An event of a `HostStream`."""

    def __init__(self, stream: HostStream, place: int) -> None:
        self.stream = stream
        self.place = place

    def is_done(self) -> bool:
        self.stream.check()
        return self.stream.done >= self.place

    def wait(self) -> None:
        self.stream.check()
        self.stream.done = max(self.stream.done, self.place)

    def elapsed_s(self, earlier: StreamEvent) -> float:
        return float(self.place - getattr(earlier, "place", self.place))


class HostStream(DeviceStream):
    """Copies host tensors at once, and reports it when `done` is raised.

    Parameters
    ----------
    done : int
        The number of the last event that is done; waiting raises it.

    Attributes
    ----------
    log : list of str
        What the stream was called for.
    broken : bool
        Whether its events raise.
    """

    def __init__(self, done: int = 1 << 60) -> None:
        self.device = torch.device("cpu")
        self.places = 0
        self.done = done
        self.broken = False
        self.log: list[str] = []

    def wait_for_compute(self) -> None:
        self.log.append("wait for compute")

    def queueing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record_event(self) -> StreamEvent:
        self.places += 1
        self.log.append("record event")
        return HostStreamEvent(self, self.places)

    def send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        self.log.append(f"send {len(values)}")
        return torch.from_numpy(values.copy())

    def check(self) -> None:
        """Raise if the device is said to be broken."""
        if self.broken:
            raise RuntimeError("the device is gone")
