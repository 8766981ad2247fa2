"""Retention hints: what a request says of how long its blocks deserve to stay.

A hint comes with the context, or through the engine in `kv_transfer_params["kvcache"]`, where a client may have written
anything: what is no hint is ignored and counted, never raised in the engine's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvcache.types import Retention

if TYPE_CHECKING:
    from kvcache.types import ReqContext

_logger = logging.getLogger(__name__)


class HintReader:
    """Read the hints of one manager's requests, and count those that are none."""

    def __init__(self) -> None:
        self.num_ignored = 0

    def of(self, req_context: ReqContext) -> Retention | None:
        """Return the request's hint, or None."""
        retention = req_context.retention
        if retention is not None:
            if not isinstance(retention, Retention):
                raise ValueError(f"retention must be a Retention or None, got {retention!r}")
            return retention
        params: Any = req_context.kv_transfer_params
        if not isinstance(params, dict) or "kvcache" not in params:
            return None
        try:
            return Retention(**params["kvcache"])
        except (TypeError, ValueError) as error:
            if self.num_ignored == 0:
                _logger.warning("ignoring the retention hint %.200r: %.200s", params["kvcache"], error)
            self.num_ignored += 1
            return None
