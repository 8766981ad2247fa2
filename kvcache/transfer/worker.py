"""The worker's switchboard: it hands a job to the handler of its two media.

An engine's worker then knows job ids and specs only, whatever media are configured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack

from kvcache.specs import LoadStoreSpec, TransferResult
from kvcache.transfer.base import OffloadingHandler, TransferSpec, checked_pair

_log = logging.getLogger(__name__)


class OffloadingWorker:
    """Routes jobs to handlers by source and destination medium."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], OffloadingHandler] = {}
        self._ended: list[TransferResult] = []

    def register_handler(
        self, src_type: type[LoadStoreSpec], dst_type: type[LoadStoreSpec], handler: OffloadingHandler
    ) -> None:
        """Give the jobs from one medium to another to a handler.

        Parameters
        ----------
        src_type, dst_type : type
            The specs' classes, whose `medium` counts.
        handler : OffloadingHandler
            Takes these jobs from now on; shut down with the worker.

        Raises
        ------
        ValueError
            The two media have a handler already.
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
            # A third party's handler must not end the engine: what it could not start has failed.
            _log.exception("transfer %s -> %s of job %s could not be started", *kind, job_id)
            self._ended.append(TransferResult(job_id, False, 0, 0.0, kind))
            return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, those of one direction in the order of submission."""
        for handler in self._unique():
            # Kept before the next handler is asked: what one that raises does not lose.
            self._ended += handler.get_finished()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return once these jobs have ended; unknown ids are passed over."""
        job_ids = list(job_ids)
        for handler in self._unique():
            handler.wait(job_ids)

    def shutdown(self, wait: bool = True) -> None:
        """Shut every handler down; see `OffloadingHandler.shutdown`."""
        with ExitStack() as stack:
            for handler in reversed(self._unique()):
                stack.callback(handler.shutdown, wait)

    def _unique(self) -> list[OffloadingHandler]:
        return list(dict.fromkeys(self._handlers.values()))
