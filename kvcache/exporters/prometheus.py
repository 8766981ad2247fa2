"""Prometheus: all counters and gauges, under Prometheus' conventions, as a collector over snapshots.

A thread of the exporter takes a snapshot and writes a page; the scheduler's thread has no part in a scrape. One page is
made at a time, and meanwhile other clients get the last one. Register the collector in your own registry, or serve it
with `start_server`.
"""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import Collector

from kvcache.control.telemetry import Exporter
from kvcache.exporters.local_server import LocalServer
from kvcache.metrics import HistogramData, Sample
from kvcache.options import Options, check_int, option, parse_count, parse_text

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kvcache.control.telemetry import Telemetry

PREFIX = "kvcache_"
DEFAULT_PORT = 9464
_MAX_PORT = (1 << 16) - 1
_MAX_FORMATS = 4
_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily
}  # fmt: skip


def _parse_port(name: str, value: object) -> int:
    return check_int(name, parse_count(name, value, 0), 0, _MAX_PORT)


@dataclass(frozen=True)
class PrometheusOptions(Options):
    """The options of a `PrometheusExporter`."""

    where: ClassVar[str] = "exporter 'prometheus'"

    port: int = option(_parse_port, DEFAULT_PORT, when="the port is in use; 0: any free port")
    host: str = option(parse_text, "127.0.0.1", when="Prometheus runs on another machine; there is no authentication")


class TelemetryCollector(Collector):
    """A collector for a registry of `prometheus_client`.

    Parameters
    ----------
    telemetry : Telemetry
        Its labels, such as engine, rank and policy, are labels of every sample.
    """

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
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def close(self) -> None:
        self._server.stop()


def start_server(telemetry: Telemetry, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> PrometheusExporter:
    """Serve ``/metrics`` of an engine; close the returned exporter, or let ``telemetry.close()`` close it.

    The parameters and errors are those of `PrometheusExporter`.

    Returns
    -------
    PrometheusExporter
        Its `address` is the URL.
    """
    exporter = PrometheusExporter(telemetry, port, host)
    telemetry.exporters.append(exporter)
    return exporter


class _Server(LocalServer):
    """Makes pages, one at a time: more would compete with the scheduler for the interpreter's lock."""

    def __init__(self, family: socket.AddressFamily, address: Any, registry: CollectorRegistry) -> None:
        super().__init__(family, address, _Handler)
        self._registry = registry
        self._making = threading.Lock()
        self._pages: dict[tuple[str, bool], bytes] = {}

    def page(self, accept: str, accept_encoding: str) -> tuple[dict[str, str], bytes]:
        """Return headers and body: a new page, or while one is being made, the last one.

        A client of the first page waits. OSError: the server stops.
        """
        encoder, content_type = choose_encoder(accept)
        is_packed = gzip_accepted(accept_encoding)
        headers = {"Content-Type": content_type, **({"Content-Encoding": "gzip"} if is_packed else {})}
        last_page = self._pages.get((content_type, is_packed))
        if not self._making.acquire(blocking=last_page is None) and last_page is not None:
            return headers, last_page
        try:
            if self.is_stopping:
                raise ConnectionAbortedError("the server stops")
            if last_page is None and (page := self._pages.get((content_type, is_packed))):
                return headers, page  # it was made while this client waited
            text = encoder(self._registry)
            page = gzip.compress(text) if is_packed else text
            if len(self._pages) >= _MAX_FORMATS:  # clients choose the text of a format's name
                self._pages.clear()
            self._pages[content_type, is_packed] = page
            return headers, page
        finally:
            self._making.release()


class _Handler(MetricsHandler):
    server: _Server

    def do_GET(self) -> None:  # noqa: N802
        headers, page = self.server.page(self.headers.get("Accept", ""), self.headers.get("Accept-Encoding", ""))
        self.send_response(200)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(page)


def _listen(host: str, port: int, registry: CollectorRegistry) -> _Server:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return _Server(family, address, registry)
