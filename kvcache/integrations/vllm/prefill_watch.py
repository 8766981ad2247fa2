"""Measures how fast the engine computes prompts, from the times of the scheduler's steps.

The scheduler gets no other signal. It offers the blocks of a step for storing when it schedules the step, and schedules
the next step after this one was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

_LEAST_TOKENS = 128
"""A step with fewer tokens of a request is decoding that has filled a block, not prefill."""


class PrefillWatch:
    """Reports the time of steps that computed parts of prompts.

    `report` is called with a list of (first token, number of tokens) and the seconds of the step.
    """

    def __init__(self, block_size: int, report: Callable[[list[tuple[int, int]], float], None]) -> None:
        self._block_size = block_size
        self._report = report
        # Per request, the end of the computed or loaded part of its prompt.
        self._end_of: dict[Hashable, int] = {}
        self._parts: dict[Hashable, tuple[int, int]] = {}
        self._begin_s: float | None = None

    def on_lookup(self, request: Hashable, end_token: int | None) -> None:
        """Record a look-up by the end of its block; tokens before a request's first one are on the device."""
        if request not in self._end_of and end_token is not None:
            self._end_of[request] = end_token - self._block_size

    def on_load(self, request: Hashable, end_tokens: Sequence[int]) -> None:
        """Record a load by the ends of its blocks."""
        self._end_of[request] = max(self._end_of.get(request, 0), *end_tokens, 0)

    def on_store(self, request: Hashable, end_tokens: Sequence[int]) -> None:
        """Record a store by the ends of its blocks, which exist after the step."""
        first, end = self._end_of.get(request), max(end_tokens, default=0)
        if first is not None and end > first:
            self._parts[request] = (first, end - first)
            self._end_of[request] = end

    def on_request_finished(self, request: Hashable) -> None:
        """Record the end of a request. An engine without requests waits, and that time belongs to no step."""
        self._end_of.pop(request, None)
        if self._parts.pop(request, None) is not None:
            self._begin_s = None

    def on_step(self, now_s: float) -> None:
        """Record a step, before its blocks are offered."""
        parts = [part for part in self._parts.values() if part[1] >= _LEAST_TOKENS]
        if parts and self._begin_s is not None and now_s > self._begin_s:
            self._report(parts, now_s - self._begin_s)
        self._parts.clear()
        self._begin_s = now_s
