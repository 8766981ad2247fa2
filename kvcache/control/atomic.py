"""Atomic calls of managers that run Python code: another thread waits, and a finalizer runs before or after.

Calls of compiled caches need none of this: they run no Python code half-way.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kvcache.block import BlockStateError

F = TypeVar("F", bound=Callable[..., Any])


class Guard:
    """The lock of one object's atomic methods."""

    __slots__ = ("is_busy", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_busy = False


def atomic(method: F) -> F:
    """Exclude other threads and finalizers by `self.guard`. Reject calls from inside another atomic method."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = self.guard
        with guard.lock:
            if guard.is_busy:
                raise BlockStateError(f"{method.__name__} was called from within another operation of the cache")
            was_on = gc.isenabled()
            gc.disable()
            guard.is_busy = True
            try:
                return method(self, *args, **kwargs)
            finally:
                guard.is_busy = False
                if was_on:
                    gc.enable()

    return guarded  # type: ignore[return-value]
