"""How much could be hit without hints: by a gittins that need not learn, and by any policy that knows as little.

For `unseen_traffic --bound`, apart from it as computations of their own on a whole trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.lab.replay.compact import CompactTrace, next_uses
from kvcache.testing.reference_gittins import ReferenceGittins

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]
    Float64Array = npt.NDArray[np.float64]

_ENDLESS = 1 << 60
_LAST_GAPS = 16
_USES = 8


class CountingGittins(ReferenceGittins):
    """A gittins that forgets nothing: given a block for every key, it counts when each class really comes back."""

    memory_factor = _ENDLESS
    halving_total = _ENDLESS
    last: CountingGittins

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        CountingGittins.last = self


def told_gittins(counted: CountingGittins) -> type[ReferenceGittins]:
    """Return a gittins that knows from its start what another has counted, and remembers every key."""

    class ToldGittins(ReferenceGittins):
        memory_factor = _ENDLESS
        touches_per_table = _ENDLESS  # the table is not built again
        prior = 1

        def clear(self) -> None:
            super().clear()
            self._take_up_classes(range(max(counted.value) + 1))
            self.hit.update({cls: list(counts) for cls, counts in counted.hit.items()})
            self.sur.update({cls: list(counts) for cls, counts in counted.sur.items()})
            self.splits_shared = counted.splits_shared
            self._rebuild()

    return ToldGittins


class BlindBound:
    """The hits, over the memory, of a policy that was told how each kind of blocks comes back.

    A kind is what `gittins` goes by (whether the request continued an older one, whether the block is its last, whether
    it was used before), and beside it the octaves of the block's last gap in seconds and of its number of uses.

    Notes
    -----
    A policy that knows kind and age alone can do no better than to drop all blocks of a kind at one age. The ages are
    chosen with hindsight, from this very trace; a block counts by itself, without its prefix; and memory is
    held to its size on average over the trace, not at each moment. All three can only raise the bound.
    """

    def __init__(self, trace: CompactTrace) -> None:
        arrivals = np.repeat(trace.arrivals_s, np.diff(trace.bounds))
        nexts, _ = next_uses(trace)
        is_used = nexts >= 0
        # What is held until the end has been held that long and not been used.
        waits = np.where(is_used, arrivals[nexts], trace.arrivals_s[-1]) - arrivals
        counted = nexts != -2
        kinds = _kinds(trace, nexts, waits)[counted]
        waits, is_used = waits[counted], is_used[counted]
        steps = [_best_ages(waits[kinds == kind], is_used[kinds == kind]) for kind in np.unique(kinds)]
        occupancy, hits = np.concatenate(steps, axis=1)
        best_first = np.argsort(-hits / np.maximum(occupancy, 1e-9), kind="stable")
        self._occupancy: Float64Array = np.append(0.0, np.cumsum(occupancy[best_first]))
        self._hits: Float64Array = np.append(0.0, np.cumsum(hits[best_first]))
        self._seconds = float(trace.arrivals_s[-1] - trace.arrivals_s[0])

    def hits(self, num_blocks: int) -> float:
        """Return the most prefix hits with so many blocks on average."""
        return float(np.interp(num_blocks * self._seconds, self._occupancy, self._hits))


def _kinds(trace: CompactTrace, nexts: Int64Array, waits: Float64Array) -> Int64Array:
    """Return the kind of the block that stands at each place."""
    num_places = len(trace.ids)
    uses = np.zeros(num_places, dtype=np.int64)
    last_gaps = np.zeros(num_places, dtype=np.float64)
    lengths = np.zeros(num_places, dtype=np.int64)  # of the request that used the block before
    kinds = np.empty(num_places, dtype=np.int64)
    for begin, end in zip(trace.bounds[:-1].tolist(), trace.bounds[1:].tolist(), strict=True):
        if begin == end:
            continue
        here = slice(begin, end)
        is_known = uses[here] > 0
        num_leading = end - begin if is_known.all() else int(np.argmin(is_known))
        continues = num_leading > 0 and num_leading + 1 >= lengths[begin + num_leading - 1]
        inner = np.full(end - begin, 2)
        inner[-1] = 0
        octaves = np.minimum(_LAST_GAPS - 1, np.log2(np.maximum(1.0, last_gaps[here])).astype(np.int64))
        counts = np.minimum(_USES - 1, np.log2(uses[here] + 1).astype(np.int64))
        kinds[here] = 4 * continues + inner + is_known + 8 * (octaves + _LAST_GAPS * counts)
        again = begin + np.flatnonzero(nexts[here] >= 0)
        uses[nexts[again]] = uses[again] + 1
        last_gaps[nexts[again]] = waits[again]
        lengths[nexts[again]] = end - begin
    return kinds


def _best_ages(waits: Float64Array, is_used: npt.NDArray[np.bool_]) -> Float64Array:
    """Return the steps from age to age at which to drop a kind: what each adds in block seconds, and in hits.

    Only the ages on the upper hull are kept, so that the steps grow ever less worth.
    """
    order = np.argsort(waits, kind="stable")
    waits, is_used = waits[order], is_used[order]
    num_longer = np.arange(len(waits) - 1, -1, -1)
    is_last = np.append(waits[1:] != waits[:-1], True)
    occupancy = np.append(0.0, (np.cumsum(waits) + waits * num_longer)[is_last]).tolist()
    hits = np.append(0.0, np.cumsum(is_used)[is_last]).tolist()
    hull = [0]
    for age in range(1, len(hits)):
        if hits[age] == hits[hull[-1]]:
            continue
        while len(hull) > 1 and (hits[hull[-1]] - hits[hull[-2]]) * (occupancy[age] - occupancy[hull[-1]]) <= (
            hits[age] - hits[hull[-1]]
        ) * (occupancy[hull[-1]] - occupancy[hull[-2]]):
            hull.pop()
        hull.append(age)
    points: Float64Array = np.array([[occupancy[age] for age in hull], [hits[age] for age in hull]])
    return np.diff(points, axis=1)
