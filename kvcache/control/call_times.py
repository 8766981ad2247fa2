"""CallTimes: how long the calls of one manager take, and how old blocks are at eviction, at a bounded cost.

Timing a call costs about a microsecond, as much as a call that names few keys. An engine makes some hundred calls a
second, and all of them are timed; beyond 1,000 a second a share of them is, so that the scheduler's thread loses a few
thousandths of its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol, TypeVar, runtime_checkable

from kvcache.core.histogram import BlockAges, Histogram
from kvcache.metrics import CALL_EXPONENTS, CallStats, EvictionStats, HistogramData, Part

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
T = TypeVar("T")


@runtime_checkable
class Timed(Protocol):
    """A manager whose calls can be timed: each begins with a look at `timer`, and goes through it where it is set."""

    num_blocks: int
    timer: CallTimes | None
    ages: BlockAges | None


class CallTimes:
    """Time the calls of a manager, and measure ages of its blocks, from now on until `close`.

    Parameters
    ----------
    manager : Timed
        It looks at its `timer` in each call.

    Notes
    -----
    After 100 timed calls within a tenth of a second, the rest of that tenth is left out.
    """

    def __init__(self, manager: Timed) -> None:
        self._manager = manager
        self._histograms = {name: Histogram(1e-9, *CALL_EXPONENTS) for name in TIMED_CALLS}
        self._ages = BlockAges(manager.num_blocks)
        self._left = 0
        self._lock = threading.Lock()
        self._is_spent = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._begin()

    def run(self, name: str, method: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Make a call of the manager's and count how long it took, whether it raised or not.

        Parameters
        ----------
        name : str
            One of `TIMED_CALLS`.
        method : callable
            The manager's, which is called once more, with its `timer` unset.
        *args, **kwargs
            For the method.

        Returns
        -------
        object
            What the method returned.
        """
        manager = self._manager
        manager.timer = None
        start = perf_counter_ns()
        try:
            return method(*args, **kwargs)
        finally:
            self._histograms[name].observe_ticks(perf_counter_ns() - start)
            self._left -= 1
            if self._left > 0:
                manager.timer = self
            else:
                self._pause()

    def parts(self) -> list[Part]:
        """Return the statistics of each kind of call, and the ages; callable in any thread.

        Returns
        -------
        list of kvcache.metrics.Part
            In the order of `TIMED_CALLS`.
        """
        calls = [
            Part("call", CallStats(HistogramData(*one.data()), one.max), (("call", name),))
            for name, one in self._histograms.items()
        ]
        return [*calls, Part("eviction", EvictionStats(HistogramData(*self._ages.histogram.data())))]

    def close(self) -> None:
        """Time calls no more; a second call does nothing."""
        self._is_closed.set()
        self._is_spent.set()
        with self._lock:
            thread, self._thread = self._thread, None
            self._left = 0
            self._manager.timer = self._manager.ages = None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _begin(self) -> None:
        self._begin_s = time.monotonic()
        self._left = WINDOW_CALLS
        self._manager.ages = self._ages
        self._manager.timer = self

    def _pause(self) -> None:
        """Called in the manager's thread after the last call of a window that is timed."""
        self._manager.ages = None
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
                    self._begin()
