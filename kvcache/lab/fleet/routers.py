"""The plan of a fleet, and the routers that choose an engine for each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.lab.traces.requests import Int64Array

    Float64Array = npt.NDArray[np.float64]

ROUTERS = ("round_robin", "prefix", "events")
_NO_ENGINE = -1


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The engines, the router and the store of a fleet.

    `router` is ``"round_robin"``, ``"prefix"`` (the engine that last got the longest prefix of the prompt) or
    ``"events"`` (the engine that holds the longest prefix by its KV events). The last two choose the engine that is
    free first if the other's queue costs more time than its prefix saves. `token_s` are seconds of prefill a token,
    `block_load_s` seconds to load a block from the store; `store_blocks` 0 is no store.
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


class Router(Protocol):
    """Chooses an engine for each request."""

    num_entries: int

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the engine that a request goes to."""

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Called after a request was sent to an engine."""

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Called with the blocks that entered and left an engine's host memory."""


class RoundRobin:
    """Send requests to the engines in turn."""

    num_entries = 0

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._next = 0

    def choose(self, now_s: float, ids: Int64Array, free_s: Float64Array) -> int:
        """Return the next engine."""
        engine, self._next = self._next, (self._next + 1) % self._num_engines
        return engine

    def on_placed(self, engine: int, ids: Int64Array) -> None:
        """Do nothing."""

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Do nothing."""


class PrefixRouter:
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

    def on_events(self, engine: int, stored: Int64Array, evicted: Int64Array) -> None:
        """Do nothing: this router does not see evictions."""


class EventsRouter(PrefixRouter):
    """Send a request to the engine that holds its longest prefix by KV events."""

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


def make_router(plan: FleetPlan, num_ids: int, block_size: int) -> Router:
    """Return the router of a fleet."""
    if plan.router == "round_robin":
        return RoundRobin(plan.num_engines)
    return (PrefixRouter if plan.router == "prefix" else EventsRouter)(num_ids, plan.token_s * block_size)
