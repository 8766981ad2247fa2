"""Read a whole trace in order of time, with progress, and look whether its times can be true."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcache.lab.traces.compact import CompactTrace

if TYPE_CHECKING:
    from kvcache.cli import common
    from kvcache.lab.traces.requests import Request, TraceFile

_REFRESH_REQUESTS = 1000
_LAST_S = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
_LONG_GAP_S = 300.0
_MANY, _SHORT_S = 20, 10.0
# More than a thousand accelerators compute.
_MOST_TOKENS_PER_S = 1e7


def read_trace(trace: TraceFile, folder: Path, bar: common.Bar, sample: float = 1.0, seed: int = 0) -> CompactTrace:
    """Write a trace, or a share of its blocks, to `folder` in order of time, and map it."""

    def read() -> Iterator[Request]:
        for i, request in enumerate(trace):
            if i % _REFRESH_REQUESTS == 0 and bar.is_due():
                share = trace.position_bytes / trace.size_bytes
                bar.show(share, int(100 * share), f"{i:,} requests")
            yield request

    return CompactTrace.spool(read(), trace.block_size, folder, sample, seed)


def doubts(
    compact: CompactTrace, num_untimed: int, missed_share: float = 1.0, work: tuple[float, int] | None = None
) -> list[str]:
    """Return lines about a trace's times: how many were sorted or missing, and why their unit is doubtful.

    `num_untimed` records had no time; `missed_share` of the tokens miss in a cache without limit. `work` is the time to
    prefill a token in seconds, and the number of engines.
    """
    lines = []
    if compact.num_late:
        lines.append(f"{compact.num_late:,} of {len(compact):,} requests stood behind later ones: sorted by time")
    if num_untimed:
        lines.append(f"{num_untimed:,} requests have no time: each arrives a second after the one before it")
    if not len(compact):
        return lines
    first_s, last_s = float(compact.arrivals_s[0]), float(compact.arrivals_s[-1])
    reasons = []
    if last_s > _LAST_S:
        reasons.append("the last request comes after the year 2100")
    tokens_per_s = missed_share * compact.num_tokens / max(last_s - first_s, 1e-9)
    if work is not None and len(compact) > 1 and tokens_per_s * work[0] > work[1]:
        busy = tokens_per_s * work[0] / work[1]
        reasons.append(f"{work[1]:,} engines are busy {busy:.0%} even over a cache without limit")
    elif len(compact) > 1 and tokens_per_s > _MOST_TOKENS_PER_S:
        reasons.append(f"{tokens_per_s:,.0f} tokens a second miss even in a cache without limit")
    if len(compact) >= _MANY and last_s - first_s < _SHORT_S:
        reasons.append(f"all {len(compact):,} requests come within {last_s - first_s:.3g} s")
    gap_s = float(np.median(np.diff(compact.arrivals_s))) if len(compact) > 1 else 0.0
    if gap_s > _LONG_GAP_S:
        reasons.append(f"{gap_s:,.0f} s pass between most requests")
    return lines + [f"warning: {reason}: is --time-unit right?" for reason in reasons]
