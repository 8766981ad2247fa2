"""WrappedCalls: wrappers around the methods of one manager, such as a recorder's, put on and taken off while it runs.

A manager without wrappers pays nothing for it: one that has some is given another class, for as long as it has them. A
branch in each method would cost each call, and a method in the instance makes the interpreter look up every attribute
the slow way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol


class CallWrapper(Protocol):
    """Something that is called in place of some methods, and calls them."""

    @property
    def names(self) -> Collection[str]:
        """The methods; those that the object lacks are left out."""

    @property
    def may_pause(self) -> bool:
        """Whether it is paused now and then: such a wrapper is around those that are not, which need not know."""

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of a bound method; called anew where what `method` does has changed."""


class WrappedCalls:
    """The wrappers of one object; get it by `WrappedCalls.of`.

    Notes
    -----
    Callable in any thread. A call that is under way ends as it began. The free-threaded build of CPython 3.13 keeps
    every class once a second thread has run, and with it a target that ever had wrappers.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._plain = type(target)
        self._wrappers: list[CallWrapper] = []
        self._paused: list[CallWrapper] = []
        self._classes: dict[tuple[CallWrapper, ...], type] = {}
        # A finalizer may come back here in the same thread.
        self._lock = threading.RLock()

    @classmethod
    def of(cls, target: Any) -> WrappedCalls:
        """Return an object's wrapped calls, the same each time."""
        found: WrappedCalls | None = vars(target).get("_wrapped_calls")
        if found is None:
            found = cls(target)
            # A dict of its own: one that shares its names with others is slow once the class has changed.
            target.__dict__ = {**vars(target), "_wrapped_calls": found}
        return found

    def add(self, wrapper: CallWrapper) -> None:
        """Put a wrapper on; ValueError if a method has been replaced in the object, which would hide it."""
        with self._lock:
            for name in wrapper.names:
                if name in vars(self._target):
                    raise ValueError(f"{name} cannot be wrapped: it was replaced in the {self._plain.__name__} itself")
            self._wrappers.append(wrapper)
            self._wrappers.sort(key=lambda one: one.may_pause)
            self._classes.clear()
            self._change_class()

    def remove(self, wrapper: CallWrapper) -> None:
        """Take a wrapper off for good; one that is not there is ignored."""
        with self._lock:
            self._wrappers = [one for one in self._wrappers if one is not wrapper]
            self._paused = [one for one in self._paused if one is not wrapper]
            self._classes.clear()
            self._change_class()

    def pause(self, wrapper: CallWrapper, is_paused: bool) -> None:
        """Take a wrapper off for a while, or put it on again; cheap."""
        with self._lock:
            self._paused = [one for one in self._paused if one is not wrapper]
            if is_paused:
                self._paused.append(wrapper)
            self._change_class()

    def _change_class(self) -> None:
        wrappers = tuple(one for one in self._wrappers if one not in self._paused)
        if wrappers and wrappers not in self._classes:
            self._classes[wrappers] = self._class_of(wrappers)
        self._target.__class__ = self._classes[wrappers] if wrappers else self._plain

    def _class_of(self, wrappers: tuple[CallWrapper, ...]) -> type:
        plain, target = self._plain, self._target
        calls: dict[str, Any] = {}
        for wrapper in wrappers:
            for name in wrapper.names:
                if hasattr(plain, name):
                    method = calls[name] if name in calls else getattr(plain, name).__get__(target)
                    calls[name] = wrapper.wrap(name, method)
        methods = {name: staticmethod(call) for name, call in calls.items()}
        about = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
        return type(plain.__name__, (plain,), {**methods, **about, "__slots__": ()})
