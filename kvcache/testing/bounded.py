"""Run a test with a time limit, whatever the code under test does."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class HangError(AssertionError):
    """A call did not return in time."""


def run_within(timeout_s: float, call: Callable[[], T], name: str = "the test") -> T:
    """Return the result of `call`, which runs in a separate thread; HangError if it does not end in time.

    The error shows the position of the thread. Compiled code that hangs and holds the GIL also blocks this thread.
    """
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    thread = Thread(target=run, name="bounded-test", daemon=True)
    thread.start()
    if not wait([ended], timeout_s).done:
        frame = sys._current_frames().get(thread.ident or 0)
        place = "".join(traceback.format_stack(frame)[-4:])
        raise HangError(f"{name} did not return within {timeout_s} s; it was here:\n{place}")
    return ended.result()


@contextmanager
def shrinking_within(timeout_s: float) -> Iterator[None]:
    """Limit the time in which Hypothesis shrinks a failing example. Its own limit is five minutes."""
    from hypothesis.internal.conjecture import engine

    # Hypothesis has no setting for this. If the private name is missing, its own limit applies.
    before = getattr(engine, "MAX_SHRINKING_SECONDS", None)
    if before is not None:
        engine.MAX_SHRINKING_SECONDS = int(timeout_s)
    try:
        yield
    finally:
        if before is not None:
            engine.MAX_SHRINKING_SECONDS = before
