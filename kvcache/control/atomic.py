"""Atomic calls of managers that run Python code: another thread waits, and a finalizer runs before or after.

Calls of compiled caches need none of this: they run no Python code half-way.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

from kvcache.block import BlockStateError

F = TypeVar("F", bound=Callable[..., Any])


def atomic(method: F) -> F:
    """Exclude other threads and finalizers by `self.lock`, an RLock. Reject calls from inside another atomic method."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        lock = self.lock
        if lock._is_owned():
            raise BlockStateError(f"{method.__name__} was called from within another operation of the cache")
        with lock:
            if not gc.isenabled():
                return method(self, *args, **kwargs)
            gc.disable()
            try:
                return method(self, *args, **kwargs)
            finally:
                gc.enable()

    return guarded  # type: ignore[return-value]
