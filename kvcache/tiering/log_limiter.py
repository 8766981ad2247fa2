"""Warnings of what may happen thousands of times a second, at most one a minute for each cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock


class LogLimiter:
    """Log the first warning of a cause, and then at most one per interval that counts those left out.

    Notes
    -----
    Thread-safe. Causes are few and fixed: each is remembered.
    """

    def __init__(
        self, logger: logging.Logger, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._last_s: dict[str, float] = {}
        self._num_held_back: dict[str, int] = {}
        self._lock = Lock()

    def warn(self, cause: str, message: str, *args: object) -> None:
        """Log a warning, unless the cause had one less than an interval ago."""
        now_s = self._clock()
        with self._lock:
            last_s = self._last_s.get(cause)
            if last_s is not None and now_s - last_s < self._interval_s:
                self._num_held_back[cause] = self._num_held_back.get(cause, 0) + 1
                return
            self._last_s[cause] = now_s
            num_held_back = self._num_held_back.pop(cause, 0)
        if num_held_back:
            message += f" (and {num_held_back} more since the last warning)"
        self._logger.warning(message, *args)
