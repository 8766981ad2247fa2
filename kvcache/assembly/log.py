"""The environment variable KVCACHE_LOG: the level of the library's log if the program configures no logging."""

from __future__ import annotations

import logging
import os

VARIABLE = "KVCACHE_LOG"
LEVELS = ("debug", "info", "warning", "error")


def set_up_log() -> None:
    """Set the level that ``KVCACHE_LOG`` names; log to standard error if no handler is configured.

    An invalid level is warned about and ignored. Without the variable nothing changes.
    """
    level = os.environ.get(VARIABLE, "").strip().lower()
    if not level:
        return
    logger = logging.getLogger("kvcache")
    if level not in LEVELS:
        logger.warning("%s must be one of %s, got %r", VARIABLE, ", ".join(LEVELS), level)
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
