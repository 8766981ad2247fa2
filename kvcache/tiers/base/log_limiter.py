"""Rate-limited warnings: at most one a minute for each cause."""

from __future__ import annotations

import logging
import math
import time
from threading import Lock

_INTERVAL_S = 60.0


class LogLimiter:
    """Logs the first warning of a cause, then at most one a minute with the number of those left out. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        # When the last warning of a cause was logged, and how many were left out since then.
        self._logged: dict[str, tuple[float, int]] = {}
        self._lock = Lock()

    def warn(self, cause: str, message: str, *args: object) -> None:
        """Log a warning, unless the last one of this cause is less than a minute old."""
        now_s = time.monotonic()
        with self._lock:
            last_s, num_held_back = self._logged.get(cause, (-math.inf, 0))
            if now_s - last_s < _INTERVAL_S:
                self._logged[cause] = last_s, num_held_back + 1
                return
            self._logged[cause] = now_s, 0
        if num_held_back:
            message += f" (and {num_held_back} more since the last warning)"
        self._logger.warning(message, *args)
