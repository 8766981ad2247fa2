"""Watch one manager: wrappers around its methods, added and removed while it runs, and the wrapper that times calls.

A manager without wrappers has no overhead. A manager with wrappers temporarily gets a subclass of its class. A branch
in each method would cost time in each call. A method in the instance would slow every attribute look-up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from kvcache.core.histogram import BlockAges, Histogram
from kvcache.metrics import CALL_EXPONENTS, CallStats, EvictionStats, HistogramData, Part
from kvcache.specs import CPULoadStoreSpec

if TYPE_CHECKING:
    from kvcache.control.manager import OffloadingManager
    from kvcache.control.pool import BlockPool

TIMED_CALLS = (
    "lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store", "on_request_finished",
    "on_schedule_end", "reset_cache",
)  # fmt: skip
"""Calls of a manager that are timed. `status` is not: engines ask it key by key."""


class Wrapper(Protocol):
    """Replaces some methods of an object."""

    @property
    def names(self) -> Collection[str]:
        """The wrapped methods. Names that the object lacks are ignored."""

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable for a bound method. Called again when another wrapper is added or removed."""


class Watch:
    """The wrappers of one object. Get it with `Watch.of`.

    May be called from any thread. A call in progress ends as it began. The free-threaded build of CPython 3.13 keeps
    every class after a second thread has run, and with the class a target that ever had wrappers.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._plain = type(target)
        self._wrappers: list[Wrapper] = []
        # Reentrant, because a finalizer may call `remove` in the same thread.
        self._lock = threading.RLock()

    @classmethod
    def of(cls, target: Any) -> Watch:
        """Return an object's watch, the same object each time."""
        watch: Watch | None = vars(target).get("_watch")
        if watch is None:
            watch = cls(target)
            # Copy the dict: a dict that shares its keys with other instances becomes slow when the class changes.
            target.__dict__ = {**vars(target), "_watch": watch}
        return watch

    def add(self, wrapper: Wrapper) -> None:
        """Add a wrapper around the existing ones. Raise ValueError if the instance itself replaces a method."""
        with self._lock:
            for name in wrapper.names:
                if name in vars(self._target):
                    raise ValueError(f"{name} cannot be wrapped: it was replaced in the {self._plain.__name__} itself")
            self._wrappers.append(wrapper)
            self._change_class()

    def remove(self, wrapper: Wrapper) -> None:
        """Remove a wrapper. An unknown wrapper is ignored."""
        with self._lock:
            self._wrappers = [known for known in self._wrappers if known is not wrapper]
            self._change_class()

    def _change_class(self) -> None:
        plain, target = self._plain, self._target
        calls: dict[str, Any] = {}
        for wrapper in self._wrappers:
            for name in wrapper.names:
                if hasattr(plain, name):
                    method = calls[name] if name in calls else getattr(plain, name).__get__(target)
                    calls[name] = wrapper.wrap(name, method)
        if calls:
            methods = {name: staticmethod(call) for name, call in calls.items()}
            about = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
            target.__class__ = type(plain.__name__, (plain,), {**methods, **about, "__slots__": ()})
        else:
            target.__class__ = plain


class CallTimes:
    """Time the calls of a manager, and measure the ages of its blocks, until `close`.

    About 0.4 microseconds per call. An engine makes a few hundred calls per second.
    """

    names: Collection[str] = TIMED_CALLS

    def __init__(self, manager: OffloadingManager, pool: BlockPool) -> None:
        self._histograms = {name: Histogram(1e-9, *CALL_EXPONENTS) for name in TIMED_CALLS}
        self._ages = _AgesOfStores(pool.num_blocks)
        self._wrapped: tuple[tuple[Watch, Wrapper], ...] = ((Watch.of(pool), self._ages), (Watch.of(manager), self))
        for watch, wrapper in self._wrapped:
            watch.add(wrapper)

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable that records the duration of `method`, whether it raises or not."""
        observe = self._histograms[name].observe_ticks

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                observe(perf_counter_ns() - start)

        return timed

    def parts(self) -> list[Part]:
        """Return the statistics of each kind of call, and the ages. May be called from any thread."""
        calls = [
            Part("call", CallStats(HistogramData(*histogram.data()), histogram.max), (("call", name),))
            for name, histogram in self._histograms.items()
        ]
        return [*calls, Part("eviction", EvictionStats(HistogramData(*self._ages.ages.histogram.data())))]

    def close(self) -> None:
        """Stop timing. A second call does nothing."""
        for watch, wrapper in self._wrapped:
            watch.remove(wrapper)


class _AgesOfStores:
    """Reports every block stored in a pool to `BlockAges`."""

    names: Collection[str] = ("reserve", "prepare_store")

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
