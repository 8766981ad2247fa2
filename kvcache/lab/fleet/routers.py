"""The plan of a fleet, and the routers that choose an engine for each request."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Float64Array, Int64Array

ROUTERS = ("round_robin", "prefix", "events", "known")
ONE_POOL = "one_pool"
"""In place of a router: all engines share one host pool and one disk, and the engine that is free first is chosen."""
_NO_ENGINE = -1


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The engines, the router and the store of a fleet.

    `router` is ``"round_robin"``, ``"prefix"`` (the engine that last got the longest prefix of the prompt),
    ``"events"`` (the engine that holds the longest prefix by its KV events) or ``"known"`` (the same without loss). All
    but the first choose the engine that is free first if the other's queue costs more time than its prefix saves.
    `lost` is the share of the messages with events that get lost; the engine's next message repairs the view. Each of
    the `restarts` empties the host memory of one engine, in turn; `ONE_POOL` loses nothing. `token_s` are seconds of
    prefill a token, `block_load_s` seconds to load a block from disk or store, and `host_load_s` from host memory.
    `disk_blocks` (of each engine) and `store_blocks` of 0 are none.
    """

    num_engines: int
    router: str
    num_blocks: int
    store_blocks: int = 0
    cache_policy: str = "lru"
    token_s: float = 1e-4
    block_load_s: float = 0.0
    host_load_s: float = 0.0
    disk_blocks: int = 0
    lost: float = 0.0
    restarts: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.lost < 1 or (self.lost and self.router != "events"):
            raise ValueError(f"lost must be a share in 0..1 of the router events, got {self.lost!r} of {self.router!r}")


class RoundRobin:
    """Send requests to the engines in turn, whatever they hold."""

    num_entries = 0

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._next = 0

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the engine that a request goes to."""
        engine, self._next = self._next, (self._next + 1) % self._num_engines
        return engine

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Called after a request was sent to an engine."""

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Called with the blocks that entered and left an engine's host memory, or its disk if it has one."""

    def on_restart(self, engine: int) -> None:
        """Called after an engine without a disk has lost its blocks."""


class FreeEngine(RoundRobin):
    """Send a request to the engine that is free first."""

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the engine that is free first."""
        return int(free_s.argmin())


class PrefixRouter(RoundRobin):
    """Send a request to the engine that got its longest prefix last, unless its queue costs more than that saves."""

    def __init__(self, num_ids: int, block_s: float) -> None:
        self._engine_of = np.full(num_ids, _NO_ENGINE, np.int32)
        self._block_s = block_s
        self.num_entries = 0

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the engine with the prefix, or the engine that is free first."""
        # Of several free engines, take the one that has been free longest.
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
        """Remember the engine of a prompt."""
        self.num_entries += int((self._engine_of[ids] < 0).sum())
        self._engine_of[ids] = engine


class KnowingRouter(PrefixRouter):
    """Send a request to the engine that holds its longest prefix."""

    def __init__(self, num_ids: int, block_s: float) -> None:
        super().__init__(num_ids, block_s)
        # Other engines that hold a block, oldest first; most blocks are in only one engine.
        self._others: dict[int, list[int]] = {}

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Do nothing: events will follow."""

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Record which blocks the engines hold."""
        holders, others = self._engine_of, self._others
        before = holders[evicted]
        sole = evicted[before == engine]
        holders[sole] = _NO_ENGINE
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

    def on_restart(self, engine: int) -> None:
        """Forget the blocks of an engine."""
        held = self._held_by(engine)
        self.on_events(engine, held[:0], held)

    def _held_by(self, engine: int) -> Int64Array:
        others = [block for block, engines in self._others.items() if engine in engines]
        return np.concatenate([np.flatnonzero(self._engine_of == engine), np.array(others, np.int64)])


class EventsRouter(KnowingRouter):
    """A `KnowingRouter` that learns from messages. A number that is missing, or begins anew, shows in the next one.

    The router then replays the lost messages, or takes a snapshot of a restarted engine.
    """

    def __init__(self, num_ids: int, block_s: float, plan: FleetPlan) -> None:
        super().__init__(num_ids, block_s)
        self._lost, self._dice = plan.lost, random.Random(plan.seed)
        # Messages of each engine that were lost; None: it has started again.
        self._missed: list[list[tuple[Int64Array, Int64Array] | None]] = [[] for _ in range(plan.num_engines)]

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Apply a message and those that were lost before, or lose it."""
        missed = self._missed[engine]
        missed.append((stored, evicted))
        if self._lost and self._dice.random() < self._lost:
            return
        for message in missed:
            if message is None:
                held = self._held_by(engine)
                super().on_events(engine, held[:0], held)
            else:
                super().on_events(engine, *message)
        missed.clear()

    def on_restart(self, engine: int) -> None:
        """Note that the engine's next message is one of another publisher."""
        self._missed[engine][:] = [None]


def make_router(plan: FleetPlan, num_ids: int, block_size: int) -> RoundRobin:
    """Return the router of a fleet."""
    if plan.router == "round_robin":
        return RoundRobin(plan.num_engines)
    if plan.router == ONE_POOL:
        return FreeEngine(plan.num_engines)
    block_s = plan.token_s * block_size
    if plan.router == "events":
        return EventsRouter(num_ids, block_s, plan)
    return (PrefixRouter if plan.router == "prefix" else KnowingRouter)(num_ids, block_s)
