"""The thread that opens a `JobTier`, makes its resets durable, maintains it and closes it.

It never waits behind a batch that hangs, because batches run in I/O threads.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Thread

_RETRY_S = 1.0


class ControlThread:
    """Call the slow hooks of a tier.

    Parameters
    ----------
    name : str
        The thread's name.
    interval_s : float or None
        Time between two calls of `maintain`; None: it is called at the end only.
    open_, clear, maintain, close : callable
        `open_` may raise, the others may not. `clear` is given the generation that begins, and returns whether it has
        to be tried again.

    Attributes
    ----------
    open_error : BaseException or None
        What `open_` raised. The thread has ended then.
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
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_until_open(self, timeout_s: float) -> bool:
        """Return whether `open_` has ended, or raised, in time."""
        return self._is_opened.wait(timeout_s)

    def order_clear(self, generation: int) -> None:
        """Have everything older than `generation` cleared, again and again until that works."""
        self._orders.put(generation)

    def stop(self, timeout_s: float) -> None:
        """End the thread after a last `maintain` and `close`; wait for it at most so long."""
        self._orders.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
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
