"""A stream of host tensors, to test the device's handler without a device."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from kvcache.transfer.streams import DeviceStream


class HostStream(DeviceStream):
    """Copies host tensors at once; its events are done when `done` reaches their place, and raise if it is `broken`.

    Waiting for an event raises `done`. `log` lists the calls of the handler.
    """

    def __init__(self, done=1 << 60):
        self.device = torch.device("cpu")
        self.places = 0
        self.done = done
        self.broken = False
        self.log = []

    def wait_for_compute(self):
        self.log.append("wait for compute")

    def queueing(self):
        return nullcontext()

    def record_event(self):
        self.places += 1
        self.log.append("record event")
        return HostEvent(self, self.places)

    def send(self, values):
        self.log.append(f"send {len(values)}")
        return torch.from_numpy(values.copy())


@dataclass
class HostEvent:
    """An event of a `HostStream`. Its number is its place in the stream; each place takes one microsecond."""

    stream: HostStream
    place: int

    def query(self):
        if self.stream.broken:
            raise RuntimeError("the device is gone")
        return self.stream.done >= self.place

    def synchronize(self):
        self.stream.done = self.stream.done if self.query() else self.place

    def elapsed_time(self, end):
        return (end.place - self.place) * 1e-3
