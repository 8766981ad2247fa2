"""Prometheus: all counters and gauges, under Prometheus' conventions, as a collector over snapshots.

A thread of the exporter takes a snapshot and writes it out; the scheduler's thread has no part in a scrape. Register
the collector in your own registry, or serve it with `start_server`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("/metrics needs the package prometheus-client: install kvcache's extra 'prometheus'") from error

from kvcache.control.telemetry import Exporter
from kvcache.metrics import HistogramData, Sample
from kvcache.options import Options, check_int, option, parse_count, parse_text

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kvcache.control.telemetry import Telemetry

_LOG = logging.getLogger(__name__)
PREFIX = "kvcache_"
DEFAULT_PORT = 9464
CLIENT_TIMEOUT_S = 5.0
"""How long a client may send nothing."""
REQUEST_S = 15.0
"""How long one request may take."""
MAX_CLIENTS = 32
"""Open connections. A new one beyond them closes the oldest one."""
_CLOSE_S = 2.0


def _parse_port(name: str, value: object) -> int:
    return check_int(name, parse_count(name, value, 0), 0, (1 << 16) - 1)


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

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics depend on the engine; `collect` finds them."""
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
        The engine.
    port : int
        TCP port; 0: any free one. Engines of one machine need one each.
    host : str
        Address to listen on. The default is reachable from this machine only: there is no authentication.

    Raises
    ------
    ValueError
        The port is out of range.
    OSError
        The port is in use, or the address is not this machine's.
    """

    def __init__(self, telemetry: Telemetry, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> None:
        check_int("port", port, 0, (1 << 16) - 1)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(TelemetryCollector(telemetry))
        _check_free(host, port)
        family, address = _resolve(host, port)
        try:
            self._server = type("Server", (_Server,), {"address_family": family})(address[:2], _Handler)
        except OSError as error:
            raise OSError(error.errno, f"{host}:{port} cannot be opened: {error.strerror or error}") from error
        self._server.set_app(_one_by_one(make_wsgi_app(self.registry)))
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvcache-prometheus", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._is_closed = False
        _EXPORTERS.add(self)

    options_type = PrometheusOptions

    @classmethod
    def unavailable_reason(cls, options: Mapping[str, Any]) -> str:
        found = PrometheusOptions.read(options)
        try:
            _check_free(found.host, found.port)
        except OSError as error:
            return str(error)
        return ""

    @classmethod
    def from_config(cls, options: Mapping[str, Any], telemetry: Telemetry) -> PrometheusExporter:
        found = PrometheusOptions.read(options)
        rank = telemetry.labels.get("rank", "0")
        # Data-parallel ranks of one configuration follow one another.
        return cls(telemetry, found.port + int(rank) if found.port and rank.isdigit() else found.port, found.host)

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
            return  # a forked child has no such thread
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_S)

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, which must not keep the port after its engine has ended."""
        self._server.socket.close()


def start_server(telemetry: Telemetry, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> PrometheusExporter:
    """Serve ``/metrics`` of an engine; close what this returns, or let ``telemetry.close()`` do so.

    Parameters
    ----------
    telemetry : Telemetry
        The engine.
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
    # With SO_REUSEADDR, bind can succeed while another process listens; probe first.
    family, address = _resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(error.errno, f"{host}:{port} cannot be opened: {error.strerror}") from error


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, address


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each of a few clients; a new client beyond them closes the oldest connection."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._since_s: dict[socket.socket, float] = {}
        self._clients = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without resolving the host's full name, which may take seconds."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._clients:
            self._since_s[request] = time.monotonic()
            num_beyond = len(self._since_s) - MAX_CLIENTS
            self._drop([*self._since_s][: max(0, num_beyond)])
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._clients:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections whose request takes too long; called twice a second."""
        with self._clients:
            end_s = time.monotonic() - REQUEST_S
            self._drop([client for client, since_s in self._since_s.items() if since_s < end_s])

    def _drop(self, clients: list[socket.socket]) -> None:
        for client in clients:
            del self._since_s[client]
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("a client of /metrics at %s was dropped", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(CLIENT_TIMEOUT_S)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


def _one_by_one(app: Callable[..., Any]) -> Callable[..., Any]:
    """Write one page at a time: more would compete with the scheduler for the interpreter's lock."""
    lock = threading.Lock()

    def paced(environ: dict[str, Any], start_response: Any) -> Any:
        with lock:
            return app(environ, start_response)

    return paced


_EXPORTERS: weakref.WeakSet[PrometheusExporter] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for exporter in [*_EXPORTERS]:
        exporter.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
