"""Rate-limited warnings: at most one a minute for each cause."""

from __future__ import annotations

import logging
import time
from threading import Lock

_INTERVAL_S = 60.0


class LogLimiter:
    """Logs the first warning of a cause, then at most one a minute with the number of those left out. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last_s: dict[str, float] = {}
        self._num_held_back: dict[str, int] = {}
        self._lock = Lock()

    def warn(self, cause: str, message: str, *args: object) -> None:
        """Log a warning, unless the last one of this cause is less than a minute old."""
        now_s = time.monotonic()
        with self._lock:
            last_s = self._last_s.get(cause)
            if last_s is not None and now_s - last_s < _INTERVAL_S:
                self._num_held_back[cause] = self._num_held_back.get(cause, 0) + 1
                return
            self._last_s[cause] = now_s
            num_held_back = self._num_held_back.pop(cause, 0)
        if num_held_back:
            message += f" (and {num_held_back} more since the last warning)"
        self._logger.warning(message, *args)
