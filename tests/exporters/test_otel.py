"""Spans of promotions, writes and copies."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export import SpanExporter as Sender
from opentelemetry.trace import StatusCode

from kvcache import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    CPUOffloadingManager,
    CPUOffloadingSpec,
    GPULoadStoreSpec,
    OffloadingConfig,
    OffloadingGroup,
    OffloadingWorker,
    TieredOffloadingManager,
)
from kvcache.control.telemetry import Telemetry
from kvcache.events import FinishedJob, JobLog
from kvcache.exporters.otel import SpanExporter
from kvcache.tiers.memory import MemoryTier


class Collected(Sender):
    """Keeps exported spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


@pytest.fixture
def collected() -> Collected:
    return Collected()


@pytest.fixture
def provider(collected: Collected) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(collected))
    return provider


def test_write_and_promotion_are_spans(provider: TracerProvider, collected: Collected) -> None:
    manager = TieredOffloadingManager(16, 4, [MemoryTier(16, np.zeros((4, 16), dtype=np.uint8))])
    telemetry = Telemetry(manager, labels={"engine": "e"})
    exporter = SpanExporter(telemetry, provider)
    before_ns = time.time_ns()
    for number in range(2):
        output = manager.prepare_store([b"%d.%d" % (number, i) for i in range(4)])
        assert output is not None
        manager.complete_store(output.keys_to_store)
        assert manager.settle()
    assert manager.lookup([b"0.0", b"0.1"]) is None
    assert manager.settle()
    exporter.close()
    exporter.close()
    blocks = Counter[str]()
    for span in collected.spans:
        attributes = dict(span.attributes or {})
        count = attributes.pop("kvcache.blocks")
        assert isinstance(count, int)
        blocks[span.name] += count
        assert attributes == {
            "kvcache.engine": "e",
            "kvcache.rank": "0",
            "kvcache.policy": "lru",
            "kvcache.medium": "MEMORY",
            "kvcache.bytes": 0,
        }
    assert blocks == {"kvcache.write": 8, "kvcache.promotion": 2}
    for span in collected.spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert before_ns - 10**9 <= span.start_time <= span.end_time <= time.time_ns()
    assert manager.job_log is None
    manager.shutdown()


def test_failed_job_is_span_with_error(provider: TracerProvider, collected: Collected) -> None:
    exporter = SpanExporter(Telemetry(None), provider)
    exporter.job_log.add(FinishedJob("transfer", "GPU -> CPU", 0, 4096, 100.0, 0.5, "the copy failed"))
    exporter.close()
    (span,) = collected.spans
    assert (span.name, span.start_time, span.end_time) == ("kvcache.transfer", 99_500_000_000, 100_000_000_000)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the copy failed")


def test_spans_beyond_queue_are_counted(provider: TracerProvider) -> None:
    log = JobLog(2)
    for _ in range(5):
        log.add(FinishedJob("write", "DISK", 1, 0, 1.0, 0.1))
    assert (len(list(log.take())), log.num_dropped) == (2, 3)
    telemetry = Telemetry(CPUOffloadingManager(16, 4))
    exporter = SpanExporter(telemetry, provider)
    exporter.job_log.num_dropped = 3
    assert [one.value for one in telemetry.snapshot().samples() if one.name == "otel_dropped_spans"] == [3]
    exporter.close()


def test_configured_worker_traces_until_shutdown(
    provider: TracerProvider, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.exporters.otel.trace.get_tracer", lambda name, **_: provider.get_tracer(name))
    kv_caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros((4, 64), dtype=torch.int8), 64)], [[CanonicalKVCacheRef(0, 64)]]
    )
    for exporters, num_spans in (([], 0), (["otel"], 2)):
        options = {"num_cpu_blocks": 4, "exporters": exporters}
        spec = CPUOffloadingSpec(OffloadingConfig((OffloadingGroup(16),), 16, extra_config=options))
        worker = OffloadingWorker()
        for source, destination, handler in spec.get_handlers(kv_caches):
            worker.register_handler(source, destination, handler)
        spec.trace_worker(worker, {"engine": "e"})
        on_device, on_host = GPULoadStoreSpec([1, 2], [2], [0]), CPULoadStoreSpec([0, 1])
        worker.transfer_async(1, (on_device, on_host))
        worker.wait([1])
        worker.transfer_async(2, (on_host, on_device))
        worker.wait([2])
        assert len(list(worker.get_finished())) == 2
        worker.shutdown()
        assert [span.name for span in collected.spans] == ["kvcache.transfer"] * num_spans
    found = [dict(span.attributes or {}) for span in collected.spans]
    assert [(one["kvcache.medium"], one["kvcache.bytes"], one["kvcache.engine"]) for one in found] == [
        ("GPU -> CPU", 128, "e"),
        ("CPU -> GPU", 128, "e"),
    ]
    assert worker.closers == []
    assert not [thread for thread in threading.enumerate() if thread.name == "kvcache-otel"]
