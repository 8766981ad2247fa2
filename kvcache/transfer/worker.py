"""Routes each job to the handler of its two media.

An engine's worker only needs job ids and specs, and no fault of a handler reaches it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvcache.core.histogram import Histogram
from kvcache.metrics import JOB_EXPONENTS, HistogramData, Part, TransferStats
from kvcache.specs import LoadStoreSpec, TransferResult
from kvcache.transfer.base import OffloadingHandler, TransferSpec, checked_pair

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tally:
    """Statistics of one direction."""

    jobs: int = 0
    failed_jobs: int = 0
    moved_bytes: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(1e-9, *JOB_EXPONENTS))
    sizes: Histogram = field(default_factory=lambda: Histogram(1.0, *JOB_EXPONENTS))

    def stats(self) -> TransferStats:
        histograms = (HistogramData(*histogram.data()) for histogram in (self.durations, self.sizes))
        return TransferStats(self.jobs, self.failed_jobs, self.moved_bytes, *histograms)


class OffloadingWorker:
    """Route jobs to handlers by source and destination medium.

    Notes
    -----
    The exception of a handler is logged; it affects neither the engine's thread nor the jobs of other handlers. Its own
    jobs stay in flight until it reports them, because their memory may still be in use.
    """

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], OffloadingHandler] = {}
        self._finished: list[TransferResult] = []
        self._tallies: defaultdict[tuple[str, str], _Tally] = defaultdict(_Tally)
        self._failing: set[int] = set()

    def register_handler(
        self, src_type: type[LoadStoreSpec], dst_type: type[LoadStoreSpec], handler: OffloadingHandler
    ) -> None:
        """Register the handler of the jobs from the medium of `src_type` to that of `dst_type`, classes of specs.

        `handler` is shut down with the worker. ValueError: the two media have a handler already.
        """
        kind = (src_type.medium(), dst_type.medium())
        if kind in self._handlers:
            raise ValueError(f"transfers {kind[0]} -> {kind[1]} have a handler already")
        self._handlers[kind] = handler

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job on the handler of its media; see `OffloadingHandler.transfer_async`.

        Raises
        ------
        ValueError
            No handler moves blocks between these media, or the handler refuses the job.
        """
        source, destination = checked_pair(spec)
        kind = (source.medium(), destination.medium())
        handler = self._handlers.get(kind)
        if handler is None:
            known = ", ".join(f"{src} -> {dst}" for src, dst in self._handlers) or "none"
            raise ValueError(f"no handler for transfers {kind[0]} -> {kind[1]}, known ones: {known}")
        try:
            return handler.transfer_async(job_id, spec)
        except ValueError:
            raise
        except Exception:
            # A fault of a third party's handler must not end the engine: the job has failed.
            _log.exception("transfer %s -> %s of job %s could not be started", *kind, job_id)
            self._finished.append(TransferResult(job_id, False, 0, 0.0, kind))
            return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call; those of one direction in the order of submission."""
        for handler in self._unique():
            try:
                # A generator may raise after it has yielded results: `extend` keeps these.
                self._finished.extend(handler.get_finished())
                self._failing.discard(id(handler))
            except Exception:
                # An engine polls at every step: log only the first error of a series.
                if id(handler) not in self._failing:
                    self._failing.add(id(handler))
                    _log.exception("%s did not return its finished jobs", type(handler).__name__)
        finished, self._finished = self._finished, []
        for result in finished:
            _attempt("a finished job was not counted", self._count, result)
        return finished

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return once the jobs `job_ids` have ended, as far as their handlers can wait; unknown ids are passed over."""
        job_ids = list(job_ids)
        for handler in self._unique():
            complaint = f"{type(handler).__name__} did not wait: its jobs may still be in flight"
            _attempt(complaint, handler.wait, job_ids)

    def shutdown(self, wait: bool = True) -> None:
        """Shut every handler down; see `OffloadingHandler.shutdown`."""
        for handler in self._unique():
            _attempt(f"{type(handler).__name__} did not shut down", handler.shutdown, wait)

    def parts(self) -> list[Part]:
        """Return the statistics by direction; a source of `Telemetry`, callable in any thread."""
        return [
            Part("transfer", tally.stats(), (("source", source), ("destination", destination)))
            for (source, destination), tally in list(self._tallies.items())
        ]

    def _count(self, result: TransferResult) -> None:
        tally = self._tallies[result.transfer_type]
        tally.jobs += 1
        if not result.success:
            tally.failed_jobs += 1
            return
        tally.moved_bytes += result.transfer_size
        tally.durations.observe(result.transfer_time)
        tally.sizes.observe(result.transfer_size)

    def _unique(self) -> list[OffloadingHandler]:
        return list({id(handler): handler for handler in self._handlers.values()}.values())


def _attempt(complaint: str, call: Callable[..., None], *arguments: object) -> None:
    """Call, and log an exception with a complaint."""
    try:
        call(*arguments)
    except Exception:
        _log.exception("%s", complaint)
