"""Background: a daemon thread with a stop signal and a bounded join, for everything that works beside the scheduler.

The scheduler's thread must neither wait for such work nor end because of it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

STOP_S = 5.0
_ROOT = str(Path(__file__).resolve().parent.parent)
_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_IN_CHILD: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def python_words(code: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs `code`, in which kvcache can be imported."""
    # -P: import nothing from the working directory, which others may write to; a checkout there comes last.
    return [sys.executable, "-P", "-c", f"import sys\nsys.path.append({_ROOT!r})\n{code}", *arguments]


def after_fork(instance: T, forget: Callable[[T], object]) -> None:
    """Call `forget` with `instance` in each forked child, which inherits descriptors but no threads.

    `forget` must not refer to the instance, which it would keep alive.
    """
    _IN_CHILD[instance] = forget


def _forget_all() -> None:
    for instance, forget in list(_IN_CHILD.items()):
        try:
            forget(instance)
        except Exception:
            _LOG.exception("a %s was not closed in a forked child", type(instance).__name__)


os.register_at_fork(after_in_child=_forget_all)


class Background:
    """Run a function in a daemon thread, named ``kvcache-`` and `name`, until it returns.

    `run` is called once, with an event that is set when the thread is to end. An exception is logged.
    """

    def __init__(self, name: str, run: Callable[[threading.Event], object]) -> None:
        self.stopping = threading.Event()
        self._run = run
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=f"kvcache-{name}", daemon=True)
        self._thread.start()

    @classmethod
    def every(cls, interval_s: float, name: str, step: Callable[[], object]) -> Background:
        """Call `step` every `interval_s` seconds, and once more at the end. A step that raises is logged."""

        def run(stopping: threading.Event) -> None:
            is_stopping = False
            while not is_stopping:
                is_stopping = stopping.wait(interval_s)
                try:
                    step()
                except Exception:
                    _LOG.exception("a step of the thread kvcache-%s failed", name)

        return cls(name, run)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. A forked child has no thread."""
        return self._thread.is_alive() and os.getpid() == self._pid

    def stop(self, timeout_s: float | None = STOP_S) -> bool:
        """Ask the thread to end; return whether it has ended within `timeout_s` (None: wait without limit)."""
        self.stopping.set()
        if self.is_alive and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self.is_alive

    def _main(self) -> None:
        try:
            self._run(self.stopping)
        except Exception:
            _LOG.exception("the thread %s ended", threading.current_thread().name)
