"""The thread that opens a `JobTier`, makes its resets durable, maintains it and closes it.

It never waits behind a batch that hangs, because batches run in I/O threads.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event

from kvcache.background import Background

_RETRY_S = 1.0


class ControlThread:
    """Call the slow hooks of a tier.

    `open_` may raise: then `open_error` holds its exception, and the thread has ended. `clear` takes the generation
    that begins, and returns whether it has to be called again. `maintain` is called every `interval_s` (None: never)
    and at the end, before `close`.
    """

    def __init__(
        self,
        name: str,
        interval_s: float | None,
        open_: Callable[[], None],
        clear: Callable[[int], bool],
        maintain: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self.open_error: BaseException | None = None
        self._interval_s = interval_s
        self._open, self._clear, self._maintain, self._close = open_, clear, maintain, close
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        self._is_opened = Event()
        self._thread = Background(name, self._run)

    def wait_until_open(self, timeout_s: float) -> bool:
        """Return whether `open_` has ended, or raised, in time."""
        return self._is_opened.wait(timeout_s)

    def order_clear(self, generation: int) -> None:
        """Have everything older than `generation` cleared, again and again until that works."""
        self._orders.put(generation)

    def stop(self, timeout_s: float) -> None:
        """End the thread after a last `maintain` and `close`; wait for it at most so long."""
        self._orders.put(None)
        self._thread.stop(timeout_s)

    def _run(self, _: Event) -> None:
        try:
            self._open()
        except BaseException as error:
            self.open_error = error
            return
        finally:
            self._is_opened.set()
        wanted: int | None = None
        while True:
            try:
                order = self._orders.get(timeout=self._interval_s if wanted is None else _RETRY_S)
                if order is None:
                    break
                wanted = order
            except Empty:
                pass
            if wanted is None:
                self._maintain()
            elif not self._clear(wanted):
                wanted = None
        self._maintain()
        self._close()
