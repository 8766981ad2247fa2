"""Wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "an answer") -> Any:
    """Return the first true answer of `condition`; raise if it comes too late."""
    end_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < end_s, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.002)
    return answer
