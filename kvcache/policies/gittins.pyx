"""gittins: keep the blocks with the highest expected uses per time of occupancy, as learned from their class and age.

Compiled because it is a PolicyAdapter. Our own; compare LHD (Beckmann, Chen & Cidon, NSDI '18) and the Gittins index.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvcache.core.index cimport (
    Bucket, Probe, home_of, index_delete, index_first, index_insert, index_next, prefetch, tight_buckets_for, zeroed,
)
from kvcache.core.policy_adapter cimport PolicyAdapter
from kvcache.core.request_keys cimport Named, RequestKeys
from kvcache.core.table cimport NORMAL, BlockTable, count_rows, may_leave

from kvcache.block import BlockStateError
from kvcache.policies.base import CachePolicy

cdef enum:
    TICK_SHIFT = 11             # a tick is 2,048 ms
    NUM_BINS = 54
    CLASSES_PER_HINT = 8
    NUM_HINTS = 4               # none, end, soon, later
    NUM_CLASSES = CLASSES_PER_HINT * NUM_HINTS
    NUM_CELLS = NUM_CLASSES * NUM_BINS
    NUM_WORDS = (NUM_CELLS + 63) // 64
    MEMORY_FACTOR = 4           # remembered keys, in capacities
    TOUCHES_PER_TABLE = 64
    AGEING_STEPS = 256          # groups that one use moves to their next bin; more wait for the next
    MOST_PASSED = 2048          # groups that one store passes over because their tail must stay
    MOST_NEIGHBOURS = 512       # groups looked at, each way, for a group's place among those with resident members
    HALVING_TOTAL = 1 << 21
    MOST_CHANCE = 64512
    SPARE_KEYS = 4096           # remembered keys that one call may add before memory has to grow
    GROUPS_PER_CALL = 16        # most groups that one call makes
    CONTINUES = 1               # of a request: it goes on where an older one ended
    ALL_KNOWN = 2               # of a request: all its keys so far were known
    LEADING_SHIFT = 2

cdef enum:
    # Where a request's state keeps what.
    PROGRESS = 0                # CONTINUES, ALL_KNOWN, and above them the number of leading known keys
    ERA = 1
    GROUPS = 2                  # by class without the hint: group and its serial number

# Known keys whose last use was the same request and that share a class. Groups of a class are made, age and are linked
# in one order, so that both queues of a cell are ordered by age.
cdef struct Group:
    int32_t t0
    int32_t length          # keys of the request
    int32_t num_known       # 0: free
    int32_t prev            # in the cell's queue of all groups; free: the next free one
    int32_t next
    int32_t resident_prev   # in the cell's queue of groups with resident members
    int32_t resident_next
    int32_t tail            # last resident member in path order, 0: none
    uint32_t serial         # raised when the group vanishes
    uint8_t cls
    uint8_t bin

cdef struct Queue:
    int32_t first
    int32_t last

# A resident key, by its row.
cdef struct Member:
    int32_t group
    int32_t prev            # resident members of the group, in path order
    int32_t next
    uint32_t kids           # resident keys whose parent it is
    int32_t parent          # row, 0: none
    uint32_t parent_generation

# A remembered key. Only its hash is kept: a false match costs a wrong count, never a wrong block.
cdef struct Remembered:
    uint32_t hash_low
    uint32_t hash_high
    int32_t prev            # oldest first; 0 is the head. Free: next is the next free one
    int32_t next
    int32_t group           # 0: free

# A parent that left by a failed store while children of others hung on it: they know it by the row it had.
cdef struct LostParent:
    uint64_t hash
    int32_t row
    uint32_t generation
    uint32_t num_children

cdef extern from *:
    """
    #define kv_lowest_bit(bits) __builtin_ctzll(bits)
    """
    int lowest_bit "kv_lowest_bit"(uint64_t bits) noexcept nogil

cdef int32_t[NUM_BINS + 1] EDGES


cdef int _make_edges() except -1:
    cdef int b, m, count = 1
    cdef int32_t edge
    EDGES[0] = 0
    for b in range(1, 15):
        for m in range(4, 8):
            edge = (m << b) >> 2
            if edge >= 2 and edge > EDGES[count - 1]:
                EDGES[count] = edge
                count += 1
    return 0


_make_edges()


cdef inline uint64_t hash_of(const Remembered* key) noexcept nogil:
    return key.hash_low | <uint64_t> key.hash_high << 32


@cython.final
cdef class GittinsCachePolicy(PolicyAdapter):
    """GittinsCachePolicy(cache_capacity)

    Keep the blocks with the highest expected uses per time of occupancy, and store none worth less than what it evicts.

    Notes
    -----
    Learns, per class of blocks and age, how often blocks of that age are used again: continues an older request or not,
    last block of its request or not, used before or not, and the request's hint of its next use. Ages are wall-clock
    time in 54 bins; the table is rebuilt every 64 requests. A group of blocks leaves from its tail, and no block while
    a resident block continues it. The classes and ages of the last ``4 * cache_capacity`` keys that left, or were not
    stored, are remembered. Under a backend of your own, where callers bring the blocks, it declines nothing.
    """

    cdef Member* members                # [num_rows]
    cdef Remembered* memory             # [memory_size]; 0: head of the queue
    cdef Bucket* memory_buckets
    cdef uint32_t num_memory_buckets
    cdef int32_t memory_size
    cdef int32_t memory_fresh
    cdef int32_t memory_free
    cdef readonly Py_ssize_t num_remembered
    cdef Group* groups                  # [groups_size]; 0: none
    cdef int32_t groups_size
    cdef int32_t groups_fresh
    cdef int32_t groups_free
    cdef Py_ssize_t num_groups
    cdef Queue[NUM_CELLS] all_groups
    cdef Queue[NUM_CELLS] resident_groups
    cdef uint64_t[NUM_WORDS] holders    # a bit for each cell that holds resident blocks, by its rank
    cdef int64_t[NUM_CELLS] hit
    cdef int64_t[NUM_CELLS] sur
    cdef int64_t total
    cdef int64_t[NUM_BINS] chances
    cdef int64_t[NUM_CELLS] value
    cdef int32_t[NUM_CELLS] ranked      # cells in the order of the table
    cdef int32_t[NUM_CELLS] rank_of
    cdef int num_ranked                 # cells of the hints in use
    cdef int num_hints                  # 1 + the highest hint in use
    cdef int32_t* found                 # [found_size]: remembered keys of one call
    cdef Py_ssize_t found_size
    cdef LostParent* lost               # [lost_size]
    cdef Py_ssize_t num_lost
    cdef Py_ssize_t lost_size
    cdef int64_t start_ms
    cdef int32_t now
    cdef uint64_t era
    cdef readonly uint64_t touches

    def __cinit__(self, cache_capacity):
        self.table = BlockTable(cache_capacity, keeps_queues=False)
        self.tracks_uses = True
        self.members = <Member*> zeroed(self.table.num_rows * sizeof(Member))
        if self.members == NULL:
            raise MemoryError(f"no memory for {cache_capacity} blocks")
        self._grow_memory(MEMORY_FACTOR * cache_capacity + cache_capacity // 16 + SPARE_KEYS)
        self._grow_groups(SPARE_KEYS)
        self.on_reset()

    def __dealloc__(self):
        free(self.members)
        free(self.memory)
        free(self.memory_buckets)
        free(self.groups)
        free(self.found)
        free(self.lost)

    @property
    def reads_clock(self):
        """Whether a manager gives it the time: yes."""
        return True

    @property
    def now_ms(self):
        """The time that the policy was last given, in milliseconds."""
        return self.now_ns // 1_000_000

    @now_ms.setter
    def now_ms(self, int64_t now_ms):
        self.now_ns = now_ms * 1_000_000

    @property
    def worths(self):
        """The value of a block of each class that has just been used, for requests without a hint."""
        return [self.value[cls * NUM_BINS] for cls in range(CLASSES_PER_HINT)]

    # ---- memory -----------------------------------------------------------------------------------------------

    cdef int _grow_memory(self, int64_t size) except -1:
        """Make room for `size` remembered keys, head included."""
        cdef int32_t key
        cdef uint32_t num_buckets
        cdef Bucket* buckets
        cdef void* memory
        if size > (1 << 31) - 1:
            raise MemoryError(f"no memory for {size} remembered keys")
        num_buckets = tight_buckets_for(size)
        buckets = <Bucket*> zeroed(num_buckets * sizeof(Bucket))
        memory = realloc(self.memory, size * sizeof(Remembered))
        if memory != NULL:
            self.memory = <Remembered*> memory
        if memory == NULL or buckets == NULL:
            free(buckets)
            raise MemoryError(f"no memory for {size} remembered keys")
        free(self.memory_buckets)
        self.memory_buckets = buckets
        self.num_memory_buckets = num_buckets
        self.memory_size = <int32_t> size
        for key in range(1, self.memory_fresh):
            if self.memory[key].group != 0:
                index_insert(buckets, num_buckets, hash_of(&self.memory[key]), key)
        return 0

    cdef int _grow_groups(self, int64_t size) except -1:
        cdef void* groups
        if size > (1 << 31) - 1:
            raise MemoryError(f"no memory for {size} groups")
        groups = realloc(self.groups, size * sizeof(Group))
        if groups == NULL:
            raise MemoryError(f"no memory for {size} groups")
        self.groups = <Group*> groups
        memset(&self.groups[self.groups_size], 0, (size - self.groups_size) * sizeof(Group))
        self.groups_size = <int32_t> size
        return 0

    cdef int reserve_policy(self, Py_ssize_t n) except -1:
        """Make room, before anything changes, for a call of `n` keys: each may be remembered, and evict another."""
        cdef int64_t needed = self.num_remembered + 2 * n + 1
        cdef void* block
        if needed > self.memory_size:
            self._grow_memory(needed + needed // 4)
        if self.num_groups + GROUPS_PER_CALL >= self.groups_size:
            self._grow_groups(2 * <int64_t> self.groups_size)
        if n > self.found_size:
            block = realloc(self.found, 2 * n * sizeof(int32_t))
            if block == NULL:
                raise MemoryError(f"no memory for a call of {n} keys")
            self.found = <int32_t*> block
            self.found_size = 2 * n
        if self.num_lost + n > self.lost_size:
            block = realloc(self.lost, 2 * (self.num_lost + n) * sizeof(LostParent))
            if block == NULL:
                raise MemoryError(f"no memory for a call of {n} keys")
            self.lost = <LostParent*> block
            self.lost_size = 2 * (self.num_lost + n)
        return 0

    cdef int on_grow(self, int32_t num_rows_before) except -1:
        cdef void* members = realloc(self.members, self.table.num_rows * sizeof(Member))
        if members == NULL:
            raise MemoryError(f"no memory for {self.table.num_rows} blocks")
        self.members = <Member*> members
        return 0

    cdef void on_reset(self) noexcept nogil:
        cdef int32_t i
        self.memory[0].prev = self.memory[0].next = 0
        self.memory_fresh = 1
        self.memory_free = 0
        self.num_remembered = 0
        memset(self.memory_buckets, 0, self.num_memory_buckets * sizeof(Bucket))
        for i in range(self.groups_size):
            self.groups[i].num_known = 0
        self.groups_fresh = 1
        self.groups_free = 0
        self.num_groups = 0
        memset(self.all_groups, 0, sizeof(self.all_groups))
        memset(self.resident_groups, 0, sizeof(self.resident_groups))
        memset(self.holders, 0, sizeof(self.holders))
        memset(self.hit, 0, sizeof(self.hit))
        memset(self.sur, 0, sizeof(self.sur))
        self.total = 0
        self.num_lost = 0
        self.start_ms = -1
        self.now = 0
        self.era += 1
        self.touches = 0
        self.num_hints = 1
        self.num_ranked = 0
        self._build_table()

    # ---- remembered keys --------------------------------------------------------------------------------------

    cdef int32_t _recall(self, uint64_t hash) noexcept nogil:
        """Return the remembered key of a hash, or 0."""
        cdef Probe probe
        cdef int32_t key = index_first(self.memory_buckets, self.num_memory_buckets, hash, &probe)
        while key != 0 and hash_of(&self.memory[key]) != hash:
            key = index_next(self.memory_buckets, self.num_memory_buckets, hash, &probe)
        return key

    cdef inline void _link_youngest(self, int32_t key) noexcept nogil:
        cdef int32_t last = self.memory[0].prev
        self.memory[key].prev = last
        self.memory[key].next = 0
        self.memory[last].next = key
        self.memory[0].prev = key

    cdef inline void _unlink(self, int32_t key) noexcept nogil:
        cdef int32_t prev = self.memory[key].prev
        cdef int32_t next = self.memory[key].next
        self.memory[prev].next = next
        self.memory[next].prev = prev

    cdef int32_t _remember(self, uint64_t hash, int32_t group) noexcept nogil:
        """Append a key to the memory; `reserve_policy` has made room."""
        cdef int32_t key = self.memory_free
        if key != 0:
            self.memory_free = self.memory[key].next
        else:
            key = self.memory_fresh
            self.memory_fresh += 1
        self.memory[key].hash_low = <uint32_t> hash
        self.memory[key].hash_high = <uint32_t> (hash >> 32)
        self.memory[key].group = group
        self._link_youngest(key)
        index_insert(self.memory_buckets, self.num_memory_buckets, hash, key)
        self.num_remembered += 1
        return key

    cdef void _forget(self, int32_t key) noexcept nogil:
        """Take a key out of the memory; its group still counts it."""
        index_delete(self.memory_buckets, self.num_memory_buckets, hash_of(&self.memory[key]), key)
        self._unlink(key)
        self.memory[key].group = 0
        self.memory[key].next = self.memory_free
        self.memory_free = key
        self.num_remembered -= 1

    cdef void _trim(self) noexcept nogil:
        cdef int32_t oldest, group
        while self.num_remembered > MEMORY_FACTOR * self.table.cache_capacity:
            oldest = self.memory[0].next
            group = self.memory[oldest].group
            self._forget(oldest)
            self._leave_group(group)

    # ---- groups -----------------------------------------------------------------------------------------------

    cdef inline int32_t _cell_of(self, const Group* group) noexcept nogil:
        return group.cls * NUM_BINS + group.bin

    cdef int32_t _make_group(self, int32_t cls, int32_t length) noexcept nogil:
        cdef int32_t group = self.groups_free
        cdef Group* made
        if group != 0:
            self.groups_free = self.groups[group].prev
        else:
            group = self.groups_fresh
            self.groups_fresh += 1
        made = &self.groups[group]
        made.t0 = self.now
        made.length = length
        made.num_known = 0
        made.tail = 0
        made.cls = <uint8_t> cls
        made.bin = 0
        self._link_group(group)
        self.num_groups += 1
        return group

    cdef void _link_group(self, int32_t group) noexcept nogil:
        """Append a group to its cell's queue, and to that of groups with resident members if it has any."""
        cdef Group* groups = self.groups
        cdef int32_t cell = self._cell_of(&groups[group])
        cdef Queue* queue = &self.all_groups[cell]
        groups[group].prev = queue.last
        groups[group].next = 0
        if queue.last != 0:
            groups[queue.last].next = group
        else:
            queue.first = group
        queue.last = group
        if groups[group].tail != 0:
            self._link_holder(group, self.resident_groups[cell].last)

    cdef void _unlink_group(self, int32_t group) noexcept nogil:
        cdef Group* groups = self.groups
        cdef Queue* queue = &self.all_groups[self._cell_of(&groups[group])]
        cdef int32_t prev = groups[group].prev
        cdef int32_t next = groups[group].next
        if prev != 0:
            groups[prev].next = next
        else:
            queue.first = next
        if next != 0:
            groups[next].prev = prev
        else:
            queue.last = prev
        if groups[group].tail != 0:
            self._unlink_holder(group)

    cdef void _link_holder(self, int32_t group, int32_t prev) noexcept nogil:
        """Put a group behind `prev` (0: first) among its cell's groups with resident members."""
        cdef Group* groups = self.groups
        cdef int32_t cell = self._cell_of(&groups[group])
        cdef Queue* queue = &self.resident_groups[cell]
        cdef int32_t next = groups[prev].resident_next if prev != 0 else queue.first
        cdef int32_t rank = self.rank_of[cell]
        groups[group].resident_prev = prev
        groups[group].resident_next = next
        if prev != 0:
            groups[prev].resident_next = group
        else:
            queue.first = group
        if next != 0:
            groups[next].resident_prev = group
        else:
            queue.last = group
        self.holders[rank >> 6] |= <uint64_t> 1 << (rank & 63)

    cdef void _unlink_holder(self, int32_t group) noexcept nogil:
        cdef Group* groups = self.groups
        cdef int32_t cell = self._cell_of(&groups[group])
        cdef Queue* queue = &self.resident_groups[cell]
        cdef int32_t prev = groups[group].resident_prev
        cdef int32_t next = groups[group].resident_next
        cdef int32_t rank = self.rank_of[cell]
        if prev != 0:
            groups[prev].resident_next = next
        else:
            queue.first = next
        if next != 0:
            groups[next].resident_prev = prev
        else:
            queue.last = prev
        if queue.first == 0:
            self.holders[rank >> 6] &= ~(<uint64_t> 1 << (rank & 63))

    cdef int32_t _holder_before(self, int32_t group) noexcept nogil:
        """Return the youngest older group of the cell with resident members, or 0."""
        cdef Group* groups = self.groups
        cdef int32_t older = groups[group].prev
        cdef int32_t younger = groups[group].next
        cdef Queue* queue = &self.resident_groups[self._cell_of(&groups[group])]
        cdef int _step
        for _step in range(MOST_NEIGHBOURS):
            if younger == 0:
                return queue.last
            if groups[younger].tail != 0:
                return groups[younger].resident_prev
            if older == 0:
                return 0
            if groups[older].tail != 0:
                return older
            older = groups[older].prev
            younger = groups[younger].next
        # Far from all others; the youngest end is close enough.
        return queue.last

    cdef inline void _leave_group(self, int32_t group) noexcept nogil:
        """Count a key that its group no longer knows; without any, the group vanishes."""
        self.groups[group].num_known -= 1
        if self.groups[group].num_known == 0:
            self._unlink_group(group)
            self.groups[group].serial += 1
            self.groups[group].prev = self.groups_free
            self.groups_free = group
            self.num_groups -= 1

    cdef inline void _append_member(self, int32_t group, int32_t row) noexcept nogil:
        cdef int32_t tail = self.groups[group].tail
        cdef Member* member = &self.members[row]
        if tail == 0:
            self._link_holder(group, self._holder_before(group))
        else:
            self.members[tail].next = row
        member.group = group
        member.prev = tail
        member.next = 0
        self.groups[group].tail = row

    cdef inline void _remove_member(self, int32_t row) noexcept nogil:
        cdef Member* member = &self.members[row]
        if member.prev != 0:
            self.members[member.prev].next = member.next
        if member.next != 0:
            self.members[member.next].prev = member.prev
        else:
            if member.prev == 0:
                self._unlink_holder(member.group)
            self.groups[member.group].tail = member.prev

    cdef int32_t _join_group(self, uint64_t* kept, int32_t cls, int32_t length) noexcept nogil:
        """Return the group of a class that a request may join, and count one more key in it."""
        cdef int32_t group = <int32_t> <uint32_t> kept[0]
        if (group == 0 or self.groups[group].serial != <uint32_t> (kept[0] >> 32) or self.groups[group].num_known == 0
                or self.groups[group].bin != 0 or self.groups[group].cls != cls):
            group = self._make_group(cls, length)
            kept[0] = <uint32_t> group | <uint64_t> self.groups[group].serial << 32
        self.groups[group].num_known += 1
        return group

    # ---- uses -------------------------------------------------------------------------------------------------

    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n
    ) noexcept nogil:
        cdef Py_ssize_t i, first = request.num_seen - n
        cdef int32_t row, key, group, cls, length, hint, num_positions = <int32_t> request.num_positions
        cdef uint64_t* state = request.policy_state
        cdef int32_t* found = self.found
        cdef Member* member
        cdef int64_t num_leading
        cdef bint is_last, is_known
        self._trim()
        self._read_time()
        if state[ERA] != self.era:
            memset(state, 0, sizeof(request.policy_state))
            state[ERA] = self.era
            state[PROGRESS] = ALL_KNOWN
            self.touches += 1
            if self.touches % TOUCHES_PER_TABLE == 0:
                self._build_table()
        self._age()
        hint = request.next_use
        if hint >= self.num_hints:
            self._take_up_hint(hint)
        for i in range(n):
            if rows[i] == 0:
                prefetch(&self.memory_buckets[home_of(<uint32_t> hashes[i], self.num_memory_buckets)])
            else:
                prefetch(&self.members[rows[i]])
        for i in range(n):
            found[i] = 0
            if rows[i] == 0:
                found[i] = self._recall(hashes[i])
        if state[PROGRESS] & ALL_KNOWN:
            i = 0
            while i < n and (rows[i] != 0 or found[i] != 0):
                i += 1
            if i < n:
                state[PROGRESS] &= ~<uint64_t> ALL_KNOWN
            state[PROGRESS] += <uint64_t> i << LEADING_SHIFT
            if i > 0 and not state[PROGRESS] & CONTINUES:
                num_leading = <int64_t> (state[PROGRESS] >> LEADING_SHIFT)
                group = self.members[rows[i - 1]].group if rows[i - 1] != 0 else self.memory[found[i - 1]].group
                if num_leading + 1 >= self.groups[group].length:
                    state[PROGRESS] |= CONTINUES
        length = num_positions if num_positions else <int32_t> n
        for i in range(n):
            row = rows[i]
            key = found[i]
            is_known = row != 0 or key != 0
            is_last = self._is_last(request, request.used[first + i], i == n - 1)
            cls = 4 * (state[PROGRESS] & CONTINUES) + 2 * (not is_last) + is_known
            if row != 0:
                member = &self.members[row]
                group = member.group
                self._count_hit(group)
                self._remove_member(row)
                self._leave_group(group)
                group = self._join_group(&state[GROUPS + cls], hint * CLASSES_PER_HINT + cls, length)
                self._append_member(group, row)
            elif key != 0:
                group = self.memory[key].group
                self._count_hit(group)
                self._leave_group(group)
                group = self._join_group(&state[GROUPS + cls], hint * CLASSES_PER_HINT + cls, length)
                self.memory[key].group = group
                self._unlink(key)
                self._link_youngest(key)
            else:
                group = self._join_group(&state[GROUPS + cls], hint * CLASSES_PER_HINT + cls, length)
                key = self._remember(hashes[i], group)
            request.uses[request.used[first + i]].note = key

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        """Keep uses out that come without a request: `BlockCache` makes one for each call."""

    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Leave all where it is: a group knows its path's order."""

    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use
    ) noexcept nogil:
        """Move known keys to the classes of another hint; their age counts from now."""
        cdef Py_ssize_t i
        cdef int32_t row, key, group, cls, length
        cdef uint64_t[CLASSES_PER_HINT] made
        memset(made, 0, sizeof(made))
        self._read_time()
        if next_use >= self.num_hints:
            self._take_up_hint(next_use)
        for i in range(n):
            row = rows[i]
            key = self._recall(hashes[i]) if row == 0 else 0
            if row == 0 and key == 0:
                continue
            group = self.members[row].group if row != 0 else self.memory[key].group
            cls = self.groups[group].cls % CLASSES_PER_HINT
            if group == <int32_t> <uint32_t> made[cls]:
                continue  # named twice
            length = self.groups[group].length
            if row != 0:
                self._remove_member(row)
            self._leave_group(group)
            group = self._join_group(&made[cls], next_use * CLASSES_PER_HINT + cls, length)
            if row != 0:
                self._append_member(group, row)
            else:
                self.memory[key].group = group

    cdef inline bint _is_last(self, RequestKeys request, int32_t place, bint is_last_of_call) noexcept nogil:
        if not request.num_positions:
            return is_last_of_call
        return request.uses[place].is_positioned and request.uses[place].position == request.largest_position

    cdef inline void _count_hit(self, int32_t group) noexcept nogil:
        self.hit[self._cell_of(&self.groups[group])] += 1
        self.total += 1

    cdef void _read_time(self) noexcept nogil:
        cdef int64_t now_ms = self.now_ns // 1_000_000
        cdef int64_t now
        if self.start_ms < 0:
            self.start_ms = now_ms
        now = (now_ms - self.start_ms) >> TICK_SHIFT
        if now > self.now:
            self.now = <int32_t> now

    cdef void _age(self) noexcept nogil:
        """Move groups whose age has left their bin to the next, at most 256 of them."""
        cdef int32_t cls, b, cell, group
        cdef int num_left = AGEING_STEPS
        cdef Group* oldest
        for cls in range(self.num_hints * CLASSES_PER_HINT):
            for b in range(NUM_BINS - 1):
                cell = cls * NUM_BINS + b
                group = self.all_groups[cell].first
                while group != 0:
                    oldest = &self.groups[group]
                    if self.now - oldest.t0 < EDGES[b + 1]:
                        break
                    if num_left == 0:
                        return
                    num_left -= 1
                    self.sur[cell] += oldest.num_known
                    self.total += oldest.num_known
                    self._unlink_group(group)
                    oldest.bin += 1
                    self._link_group(group)
                    group = self.all_groups[cell].first

    # ---- stores -----------------------------------------------------------------------------------------------

    cdef Py_ssize_t on_offer(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place,
        int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        cdef Py_ssize_t i, num_free = self.table.num_free, num_taken
        cdef int32_t key, cls, length
        cdef uint64_t[CLASSES_PER_HINT] made
        cdef Named* named
        num_victims[0] = 0
        n = self._without_holes(names, places, n)
        length = <int32_t> (names.num_positions if names.num_positions else num_offered)
        if names.next_use >= self.num_hints:
            self._take_up_hint(names.next_use)
        memset(made, 0, sizeof(made))
        for i in range(n):
            named = &names.named[places[i]]
            key = names.uses[places[i]].note
            if key == 0 or key >= self.memory_fresh or self.memory[key].group == 0 or (
                    hash_of(&self.memory[key]) != named.hash):
                key = self._recall(named.hash)
            if key == 0:
                cls = 0 if self._is_last(names, <int32_t> places[i], places[i] == last_place) else 2
                key = self._remember(
                    named.hash, self._join_group(&made[cls], names.next_use * CLASSES_PER_HINT + cls, length))
            names.uses[places[i]].note = key
        num_taken = n
        if n > num_free:
            num_victims[0] = self._choose(names, places + num_free, n - num_free, victims)
            num_taken = num_free + num_victims[0]
        if num_taken == 0:
            self._trim()
        return num_taken

    cdef Py_ssize_t _without_holes(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n
    ) noexcept nogil:
        """Return how many keys come before the first whose predecessor is neither resident nor among them."""
        cdef Py_ssize_t i, num_taken = n
        cdef int32_t before
        for i in range(n):
            before = names.uses[places[i]].before - 1
            if before >= 0 and not names.uses[before].is_taken and names.row_now(self.table, before) == 0:
                num_taken = i
                break
            names.uses[places[i]].is_taken = True
        for i in range(num_taken):
            names.uses[places[i]].is_taken = False
        return num_taken

    cdef Py_ssize_t _choose(
        self, RequestKeys names, const Py_ssize_t* waiting, Py_ssize_t n, int32_t* victims
    ) noexcept nogil:
        """Take up to `n` victims, each worth less than the waiting key that takes its place; return how many."""
        cdef Py_ssize_t got = 0, got_before = -1
        cdef int word, num_left = MOST_PASSED
        cdef uint64_t bits
        cdef int32_t cell, group, next, tail
        cdef int64_t worth = self._worth_of(names, waiting[0])
        cdef int64_t value
        while got > got_before:
            got_before = got
            for word in range((self.num_ranked + 63) >> 6):
                bits = self.holders[word]
                while bits != 0:
                    cell = self.ranked[(word << 6) + lowest_bit(bits)]
                    bits &= bits - 1
                    value = self.value[cell]
                    if worth <= value:
                        return got
                    next = self.resident_groups[cell].first
                    while next != 0:
                        group = next
                        next = self.groups[group].resident_next
                        tail = self.groups[group].tail
                        while tail != 0 and self._may_leave(names, tail):
                            if worth <= value:
                                return got
                            self._evict_row(tail)
                            victims[got] = tail
                            got += 1
                            if got == n:
                                return got
                            worth = self._worth_of(names, waiting[got])
                            tail = self.groups[group].tail
                        if tail != 0:
                            num_left -= 1
                            if num_left == 0:
                                return got
        return got

    cdef inline int64_t _worth_of(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        return self.value[self.groups[self.memory[names.uses[place].note].group].cls * NUM_BINS]

    cdef inline bint _may_leave(self, RequestKeys names, int32_t row) noexcept nogil:
        cdef Py_ssize_t place
        if (self.members[row].kids > 0 or self.table.rows[row].ref_cnt != 0
                or self.table.rows[row].mark == self.table.mark):
            return False
        place = names.locate(self.table.rows[row].key, self.table.rows[row].hash)
        return place < 0 or names.named[place].seen == 0

    cdef void _evict_row(self, int32_t row) noexcept nogil:
        """Move a resident key to the memory."""
        self._remove_member(row)
        self._leave_parent(row)
        self._remember(self.table.rows[row].hash, self.members[row].group)
        count_rows(self.table, 0, -1)

    cdef void _leave_parent(self, int32_t row) noexcept nogil:
        cdef Member* member = &self.members[row]
        cdef int32_t parent = member.parent
        if parent == 0:
            return
        if self.table.rows[parent].generation != member.parent_generation:
            parent = self._find_lost(parent, member.parent_generation)
        if parent != 0 and self.members[parent].kids > 0:
            self.members[parent].kids -= 1

    cdef int32_t _find_lost(self, int32_t row, uint32_t generation) noexcept nogil:
        """Return the row that a parent which once failed has now, or 0; one of its children leaves it."""
        cdef Py_ssize_t i
        cdef Probe probe
        cdef uint64_t hash
        for i in range(self.num_lost - 1, -1, -1):
            if self.lost[i].row == row and self.lost[i].generation == generation:
                hash = self.lost[i].hash
                self.lost[i].num_children -= 1
                if self.lost[i].num_children == 0:
                    self.num_lost -= 1
                    self.lost[i] = self.lost[self.num_lost]
                row = index_first(self.table.buckets, self.table.num_buckets, hash, &probe)
                while row != 0 and self.table.rows[row].hash != hash:
                    row = index_next(self.table.buckets, self.table.num_buckets, hash, &probe)
                return row
        return 0

    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, key, group, before, parent
        for i in range(n):
            row = rows[i]
            key = names.uses[places[i]].note
            group = self.memory[key].group
            self._forget(key)
            self.members[row].kids = 0
            before = names.uses[places[i]].before - 1
            parent = names.row_now(self.table, before) if before >= 0 else 0
            self._set_parent(row, parent)
            self._append_member(group, row)
        count_rows(self.table, 0, n)
        self._trim()

    cdef inline void _set_parent(self, int32_t row, int32_t parent) noexcept nogil:
        self.members[row].parent = parent
        if parent != 0:
            self.members[row].parent_generation = self.table.rows[parent].generation
            self.members[parent].kids += 1

    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row
        cdef LostParent* lost
        for i in range(n):
            row = rows[i]
            self._remove_member(row)
            self._leave_parent(row)
            self._remember(self.table.rows[row].hash, self.members[row].group)
            if self.members[row].kids > 0:
                lost = &self.lost[self.num_lost]
                self.num_lost += 1
                lost.hash = self.table.rows[row].hash
                lost.row = row
                lost.generation = self.table.rows[row].generation
                lost.num_children = self.members[row].kids
        if n:
            self._trim()

    # ---- blocks that callers bring ----------------------------------------------------------------------------

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Take in blocks of no request."""
        cdef Py_ssize_t i
        cdef int32_t key, group
        cdef uint64_t made
        for i in range(n):
            key = self._recall(self.table.rows[rows[i]].hash)
            if key != 0:
                group = self.memory[key].group
                self._forget(key)
            else:
                made = 0
                group = self._join_group(&made, 0, 1)
            self.members[rows[i]].kids = 0
            self._set_parent(rows[i], 0)
            self._append_member(group, rows[i])
        count_rows(self.table, 0, n)

    cdef Py_ssize_t select_victims(self, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil:
        """Take `n` victims in the order of the table, and decline nothing."""
        cdef Py_ssize_t got = 0
        cdef int rank
        cdef int32_t cell, group, next, row, prev
        if priority != NORMAL:
            return 0
        for rank in range(self.num_ranked):
            cell = self.ranked[rank]
            next = self.resident_groups[cell].first
            while next != 0:
                group = next
                next = self.groups[group].resident_next
                row = self.groups[group].tail
                while row != 0 and got < n:
                    prev = self.members[row].prev
                    if may_leave(self.table, row):
                        self._evict_row(row)
                        out[got] = row
                        got += 1
                    row = prev
        self._trim()
        return got

    # ---- the table --------------------------------------------------------------------------------------------

    cdef void _build_table(self) noexcept nogil:
        """Work out the value of each cell, and the order of the cells, from what has been counted."""
        cdef int cls, b, cell, num_cells = self.num_hints * CLASSES_PER_HINT * NUM_BINS
        cdef int64_t num_hit, num_sur, chance = 4096
        if self.total >= HALVING_TOTAL:
            self.total = 0
            for cell in range(num_cells):
                self.hit[cell] >>= 1
                self.sur[cell] >>= 1
                self.total += self.hit[cell] + self.sur[cell]
        for b in range(NUM_BINS):
            num_hit = num_sur = 0
            for cls in range(self.num_hints * CLASSES_PER_HINT):
                num_hit += self.hit[cls * NUM_BINS + b]
                num_sur += self.sur[cls * NUM_BINS + b]
            chance = ((num_hit << 16) + 2048 * chance) // (num_hit + num_sur + 2048)
            self.chances[b] = chance
        for cls in range(self.num_hints * CLASSES_PER_HINT):
            self._value_class(cls)
        self._rank_cells()

    cdef void _value_class(self, int cls) noexcept nogil:
        cdef int64_t* hit = &self.hit[cls * NUM_BINS]
        cdef int64_t* sur = &self.sur[cls * NUM_BINS]
        cdef int64_t[NUM_BINS] uses
        cdef int64_t[NUM_BINS] time
        cdef int64_t[NUM_BINS] stays
        cdef int64_t expected = 0, num_hit = 0, factor, guess, h, nu, de, s
        cdef int b, top = 0
        for b in range(NUM_BINS):
            expected += (hit[b] + sur[b]) * self.chances[b]
            num_hit += hit[b]
        expected >>= 16
        factor = ((num_hit << 16) + 1024 * <int64_t> (65536 if cls & 1 else 32768)) // (expected + 1024)
        for b in range(NUM_BINS - 1, -1, -1):
            guess = min(MOST_CHANCE, (factor * self.chances[b]) >> 16)
            h = min(MOST_CHANCE, ((hit[b] << 16) + 4096 * guess) // (hit[b] + sur[b] + 4096))
            nu = h
            de = (EDGES[b + 1] - EDGES[b]) * (65536 - h // 2)
            s = 65536 - h
            while top > 0 and uses[top - 1] * de > nu * time[top - 1]:
                top -= 1
                nu += s * uses[top] >> 16
                de += s * time[top] >> 16
                s = s * stays[top] >> 16
            uses[top] = nu
            time[top] = de
            stays[top] = s
            top += 1
            self.value[cls * NUM_BINS + b] = (nu << 32) // de

    cdef inline bint _ranks_before(self, int32_t a, int32_t b) noexcept nogil:
        if self.value[a] != self.value[b]:
            return self.value[a] < self.value[b]
        if a % NUM_BINS != b % NUM_BINS:
            return a % NUM_BINS > b % NUM_BINS
        return a < b

    cdef void _rank_cells(self) noexcept nogil:
        """Order the cells by value, then by bin, falling, then by class."""
        cdef int num_cells = self.num_hints * CLASSES_PER_HINT * NUM_BINS
        cdef int32_t cell
        cdef int i, j
        for i in range(self.num_ranked, num_cells):
            self.ranked[i] = i
        # By insertion: from one table to the next, few cells change places.
        for i in range(1, num_cells):
            cell = self.ranked[i]
            j = i
            while j > 0 and self._ranks_before(cell, self.ranked[j - 1]):
                self.ranked[j] = self.ranked[j - 1]
                j -= 1
            self.ranked[j] = cell
        self.num_ranked = num_cells
        memset(self.holders, 0, sizeof(self.holders))
        for i in range(num_cells):
            cell = self.ranked[i]
            self.rank_of[cell] = i
            if self.resident_groups[cell].first != 0:
                self.holders[i >> 6] |= <uint64_t> 1 << (i & 63)

    cdef void _take_up_hint(self, int32_t hint) noexcept nogil:
        """Value the classes of a hint that nobody has given before, by the table as it is."""
        cdef int cls
        for cls in range(self.num_hints * CLASSES_PER_HINT, (hint + 1) * CLASSES_PER_HINT):
            self._value_class(cls)
        self.num_hints = hint + 1
        self._rank_cells()

    # ---- inspection -------------------------------------------------------------------------------------------

    cdef int check_policy(self) except -1:
        cdef int32_t cell, group, row, key
        cdef Py_ssize_t num_groups = 0, num_resident = 0, num_remembered = 0
        cdef int64_t total = 0
        known = {}
        kids = {}
        for cell in range(NUM_CELLS):
            total += self.hit[cell] + self.sur[cell]
            holders = []
            youngest = None
            group = self.all_groups[cell].first
            while group != 0:
                num_groups += 1
                hold(self.groups[group].num_known > 0 and self._cell_of(&self.groups[group]) == cell,
                     f"group {group} is astray in cell {cell}")
                hold(youngest is None or self.groups[group].t0 >= youngest, f"group {group} is out of order")
                youngest = self.groups[group].t0
                hold(self.groups[group].next != 0 or self.all_groups[cell].last == group, f"cell {cell} ends elsewhere")
                known[group] = self.groups[group].num_known
                if self.groups[group].tail != 0:
                    holders.append(group)
                group = self.groups[group].next
            listed = []
            group = self.resident_groups[cell].first
            while group != 0:
                listed.append(group)
                group = self.groups[group].resident_next
            hold(sorted(listed) == sorted(holders), f"cell {cell} lists {listed}, {holders} have resident members")
            if cell < self.num_ranked:
                row = self.rank_of[cell]
                hold(self.ranked[row] == cell, f"cell {cell} has another rank")
                hold((self.holders[row >> 6] >> (row & 63) & 1) == (listed != []), f"cell {cell} is marked wrongly")
            for group in listed:
                row = self.groups[group].tail
                hold(self.members[row].next == 0, f"group {group} goes on behind its tail")
                while row != 0:
                    num_resident += 1
                    known[group] -= 1
                    hold(self.table.rows[row].key != NULL and self.members[row].group == group,
                         f"row {row} is in no group")
                    if self.members[row].prev != 0:
                        hold(self.members[self.members[row].prev].next == row, f"row {row} is not its neighbour's")
                    parent = self.members[row].parent
                    if parent != 0 and self.table.rows[parent].generation == self.members[row].parent_generation:
                        hold(self.table.rows[parent].key != NULL, f"row {row} has an absent predecessor")
                        kids[parent] = kids.get(parent, 0) + 1
                    row = self.members[row].prev
        hold(total == self.total, f"{total} are counted, the total is {self.total}")
        hold(num_groups == self.num_groups, f"{num_groups} groups are linked, {self.num_groups} counted")
        hold(num_resident == self.table.num_resident,
             f"{num_resident} members are resident, {self.table.num_resident} rows")
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if self.table.rows[row].key == NULL:
                continue
            hold(self._recall(self.table.rows[row].hash) == 0, f"row {row} is resident and remembered")
            # A child left behind by a failed store may have counted itself out of another's.
            hold(self.num_lost > 0 or self.members[row].kids <= kids.get(row, 0), f"row {row} counts too many children")
        key = self.memory[0].next
        while key != 0:
            num_remembered += 1
            group = self.memory[key].group
            hold(group in known, f"remembered key {key} is in no group")
            known[group] -= 1
            hold(self._recall(hash_of(&self.memory[key])) == key, f"remembered key {key} is not found by its hash")
            hold(self.memory[self.memory[key].next].prev == key, f"remembered key {key} is not its neighbour's")
            key = self.memory[key].next
        hold(num_remembered == self.num_remembered, f"{num_remembered} are linked, {self.num_remembered} remembered")
        for group in known:
            hold(known[group] == 0, f"group {group} counts {known[group]} members too many")
        return 0


cdef int hold(bint condition, str fault) except -1:
    if not condition:
        raise BlockStateError(f"invariant broken: {fault}")
    return 0


CachePolicy.register(GittinsCachePolicy)
