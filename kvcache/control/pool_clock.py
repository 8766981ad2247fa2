"""PoolClock: the time that a pool passes to its cache, for policies that read a clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.policies.base import BlockCacheOps


class PoolClock:
    """Seconds since the first use of a clock, `read`. They do not decrease if it goes back. Used if `is_needed`."""

    def __init__(self, read: Callable[[], float], is_needed: bool) -> None:
        if not callable(read):
            raise ValueError(f"clock must be callable, got {read!r}")
        self.read = read
        self.is_needed = is_needed
        self._start_s: float | None = None
        self._now_s = -math.inf

    def advance(self, cache: BlockCacheOps) -> None:
        """Read the clock and set the time of `cache`; ValueError if it gave no finite number."""
        now_s = self.read()
        if self._start_s is None:
            if not math.isfinite(now_s):
                raise ValueError(f"the clock must give finite seconds, got {now_s!r}")
            self._start_s = now_s
        # Another thread may have read the clock later, and advanced first.
        if now_s >= self._now_s:
            cache.advance(now_s - self._start_s)
            self._now_s = now_s
