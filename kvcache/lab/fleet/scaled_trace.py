"""Copies of one trace as the traffic of many engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import Float64Array, Int64Array

_BRANCHES = 8
_STAGGER_S = 600.0


class ScaledTrace:
    """Copies of a trace at once, which share only the blocks that all users of the trace share.

    A block is shared if prompts continue in at least eight different ways after it or after one of its successors:
    system prompts, descriptions of tools. Copies begin within ten minutes, drawn by `seed`; one begins at once. Ids are
    0 to `num_ids` - 1, those of the `num_shared` shared blocks first. `span_s` is the time from the first request to
    the last.
    """

    def __init__(self, trace: CompactTrace, copies: int = 1, seed: int = 0) -> None:
        if type(copies) is not int or copies < 1:
            raise ValueError(f"copies must be an int >= 1, got {copies!r}")
        self._trace = trace
        self.block_size = trace.block_size
        self.copies = copies
        bounds = np.asarray(trace.bounds)
        _, ids = np.unique(np.asarray(trace.ids), return_inverse=True)
        is_shared = _shared_ids(ids, bounds)
        self.num_shared = int(is_shared.sum()) if copies > 1 else 0
        # Shared ids first, then those of each copy.
        if copies > 1:
            order = np.argsort(~is_shared, kind="stable")
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            ids = place[ids]
        self._ids = ids.astype(np.int64)
        self._num_private = len(is_shared) - self.num_shared
        self.num_ids = self.num_shared + copies * self._num_private
        starts_s = np.random.default_rng(seed).uniform(0.0, _STAGGER_S, copies)
        starts_s[0] = 0.0
        arrivals_s = np.asarray(trace.arrivals_s)
        arrivals_s = arrivals_s - arrivals_s.min() if len(arrivals_s) else arrivals_s
        times = (starts_s[:, None] + arrivals_s[None, :]).ravel()
        self._order = np.argsort(times, kind="stable")
        self.arrivals_s: Float64Array = times[self._order]
        self.span_s = float(self.arrivals_s[-1]) if len(times) else 0.0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[float, Int64Array, int]]:
        """Yield the arrival of each request, its ids, and the tokens of its prompt."""
        num_requests = len(self._trace)
        bounds, lengths = self._trace.bounds.tolist(), self._trace.input_lengths.tolist()
        ids_of, shared, private = self._ids, self.num_shared, self._num_private
        for first in range(0, len(self._order), 1 << 16):
            part = self._order[first : first + (1 << 16)]
            times = self.arrivals_s[first : first + (1 << 16)].tolist()
            for at_s, copy, number in zip(
                times, (part // num_requests).tolist(), (part % num_requests).tolist(), strict=True
            ):
                ids = ids_of[bounds[number] : bounds[number + 1]]
                if copy:
                    ids = np.where(ids < shared, ids, ids + copy * private)
                yield at_s, ids, lengths[number]


def _shared_ids(ids: Int64Array, bounds: Int64Array) -> npt.NDArray[np.bool_]:
    num_ids = int(ids.max()) + 1 if len(ids) else 0
    is_shared = np.zeros(num_ids, np.bool_)
    if not num_ids:
        return is_shared
    is_last = np.zeros(len(ids), np.bool_)
    is_last[bounds[1:][np.diff(bounds) > 0] - 1] = True
    parents = np.flatnonzero(~is_last)
    edges = np.unique(ids[parents] * num_ids + ids[parents + 1])
    branches = np.bincount(edges // num_ids, minlength=num_ids) >= _BRANCHES
    # The prefix of a shared block is shared as well.
    at_branch = branches[ids]
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        found = np.flatnonzero(at_branch[first:last])
        if len(found):
            is_shared[ids[first : first + found[-1] + 1]] = True
    return is_shared
