"""Prometheus: everything that is counted, under Prometheus' conventions, as a collector over snapshots.

The scheduler's thread has no part in a scrape: a thread of the exporter's takes a snapshot and writes it out. Mount
the collector in a registry of one's own, or let `start_server` serve it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import start_wsgi_server
from prometheus_client.registry import Collector

from kvcache.control.telemetry import Exporter
from kvcache.metrics import HistogramData, Sample
from kvcache.options import OptionTable, count_from, parse_text

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kvcache.control.telemetry import Telemetry

PREFIX = "kvcache_"
DEFAULT_PORT = 9464
CLIENT_TIMEOUT_S = 5.0
_OPTIONS = OptionTable({"host": parse_text, "port": count_from(0)})
_CLOSE_S = 2.0


class TelemetryCollector(Collector):
    """A collector for a registry of `prometheus_client`.

    Parameters
    ----------
    telemetry : Telemetry
        Its labels, such as engine, rank and policy, are labels of every sample.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is depends on the engine, and is found by `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each metric, with a sample for each component."""
        snapshot = self.telemetry.snapshot()
        families: dict[str, list[Sample]] = {}
        for sample in snapshot.samples():
            families.setdefault(sample.name, []).append(sample)
        for name, samples in families.items():
            yield _family(PREFIX + name, samples, dict(snapshot.labels))


def _family(name: str, samples: list[Sample], common: dict[str, str]) -> Metric:
    names = [*common, *dict(samples[0].labels)]
    values = [[*common.values(), *dict(one.labels).values()] for one in samples]
    if samples[0].kind == "histogram":
        histogram = HistogramMetricFamily(name, samples[0].help, labels=names)
        for labels, one in zip(values, samples, strict=True):
            if isinstance(one.value, HistogramData):
                histogram.add_metric(labels, buckets=_buckets(one.value), sum_value=one.value.sum)
        return histogram
    make = CounterMetricFamily if samples[0].kind == "counter" else GaugeMetricFamily
    family = make(name, samples[0].help, labels=names)
    for labels, one in zip(values, samples, strict=True):
        if not isinstance(one.value, HistogramData):
            family.add_metric(labels, one.value)
    return family


def _buckets(data: HistogramData) -> list[tuple[str, float]]:
    """Return cumulative counts by bound, as text that is the same at every scrape."""
    total = 0
    buckets = []
    for bound, count in zip((*data.bounds, float("inf")), data.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:.9g}", total))
    return [(bound, float(count)) for bound, count in buckets]


class PrometheusExporter(Exporter):
    """Serve ``/metrics`` over HTTP.

    Parameters
    ----------
    telemetry : Telemetry
        What is served.
    port : int
        TCP port; 0: any free one. Engines of one machine need one each.
    host : str
        Address to listen on; by default this machine alone: there is no authentication.

    Raises
    ------
    ValueError
        The port is out of range.
    OSError
        The port is in use, or the address is not this machine's.
    """

    def __init__(self, telemetry: Telemetry, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> None:
        if type(port) is not int or not 0 <= port < 1 << 16:
            raise ValueError(f"port must be an int in 0..65535, got {port!r}")
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(TelemetryCollector(telemetry))
        _check_free(host, port)
        try:
            self._server, self._thread = start_wsgi_server(port, host, self.registry)
        except OSError as error:
            raise OSError(error.errno, f"{host}:{port} cannot be opened: {error.strerror or error}") from error
        _drop_idle_clients(self._server)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._is_closed = False

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        port = _OPTIONS.read_all("exporter 'prometheus'", options).get("port", 0)
        if port >= 1 << 16:
            raise ValueError(f"port in exporter 'prometheus' must be < 65536, got {port}")

    @classmethod
    def unavailable_reason(cls, options: Mapping[str, Any]) -> str:
        found = _OPTIONS.read("exporter 'prometheus'", options)
        try:
            _check_free(found.get("host", "127.0.0.1"), found.get("port", DEFAULT_PORT))
        except OSError as error:
            return str(error)
        return ""

    @classmethod
    def from_config(cls, options: Mapping[str, Any], telemetry: Telemetry) -> PrometheusExporter:
        cls.check_options(options)
        found = _OPTIONS.read("exporter 'prometheus'", options)
        port = found.pop("port", DEFAULT_PORT)
        rank = telemetry.labels.get("rank", "0")
        # Data-parallel ranks of one configuration follow one another.
        return cls(telemetry, port + int(rank) if port and rank.isdigit() else port, **found)

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._owner != os.getpid():
            return  # a child that was forked has no thread that would answer
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_S)


def start_server(telemetry: Telemetry, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> PrometheusExporter:
    """Serve ``/metrics`` of an engine; close what this returns, or let ``telemetry.close()`` do so.

    Parameters
    ----------
    telemetry : Telemetry
        What is served.
    port : int
        TCP port; 0: any free one.
    host : str
        Address to listen on.

    Returns
    -------
    PrometheusExporter
        Its `address` is the URL.

    Raises
    ------
    ValueError
        The port is out of range.
    OSError
        The port is in use.
    """
    exporter = PrometheusExporter(telemetry, port, host)
    telemetry.exporters.append(exporter)
    return exporter


def _check_free(host: str, port: int) -> None:
    # The server's own SO_REUSEADDR says nothing of somebody who listens.
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(error.errno, f"{host}:{port} cannot be opened: {error.strerror}") from error


def _drop_idle_clients(server: WSGIServer) -> None:
    """Let a client that stands still cost a thread for seconds only."""
    handler: Any = server.RequestHandlerClass

    class Handler(handler):  # type: ignore[misc]
        timeout = CLIENT_TIMEOUT_S

    server.RequestHandlerClass = Handler
