"""Read a whole trace in order of time, with progress, and look whether its times can be true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcache.cli import common
from kvcache.lab.traces.compact import CompactTrace

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Request, TraceFile

_REFRESH_REQUESTS = 1000
_LAST_S = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
_LONG_GAP_S = 300.0
_MANY, _SHORT_S = 20, 10.0
# Limits of plausible rates: above that of a thousand accelerators, and a tenth of that of one.
_MOST_TOKENS_PER_S, _LEAST_TOKENS_PER_S = 1e7, 1e3
# Fewer requests may come from one user, whose engine is mostly idle: then a low rate is plausible.
_TRAFFIC = 1000
_IDLE = 0.05
# Larger times count from 1970, smaller ones from the beginning of a trace.
_FIRST_DATE_S = 1e8
_SHOWN_NAMES = 5


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
    all_per_s = compact.num_tokens / max(last_s - first_s, 1e-9)
    if gap_s > _LONG_GAP_S:
        reasons.append(f"{gap_s:,.0f} s pass between most requests")
    elif len(compact) >= _TRAFFIC and work is not None and all_per_s * work[0] < _IDLE * work[1]:
        reasons.append(f"{work[1]:,} engines are busy {all_per_s * work[0] / work[1]:.1%} even without a cache")
    elif len(compact) >= _TRAFFIC and work is None and all_per_s < _LEAST_TOKENS_PER_S:
        reasons.append(f"only {all_per_s:,.0f} tokens a second come in")
    return lines + ([f"warning: {'; '.join(reasons)}: is --time-unit right?"] if reasons else [])


def lines_read(trace: TraceFile, compact: CompactTrace) -> list[str]:
    """Return lines on a file's requests, prompts and times, so that users notice a wrong reading."""
    reading = trace.reading
    parts = [f"{len(compact):,} requests"]
    if reading is not None and reading.models:
        models = len(reading.models)
        parts[0] += f" of {models:,} models" if models > 1 else f" of {next(iter(reading.models))}"
    if reading is not None and reading.prompts:
        shapes = reading.prompts.most_common(_SHOWN_NAMES)
        counts = [f" ({number:,})" if len(shapes) > 1 else "" for _, number in shapes]
        parts.append("prompts of " + " or ".join(name + count for (name, _), count in zip(shapes, counts, strict=True)))
    if trace.num_untimed < len(compact):
        parts.append(_span(float(compact.arrivals_s[0]), float(compact.arrivals_s[-1])))
    lines = [", ".join([*parts, *["sorted"] * (compact.num_late > 0)])]
    if reading is None:
        return lines
    if len(reading.models) > 1:
        lines.append(
            f"models, which share no blocks: {_counted(reading.models)}; a plan of one: "
            f"--only model={next(iter(reading.models))}"
        )
    if reading.left_out:
        lines.append(f"left out: {_counted(reading.left_out)}")
    if reading.expanded:
        lines.append(f"{reading.expanded:,} records hold a conversation of several answers: each answer is a request.")
    if reading.ignored:
        names = ", ".join(f"`{name}`" for name in reading.ignored)
        lines.append(f"ignored: {names}; if it is part of the prompt: --prompt-fields")
    return lines


def _counted(names: Counter[str]) -> str:
    shown = [f"{name} ({number:,})" for name, number in names.most_common(_SHOWN_NAMES)]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else "")


def _span(first_s: float, last_s: float) -> str:
    """Return the time from the first to the last request: dates if they count from 1970."""
    if not _FIRST_DATE_S < first_s <= last_s < _LAST_S:
        return f"over {common.format_seconds(last_s - first_s)}"
    first, last = (datetime.fromtimestamp(moment, UTC) for moment in (first_s, last_s))
    return f"{first:%Y-%m-%d %H:%M} to {last:{'%H:%M' if first.date() == last.date() else '%Y-%m-%d %H:%M'}} UTC"
