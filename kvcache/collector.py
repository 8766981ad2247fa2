"""A pause of the garbage collector that all threads share."""

from __future__ import annotations

import gc
import threading

# Reentrant: until the collector is off, a finalizer may come in and pause it too.
_LOCK = threading.RLock()
_depth = 0
_was_enabled = False


def pause() -> None:
    """Keep the garbage collector, whose finalizers may call a manager, from running; pauses nest and overlap."""
    global _depth, _was_enabled
    with _LOCK:
        if not _depth:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1


def resume() -> None:
    """End one pause; with the last one the garbage collector is on again, if it was."""
    global _depth
    with _LOCK:
        _depth -= 1
        if not _depth and _was_enabled:
            gc.enable()
