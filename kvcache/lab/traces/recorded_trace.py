"""Read a recording as a trace: its requests, for grids and plots of other policies and capacities."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvcache.lab.traces.recording import Call, Recording, RecordingError
from kvcache.lab.traces.requests import Request, TraceFile
from kvcache.recorder.ops import FIRST_CONTEXT, Op

_LISTS = frozenset({Op.LOOKUP, Op.TOUCH, Op.PREPARE_LOAD, Op.PREPARE_STORE})
_ID_MASK = (1 << 63) - 1


class RecordedTrace(TraceFile):
    """The requests of a recording, in the order in which they came.

    A request consists of all calls with one `ReqContext`. Its keys are ordered by position if the engine gave
    positions, and otherwise by the first call that named them. Without a context, each look-up of a list begins a
    request. `is_trusted` is that of `Recording`. `size_bytes` and `position_bytes` count requests. `manager` is the
    configuration of the recorded manager.
    """

    format = "recording"
    num_skipped = 0
    position_bytes = 0

    def __init__(self, path: str | os.PathLike[str], is_trusted: bool = False) -> None:
        recording = Recording(path, is_trusted)
        self.path = recording.path
        self.name = recording.path.name
        self.manager: dict[str, Any] = recording.header["manager"]
        size = self.manager.get("block_size")
        if type(size) is not int or size < 1:
            raise RecordingError(f"{path}: the header names no block size, got {size!r}")
        self.block_size = size
        self._requests = _requests(recording)
        if not self._requests:
            raise RecordingError(f"{path} holds no request" + (f": {recording.end}" if recording.end else ""))
        self.size_bytes = len(self._requests)

    def close(self) -> None:
        """Drop the requests."""
        self._requests = []

    def __iter__(self) -> Iterator[Request]:
        first_s = min(one.arrival_s for one in self._requests)
        for one in sorted(self._requests, key=lambda one: one.arrival_s):
            self.position_bytes += 1
            ids = np.frombuffer(one.keys, "<i8") & _ID_MASK
            yield Request(ids, len(ids) * self.block_size, 0, one.arrival_s - first_s)


class _Recorded:
    """The recorded keys and positions of one request; after its end, only `keys`, in one byte string."""

    __slots__ = ("arrival_s", "keys", "named", "positions")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.keys = b""
        self.named: dict[bytes, None] = {}
        self.positions: dict[bytes, int] = {}

    def end(self) -> None:
        """Keep only the keys, in order: this takes a third of the memory for a request of one key."""
        keys: list[bytes] = list(dict.fromkeys([*self.named, *self.positions]))
        keys.sort(key=lambda key: self.positions.get(key, 1 << 62))
        self.keys = b"".join(keys)
        del self.named, self.positions


def _requests(recording: Recording) -> list[_Recorded]:
    found: list[_Recorded] = []
    by_context: dict[int, _Recorded] = {}
    now_s = 0.0
    for record in recording:
        if record.op < Op.CONTEXT:
            now_s = record.time_s
        number = record.context
        if record.op is Op.POSITIONS:
            request = by_context.setdefault(number, _Recorded(now_s))
            request.positions.update((key, end) for key, end in record.keys if key)
        elif record.op in _LISTS:
            request = by_context.get(number)  # type: ignore[assignment]
            if request is None or (number < FIRST_CONTEXT and _begins(record, request)):
                if request is not None:
                    request.end()
                request = by_context[number] = _Recorded(now_s)
            if not request.named and not request.positions:
                request.arrival_s = now_s
            request.named.update((key, None) for key in record.keys if key)
        elif record.op is Op.ON_REQUEST_FINISHED and number in by_context:
            found.append(by_context.pop(number))
            found[-1].end()
        if record.op in _LISTS and number < FIRST_CONTEXT and (not found or found[-1] is not by_context[number]):
            found.append(by_context[number])
    found += [request for number, request in by_context.items() if number >= FIRST_CONTEXT]
    for request in by_context.values():
        request.end()
    return [request for request in found if request.keys]


def _begins(record: Call, request: _Recorded) -> bool:
    """Return whether a call without a request begins another request than the call before it."""
    if record.op is Op.LOOKUP:
        return True
    return bool(record.keys) and record.keys[0] not in request.named
