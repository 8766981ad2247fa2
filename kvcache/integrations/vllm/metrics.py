"""The manager's metrics in vLLM's /metrics: declared and sent from the table that all exporters use.

vLLM ends if an undeclared name is sent, so declarations and values come from one table.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingHistogramMetadata

from kvcache.assembly.reported import every_sample
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.metrics import HistogramData, Labels, Part, Sample, samples_of
from kvcache.tiering.manager import TieredOffloadingManager

# vLLM clears collectors of this prefix if a second engine starts in the process.
_PREFIX = "vllm:kvcache_"
# The engine looks up key by key and stops at the first miss, so counts of look-ups would mislead.
_LEFT_OUT = frozenset({"lookups", "looked_up_blocks", "hit_blocks"})
FULL_INTERVAL_S = 1.0
MAX_OBSERVATIONS = 256
"""vLLM expects histograms as lists of observations. Above this number per report, an even share is sent."""

# vLLM logs all that it is sent every 10 s, up to 5,000 characters: of ours, these are shown if they are not 0.
_LINE = "KV Transfer metrics: %s"
_ENTRY = re.compile(r"vllm:(\w+)(:\([^)]*\))?(_count|_sum)?=([^,]+)")
_SHOWN = re.compile(
    r"kv_offload_.*|kvcache_((needed|loaded|promoted_loaded|stored|evicted|failed)_blocks|rejected_stores"
    r"|tier_((promoted|written|dropped|corrupt)_blocks|failed_jobs))"
)


def shorten_line(record: logging.LogRecord) -> bool:
    """Shorten vLLM's line of metrics to the counters that operators read; a filter of its logger.

    Histograms and zeros are left out, and the line if nothing is left. Prometheus has all of them.
    """
    if record.msg != _LINE or not isinstance(record.args, tuple):
        return True
    shown = []
    for name, labels, histogram, value in _ENTRY.findall(str(record.args[0])):
        is_counter = not histogram and not name.endswith(("_count", "_sum"))
        if is_counter and float(value) and _SHOWN.fullmatch(name):
            shown.append(f"{name}{labels}={value if value.isdigit() else format(float(value), '.3g')}")
    record.args = (", ".join(shown),)
    return bool(shown)


def metric_definitions() -> dict[str, Any]:
    """Return the declarations of all metrics that `MetricsSource` may send; shorten the log of the process."""
    # The process that declares metrics also logs them.
    logging.getLogger("vllm.v1.metrics.loggers").addFilter(shorten_line)
    definitions: dict[str, Any] = {}
    for sample in every_sample(with_transfers=False):  # vLLM has its own metrics of copies
        if sample.name in _LEFT_OUT:
            continue
        names = tuple(name for name, _ in sample.labels)
        if isinstance(sample.value, HistogramData):
            metadata: Any = OffloadingHistogramMetadata(sample.help, names, sample.value.bounds)
        elif sample.kind == "counter":
            metadata = OffloadingCounterMetadata(sample.help, names)
        else:
            metadata = OffloadingGaugeMetadata(sample.help, names)
        definitions[_PREFIX + sample.name] = metadata
    return definitions


def tier_metric_definitions() -> dict[str, Any]:
    """Return the declarations of the metrics of one tier, and of the answers to hints."""
    own = (f"{_PREFIX}tier_", f"{_PREFIX}hint_")
    return {name: metadata for name, metadata in metric_definitions().items() if name.startswith(own)}


class SampleChanges:
    """Converts statistics since a start into changes since the last report.

    Metrics that `definitions` do not declare are left out, because the engine ends at an undeclared name. A block has
    `block_size` tokens and `block_bytes` bytes.
    """

    def __init__(self, definitions: dict[str, Any], block_size: int, block_bytes: int = 0) -> None:
        self.block_size, self.block_bytes = block_size, block_bytes
        self._declared = frozenset(name.removeprefix(_PREFIX) for name in definitions)
        self._stats: dict[tuple[str, Labels], Any] = {}
        self._values: dict[tuple[str, Labels], float | HistogramData] = {}

    def since_last(self, parts: Iterable[Part]) -> OffloadingConnectorStats | None:
        """Return increments of counters, values of gauges and new observations; None if nothing changed."""
        sent = OffloadingConnectorStats()
        for part in parts:
            place = part.name, part.labels
            if self._stats.get(place) == part.stats:
                continue
            self._stats[place] = part.stats
            for sample in samples_of(part, self.block_size, self.block_bytes):
                if sample.name in self._declared:
                    self._add(sent, sample)
        return None if sent.is_empty() else sent

    def _add(self, sent: OffloadingConnectorStats, sample: Sample) -> None:
        place = sample.name, sample.labels
        last, self._values[place] = self._values.get(place), sample.value
        if last == sample.value:
            return
        name, labels = _PREFIX + sample.name, tuple(value for _, value in sample.labels)
        value = sample.value
        if isinstance(value, HistogramData):
            for observation in _observations(value, last if isinstance(last, HistogramData) else None):
                sent.observe_histogram(name, observation, labels)
        elif sample.kind == "counter":
            sent.increase_counter(name, value - (last if isinstance(last, int | float) else 0), labels)
        else:
            sent.set_gauge(name, value, labels)


class MetricsSource:
    """Converts a manager's counters since its start into changes since the last report.

    The first report contains every counter, so that rates have a first sample. Counters of the manager and the tiers
    are read in every step, the rest once a second. Counters of exporters are left out; `kvcache status` shows them.
    """

    def __init__(self, manager: CPUOffloadingManager | TieredOffloadingManager) -> None:
        self._manager = manager
        self._next_full_s = time.monotonic()
        # Exporters have counters of their own, which are not declared.
        self._changes = SampleChanges(metric_definitions(), manager.block_size)

    def changes(self, all_parts: bool = False) -> OffloadingConnectorStats | None:
        """Return increments of counters, values of gauges and new observations; None if nothing changed.

        With `all_parts`, every part is read, not only those that are due.
        """
        if (telemetry := self._manager.telemetry) is not None:
            self._changes.block_bytes = telemetry.block_bytes
        if all_parts:
            self._next_full_s = -math.inf
        return self._changes.since_last(self._parts())

    def _parts(self) -> Iterator[Part]:
        now_s = time.monotonic()
        if now_s >= self._next_full_s:
            self._next_full_s = now_s + FULL_INTERVAL_S
            telemetry = self._manager.telemetry
            yield from self._manager.parts() if telemetry is None else telemetry.parts()
            return
        # In every step: cheap parts, and those that operators watch.
        yield Part("", self._manager.stats())
        if isinstance(self._manager, TieredOffloadingManager):
            yield from self._manager.tier_parts()


def _observations(now: HistogramData, last: HistogramData | None) -> Iterator[float]:
    """Yield the observations between two states of a histogram: each bucket's bound per new count."""
    before = (0,) * len(now.counts) if last is None else last.counts
    grown = [count - earlier for count, earlier in zip(now.counts, before, strict=True)]
    share = min(1.0, MAX_OBSERVATIONS / max(1, sum(grown)))
    for bound, count in zip((*now.bounds, 2 * now.bounds[-1]), grown, strict=True):
        yield from (bound,) * -int(-count * share // 1)
