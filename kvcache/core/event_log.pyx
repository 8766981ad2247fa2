"""EventLog: a bounded, numbered queue of the blocks that were added to a medium or removed from it.

Compiled because a compiled cache appends events inside the operation that changes the cache. No finalizer and no
other thread can then see a block before its event, and the log needs no lock of its own.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from kvcache.core.memory cimport pause_collector, resume_collector

from kvcache.events import OffloadingEvent
from kvcache.options import check_int

cdef enum:
    LEAST_EVENTS = 16       # room of a new ring


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
    reader : object
        If not None, `take` returns events to this reader only.
    """

    def __cinit__(self, block_size, max_keys=1 << 18):
        self.block_size = block_size
        self.max_keys = check_int("max_keys", max_keys)
        self.lock = object()

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.num_events):
            release(&self.ring[(self.oldest + i) & (self.size - 1)])
        PyMem_Free(self.ring)

    def __reduce__(self):
        raise TypeError("a log belongs to one manager and cannot be pickled")

    def __len__(self):
        return self.num_events

    def add(self, list keys not None, str medium not None, bint removed):
        """Append an event of a copy of `keys`; an empty list appends nothing."""
        cdef bint was_on
        cdef list copy
        if not keys:
            return
        was_on = pause_collector()
        try:
            copy = keys[:]
        finally:
            resume_collector(was_on)
        with cython.critical_section(self.lock):
            self.reserve()
            self.append(copy, medium, removed)

    def take(self, max_events=None, reader=None):
        """Take the events out, or the first `max_events` of them, oldest first.

        Parameters
        ----------
        max_events : int, optional
            The most events to take.
        reader : object
            The reader that takes them. If the log has another `reader`, nothing is taken.

        Returns
        -------
        TakenEvents
            An iterator. Taking costs O(1) for each event, whether or not it is read.
        """
        cdef TakenEvents taken = TakenEvents.__new__(TakenEvents)
        cdef Py_ssize_t i, n
        with cython.critical_section(self.lock):
            n = self.num_events if self.reader is None or self.reader is reader else 0
            if max_events is not None:
                n = max(0, min(n, max_events))
            if n == 0:
                return taken
            taken.events = <Event*> PyMem_Malloc(n * sizeof(Event))
            if taken.events == NULL:
                raise MemoryError(f"no memory for {n} events")
            for i in range(n):
                taken.events[i] = self.ring[(self.oldest + i) & (self.size - 1)]
                self.num_keys -= taken.events[i].num_keys
            taken.num_events = n
            taken.block_size = self.block_size
            taken.first_number = self.last_number - self.num_events + 1
            self.oldest = (self.oldest + n) & (self.size - 1)
            self.num_events -= n
        return taken

    def clear(self):
        """Drop the events that wait, and skip a number, so that a reader sees a gap."""
        with cython.critical_section(self.lock):
            self.forget()

    cdef int reserve(self) except -1:
        """Make room for one more event. Runs no Python."""
        cdef Py_ssize_t size, num_first
        cdef Event* ring
        if self.num_events < self.size:
            return 0
        size = max(LEAST_EVENTS, 2 * self.size)
        ring = <Event*> PyMem_Realloc(self.ring, size * sizeof(Event))
        if ring == NULL:
            raise MemoryError(f"no memory for {size} events")
        # The ring was full and has doubled: move the events before the oldest one behind the newest.
        if self.oldest:
            num_first = self.oldest
            memcpy(&ring[self.size], ring, num_first * sizeof(Event))
        self.ring = ring
        self.size = size
        return 0

    cdef void append(self, list keys, medium, bint removed) noexcept:
        """Append an event that owns the non-empty list `keys`. Call `reserve` before.

        No Python code may run between the two calls, because it could use up the room. Dropping the oldest events may
        run Python code (a tier's keys may be of any type), so the caller completes its own change first.
        """
        cdef Event* event = &self.ring[(self.oldest + self.num_events) & (self.size - 1)]
        Py_INCREF(keys)
        Py_INCREF(medium)
        event.keys = <PyObject*> keys
        event.medium = <PyObject*> medium
        event.num_keys = len(keys)
        event.removed = removed
        self.last_number += 1
        self.num_events += 1
        self.num_keys += event.num_keys
        while self.num_keys > self.max_keys and self.num_events > 1:
            self.num_dropped += 1
            self.drop(1)

    cdef void forget(self) noexcept:
        """Drop the events that wait, because the cache was reset, and skip a number."""
        self.drop(self.num_events)
        self.last_number += 1

    cdef void drop(self, Py_ssize_t num_events) noexcept:
        """Drop the oldest events."""
        cdef Event event
        while num_events > 0 and self.num_events > 0:
            event = self.ring[self.oldest]
            self.oldest = (self.oldest + 1) & (self.size - 1)
            self.num_events -= 1
            self.num_keys -= event.num_keys
            num_events -= 1
            release(&event)


cdef void release(Event* event) noexcept:
    Py_DECREF(<object> event.keys)
    Py_DECREF(<object> event.medium)


@cython.final
cdef class TakenEvents:
    """TakenEvents()

    Events that were taken out of a log: an iterator that makes each when it is read.
    """

    def __dealloc__(self):
        self.drop_unread()
        PyMem_Free(self.events)

    def __reduce__(self):
        raise TypeError("events that were taken cannot be pickled before they are read")

    def __len__(self):
        """Return how many events have not been read."""
        return self.num_events - self.num_read

    def __iter__(self):
        return self

    def __next__(self):
        cdef Event event
        cdef uint64_t number
        with cython.critical_section(self):
            if self.num_read == self.num_events:
                raise StopIteration
            event = self.events[self.num_read]
            number = self.first_number + self.num_read
            self.num_read += 1
        keys, medium = <object> event.keys, <object> event.medium
        release(&event)
        return OffloadingEvent(keys, self.block_size, medium, event.removed, number)

    cdef void drop_unread(self) noexcept:
        """Drop the events that have not been read."""
        cdef Event event
        while self.num_read < self.num_events:
            event = self.events[self.num_read]
            self.num_read += 1
            release(&event)
