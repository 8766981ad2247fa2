"""Logs the what-if estimate of a serving engine, whose manager no other process can ask."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvcache.background import Background

if TYPE_CHECKING:
    from kvcache.control.cpu import CPUOffloadingManager
    from kvcache.tiering.manager import TieredOffloadingManager

INTERVAL_S = 600.0
_LOG = logging.getLogger(__name__)


class WhatIfLog:
    """Log a manager's `what_if` estimate every ten minutes, if requests have finished, and at the end.

    The estimate runs in a thread. The scheduler waits for the GIL only, a few milliseconds at a time.
    """

    def __init__(self, manager: CPUOffloadingManager | TieredOffloadingManager, interval_s: float = INTERVAL_S) -> None:
        self._manager = manager
        self._last = ""
        self._thread = Background.every(interval_s, "what-if", self._write)

    def _write(self) -> None:
        found = self._manager.what_if()
        text = str(found)
        if found.requests and text != self._last:
            self._last = text
            _LOG.info("kvcache what-if:\n%s", text)

    def close(self) -> None:
        """Log once more and end the thread."""
        self._thread.stop(None)
