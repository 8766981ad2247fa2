"""EventLog: the only maker of events: it numbers what came to a medium or left it, and bounds what nobody takes.

Events wait until `take`, or go to a sink, a publisher's queue, in the very operation: then nothing is made per key.

Compiled because a compiled cache appends to it inside the very operation that changes the cache: then no finalizer and
no other thread ever sees a block that has come and is not announced, and neither a lock nor a pause is needed for it.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from kvcache.core.memory cimport new_list, pause_collector, resume_collector

from kvcache.events import OffloadingEvent
from kvcache.options import check_int

cdef extern from "Python.h":
    PyObject* PyList_GET_ITEM(object keys, Py_ssize_t i) noexcept
    void PyList_SET_ITEM(object keys, Py_ssize_t i, PyObject* key) noexcept

cdef enum:
    LEAST_EVENTS = 16       # room of a new ring
    FLUSHED_KEYS = 4096     # that waited, in one call at most


cdef class EventSink:
    """EventSink()

    Where a log's events go in the very operation that makes them; see `EventLog.forward_to`.
    """

    cdef bint put_event(
        self, list keys, Py_ssize_t n, medium, bint removed, bint are_exact, const uint64_t* hashes, uint64_t number,
    ) noexcept:
        """Copy an event of the first `n` keys, n > 0; False: there is no room for it now, and nothing has changed.

        `hashes` are `key_hash.hash_of` of each, or NULL.

        Numbers before it that are missing were dropped. What can never be put is dropped, too, and returns True.
        """
        return False

    cdef bint put_reset(self) noexcept:
        """Copy that everything was forgotten; False: there is no room."""
        return False


cdef class EventLog:
    """EventLog(block_size, max_keys=262144)

    The events of one manager that nobody has taken yet; the only maker of events.

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
        """Append an event of a copy of `keys`; nothing where there are none."""
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
            if self.sink is not None:
                self.forward(copy, len(copy), medium, removed, False, NULL)
                return
            self.reserve()
            self.append(copy, medium, removed, False)

    def forward_to(self, EventSink sink):
        """Give every event from now on to `sink`, after those that wait; None: let them wait to be taken again.

        What the sink has no room for waits, bounded by `max_keys`, and follows with later events. Nothing can be taken.

        Raises
        ------
        ValueError
            The events go to a sink already.
        """
        with cython.critical_section(self.lock):
            if sink is not None and self.sink is not None:
                raise ValueError("the manager's events go to a publisher already")
            self.sink = sink
            self.flush()

    def push(self):
        """Give the sink the first part of what it had no room for; return whether more waits for it."""
        with cython.critical_section(self.lock):
            self.flush()
            return self.sink is not None and self.num_events > 0

    def take(self, max_events=None):
        """Take out the events, or the first `max_events` of them, oldest first.

        Returns
        -------
        TakenEvents
            An iterator; O(1) for each event, whether or not it is read.
        """
        cdef TakenEvents taken = TakenEvents.__new__(TakenEvents)
        cdef Py_ssize_t i, n
        with cython.critical_section(self.lock):
            self.flush()
            n = self.num_events if self.sink is None else 0
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
        """Drop what nobody has taken; the numbers go on, so that a reader sees a gap."""
        with cython.critical_section(self.lock):
            self.forget()

    cdef int reserve(self) except -1:
        """Make room for one event more; this runs no Python."""
        cdef Py_ssize_t size, num_first
        cdef Event* ring
        if self.num_events < self.size:
            return 0
        size = max(LEAST_EVENTS, 2 * self.size)
        ring = <Event*> PyMem_Realloc(self.ring, size * sizeof(Event))
        if ring == NULL:
            raise MemoryError(f"no memory for {size} events")
        # What stood before the oldest event goes behind the newest: the ring was full, and has doubled.
        if self.oldest:
            num_first = self.oldest
            memcpy(&ring[self.size], ring, num_first * sizeof(Event))
        self.ring = ring
        self.size = size
        return 0

    cdef void append(self, list keys, medium, bint removed, bint are_exact) noexcept:
        """Append an event of `keys`, which are not empty and now the log's own; `reserve` has been called.

        Between the two nothing may run Python, which could use the room up. What has to go may run it, where a tier's
        keys are no bytes; so this comes when the operation's own change is whole.
        """
        cdef Event* event = &self.ring[(self.oldest + self.num_events) & (self.size - 1)]
        Py_INCREF(keys)
        Py_INCREF(medium)
        event.keys = <PyObject*> keys
        event.medium = <PyObject*> medium
        event.num_keys = len(keys)
        event.removed = removed
        event.are_exact = are_exact
        self.last_number += 1
        self.num_events += 1
        self.num_keys += event.num_keys
        while self.num_keys > self.max_keys and self.num_events > 1:
            self.num_dropped += 1
            self.drop(1)

    cdef void forward(
        self, list keys, Py_ssize_t n, medium, bint removed, bint are_exact, const uint64_t* hashes,
    ) noexcept:
        """Give the sink an event of the first `n` keys, n > 0; it waits where there is no room."""
        cdef list waiting
        cdef Py_ssize_t i
        cdef PyObject* key
        if self.num_events:
            self.flush()
        if self.num_events == 0 and self.sink is not None and self.sink.put_event(
                keys, n, medium, removed, are_exact, hashes, self.last_number + 1):
            self.last_number += 1
            return
        try:
            self.reserve()
            waiting = new_list(n)
        except MemoryError:
            self.last_number += 1
            self.num_dropped += 1
            return
        for i in range(n):
            key = PyList_GET_ITEM(keys, i)
            Py_INCREF(<object> key)
            PyList_SET_ITEM(waiting, i, key)
        self.append(waiting, medium, removed, are_exact)

    cdef void flush(self) noexcept:
        """Give the sink, if there is one, the oldest events that wait: not so many that an operation takes long."""
        cdef Py_ssize_t num_keys = 0
        cdef Event* event
        while self.sink is not None and self.num_events and num_keys < FLUSHED_KEYS:
            event = &self.ring[self.oldest]
            num_keys += event.num_keys
            if not self.sink.put_event(
                    <list> event.keys, event.num_keys, <object> event.medium, event.removed, event.are_exact,
                    NULL, self.last_number - self.num_events + 1):
                return
            self.drop(1)

    cdef void forget(self) noexcept:
        """Drop what waits: everything was forgotten."""
        self.drop(self.num_events)
        if self.sink is not None and not self.sink.put_reset():
            # A number that is missing says the same.
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
