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


def log_what_if(manager: CPUOffloadingManager | TieredOffloadingManager, interval_s: float = INTERVAL_S) -> Background:
    """Log a manager's `what_if` estimate every ten minutes, if requests have finished, and at the end of the thread.

    The scheduler waits for the GIL only, a few milliseconds at a time.
    """
    last = ""

    def write() -> None:
        nonlocal last
        estimate = manager.what_if()
        text = str(estimate)
        if estimate.requests and text != last:
            last = text
            _LOG.info("kvcache what-if:\n%s", text)

    return Background.every(interval_s, "what-if", write)
