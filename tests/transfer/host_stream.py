"""A stream of host tensors, to test the device's handler without a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcache.transfer.streams import DeviceStream


@dataclass
class HostEvent:
    """An event of a `HostStream`. Its number is its place in the stream; each place takes one microsecond."""

    stream: HostStream
    place: int

    def query(self) -> bool:
        self.stream.check()
        return self.stream.done >= self.place

    def synchronize(self) -> None:
        self.stream.check()
        self.stream.done = max(self.stream.done, self.place)

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.place - self.place) * 1e-3


class HostStream(DeviceStream):
    """Copies host tensors at once; its events are done when `done` reaches their place.

    Attributes
    ----------
    done : int
        The place of the last event that is done; waiting raises it.
    log : list of str
        The calls of the handler.
    broken : bool
        Whether events raise.
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

    def record_event(self, timing: bool = False) -> HostEvent:  # type: ignore[override]
        assert timing
        self.places += 1
        self.log.append("record event")
        return HostEvent(self, self.places)

    def send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        self.log.append(f"send {len(values)}")
        return torch.from_numpy(values.copy())

    def check(self) -> None:
        """Raise if the device is broken."""
        if self.broken:
            raise RuntimeError("the device is gone")
