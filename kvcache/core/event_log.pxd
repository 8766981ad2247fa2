cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

# Blocks that came to a medium or left it; no object of Python's until somebody reads it.
cdef struct Event:
    PyObject* keys          # strong: a list, the event's own
    PyObject* medium        # strong
    Py_ssize_t num_keys
    bint removed
    bint are_exact          # the keys are bytes and of no subclass, as a compiled cache's are


# Who takes every event as it happens. Its functions are called in the log's critical section, and run no Python.
cdef class EventSink:
    cdef bint put_event(
        self, list keys, Py_ssize_t n, medium, bint removed, bint are_exact, const uint64_t* hashes,
        uint64_t number) noexcept
    cdef bint put_reset(self) noexcept


@cython.final
cdef class EventLog:
    cdef readonly object block_size
    cdef public Py_ssize_t max_keys
    cdef readonly uint64_t last_number
    cdef readonly uint64_t num_dropped
    cdef Event* ring                # [size]; size is a power of two
    cdef Py_ssize_t size
    cdef Py_ssize_t oldest          # where in the ring
    cdef Py_ssize_t num_events
    cdef Py_ssize_t num_keys
    cdef EventSink sink             # or None: events wait to be taken
    cdef object lock                # its critical section guards the log: the table of the cache that has it

    cdef int reserve(self) except -1
    cdef void append(self, list keys, medium, bint removed, bint are_exact) noexcept
    cdef void forward(
        self, list keys, Py_ssize_t n, medium, bint removed, bint are_exact, const uint64_t* hashes) noexcept
    cdef void flush(self) noexcept
    cdef void forget(self) noexcept
    cdef void drop(self, Py_ssize_t num_events) noexcept


# Events that were taken out of a log.
@cython.final
cdef class TakenEvents:
    cdef Event* events              # [num_events]
    cdef Py_ssize_t num_events
    cdef Py_ssize_t num_read
    cdef uint64_t first_number
    cdef object block_size

    cdef void drop_unread(self) noexcept
