"""mq: recency queues by the logarithm of a block's uses. A block that is not used for a while moves down one queue.

Compiled because it loops over rows. Zhou, Philbin & Li, "The Multi-Queue Replacement Algorithm for Second Level
Buffer Caches", USENIX ATC '01, with a history of the uses of evicted keys. `amq` is the project's own: mq without its
parameter.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from kvcache.core.ghosts cimport GhostList
from kvcache.core.index cimport bit_length, zeroed
from kvcache.core.table cimport BlockTable, enter, move_to_tail, set_stamp
from kvcache.core.policy_adapter cimport PolicyAdapter

from kvcache.core.policy_adapter import ListView
from kvcache.policies.base import CachePolicy
from kvcache.block import BlockStateError

cdef enum:
    NUM_LEVELS = 8
    NUM_BINS = 64               # two per octave of a 32-bit distance
    DEMOTIONS_PER_TICK = 1024   # the rest waits for the next request, so that each call is bounded
    HISTORY_FACTOR = 4          # size of the history of evicted keys, in capacities
    TICKS_PER_SETTING = 64
    FEWEST_DISTANCES = 256
    MOST_DISTANCES = 65536

cdef int64_t LIFE = 500

cdef struct Member:
    int64_t moved_at        # when the block was last used or demoted
    int64_t used_at
    uint32_t uses
    int32_t prev            # neighbours in its queue, referenced blocks included
    int32_t next


cdef inline int32_t level_of(uint32_t uses) noexcept nogil:
    return min(bit_length(uses), NUM_LEVELS) - 1


cdef inline uint32_t bin_of(uint32_t distance) noexcept nogil:
    cdef uint32_t octave = bit_length(distance) - 1
    return 2 * octave + (distance >> (octave - 1) & 1) if distance >= 2 else 0


cdef inline void join_queue(Member* members, int32_t row, int32_t younger) noexcept nogil:
    # Link a row behind a younger one, or behind a queue's head, which is the most-recent end.
    cdef int32_t older = members[younger].prev
    members[row].prev = older
    members[row].next = younger
    members[older].next = row
    members[younger].prev = row


cdef inline void leave_queue(Member* members, int32_t row) noexcept nogil:
    members[members[row].prev].next = members[row].next
    members[members[row].next].prev = members[row].prev


cdef class MultiQueue(PolicyAdapter):
    """MultiQueue(cache_capacity)

    Shared by mq and amq: eight queues, their demotions, and the history.
    """

    cdef Member* members            # [num_rows]; queue L's head is member L
    cdef readonly GhostList history
    cdef readonly int64_t clock     # requests that counted a use
    cdef readonly int64_t life      # an unused block moves down one queue after this many requests
    cdef bint learns_life
    cdef uint32_t[NUM_BINS] distances   # between first and second uses; only counted if `learns_life`
    cdef uint32_t num_distances

    def __cinit__(self, cache_capacity):
        self.table = BlockTable(cache_capacity, NUM_LEVELS)
        self.members = <Member*> zeroed(self.table.num_rows * sizeof(Member))
        if self.members == NULL:
            raise MemoryError(f"no memory for {cache_capacity} blocks")
        self.history = GhostList(HISTORY_FACTOR * cache_capacity, tight=True)
        self.on_reset()

    def __dealloc__(self):
        free(self.members)

    @property
    def queues(self):
        """The keys of each queue, the least used queue first."""
        return [ListView(self, level) for level in range(NUM_LEVELS)]

    def gauges(self):
        """Return the length of each queue, and the number of keys in the history."""
        queues = {f"queue_{level}_blocks": self.table.num_in_list[level] for level in range(NUM_LEVELS)}
        return {**queues, "remembered_keys": self.history.num_ghosts}

    cdef void on_request(self) noexcept nogil:
        self.clock += 1
        if self.clock % TICKS_PER_SETTING == 0 and self.num_distances >= FEWEST_DISTANCES:
            self._set_life()
        self._demote()

    cdef void _set_life(self) noexcept nogil:
        cdef int i = 0
        cdef uint32_t num_below = self.distances[0]
        while num_below < (self.num_distances + 1) // 2:
            i += 1
            num_below += self.distances[i]
        self.life = (<int64_t> 2 << (i // 2)) if i % 2 else (<int64_t> 3 << (i // 2)) >> 1
        if self.num_distances >= MOST_DISTANCES:
            self.num_distances = 0
            for i in range(NUM_BINS):
                self.distances[i] >>= 1
                self.num_distances += self.distances[i]

    cdef void _demote(self) noexcept nogil:
        cdef int32_t level, row
        cdef int32_t num_left = DEMOTIONS_PER_TICK
        for level in range(NUM_LEVELS - 1, 0, -1):
            row = self.members[level].next
            while row != level and num_left and self.members[row].moved_at + self.life < self.clock:
                self._move(row, level - 1)
                self.members[row].moved_at = self.clock
                num_left -= 1
                row = self.members[level].next

    cdef inline void _move(self, int32_t row, int32_t level) noexcept nogil:
        """Move a row to the most-recent end of a queue."""
        leave_queue(self.members, row)
        join_queue(self.members, row, level)
        move_to_tail(self.table, row, level)

    cdef void _count_use(self, int32_t row) noexcept nogil:
        cdef Member* member = &self.members[row]
        if self.learns_life and member.uses == 1:
            self.distances[bin_of(<uint32_t> (self.clock - member.used_at))] += 1
            self.num_distances += 1
        member.uses += 1
        member.used_at = member.moved_at = self.clock

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row
        for i in range(n - 1, -1, -1):
            row = rows[i]
            if row != 0:
                self._count_use(row)
                self._move(row, level_of(self.members[row].uses))

    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(n - 1, -1, -1):
            if rows[i] != 0:
                self._move(rows[i], self.table.rows[rows[i]].list_idx)

    cdef void on_append(self, const int32_t* rows, Py_ssize_t n, uint64_t stamp, int32_t tail) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, younger = tail
        for i in range(n):
            row = rows[i]
            if row == 0:
                continue
            if younger != 0 and self.table.rows[younger].list_idx == self.table.rows[row].list_idx:
                leave_queue(self.members, row)
                join_queue(self.members, row, younger)
            set_stamp(self.table, row, stamp - i)
            younger = row

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, ghost, level
        for i in range(n):
            row = rows[i]
            ghost = self.history.find(self.table.rows[row].hash)
            self.members[row].uses = 0
            if ghost != 0:
                self.members[row].uses = self.history.ghosts[ghost].state
                # The history stores the low 32 bits of the clock: distances below 2**32 requests are exact.
                self.members[row].used_at = (
                    self.clock - <int64_t> <uint32_t> (<uint32_t> self.clock - self.history.ghosts[ghost].used_at))
                self.history.drop(ghost)
            self._count_use(row)
            level = level_of(self.members[row].uses)
            join_queue(self.members, row, level)
            enter(self.table, row, level)

    cdef Py_ssize_t select_victims(self, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil:
        cdef Py_ssize_t i, got = 0
        cdef int32_t level, row, ghost
        for level in range(NUM_LEVELS):
            if got < n:
                got += self.table.take_oldest(level, priority, n - got, out + got)
        for i in range(got):
            row = out[i]
            leave_queue(self.members, row)
            ghost = self.history.push(self.table.rows[row].hash)
            self.history.ghosts[ghost].state = self.members[row].uses
            self.history.ghosts[ghost].used_at = <uint32_t> self.members[row].used_at
        return got

    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(n):
            leave_queue(self.members, rows[i])

    cdef void on_reset(self) noexcept nogil:
        cdef int32_t level
        for level in range(NUM_LEVELS):
            self.members[level].prev = self.members[level].next = level
        self.clock = 0
        self.life = LIFE
        self.history.clear()
        self.num_distances = 0
        memset(self.distances, 0, sizeof(self.distances))

    cdef int check_policy(self) except -1:
        cdef int32_t level, row
        cdef Py_ssize_t count
        self.check_ghosts(self.history)
        for level in range(NUM_LEVELS):
            count = 0
            row = self.members[level].next
            while row != level:
                count += 1
                if self.table.rows[row].key == NULL or self.table.rows[row].list_idx != level:
                    raise BlockStateError(f"invariant broken: row {row} is astray in queue {level}")
                if self.members[self.members[row].next].prev != row:
                    raise BlockStateError(f"invariant broken: row {row} of queue {level}")
                row = self.members[row].next
            if count != self.table.num_in_list[level]:
                raise BlockStateError(
                    f"invariant broken: queue {level} links {count} of {self.table.num_in_list[level]} rows"
                )
        return 0


@cython.final
cdef class MQCachePolicy(MultiQueue):
    """MQCachePolicy(cache_capacity)

    Keep frequently used blocks while they are in use: eight recency queues by the logarithm of a block's uses.

    Notes
    -----
    Multi-Queue of Zhou, Philbin & Li, USENIX ATC '01. The clock counts requests. A block that is not used for 500
    requests moves down one queue, at most 1,024 blocks per request. Eviction starts at the lowest queue's oldest block.
    The history keeps the uses of the last ``4 * cache_capacity`` evicted keys.
    """


@cython.final
cdef class AMQCachePolicy(MultiQueue):
    """AMQCachePolicy(cache_capacity)

    Multi-Queue with a block lifetime equal to the measured median distance between a key's first two uses.

    Notes
    -----
    Like mq, but a block expires when it has been neither used nor demoted for `life` requests. A histogram with two
    bins per octave collects the distances, in requests, from a key's first use to its second. Every 64 requests, if it
    holds at least 256 distances, `life` is set to the middle of the upper edge of its median bin and the next edge. All
    arithmetic is in integers.
    """

    def __cinit__(self, cache_capacity):
        self.learns_life = True


CachePolicy.register(MQCachePolicy)
CachePolicy.register(AMQCachePolicy)
