cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

# Blocks that were added to a medium or removed from it. `TakenEvents` creates the Python object when it is read.
cdef struct Event:
    PyObject* keys          # strong: a list, the event's own
    PyObject* medium        # strong
    Py_ssize_t num_keys
    bint removed


@cython.final
cdef class EventLog:
    cdef readonly object block_size
    cdef public Py_ssize_t max_keys
    cdef readonly uint64_t last_number
    cdef readonly uint64_t num_dropped
    cdef Event* ring                # [size]; size is a power of two
    cdef Py_ssize_t size
    cdef Py_ssize_t oldest          # index in the ring
    cdef Py_ssize_t num_events
    cdef Py_ssize_t num_keys
    cdef public object reader       # the only reader that may take events, or None
    cdef object lock                # its critical section guards the log: the table of the cache that owns the log

    cdef int reserve(self) except -1
    cdef void append(self, list keys, medium, bint removed) noexcept
    cdef void forget(self) noexcept
    cdef void drop(self, Py_ssize_t num_events) noexcept


# Events taken out of a log.
@cython.final
cdef class TakenEvents:
    cdef Event* events              # [num_events]
    cdef Py_ssize_t num_events
    cdef Py_ssize_t num_read
    cdef uint64_t first_number
    cdef object block_size

    cdef void drop_unread(self) noexcept
