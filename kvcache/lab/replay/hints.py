"""Hints of next use that an honest client would have given on a trace, and that a careless one gets wrong now and then.

A client knows whether its session goes on, and whether a tool or a person comes next. A trace tells afterwards: the
blocks that a request brought are named again within a minute, later, or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.request import SOON_S

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.lab.replay.compact import CompactTrace
    from kvcache.lab.replay.requests import Int64Array


def derive_hints(trace: CompactTrace, nexts: Int64Array, error: float = 0.0, seed: int = 0) -> npt.NDArray[np.int8]:
    """Return what each request of a trace would have said of its next use.

    Parameters
    ----------
    trace : CompactTrace
        The requests, with their times.
    nexts : numpy.ndarray
        What `kvcache.lab.replay.compact.next_uses` returns of it.
    error : float
        Share of the requests whose hint is one of the two wrong ones, 0 <= error <= 1.
    seed : int
        Which those are.

    Returns
    -------
    numpy.ndarray
        A place in `NEXT_USES` for each request, int8, shape (requests,).

    Notes
    -----
    A request's next use is the first request that names one of the blocks that it was the first to name; or, where it
    named none, the last block of its prompt. What it shares with other sessions says nothing of its own.
    """
    if not 0 <= error <= 1:
        raise ValueError(f"error must be a share in 0..1, got {error!r}")
    num_places = len(trace.ids)
    is_known = np.zeros(num_places, dtype=np.bool_)
    hints = np.zeros(len(trace), dtype=np.int8)
    never = np.iinfo(np.int64).max
    for first, last in trace.pieces():
        bounds = np.asarray(trace.bounds[first : last + 1])
        begin, end = int(bounds[0]), int(bounds[-1])
        # In order, as a block named for the first time in this piece may be named again in it.
        piece = np.asarray(nexts[begin:end])
        is_known[piece[piece >= 0]] = True
        is_own = ~is_known[begin:end] & (piece != -2)
        lengths = np.diff(bounds)
        filled = np.flatnonzero(lengths)
        starts = bounds[:-1][filled] - begin
        if not len(filled):
            continue
        has_own = np.add.reduceat(is_own, starts) > 0
        tails = bounds[1:][filled] - 1 - begin
        is_own[tails[~has_own]] = True
        candidates = np.where(is_own & (piece >= 0), piece, never)
        after = np.minimum.reduceat(candidates, starts)
        comes_back = after < never
        number = np.searchsorted(trace.bounds, np.where(comes_back, after, 0), side="right") - 1
        gaps = trace.arrivals_s[number] - trace.arrivals_s[first + filled]
        hints[first + filled] = np.where(comes_back, np.where(gaps <= SOON_S, 1, 2), 0)
    if error > 0:
        draw = np.random.default_rng(seed)
        is_wrong = draw.random(len(hints)) < error
        hints[is_wrong] = (hints[is_wrong] + draw.integers(1, 3, int(is_wrong.sum()))) % 3
    return hints
