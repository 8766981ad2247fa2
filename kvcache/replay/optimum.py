"""The most prefix hits that any policy could have had: the offline optimum with bypass.

After each request it keeps the blocks whose next use is nearest, never one without a next use, ties to the shallower
block. It knows the future, so it serves as the ceiling in reports and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvcache.replay.grid import CompactTrace
    from kvcache.replay.requests import Int64Array

_PROGRESS_REQUESTS = 256


def optimal_hits(
    trace: CompactTrace, num_blocks: int | None, progressed: Callable[[int], None] | None = None
) -> list[int]:
    """Return the prefix hits of every request under the optimum.

    Parameters
    ----------
    trace : CompactTrace
        The requests.
    num_blocks : int or None
        Capacity; None: no limit, which gives the hits of an unbounded cache.
    progressed : callable, optional
        Hears now and then how many requests are done.

    Notes
    -----
    A block's next use is the place of its next mention in the trace: places order by request, then by depth, so one
    number says both what is nearer and what is shallower. O(n log n) for n mentions; about 0.6 us each.
    """
    firsts, nexts = (places.tolist() for places in _places(trace.ids, trace.bounds))
    bounds = trace.bounds.tolist()
    room = len(firsts) if num_blocks is None else num_blocks
    kept: set[int] = set()
    farthest: list[int] = []
    hits_of_requests = []
    for done, (begin, end) in enumerate(pairwise(bounds)):
        hits = 0
        for place in firsts[begin:end]:
            if place not in kept:
                break
            hits += 1
        hits_of_requests.append(hits)
        kept.difference_update(firsts[begin:end])
        for place in nexts[begin:end]:
            if place >= 0 and place not in kept:
                kept.add(place)
                heappush(farthest, -place)
        # Places that have passed stay in the heap, but below every one that is still to come.
        while len(kept) > room:
            kept.remove(-heappop(farthest))
        if progressed is not None and done % _PROGRESS_REQUESTS == 0:
            progressed(done)
    return hits_of_requests


def _places(ids: Int64Array, bounds: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return, for every mention, the place of its id's first mention in the same and in the next request (or -1)."""
    count = len(ids)
    firsts = np.arange(count)
    nexts = np.full(count, -1)
    if count < 2:
        return firsts, nexts
    request = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    order = np.argsort(ids, kind="stable")
    same_id = ids[order[1:]] == ids[order[:-1]]
    same_request = request[order[1:]] == request[order[:-1]]
    # In `order`, the first mention in a request begins a group; the others of the group share its places.
    begins = np.concatenate(([True], ~(same_id & same_request)))
    group = np.cumsum(begins) - 1
    heads = order[begins]
    firsts[order] = heads[group]
    next_heads = np.full(len(heads), -1)
    again = ids[heads[1:]] == ids[heads[:-1]]
    next_heads[:-1][again] = heads[1:][again]
    nexts[order] = next_heads[group]
    return firsts, nexts
