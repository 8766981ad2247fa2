"""Many engines behind a router over one shared store: who computes what again, and what the store and the router bear.

The engines' host memory and the store are pools that serve, under their policies; time is the trace's. An engine
prefills one request at a time, and a block that is being computed counts as there; docs/scale.md says what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.request import ReqContext

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import Int64Array

    Float64Array = npt.NDArray[np.float64]

ROUTERS = ("round_robin", "prefix", "events")
QUERY_KEYS = 1024
"""Keys of one existence query at most, as `JobTier` asks them."""
STEP_S = 0.05
"""A scheduler asks again for a waiting request this often."""
HELD_S, ABSENT_S = 10.0, 1.0
"""For how long an engine remembers that the store holds a block, and that it does not: the defaults of `JobTier`."""
_BRANCHES = 8
_STAGGER_S = 600.0
_WINDOW_S = 60.0
_PROGRESS_REQUESTS = 1000
_NOBODY = -1


class ScaledTrace:
    """Copies of a trace at once, whose users share only what all of the trace's users share.

    A block is shared if prompts go at least eight different ways right behind it, or behind a block that it leads to:
    system prompts, descriptions of tools. All others are the copy's own. Copies begin within ten minutes, which `seed`
    draws, one at once.

    Attributes
    ----------
    num_ids : int
        Different blocks; ids are 0 to `num_ids` - 1.
    num_shared : int
        Blocks that all copies share; their ids come first.
    span_s : float
        Seconds from the first request to the last.
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
        """Yield when each request comes, its ids, and the tokens of its prompt."""
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
    # What leads to a branch is shared as well.
    at_branch = branches[ids]
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        found = np.flatnonzero(at_branch[first:last])
        if len(found):
            is_shared[ids[first : first + found[-1] + 1]] = True
    return is_shared


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What a fleet is like.

    Parameters
    ----------
    num_engines : int
        Engines, each with host memory of its own.
    router : str
        ``"round_robin"``; ``"prefix"``: where the longest prefix of the prompt was sent last; ``"events"``: where the
        longest prefix lies by the engines' events. The last two take the engine that is free first where the other's
        queue would cost more than its prefix saves.
    num_blocks : int
        Blocks of host memory of each engine.
    store_blocks : int
        Blocks of the shared store; 0: there is none.
    cache_policy, store_policy : str
        Policies of host memory and of the store.
    token_s : float
        Seconds of prefill a token.
    block_load_s : float
        Seconds that an engine takes to load a block from the store.
    """

    num_engines: int
    router: str
    num_blocks: int
    store_blocks: int = 0
    cache_policy: str = "lru"
    store_policy: str = "lru"
    token_s: float = 1e-4
    block_load_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("num_engines", 1), ("num_blocks", 1), ("store_blocks", 0)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise ValueError(f"{name} must be an int >= {least}, got {getattr(self, name)!r}")
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        for name in ("token_s", "block_load_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number >= 0, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Load:
    """Something a second: its mean over the trace, and that of its busiest minute."""

    mean: float
    peak: float


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What a fleet did; blocks, requests, and rates a second.

    Parameters
    ----------
    plan : FleetPlan
        The fleet.
    requests, rejected_requests : int
        All, and those longer than an engine's host memory.
    blocks, local_blocks, store_blocks, missed_blocks : int
        Blocks of all prompts; hit in host memory, hit in the store, computed.
    written_blocks, store_evicted_blocks : int
        Written to the store, and evicted from it.
    store_held_blocks : int
        Held by the store at the end.
    ttft_p50_s, ttft_p99_s : float
        Time to first token: in the queue, loading and computing.
    busy : float
        Share of the time for which engines prefill or load.
    imbalance : float
        Busiest engine's work over the mean engine's.
    read_blocks_per_s, written_blocks_per_s : Load
        The store's traffic.
    queries_per_s : dict of str to Load
        Existence queries a second: one key a query or batches, asked anew at every step or remembered.
    query_keys_per_s : Load
        Keys in them, remembered.
    events_per_s : Load
        Blocks in the events of all engines.
    router_entries : int
        Blocks that the router knew of at the end.
    elapsed_s : float
        Seconds of simulation.
    """

    plan: FleetPlan
    requests: int
    rejected_requests: int
    blocks: int
    local_blocks: int
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

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        return asdict(self)


class Router(Protocol):
    """Chooses an engine for each request."""

    num_entries: int

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the engine that a request goes to."""

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Called when a request went to an engine."""

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Called with the blocks that came into an engine's host memory, and left it."""


class RoundRobin:
    """One engine after the other."""

    num_entries = 0

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._next = 0

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the next engine."""
        engine, self._next = self._next, (self._next + 1) % self._num_engines
        return engine

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Nothing is remembered."""

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Nothing is remembered."""


class PrefixRouter:
    """To where the longest prefix was sent last, unless its queue costs more than the prefix saves."""

    def __init__(self, num_ids: int, block_s: float) -> None:
        self._engine_of = np.full(num_ids, _NOBODY, np.int32)
        self._block_s = block_s
        self.num_entries = 0

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the engine with the prefix, or the one that is free first."""
        # Of those that are free, the one that has been so for longest.
        idle = int(free_s.argmin())
        known = self._engine_of[ids]
        unknown = np.flatnonzero(known < 0)
        depth = int(unknown[0]) if len(unknown) else len(ids)
        if not depth:
            return idle
        engine = int(known[depth - 1])
        waits_s = max(free_s[engine] - now_s, 0.0) - max(free_s[idle] - now_s, 0.0)
        return engine if waits_s <= depth * self._block_s else idle

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Remember where a prompt was sent."""
        self.num_entries += int((self._engine_of[ids] < 0).sum())
        self._engine_of[ids] = engine

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """What leaves host memory is not noticed."""


class EventsRouter(PrefixRouter):
    """To where the longest prefix lies, by the engines' events: the engine that took its last block last."""

    def __init__(self, num_ids: int, block_s: float) -> None:
        super().__init__(num_ids, block_s)
        # Further engines that hold a block, oldest first; most blocks are in one.
        self._others: dict[int, list[int]] = {}

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Nothing is remembered: events say who holds what."""

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Follow what engines hold."""
        holders, others = self._engine_of, self._others
        before = holders[evicted]
        sole = evicted[before == engine]
        holders[sole] = _NOBODY
        self.num_entries -= len(sole)
        if others:
            for block in evicted[before != engine].tolist():
                others[block].remove(engine)
                if not others[block]:
                    del others[block]
            for block in sole.tolist():
                if block in others:
                    holders[block] = others[block].pop()
                    self.num_entries += 1
                    if not others[block]:
                        del others[block]
        before = holders[stored]
        for block, holder in zip(stored[before >= 0].tolist(), before[before >= 0].tolist(), strict=True):
            others.setdefault(block, []).append(holder)
        self.num_entries += int((before < 0).sum())
        holders[stored] = engine


def make_router(plan: FleetPlan, num_ids: int, block_size: int) -> Router:
    """Return the router of a fleet."""
    if plan.router == "round_robin":
        return RoundRobin(plan.num_engines)
    return (PrefixRouter if plan.router == "prefix" else EventsRouter)(num_ids, plan.token_s * block_size)


def run_fleet(
    trace: ScaledTrace, plan: FleetPlan, progressed: Callable[[int], None] | None = None, limit: int | None = None
) -> FleetResult:
    """Send a trace's requests through a fleet."""
    most = max(1, trace.num_ids)
    engines = [
        CPUOffloadingManager(trace.block_size, min(plan.num_blocks, most), plan.cache_policy)
        for _ in range(plan.num_engines)
    ]
    store = None
    if plan.store_blocks:
        store = CPUOffloadingManager(trace.block_size, min(plan.store_blocks, most), plan.store_policy)
    router = make_router(plan, trace.num_ids, trace.block_size)
    num_requests = len(trace) if limit is None else min(limit, len(trace))
    free_s = np.zeros(plan.num_engines)
    work_s = np.zeros(plan.num_engines)
    waits_s, ttft_s = np.zeros(num_requests), np.zeros(num_requests)
    # Per request: blocks, local hits, hits in the store, written to it, blocks in events.
    counts = np.zeros((num_requests, 5), np.int64)
    num_rejected = 0
    for number, (now_s, ids, input_length) in zip(range(num_requests), trace, strict=False):
        if progressed is not None and number % _PROGRESS_REQUESTS == 0:
            progressed(number)
        keys: list[bytes] = ids.view("V8").tolist()
        engine = router.choose(now_s, ids, free_s)
        memory, context = engines[engine], ReqContext()
        num_local: int = memory.lookup(keys, context)
        memory.touch(keys, context)
        output = memory.prepare_store(keys, context)
        num_events = 0
        if output is None:
            num_rejected += 1
        else:
            memory.complete_store(output.keys_to_store, context)
            num_events = len(output.keys_to_store) + len(output.evicted_keys)
            if num_events:
                router.on_events(engine, _ids_of(output.keys_to_store), _ids_of(output.evicted_keys))
        memory.on_request_finished(context)
        num_found = num_written = 0
        if store is not None and num_local < len(keys):
            rest = keys[num_local:]
            num_found = store.lookup(rest, context)
            store.touch(rest[:num_found], context)
            written = store.prepare_store(rest[num_found:], context)
            if written is not None:
                store.complete_store(written.keys_to_store, context)
                num_written = len(written.keys_to_store)
            store.on_request_finished(context)
        router.on_placed(engine, ids)
        hit_tokens = min((num_local + num_found) * trace.block_size, input_length)
        seconds = max(input_length - hit_tokens, 1) * plan.token_s + num_found * plan.block_load_s
        begin_s = max(now_s, free_s[engine])
        free_s[engine] = begin_s + seconds
        work_s[engine] += seconds
        waits_s[number], ttft_s[number] = begin_s - now_s, begin_s + seconds - now_s
        counts[number] = len(keys), num_local, num_found, num_written, num_events
    if progressed is not None:
        progressed(num_requests)
    stats = None if store is None else store.stats()
    arrivals_s = trace.arrivals_s[:num_requests]
    blocks, local, found, put, _ = counts.sum(axis=0).tolist()
    asked = counts[:, 0] - counts[:, 1] if store is not None else np.zeros(num_requests, np.int64)
    queries, keys_asked = _queries(asked, counts[:, 2], waits_s)
    span_s = float(arrivals_s[-1]) if num_requests else 0.0
    p50, p99 = np.quantile(ttft_s, (0.5, 0.99)).tolist() if num_requests else (0.0, 0.0)
    return FleetResult(
        plan=plan,
        requests=num_requests,
        rejected_requests=num_rejected,
        blocks=blocks,
        local_blocks=local,
        store_blocks=found,
        missed_blocks=blocks - local - found,
        written_blocks=put,
        store_evicted_blocks=0 if stats is None else stats.evicted_blocks,
        store_held_blocks=0 if stats is None else stats.num_blocks - stats.num_free,
        ttft_p50_s=p50,
        ttft_p99_s=p99,
        busy=float(work_s.sum()) / (span_s * plan.num_engines) if span_s else 0.0,
        imbalance=float(work_s.max() / work_s.mean()) if work_s.any() else 1.0,
        read_blocks_per_s=_load(arrivals_s, counts[:, 2]),
        written_blocks_per_s=_load(arrivals_s, counts[:, 3]),
        queries_per_s={name: _load(arrivals_s, number) for name, number in queries.items()},
        query_keys_per_s=_load(arrivals_s, keys_asked),
        events_per_s=_load(arrivals_s, counts[:, 4]),
        router_entries=router.num_entries,
    )


def _ids_of(keys: list[bytes]) -> Int64Array:
    return np.frombuffer(b"".join(keys), np.int64)


def _queries(asked: Int64Array, found: Int64Array, waits_s: Float64Array) -> tuple[dict[str, Int64Array], Int64Array]:
    """Return how many existence queries each request needs, and how many keys are in them where answers are kept."""
    steps = 1 + (waits_s // STEP_S).astype(np.int64)
    again_held, again_absent = (waits_s // HELD_S).astype(np.int64), (waits_s // ABSENT_S).astype(np.int64)
    absent = asked - found
    # A run is asked for up to the first block that is missing.
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
