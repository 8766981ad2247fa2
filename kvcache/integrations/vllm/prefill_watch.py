"""Measures how fast the engine computes prompts, from the times of the scheduler's steps.

The scheduler gets no other signal. It offers the blocks of a step for storing when it schedules the step, before or
after it calls ``on_schedule_end``: releases differ. It calls ``take_events`` once a step was computed. With
asynchronous scheduling it schedules the next step while this one is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

_LEAST_TOKENS = 128
"""A step with fewer tokens of a request is decoding that has filled a block, not prefill."""
_MAX_RUNNING = 256


@dataclass(slots=True)
class _Step:
    """A step of the scheduler, and for each request the part of its prompt that the step computes."""

    begin_s: float = 0.0
    parts: dict[Hashable, tuple[int, int]] = field(default_factory=dict)


class PrefillWatch:
    """Reports the time of steps that computed parts of prompts. A step lasts until vLLM schedules the next one.

    `report` is called with a list of (first token, number of tokens) and the seconds that all of them took together.
    `offers_first`: whether vLLM offers the blocks of a step before it calls ``on_schedule_end``. If calls arrive in the
    other order, the watch corrects it.
    """

    def __init__(
        self, block_size: int, report: Callable[[list[tuple[int, int]], float], None], offers_first: bool = False
    ) -> None:
        self._block_size = block_size
        self._report = report
        # Per request, the end of the computed or loaded part of its prompt.
        self._end_of: dict[Hashable, int] = {}
        # The step that is being scheduled, if vLLM offers its blocks before it calls `on_step`.
        self._next = _Step()
        self._offers_first = offers_first
        # Steps that are scheduled and not computed, oldest first; steps computed since the last call of `on_step`.
        self._running: deque[_Step] = deque(maxlen=_MAX_RUNNING)
        self._computed: list[_Step] = []
        self._end_s = 0.0

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
        if first is None or end <= first:
            return
        # Every scheduled step was computed, so these blocks belong to a step for which `on_step` is called later.
        self._offers_first = self._offers_first or not self._running
        self._scheduled().parts[request] = (first, end - first)
        self._end_of[request] = end

    def _scheduled(self) -> _Step:
        return self._next if self._offers_first or not self._running else self._running[-1]

    def on_request_finished(self, request: Hashable) -> None:
        """Record the end of a request; blocks that it offers in the same step were computed in earlier ones."""
        self._end_of.pop(request, None)
        self._scheduled().parts.pop(request, None)

    def on_step(self, now_s: float) -> None:
        """Record that vLLM schedules a step, before or after its blocks are offered."""
        if self._computed:
            begin_s, self._end_s = max(self._computed[0].begin_s, self._end_s), now_s
            parts = [part for step in self._computed for part in step.parts.values() if part[1] >= _LEAST_TOKENS]
            self._computed.clear()
            if parts and now_s > begin_s:
                self._report(parts, now_s - begin_s)
        self._next.begin_s = now_s
        self._running.append(self._next)
        self._next = _Step()

    def on_output(self) -> None:
        """Record that the oldest scheduled step was computed."""
        if not self._running:
            return
        step = self._running.popleft()
        if self._next.parts and not self._running:
            # Nothing is being scheduled, so these blocks were offered after the step's call of `on_step`.
            self._offers_first = False
            step.parts, self._next = self._next.parts, _Step()
        self._computed.append(step)
