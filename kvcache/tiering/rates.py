"""The rates that an arbiter learns: of each medium's loads, and of the engine's computation of a prompt.

Loading `n` blocks takes ``latency + n * seconds per block``, after the jobs in progress have ended. Computing the token
at position `p` takes ``first + growth * p``, because attention makes later tokens more expensive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

BAND = 0.04
"""Rates in use are replaced once what was learned leaves this band around them: decisions do not flutter with noise."""
_DECAY = 0.85
_SURPRISE = 2.0
_LEAST_SPREAD = 1e-3
_WINDOW_JOBS = 8
MAX_TOKENS = 1 << 40
"""Positions beyond it are those of no prompt."""
_MAX_S = 1e9
_PROBE_INTERVAL_S = 10.0
_PROBE_S = 0.25
MAX_PROBE_BLOCKS = 64
"""Blocks that are loaded at most for no other end than to learn a link's rate."""


class CostFit:
    """Learn ``seconds = a * x + b * y``, a, b >= 0, from the last few samples.

    If two samples in a row are off by a factor of two, it drops the samples before them.
    `a` and `b` are the rates in use, set to the learned rates when those leave `BAND`.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self.a = self.b = 0.0
        self._sums = [0.0] * 5
        self._surprise: tuple[float, float, float] | None = None

    def __call__(self, x: float, y: float) -> float:
        """Return the expected seconds for `x` and `y`."""
        return self.a * x + self.b * y

    def set(self, a: float, b: float) -> None:
        """Set the rates."""
        self.a, self.b = a, b
        self.num_samples += 1

    def record(self, x: float, y: float, seconds: float) -> None:
        """Record one sample; invalid samples are ignored."""
        if not (x > 0 and 0 <= y < math.inf and 0 <= seconds <= _MAX_S):
            return
        expected = self(x, y)
        sample = (x, y, seconds)
        is_surprise = self.num_samples > 1 and not expected / _SURPRISE <= seconds <= expected * _SURPRISE
        if is_surprise and self._surprise is not None:
            self._sums = [0.0] * 5
            self._add(self._surprise)
            self._surprise = None
        else:
            self._surprise = sample if is_surprise else None
        self._add(sample)
        self.num_samples += 1
        a, b = self._solved()
        if self.num_samples == 1 or abs(a * x + b * y - expected) > BAND * expected:
            self.a, self.b = a, b

    def _add(self, sample: tuple[float, float, float]) -> None:
        x, y, seconds = sample
        # Weighted by 1 / x: long samples have more noise.
        terms = (x, y, y * y / x, seconds, y * seconds / x)
        self._sums = [_DECAY * old + new for old, new in zip(self._sums, terms, strict=True)]

    def _solved(self) -> tuple[float, float]:
        xx, xy, yy, xt, yt = self._sums
        spread = xx * yy - xy * xy
        if spread <= _LEAST_SPREAD * xx * yy:
            # All samples are proportional: the two terms cannot be separated.
            return xt / xx, 0.0
        a, b = (xt * yy - yt * xy) / spread, (yt * xx - xt * xy) / spread
        if b < 0:
            return xt / xx, 0.0
        return (a, b) if a >= 0 else (0.0, yt / yy)


class LinkRate:
    """How fast one medium loads, learned from its finished jobs, and when its current jobs will end.

    Times of jobs may be on any one clock. `now_s` is on the manager's clock.
    """

    def __init__(self) -> None:
        self.fit = CostFit()
        self.probe_s = -math.inf
        self._num_jobs = 0
        self._num_blocks = 0
        self._due_s = self._looked_s = -math.inf
        self._begin_s = self._end_s = -math.inf
        self._window_jobs = self._window_blocks = 0
        self._from_idle = 1

    @property
    def is_known(self) -> bool:
        """Whether a load has ended so far."""
        return self.fit.num_samples > 0

    @property
    def is_idle(self) -> bool:
        """Whether no load is in progress."""
        return self._num_jobs == 0

    @property
    def latency_s(self) -> float:
        """Seconds of a load that do not depend on the number of blocks."""
        return self.fit.b

    @property
    def blocks_per_s(self) -> float:
        """Blocks per second within a load; 0: unknown."""
        return 1 / self.fit.a if self.fit.a > 0 else 0.0

    def load_s(self, num_blocks: int, now_s: float) -> float:
        """Return the expected seconds until `num_blocks` more are loaded; 0: only the jobs in progress."""
        wait_s = 0.0
        if self._num_jobs:
            # A late job is expected to be late by the same time again. It may also have ended since the last check.
            wait_s = max(self._due_s - now_s, self._looked_s - self._due_s, 0.0)
        if not num_blocks:
            return wait_s
        return max(self.fit.b, wait_s) + self.fit.a * num_blocks

    def sent(self, num_blocks: int, now_s: float) -> None:
        """Record that a job was sent."""
        self._due_s = now_s + self.load_s(num_blocks, now_s)
        self._looked_s = max(self._looked_s, now_s)
        self._num_jobs += 1
        self._num_blocks += num_blocks

    def looked(self, now_s: float) -> None:
        """Record that all jobs that have ended by now were reported."""
        self._looked_s = now_s

    def ended(self, num_blocks: int, num_done: int, start_s: float, end_s: float, now_s: float) -> None:
        """Record that a job has ended, or that no request waits for it. If 0 blocks are done, keep the rate."""
        self._num_jobs -= 1
        self._num_blocks -= num_blocks
        self._due_s = now_s + self.fit.a * self._num_blocks
        if num_done and start_s <= end_s < math.inf:
            if start_s >= self._end_s:
                # The link was idle in the meantime.
                self._close_window()
                self._begin_s, self._from_idle = start_s, 1
            self._end_s = max(self._end_s, end_s)
            self._window_jobs += 1
            self._window_blocks += num_done
        if not self._num_jobs or self._window_jobs >= _WINDOW_JOBS:
            self._close_window()

    def is_probe_due(self, now_s: float) -> bool:
        """Return whether it is time to load blocks only to learn the rate."""
        return not self._num_jobs and now_s >= self.probe_s

    def take_probe(self, now_s: float) -> int:
        """Return how many blocks to load now only to learn the rate; mostly 0."""
        if not self.is_probe_due(now_s):
            return 0
        self.probe_s = now_s + _PROBE_INTERVAL_S
        room_s = _PROBE_S - self.fit.b
        num_blocks = room_s / self.fit.a if self.fit.a > 0 else MAX_PROBE_BLOCKS
        return int(min(max(num_blocks, 1), MAX_PROBE_BLOCKS))

    def _close_window(self) -> None:
        # Jobs that share the link end together: only all of them together give its rate.
        self.fit.record(self._window_blocks, self._from_idle, self._end_s - self._begin_s)
        self._begin_s, self._from_idle = self._end_s, 0
        self._window_jobs = self._window_blocks = 0


class PrefillRate:
    """How fast the engine computes a prompt, given or learned.

    Parameters
    ----------
    tokens_per_s : float or mapping of int to float, optional
        Tokens per second, at any position or at these positions of a prompt. None: learned from `record`.

    Raises
    ------
    ValueError
        A rate or position is out of range.
    """

    def __init__(self, tokens_per_s: float | Mapping[int, float] | None = None) -> None:
        self.fit = CostFit()
        self._is_given = tokens_per_s is not None
        if tokens_per_s is not None:
            points = check_prefill_rate("prefill_tokens_per_s", tokens_per_s)
            self.fit.set(*_line(points))

    @property
    def is_known(self) -> bool:
        """Whether the rate was given, or a sample was recorded."""
        return self.fit.num_samples > 0

    def record(self, first_token: int, num_tokens: int, seconds: float) -> None:
        """Record the time of tokens from position `first_token` on. A given rate is kept."""
        self.record_together([(first_token, num_tokens)], seconds)

    def record_together(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record the total time of parts of prompts, each with a first position and a number of tokens."""
        is_valid = seconds > 0 and all(0 <= first <= MAX_TOKENS and 0 < count <= MAX_TOKENS for first, count in parts)
        if is_valid and not self._is_given:
            num_tokens = sum(count for _, count in parts)
            self.fit.record(num_tokens, sum(count * (first + count / 2) for first, count in parts), seconds)

    def compute_s(self, first_token: int, end_token: int) -> float:
        """Return the expected seconds of the tokens at these positions."""
        return self.fit(end_token - first_token, (end_token * end_token - first_token * first_token) / 2)


def check_prefill_rate(name: str, value: object) -> dict[int, float]:
    """Return tokens per second by position.

    `value` is one rate for all positions, or maps some positions (in JSON, strings) to rates that do not increase.
    Anything else is a ValueError with the option's `name`.
    """
    points = value.items() if isinstance(value, Mapping) else [(0, value)]
    rates: dict[int, float] = {}
    for position, rate in points:
        where = int(position) if isinstance(position, str) and position.isdecimal() else position
        if type(where) is not int or where < 0 or isinstance(rate, bool) or not isinstance(rate, int | float):
            break
        if not 0 < rate < math.inf:
            break
        rates[where] = float(rate)
    else:
        ordered = dict(sorted(rates.items()))
        if ordered and list(ordered.values()) == sorted(ordered.values(), reverse=True):
            return ordered
    raise ValueError(
        f"{name} must be tokens a second > 0, or such rates by position that do not grow, as in "
        f'{{"0": 9000, "32768": 6000}}, got {value!r}'
    )


def _line(rates: Mapping[int, float]) -> tuple[float, float]:
    """Return seconds per token at position 0, and their growth per position, that best fit rates at positions."""
    if len(set(rates.values())) == 1:
        return 1 / next(iter(rates.values())), 0.0
    positions = [float(position) for position in rates]
    growth, at_0_s = np.polyfit(positions, [1 / rate for rate in rates.values()], 1).tolist()
    # Clip at zero, in case the points do not fit a line.
    return max(at_0_s, 0.0), growth
