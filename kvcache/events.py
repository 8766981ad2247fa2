"""Events: which blocks came to a medium or left it, and the log that makes, numbers and bounds them.

A router or an exporter keeps a view of the cache from them, so they must come in the order in which the cache changed;
and a scheduler whose events nobody takes must not run out of memory.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

from kvcache.options import check_int


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that came to a medium (`removed` False) or left it (`removed` True).

    Parameters
    ----------
    keys : list of bytes
        The blocks.
    block_size : int
        Tokens of one block.
    medium : str
        The medium's name.
    removed : bool
        Whether they left.
    number : int
        Place in the manager's log, from 1 on without gaps: a gap says that events were dropped. Not compared.
    """

    keys: list[bytes]
    block_size: int
    medium: str
    removed: bool
    number: int = field(default=0, compare=False)

    @property
    def block_hashes(self) -> list[bytes]:
        """The older name of `keys`."""
        return self.keys


class EventLog:
    """The events of one manager that nobody has taken yet; the only maker of events.

    Parameters
    ----------
    block_size : int
        Tokens of one block.
    max_keys : int
        Keys that wait to be taken at most; beyond it the oldest events are dropped, down to the latest one.

    Attributes
    ----------
    last_number : int
        Of the latest event.
    num_dropped : int
        Events that were dropped because nobody took them.

    Notes
    -----
    As a context manager it makes a change of the cache and its event one step: other threads wait, and the garbage
    collector, whose finalizers may call the manager, is paused.
    """

    def __init__(self, block_size: int, max_keys: int = 1 << 18) -> None:
        self.block_size = block_size
        self.max_keys = check_int("max_keys", max_keys)
        self.last_number = 0
        self.num_dropped = 0
        self._events: deque[OffloadingEvent] = deque()
        self._num_keys = 0
        self._lock = threading.RLock()
        self._depth = 0
        self._was_collecting = False

    def __enter__(self) -> EventLog:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._was_collecting = gc.isenabled()
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._was_collecting:
            gc.enable()
        self._lock.release()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, keys: list[bytes], medium: str, removed: bool) -> None:
        """Append an event of a copy of `keys`; nothing where there are none."""
        if not keys:
            return
        with self:
            self.last_number += 1
            self._events.append(OffloadingEvent(list(keys), self.block_size, medium, removed, self.last_number))
            self._num_keys += len(keys)
            while self._num_keys > self.max_keys and len(self._events) > 1:
                self._num_keys -= len(self._events.popleft().keys)
                self.num_dropped += 1

    def take(self, max_events: int | None = None) -> Iterator[OffloadingEvent]:
        """Take out the events, or the first `max_events` of them, oldest first."""
        with self:
            count = len(self._events) if max_events is None else min(max_events, len(self._events))
            taken = [self._events.popleft() for _ in range(count)]
            self._num_keys -= sum(len(event.keys) for event in taken)
        return iter(taken)

    def clear(self) -> None:
        """Drop what nobody has taken; the numbers go on, so that a reader sees a gap."""
        with self:
            self._events.clear()
            self._num_keys = 0


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job of a tier or a transfer that has ended, for who traces them.

    Parameters
    ----------
    name : str
        ``"promotion"``, ``"write"`` or ``"transfer"``.
    medium : str
        The tier's, or ``"GPU -> CPU"``.
    num_blocks, num_bytes : int
        How much it moved; 0: not known.
    end_s, seconds : float
        When it ended, since the epoch, and how long it took.
    error : str
        Why it failed; empty if it did not.
    """

    name: str
    medium: str
    num_blocks: int
    num_bytes: int
    end_s: float
    seconds: float
    error: str = ""


class JobLog:
    """The jobs that have ended and that nobody has taken yet, bounded; what does not fit is counted.

    Parameters
    ----------
    max_jobs : int
        Jobs kept.
    """

    def __init__(self, max_jobs: int = 10_000) -> None:
        self._jobs: deque[FinishedJob] = deque()
        self.max_jobs = max_jobs
        self.num_dropped = 0

    def add(self, job: FinishedJob) -> None:
        """Append a job, or count it as dropped."""
        if len(self._jobs) < self.max_jobs:
            self._jobs.append(job)
        else:
            self.num_dropped += 1

    def take(self) -> Iterator[FinishedJob]:
        """Take the jobs out, oldest first; for one thread beside those that add."""
        while self._jobs:
            yield self._jobs.popleft()
