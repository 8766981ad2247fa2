"""Frames of a running engine's counters, read from its status socket or a `/metrics` URL."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from http.client import HTTPResponse

Key = tuple[str, tuple[tuple[str, str], ...]]
WINDOWS_S = (60.0, 300.0, 900.0)
"""Over which rates are shown; no frame is kept for longer."""
_PREFIXES = ("kvcache_", "vllm:kvcache_")
_NO_VALUES = ("_created", "_bucket", "_sum", "_count")
_COMMON = ("engine", "rank", "policy", "model_name")
_TIMEOUT_S = 5.0
_MAX_PAGE_BYTES = 16 << 20
_MAX_PARSED_BYTES = 1 << 20  # of kvcache's own series, some 10,000


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


@dataclass(slots=True)
class WhatIf:
    """The estimated hit ratios of other capacities: by policy (lru), one ratio for each capacity."""

    policy: str
    num_blocks: int
    capacities: list[int]
    hit_ratios: dict[str, list[float]]


def read_what_if(path: Path) -> WhatIf | None:
    """Return the what-if estimate from a status socket, or None if the engine has none."""
    from kvcache.exporters.status import ask

    try:
        answer = ask(path, "what_if", 60.0)
        capacities = [int(number) for number in answer["capacities"]]
        hit_ratios = {str(name): [float(number) for number in ratios] for name, ratios in answer["hit_ratios"].items()}
        if not answer["uses"] or any(len(ratios) != len(capacities) for ratios in hit_ratios.values()):
            return None
        return WhatIf(str(answer["policy"]), int(answer["num_blocks"]), capacities, hit_ratios)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None  # made without, or of a version that answers otherwise


def url_reader(url: str) -> Callable[[], Frame]:
    """Return a function that reads a frame from a `/metrics` URL, and follows no redirect."""
    import urllib.error
    import urllib.request
    from http.client import HTTPException, InvalidURL

    import prometheus_client  # noqa: F401 - a missing package is reported before the first look

    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, got {url!r}")

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args: Any) -> None:
            return None

    opener = urllib.request.build_opener(NoRedirect)

    def look() -> Frame:
        try:
            with opener.open(url, timeout=_TIMEOUT_S) as answer:
                text = _read_page(answer, time.monotonic() + _TIMEOUT_S).decode(errors="replace")
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise OSError(f"{url} does not answer: {error}") from None
        except InvalidURL as error:
            raise ValueError(f"--url must be a URL, got {url!r}: {error}") from error
        except (OSError, HTTPException) as error:
            raise OSError(f"{url} does not answer: {error or type(error).__name__}") from error
        return parse_metrics(text, time.time(), url)

    return look


def _read_page(answer: HTTPResponse, end_s: float) -> bytes:
    """Return the body of an answer; raise OSError if it is too long or takes too long."""
    parts = []
    num_bytes = 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MAX_PAGE_BYTES or time.monotonic() >= end_s:
            raise OSError(f"its answer does not end after {num_bytes} bytes")
    return b"".join(parts)


def parse_metrics(text: str, time_s: float, where: str) -> Frame:
    """Return the frame of a `/metrics` page, of which only the lines of kvcache's gauges and counters are parsed."""
    from prometheus_client.parser import text_string_to_metric_families

    # Names end at the labels or at the value.
    text = "".join(
        f"{line}\n"
        for line in text.split("\n")
        if line.startswith(_PREFIXES) and not line.partition("{")[0].partition(" ")[0].endswith(_NO_VALUES)
    )
    if len(text) > _MAX_PARSED_BYTES:
        raise ValueError(f"{where} has {len(text)} bytes of kvcache's series, more than {_MAX_PARSED_BYTES}")

    values: dict[Key, float] = {}
    common_labels: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix = next((start for start in _PREFIXES if sample.name.startswith(start)), None)
                if prefix is None:
                    continue
                labels = dict(sample.labels)
                common_labels.update({name: labels.pop(name) for name in _COMMON if name in labels})
                key = sample.name.removeprefix(prefix).removesuffix("_total"), tuple(labels.items())
                if math.isfinite(sample.value):
                    values[key] = values.get(key, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{where} is no page of metrics: {error}") from error
    if not values:
        raise ValueError(f"{where} shows nothing of kvcache")
    return Frame(time_s, values, common_labels)


def _text_of(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in labels.items())
