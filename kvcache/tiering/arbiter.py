"""The arbiter: per request, load a prefix from below host memory only as far as loading is faster than computing.

Loading from a store across a network can be slower than prefill. Which of the two is faster depends on the prefix's
length, the traffic and the time of day. So the costs of both are learned, and no threshold is configured: loading `n`
blocks takes ``latency + n * seconds per block`` after the jobs in progress, and computing the token at position `p`
takes ``first + growth * p``, because attention makes later tokens more expensive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from kvcache.keys import GROUP_PART

if TYPE_CHECKING:
    from kvcache.request import ReqContext

_DECAY = 0.85
_ODD_FACTOR = 2.0
_LEAST_SPREAD = 1e-3
_MAX_S = 1e9
_MAX_TOKENS = 1 << 40
"""Larger positions are invalid."""
_BLIND_SAMPLES = 3
_SAMPLE_JOBS = 8
_PATIENCE = 1.04
_PROBE_INTERVAL_S = 10.0
_PROBE_S = 0.25
_PROBE_BLOCKS = 64
_MAX_DECISIONS = 256


class CostFit:
    """Learn ``seconds = a * x + b * y``, a, b >= 0, by least squares; older samples count less."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.a = self.b = 0.0
        self._sums = [0.0] * 5
        self._odd: tuple[float, float, float] | None = None

    def __call__(self, x: float, y: float) -> float:
        """Return the expected seconds for `x` and `y`."""
        return self.a * x + self.b * y

    def record(self, x: float, y: float, seconds: float) -> None:
        """Record one sample; invalid samples are ignored."""
        if not (x > 0 and 0 <= y < math.inf and 0 <= seconds <= _MAX_S):
            return
        expected = self(x, y)
        is_odd = self.num_samples > 0 and not expected / _ODD_FACTOR <= seconds <= expected * _ODD_FACTOR
        if is_odd and self._odd is not None:
            # One odd sample is a stall. Two in a row are a new rate: drop the samples of the old one.
            self._sums = [0.0] * 5
            self.add(*self._odd)
            self._odd = None
        else:
            self._odd = (x, y, seconds) if is_odd else None
        self.add(x, y, seconds)

    def add(self, x: float, y: float, seconds: float, decay: float = _DECAY) -> None:
        """Add a sample to the fit."""
        self.num_samples += 1
        # Weighted by 1 / x: long samples have more noise.
        terms = (x, y, y * y / x, seconds, y * seconds / x)
        self._sums = [decay * old + new for old, new in zip(self._sums, terms, strict=True)]
        xx, xy, yy, xt, yt = self._sums
        spread = xx * yy - xy * xy
        # If all samples are proportional, the two terms cannot be separated.
        self.a, self.b = xt / xx, 0.0
        if spread > _LEAST_SPREAD * xx * yy:
            a, b = (xt * yy - yt * xy) / spread, (yt * xx - xt * xy) / spread
            if b >= 0:
                self.a, self.b = (a, b) if a >= 0 else (0.0, yt / yy)


class Link:
    """How fast one medium loads, learned from its finished jobs, and when its current jobs will end.

    Start and end of jobs may be on any one clock; `now_s` is on the manager's. `probe_s` is the time of the next probe.
    """

    def __init__(self) -> None:
        self.fit = CostFit()
        self.probe_s = -math.inf
        self._num_jobs = self._num_blocks = 0
        self._due_s = -math.inf
        # The sample that is being taken: its blocks, its jobs, and 1 if it began with an idle link.
        self._begin_s = self._end_s = -math.inf
        self._sample_blocks = self._sample_jobs = 0
        self._from_idle = 1

    @property
    def is_blind(self) -> bool:
        """Whether the link must be tried: it is idle, and too few loads have ended. A first load is often slow."""
        return self.fit.num_samples < _BLIND_SAMPLES and not self._num_jobs

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
        # If the jobs are 2 s late, expect 2 s more.
        wait_s = abs(self._due_s - now_s) if self._num_jobs else 0.0
        return max(self.fit.b, wait_s) + self.fit.a * num_blocks if num_blocks else wait_s

    def sent(self, num_blocks: int, now_s: float) -> None:
        """Record that a job was sent."""
        self._due_s = now_s + self.load_s(num_blocks, now_s)
        self._num_jobs += 1
        self._num_blocks += num_blocks

    def ended(self, num_blocks: int, num_done: int, start_s: float, end_s: float, now_s: float) -> None:
        """Record that a job has ended or is overdue. If 0 blocks are done, keep the rate."""
        self._num_jobs -= 1
        self._num_blocks -= num_blocks
        self._due_s = now_s + self.fit.a * self._num_blocks
        if num_done and start_s <= end_s < math.inf:
            if start_s >= self._end_s:
                self._close_sample()
                self._begin_s, self._from_idle = start_s, 1
            self._end_s = max(self._end_s, end_s)
            self._sample_blocks += num_done
            self._sample_jobs += 1
        if not self._num_jobs or self._sample_jobs >= _SAMPLE_JOBS:
            self._close_sample()

    def _close_sample(self) -> None:
        # Overlapping jobs share the link, so each looks slow; only all of them together show its rate.
        self.fit.record(self._sample_blocks, self._from_idle, self._end_s - self._begin_s)
        self._begin_s, self._from_idle = self._end_s, 0
        self._sample_blocks = self._sample_jobs = 0

    def probe_blocks(self, now_s: float) -> int:
        """Return how many blocks to load now only to learn the rate; 0 unless the link is idle and a probe is due."""
        if self._num_jobs or now_s < self.probe_s:
            return 0
        num_blocks = (_PROBE_S - self.fit.b) / self.fit.a if self.fit.a > 0 else _PROBE_BLOCKS
        return int(min(max(num_blocks, 1), _PROBE_BLOCKS))

    def probed(self, now_s: float) -> None:
        """Record a probe."""
        self.probe_s = now_s + _PROBE_INTERVAL_S


class Source(Protocol):
    """The source of a block below host memory: a tier, or a job that already loads it for another request."""

    @property
    def link(self) -> Link | None:
        """The link that loads it. None: loading costs nothing."""

    @property
    def is_coming(self) -> bool:
        """Whether the block is being loaded already."""


_Block: TypeAlias = tuple[int, bytes, Source | None]
# The position in the prompt where a block ends, its key, and its source; None: host memory.


@dataclass(slots=True)
class _Choice:
    """The decision for one request: its prefix is decided up to `seen_token`, and loaded up to `limit_token`.

    Look-ups extend it to more tokens until it is cut. At `give_up_s`, the request has waited for as long as computing
    takes. `asked_token` is the farthest token at which a tier had not answered yet.
    """

    seen_token: int = -1
    limit_token: int = -1
    asked_token: int = -1
    give_up_s: float = math.inf

    @property
    def is_cut(self) -> bool:
        """Whether a part of the prefix is left to be computed. That is final: an engine may have begun to compute."""
        return self.limit_token < self.seen_token


class LoadArbiter:
    """Decides which part of a request's prefix is loaded from tiers.

    Parameters
    ----------
    block_size : int
        Tokens of a block.
    tiers : sequence of Source
        All tiers that may hold blocks.
    prefill_tokens_per_s : float or mapping of int to float, optional
        How fast the engine computes a prompt, at any position or at these. None: learned from `report_prefills`.

    Attributes
    ----------
    counts : dict of str to int
        Numbers of decisions, by the names of `ManagerStats`.
    decisions : deque of str
        The last 256 decisions in words.
    group_of : callable
        Returns the KV-cache group of a key; a replay sets its own, because its keys are hashes.
    probes : dict of Link to list of bytes
        Blocks that were cut. Loading some of them in the background shows whether a link has become faster.
    """

    def __init__(
        self,
        block_size: int,
        tiers: Sequence[Source] = (),
        prefill_tokens_per_s: float | Mapping[int, float] | None = None,
    ) -> None:
        self.prefill = CostFit()
        self.decisions: deque[str] = deque(maxlen=_MAX_DECISIONS)
        self.group_of: Callable[[bytes], bytes | None] = itemgetter(GROUP_PART)
        self.probes: dict[Link, list[bytes]] = {}
        names = ("arbiter_loads", "arbiter_cuts", "arbiter_cut_blocks", "arbiter_give_ups")
        self.counts = dict.fromkeys(names, 0)
        self._block_size = block_size
        self._tiers = tiers
        self._choices: WeakKeyDictionary[ReqContext, _Choice] = WeakKeyDictionary()
        self._is_given = prefill_tokens_per_s is not None
        if prefill_tokens_per_s is not None:
            for position, rate in check_prefill_rate("prefill_tokens_per_s", prefill_tokens_per_s).items():
                self.prefill.add(1, position, 1 / rate, decay=1)

    def report_prefills(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record the time of parts of prompts together, each with a first position and a number of tokens.

        Invalid values are ignored; so are all values if the rate was configured.
        """
        is_valid = seconds > 0 and all(0 <= first <= _MAX_TOKENS and 0 < count <= _MAX_TOKENS for first, count in parts)
        if is_valid and not self._is_given:
            num_tokens = sum(count for _, count in parts)
            self.prefill.record(num_tokens, sum(count * (first + count / 2) for first, count in parts), seconds)

    def compute_s(self, first_token: int, end_token: int) -> float:
        """Return the expected seconds of computing the tokens at these positions."""
        return self.prefill(end_token - first_token, (end_token * end_token - first_token * first_token) / 2)

    def keys_to_weigh(self, keys: list[bytes], num_before: int, req_context: ReqContext) -> list[bytes]:
        """Return those of the next keys that may be loaded, and the rest of the prompt behind a single key.

        An engine that asks key by key gives positions. One block alone is nearly always computed sooner, so the prefix
        is decided as a whole, at its first key.
        """
        choice = self._choices.get(req_context)
        if choice is not None and choice.is_cut:
            ends = self._end_tokens(keys, num_before, req_context)
            return keys[: sum(end <= choice.limit_token for end in ends)]
        positions = req_context.positions
        end = None if len(keys) != 1 or positions is None else _known(positions.get(keys[0]))
        if positions is None or end is None or (choice is not None and end <= choice.seen_token):
            return keys
        group = self.group_of(keys[0])
        behind = [key for key, other in positions.items() if (_known(other) or 0) > end and self.group_of(key) == group]
        return keys + behind

    def num_to_load(
        self,
        req_context: ReqContext,
        keys: list[bytes],
        num_before: int,
        sources: Sequence[Source | None],
        is_unknown: bool,
        now_s: float,
    ) -> int | None:
        """Return how many of the first blocks are loaded for a request.

        Parameters
        ----------
        req_context : ReqContext
            The request. It gets the same answer for the same blocks until it has waited for too long.
        keys : list of bytes
            Keys behind those in host memory, at least one, in prefix order.
        num_before : int
            Number of the keys before them, for a request without positions.
        sources : list
            The sources of the first keys.
        is_unknown : bool
            Whether a tier has not answered yet for the other keys.
        now_s : float
            The manager's clock.

        Returns
        -------
        int or None
            None: first wait for the tier's answer. -1: the request has waited for as long as computing takes.
        """
        choice = self._choices.setdefault(req_context, _Choice())
        ends = self._end_tokens(keys, num_before, req_context)
        if not choice.is_cut:
            if not is_unknown and ends[len(sources) - 1] > choice.seen_token:
                # Blocks of earlier decisions are loaded, or being loaded.
                blocks = [block for block in zip(ends, keys, sources, strict=False) if block[0] > choice.seen_token]
                self._decide(choice, blocks, now_s)
            elif is_unknown and ends[0] > max(choice.seen_token, choice.asked_token):
                choice.asked_token = ends[0]
                self._decide_unseen(choice, keys, ends, now_s)
            elif now_s >= choice.give_up_s:
                choice.seen_token, choice.limit_token = max(choice.seen_token, 0), -1
                self.counts["arbiter_give_ups"] += 1
        if is_unknown and not choice.is_cut:
            return None
        return -1 if choice.limit_token < 0 else sum(end <= choice.limit_token for end in ends[: len(sources)])

    def is_cut(self, key: bytes, req_context: ReqContext) -> bool:
        """Return whether a block was left to be computed."""
        choice, end = self._choices.get(req_context), _known(req_context.get_offload_key_position(key))
        return choice is not None and choice.is_cut and (end is None or end > choice.limit_token)

    def forget(self, req_context: ReqContext) -> None:
        """Forget the decision for a request that has ended."""
        self._choices.pop(req_context, None)

    def _decide_unseen(self, choice: _Choice, keys: list[bytes], ends: list[int], now_s: float) -> None:
        """Cut blocks that are computed sooner than loaded even if a tier has all of them; set how long to wait."""
        if not self.prefill.num_samples:
            return
        first_token, words = max(ends[0] - self._block_size, 0), ""
        for tier in self._tiers:
            blocks: list[_Block] = [(end, key, tier) for end, key in zip(ends, keys, strict=True)]
            num_kept, _, words = self._weigh(first_token, blocks, now_s)
            if num_kept:
                choice.give_up_s = now_s + self.compute_s(first_token, ends[-1])
                return
        choice.seen_token, choice.limit_token = ends[-1], first_token
        self._note_cut(words)
        for tier in self._tiers:
            if tier.link is not None:
                self.probes.setdefault(tier.link, keys[:_PROBE_BLOCKS])

    def _decide(self, choice: _Choice, blocks: list[_Block], now_s: float) -> None:
        """Extend a choice to more blocks."""
        choice.seen_token = choice.limit_token = blocks[-1][0]
        if not any(source is not None and source.link is not None for _, _, source in blocks):
            return
        first_token = max(blocks[0][0] - self._block_size, 0)
        num_kept, load_s, words = self._weigh(first_token, blocks, now_s)
        if num_kept and self.prefill.num_samples:
            # By then, computing would have ended, too.
            patience_s = max(load_s, self.compute_s(first_token, blocks[num_kept - 1][0]))
            choice.give_up_s = now_s + _PATIENCE * patience_s
        if num_kept == len(blocks):
            self.decisions.append(words)
            self.counts["arbiter_loads"] += 1
            return
        choice.limit_token = blocks[num_kept - 1][0] if num_kept else first_token
        self._note_cut(words)
        for _, key, source in blocks[num_kept:]:
            self.counts["arbiter_cut_blocks"] += source is not None
            if source is not None and source.link is not None and not source.is_coming:
                probe = self.probes.setdefault(source.link, [])
                if len(probe) < _PROBE_BLOCKS:
                    probe.append(key)

    def _note_cut(self, words: str) -> None:
        self.decisions.append(words)
        self.counts["arbiter_cuts"] += 1

    def _weigh(self, first_token: int, blocks: list[_Block], now_s: float) -> tuple[int, float, str]:
        """Return how many of the blocks to load, the expected seconds of loading all of them, and both in words.

        A prefix may be cut anywhere. Within one medium, the gain of one more block only grows with its position, so the
        best cut is at a change of medium, and only these cuts are compared. Media load at the same time.
        """
        end_token = blocks[-1][0]
        computed_s = self.compute_s(first_token, end_token)
        best_s, num_kept, num_seen, load_s = computed_s, 0, 0, 0.0
        queued: dict[Link, int] = {}
        # Without both rates, no comparison is possible, and only a load shows the link's rate.
        is_blind = not self.prefill.num_samples
        for source, group in groupby(blocks, key=itemgetter(2)):
            part = list(group)
            num_seen += len(part)
            if source is not None and source.link is not None:
                link = source.link
                is_blind |= link.is_blind
                # Blocks that are already being loaded for another request do not lengthen the queue.
                queued[link] = queued.get(link, 0) + (0 if source.is_coming else len(part))
                load_s = max(load_s, link.load_s(queued[link], now_s))
            seconds = load_s + self.compute_s(part[-1][0], end_token)
            if seconds <= best_s:
                best_s, num_kept = seconds, num_seen
        if is_blind:
            return num_seen, load_s, f"loads {num_seen} blocks: a rate is not known yet"
        words = f"loads {num_kept} of {num_seen} blocks" if num_kept else "computes"
        return num_kept, load_s, f"{words}: loading {load_s:.3g} s, computing {computed_s:.3g} s"

    def _end_tokens(self, keys: list[bytes], num_before: int, req_context: ReqContext) -> list[int]:
        """Return the end of each block in the prompt; without positions, `keys` follow `num_before` blocks."""
        positions, size = req_context.positions or {}, self._block_size
        ends = [_known(positions.get(key)) for key in keys]
        return [(num_before + i) * size if end is None else end for i, end in enumerate(ends, 1)]


def _known(end_token: object) -> int | None:
    """Return a position that an engine gave, or None if it is not a position in a prompt."""
    return end_token if isinstance(end_token, int) and 0 <= end_token <= _MAX_TOKENS else None


def check_prefill_rate(name: str, value: object) -> dict[int, float]:
    """Return tokens per second by position.

    `value` is one rate for all positions, or maps some positions (in JSON, strings) to rates that do not increase.
    Other values raise a ValueError that names the option.
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
