cimport cython
from libc.stdint cimport uint64_t


@cython.final
cdef class EventLog:
    cdef readonly object block_size
    cdef public Py_ssize_t max_keys
    cdef readonly uint64_t last_number
    cdef readonly uint64_t num_dropped
    cdef object waiting             # deque of (keys, medium, removed); the list of keys is the event's own
    cdef Py_ssize_t num_keys
    cdef object lock                # its critical section guards the log: the table of the cache that owns the log

    cdef void append(self, list keys, medium, bint removed) noexcept
    cdef tuple pop(self)
    cdef void forget(self) noexcept
