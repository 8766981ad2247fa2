"""ReplacementPolicy: default behaviour of compiled policies. The contract is in `policy.pxd`.

Compiled because a policy's hooks loop over rows.
"""

from libc.stdint cimport int32_t, uint64_t

from kvcache.core.ghosts cimport GhostList
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport Batch, move_to_tail, place

from kvcache.block import BlockStateError

DEBUG = bool(KV_DEBUG)

cdef enum:
    CHECKED_SIZE = 256      # debug builds check tables up to this size after every call, larger ones less often

cdef Py_ssize_t _num_calls = 0  # in debug builds


cdef class ReplacementPolicy:
    """ReplacementPolicy(cache_capacity)

    The hooks of a compiled policy, over a table of rows.
    """

    def __cinit__(self, *_):
        self.again_list = -1

    @property
    def cache_capacity(self):
        """Capacity of the cache, in blocks."""
        return self.table.cache_capacity

    def __reduce__(self):
        raise TypeError(f"{type(self).__name__} lives in one process and cannot be pickled; send its name instead")

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        pass

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        pass

    cdef void select_victims(self, Py_ssize_t n, int32_t* victims) noexcept nogil:
        pass

    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(n - 1, -1, -1):
            if rows[i] != 0:
                move_to_tail(self.table, rows[i], self.table.rows[rows[i]].list_idx)

    cdef void on_append(self, const int32_t* rows, Py_ssize_t n, uint64_t stamp, int32_t tail) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(n):
            if rows[i] != 0:
                place(self.table, rows[i], self.table.rows[rows[i]].list_idx, stamp - i)

    cdef void on_demote(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        pass

    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use
    ) noexcept nogil:
        pass

    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        pass

    cdef void on_reset(self) noexcept nogil:
        pass

    cdef int reserve_policy(self, Py_ssize_t n) except -1:
        return 0

    cdef int check_policy(self) except -1:
        return 0

    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n
    ) noexcept nogil:
        pass

    cdef Py_ssize_t num_more_victims(self, RequestKeys request, Py_ssize_t n) noexcept nogil:
        return 0

    cdef Py_ssize_t on_offer(
        self, RequestKeys request, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered,
        Py_ssize_t last_place, int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        return 0

    cdef void on_admit(
        self, RequestKeys request, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        pass

    cdef void on_failure(self, RequestKeys request, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        self.on_remove(rows, n)

    cdef void on_request_end(self, RequestKeys request) noexcept nogil:
        pass

    cdef int use_keys(self, list keys, Batch batch) except -1:
        """Count a use of each key of a call that belongs to no request."""
        cdef Py_ssize_t n = len(keys)
        cdef RequestKeys request
        if self.tracks_uses:
            # Treat the call as a request of its own.
            request = RequestKeys.__new__(RequestKeys)
            request.track_uses()
            request.resolve(self.table, keys, batch, True)
            self.reserve_policy(n)
            self.count_uses(request, batch, n)
            return 0
        self.table.find(keys, 0, n, batch)
        self.reserve_policy(n)
        self.on_use(batch.rows, batch.hashes, n)
        return 0

    cdef Py_ssize_t count_uses(self, RequestKeys request, Batch batch, Py_ssize_t n) noexcept nogil:
        """Count the uses in a resolved batch that the request has not counted yet, and return their number."""
        cdef Py_ssize_t num_used = request.add_uses(batch, n)
        if num_used == 0:
            return 0
        if self.tracks_uses:
            self.on_request_use(request, batch.used_rows, batch.used_hashes, num_used)
        else:
            self.on_use(batch.used_rows, batch.used_hashes, num_used)
        return num_used

    cdef void choose_victims(self, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Take `n` rows out of their lists. The caller has checked that `n` are evictable."""
        if n:
            self.select_victims(n, victims)
        self.table.return_aside()

    cdef int check_all(self) except -1:
        """Check the table and the policy's own state. Raise BlockStateError naming the broken invariant."""
        self.table.check()
        self.check_policy()
        return 0

    cdef int check_ghosts(self, GhostList ghosts) except -1:
        """Check a list of ghosts, and that no resident key is among them."""
        cdef int32_t row
        ghosts.check()
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if self.table.rows[row].key != NULL and ghosts.find(self.table.rows[row].hash):
                raise BlockStateError(f"invariant broken: row {row} is resident and a ghost")
        return 0

    cdef bint is_check_due(self) noexcept:
        """Return whether a debug build checks all state after this call."""
        global _num_calls
        _num_calls += 1
        return _num_calls * CHECKED_SIZE % self.table.cache_capacity < CHECKED_SIZE
