"""Run a test that must give a verdict in bounded time, whatever the code under test does."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread


def run_within(timeout_s: float, test: Callable[[], None]) -> None:
    """Run `test` in a thread of its own; raise what it raises, or AssertionError if it does not end in time.

    Notes
    -----
    The error says where the thread was. Compiled code that does not return and holds the GIL stops this one, too.
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
    """Let Hypothesis make a failing example smaller for so long at most; its own bound is five minutes."""
    from hypothesis.internal.conjecture import engine

    # There is no setting for it; where the name is gone, Hypothesis's own bound holds.
    before = getattr(engine, "MAX_SHRINKING_SECONDS", None)
    if before is not None:
        engine.MAX_SHRINKING_SECONDS = int(timeout_s)
    try:
        yield
    finally:
        if before is not None:
            engine.MAX_SHRINKING_SECONDS = before
