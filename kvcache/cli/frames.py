"""What a running engine's cache has counted, moment by moment: read from its status socket or a `/metrics` URL."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcache.cli import common

Key = tuple[str, tuple[tuple[str, str], ...]]
WINDOWS_S = (60.0, 300.0, 900.0)
"""Over which rates are shown; no frame is kept for longer."""
_PREFIXES = ("kvcache_", "vllm:kvcache_")
_COMMON = ("engine", "rank", "policy", "model_name")
_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Frame:
    """What was counted at one moment: values by name and labels, without those that tell engines apart."""

    time_s: float
    values: dict[Key, float]
    labels: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, **labels: str) -> float:
        """Return the sum over all components that have these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(value for (one, has), value in self.values.items() if one == name and wanted <= dict(has).items())

    def components(self, name: str) -> list[dict[str, str]]:
        """Return the labels of each component that reports this."""
        return [dict(labels) for one, labels in self.values if one == name]


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
        """Return what a counter grew by over a window, or since the first frame, and the seconds that this took."""
        last = self.frames[-1]
        first = next(one for one in self.frames if last.time_s - one.time_s <= window_s)
        return last.get(name, **labels) - first.get(name, **labels), last.time_s - first.time_s

    def ratio(self, name: str, of: str, window_s: float) -> float | None:
        """Return by what share of another counter one grew over a window; None where that did not grow."""
        whole = self.change(of, window_s)[0]
        return self.change(name, window_s)[0] / whole if whole > 0 else None

    def rate(self, name: str, **labels: str) -> float:
        """Return how much a counter grew a second, over the last ten."""
        change, seconds = self.change(name, 10.0, **labels)
        return change / seconds if seconds > 0 else 0.0


def socket_reader(path: Path) -> Callable[[], Frame]:
    """Return what reads a frame from a status socket."""
    from kvcache.exporters.status import ask

    def look() -> Frame:
        found = ask(path, "samples", _TIMEOUT_S)
        try:
            values = {
                (name, tuple(labels.items())): float(value)
                for name, _, labels, value in found["samples"]
                if isinstance(value, int | float)
            }
            return Frame(float(found["time_s"]), values, dict(found["labels"]))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} gave no samples of a kvcache engine") from error

    return look


def what_if_reader(path: Path) -> Callable[[], dict[str, Any] | None]:
    """Return what asks a status socket for the estimate of other capacities and policies; None where there is none."""
    from kvcache.exporters.status import ask

    def estimate() -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = ask(path, "what_if", 60.0)
        except (OSError, ValueError):
            return None  # made without
        return found

    return estimate


def url_reader(url: str) -> Callable[[], Frame]:
    """Return what reads a frame from a `/metrics` URL."""
    import importlib.util
    import urllib.request
    from http.client import HTTPException, InvalidURL

    if importlib.util.find_spec("prometheus_client") is None:
        raise common.CommandError("--url needs prometheus-client: install kvcache's extra 'prometheus'")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, got {url!r}")

    def look() -> Frame:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                text = answer.read(64 << 20).decode()
        except InvalidURL as error:
            raise ValueError(f"--url must be a URL, got {url!r}: {error}") from error
        except (OSError, HTTPException) as error:
            raise OSError(f"{url} does not answer: {error or type(error).__name__}") from error
        return parse_metrics(text, time.time(), url)

    return look


def parse_metrics(text: str, time_s: float, where: str) -> Frame:
    """Return the frame that a `/metrics` page shows."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[Key, float] = {}
    common_labels: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix = next((one for one in _PREFIXES if sample.name.startswith(one)), None)
                if prefix is None or sample.name.endswith(("_created", "_bucket", "_sum", "_count")):
                    continue
                labels = dict(sample.labels)
                common_labels.update({name: labels.pop(name) for name in _COMMON if name in labels})
                key = sample.name.removeprefix(prefix).removesuffix("_total"), tuple(labels.items())
                values[key] = values.get(key, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{where} is no page of metrics: {error}") from error
    if not values:
        raise ValueError(f"{where} shows nothing of kvcache")
    return Frame(time_s, values, common_labels)
