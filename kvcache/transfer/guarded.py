"""A handler that takes no job before a condition holds, for host blocks that another process must share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvcache.transfer.base import OffloadingHandler

if TYPE_CHECKING:
    from kvcache.specs import TransferResult
    from kvcache.transfer.base import TransferSpec

_LOG = logging.getLogger(__name__)


class GuardedHandler(OffloadingHandler):
    """Another handler, behind a condition that is asked until it has held once."""

    def __init__(self, handler: OffloadingHandler, may_start: Callable[[], bool], complaint: str) -> None:
        self._handler = handler
        self._may_start = may_start
        self._complaint = complaint
        self._has_started = False

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if not self._has_started:
            self._has_started = self._may_start()
        if not self._has_started:
            _LOG.error("job %d is not taken: %s", job_id, self._complaint)
            return False
        return self._handler.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        return self._handler.get_finished()

    def wait(self, job_ids: Iterable[int]) -> None:
        self._handler.wait(job_ids)

    def shutdown(self, wait: bool = True) -> None:
        self._handler.shutdown(wait)
