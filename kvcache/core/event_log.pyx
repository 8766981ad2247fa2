"""EventLog: a bounded, numbered queue of the blocks that were added to a medium or removed from it.

Compiled because a compiled cache appends events inside the operation that changes the cache. No finalizer and no
other thread can then see a block before its event, and the log needs no lock of its own.
"""

cimport cython
from libc.stdint cimport uint64_t

from kvcache.core.memory cimport pause_collector, resume_collector

from collections import deque

from kvcache.events import OffloadingEvent
from kvcache.options import check_int


cdef class EventLog:
    """EventLog(block_size, max_keys=262144)

    Events of one manager that wait to be taken. The log creates all events.

    Parameters
    ----------
    block_size : int
        Tokens of one block.
    max_keys : int
        Keys that may wait. Beyond it the oldest events are dropped, but never the latest one.

    Attributes
    ----------
    last_number : int
        Number of the latest event, or of the latest `clear`. A gap in the numbers of taken events means that events
        were dropped.
    num_dropped : int
        Events that were dropped because too many keys waited.
    """

    def __cinit__(self, block_size, max_keys=1 << 18):
        self.block_size = block_size
        self.max_keys = check_int("max_keys", max_keys)
        self.waiting = deque()
        self.lock = object()

    def __len__(self):
        return len(self.waiting)

    def add(self, list keys not None, str medium not None, bint removed):
        """Append an event of a copy of `keys`; an empty list appends nothing."""
        with cython.critical_section(self.lock):
            self.append(keys, medium, removed)

    def take(self, max_events=None):
        """Take the events out, or the first `max_events` of them, oldest first.

        Parameters
        ----------
        max_events : int, optional
            The most events to take.

        Returns
        -------
        TakenEvents
            An iterator. Taking costs O(1) for each event, whether or not it is read.
        """
        cdef TakenEvents taken = TakenEvents.__new__(TakenEvents)
        cdef Py_ssize_t n
        # Made before the lock is taken: an allocation may run finalizers, which may add events.
        taken.waiting = deque()
        taken.block_size = self.block_size
        with cython.critical_section(self.lock):
            n = len(self.waiting)
            taken.next_number = self.last_number - len(self.waiting) + 1
            if n and (max_events is None or max_events >= n):
                self.waiting, taken.waiting = taken.waiting, self.waiting
                self.num_keys = 0
            elif n:
                for _ in range(max_events):
                    taken.waiting.append(self.pop())
        return taken

    def clear(self):
        """Drop the events that wait, and skip a number, so that a reader sees a gap."""
        with cython.critical_section(self.lock):
            self.forget()

    cdef void append(self, list keys, medium, bint removed) noexcept:
        """Append an event of a copy of `keys`; an empty list appends nothing.

        Dropping the oldest events may run Python code (a tier's keys may be of any type), so the caller completes its
        own change first. Nothing else runs Python code. Without memory for the event, all events are dropped.
        """
        if not keys:
            return
        cdef bint was_on = pause_collector()
        try:
            self.waiting.append((keys[:], medium, removed))
            self.last_number += 1
            self.num_keys += len(keys)
        except MemoryError:
            self.forget()
        finally:
            resume_collector(was_on)
        while self.num_keys > self.max_keys and len(self.waiting) > 1:
            self.num_dropped += 1
            self.pop()

    cdef tuple pop(self):
        """Take out the oldest event."""
        cdef tuple event = self.waiting.popleft()
        self.num_keys -= len(<list> event[0])
        return event

    cdef void forget(self) noexcept:
        """Drop the events that wait, and skip a number. Never fails."""
        self.num_keys = 0
        self.last_number += 1
        self.waiting.clear()        # needs no memory, and is empty before keys run Python code


cdef tuple _popleft(waiting):       # inside a critical section, Cython warns of a Python call
    return waiting.popleft()


@cython.final
cdef class TakenEvents:
    """TakenEvents()

    Events that were taken out of a log: an iterator that makes each when it is read. After the last one, `next_number`
    follows the number of the log's latest event or `clear` that was taken.
    """

    cdef object waiting
    cdef readonly uint64_t next_number
    cdef object block_size

    def __len__(self):
        """Return how many events have not been read."""
        return len(self.waiting)

    def __iter__(self):
        return self

    @cython.critical_section
    def __next__(self):
        if not self.waiting:
            raise StopIteration
        keys, medium, removed = _popleft(self.waiting)
        self.next_number += 1
        return OffloadingEvent(keys, self.block_size, medium, removed, self.next_number - 1)
