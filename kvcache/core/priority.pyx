"""Retention: hints move blocks to lanes that are evicted sooner or later, until their time is over.

Compiled because a hinted request moves every one of its blocks, in the scheduler's thread.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kvcache.core.table cimport NORMAL, PINNED, BlockTable, detach, attach
from kvcache.core.request_keys cimport RequestKeys

cdef enum:
    FALLS_PER_CALL = 256    # raised blocks whose time is over that one call lets fall back


cdef class PriorityClasses(BlockTable):
    """Retention(cache_capacity)

    BlockTable by priority: a lane each, and a deadline for each row that is raised.
    """

    @property
    def num_raised(self):
        """Blocks held at a raised priority."""
        return 0 if self.deadlines is None else self.deadlines.num_nodes

    @cython.critical_section
    def advance(self, int64_t now_ns, Py_ssize_t max_raised):
        """Let time pass: blocks whose time at a raised priority is over fall back, at most 256 of them a call.

        Parameters
        ----------
        now_ns : int
            Nanoseconds on a clock that never goes back.
        max_raised : int
            Blocks that may be held at a raised priority.
        """
        cdef int32_t row
        cdef int num_left = FALLS_PER_CALL
        self.now_ns = now_ns
        self.max_raised = max_raised
        if self.deadlines is None:
            return
        self._reserve_heaps(FALLS_PER_CALL)
        row = self.deadlines.nearest()
        while row != 0 and num_left and self.deadlines.of(row) <= <uint64_t> now_ns:
            self.deadlines.remove(row)
            self._set_priority(row, NORMAL)
            num_left -= 1
            row = self.deadlines.nearest()
        self._after()

    cdef void _set_priority(self, int32_t row, int32_t priority) noexcept nogil:
        """Move a row to the lane of another priority, to where it stands there."""
        cdef bint is_parked = self.rows[row].where == PINNED
        if not is_parked:
            detach(self, row)
        self.rows[row].priority = <uint8_t> priority
        if not is_parked:
            attach(self, row)

    cdef void _retain_row(self, int32_t row, int32_t priority, uint64_t deadline) noexcept nogil:
        """Raise a row, or prolong its time; a hint never lowers what another request has asked for."""
        cdef int32_t before = self.rows[row].priority
        if priority > before:
            self._set_priority(row, priority)
        if priority > NORMAL and (priority > before or (priority == before and deadline >= self.deadlines.of(row))):
            self.deadlines.set(row, deadline)

    cdef int _reserve_retention(self, Py_ssize_t n) except -1:
        """Make room, before anything changes, for `n` rows to be raised and for as many to fall back."""
        if self.deadlines is not None:
            self._reserve_heaps(2 * n)
        return 0

    cdef void _retain(self, const int32_t* rows, Py_ssize_t n, RequestKeys request_keys) noexcept nogil:
        """Apply a request's hint to resident rows; one without a hint lifts one-shot blocks, which were used again."""
        cdef Py_ssize_t i
        cdef int32_t priority = NORMAL if request_keys is None else NORMAL + request_keys.priority
        cdef uint64_t deadline = <uint64_t> -1
        if request_keys is not None and request_keys.ttl_ns:
            deadline = <uint64_t> (self.now_ns + request_keys.ttl_ns)
        # From last to first: of blocks whose time ends together, those set first fall first, and that must be the tail.
        for i in range(n - 1, -1, -1):
            if rows[i] != 0:
                self._retain_row(rows[i], priority, deadline)
        self._crowd_out()

    cdef void _restate(self, const int32_t* rows, Py_ssize_t n, int32_t priority, int64_t ttl_ns) noexcept nogil:
        """Put resident rows at what a later hint says, unless they are held at priority 2 or 3."""
        cdef Py_ssize_t i
        cdef int32_t row
        cdef uint64_t deadline = <uint64_t> (self.now_ns + ttl_ns) if ttl_ns else <uint64_t> -1
        for i in range(n - 1, -1, -1):
            row = rows[i]
            if row == 0 or self.rows[row].priority > NORMAL + 1:
                continue
            if priority > 0:
                self._retain_row(row, NORMAL + priority, deadline)
                continue
            if self.rows[row].priority > NORMAL:
                self.deadlines.remove(row)
            self._set_priority(row, NORMAL + priority)
        self._crowd_out()

    cdef void _crowd_out(self) noexcept nogil:
        """Let the rows nearest their end fall back where too many are raised."""
        cdef int32_t row
        while self.deadlines.num_nodes > self.max_raised:
            row = self.deadlines.nearest()
            self.deadlines.remove(row)
            self._set_priority(row, NORMAL)

    cdef int _after(self) except -1:
        """What a debug build checks after every call."""
        return 0
