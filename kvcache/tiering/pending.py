"""What requests were told to wait for: the blocks to promote, and the references that keep them until they are used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.policies.base import BlockCacheOps
    from kvcache.request import ReqContext
    from kvcache.tiering.controller import TierController


class PendingRequest:
    """One request that waits.

    Attributes
    ----------
    wanted : dict of bytes to TierController
        Keys to promote with the next `on_schedule_end`, and from where.
    tried : set of bytes
        Keys whose promotion was tried; a request tries a key once.
    """

    __slots__ = ("deadline_s", "held", "is_over", "req_context", "tried", "wanted")

    def __init__(self, req_context: ReqContext | None, deadline_s: float) -> None:
        self.req_context = req_context
        self.deadline_s = deadline_s
        self.wanted: dict[bytes, TierController] = {}
        self.tried: set[bytes] = set()
        self.held: dict[bytes, None] = {}
        self.is_over = False

    def by_lane(self) -> list[tuple[TierController, list[bytes]]]:
        """Return the wanted keys in order, cut into runs of one tier each."""
        runs: list[tuple[TierController, list[bytes]]] = []
        for key, lane in self.wanted.items():
            if not runs or runs[-1][0] is not lane:
                runs.append((lane, []))
            runs[-1][1].append(key)
        return runs

    def tries(self, keys: list[bytes]) -> None:
        """Note that the promotion of wanted keys is tried now, or never will be."""
        self.tried.update(keys)
        for key in keys:
            self.wanted.pop(key, None)


class PendingRequests:
    """The requests that wait; None stands for all calls without a request.

    Parameters
    ----------
    cache : BlockCacheOps
        Of the host pool.
    deadline_s : float
        How long a request waits at most. It is then answered from host memory for as long again, so that it cannot
        begin to wait anew before it has heard the answer.
    """

    def __init__(self, cache: BlockCacheOps, deadline_s: float) -> None:
        self._cache = cache
        self._deadline_s = deadline_s
        self._asks: dict[ReqContext | None, PendingRequest] = {}

    def may_wait(self, req_context: ReqContext | None, now_s: float) -> bool:
        """Return whether a request may be told to wait."""
        ask = self._asks.get(req_context)
        return ask is None or (not ask.is_over and now_s < ask.deadline_s)

    def wants(self, req_context: ReqContext | None, key: bytes) -> bool:
        """Return whether a request's `key` is to be promoted next."""
        ask = self._asks.get(req_context)
        return ask is not None and key in ask.wanted

    def tried(self, req_context: ReqContext | None) -> set[bytes] | frozenset[bytes]:
        """Return the keys that a request has tried to promote."""
        ask = self._asks.get(req_context)
        return frozenset() if ask is None else ask.tried

    def wait(
        self, req_context: ReqContext | None, ready: list[bytes], wanted: dict[bytes, TierController], now_s: float
    ) -> None:
        """Note that a request was told to wait, and hold what is ready for it."""
        ask = self._asks.get(req_context)
        if ask is None:
            ask = self._asks[req_context] = PendingRequest(req_context, now_s + self._deadline_s)
        ask.wanted.update(wanted)
        self._hold(ask, ready)

    def hold(self, req_contexts: Iterable[ReqContext | None], keys: list[bytes]) -> None:
        """Hold ready blocks for those of the requests that still wait."""
        for req_context in req_contexts:
            ask = self._asks.get(req_context)
            if ask is not None and not ask.is_over:
                self._hold(ask, keys)

    def wanting(self) -> list[PendingRequest]:
        """Return the requests with something to promote, longest waiting first."""
        return [ask for ask in self._asks.values() if ask.wanted]

    def close(self, req_context: ReqContext | None) -> None:
        """Forget a request: it has what it wanted, or wants it no more."""
        ask = self._asks.pop(req_context, None)
        if ask is not None:
            self._release(ask)

    def expire(self, now_s: float) -> None:
        """Let go what was held for requests whose time is up."""
        over = [ask for ask in self._asks.values() if now_s >= ask.deadline_s]
        for ask in over:
            if not ask.is_over:
                ask.is_over = True
                ask.wanted.clear()
                self._release(ask)
            elif now_s >= ask.deadline_s + self._deadline_s:
                del self._asks[ask.req_context]

    def clear(self) -> None:
        """Forget all."""
        for req_context in list(self._asks):
            self.close(req_context)

    def _hold(self, ask: PendingRequest, keys: list[bytes]) -> None:
        held = ask.held
        fresh = [key for key in dict.fromkeys(keys) if key not in held]
        if fresh:
            self._cache.pin(fresh, None)
            held.update(dict.fromkeys(fresh))

    def _release(self, ask: PendingRequest) -> None:
        if ask.held:
            self._cache.unpin(list(ask.held), None)
            ask.held.clear()
