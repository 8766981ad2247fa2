"""Prometheus: all counters and gauges, under Prometheus' conventions, as a collector over snapshots.

Threads of the exporter take snapshots and write pages, one at a time; the scheduler's thread has no part in a scrape.
Register the collector in your own registry, or serve it with `start_server`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvcache.control.telemetry import Exporter
from kvcache.exporters.local_server import LocalServer
from kvcache.metrics import HistogramData, Sample
from kvcache.options import Options, check_int, count_from, option, parse_text

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kvcache.control.telemetry import Telemetry

PREFIX = "kvcache_"
DEFAULT_PORT = 9464
_MAX_PORT = (1 << 16) - 1
_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily
}  # fmt: skip


@dataclass(frozen=True)
class PrometheusOptions(Options):
    """The options of a `PrometheusExporter`."""

    where: ClassVar[str] = "exporter 'prometheus'"

    port: int = option(count_from(0, _MAX_PORT), DEFAULT_PORT, when="the port is in use; 0: any free port")
    host: str = option(parse_text, "127.0.0.1", when="Prometheus runs on another machine; there is no authentication")


class TelemetryCollector(Collector):
    """A collector for a registry of `prometheus_client`; the labels of `telemetry` are labels of every sample."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._collecting = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics depend on the engine; `collect` finds them."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each metric, with a sample for each component."""
        # One page at a time: more would compete with the scheduler for the interpreter's lock.
        with self._collecting:
            snapshot = self.telemetry.snapshot()
            families: dict[str, list[Sample]] = {}
            for sample in snapshot.samples():
                families.setdefault(sample.name, []).append(sample)
            for name, samples in families.items():
                yield _family(PREFIX + name, samples, dict(snapshot.labels))


def _family(name: str, samples: list[Sample], common: dict[str, str]) -> Any:
    family = _FAMILIES[samples[0].kind](name, samples[0].help, labels=[*common, *dict(samples[0].labels)])
    for sample in samples:
        labels = [*common.values(), *dict(sample.labels).values()]
        if isinstance(sample.value, HistogramData):
            family.add_metric(labels, buckets=_buckets(sample.value), sum_value=sample.value.sum)
        else:
            family.add_metric(labels, sample.value)
    return family


def _buckets(data: HistogramData) -> list[tuple[str, float]]:
    """Return cumulative counts by bound, as text that is the same at every scrape."""
    bounds = [*(f"{bound:.9g}" for bound in data.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(data.counts)), strict=True))


class PrometheusExporter(Exporter):
    """Serve ``/metrics`` over HTTP.

    Parameters
    ----------
    telemetry : Telemetry
        The engine.
    port : int
        TCP port; 0: any free one. Engines of one machine need one each.
    host : str
        Address to listen on. Requests are not authenticated; the default accepts only those of this machine.

    Raises
    ------
    ValueError
        The port is out of range.
    OSError
        The port is in use, or the address is not this machine's.
    """

    options_type = PrometheusOptions

    def __init__(self, telemetry: Telemetry, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> None:
        check_int("port", port, 0, _MAX_PORT)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(TelemetryCollector(telemetry))
        self._server = _listen(host, port, registry)
        self._server.start("prometheus")

    @classmethod
    def unavailable_reason(cls, options: PrometheusOptions) -> str:
        try:
            _listen(options.host, options.port, CollectorRegistry()).stop()
        except OSError as error:
            return str(error)
        return ""

    @classmethod
    def make(cls, options: PrometheusOptions, telemetry: Telemetry) -> PrometheusExporter:
        rank = telemetry.labels.get("rank", "0")
        # Data-parallel ranks of one configuration follow one another.
        port = options.port + int(rank) if options.port and rank.isdigit() else options.port
        return cls(telemetry, port, options.host)

    @property
    def address(self) -> str:
        host, port = self._server.address[:2]
        return f"http://{host}:{port}/metrics"

    def close(self) -> None:
        self._server.stop()


def start_server(telemetry: Telemetry, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> PrometheusExporter:
    """Serve ``/metrics`` of an engine at the `address` of the returned exporter; see `PrometheusExporter`.

    Close the exporter, or let ``telemetry.close()`` close it.
    """
    exporter = PrometheusExporter(telemetry, port, host)
    telemetry.exporters.append(exporter)
    return exporter


def _listen(host: str, port: int, registry: CollectorRegistry) -> LocalServer:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    handler: Any = MetricsHandler.factory(registry)
    return LocalServer(family, address, lambda client, peer: handler(client, peer, None))
