"""Honest hints of next use for a trace: those that a client can know, sent when it knows them, and with its errors.

A plan shows with them what hints would bring, before a client sends any.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.request import ReqContext

if TYPE_CHECKING:
    from kvcache.control.manager import OffloadingManager
    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import Request

TOKENS_PER_S = 60.0
"""An answer is generated at this rate. Its hint comes when it is complete."""
SOON_S = 60.0
"""A request that follows within this time belongs to a tool; an end is sent so long after the last answer."""
SOON_SAID, LATER_SAID, END_SAID = 0.9, 0.8, 0.8
"""Shares of tools and of people that are taken for what they are, and of sessions whose end is sent."""
_FEWEST_FOLLOWERS = 5
_SEED = 7


class Hint(NamedTuple):
    """A hint that a client sends at a time of the trace."""

    at_s: float
    next_use: str


def honest_hints(trace: CompactTrace) -> list[list[Hint]]:
    """Return the hints of each request of a trace, in the order in which they are sent.

    Requests with the same first block behind all prompts that many share are a session. In a trace whose sessions
    mostly go on after a minute or more, people are at the other end, and clients never send `soon`.
    """
    arrivals = np.asarray(trace.arrivals_s).tolist()
    following = _following(trace)
    gaps = [arrivals[after] - arrivals[i] for i, after in enumerate(following) if after]
    is_chat = not gaps or float(np.median(gaps)) >= SOON_S
    draw = random.Random(_SEED)
    hints: list[list[Hint]] = []
    for i, request in enumerate(trace):
        after, end_s = following[i], arrivals[i] + request.output_length / TOKENS_PER_S
        is_soon = after != 0 and arrivals[after] - arrivals[i] < SOON_S
        is_said = draw.random() < (SOON_SAID if is_soon else LATER_SAID)
        next_use = "soon" if not is_chat and after and is_soon == is_said else "later"
        # An answer ends before its session goes on.
        hints.append([Hint(min(end_s, arrivals[after]) if after else end_s, next_use)])
        if not after and draw.random() < END_SAID:
            hints[i].append(Hint(end_s + SOON_S, "end"))
    return hints


def _following(trace: CompactTrace) -> list[int]:
    """Return the number of each request's next one in its session; 0: none."""
    followers: defaultdict[int, set[int]] = defaultdict(set)
    parents: dict[int, int | None] = {}
    for request in trace:
        ids = request.hash_ids.tolist()
        for before, after in pairwise([None, *ids]):
            parents.setdefault(after, before)
            if before is not None and len(followers[before]) < _FEWEST_FOLLOWERS:
                followers[before].add(after)
    shared = set()
    for block, others in followers.items():
        node: int | None = block if len(others) >= _FEWEST_FOLLOWERS else None
        while node is not None and node not in shared:
            shared.add(node)
            node = parents[node]
    following = [0] * len(trace)
    last: dict[int, int] = {}
    for i, request in enumerate(trace):
        own = next((block for block in request.hash_ids.tolist() if block not in shared), None)
        if own in last:
            following[last[own]] = i
        if own is not None:
            last[own] = i
    return following


class HintedReplay(Replay):
    """A replay whose clients send the honest hints of a trace."""

    def __init__(self, manager: OffloadingManager, trace: CompactTrace, arrivals: ReplayClock) -> None:
        super().__init__(manager, arrivals=arrivals)
        self._hints = honest_hints(trace)
        self._waiting: list[tuple[float, int, ReqContext, str]] = []

    def step(self, request: Request, keys: list[bytes]) -> int:
        """Send the hints that are due, then run one request."""
        while self._waiting and self._waiting[0][0] <= request.arrival_s:
            at_s, _, context, next_use = heapq.heappop(self._waiting)
            self.arrivals.now_s = max(self.arrivals.now_s, at_s)
            self._manager.hint(context, next_use)
        return super().step(request, keys)

    def serve(self, context: ReqContext, hits: list[bytes], parts: list[list[bytes]], spent: int) -> None:
        super().serve(context, hits, parts, spent)
        number = len(self.tally.bookkeeping_ns) - 1
        for i, hint in enumerate(self._hints[number]):
            heapq.heappush(self._waiting, (hint.at_s, 2 * number + i, context, hint.next_use))
