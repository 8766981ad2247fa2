cimport cython
from libc.stdint cimport int32_t, int64_t

from kvcache.core.event_log cimport EventLog
from kvcache.core.policy cimport ReplacementPolicy
from kvcache.core.priority cimport PriorityClasses
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport Batch, BlockTable


@cython.final
cdef class BlockCache:
    cdef ReplacementPolicy policy
    cdef BlockTable table
    cdef PriorityClasses priorities
    cdef Batch batch
    cdef bint reads_clock                       # whether the policy reads the clock
    cdef EventLog events                        # or None
    cdef str medium
    cdef public Py_ssize_t lookups, looked_up_blocks, hit_blocks
    cdef public Py_ssize_t gated_blocks
    cdef readonly Py_ssize_t declined_blocks    # gated blocks that the policy declined to store

    # The recorder wraps these operations. The other operations are defined in cache.pyx only.
    cpdef bint needs_time(self, RequestKeys request_keys, dict positions) except -1
    cpdef reorder(self, RequestKeys request_keys, dict positions)
    cpdef end_request(self, RequestKeys request_keys, dict positions, bint use_positions=*)
    cpdef Py_ssize_t lookup(self, list keys, RequestKeys request_keys) except -1
    cpdef int status_of(self, key) except -1
    cpdef touch(self, keys, RequestKeys request_keys=*)
    cpdef pin(self, list keys, RequestKeys request_keys)
    cpdef unpin(self, list keys, RequestKeys request_keys)
    cpdef reserve(self, list keys, RequestKeys request_keys, admit=*)
    cpdef list commit(self, list keys, RequestKeys request_keys)
    cpdef Py_ssize_t abort(self, list keys, RequestKeys request_keys) except -1
    cpdef reset(self)

    cdef int _begin(self, RequestKeys request_keys) except -1
    cdef int _resolve(self, list keys, RequestKeys request_keys, bint add) except -1
    cdef void _announce(self, list keys, bint removed) noexcept
    cdef int _end(self) except -1
    cdef int _reorder(self, RequestKeys request_keys, dict positions) except -1
    cdef int32_t _state_of(self, int32_t row) noexcept nogil
    cdef Py_ssize_t _match_prefix(self, list keys, RequestKeys request_keys, Py_ssize_t start) except -1
    cdef void _release(self, const int32_t* victims, Py_ssize_t n, list evicted) noexcept
    cdef void _admit(self, list keys, RequestKeys names, Py_ssize_t n, list stored, int64_t* ids) noexcept
    cdef int32_t _row_before(self, RequestKeys request_keys, Py_ssize_t i) noexcept nogil
