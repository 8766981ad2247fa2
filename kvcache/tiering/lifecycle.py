"""The life of a `JobTier`: one state, the transitions between states, and the control thread that does their slow part.

Opening, making a reset durable, maintenance and closing wait for the medium. They run in one thread of their own, which
never waits behind a batch that hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

from kvcache.background import Background
from kvcache.tiering.catalog import Catalog

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


@dataclass(frozen=True, slots=True)
class ControlSteps:
    """The work of the control thread. `open` and `clear` may raise; `clear` is then tried again.

    `clear` makes the reset before a generation durable and returns the catalog of that generation.
    """

    open: Callable[[], Catalog]
    clear: Callable[[int], Catalog]
    maintain: Callable[[], None]
    close: Callable[[], None]


class Lifecycle:
    """The state of a tier and its catalog. The caller holds `lock`, except for `order_clear` and `join`.

    `generation` counts the resets, `version` is that of the last one. `outage` is why the subclass finds nothing;
    `note_error` counts an error.
    """

    def __init__(
        self,
        steps: ControlSteps,
        lock: AbstractContextManager[Any],
        name: str,
        maintain_interval_s: float | None,
        note_error: Callable[[str], None],
    ) -> None:
        self.state = State.OPENING
        self.catalog = Catalog()
        self.generation = 0
        self.version: str | int | None = None
        self.outage = ""
        self._steps = steps
        self._lock = lock
        self._note_error = note_error
        self._maintain_interval_s = maintain_interval_s
        self._reset_error = ""
        # The generation that a reset has made durable, and its catalog.
        self._cleared: tuple[int, Catalog] | None = None
        # Generations to clear for; None ends the control thread.
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        self._is_opened = Event()
        self._open_error: BaseException | None = None
        self._name = name
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
        self._thread = Background(self._name, self._run)
        if self._is_opened.wait(timeout_s) and self._open_error is not None:
            raise self._open_error

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

    def join(self, timeout_s: float) -> None:
        """End the control thread; wait for it for a bounded time."""
        self._orders.put(None)
        if self._thread is not None:
            self._thread.stop(timeout_s)

    def _run(self, _: Event) -> None:
        try:
            self._open()
        except BaseException as error:
            self._open_error = error
            self.outage = f"opening failed: {type(error).__name__}: {error}"
            return
        finally:
            self._is_opened.set()
        # A later reset replaces an earlier one that has not worked yet.
        generation: int | None = None
        while True:
            try:
                order = self._orders.get(timeout=self._maintain_interval_s if generation is None else RETRY_S)
                if order is None:
                    break
                generation = order
            except Empty:
                pass
            if generation is None:
                self._steps.maintain()
            elif self._clear(generation):
                generation = None
        self._steps.maintain()
        self._steps.close()

    def _open(self) -> None:
        catalog = self._steps.open()
        with self._lock:
            self.catalog = catalog
            if self.state is State.OPENING:
                self.state = State.RESETTING if self.generation else State.OPEN

    def _clear(self, generation: int) -> bool:
        """Make a reset durable; return False if it has to be tried again."""
        try:
            catalog = self._steps.clear(generation)
        except BaseException as error:
            with self._lock:
                self._reset_error = f"{type(error).__name__}: {error}"
            self._note_error(f"reset: {self._reset_error}")
            return False
        with self._lock:
            self._reset_error = ""
            self._cleared = (generation, catalog)
        return True
