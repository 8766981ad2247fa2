"""Direction: the loads or the stores of a tier, with a circuit breaker that pauses them after failures.

`Faults` calls a tier and counts its faults, so that no exception reaches the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvcache.core.histogram import Histogram
from kvcache.metrics import JOB_EXPONENTS
from kvcache.tiers.base.log_limiter import LogLimiter

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

BREAKER_STATES = ("closed", "open", "half_open")
"""Values of `Direction.state`."""


class Direction:
    """Counts the blocks of one direction, and decides whether a job may be sent.

    `max_failures` in a row open the breaker for `pause_s`. Closed: jobs are sent. Open: no jobs are sent. Half open:
    the pause is over and one job is under way.
    """

    def __init__(self, name: str, max_blocks: int, max_failures: int, pause_s: float) -> None:
        self.name = name
        self.max_blocks = max_blocks
        self.num_blocks = self.num_moved = 0
        self.seconds = Histogram(1e-9, *JOB_EXPONENTS)
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._open_until_s: float | None = None
        self._is_trying = False

    @property
    def state(self) -> str:
        """``"closed"``, ``"open"`` or ``"half_open"``."""
        if self._open_until_s is None:
            return "closed"
        return "half_open" if self._is_trying else "open"

    @property
    def is_healthy(self) -> bool:
        """Whether the last job succeeded, or no job has ended yet."""
        return self._open_until_s is None and not self._num_failures

    def allows(self, now_s: float) -> bool:
        """Return whether a job may be sent."""
        return self._open_until_s is None or (now_s >= self._open_until_s and not self._is_trying)

    def record_sent(self) -> None:
        """Record that a job was sent."""
        self._is_trying = self._open_until_s is not None

    def record_success(self) -> None:
        """Record that a job succeeded, and close."""
        self._num_failures = 0
        self._open_until_s = None
        self._is_trying = False

    def record_failure(self, now_s: float, at_once: bool = False) -> bool:
        """Record that a job failed; `at_once` opens without counting. Return whether this opened a closed breaker."""
        self._num_failures += 1
        if not (at_once or self._is_trying or self._num_failures >= self._max_failures):
            return False
        was_closed = self._open_until_s is None
        self._open_until_s = now_s + self._pause_s
        self._is_trying = False
        return was_closed


class Faults:
    """Calls a tier, which may be third-party code; counts and logs what fails."""

    def __init__(self, medium: str) -> None:
        self.num_failed = 0
        self.last_error = ""
        self._medium = medium
        self._warnings = LogLimiter(_LOG)

    def call(self, operation: str, otherwise: T, method: Callable[..., Any], *args: Any) -> T:
        """Return what `method` returns, and `otherwise` if it raises."""
        try:
            answer: T = method(*args)
            return answer
        except Exception as error:
            self.note(operation, f"raised, which a tier must not do: {type(error).__name__}: {error}")
            return otherwise

    def note(self, operation: str, fault: str) -> None:
        """Count a fault of the tier's code."""
        self.num_failed += 1
        self.last_error = f"{operation} {fault}"
        self._warnings.warn(operation, "tier %s: %s %s", self._medium, operation, fault)

    def note_pause(self, direction: str, pause_s: float) -> None:
        """Log that a direction is paused for its last error."""
        text = "tier %s: %s paused for %s s: %s"
        self._warnings.warn(f"{direction} paused", text, self._medium, direction, pause_s, self.last_error)
