"""PoolClock: the time that a pool passes to its cache, for retention hints and policies that read a clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.policies.base import BlockCacheOps


class PoolClock:
    """Seconds since the first use of a clock, `read`, that may not go back; unused until `is_needed`.

    At most `max_raised` blocks of the cache may have a raised priority at once. With `policy_reads_clock`, a clock that
    goes back is no error: time stands still.
    """

    def __init__(self, read: Callable[[], float], max_raised: int, policy_reads_clock: bool) -> None:
        if not callable(read):
            raise ValueError(f"clock must be callable, got {read!r}")
        self.read = read
        self._max_raised = max_raised
        self.policy_reads_clock = policy_reads_clock
        # True after a request has given a hint, or if the policy reads the clock. Otherwise, the clock is not read.
        self.is_needed = policy_reads_clock
        self._start_s = 0.0
        self._now_s: float | None = None

    def start(self) -> None:
        """Begin to count, unless the clock has been read before; ValueError if it gives no finite number."""
        if self._now_s is None:
            now_s = self.read()
            if not math.isfinite(now_s):
                raise ValueError(f"the clock must give finite seconds, got {now_s!r}")
            self._start_s = self._now_s = now_s
            self.is_needed = True

    def advance(self, cache: BlockCacheOps) -> None:
        """Read the clock and set the time of `cache`; ValueError if it went back, or gave no finite number."""
        before_s = self._now_s
        if before_s is None:
            self.start()
            now_s = self._start_s
        else:
            now_s = self.read()
            if not now_s >= before_s:
                if self.policy_reads_clock:
                    return
                raise ValueError(f"the clock went back from {before_s} to {now_s} s")
            if self._now_s is not None and now_s < self._now_s:
                now_s = self._now_s  # another thread read the clock later, and advanced first
        cache.advance(now_s - self._start_s, self._max_raised)
        self._now_s = now_s
