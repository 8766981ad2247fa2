"""Simulate a fleet: engines with their own host memory and disk, behind a router, over one shared store.

Host memory and the store use the pools and policies of production; time is the trace's. docs/scale.md lists the
limits of the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.fleet.routers import ONE_POOL, make_router
from kvcache.request import ReqContext

if TYPE_CHECKING:
    from kvcache.lab.fleet.routers import FleetPlan
    from kvcache.lab.fleet.scaled_trace import ScaledTrace
    from kvcache.lab.traces.requests import Float64Array, Int64Array

QUERY_KEYS = 1024
"""Keys of one existence query at most, as `JobTier` asks them."""
STEP_S = 0.05
"""A scheduler asks again for a waiting request this often."""
HELD_S, ABSENT_S = 10.0, 1.0
"""For how long an engine remembers that the store holds a block, and that it does not: the defaults of `JobTier`."""
_WINDOW_S = 60.0
_PROGRESS_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """A rate a second: its mean over the trace, and in the busiest minute."""

    mean: float
    peak: float


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The counts of a simulated fleet; rates are a second.

    `local_blocks` hit in the engines' memory, `disk_blocks` on their disks and `store_blocks` in the store;
    `missed_blocks` were computed. `queries_per_s` are existence queries of one key each or in batches, asked anew at
    every step or remembered; `query_keys_per_s` counts their keys. `busy` is the share of the time for which engines
    prefill or load, and `imbalance` the work of the busiest engine over the mean.
    """

    plan: FleetPlan
    requests: int
    rejected_requests: int
    blocks: int
    local_blocks: int
    disk_blocks: int
    store_blocks: int
    missed_blocks: int
    written_blocks: int
    store_evicted_blocks: int
    store_held_blocks: int
    ttft_p50_s: float
    ttft_p99_s: float
    busy: float
    imbalance: float
    read_blocks_per_s: Load
    written_blocks_per_s: Load
    queries_per_s: dict[str, Load]
    query_keys_per_s: Load
    events_per_s: Load
    router_entries: int
    elapsed_s: float = field(default=0.0, compare=False)


def run_fleet(trace: ScaledTrace, plan: FleetPlan, progressed: Callable[[int], None] | None = None) -> FleetResult:
    """Send a trace's requests through a fleet."""
    most = max(1, trace.num_ids)
    now_s = 0.0
    # With one pool, every engine has the same one, of the same total size.
    num_shares = plan.num_engines if plan.router == ONE_POOL else 1
    num_pools = plan.num_engines // num_shares
    engines = num_shares * [
        CPUOffloadingManager(
            trace.block_size, min(num_shares * plan.num_blocks, most), plan.cache_policy, clock=lambda: now_s
        )
        for _ in range(num_pools)
    ]
    disks = num_shares * [
        CPUOffloadingManager(trace.block_size, min(num_shares * plan.disk_blocks, most))
        for _ in range(num_pools if plan.disk_blocks else 0)
    ]
    store = None
    if plan.store_blocks:
        store = CPUOffloadingManager(trace.block_size, min(plan.store_blocks, most))
    router = make_router(plan, trace.num_ids, trace.block_size)
    num_requests = len(trace)
    free_s = np.zeros(plan.num_engines)
    work_s = np.zeros(plan.num_engines)
    waits_s, ttft_s = np.zeros(num_requests), np.zeros(num_requests)
    restart_every = num_requests // (plan.restarts + 1) or 1
    # Per request: blocks, hits in memory, on disk and in the store, blocks written to it, and blocks in events.
    counts = np.zeros((num_requests, 6), np.int64)
    num_rejected = 0
    for number, (now_s, ids, input_length) in enumerate(trace):
        if progressed is not None and number % _PROGRESS_REQUESTS == 0:
            progressed(number)
        num_restarts, since_restart = divmod(number, restart_every)
        if not since_restart and 0 < num_restarts <= plan.restarts and num_shares == 1:
            restarted = (num_restarts - 1) % plan.num_engines
            engines[restarted].reset_cache()
            if not disks:
                router.on_restart(restarted)
        keys: list[bytes] = ids.view("V8").tolist()
        engine = router.choose(now_s, ids, free_s)
        memory, context = engines[engine], ReqContext()
        num_local: int = memory.lookup(keys, context)
        memory.touch(keys, context)
        output = memory.prepare_store(keys, context)
        num_events = num_disk = 0
        if output is None:
            num_rejected += 1
        else:
            memory.complete_store(output.keys_to_store, context)
        if disks:
            # All blocks are written through: the disk holds the blocks in memory, and a router gets the disk's events.
            disk = disks[engine]
            num_disk = disk.lookup(keys[num_local:], context)
            disk.touch(keys, context)
            output = disk.prepare_store(keys, context)
            if output is not None:
                disk.complete_store(output.keys_to_store, context)
            disk.on_request_finished(context)
        if output is not None:
            num_events = len(output.keys_to_store) + len(output.evicted_keys)
            if num_events:
                router.on_events(engine, _ids_of(output.keys_to_store), _ids_of(output.evicted_keys))
        memory.on_request_finished(context)
        num_found = num_written = 0
        rest = keys[num_local + num_disk :]
        if store is not None and rest:
            num_found = store.lookup(rest, context)
            store.touch(rest[:num_found], context)
            written = store.prepare_store(rest[num_found:], context)
            if written is not None:
                store.complete_store(written.keys_to_store, context)
                num_written = len(written.keys_to_store)
            store.on_request_finished(context)
        router.on_placed(engine, ids)
        num_loaded = num_disk + num_found
        hit_tokens = min((num_local + num_loaded) * trace.block_size, input_length)
        seconds = max(input_length - hit_tokens, 1) * plan.token_s
        seconds += num_loaded * plan.block_load_s + num_local * plan.host_load_s
        begin_s = max(now_s, free_s[engine])
        free_s[engine] = begin_s + seconds
        work_s[engine] += seconds
        waits_s[number], ttft_s[number] = begin_s - now_s, begin_s + seconds - now_s
        counts[number] = len(keys), num_local, num_disk, num_found, num_written, num_events
    if progressed is not None:
        progressed(num_requests)
    stats = None if store is None else store.stats()
    arrivals_s, span_s = trace.arrivals_s, trace.span_s
    blocks, local, on_disk, found, put, _ = counts.sum(axis=0).tolist()
    asked = counts[:, 0] - counts[:, 1] - counts[:, 2] if store is not None else np.zeros(num_requests, np.int64)
    queries, keys_asked = _queries(asked, counts[:, 3], waits_s)
    p50, p99 = np.quantile(ttft_s, (0.5, 0.99)).tolist() if num_requests else (0.0, 0.0)
    return FleetResult(
        plan=plan,
        requests=num_requests,
        rejected_requests=num_rejected,
        blocks=blocks,
        local_blocks=local,
        disk_blocks=on_disk,
        store_blocks=found,
        missed_blocks=blocks - local - on_disk - found,
        written_blocks=put,
        store_evicted_blocks=0 if stats is None else stats.evicted_blocks,
        store_held_blocks=0 if stats is None else stats.num_blocks - stats.num_free,
        ttft_p50_s=p50,
        ttft_p99_s=p99,
        busy=float(work_s.sum()) / (span_s * plan.num_engines) if span_s else 0.0,
        imbalance=float(work_s.max() / work_s.mean()) if work_s.any() else 1.0,
        read_blocks_per_s=_load(arrivals_s, counts[:, 3]),
        written_blocks_per_s=_load(arrivals_s, counts[:, 4]),
        queries_per_s={name: _load(arrivals_s, number) for name, number in queries.items()},
        query_keys_per_s=_load(arrivals_s, keys_asked),
        events_per_s=_load(arrivals_s, counts[:, 5]),
        router_entries=router.num_entries,
    )


def _ids_of(keys: list[bytes]) -> Int64Array:
    return np.frombuffer(b"".join(keys), np.int64)


def _queries(asked: Int64Array, found: Int64Array, waits_s: Float64Array) -> tuple[dict[str, Int64Array], Int64Array]:
    """Return existence queries by request, and their number of keys if answers are cached."""
    steps = 1 + (waits_s // STEP_S).astype(np.int64)
    again_held, again_absent = (waits_s // HELD_S).astype(np.int64), (waits_s // ABSENT_S).astype(np.int64)
    absent = asked - found
    # A query covers a run up to the first missing block.
    singles = found + (absent > 0)
    batches = -(-asked // QUERY_KEYS)
    queries = {
        "single": singles * steps,
        "single_remembered": singles + again_held * found + again_absent * (absent > 0),
        "batched": batches * steps,
        "batched_remembered": batches + again_held * -(-found // QUERY_KEYS) + again_absent * -(-absent // QUERY_KEYS),
    }
    return queries, asked + again_held * found + again_absent * absent


def _load(arrivals_s: Float64Array, counts: Int64Array) -> Load:
    if not len(arrivals_s) or arrivals_s[-1] <= 0:
        return Load(0.0, 0.0)
    span_s = float(arrivals_s[-1])
    minutes = (arrivals_s // _WINDOW_S).astype(np.int64)
    peak = float(np.bincount(minutes, weights=counts).max()) / min(_WINDOW_S, span_s)
    return Load(float(counts.sum()) / span_s, peak)
