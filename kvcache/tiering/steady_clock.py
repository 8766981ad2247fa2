"""SteadyClock: the manager's clock, which deadlines can rely on whatever the caller's clock does."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from kvcache.tiers.base.log_limiter import LogLimiter

_LOG = logging.getLogger(__name__)


class SteadyClock:
    """A clock that never raises or goes back, over a clock that may; without it, the system's clock is used."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = -math.inf
        self._last_true_s = time.monotonic()
        self._warnings = LogLimiter(_LOG)

    def __call__(self) -> float:
        try:
            now_s = float(self._clock())
            if not math.isfinite(now_s):
                raise ValueError(f"{now_s!r} s")
        except Exception as error:
            self._warnings.warn("clock", "the clock failed, deadlines go by the system's: %s: %s", type(error), error)
            passed_s = time.monotonic() - self._last_true_s
            return passed_s if self._last_s == -math.inf else self._last_s + passed_s
        self._last_s = max(self._last_s, now_s)
        self._last_true_s = time.monotonic()
        return self._last_s
