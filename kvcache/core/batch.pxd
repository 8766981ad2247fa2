# The keys of one call, resolved to rows. Every array has room for `size` keys. A cache has one batch for all its calls.

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
    # One entry per key, in the order of the call.
    cdef int32_t* rows              # 0: absent
    cdef uint64_t* hashes
    cdef Py_ssize_t* places         # index in the request's keys; -1: not among them
    cdef int64_t* ends              # end in the prompt, or NO_POSITION; filled for a policy that tracks uses
    # One entry per key that the request uses for the first time.
    cdef int32_t* used_rows
    cdef uint64_t* used_hashes
    # One entry per key that the call acts on: to store, make ready or drop.
    cdef Py_ssize_t* picked         # index in the call
    cdef Py_ssize_t* picked_places
    cdef int32_t* picked_rows
    cdef int32_t* victims           # rows to evict
    cdef Position* in_prompt        # used keys of the request, in prompt order

    cdef int reserve(self, Py_ssize_t n) except -1
