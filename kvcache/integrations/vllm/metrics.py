"""What the engine's /metrics shows of a manager: the same table as everywhere, as vLLM wants it declared and sent.

vLLM ends once a name is sent that was not declared, so both come from one table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from kvcache.assembly.reported import every_sample
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.metrics import HistogramData, Labels, Part, Sample, samples_of
from kvcache.tiering.manager import TieredOffloadingManager

# vLLM clears collectors of this prefix when an engine starts again in one process.
_PREFIX = "vllm:kvcache_"
# What the engine asks key by key says little (it stops at the first miss), so look-ups are left out.
_LEFT_OUT = frozenset({"lookups", "looked_up_blocks", "hit_blocks"})
FULL_INTERVAL_S = 1.0
MAX_OBSERVATIONS = 256
"""vLLM takes histograms as lists of observations; of more than so many in a report, a fair share is sent."""


def metric_definitions() -> dict[str, Any]:
    """Return what `MetricsSource` may send, as vLLM wants it declared."""
    found: dict[str, Any] = {}
    for one in every_sample(with_transfers=False):  # of copies vLLM has metrics of its own
        if one.name in _LEFT_OUT:
            continue
        names = tuple(name for name, _ in one.labels)
        if isinstance(one.value, HistogramData):
            metadata: Any = OffloadingHistogramMetadata(one.help, names, one.value.bounds)
        elif one.kind == "counter":
            metadata = OffloadingCounterMetadata(one.help, names)
        else:
            metadata = OffloadingGaugeMetadata(one.help, names)
        found[_PREFIX + one.name] = metadata
    return found


class MetricsSource:
    """Turns a manager's counters since start into what changed since the last time.

    The first report names every counter, with 0 where nothing has happened, so that a rate has a beginning. The
    manager's and the tiers' own are looked at in every step, the rest once a second. What exporters count of themselves
    is left out: `kvcache status` has it.

    Parameters
    ----------
    manager : CPUOffloadingManager or TieredOffloadingManager
        Whose counters they are.
    clock : callable
        Seconds that only grow.
    """

    def __init__(
        self,
        manager: CPUOffloadingManager | TieredOffloadingManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._next_full_s = clock()
        # An exporter counts something of its own, and an engine ends at a name that was not declared.
        self._declared = frozenset(name.removeprefix(_PREFIX) for name in metric_definitions())
        self._stats: dict[tuple[str, Labels], Any] = {}
        self._values: dict[tuple[str, Labels], float | HistogramData] = {}

    def changes(self) -> OffloadingConnectorStats | None:
        """Return counters' increments, gauges' values and new observations, or None if nothing changed."""
        sent = OffloadingConnectorStats()
        telemetry = self._manager.telemetry
        block_bytes = 0 if telemetry is None else telemetry.block_bytes
        for part in self._parts():
            place = part.name, part.labels
            if self._stats.get(place) == part.stats:
                continue
            self._stats[place] = part.stats
            for sample in samples_of(part, self._manager.block_size, block_bytes):
                if sample.name in self._declared:
                    self._add(sent, sample)
        return None if sent.is_empty() else sent

    def _parts(self) -> Iterator[Part]:
        now_s = self._clock()
        if now_s >= self._next_full_s:
            self._next_full_s = now_s + FULL_INTERVAL_S
            telemetry = self._manager.telemetry
            yield from self._manager.parts() if telemetry is None else telemetry.parts()
            return
        # In every step: what operators wait for, and what costs little.
        yield Part("", self._manager.stats())
        if isinstance(self._manager, TieredOffloadingManager):
            yield from self._manager.tier_parts()

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


def _observations(now: HistogramData, last: HistogramData | None) -> Iterator[float]:
    """Yield what brings a histogram from one state to the next: each bucket's bound, as often as it grew."""
    before = (0,) * len(now.counts) if last is None else last.counts
    grown = [count - earlier for count, earlier in zip(now.counts, before, strict=True)]
    share = min(1.0, MAX_OBSERVATIONS / max(1, sum(grown)))
    for bound, count in zip((*now.bounds, 2 * now.bounds[-1]), grown, strict=True):
        yield from (bound,) * -int(-count * share // 1)
