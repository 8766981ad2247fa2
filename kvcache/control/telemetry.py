"""Telemetry: snapshots of a running manager, its tiers, policy and transfers, and the contract of exporters.

Exporters read snapshots in their own threads. A snapshot reads counters that the scheduler's thread maintains anyway.
It takes no lock that the scheduler holds for longer than a few lines.
"""

from __future__ import annotations

import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.control.pool import BlockPool
from kvcache.control.watch import CallTimes
from kvcache.metrics import Labels, Part, Sample, samples_of
from kvcache.options import Configurable, Options, check_int
from kvcache.registry import POLICIES

if TYPE_CHECKING:
    from kvcache.control.manager import OffloadingManager

_LOG = logging.getLogger(__name__)
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
MAX_LABEL_CHARS = 1024
Source = Callable[[], Iterable[Part]]
"""Returns the statistics of one component; called in any thread, and must not wait."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All statistics at one moment, `time_s` seconds since the epoch and `uptime_s` since the telemetry was created.

    `labels` are those of this engine: engine, rank, policy. A block has `block_size` tokens and `block_bytes` bytes; 0:
    unknown. `parts` are the components.
    """

    time_s: float
    uptime_s: float
    labels: Labels
    block_size: int
    block_bytes: int
    parts: tuple[Part, ...]

    def samples(self) -> Iterator[Sample]:
        """Yield every value under its exported name, without the snapshot's own labels."""
        for part in self.parts:
            yield from samples_of(part, self.block_size, self.block_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return all values as JSON types; ``parts`` lists each component with its name, labels and statistics."""
        return {
            "time_s": self.time_s,
            "uptime_s": self.uptime_s,
            "labels": dict(self.labels),
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "parts": [
                {"name": part.name or "manager", "labels": dict(part.labels), "stats": asdict(part.stats)}
                for part in self.parts
            ],
        }


class Telemetry:
    """The statistics of a running engine's cache.

    Parameters
    ----------
    manager : OffloadingManager or None
        The manager to read. None: a worker's process, whose transfers are in `sources`.
    block_bytes : int
        Bytes of one block over all workers; 0: unknown.
    labels : mapping of str to str
        Labels of this engine: ``engine`` and ``rank`` (default ``"0"``). Names are valid in Prometheus; values have at
        most 1,024 characters, since they are in every line of every scrape.
    config : mapping
        The configuration in effect, for display. It must contain no secrets.
    time_calls : bool
        Whether to time the manager's calls until `close` (`kvcache.control.watch`), and to measure how old blocks
        are when they are evicted.

    Attributes
    ----------
    sources : list of callable
        Each callable returns more parts of a snapshot. Callers may append to it.
    exporters : list
        Exporters of this telemetry, closed by `close`. Callers may append to it.

    Raises
    ------
    ValueError
        A label is invalid, or `block_bytes` is negative.
    """

    def __init__(
        self,
        manager: OffloadingManager | None,
        *,
        block_bytes: int = 0,
        labels: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        time_calls: bool = False,
    ) -> None:
        self.manager = manager
        self.block_bytes = check_int("block_bytes", block_bytes, 0)
        self.labels = {"engine": "0", "rank": "0", **({} if labels is None else labels)}
        for name, text in self.labels.items():
            _check_label(name, text)
        self.config = {} if config is None else dict(config)
        self.sources: list[Source] = []
        self.exporters: list[Exporter] = []
        # An engine's own manager may have neither a policy nor a pool whose calls could be timed.
        policy = None if manager is None else getattr(manager, "policy", None)
        if policy is not None:
            self.labels["policy"] = POLICIES.name_of(type(policy)) or type(policy).__name__
        self._start_s = time.monotonic()
        self._call_times: CallTimes | None = None
        pool = getattr(manager, "pool", None)
        if time_calls and manager is not None and isinstance(pool, BlockPool):
            self._call_times = CallTimes(manager, pool)
            self.sources.append(self._call_times.parts)

    def parts(self) -> list[Part]:
        """Return the statistics of each component, the manager's own first. May be called from any thread."""
        parts = [] if self.manager is None else self.manager.parts()
        for source in list(self.sources):
            parts += source()
        return parts

    def snapshot(self) -> Snapshot:
        """Return all current statistics. May be called from any thread."""
        return Snapshot(
            time_s=time.time(),
            uptime_s=time.monotonic() - self._start_s,
            labels=tuple(self.labels.items()),
            block_size=0 if self.manager is None else self.manager.block_size,
            block_bytes=self.block_bytes,
            parts=tuple(self.parts()),
        )

    def close(self) -> None:
        """Close the exporters, and stop timing calls. If an exporter fails, log it."""
        while self.exporters:
            exporter = self.exporters.pop()
            try:
                exporter.close()
            except Exception:
                _LOG.exception("%s did not close", type(exporter).__name__)
        if self._call_times is not None:
            self._call_times.close()


def _check_label(name: object, text: object) -> None:
    is_name = isinstance(name, str) and _LABEL_NAME.fullmatch(name) is not None and name != "le"
    is_text = isinstance(text, str) and len(text) <= MAX_LABEL_CHARS and text == text.encode(errors="replace").decode()
    if not is_name or not is_text:
        raise ValueError(
            f"a label must have a name such as 'engine' and a text of at most {MAX_LABEL_CHARS} characters, got "
            f"{name!r:.80}: {text!r:.80}"
        )


class Exporter(Configurable, ABC):
    """Reports snapshots of a running engine, in its own threads; a configuration names it as a `Configurable`."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of the exporter, for the log."""

    @abstractmethod
    def close(self) -> None:
        """Stop, and wait for the exporter's threads for a bounded time. A second call does nothing."""


class Command(ABC):
    """One command over an engine's `telemetry`, created at its first request and kept until the server closes.

    The class attribute `options` declares the options of `run`. Other options are rejected.
    """

    options: ClassVar[type[Options]] = Options

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    @abstractmethod
    def run(self, **options: Any) -> Any:
        """Answer one request with its parsed `options`, in a thread of the server; return JSON types only.

        ValueError and OSError: the request cannot be answered. The message is sent to the client.
        """

    def close(self) -> None:  # noqa: B027
        """Called once, when the server closes."""
