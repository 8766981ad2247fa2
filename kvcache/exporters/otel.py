"""OpenTelemetry: a span for every promotion, write and copy that has ended, wherever a tracer provider sends them.

The engine's thread appends a line to a bounded log; spans are made from it in a thread of the exporter's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from kvcache.background import Background
from kvcache.control.telemetry import JobTracer
from kvcache.events import FinishedJob, JobLog
from kvcache.metrics import Part, counter
from kvcache.options import Options

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from kvcache.control.telemetry import Telemetry

_INTERVAL_S = 0.25


@dataclass(frozen=True)
class SpanOptions(Options):
    """A `SpanExporter` has no options."""

    where: ClassVar[str] = "exporter 'otel'"


@dataclass(frozen=True, slots=True)
class SpanStats:
    """What became of spans."""

    dropped_spans: int = counter("jobs", "Jobs that no span was made of, because too many ended at a time.")


class SpanExporter(JobTracer):
    """Make spans of the jobs of an engine's tiers, or of a worker's copies.

    Parameters
    ----------
    telemetry : Telemetry
        Of the engine: its manager's jobs are traced where it has tiers.
    provider : opentelemetry.trace.TracerProvider, optional
        Makes the tracer; left out: the one that the process has set.

    Attributes
    ----------
    job_log : JobLog
        Where jobs are taken from; a configured spec sets a worker's to it (`OffloadingSpec.trace_worker`).

    Notes
    -----
    Spans are called ``kvcache.promotion``, ``kvcache.write`` and ``kvcache.transfer``, and have the attributes
    ``kvcache.medium``, ``kvcache.blocks``, ``kvcache.bytes`` and the telemetry's labels.
    """

    def __init__(self, telemetry: Telemetry, provider: TracerProvider | None = None) -> None:
        self.job_log = JobLog()
        self._telemetry = telemetry
        self._tracer = trace.get_tracer("kvcache", tracer_provider=provider)
        self._labels = {f"kvcache.{name}": value for name, value in telemetry.labels.items()}
        manager: Any = telemetry.manager
        self._manager = manager
        if getattr(self._manager, "job_log", self) is None:
            self._manager.job_log = self.job_log
        telemetry.sources.append(self._parts)
        self._thread = Background.every(_INTERVAL_S, "otel", self._flush)

    options_type = SpanOptions

    @property
    def address(self) -> str:
        return "the process's tracer provider"

    def close(self) -> None:
        if self._thread.stopping.is_set():
            return
        if getattr(self._manager, "job_log", None) is self.job_log:
            self._manager.job_log = None
        self._thread.stop()
        self._telemetry.sources.remove(self._parts)

    def _parts(self) -> Iterable[Part]:
        return [Part("otel", SpanStats(self.job_log.num_dropped))]

    def _flush(self) -> None:
        for job in self.job_log.take():
            self._export(job)

    def _export(self, job: FinishedJob) -> None:
        end_ns = int(job.end_s * 1e9)
        span = self._tracer.start_span(
            f"kvcache.{job.name}",
            start_time=end_ns - int(job.seconds * 1e9),
            attributes={
                **self._labels,
                "kvcache.medium": job.medium,
                "kvcache.blocks": job.num_blocks,
                "kvcache.bytes": job.num_bytes,
            },
        )
        if job.error:
            span.set_status(Status(StatusCode.ERROR, job.error))
        span.end(end_time=end_ns)
