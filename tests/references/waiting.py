"""Wait for what other threads and processes do."""

from __future__ import annotations

import os
import select
import signal
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


def kill_and_wait(pid: int, how: int = signal.SIGKILL) -> None:
    """End a process of another parent, and wait until it has ended: until then it may write to its folder."""
    fd = os.pidfd_open(pid)
    try:
        os.kill(pid, how)
        assert select.select([fd], [], [], 100)[0]
    finally:
        os.close(fd)
