"""The Prometheus exporter: its output, its limits, and its behaviour with faulty clients."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcache import (
    CPULoadStoreSpec,
    CPUOffloadingManager,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TieredOffloadingManager,
    TransferResult,
)
from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.local_server import LocalServer
from kvcache.exporters.prometheus import PrometheusExporter, PrometheusOptions, TelemetryCollector, start_server
from kvcache.metrics import Part
from kvcache.tiers.memory import MemoryOptions, MemoryTier
from kvcache.transfer.worker import OffloadingWorker


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    host_blocks = np.zeros((8, 16), dtype=np.uint8)
    manager = TieredOffloadingManager(16, 8, [MemoryTier(MemoryOptions(8 * 16), host_blocks)], "arc", True)
    output = manager.prepare_store([b"a", b"b"])
    assert output is not None
    manager.complete_store(output.keys_to_store)
    assert manager.settle()
    telemetry = Telemetry(manager, block_bytes=4096, labels={"engine": "e", "rank": "2"}, time_calls=True)
    manager.lookup([b"a"])
    yield telemetry
    telemetry.close()
    manager.shutdown()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            assert {"engine": "e", "rank": "2", "policy": "arc"}.items() <= one.labels.items()
            labels = frozenset((name, value) for name, value in one.labels.items() if name not in ("engine", "rank"))
            found[one.name, labels - {("policy", "arc")}] = one.value
    return found


def test_names_and_labels_follow_conventions(telemetry: Telemetry) -> None:
    exporter = start_server(telemetry, 0)
    found = values(fetch(exporter.address))
    none: frozenset[tuple[str, str]] = frozenset()
    tier = frozenset({("tier", "0"), ("medium", "MEMORY")})
    assert found["kvcache_stored_blocks_total", none] == 2
    assert found["kvcache_stored_tokens_total", none] == 32
    assert found["kvcache_stored_bytes_total", none] == 8192
    assert found["kvcache_free_blocks", none] == 6
    assert found["kvcache_event_waiting", none] == 2
    assert found["kvcache_tier_held_blocks", tier] == 2
    assert found["kvcache_tier_written_bytes_total", tier] == 8192
    assert found["kvcache_tier_reads_breaker", tier | {("state", "closed")}] == 1
    assert found["kvcache_tier_reads_breaker", tier | {("state", "open")}] == 0
    call = frozenset({("call", "lookup")})
    assert found["kvcache_call_duration_seconds_count", call] == 1
    assert found["kvcache_call_duration_seconds_bucket", call | {("le", "+Inf")}] == 1
    assert found["kvcache_call_duration_seconds_sum", call] == pytest.approx(found["kvcache_call_worst_seconds", call])
    assert found["kvcache_tier_write_seconds_count", tier] == 1


def test_promtool_finds_nothing_to_complain_about(telemetry: Telemetry) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TelemetryCollector(telemetry))
    checked = subprocess.run([promtool, "check", "metrics"], input=generate_latest(registry), capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_collector_mounts_in_own_registry(telemetry: Telemetry) -> None:
    other = Telemetry(CPUOffloadingManager(16, 4), labels={"engine": "f"})
    texts = []
    for one in (telemetry, other):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(TelemetryCollector(one))
        texts.append(generate_latest(registry).decode())
    assert 'kvcache_capacity_blocks{engine="e",policy="arc",rank="2"} 8.0' in texts[0]
    assert 'kvcache_capacity_blocks{engine="f",policy="lru",rank="0"} 4.0' in texts[1]
    assert "kvcache_tier" not in texts[1]


class Copies(OffloadingHandler):
    """Ends each job at once, job 2 as failed."""

    def __init__(self) -> None:
        self.jobs: list[int] = []

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> bool:
        if job_id == 3:
            raise RuntimeError("a fault")
        self.jobs.append(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        jobs, self.jobs = self.jobs, []
        return [TransferResult(job, job != 2, 4096 * (job != 2), 0.25, ("GPU", "CPU")) for job in jobs]

    def wait(self, job_ids: object) -> None:
        pass


def test_transfers_are_reported_by_direction(caplog: pytest.LogCaptureFixture) -> None:
    worker = OffloadingWorker()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, Copies())
    spec = (GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0]))
    for job_id in (1, 2, 3):
        assert worker.transfer_async(job_id, spec)
    assert len(worker.get_finished()) == 3
    telemetry = Telemetry(None, labels={"engine": "e", "rank": "2", "policy": "arc"})
    telemetry.sources.append(worker.parts)
    exporter = PrometheusExporter.make(PrometheusOptions(port=0), telemetry)
    assert ":2/" not in exporter.address  # no port of rank 2, but any free one
    telemetry.exporters.append(exporter)
    found = values(fetch(exporter.address))
    way = frozenset({("source", "GPU"), ("destination", "CPU")})
    assert found["kvcache_transfer_jobs_total", way] == 3
    assert found["kvcache_transfer_failed_jobs_total", way] == 2
    assert found["kvcache_transfer_moved_bytes_total", way] == 4096
    assert found["kvcache_transfer_duration_seconds_sum", way] == pytest.approx(0.25)
    assert found["kvcache_transfer_size_bytes_bucket", way | {("le", "131072")}] == 1
    telemetry.close()


def test_port_in_use_is_clear_error(telemetry: Telemetry) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} cannot be opened: Address already in use"):
            start_server(telemetry, port)
    assert telemetry.exporters == []


@pytest.mark.parametrize("port", [-1, 65536, "9464", True, None])
def test_bad_port_is_refused(telemetry: Telemetry, port: object) -> None:
    with pytest.raises(ValueError, match="port must be an int"):
        PrometheusExporter(telemetry, port)  # type: ignore[arg-type]


def manager_with(port: int) -> Any:
    """Return the manager of rank 1 whose configuration names an exporter."""
    settings = OffloadSettings.parse({"num_cpu_blocks": 8, "exporters": [{"type": "prometheus", "port": port}]})
    return open_manager(settings, block_size=16, num_blocks=8, labels={"engine": "e", "rank": "1"})


def test_manager_opens_and_closes_its_exporter() -> None:
    manager = manager_with(0)
    address = manager.telemetry.exporters[0].address
    assert "kvcache_capacity_blocks" in fetch(address)
    manager.shutdown()
    with pytest.raises(OSError, match="refused"):
        fetch(address)


def test_exporter_failing_to_open_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_with(65535)
    assert manager.telemetry.exporters == []
    assert "port must be an int in 0..65535, got 65536" in caplog.text
    manager.shutdown()


class SlowSource:
    """A source of no parts that lets each snapshot wait until `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.started = threading.Semaphore(0)
        self.num_inside = self.most_inside = 0

    def __call__(self) -> list[Part]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        self.started.release()
        self.may_end.wait(60)
        self.num_inside -= 1
        return []


def test_slow_page_bounds_waiting_threads(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalServer, "wait_s", 0.0)
    source = SlowSource()
    telemetry.sources.append(source)
    exporter = start_server(telemetry, 0)
    host, port = exporter.address.removeprefix("http://").removesuffix("/metrics").split(":")
    clients = []
    for _ in range(64):
        clients.append(socket.create_connection((host, int(port)), timeout=60))
        clients[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert source.started.acquire(timeout=60)
    # The last clients find all threads busy, and are refused without an answer.
    with contextlib.suppress(ConnectionResetError):
        assert clients[-1].recv(1) == b""
    source.may_end.set()
    exporter.close()
    assert source.most_inside == 1
    for client in clients:
        client.close()


def test_page_formats_are_negotiated(telemetry: Telemetry) -> None:
    exporter = start_server(telemetry, 0)
    for accept, encoding in (("application/openmetrics-text; version=1.0.0", "gzip"), ("text/plain", "identity")):
        request = urllib.request.Request(exporter.address, headers={"Accept": accept, "Accept-Encoding": encoding})
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
            assert answer.headers["Content-Type"].startswith(accept.split(";")[0])
        text = (gzip.decompress(body) if encoding == "gzip" else body).decode()
        assert "kvcache_free_blocks{" in text
        assert text.endswith("# EOF\n") == (encoding == "gzip")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_close_in_forked_child_returns(telemetry: Telemetry) -> None:
    exporter = start_server(telemetry, 0)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        exporter.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "kvcache_" in fetch(exporter.address)
