"""The life of a `JobTier`: one state, the transitions between states, and the control thread that does their slow part.

Opening, making a reset durable, maintenance and closing wait for the medium. They run in one thread of their own, which
never waits behind a batch that hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from enum import Enum, auto
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Event
from typing import TYPE_CHECKING, Any

from kvcache.background import Background
from kvcache.tiers.base.catalog import Catalog, TierContents

if TYPE_CHECKING:
    from kvcache.tiers.base.batch import Counts
    from kvcache.tiers.base.io_threads import IOThreads
    from kvcache.tiers.base.medium import Medium

RETRY_S = 1.0
"""Time until a reset that failed is tried again."""


class State(Enum):
    """The state of a tier; it serves in `OPEN` only.

    ========= ========= ============== ==============================================================
    from      to        thread         when
    ========= ========= ============== ==============================================================
    OPENING   OPEN      control        the medium has opened
    OPENING   RESETTING control        the medium has opened, and a reset came before
    OPEN      RESETTING the caller's   a reset
    RESETTING OPEN      the caller's   the last reset is durable, and every job from before it has ended
    any       SHUT      the caller's   the shutdown
    ========= ========= ============== ==============================================================
    """

    OPENING = auto()
    OPEN = auto()
    RESETTING = auto()
    SHUT = auto()


class Lifecycle:
    """The state of a tier and its catalog. The caller holds `lock`, except for `order_clear`, `maintain` and `join`.

    The control thread calls `open`, `clear`, `maintain` and `close` of `tier`. `new_catalog` makes the catalog of some
    contents, whose numbers go on after the given one. `generation` counts the resets, `version` is that of the last
    one. `outage` is why the subclass finds nothing; `counts` counts errors.
    """

    def __init__(
        self,
        tier: Medium,
        new_catalog: Callable[[TierContents | None, int], Catalog],
        threads: IOThreads,
        lock: AbstractContextManager[Any],
        maintain_interval_s: float | None,
        counts: Counts,
    ) -> None:
        self.state = State.OPENING
        self.catalog = Catalog()
        self.generation = 0
        self.version: str | int | None = None
        self.outage = ""
        self._tier = tier
        self._new_catalog = new_catalog
        self._threads = threads
        self._lock = lock
        self._counts = counts
        self._maintain_interval_s = maintain_interval_s
        self._reset_error = ""
        # The generation that a reset has made durable, and its catalog.
        self._cleared: tuple[int, Catalog] | None = None
        # Generations to clear for, and events to set after maintenance; None ends the control thread.
        self._orders: SimpleQueue[int | Event | None] = SimpleQueue()
        self._opened: Future[None] = Future()
        self._thread: Background | None = None

    @property
    def reason(self) -> str:
        """Why the tier serves nothing now, or empty."""
        if self.outage or self.state is State.OPEN:
            return self.outage
        if self.state is State.OPENING:
            return "opening"
        return f"reset failed: {self._reset_error}" if self._reset_error else "reset under way"

    def start(self, timeout_s: float) -> None:
        """Start the control thread; wait until the medium has opened, or for `timeout_s`. Raise the error of `open`."""
        self._thread = Background(f"{self._tier.medium.lower()}-control", self._run)
        if wait([self._opened], timeout_s).done:
            self._opened.result()

    def begin_reset(self, version: str | int | None) -> bool:
        """Serve nothing until a reset is durable; return False after the shutdown. `order_clear` must follow."""
        if self.state is State.SHUT:
            return False
        # In this order: I/O threads compare generations, and no block may get the name of an older version then.
        self.version = version
        self.generation += 1
        if self.state is State.OPEN:
            self.state = State.RESETTING
        return True

    def order_clear(self) -> None:
        """Let the control thread make the last reset durable."""
        self._orders.put(self.generation)

    def end_reset(self) -> Catalog | None:
        """Serve again if the last reset is durable; return the catalog from before it, else None.

        No job from before the reset may be under way: it would write to slots that the new catalog gives away.
        """
        if self._cleared is None or self._cleared[0] != self.generation:
            return None
        replaced, self.catalog = self.catalog, self._cleared[1]
        self._cleared = None
        if self.state is State.RESETTING:
            self.state = State.OPEN
        return replaced

    def shut(self) -> bool:
        """Serve nothing any more; return False if that was so already."""
        if self.state is State.SHUT:
            return False
        self.state = State.SHUT
        self.outage = "shut down"
        return True

    def maintain(self, timeout_s: float) -> bool:
        """Let the control thread do maintenance now; return whether that has ended within `timeout_s`."""
        done = Event()
        self._orders.put(done)
        return done.wait(timeout_s)

    def join(self, timeout_s: float) -> None:
        """End the control thread; wait for it for a bounded time."""
        self._orders.put(None)
        if self._thread is not None:
            self._thread.stop(timeout_s)

    def _run(self, _: Event) -> None:
        try:
            self._open()
        except BaseException as error:
            self.outage = f"opening failed: {type(error).__name__}: {error}"
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        # A later reset replaces an earlier one that has not worked yet.
        generation: int | None = None
        while True:
            try:
                order = self._orders.get(timeout=self._maintain_interval_s if generation is None else RETRY_S)
                if order is None:
                    break
                if isinstance(order, Event):
                    self._maintain()
                    order.set()
                    continue
                generation = order
            except Empty:
                pass
            if generation is None:
                self._maintain()
            elif self._clear(generation):
                generation = None
        self._maintain()
        # A thread that hangs still uses what would be closed, and `join` waits for this one for a bounded time.
        if self._threads.close(TIMEOUT_MAX):
            self._counts.attempt("close", self._tier.close)

    def _open(self) -> None:
        contents = self._tier.open()
        try:
            catalog = self._new_catalog(contents, 0)
        except BaseException:
            self._counts.attempt("close", self._tier.close)
            raise
        with self._lock:
            self.catalog = catalog
            if self.state is State.OPENING:
                self.state = State.RESETTING if self.generation else State.OPEN

    def _maintain(self) -> None:
        with self._lock:
            catalog = self.catalog
            # Beside a reset, another catalog may give the slots away at any time.
            keys, slots = ([], []) if self.state is State.RESETTING else catalog.begin_erase()
        if keys:

            def erase() -> bool:
                self._tier.erase(slots)
                return True

            is_erased = bool(self._counts.attempt("erase", erase))
            with self._lock:
                catalog.end_erase(keys, is_erased)
        self._counts.attempt("maintain", self._tier.maintain)

    def _clear(self, generation: int) -> bool:
        """Make a reset durable; return False if it has to be tried again."""
        try:
            self._tier.clear(generation)
            # Numbers go on, so that blocks of this generation are later than what the medium still has of older ones.
            contents = TierContents(self._tier.num_blocks) if self._tier.num_blocks else None
            catalog = self._new_catalog(contents, self.catalog.last_seq)
        except BaseException as error:
            with self._lock:
                self._reset_error = f"{type(error).__name__}: {error}"
            self._counts.note_error(f"reset: {self._reset_error}")
            return False
        with self._lock:
            self._reset_error = ""
            self._cleared = (generation, catalog)
        return True
