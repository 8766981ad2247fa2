"""The most prefix hits that any policy could have had: the offline optimum with bypass.

After each request it keeps the blocks whose next use is nearest, never one without a next use, ties to the shallower
block. It knows the future, so it serves as the ceiling in reports and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvcache.lab.traces.compact import give_back, next_uses
from kvcache.lab.traces.nearest import NearestUses

if TYPE_CHECKING:
    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import Int64Array


def optimal_hits(
    trace: CompactTrace,
    num_blocks: int | None,
    progressed: Callable[[int], None] | None = None,
    split: int = 1,
    nexts: Int64Array | None = None,
) -> Int64Array:
    """Return the prefix hits of every request under the optimum: blocks, int64.

    Without `num_blocks` there is no limit, which gives the hits of an unbounded cache. `progressed` is called now and
    then with the places that are done. Each id stands for `split` blocks. `nexts` is what `next_uses` returns of the
    trace; without it, it is worked out, in memory.

    Notes
    -----
    A block's next use is the place of its next mention in the trace. Memory: one bit a place beside the arrays, at any
    capacity. 50 to 100 ns a place, most of them for `nexts`.
    """
    if nexts is None:
        nexts, _ = next_uses(trace)
    num_places = len(trace.ids) * split
    kept = NearestUses(num_places, max(1, num_places) if num_blocks is None else num_blocks)
    hits = np.zeros(len(trace), dtype=np.int64)
    for first, last in trace.pieces():
        bounds = np.ascontiguousarray(trace.bounds[first : last + 1])
        begin, end = int(bounds[0]), int(bounds[-1])
        kept.step(np.ascontiguousarray(nexts[begin:end]), bounds, hits[first:last], split)
        give_back(nexts)
        if progressed is not None:
            progressed(end)
    return hits
