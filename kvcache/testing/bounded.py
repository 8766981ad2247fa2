"""Run a test with a time limit, whatever the code under test does."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread


def run_within(timeout_s: float, test: Callable[[], None]) -> None:
    """Run `test` in a separate thread. Raise its exception, or AssertionError if it does not end in time.

    Notes
    -----
    The error shows the position of the thread. Compiled code that hangs and holds the GIL also blocks this thread.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            test()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name="bounded-test", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        place = "".join(traceback.format_stack(frame)[-4:])
        raise AssertionError(f"no verdict within {timeout_s} s; the test was here:\n{place}")
    if raised:
        raise raised[0]


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
