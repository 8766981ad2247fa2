"""The two sources of a publisher: a queue of events that the engine fills, and the event log of a followed manager."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from kvcache.background import Background
from kvcache.core.event_log import EventLog, TakenEvents
from kvcache.events import OffloadingEvent
from kvcache.request import Prompt

Description = tuple[list[bytes], Prompt]
"""Keys that are about to be stored, and their prompt."""


class EventQueue:
    """Events, descriptions of blocks and clearings that wait for the publishing thread.

    While `max_events` events wait, `put` drops further ones and queues a clearing. One thread puts, another takes:
    each counter is written by one of them, so no lock is needed.
    """

    def __init__(self, max_events: int) -> None:
        self.max_events = max_events
        self.num_put = self.num_taken = self.num_dropped = 0
        self._items: deque[Collection[OffloadingEvent] | TakenEvents | Description | None] = deque()
        self._gap_at = -1
        self._last_number = 0

    @property
    def num_waiting(self) -> int:
        """Number of events that wait."""
        return self.num_put - self.num_taken

    def put(self, events: Collection[OffloadingEvent] | TakenEvents) -> None:
        """Queue events, or count them as dropped."""
        if self.num_waiting < self.max_events:
            self.put_taken(events)
        elif events:
            self.num_dropped += len(events)
            # Events between two drops were queued, so the next drop is a gap of its own.
            if self._gap_at != self.num_put:
                self._gap_at = self.num_put
                self.clear()

    def put_taken(self, events: Collection[OffloadingEvent] | TakenEvents) -> None:
        """Queue events, however many wait: those of a log are bounded there."""
        self.num_put += len(events)
        self._items.append(events)

    def describe(self, keys: list[bytes], prompt: Prompt) -> None:
        """Queue a description."""
        self._items.append((keys, prompt))

    def clear(self) -> None:
        """Queue that every block is gone."""
        self._items.append(None)

    def take(self) -> Iterator[OffloadingEvent | Description | None]:
        """Yield what waits, in order. None: every block is gone, or events are missing."""
        while self._items:
            item = self._items.popleft()
            if item is None:
                self._last_number = 0
                yield None
            elif isinstance(item, tuple):
                yield item
            else:
                yield from self._events(item)

    def _events(self, events: Collection[OffloadingEvent] | TakenEvents) -> Iterator[OffloadingEvent | None]:
        for event in events:
            if event.number:
                if self._last_number and event.number != self._last_number + 1:
                    # Events were dropped, so the held blocks are unknown: announce none of them.
                    yield None
                self._last_number = event.number
            self.num_taken += 1
            yield event
        # The last number that was taken may be that of a reset.
        if type(events) is TakenEvents and self._last_number < events.next_number - 1:
            self._last_number = events.next_number - 1
            yield None


class FollowedLog:
    """The event log of a manager, read by one thread alone; `unwatch` ends the descriptions of its blocks."""

    def __init__(self, log: EventLog, reader: Background, unwatch: Callable[[], None]) -> None:
        self._log, self._reader, self._unwatch = log, reader, unwatch
        log.reader = reader

    def take(self) -> TakenEvents:
        """Take all events out."""
        return self._log.take(None, self._reader)

    def clear(self) -> None:
        """Note that every block is gone."""
        self._log.clear()

    def end(self) -> None:
        """Leave the events to the manager again."""
        self._unwatch()
        self._log.reader = None


class Descriptions:
    """Queues the keys that a manager is about to store, with their prompt (a `kvcache.control.watch.Wrapper`)."""

    names: Collection[str] = ("prepare_store",)

    def __init__(self, queue: EventQueue, thread: Background) -> None:
        self._queue, self._thread = queue, thread

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        queue, thread = self._queue, self._thread

        def described(keys: Any, req_context: Any = None, *args: Any, **kwargs: Any) -> Any:
            output = method(keys, req_context, *args, **kwargs)
            prompt = getattr(req_context, "prompt", None)
            if prompt is not None and output is not None and output.keys_to_store and thread.is_alive:
                queue.describe([*output.keys_to_store], prompt)
            return output

        return described
