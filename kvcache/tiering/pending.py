"""Requests that wait for tiers: the blocks to promote for them, and the references that hold these blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache.core.histogram import Histogram
from kvcache.metrics import JOB_EXPONENTS, HistogramData, gauge, histogram

if TYPE_CHECKING:
    from kvcache.control.pool import BlockPool
    from kvcache.request import ReqContext
    from kvcache.tiering.controller import TierController


@dataclass(slots=True)
class PendingRequest:
    """One request that waits.

    The next `on_schedule_end` promotes its `wanted` keys from their tiers. It tries each key once: `tried`. It has a
    reference on each block in `held`, which include `prefix`, the leading keys of its last look-up.
    """

    req_context: ReqContext | None
    deadline_s: float
    wanted: dict[bytes, TierController] = field(default_factory=dict)
    tried: set[bytes] = field(default_factory=set)
    held: dict[bytes, None] = field(default_factory=dict)
    prefix: list[bytes] = field(default_factory=list)
    is_over: bool = False

    def may_wait(self, now_s: float) -> bool:
        """Return whether the request may wait."""
        return not self.is_over and now_s < self.deadline_s


_NOBODY = PendingRequest(None, math.inf)


@dataclass(frozen=True, slots=True)
class PromotionStats:
    """The requests that wait for blocks from tiers."""

    waiting_requests: int = gauge("requests", "Requests that wait for blocks from tiers, or have lately.")
    wait_seconds: HistogramData | None = histogram(
        "seconds", "Time from a request's first wait for a tier to its load, its end or its deadline."
    )


class PendingRequests:
    """The requests that wait; None stands for all calls without a request.

    A request waits at most `deadline_s`. It is then answered from host memory for as long again, so that it gets an
    answer before it can wait again. `waits` holds the seconds of each wait.
    """

    def __init__(self, pool: BlockPool, deadline_s: float, max_step_blocks: int, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._max_step_blocks = max_step_blocks
        self.clock = clock
        self._requests: dict[ReqContext | None, PendingRequest] = {}
        self.waits = Histogram(1e-9, *JOB_EXPONENTS)

    def stats(self) -> PromotionStats:
        """Return how many requests wait, and how long they waited."""
        return PromotionStats(len(self._requests), HistogramData(*self.waits.data()))

    def of(self, req_context: ReqContext | None) -> PendingRequest:
        """Return a request, an empty one if it does not wait; to be read only."""
        return self._requests.get(req_context, _NOBODY)

    def begin(self, req_context: ReqContext | None, now_s: float) -> PendingRequest:
        """Return a request, which waits from now on if it did not; its deadline counts from its first wait."""
        request = self._requests.get(req_context)
        if request is None:
            request = self._requests[req_context] = PendingRequest(req_context, now_s + self._deadline_s)
        return request

    def wait(
        self,
        req_context: ReqContext | None,
        keys: list[bytes],
        num_ready: int,
        in_tiers: dict[bytes, TierController],
        now_s: float,
    ) -> None:
        """Record that a request waits, and hold the leading keys that are ready for it."""
        request = self.begin(req_context, now_s)
        request.wanted.update(in_tiers)
        first = len(request.prefix)
        if first > num_ready or request.prefix != keys[:first]:
            first = 0
            request.prefix = []
        # A bounded number at a time: the look-ups of the next steps go on from here.
        next_keys = keys[first : min(num_ready, first + self._max_step_blocks)]
        self._hold(request, next_keys)
        request.prefix += next_keys

    def hold(self, req_contexts: Iterable[ReqContext | None], keys: list[bytes]) -> None:
        """Hold ready blocks for those of the requests that still wait."""
        for req_context in req_contexts:
            request = self._requests.get(req_context)
            if request is not None and not request.is_over:
                self._hold(request, keys)

    def wanting(self) -> list[PendingRequest]:
        """Return the requests with something to promote, longest waiting first."""
        return [request for request in self._requests.values() if request.wanted]

    def close(self, req_context: ReqContext | None) -> None:
        """Forget a request that loads its blocks, or has ended."""
        request = self._requests.pop(req_context, None)
        if request is not None:
            if not request.is_over:
                self.waits.observe(self.clock() - (request.deadline_s - self._deadline_s))
            self._release(request)

    def expire(self, now_s: float) -> None:
        """Release the blocks of requests whose deadline has passed."""
        over = [request for request in self._requests.values() if now_s >= request.deadline_s]
        for request in over:
            if not request.is_over:
                request.is_over = True
                self.waits.observe(self._deadline_s)
                request.wanted.clear()
                self._release(request)
            elif now_s >= request.deadline_s + self._deadline_s:
                del self._requests[request.req_context]

    def forget(self) -> None:
        """Forget all requests and their references, which a reset of the pool drops."""
        self._requests = {}

    def _hold(self, request: PendingRequest, keys: list[bytes]) -> None:
        held = request.held
        not_held = [key for key in dict.fromkeys(keys) if key not in held]
        if not_held:
            self._pool.pin(not_held, is_move=True)
            held.update(dict.fromkeys(not_held))

    def _release(self, request: PendingRequest) -> None:
        if request.held:
            self._pool.unpin(list(request.held))
            request.held.clear()
