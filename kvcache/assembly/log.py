"""KVCACHE_LOG: how much the library logs, where no logging is configured."""

from __future__ import annotations

import logging
import os

VARIABLE = "KVCACHE_LOG"
LEVELS = ("debug", "info", "warning", "error")


def set_up_log() -> None:
    """Set the level that the environment variable ``KVCACHE_LOG`` names, and write to standard error if nobody does.

    Notes
    -----
    Without the variable nothing changes. A word that is no level is warned of and ignored: no engine ends over it.
    """
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if not wanted:
        return
    logger = logging.getLogger("kvcache")
    if wanted not in LEVELS:
        logger.warning("%s must be one of %s, got %r", VARIABLE, ", ".join(LEVELS), wanted)
        return
    logger.setLevel(wanted.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
