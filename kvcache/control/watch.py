"""Watch one manager: wrappers around its methods, put on and taken off while it runs, and the one that times calls.

A manager without wrappers pays nothing: one that has some gets a subclass of its class for that time. A branch in each
method would cost each call, and a method in the instance makes the interpreter look up every attribute the slow way.
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
    """Calls some methods of an object in their place."""

    @property
    def names(self) -> Collection[str]:
        """The wrapped methods; names that the object lacks are left out."""

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable for a bound method; called again when another wrapper comes or goes."""


class Watch:
    """The wrappers of one object; get it by `Watch.of`.

    Notes
    -----
    Callable in any thread. A call that is under way ends as it began. The free-threaded build of CPython 3.13 keeps
    every class once a second thread has run, and with it a target that ever had wrappers.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._plain = type(target)
        self._wrappers: list[Wrapper] = []
        # Reentrant: a finalizer may call `remove` in the same thread.
        self._lock = threading.RLock()

    @classmethod
    def of(cls, target: Any) -> Watch:
        """Return an object's watch, the same each time."""
        found: Watch | None = vars(target).get("_watch")
        if found is None:
            found = cls(target)
            # A dict of its own: a dict that shares its keys with other instances is slow once the class has changed.
            target.__dict__ = {**vars(target), "_watch": found}
        return found

    def add(self, wrapper: Wrapper) -> None:
        """Put a wrapper around those before; ValueError if the instance itself replaces a method."""
        with self._lock:
            for name in wrapper.names:
                if name in vars(self._target):
                    raise ValueError(f"{name} cannot be wrapped: it was replaced in the {self._plain.__name__} itself")
            self._wrappers.append(wrapper)
            self._change_class()

    def remove(self, wrapper: Wrapper) -> None:
        """Take a wrapper off; an unknown one is ignored."""
        with self._lock:
            self._wrappers = [one for one in self._wrappers if one is not wrapper]
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
    """Time the calls of a manager, and measure ages of its blocks, from now on until `close`.

    Notes
    -----
    About 0.4 microseconds a call: an engine makes some hundred calls a second.
    """

    names: Collection[str] = TIMED_CALLS

    def __init__(self, manager: OffloadingManager, pool: BlockPool) -> None:
        self._histograms = {name: Histogram(1e-9, *CALL_EXPONENTS) for name in TIMED_CALLS}
        self._ages = _AgesOfStores(pool.num_blocks)
        self._wrapped: tuple[tuple[Watch, Wrapper], ...] = ((Watch.of(pool), self._ages), (Watch.of(manager), self))
        for watch, wrapper in self._wrapped:
            watch.add(wrapper)

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that counts the duration of `method`, whether it raised or not."""
        observe = self._histograms[name].observe_ticks

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                observe(perf_counter_ns() - start)

        return timed

    def parts(self) -> list[Part]:
        """Return the statistics of each kind of call, and the ages; callable in any thread."""
        calls = [
            Part("call", CallStats(HistogramData(*one.data()), one.max), (("call", name),))
            for name, one in self._histograms.items()
        ]
        return [*calls, Part("eviction", EvictionStats(HistogramData(*self._ages.ages.histogram.data())))]

    def close(self) -> None:
        """Stop timing; a second call does nothing."""
        for watch, wrapper in self._wrapped:
            watch.remove(wrapper)


class _AgesOfStores:
    """Reports every block that is stored in a pool to `BlockAges`."""

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
