"""CallTimes: how long the calls of one manager take, and how old blocks are at eviction, at a bounded cost.

Timing a call costs about a microsecond, as much as a call that names few keys. An engine makes some hundred calls a
second, and all of them are timed; beyond 1,000 a second a share of them is, so that the scheduler's thread loses a few
thousandths of its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from kvcache.control.wrapped_calls import CallWrapper, WrappedCalls
from kvcache.core.histogram import BlockAges, Histogram
from kvcache.metrics import CALL_EXPONENTS, CallStats, EvictionStats, HistogramData, Part
from kvcache.specs import CPULoadStoreSpec

if TYPE_CHECKING:
    from kvcache.control.manager import OffloadingManager
    from kvcache.control.pool import BlockPool

TIMED_CALLS = (
    "lookup",
    "touch",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "on_request_finished",
    "on_schedule_end",
    "reset_cache",
)
"""Calls of a manager that are timed. Not `status`, which an engine asks for key by key."""
WINDOW_S = 0.1
WINDOW_CALLS = 100
_CLOSE_S = 2.0


class CallTimes:
    """Time the calls of a manager, and measure ages of its blocks, from now on until `close`.

    Notes
    -----
    After 100 timed calls within a tenth of a second, the rest of that tenth is left out.
    """

    names: Collection[str] = TIMED_CALLS
    may_pause = True

    def __init__(self, manager: OffloadingManager, pool: BlockPool) -> None:
        self._histograms = {name: Histogram(1e-9, *CALL_EXPONENTS) for name in TIMED_CALLS}
        self._ages = _AgesOfStores(pool.num_blocks)
        self._lock = threading.Lock()
        self._is_spent = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._wrapped: tuple[tuple[WrappedCalls, CallWrapper], ...] = (
            (WrappedCalls.of(pool), self._ages),
            (WrappedCalls.of(manager), self),
        )
        self._begin_s = time.monotonic()
        self._left = WINDOW_CALLS
        for calls, wrapper in self._wrapped:
            calls.add(wrapper)

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that counts how long `method` took, whether it raised or not."""
        observe = self._histograms[name].observe_ticks

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                observe(perf_counter_ns() - start)
                self._left -= 1
                if self._left <= 0:
                    self._pause()

        return timed

    def parts(self) -> list[Part]:
        """Return the statistics of each kind of call, and the ages; callable in any thread."""
        calls = [
            Part("call", CallStats(HistogramData(*one.data()), one.max), (("call", name),))
            for name, one in self._histograms.items()
        ]
        return [*calls, Part("eviction", EvictionStats(HistogramData(*self._ages.ages.histogram.data())))]

    def close(self) -> None:
        """Time calls no more; a second call does nothing."""
        self._is_closed.set()
        self._is_spent.set()
        with self._lock:
            thread, self._thread = self._thread, None
            for calls, wrapper in self._wrapped:
                calls.remove(wrapper)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _pause(self) -> None:
        """Called in the manager's thread after the last call of a window that is timed."""
        for calls, wrapper in self._wrapped:
            calls.pause(wrapper, True)
        if self._thread is None and self._lock.acquire(blocking=False):
            try:
                if not self._is_closed.is_set():
                    self._thread = threading.Thread(target=self._resume, name="kvcache-call-times", daemon=True)
                    self._thread.start()
            finally:
                self._lock.release()
        self._is_spent.set()

    def _resume(self) -> None:
        while not self._is_closed.is_set():
            self._is_spent.wait()
            self._is_spent.clear()
            self._is_closed.wait(max(0.0, self._begin_s + WINDOW_S - time.monotonic()))
            with self._lock:
                if not self._is_closed.is_set():
                    self._begin_s = time.monotonic()
                    self._left = WINDOW_CALLS
                    for calls, wrapper in self._wrapped:
                        calls.pause(wrapper, False)


class _AgesOfStores:
    """Shows `BlockAges` every block that comes to a pool."""

    names: Collection[str] = ("reserve", "prepare_store")
    may_pause = True

    def __init__(self, num_blocks: int) -> None:
        self.ages = BlockAges(num_blocks)

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        note = self.ages.note

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            if output is not None and type(output.store_spec) is CPULoadStoreSpec:
                note(output.store_spec.block_ids, output.keys_to_store, output.evicted_keys)
            return output

        return noted
