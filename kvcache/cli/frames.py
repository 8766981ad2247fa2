"""Frames of a running engine's counters, read from its status socket."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

Key = tuple[str, tuple[tuple[str, str], ...]]
WINDOWS_S = (60.0, 300.0, 900.0)
"""Over which rates are shown; no frame is kept for longer."""
_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Frame:
    """The counters at one moment: values by name and labels, without the labels that identify the engine."""

    time_s: float
    values: dict[Key, float]
    labels: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, **labels: str) -> float:
        """Return the sum over all components that have these labels; 0 without any."""
        needed = labels.items()
        return sum(
            value for (series, has), value in self.values.items() if series == name and needed <= dict(has).items()
        )

    def share(self, name: str) -> float | None:
        """Return a counter per needed block, or None before the first one."""
        needed = self.get("needed_blocks")
        return self.get(name) / needed if needed else None

    def components(self, name: str) -> list[dict[str, str]]:
        """Return the labels of each component that reports this."""
        return [dict(labels) for series, labels in self.values if series == name]


@dataclass(slots=True)
class History:
    """The frames of the last quarter of an hour."""

    frames: deque[Frame] = field(default_factory=deque)

    def add(self, frame: Frame) -> None:
        """Append a frame; where a counter went back, the engine has restarted, and older frames are dropped."""
        if self.frames and frame.get("needed_blocks") < self.frames[-1].get("needed_blocks"):
            self.frames.clear()
        self.frames.append(frame)
        while frame.time_s - self.frames[0].time_s > WINDOWS_S[-1]:
            self.frames.popleft()

    def change(self, name: str, window_s: float, **labels: str) -> tuple[float, float]:
        """Return the growth of a counter over a window, or since the first frame, and the seconds between."""
        last = self.frames[-1]
        first = next(frame for frame in self.frames if last.time_s - frame.time_s <= window_s)
        return last.get(name, **labels) - first.get(name, **labels), last.time_s - first.time_s

    def ratio(self, name: str, of: str, window_s: float) -> float | None:
        """Return the growth of `name` over that of `of` in a window, or None if `of` did not grow."""
        whole = self.change(of, window_s)[0]
        return self.change(name, window_s)[0] / whole if whole > 0 else None

    def rate(self, name: str, **labels: str) -> float:
        """Return how much a counter grew a second, over the last ten."""
        change, seconds = self.change(name, 10.0, **labels)
        return change / seconds if seconds > 0 else 0.0


def read_socket(path: Path) -> Frame:
    """Return a frame from a status socket."""
    from kvcache.exporters.status import ask

    answer = ask(path, "samples", _TIMEOUT_S)
    try:
        values = {
            (str(name), _text_of(labels)): float(value)
            for name, _, labels, value in answer["samples"]
            if isinstance(value, int | float) and math.isfinite(value)
        }
        time_s = float(answer["time_s"])
        if not math.isfinite(time_s):
            raise ValueError(f"time_s must be finite, got {time_s}")
        return Frame(time_s, values, dict(_text_of(answer["labels"])))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} gave no samples of a kvcache engine") from error


def _text_of(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in labels.items())
