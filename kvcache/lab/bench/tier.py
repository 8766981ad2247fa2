"""Measure any tier and, in turns, its medium's own client: rates both ways, and how long calls block a thread."""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.assembly.assemble import parse_tier
from kvcache.lab.bench.plain_clients import plain_client
from kvcache.tiers.base.tier import host_rows

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import Tier

Progress = Callable[[str, int, int], None]
"""Called with the name of the step, the rounds done and the rounds in all."""
_PATIENCE_S, _PAUSE_S = 120.0, 0.005
_JOB_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class TierRates:
    """Rates in bytes a second, each the best of its rounds; times of single calls in seconds.

    `plain_*` are the rates of the plain client, 0 if the medium has none. `store_ratio` and `load_ratio` are the tier's
    rate divided by the plain client's in each round, the medians over rounds: the load of the machine changes little
    within a round.
    """

    tier: str
    block_bytes: int
    num_blocks: int
    num_rounds: int
    store_bytes_per_s: float
    load_bytes_per_s: float
    plain_store_bytes_per_s: float
    plain_load_bytes_per_s: float
    store_ratio: float
    load_ratio: float
    exists_s_per_key: float
    call_s_p50: float
    call_s_max: float


def measure_tier(
    entry: Mapping[str, Any],
    block_bytes: int,
    num_blocks: int,
    num_rounds: int = 10,
    progress: Progress | None = None,
) -> TierRates:
    """Store and load `num_blocks` blocks `num_rounds` times, in turns with the plain client; remove them at the end.

    `entry` is an entry of ``extra_config["tiers"]``. One more round before the others makes connections and touches
    memory; its times do not count.
    """
    settings = parse_tier(entry)
    host_blocks = host_rows(num_blocks, block_bytes)
    flat = host_blocks.reshape(-1)
    # As bfloat16 and as float16 these are values of about 1, which codecs can encode.
    words = flat[: len(flat) // 2 * 2].view(np.uint16)
    words[:] = np.random.default_rng(0).integers(0x3C00, 0x4000, len(words), np.uint16)
    # A separate namespace, so that the run neither finds nor removes the blocks of engines.
    tier = settings.make(host_blocks, {"bench": secrets.token_hex(8)})
    # Reset first: a later reset deletes private blocks only, because blocks of the fingerprint may be other engines'.
    _clear(tier)
    plain = plain_client(entry, host_blocks)
    times: dict[str, list[float]] = {name: [] for name in ("store", "load", "plain store", "plain load", "exists")}
    calls: list[float] = []

    def timed(name: str, number: int, action: Callable[..., None], *arguments: Any) -> None:
        if progress is not None:
            progress(name, max(0, number), num_rounds)
        start = time.perf_counter()
        action(*arguments)
        if number >= 0:
            times[name].append(time.perf_counter() - start)

    def run_tier(number: int) -> None:
        keys = [b"%08d-%08d" % (number + 1, i) for i in range(num_blocks)]
        timed("store", number, move, tier, tier.submit_store, keys, _JOB_BLOCKS, num_blocks, calls)
        timed("exists", number, _ask, tier, [b"?" + key for key in keys])
        timed("load", number, move, tier, tier.submit_load, keys, _JOB_BLOCKS, num_blocks, calls)
        _clear(tier)

    def run_plain(number: int) -> None:
        if plain is not None:
            names = [secrets.token_bytes(16) for _ in range(num_blocks)]
            timed("plain store", number, plain.put, names)
            timed("plain load", number, plain.fetch, names)
            plain.remove(names)

    try:
        for number in range(-1, num_rounds):
            # The second part of a round benefits from caches that the first part filled.
            for run in (run_tier, run_plain) if number % 2 else (run_plain, run_tier):
                run(number)
    finally:
        tier.shutdown()
        if plain is not None:
            plain.close()
    calls.sort()
    num_bytes = num_blocks * block_bytes
    best = {name: min(values, default=math.inf) for name, values in times.items()}

    def ratio(way: str) -> float:
        pairs = zip(times[f"plain {way}"], times[way], strict=plain is not None)
        return statistics.median([theirs / ours for theirs, ours in pairs] or [0.0])

    return TierRates(
        repr(tier),
        block_bytes,
        num_blocks,
        num_rounds,
        num_bytes / best["store"],
        num_bytes / best["load"],
        num_bytes / best["plain store"],
        num_bytes / best["plain load"],
        ratio("store"),
        ratio("load"),
        best["exists"] / num_blocks,
        calls[len(calls) // 2],
        calls[-1],
    )


def move(
    tier: Tier,
    submit: Callable[[int, list[bytes], list[int]], bool],
    keys: list[bytes],
    job_blocks: int,
    host_blocks: int,
    calls: list[float],
    moved: Callable[[int, int], None] | None = None,
) -> None:
    """Store or load blocks in jobs, as many at a time as the tier takes and the host pool has room for.

    `submit` is the tier's `submit_store` or `submit_load`; `calls` receives how long each call of the tier took, and
    `moved` is called with the blocks done and the blocks in all. After looking in vain it waits until the tier has
    ended work, or for five milliseconds: looking more often takes the time of the threads that move blocks.
    """
    free = [range(first, min(first + job_blocks, host_blocks)) for first in range(0, host_blocks, job_blocks)]
    busy: dict[int, range] = {}
    position = num_done = 0
    has_ended = Event()
    tier.call_on_end(has_ended.set)
    end_s = time.monotonic() + _PATIENCE_S
    while num_done < len(keys):
        while free and position < len(keys):
            ids = free[-1]
            batch = keys[position : position + len(ids)]
            start = time.perf_counter()
            is_taken = submit(position, batch, list(ids[: len(batch)]))
            calls.append(time.perf_counter() - start)
            if not is_taken:
                # The tier limits its bytes in flight.
                break
            busy[position] = free.pop()
            position += len(batch)
        has_ended.clear()
        start = time.perf_counter()
        results = tier.get_finished()
        calls.append(time.perf_counter() - start)
        for result in results:
            if result.job_id is None:
                continue
            if result.error or result.failed:
                raise OSError(f"{len(result.failed)} blocks failed: {result.error or 'full, evicted or bad'}")
            free.append(busy.pop(result.job_id))
            num_done += len(result.done)
        if results:
            end_s = time.monotonic() + _PATIENCE_S
            if moved is not None:
                moved(num_done, len(keys))
        else:
            if not busy or time.monotonic() > end_s:
                raise OSError(f"the tier takes nothing: {tier.stats()}")
            has_ended.wait(_PAUSE_S)


def _ask(tier: Tier, keys: list[bytes]) -> None:
    # Look up all keys at once: they are absent, and a look-up ends at the first absent key.
    while tier.lookup(keys) is None:
        tier.get_finished()
        time.sleep(0.0001)


def _clear(tier: Tier) -> None:
    tier.reset()
    end_s = time.monotonic() + _PATIENCE_S
    while tier.stats().unavailable_reason:
        tier.get_finished()
        if time.monotonic() > end_s:
            raise OSError(f"the tier does not forget: {tier.stats()}")
        time.sleep(0.001)
