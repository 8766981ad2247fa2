"""How fast the engine computes prompts, from the scheduler's steps: nothing else tells the scheduler's side.

A step's blocks are offered for storing when it is scheduled, with all before them, and the next step is scheduled when
it has been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

_LEAST_TOKENS = 128
"""Fewer tokens of a request are no prefill, but a block that decoding has filled."""


class PrefillWatch:
    """Report the time of steps that computed parts of prompts.

    Parameters
    ----------
    block_size : int
        Tokens of one offloaded block.
    report : callable
        Takes a list of (first token, number of tokens) and the seconds that they took together.
    """

    def __init__(self, block_size: int, report: Callable[[list[tuple[int, int]], float], None]) -> None:
        self._block_size = block_size
        self._report = report
        # Up to where each request's prompt has been computed or loaded.
        self._end_of: dict[Hashable, int] = {}
        self._parts: dict[Hashable, tuple[int, int]] = {}
        self._begin_s: float | None = None

    def on_lookup(self, request: Hashable, end_token: int | None) -> None:
        """Called with where a block ends that a request asks for; what is before its first one is on the device."""
        if request not in self._end_of and end_token is not None:
            self._end_of[request] = end_token - self._block_size

    def on_load(self, request: Hashable, end_tokens: Sequence[int]) -> None:
        """Called with where the blocks end that a request loads."""
        self._end_of[request] = max(self._end_of.get(request, 0), *end_tokens, 0)

    def on_store(self, request: Hashable, end_tokens: Sequence[int]) -> None:
        """Called with where the blocks end that a request has once the step has been computed."""
        first, end = self._end_of.get(request), max(end_tokens, default=0)
        if first is not None and end > first:
            self._parts[request] = (first, end - first)
            self._end_of[request] = end

    def on_request_finished(self, request: Hashable) -> None:
        """Called when a request ends: an engine without any waits, and that time is no step's."""
        self._end_of.pop(request, None)
        if self._parts.pop(request, None) is not None:
            self._begin_s = None

    def on_step(self, now_s: float) -> None:
        """Called once a step, before its blocks are offered."""
        parts = [part for part in self._parts.values() if part[1] >= _LEAST_TOKENS]
        if parts and self._begin_s is not None and now_s > self._begin_s:
            self._report(parts, now_s - self._begin_s)
        self._parts.clear()
        self._begin_s = now_s
