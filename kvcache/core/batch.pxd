# The keys of one call, resolved to rows. Every array has room for `size` keys; a cache has one batch for all its calls.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef struct Position:
    int64_t position        # where a key's block ends in the prompt
    int64_t at              # in the order of first use

cdef extern from *:
    """
    #define KV_NO_POSITION INT64_MIN
    """
    const int64_t NO_POSITION "KV_NO_POSITION"


@cython.final
cdef class Batch:
    cdef Py_ssize_t size
    # Of each key, in the order of the call.
    cdef int32_t* rows              # 0: absent
    cdef uint64_t* hashes
    cdef Py_ssize_t* places         # among the request's keys; -1: nowhere
    cdef int64_t* ends              # in the prompt, NO_POSITION where not known; filled for a policy that tracks uses
    # Of the keys that the request uses for the first time.
    cdef int32_t* used_rows
    cdef uint64_t* used_hashes
    # Of the keys that the call is about: to be stored, made ready or dropped.
    cdef Py_ssize_t* picked         # where in the call
    cdef Py_ssize_t* picked_places
    cdef int32_t* picked_rows
    cdef int32_t* victims           # rows that leave
    cdef Position* in_prompt        # used keys of the request, in the order of the prompt

    cdef int reserve(self, Py_ssize_t n) except -1
