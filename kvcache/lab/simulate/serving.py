"""A model of serving: loads over links, prefill on engines, queues, and prices.

Each link moves, and each engine prefills, one request at a time. Decoding, and copies to host memory, take no time.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Float64Array, Int64Array

_GIB = 1 << 30
_DAY_S = 86_400.0
_WINDOW_S = 60.0
_BUSY = 0.8


@dataclass(frozen=True, slots=True)
class Medium:
    """Host memory or a tier below it: its name in reports, the rate at which it loads, and the price of a GiB."""

    name: str
    bytes_per_s: float
    price_per_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """The media and engines that hits are weighed by.

    `media` begins with host memory, through which every block passes. `token_prefill_s` None is unknown: then there is
    no time to first token.
    """

    block_bytes: int
    media: tuple[Medium, ...]
    token_prefill_s: float | None
    num_engines: int = 1


@dataclass(frozen=True, slots=True)
class Flow:
    """Blocks that each medium served and that were written to it, and hit tokens, by request; int64.

    `hits` and `writes` have the shape (requests, media), `hit_tokens` (requests,).
    """

    hits: Int64Array
    writes: Int64Array
    hit_tokens: Int64Array


def engines_for(arrivals_s: Float64Array, num_tokens: int, token_prefill_s: float) -> int:
    """Return how many engines are busy for at most 80 % of a trace's time without a cache."""
    span_s = float(arrivals_s[-1] - arrivals_s[0]) if len(arrivals_s) > 1 else 0.0
    return max(1, math.ceil(num_tokens * token_prefill_s / (_BUSY * span_s))) if span_s > 0 else 1


def weigh(arrivals_s: Float64Array, input_lengths: Int64Array, flow: Flow, serving: Serving) -> dict[str, Any]:
    """Return rates, loads, saved prefill and times to first token; unknown figures are None."""
    span_s = float(arrivals_s[-1] - arrivals_s[0]) if len(arrivals_s) > 1 else 0.0
    media = []
    for i, medium in enumerate(serving.media):
        # Blocks from tiers pass through host memory.
        reads = flow.hits.sum(axis=1) if i == 0 else flow.hits[:, i]
        read_bytes = reads * serving.block_bytes
        write_bytes = flow.writes[:, i] * serving.block_bytes
        media.append(
            {
                "name": medium.name,
                "hit_blocks": int(flow.hits[:, i].sum()),
                "read_bytes": int(read_bytes.sum()),
                "write_bytes": int(write_bytes.sum()),
                "load_s": float(read_bytes.sum()) / medium.bytes_per_s,
                "read_gb_per_s": _mean_rate(read_bytes, span_s),
                "read_peak_gb_per_s": _peak_rate(arrivals_s, read_bytes, span_s),
                "write_gb_per_s": _mean_rate(write_bytes, span_s),
                "write_peak_gb_per_s": _peak_rate(arrivals_s, write_bytes, span_s),
                "write_bytes_per_day": float(write_bytes.sum()) / span_s * _DAY_S if span_s else None,
            }
        )
    facts: dict[str, Any] = {
        "media": media,
        "load_s": sum(medium["load_s"] for medium in media),
        "num_engines": serving.num_engines,
        "saved_prefill_s": None,
        "saved_prefill_share": int(flow.hit_tokens.sum()) / max(1, int(input_lengths.sum())),
        "engine_busy": None,
        "ttft_mean_s": None,
        "ttft_p50_s": None,
        "ttft_p99_s": None,
    }
    if serving.token_prefill_s is not None:
        facts["saved_prefill_s"] = float(flow.hit_tokens.sum()) * serving.token_prefill_s
        if span_s:
            waits, busy_s = _first_tokens(arrivals_s, input_lengths, flow, serving)
            facts["engine_busy"] = busy_s / (span_s * serving.num_engines)
            facts["ttft_mean_s"] = float(waits.mean())
            facts["ttft_p50_s"], facts["ttft_p99_s"] = np.quantile(waits, (0.5, 0.99)).tolist()
    return facts


def weigh_nothing(arrivals_s: Float64Array, input_lengths: Int64Array, serving: Serving) -> dict[str, Any]:
    """Return the times to first token and the load of the engines without any cache."""
    none = np.zeros((len(arrivals_s), len(serving.media)), dtype=np.int64)
    facts = weigh(np.asarray(arrivals_s), np.asarray(input_lengths), Flow(none, none, none[:, 0]), serving)
    return {name: facts[name] for name in ("ttft_p50_s", "ttft_p99_s", "engine_busy", "num_engines")}


def price_of(capacities: tuple[int, ...], serving: Serving) -> float | None:
    """Return the price of media with `num_blocks` blocks each, or None if a price is missing."""
    total = 0.0
    for blocks, medium in zip(capacities, serving.media, strict=False):
        if medium.price_per_gib is None:
            return None
        total += blocks * serving.block_bytes / _GIB * medium.price_per_gib
    return total


def _first_tokens(
    arrivals_s: Float64Array, input_lengths: Int64Array, flow: Flow, serving: Serving
) -> tuple[Float64Array, float]:
    """Return the time to first token of each request, and the seconds for which engines were busy."""
    order = np.argsort(arrivals_s, kind="stable")
    arrived = arrivals_s[order]
    # A request's blocks come from all tiers at once, and then over the link of host memory to the device.
    ready = arrived
    for i, medium in enumerate(serving.media[1:], 1):
        seconds = flow.hits[order, i] * serving.block_bytes / medium.bytes_per_s
        ready = np.maximum(ready, _queued(arrived, seconds))
    all_hits = flow.hits[order].sum(axis=1)
    begin = np.argsort(ready, kind="stable")
    seconds = all_hits[begin] * serving.block_bytes / serving.media[0].bytes_per_s
    loaded = np.empty_like(ready)
    loaded[begin] = _queued(ready[begin], seconds)
    assert serving.token_prefill_s is not None
    computed = np.maximum(input_lengths - flow.hit_tokens, 1)[order] * serving.token_prefill_s
    begin = np.argsort(loaded, kind="stable")
    done = np.empty_like(ready)
    if serving.num_engines == 1:
        done[begin] = _queued(loaded[begin], computed[begin])
    else:
        free = [0.0] * serving.num_engines
        ends = []
        for at, seconds_of_one in zip(loaded[begin].tolist(), computed[begin].tolist(), strict=True):
            end = max(at, free[0]) + seconds_of_one
            heapq.heapreplace(free, end)
            ends.append(end)
        done[begin] = ends
    return done - arrived, float(computed.sum())


def _queued(ready: Float64Array, seconds: Float64Array) -> Float64Array:
    """Return when jobs end on one server in this order; `ready` ascends, and jobs of no length do not wait."""
    ends = np.array(ready)
    works = seconds > 0
    at, length = ready[works], seconds[works]
    done = np.cumsum(length)
    ends[works] = done + np.maximum.accumulate(at - (done - length)) if len(at) else 0.0
    return ends


def _mean_rate(num_bytes: Int64Array, span_s: float) -> float | None:
    return float(num_bytes.sum()) / span_s / 1e9 if span_s else None


def _peak_rate(arrivals_s: Float64Array, num_bytes: Int64Array, span_s: float) -> float | None:
    """Return GB/s of the busiest minute."""
    if not span_s:
        return None
    minutes = ((arrivals_s - arrivals_s.min()) // _WINDOW_S).astype(np.int64)
    return float(np.bincount(minutes, weights=num_bytes).max()) / min(_WINDOW_S, span_s) / 1e9
