"""Run requests through a manager as a scheduler would, and count hits, stores and the time of its calls.

Keys are made and bytes are moved outside the measured time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.request import ReqContext

if TYPE_CHECKING:
    from kvcache.control.manager import OffloadingManager
    from kvcache.lab.simulate.payload import VerifiedPayload
    from kvcache.lab.traces.requests import Request


@dataclass(slots=True)
class Tally:
    """The counts of a replay so far: blocks, tokens and requests."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    rejected_requests: int = 0
    bookkeeping_ns: array[int] = field(default_factory=lambda: array("q"))

    @property
    def block_hit_rate(self) -> float:
        """Share of the blocks that hit, as a leading run."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompts' tokens that need no prefill."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, rates and bookkeeping times (microseconds per request) for a report."""
        us = np.asarray(self.bookkeeping_ns, dtype=np.float64) / 1000
        p50, p99, longest = np.quantile(us, (0.5, 0.99, 1.0)).tolist() if len(us) else (0.0, 0.0, 0.0)
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "hit_tokens": self.hit_tokens,
            "token_hit_rate": self.token_hit_rate,
            "blocks": self.blocks,
            "hit_blocks": self.hit_blocks,
            "block_hit_rate": self.block_hit_rate,
            "stored_blocks": self.stored_blocks,
            "loaded_blocks": self.loaded_blocks,
            "evicted_blocks": self.evicted_blocks,
            "rejected_requests": self.rejected_requests,
            "bookkeeping_us": {"p50": p50, "p99": p99, "max": longest, "total": float(us.sum())},
        }


class ReplayClock:
    """The time of the trace in seconds: the arrival of the current request, for policies and hints."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the arrival of the current request; it never decreases."""
        return self.now_s


class Replay:
    """Take requests one at a time through the calls of a scheduler.

    Without `payload`, which moves the bytes, only the bookkeeping is done. `clock` times it, in nanoseconds. `arrivals`
    is the manager's clock, which is set to each request's arrival.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        payload: VerifiedPayload | None = None,
        clock: Callable[[], int] = perf_counter_ns,
        arrivals: ReplayClock | None = None,
    ) -> None:
        self.tally = Tally()
        self.arrivals = arrivals or ReplayClock()
        self.clock = clock
        self._manager = manager
        self._payload = payload
        self.end_request: Callable[[ReqContext], None] = manager.on_request_finished

    def step(self, request: Request, keys: list[bytes]) -> int:
        """Run one request, and return the length of its leading run of hits."""
        self.arrivals.now_s = max(self.arrivals.now_s, request.arrival_s)
        clock, manager = self.clock, self._manager
        context = ReqContext()
        start = clock()
        num_hits: int = manager.lookup(keys, context)  # type: ignore[assignment]
        manager.touch(keys, context)
        self.serve(context, keys[:num_hits], [keys], clock() - start)
        self.count(request, num_hits, len(keys))
        return num_hits

    def serve(self, context: ReqContext, hits: list[bytes], parts: list[list[bytes]], spent: int) -> None:
        """Load the blocks of a request, store each part in a step, and end it; `spent` ns took its look-up."""
        manager, payload, tally, clock = self._manager, self._payload, self.tally, self.clock
        # The calls come as from a scheduler, and only they are timed: bytes are moved in between.
        start = clock()
        load_spec = manager.prepare_load(hits, context)
        spent += clock() - start
        if payload is not None and hits:
            payload.load(hits, load_spec)  # type: ignore[arg-type]
        start = clock()
        manager.complete_load(hits, context)
        spent += clock() - start
        for i, offered in enumerate(parts):
            if i:
                manager.on_schedule_end()
            start = clock()
            output = manager.prepare_store(offered, context)
            spent += clock() - start
            if output is None:
                tally.rejected_requests += 1
                continue
            stored = output.keys_to_store
            tally.stored_blocks += len(stored)
            tally.evicted_blocks += len(output.evicted_keys)
            if payload is not None and stored:
                payload.store(stored, output.store_spec)  # type: ignore[arg-type]
            start = clock()
            manager.complete_store(stored, context)
            spent += clock() - start
        start = clock()
        self.end_request(context)
        spent += clock() - start
        tally.loaded_blocks += len(hits)
        tally.bookkeeping_ns.append(spent)

    def count(self, request: Request, num_hits: int, num_blocks: int) -> None:
        """Add a request to the tally."""
        tally = self.tally
        tally.requests += 1
        tally.tokens += request.input_length
        tally.hit_tokens += min(num_hits * self._manager.block_size, request.input_length)
        tally.blocks += num_blocks
        tally.hit_blocks += num_hits
