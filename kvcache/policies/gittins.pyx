"""gittins: keep the blocks with the highest expected uses per time of occupancy, as learned from their class and age.

Compiled because it is a PolicyAdapter. Our own; compare LHD (Beckmann, Chen & Cidon, NSDI '18) and the Gittins index.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvcache.core.eviction_queue cimport Row
from kvcache.core.index cimport Probe, index_first, index_next, prefetch, zeroed
from kvcache.core.policy_adapter cimport PolicyAdapter
from kvcache.core.remembered cimport SEGMENT_KEYS, HashInGroup, RememberedKeys
from kvcache.core.request_keys cimport Named, RequestKeys
from kvcache.core.table cimport NORMAL, BlockTable, count_rows, may_leave

from kvcache.block import BlockStateError
from kvcache.policies.base import CachePolicy

cdef enum:
    TICK_SHIFT = 11             # a tick is 2,048 ms
    NUM_BINS = 54
    CLASSES_PER_HINT = 8
    NUM_HINTS = 4               # none, end, soon, later
    FIRST_SHARED = CLASSES_PER_HINT * NUM_HINTS     # classes of shared blocks, while they are told apart
    NUM_SHARED = 4
    NUM_CLASSES = FIRST_SHARED + NUM_SHARED
    NUM_CELLS = NUM_CLASSES * NUM_BINS
    NUM_WORDS = (NUM_CELLS + 63) // 64
    MEMORY_FACTOR = 4           # remembered keys, in capacities
    MOST_SHARING = 15
    WIDELY_SHARED = 2           # from this sharing on
    FIRST_JUDGED = 1            # bins in which a use tells whose blocks come back within seconds: from 4 s on
    END_JUDGED = 7              # and before 16 s
    FEWEST_AGAIN = 1024         # uses of such ages, to judge how many are of widely shared keys
    MOST_AGAIN = 65536
    TOUCHES_PER_TABLE = 64
    AGEING_STEPS = 256          # groups that one use moves to their next bin; more wait for the next
    MOST_PASSED = 2048          # groups that one store passes over because their tail must stay
    MOST_NEIGHBOURS = 512       # groups looked at, each way, for a group's place among those with resident members
    HALVING_TOTAL = 1 << 21
    MOST_CHANCE = 64512
    PRIOR = 4096                # weight of what all classes show against a class's own counts
    PRIOR_SHARED = 512
    MOST_GROUPS = 1 << 27
    SHARING_SHIFT = 27          # of a label
    BLOCKS_PER_BUCKET = 4       # of lost parents
    SPARE_KEYS = 4096           # remembered keys that one call may add before memory has to grow
    GROUPS_PER_CALL = 16        # most groups that one call makes
    CONTINUES = 1               # of a request: it goes on where an older one ended
    ALL_KNOWN = 2               # of a request: all its keys so far were known
    LEADING_SHIFT = 2
    NEVER = 0x7fffffff
    COHORTS_AHEAD = 4           # late cohorts fetched ahead of their move

cdef enum:
    ALL = 0
    HOLDERS = 1                 # those with resident members
    NUM_QUEUES = 2

cdef enum:
    # Where a request's state keeps what.
    PROGRESS = 0                # CONTINUES, ALL_KNOWN, and above them the number of leading known keys
    ERA = 1
    CALL = 2                    # of its last use
    GROUPS = 3                  # by class without the hint: group and its serial number

cdef struct Queue:
    int32_t first
    int32_t last

# Known keys whose last use was the same request and that share a class.
cdef struct Group:
    int32_t length          # keys of the request
    int32_t num_known       # 0: free
    int32_t cohort
    int32_t[NUM_QUEUES] prev    # in the cohort's queues; free: the next free one
    int32_t[NUM_QUEUES] next
    int32_t tail            # last resident member in path order, 0: none
    uint32_t serial         # raised when the group vanishes

# Groups of a class that were made in one tick, in the order they were made: they age as one. The cohorts of a class are
# made, age and are linked in one order, so that a cell is a part of its class, and both its queues are ordered by age.
cdef struct Cohort:
    int32_t t0
    int32_t num_groups      # 0: free
    int32_t num_known       # by all its groups
    Queue[NUM_QUEUES] groups
    int32_t[NUM_QUEUES] prev    # in the class's queue, and in the cell's of HOLDERS; free: the next free one
    int32_t[NUM_QUEUES] next
    uint8_t cls
    uint8_t bin

# What is kept of a known key: its group, and in the upper four bits its sharing, the rounded logarithm of how many
# requests have used it that continued no older one. Zero in an array of labels: none.
ctypedef int32_t Label

# A resident key, by its row. The table keeps no queues for this policy: `prev` and `next` of a row link the resident
# members of a group, in path order, and its stamp holds a Place.
cdef struct Member:
    uint32_t kids           # resident keys whose parent it is
    uint32_t parent_generation

cdef struct Place:
    Label label
    int32_t parent          # row, 0: none

# A parent that left by a failed store while children of others hung on it: they know it by the row it had.
cdef struct LostParent:
    uint64_t hash
    int32_t row
    uint32_t generation
    uint32_t num_children   # 0: free
    int32_t next            # in its bucket, 0: none; free: the next free one

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


ctypedef fused Linked:
    Group
    Cohort


cdef inline void insert(Linked* items, int which, Queue* queue, int32_t item, int32_t prev) noexcept nogil:
    """Put an item into a queue behind `prev`, which is in it; 0: first."""
    cdef int32_t next = items[prev].next[which] if prev != 0 else queue.first
    items[item].prev[which] = prev
    items[item].next[which] = next
    if prev != 0:
        items[prev].next[which] = item
    else:
        queue.first = item
    if next != 0:
        items[next].prev[which] = item
    else:
        queue.last = item


cdef inline void take_out(Linked* items, int which, Queue* queue, int32_t item) noexcept nogil:
    """Take an item out of the queue that it is in."""
    cdef int32_t prev = items[item].prev[which]
    cdef int32_t next = items[item].next[which]
    if prev != 0:
        items[prev].next[which] = next
    else:
        queue.first = next
    if next != 0:
        items[next].prev[which] = prev
    else:
        queue.last = prev


cdef inline int32_t group_in(Label label) noexcept nogil:
    return label & (MOST_GROUPS - 1)


cdef inline int sharing_in(Label label) noexcept nogil:
    return label >> SHARING_SHIFT


@cython.final
cdef class GittinsCachePolicy(PolicyAdapter):
    """GittinsCachePolicy(cache_capacity)

    Keep the blocks with the highest expected uses per time of occupancy, and store none worth less than what it evicts.

    Notes
    -----
    Learns, per class of blocks and age, how often blocks of that age are used again: continues an older request or
    not, last block of its request or not, used before or not, and the request's hint of its next use. Ages are
    wall-clock time in 54 bins; the table is rebuilt every 64 requests. While most of what is used again after 4 to 16
    seconds is shared by many sessions (as system prompts are), such blocks form classes by how many sessions have used
    them, whatever continued what: sessions then take longer to come back, and beside the prompts' quick uses their new
    blocks would look as if they came back at once. The number is counted as its rounded logarithm (Morris, CACM 1978),
    and when the classes part, counting begins anew. A group of blocks leaves from its tail, and no block while a
    resident block continues it. The classes and ages of the last ``4 * cache_capacity`` keys that left, or were not
    stored, are remembered. Under a backend of your own, where callers bring the blocks, it declines nothing.
    """

    cdef Member* members                # [num_rows]
    cdef RememberedKeys memory
    cdef Group* groups                  # [groups_size]; 0: none
    cdef int32_t groups_size
    cdef int32_t groups_fresh
    cdef int32_t groups_free
    cdef Py_ssize_t num_groups
    cdef Cohort* cohorts                # [groups_size]; 0: none
    cdef int32_t cohorts_fresh
    cdef int32_t cohorts_free
    cdef Queue[NUM_QUEUES][NUM_CELLS] queues    # of cohorts; of ALL, the part that is in the cell
    cdef int32_t[NUM_CLASSES] youngest          # cohort of each class
    cdef int32_t[NUM_CELLS] ends                # when the oldest cohort of a cell leaves it; NEVER: it has none
    cdef uint64_t[NUM_WORDS] occupied   # a bit for each cell that has groups
    cdef uint64_t[NUM_WORDS] holders    # a bit for each cell that holds resident blocks, by its rank
    cdef int64_t[NUM_CELLS] hit
    cdef int64_t[NUM_CELLS] sur
    cdef int64_t total
    cdef int64_t[NUM_BINS] chances
    cdef int64_t[NUM_CELLS] value
    cdef int32_t[NUM_CELLS] ranked      # cells in the order of the table
    cdef int32_t[NUM_CELLS] rank_of
    cdef int num_ranked                 # cells of the classes in use
    cdef int num_hints                  # 1 + the highest hint in use
    cdef bint knows_shared              # the classes of shared blocks are in use
    cdef int64_t num_again              # uses of keys 4 to 16 s after their last one, halved at 65,536
    cdef int64_t num_shared             # of these, of widely shared keys
    cdef readonly bint splits_shared    # they are told apart now
    cdef int32_t* found                 # [call_size]: remembered keys of one call
    # [call_size]: keys of the last use that do not stand in the memory yet. Most are stored at once and never enter it:
    # their group is 0 then.
    cdef HashInGroup* new_keys
    cdef Py_ssize_t num_new
    cdef HashInGroup* leaving           # [call_size]: victims of one call
    cdef Py_ssize_t num_leaving
    cdef Py_ssize_t call_size
    cdef uint64_t num_uses              # calls of on_request_use
    cdef LostParent* lost               # [lost_size]; 0: none
    cdef int32_t lost_size
    cdef int32_t lost_fresh
    cdef int32_t lost_free
    cdef Py_ssize_t num_lost
    cdef int32_t* buckets               # [num_buckets]: lost parents by row and generation
    cdef uint32_t num_buckets
    cdef int64_t start_ms
    cdef int32_t now
    cdef int32_t due                    # no cohort leaves its bin before
    cdef uint64_t era
    cdef readonly uint64_t touches
    cdef readonly uint64_t num_aged             # groups moved to their next bin, since the start
    cdef readonly uint64_t num_passed           # groups passed over because their tail had to stay, since the start
    cdef readonly uint64_t num_searched         # lost parents looked at, since the start

    def __cinit__(self, cache_capacity):
        self.table = BlockTable(cache_capacity, keeps_queues=False)
        self.tracks_uses = True
        self.members = <Member*> zeroed(self.table.num_rows * sizeof(Member))
        self.num_buckets = cache_capacity // BLOCKS_PER_BUCKET + 16
        self.buckets = <int32_t*> zeroed(self.num_buckets * sizeof(int32_t))
        if self.members == NULL or self.buckets == NULL:
            raise MemoryError(f"no memory for {cache_capacity} blocks")
        self.memory = RememberedKeys(MEMORY_FACTOR * cache_capacity + cache_capacity // 16 + SPARE_KEYS)
        # Untouched until used: to grow is to copy megabytes.
        self._grow_groups(cache_capacity + SPARE_KEYS)
        self.on_reset()

    def __dealloc__(self):
        free(self.members)
        free(self.groups)
        free(self.cohorts)
        free(self.found)
        free(self.new_keys)
        free(self.leaving)
        free(self.lost)
        free(self.buckets)

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

    def gauges(self):
        """Return the keys that are remembered, and the uses that were learned from."""
        return {"remembered_keys": self.num_remembered, "learned_uses": self.touches}

    @property
    def num_remembered(self):
        """Keys that are known without being resident."""
        return self.memory.num_keys + self.num_new

    @property
    def worths(self):
        """The value of a block of each class that has just been used, for requests without a hint."""
        return [self.value[cls * NUM_BINS] for cls in range(CLASSES_PER_HINT)]

    # ---- memory -----------------------------------------------------------------------------------------------

    cdef int _grow_groups(self, int64_t size) except -1:
        """Make room for so many groups, and for a cohort of each."""
        cdef void* block = NULL
        if size <= MOST_GROUPS:
            block = realloc(self.groups, size * sizeof(Group))
        if block != NULL:
            self.groups = <Group*> block
            block = realloc(self.cohorts, size * sizeof(Cohort))
        if block == NULL:
            raise MemoryError(f"no memory for {size} groups")
        self.cohorts = <Cohort*> block
        self.groups_size = <int32_t> size
        return 0

    cdef int reserve_policy(self, Py_ssize_t n) except -1:
        """Make room, before anything changes, for a call of `n` keys: each may be remembered, and evict another."""
        cdef void* block
        self.memory.reserve(2 * n + self.num_new)
        if self.num_groups + GROUPS_PER_CALL >= self.groups_size:
            self._grow_groups(2 * <int64_t> self.groups_size)
        if n > self.call_size:
            block = realloc(self.found, 2 * n * sizeof(int32_t))
            if block != NULL:
                self.found = <int32_t*> block
                block = realloc(self.new_keys, 2 * n * sizeof(HashInGroup))
            if block != NULL:
                self.new_keys = <HashInGroup*> block
                block = realloc(self.leaving, 2 * n * sizeof(HashInGroup))
            if block == NULL:
                raise MemoryError(f"no memory for a call of {n} keys")
            self.leaving = <HashInGroup*> block
            self.call_size = 2 * n
        if self.num_lost + n >= self.lost_size:
            if 2 * (self.num_lost + n) + 16 > (1 << 31) - 1:
                raise MemoryError(f"no memory for {self.num_lost + n} lost parents")
            block = realloc(self.lost, (2 * (self.num_lost + n) + 16) * sizeof(LostParent))
            if block == NULL:
                raise MemoryError(f"no memory for a call of {n} keys")
            self.lost = <LostParent*> block
            self.lost_size = <int32_t> (2 * (self.num_lost + n) + 16)
        return 0

    cdef int on_grow(self, int32_t num_rows_before) except -1:
        cdef void* members = realloc(self.members, self.table.num_rows * sizeof(Member))
        if members == NULL:
            raise MemoryError(f"no memory for {self.table.num_rows} blocks")
        self.members = <Member*> members
        return 0

    cdef void on_reset(self) noexcept nogil:
        cdef int cell
        self.memory.clear()
        self.num_new = self.num_leaving = 0
        self.groups_fresh = 1
        self.groups_free = 0
        self.num_groups = 0
        self.cohorts_fresh = 1
        self.cohorts_free = 0
        memset(self.queues, 0, sizeof(self.queues))
        memset(self.youngest, 0, sizeof(self.youngest))
        for cell in range(NUM_CELLS):
            self.ends[cell] = NEVER
        memset(self.occupied, 0, sizeof(self.occupied))
        memset(self.holders, 0, sizeof(self.holders))
        memset(self.hit, 0, sizeof(self.hit))
        memset(self.sur, 0, sizeof(self.sur))
        self.total = 0
        if self.num_lost > 0:
            memset(self.buckets, 0, self.num_buckets * sizeof(int32_t))
        self.num_lost = 0
        self.lost_fresh = 1
        self.lost_free = 0
        self.start_ms = -1
        self.now = 0
        self.due = 0
        self.era += 1
        self.touches = 0
        self.num_again = self.num_shared = 0
        self.splits_shared = self.knows_shared = False
        self.num_hints = 1
        self.num_ranked = 0
        self._take_up_classes(0, CLASSES_PER_HINT)
        self._build_table()

    cdef void _trim(self) noexcept nogil:
        """Forget the oldest remembered keys beyond the memory's size."""
        cdef Py_ssize_t num_over, num_popped, num_until_fetch = 0
        cdef Label label
        self._enter_memory()
        num_over = self.memory.num_keys - MEMORY_FACTOR * self.table.cache_capacity
        while num_over > 0:
            if num_until_fetch <= 0:
                self.memory.fetch_oldest()
                num_until_fetch = SEGMENT_KEYS
            label = self.memory.pop_oldest(num_over, &num_popped)
            self._leave_group(group_in(label), <int32_t> num_popped)
            num_over -= num_popped
            num_until_fetch -= num_popped

    cdef void _enter_memory(self) noexcept nogil:
        """Let used keys that were not stored, then the call's victims, enter the memory."""
        self.memory.append_all(self.new_keys, self.num_new)
        self.memory.append_all(self.leaving, self.num_leaving)
        self.num_new = self.num_leaving = 0

    # ---- groups, cohorts and cells ----------------------------------------------------------------------------

    cdef inline int32_t _cell_of(self, const Cohort* cohort) noexcept nogil:
        return cohort.cls * NUM_BINS + cohort.bin

    cdef inline int _class_of(self, int32_t group) noexcept nogil:
        return self.cohorts[self.groups[group].cohort].cls

    cdef int32_t _make_group(self, int32_t cls, int32_t length) noexcept nogil:
        """Make a group, without members, the youngest of its class."""
        cdef int32_t group = self.groups_free
        cdef int32_t cohort = self.youngest[cls]
        cdef Group* made
        cdef Queue* queue
        if group != 0:
            self.groups_free = self.groups[group].prev[ALL]
        else:
            group = self.groups_fresh
            self.groups_fresh += 1
            self.groups[group].serial = 0
        if cohort == 0 or self.cohorts[cohort].t0 != self.now:
            cohort = self._make_cohort(cls)
        made = &self.groups[group]
        made.length = length
        made.num_known = 0
        made.tail = 0
        made.cohort = cohort
        queue = &self.cohorts[cohort].groups[ALL]
        insert(self.groups, ALL, queue, group, queue.last)
        self.cohorts[cohort].num_groups += 1
        self.num_groups += 1
        return group

    cdef int32_t _take_cohort(self) noexcept nogil:
        # There are no more of them than groups.
        cdef int32_t cohort = self.cohorts_free
        if cohort != 0:
            self.cohorts_free = self.cohorts[cohort].prev[ALL]
        else:
            cohort = self.cohorts_fresh
            self.cohorts_fresh += 1
        memset(&self.cohorts[cohort], 0, sizeof(Cohort))
        return cohort

    cdef int32_t _make_cohort(self, int32_t cls) noexcept nogil:
        """Append a cohort of this tick, without groups, to a class."""
        cdef int32_t cohort = self._take_cohort()
        cdef int32_t prev = self.youngest[cls]
        cdef Cohort* made = &self.cohorts[cohort]
        made.t0 = self.now
        self.due = min(self.due, self.now + EDGES[1])
        made.cls = <uint8_t> cls
        made.prev[ALL] = prev
        if prev != 0:
            self.cohorts[prev].next[ALL] = cohort
        self.youngest[cls] = cohort
        self._enter_cell(self._cell_of(made), cohort)
        return cohort

    cdef inline void _enter_cell(self, int32_t cell, int32_t cohort) noexcept nogil:
        """Count a cohort, the youngest of its cell, as part of it."""
        cdef Queue* queue = &self.queues[ALL][cell]
        if queue.first == 0:
            self._set_oldest(cell, cohort)
            self.occupied[cell >> 6] |= <uint64_t> 1 << (cell & 63)
        queue.last = cohort

    cdef inline void _set_oldest(self, int32_t cell, int32_t cohort) noexcept nogil:
        self.queues[ALL][cell].first = cohort
        self.ends[cell] = NEVER
        if cell % NUM_BINS < NUM_BINS - 1:
            self.ends[cell] = self.cohorts[cohort].t0 + EDGES[cell % NUM_BINS + 1]

    cdef inline void _leave_cell(self, int32_t cell, int32_t cohort) noexcept nogil:
        cdef Queue* queue = &self.queues[ALL][cell]
        if queue.first == queue.last:
            queue.first = queue.last = 0
            self.ends[cell] = NEVER
            self.occupied[cell >> 6] &= ~(<uint64_t> 1 << (cell & 63))
        elif queue.first == cohort:
            self._set_oldest(cell, self.cohorts[cohort].next[ALL])
        elif queue.last == cohort:
            queue.last = self.cohorts[cohort].prev[ALL]

    cdef void _free_cohort(self, int32_t cohort) noexcept nogil:
        """Take out a cohort without groups."""
        cdef Cohort* cohorts = self.cohorts
        cdef int32_t prev = cohorts[cohort].prev[ALL]
        cdef int32_t next = cohorts[cohort].next[ALL]
        self._leave_cell(self._cell_of(&cohorts[cohort]), cohort)
        if prev != 0:
            cohorts[prev].next[ALL] = next
        if next != 0:
            cohorts[next].prev[ALL] = prev
        else:
            self.youngest[cohorts[cohort].cls] = prev
        cohorts[cohort].prev[ALL] = self.cohorts_free
        self.cohorts_free = cohort

    cdef void _free_group(self, int32_t group) noexcept nogil:
        """Take out a group without members."""
        cdef Group* groups = self.groups
        cdef Cohort* cohort = &self.cohorts[groups[group].cohort]
        take_out(groups, ALL, &cohort.groups[ALL], group)
        cohort.num_groups -= 1
        if cohort.num_groups == 0:
            self._free_cohort(groups[group].cohort)
        groups[group].serial += 1
        groups[group].prev[ALL] = self.groups_free
        self.groups_free = group
        self.num_groups -= 1

    cdef int32_t _split_cohort(self, int32_t cohort, int32_t n) noexcept nogil:
        """Move the first `n` groups, but not all, of its cell's oldest cohort to a cohort of their own before it."""
        cdef int32_t older = self._take_cohort()
        cdef Cohort* source = &self.cohorts[cohort]
        cdef Cohort* made = &self.cohorts[older]
        cdef int32_t group = source.groups[ALL].first
        cdef int32_t last = 0, _i
        made.t0 = source.t0
        made.cls = source.cls
        made.bin = source.bin
        made.prev[ALL] = source.prev[ALL]
        made.next[ALL] = cohort
        if source.prev[ALL] != 0:
            self.cohorts[source.prev[ALL]].next[ALL] = older
        source.prev[ALL] = older
        self.queues[ALL][self._cell_of(source)].first = older
        made.groups[ALL].first = group
        for _i in range(n):
            if self.groups[group].tail != 0:
                self._unlink_holder(group)
            self.groups[group].cohort = older
            made.num_known += self.groups[group].num_known
            if self.groups[group].tail != 0:
                self._link_holder(group, made.groups[HOLDERS].last)
            last = group
            group = self.groups[group].next[ALL]
        made.groups[ALL].last = last
        source.groups[ALL].first = group
        self.groups[last].next[ALL] = 0
        self.groups[group].prev[ALL] = 0
        made.num_groups = n
        source.num_groups -= n
        source.num_known -= made.num_known
        return older

    cdef inline void _move_to_next_bin(self, int32_t cell, int32_t cohort) noexcept nogil:
        """Move the oldest cohort of a cell: it follows the youngest of the next bin already."""
        cdef bint is_holder = self.cohorts[cohort].groups[HOLDERS].first != 0
        self._leave_cell(cell, cohort)
        if is_holder:
            self._unlink_cohort(cohort)
        self.cohorts[cohort].bin += 1
        self._enter_cell(cell + 1, cohort)
        if is_holder:
            self._link_cohort(cohort, self.queues[HOLDERS][cell + 1].last)

    cdef void _link_cohort(self, int32_t cohort, int32_t prev) noexcept nogil:
        """Put a cohort behind `prev` (0: first) among its cell's with resident members."""
        cdef int32_t cell = self._cell_of(&self.cohorts[cohort])
        cdef int32_t rank = self.rank_of[cell]
        insert(self.cohorts, HOLDERS, &self.queues[HOLDERS][cell], cohort, prev)
        self.holders[rank >> 6] |= <uint64_t> 1 << (rank & 63)

    cdef void _unlink_cohort(self, int32_t cohort) noexcept nogil:
        cdef int32_t cell = self._cell_of(&self.cohorts[cohort])
        cdef Queue* queue = &self.queues[HOLDERS][cell]
        cdef int32_t rank = self.rank_of[cell]
        take_out(self.cohorts, HOLDERS, queue, cohort)
        if queue.first == 0:
            self.holders[rank >> 6] &= ~(<uint64_t> 1 << (rank & 63))

    cdef int32_t _cohort_before(self, int32_t cohort) noexcept nogil:
        """Return the youngest older cohort of the cell with resident members, or 0."""
        cdef Cohort* cohorts = self.cohorts
        cdef int32_t older = cohorts[cohort].prev[ALL]
        cdef int32_t younger = cohorts[cohort].next[ALL]
        cdef int bin = cohorts[cohort].bin
        cdef Queue* queue = &self.queues[HOLDERS][self._cell_of(&cohorts[cohort])]
        cdef int _step
        for _step in range(MOST_NEIGHBOURS):
            if younger == 0 or cohorts[younger].bin != bin:
                return queue.last
            if cohorts[younger].groups[HOLDERS].first != 0:
                return cohorts[younger].prev[HOLDERS]
            if older == 0 or cohorts[older].bin != bin:
                return 0
            if cohorts[older].groups[HOLDERS].first != 0:
                return older
            older = cohorts[older].prev[ALL]
            younger = cohorts[younger].next[ALL]
        # Far from all others; the youngest end is close enough.
        return queue.last

    cdef void _link_holder(self, int32_t group, int32_t prev) noexcept nogil:
        """Put a group behind `prev` (0: first) among its cohort's with resident members."""
        cdef int32_t cohort = self.groups[group].cohort
        cdef Queue* queue = &self.cohorts[cohort].groups[HOLDERS]
        if queue.first == 0:
            self._link_cohort(cohort, self._cohort_before(cohort))
        insert(self.groups, HOLDERS, queue, group, prev)

    cdef void _unlink_holder(self, int32_t group) noexcept nogil:
        cdef int32_t cohort = self.groups[group].cohort
        cdef Queue* queue = &self.cohorts[cohort].groups[HOLDERS]
        take_out(self.groups, HOLDERS, queue, group)
        if queue.first == 0:
            self._unlink_cohort(cohort)

    cdef int32_t _holder_before(self, int32_t group) noexcept nogil:
        """Return the youngest older group of the cohort with resident members, or 0."""
        cdef Group* groups = self.groups
        cdef int32_t older = groups[group].prev[ALL]
        cdef int32_t younger = groups[group].next[ALL]
        cdef Queue* queue = &self.cohorts[groups[group].cohort].groups[HOLDERS]
        cdef int _step
        for _step in range(MOST_NEIGHBOURS):
            if younger == 0:
                return queue.last
            if groups[younger].tail != 0:
                return groups[younger].prev[HOLDERS]
            if older == 0:
                return 0
            if groups[older].tail != 0:
                return older
            older = groups[older].prev[ALL]
            younger = groups[younger].next[ALL]
        # Far from all others; the youngest end is close enough.
        return queue.last

    cdef inline void _add_known(self, int32_t group, int32_t n) noexcept nogil:
        if n != 0:
            self.groups[group].num_known += n
            self.cohorts[self.groups[group].cohort].num_known += n

    cdef inline void _leave_group(self, int32_t group, int32_t n) noexcept nogil:
        """Count `n` keys that their group no longer knows; without any, the group vanishes."""
        self._add_known(group, -n)
        if self.groups[group].num_known == 0:
            self._free_group(group)

    cdef inline Place* _place_of(self, int32_t row) noexcept nogil:
        return <Place*> &self.table.rows[row].stamp

    cdef inline void _append_member(self, Label label, int32_t row) noexcept nogil:
        cdef int32_t group = group_in(label)
        cdef int32_t tail = self.groups[group].tail
        if tail == 0:
            self._link_holder(group, self._holder_before(group))
        else:
            self.table.rows[tail].next = row
        self._place_of(row).label = label
        self.table.rows[row].prev = tail
        self.table.rows[row].next = 0
        self.groups[group].tail = row

    cdef inline void _remove_member(self, int32_t row) noexcept nogil:
        cdef int32_t prev = self.table.rows[row].prev
        cdef int32_t next = self.table.rows[row].next
        cdef int32_t group = group_in(self._place_of(row).label)
        if prev != 0:
            self.table.rows[prev].next = next
        if next != 0:
            self.table.rows[next].prev = prev
        else:
            if prev == 0:
                self._unlink_holder(group)
            self.groups[group].tail = prev

    cdef int32_t _group_to_join(self, uint64_t* kept, int32_t cls, int32_t length) noexcept nogil:
        """Return the group of a class that a request may join."""
        cdef int32_t group = <int32_t> <uint32_t> kept[0]
        if (group == 0 or self.groups[group].serial != <uint32_t> (kept[0] >> 32) or self.groups[group].num_known == 0
                or self.cohorts[self.groups[group].cohort].bin != 0 or self._class_of(group) != cls):
            group = self._make_group(cls, length)
            kept[0] = <uint32_t> group | <uint64_t> self.groups[group].serial << 32
        return group

    cdef int32_t _join_group(self, uint64_t* kept, int32_t cls, int32_t length) noexcept nogil:
        """Return the group of a class that a request may join, and count one more key in it."""
        cdef int32_t group = self._group_to_join(kept, cls, length)
        self._add_known(group, 1)
        return group

    # ---- uses -------------------------------------------------------------------------------------------------

    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n
    ) noexcept nogil:
        cdef Py_ssize_t i, first = request.num_seen - n
        cdef int32_t row, key, group, cls, length, hint, num_positions = <int32_t> request.num_positions
        # Neighbours mostly leave one group, and join one: such a run is counted at its end.
        cdef int32_t left = 0, num_left = 0, num_shared = 0, joined = 0, num_joined = 0, joined_cls = -1
        cdef uint64_t* state = request.policy_state
        cdef uint64_t* kept
        cdef int32_t* found = self.found
        cdef int64_t num_leading
        cdef int sharing
        cdef bint is_last, is_known
        cdef bint splits
        cdef uint32_t widened
        cdef Label label
        cdef uint64_t[NUM_SHARED] shared
        self._trim()
        self.num_uses += 1
        self._read_time()
        if state[ERA] != self.era:
            memset(state, 0, sizeof(request.policy_state))
            state[ERA] = self.era
            state[PROGRESS] = ALL_KNOWN
            self.touches += 1
            if self.touches % TOUCHES_PER_TABLE == 0:
                self._judge_sharing()
                self._build_table()
        self._age()
        hint = request.next_use
        if hint >= self.num_hints:
            self._take_up_hint(hint)
        self.memory.find_absent(rows, hashes, n, found)
        if state[PROGRESS] & ALL_KNOWN:
            i = 0
            while i < n and (rows[i] != 0 or found[i] != 0):
                i += 1
            if i < n:
                state[PROGRESS] &= ~<uint64_t> ALL_KNOWN
            state[PROGRESS] += <uint64_t> i << LEADING_SHIFT
            if i > 0 and not state[PROGRESS] & CONTINUES:
                num_leading = <int64_t> (state[PROGRESS] >> LEADING_SHIFT)
                group = group_in(
                    self._place_of(rows[i - 1]).label if rows[i - 1] != 0 else self.memory.group_of(found[i - 1]))
                if num_leading + 1 >= self.groups[group].length:
                    state[PROGRESS] |= CONTINUES
        length = num_positions if num_positions else <int32_t> n
        splits = self.splits_shared and hint == 0
        widened = 0 if state[PROGRESS] & CONTINUES else self._widened()
        memset(shared, 0, sizeof(shared))
        for i in range(n):
            row = rows[i]
            key = found[i]
            is_known = row != 0 or key != 0
            is_last = self._is_last(request, request.used[first + i], i == n - 1)
            cls = 4 * (state[PROGRESS] & CONTINUES) + 2 * (not is_last) + is_known
            sharing = 0
            if row != 0:
                label = self._place_of(row).label
                self._remove_member(row)
            elif key != 0:
                if not self.memory.holds(key, hashes[i]):
                    # Its segment has been merged with another meanwhile.
                    key = self.memory.find(hashes[i])
                label = self.memory.group_of(key)
                self.memory.remove(key)
            if is_known:
                if group_in(label) != left:
                    self._count_hits(left, num_left, num_shared)
                    left = group_in(label)
                    num_left = num_shared = 0
                num_left += 1
                sharing = sharing_in(label)
                num_shared += sharing >= WIDELY_SHARED
                sharing += widened >> sharing & 1
            kept = &state[GROUPS + cls]
            cls += hint * CLASSES_PER_HINT
            if splits and sharing > 0:
                kept = &shared[(sharing - 1) >> 2]
                cls = FIRST_SHARED + ((sharing - 1) >> 2)
            if cls != joined_cls:
                self._add_known(joined, num_joined)
                joined = self._group_to_join(kept, cls, length)
                joined_cls = cls
                num_joined = 0
            num_joined += 1
            label = joined | sharing << SHARING_SHIFT
            if row != 0:
                self._append_member(label, row)
                continue
            self.new_keys[self.num_new].hash = hashes[i]
            self.new_keys[self.num_new].group = label
            self.num_new += 1
            request.uses[request.used[first + i]].note = -<int32_t> self.num_new
        self._add_known(joined, num_joined)
        self._count_hits(left, num_left, num_shared)
        state[CALL] = self.num_uses

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        """Keep uses out that come without a request: `BlockCache` makes one for each call."""

    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Leave all where it is: a group knows its path's order."""

    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use
    ) noexcept nogil:
        """Move known keys to the classes of another hint; their age counts from now, as after a use."""
        cdef Py_ssize_t i
        cdef int32_t row, key, group, cls, length
        cdef Label label
        cdef uint64_t[CLASSES_PER_HINT] made
        memset(made, 0, sizeof(made))
        self._enter_memory()
        self._read_time()
        if next_use >= self.num_hints:
            self._take_up_hint(next_use)
        for i in range(n):
            row = rows[i]
            key = self.memory.find(hashes[i]) if row == 0 else 0
            if row == 0 and key == 0:
                continue
            label = self._place_of(row).label if row != 0 else self.memory.group_of(key)
            group = group_in(label)
            cls = self._class_of(group)
            cls = cls % CLASSES_PER_HINT if cls < FIRST_SHARED else 3
            if group == <int32_t> <uint32_t> made[cls]:
                continue  # named twice
            length = self.groups[group].length
            if row != 0:
                self._remove_member(row)
            self._leave_group(group, 1)
            group = self._join_group(&made[cls], next_use * CLASSES_PER_HINT + cls, length)
            label = group | sharing_in(label) << SHARING_SHIFT
            if row != 0:
                self._append_member(label, row)
            else:
                self.memory.renew(key, label)

    cdef inline bint _is_last(self, RequestKeys request, int32_t place, bint is_last_of_call) noexcept nogil:
        if not request.num_positions:
            return is_last_of_call
        return request.uses[place].is_positioned and request.uses[place].position == request.largest_position

    cdef uint32_t _widened(self) noexcept nogil:
        """Return a bit for each sharing that a use by a new session raises: that of 2**n in one of about 2**n."""
        cdef uint32_t draw = <uint32_t> (self.touches * <uint64_t> 2654435761)
        cdef uint32_t bits = 0
        cdef int sharing
        for sharing in range(MOST_SHARING):
            if <uint64_t> draw >> (32 - (sharing + 1) // 2) == 0:
                bits |= <uint32_t> 1 << sharing
        return bits

    cdef void _judge_sharing(self) noexcept nogil:
        """Tell shared blocks apart while over 9/16 of what is used again in seconds is widely shared, down to 3/8."""
        cdef bint splits
        if self.num_again >= FEWEST_AGAIN:
            splits = 16 * self.num_shared > (6 if self.splits_shared else 9) * self.num_again
            if splits and not self.splits_shared:
                # What was counted is of classes that held the shared blocks too.
                memset(self.hit, 0, sizeof(self.hit))
                memset(self.sur, 0, sizeof(self.sur))
                self.total = 0
                if not self.knows_shared:
                    self.knows_shared = True
                    self._take_up_classes(FIRST_SHARED, NUM_CLASSES)
            self.splits_shared = splits
        if self.num_again >= MOST_AGAIN:
            self.num_again >>= 1
            self.num_shared >>= 1

    cdef inline void _count_hits(self, int32_t group, int32_t n, int32_t num_shared) noexcept nogil:
        """Count uses of `n` keys, `num_shared` of them widely shared, which leave their group."""
        cdef const Cohort* cohort
        if n != 0:
            cohort = &self.cohorts[self.groups[group].cohort]
            self.hit[self._cell_of(cohort)] += n
            self.total += n
            if FIRST_JUDGED <= cohort.bin < END_JUDGED:
                self.num_again += n
                self.num_shared += num_shared
            self._leave_group(group, n)

    cdef void _read_time(self) noexcept nogil:
        cdef int64_t now_ms = self.now_ns // 1_000_000
        cdef int64_t now
        if self.start_ms < 0:
            self.start_ms = now_ms
        now = (now_ms - self.start_ms) >> TICK_SHIFT
        if now > self.now:
            self.now = <int32_t> now

    cdef void _age(self) noexcept nogil:
        """Move cohorts whose age has left their bin to the next, at most 256 groups in all."""
        cdef int32_t[AGEING_STEPS] late     # cells, ascending; each costs a step
        cdef int32_t cell, end, due = NEVER
        cdef int i, word, num_late = 0, num_left = AGEING_STEPS
        cdef uint64_t bits
        if self.now < self.due:
            return
        for word in range(NUM_WORDS):
            bits = self.occupied[word]
            while bits != 0:
                cell = word << 6 | lowest_bit(bits)
                bits &= bits - 1
                end = self.ends[cell]
                if end > self.now:
                    due = min(due, end)
                elif num_late < AGEING_STEPS:
                    late[num_late] = cell
                    num_late += 1
                    prefetch(&self.cohorts[self.queues[ALL][cell].first])
                else:
                    due = 0
        for i in range(num_late):
            if i + COHORTS_AHEAD < num_late:
                cell = late[i + COHORTS_AHEAD]
                prefetch(&self.cohorts[self.cohorts[self.queues[ALL][cell].first].next[ALL]])
            cell = late[i]
            while self.ends[cell] <= self.now:
                num_left = self._age_cell(cell, num_left)
                if num_left < 0:
                    self.due = 0  # more are late
                    return
                due = min(due, self.ends[cell])
                # What came to the next bin may be late there, too.
                cell += 1
            due = min(due, self.ends[cell])
        self.due = due

    cdef inline int _age_cell(self, int32_t cell, int num_left) noexcept nogil:
        """Move a cell's late cohorts to its next bin; return how many groups may still move; -1: some must wait."""
        cdef int32_t cohort
        while self.ends[cell] <= self.now:
            cohort = self.queues[ALL][cell].first
            if self.cohorts[cohort].num_groups > num_left:
                if num_left == 0:
                    return -1
                cohort = self._split_cohort(cohort, num_left)
            num_left -= self.cohorts[cohort].num_groups
            self.num_aged += self.cohorts[cohort].num_groups
            self.sur[cell] += self.cohorts[cohort].num_known
            self.total += self.cohorts[cohort].num_known
            self._move_to_next_bin(cell, cohort)
        return num_left

    # ---- stores -----------------------------------------------------------------------------------------------

    cdef Py_ssize_t on_offer(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place,
        int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        cdef Py_ssize_t i, num_free = self.table.num_free, num_taken
        cdef int32_t key, cls, length
        cdef bint is_whole
        cdef uint64_t[CLASSES_PER_HINT] made
        cdef Named* named
        num_victims[0] = 0
        n = self._without_holes(names, places, n)
        length = <int32_t> (names.num_positions if names.num_positions else num_offered)
        if names.next_use >= self.num_hints:
            self._take_up_hint(names.next_use)
        memset(made, 0, sizeof(made))
        if names.policy_state[CALL] != self.num_uses:
            self._enter_memory()
        for i in range(n):
            if self._is_new(names, places[i]):
                continue
            named = &names.named[places[i]]
            key = self._remembered(names, places[i])
            if key == 0:
                self._enter_memory()
                cls = 0 if self._is_last(names, <int32_t> places[i], places[i] == last_place) else 2
                key = self.memory.append(
                    named.hash, self._join_group(&made[cls], names.next_use * CLASSES_PER_HINT + cls, length))
            names.uses[places[i]].note = key
        num_taken = n
        if n > num_free:
            is_whole = names.num_named == num_offered
            num_victims[0] = self._choose(names, places + num_free, n - num_free, is_whole, victims)
            num_taken = num_free + num_victims[0]
        if num_taken == 0:
            self._trim()
        return num_taken

    cdef inline bint _is_new(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        """Return whether a key stands among the new ones; the note may be of an earlier use, which had others."""
        cdef int32_t key = -names.uses[place].note - 1
        return (0 <= key < self.num_new and self.new_keys[key].group != 0
                and self.new_keys[key].hash == names.named[place].hash)

    cdef inline int32_t _remembered(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        """Return where a key that a request named is remembered, or 0."""
        cdef int32_t key = names.uses[place].note
        if self.memory.holds(key, names.named[place].hash):
            return key
        return self.memory.find(names.named[place].hash)

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
        self, RequestKeys names, const Py_ssize_t* waiting, Py_ssize_t n, bint is_whole, int32_t* victims
    ) noexcept nogil:
        """Take up to `n` victims, each worth less than the waiting key that takes its place; return how many.

        With `is_whole`, the call names all keys that the request has named: those resident are marked.
        """
        cdef Py_ssize_t got = 0, got_before = -1
        cdef int word, num_left = MOST_PASSED
        cdef uint64_t bits
        cdef int32_t cell, cohort, group, next_cohort, next, tail
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
                    next_cohort = self.queues[HOLDERS][cell].first
                    while next_cohort != 0:
                        cohort = next_cohort
                        next_cohort = self.cohorts[cohort].next[HOLDERS]
                        next = self.cohorts[cohort].groups[HOLDERS].first
                        while next != 0:
                            group = next
                            next = self.groups[group].next[HOLDERS]
                            tail = self.groups[group].tail
                            while tail != 0 and self._may_leave(names, tail, is_whole):
                                if worth <= value:
                                    return got
                                self._evict_tail(tail, got)
                                victims[got] = tail
                                got += 1
                                if got == n:
                                    return got
                                worth = self._worth_of(names, waiting[got])
                                tail = self.groups[group].tail
                            if tail != 0:
                                num_left -= 1
                                self.num_passed += 1
                                if num_left == 0:
                                    return got
        return got

    cdef inline int64_t _worth_of(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        cdef int32_t group
        if self._is_new(names, place):
            group = group_in(self.new_keys[-names.uses[place].note - 1].group)
        else:
            group = group_in(self.memory.group_of(self._remembered(names, place)))
        return self.value[self._class_of(group) * NUM_BINS]

    cdef inline void _evict_tail(self, int32_t tail, Py_ssize_t got) noexcept nogil:
        """Take victim number `got` out, and fetch ahead what the next one, its release and the memory will need."""
        prefetch(&self.members[self.table.rows[tail].prev])
        # Keys of a prompt mostly lie in rows that follow one another.
        prefetch(&self.table.rows[max(tail - 5, 0)])
        prefetch(&self.members[max(tail - 8, 0)])
        prefetch(self.table.rows[tail].key)
        self.leaving[got].hash = self.table.rows[tail].hash
        self.leaving[got].group = self._place_of(tail).label
        self.num_leaving += 1
        self.memory.fetch(self.table.rows[tail].hash)
        self._detach_row(tail)

    cdef inline bint _may_leave(self, RequestKeys names, int32_t row, bint is_whole) noexcept nogil:
        cdef Py_ssize_t place
        if (self.members[row].kids > 0 or self.table.rows[row].ref_cnt != 0
                or self.table.rows[row].mark == self.table.mark):
            return False
        if is_whole:
            return True
        place = names.locate(self.table.rows[row].key, self.table.rows[row].hash)
        return place < 0 or names.named[place].seen == 0

    cdef inline void _detach_row(self, int32_t row) noexcept nogil:
        """Take a row from its group and its parent; its key stays known."""
        self._remove_member(row)
        self._leave_parent(row)
        count_rows(self.table, 0, -1)

    cdef void _leave_parent(self, int32_t row) noexcept nogil:
        cdef uint32_t generation = self.members[row].parent_generation
        cdef int32_t parent = self._place_of(row).parent
        if parent == 0:
            return
        if self.table.rows[parent].generation != generation:
            parent = self._find_lost(parent, generation)
        if parent != 0 and self.members[parent].kids > 0:
            self.members[parent].kids -= 1

    cdef inline int32_t* _bucket_of(self, int32_t row, uint32_t generation) noexcept nogil:
        cdef uint32_t mixed = <uint32_t> row * <uint32_t> 2654435761 ^ generation * <uint32_t> 2246822519
        return &self.buckets[(<uint64_t> (mixed * <uint32_t> 3266489917) * self.num_buckets) >> 32]

    cdef void _add_lost(self, int32_t row) noexcept nogil:
        """Note that a row with children leaves by a failed store; `reserve_policy` has made room."""
        cdef int32_t* bucket = self._bucket_of(row, self.table.rows[row].generation)
        cdef int32_t at = self.lost_free
        if at != 0:
            self.lost_free = self.lost[at].next
        else:
            at = self.lost_fresh
            self.lost_fresh += 1
        self.lost[at].hash = self.table.rows[row].hash
        self.lost[at].row = row
        self.lost[at].generation = self.table.rows[row].generation
        self.lost[at].num_children = self.members[row].kids
        self.lost[at].next = bucket[0]
        bucket[0] = at
        self.num_lost += 1

    cdef int32_t _find_lost(self, int32_t row, uint32_t generation) noexcept nogil:
        """Return the row that a parent which once failed has now, or 0; one of its children leaves it."""
        cdef int32_t* link = self._bucket_of(row, generation)
        cdef LostParent* lost
        cdef Probe probe
        cdef uint64_t hash
        cdef int32_t at
        while link[0] != 0:
            at = link[0]
            lost = &self.lost[at]
            self.num_searched += 1
            if lost.row == row and lost.generation == generation:
                hash = lost.hash
                lost.num_children -= 1
                if lost.num_children == 0:
                    link[0] = lost.next
                    lost.next = self.lost_free
                    self.lost_free = at
                    self.num_lost -= 1
                row = index_first(self.table.buckets, self.table.num_buckets, hash, &probe)
                while row != 0 and self.table.rows[row].hash != hash:
                    row = index_next(self.table.buckets, self.table.num_buckets, hash, &probe)
                return row
            link = &lost.next
        return 0

    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, key, before, parent
        cdef Label label
        for i in range(n):
            row = rows[i]
            if self._is_new(names, places[i]):
                key = -names.uses[places[i]].note - 1
                label = self.new_keys[key].group
                self.new_keys[key].group = 0
            else:
                key = self._remembered(names, places[i])
                label = self.memory.group_of(key)
                self.memory.remove(key)
            self.members[row].kids = 0
            before = names.uses[places[i]].before - 1
            parent = names.row_now(self.table, before) if before >= 0 else 0
            self._set_parent(row, parent)
            self._append_member(label, row)
        count_rows(self.table, 0, n)
        self._trim()

    cdef inline void _set_parent(self, int32_t row, int32_t parent) noexcept nogil:
        self._place_of(row).parent = parent
        if parent != 0:
            self.members[row].parent_generation = self.table.rows[parent].generation
            self.members[parent].kids += 1

    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row
        self._enter_memory()
        for i in range(n):
            row = rows[i]
            self._remove_member(row)
            self._leave_parent(row)
            self.memory.append(self.table.rows[row].hash, self._place_of(row).label)
            if self.members[row].kids > 0:
                self._add_lost(row)
        if n:
            self._trim()

    # ---- blocks that callers bring ----------------------------------------------------------------------------

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Take in blocks of no request."""
        cdef Py_ssize_t i
        cdef int32_t key
        cdef Label label
        cdef uint64_t made
        self._enter_memory()
        for i in range(n):
            key = self.memory.find(self.table.rows[rows[i]].hash)
            if key != 0:
                label = self.memory.group_of(key)
                self.memory.remove(key)
            else:
                made = 0
                label = self._join_group(&made, 0, 1)
            self.members[rows[i]].kids = 0
            self._set_parent(rows[i], 0)
            self._append_member(label, rows[i])
        count_rows(self.table, 0, n)

    cdef Py_ssize_t select_victims(self, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil:
        """Take `n` victims in the order of the table, and decline nothing."""
        cdef Py_ssize_t got = 0
        cdef int rank
        cdef int32_t cell, cohort, next_cohort, group, next, row, prev
        if priority != NORMAL:
            return 0
        self._enter_memory()
        for rank in range(self.num_ranked):
            cell = self.ranked[rank]
            next_cohort = self.queues[HOLDERS][cell].first
            while next_cohort != 0:
                cohort = next_cohort
                next_cohort = self.cohorts[cohort].next[HOLDERS]
                next = self.cohorts[cohort].groups[HOLDERS].first
                while next != 0:
                    group = next
                    next = self.groups[group].next[HOLDERS]
                    row = self.groups[group].tail
                    while row != 0 and got < n:
                        prev = self.table.rows[row].prev
                        if may_leave(self.table, row):
                            self._detach_row(row)
                            self.memory.append(self.table.rows[row].hash, self._place_of(row).label)
                            out[got] = row
                            got += 1
                        row = prev
        self._trim()
        return got

    # ---- the table --------------------------------------------------------------------------------------------

    cdef inline bint _in_use(self, int cls) noexcept nogil:
        return self.knows_shared if cls >= FIRST_SHARED else cls < self.num_hints * CLASSES_PER_HINT

    cdef void _build_table(self) noexcept nogil:
        """Work out the value of each cell, and the order of the cells, from what has been counted."""
        cdef int cls, b, cell
        cdef int64_t chance = 4096
        cdef int64_t[NUM_BINS] num_hit
        cdef int64_t[NUM_BINS] num_sur
        memset(num_hit, 0, sizeof(num_hit))
        memset(num_sur, 0, sizeof(num_sur))
        if self.total >= HALVING_TOTAL:
            self.total = 0
            for cell in range(NUM_CELLS):
                self.hit[cell] >>= 1
                self.sur[cell] >>= 1
                self.total += self.hit[cell] + self.sur[cell]
        for cls in range(NUM_CLASSES):
            if self._in_use(cls):
                for b in range(NUM_BINS):
                    num_hit[b] += self.hit[cls * NUM_BINS + b]
                    num_sur[b] += self.sur[cls * NUM_BINS + b]
        for b in range(NUM_BINS):
            chance = ((num_hit[b] << 16) + 2048 * chance) // (num_hit[b] + num_sur[b] + 2048)
            self.chances[b] = chance
        for cls in range(NUM_CLASSES):
            if self._in_use(cls):
                self._value_class(cls)
        self._rank_cells()

    cdef void _value_class(self, int cls) noexcept nogil:
        cdef int64_t* hit = &self.hit[cls * NUM_BINS]
        cdef int64_t* sur = &self.sur[cls * NUM_BINS]
        cdef int64_t[NUM_BINS] uses
        cdef int64_t[NUM_BINS] time
        cdef int64_t[NUM_BINS] stays
        cdef int64_t expected = 0, num_hit = 0, factor, guess, h, nu, de, s
        cdef int64_t weight = PRIOR_SHARED if cls >= FIRST_SHARED else PRIOR
        cdef bint is_again = cls & 1 or cls >= FIRST_SHARED
        cdef int b, top = 0
        for b in range(NUM_BINS):
            expected += (hit[b] + sur[b]) * self.chances[b]
            num_hit += hit[b]
        expected >>= 16
        factor = ((num_hit << 16) + 1024 * <int64_t> (65536 if is_again else 32768)) // (expected + 1024)
        for b in range(NUM_BINS - 1, -1, -1):
            guess = min(MOST_CHANCE, (factor * self.chances[b]) >> 16)
            h = min(MOST_CHANCE, ((hit[b] << 16) + weight * guess) // (hit[b] + sur[b] + weight))
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

    cdef void _rank_cells(self) noexcept nogil:
        """Order the cells by value, then by bin, falling, then by class."""
        cdef int32_t cell
        cdef int i, j
        cdef uint64_t[NUM_CELLS] ranks      # all three in one number; a value has 34 bits at the most
        cdef uint64_t rank
        # By insertion: from one table to the next, few cells change places.
        for i in range(self.num_ranked):
            cell = self.ranked[i]
            rank = <uint64_t> self.value[cell] << 16 | (NUM_BINS - cell % NUM_BINS) << 8 | cell // NUM_BINS
            j = i
            while j > 0 and rank < ranks[j - 1]:
                ranks[j] = ranks[j - 1]
                self.ranked[j] = self.ranked[j - 1]
                j -= 1
            ranks[j] = rank
            self.ranked[j] = cell
        memset(self.holders, 0, sizeof(self.holders))
        for i in range(self.num_ranked):
            cell = self.ranked[i]
            self.rank_of[cell] = i
            if self.queues[HOLDERS][cell].first != 0:
                self.holders[i >> 6] |= <uint64_t> 1 << (i & 63)

    cdef void _take_up_classes(self, int first, int end) noexcept nogil:
        """Value classes that have not been in use before, by the table as it is."""
        cdef int cls, b
        for cls in range(first, end):
            self._value_class(cls)
            for b in range(NUM_BINS):
                self.ranked[self.num_ranked] = cls * NUM_BINS + b
                self.num_ranked += 1
        self._rank_cells()

    cdef void _take_up_hint(self, int32_t hint) noexcept nogil:
        """Value the classes of a hint that nobody has given before."""
        self._take_up_classes(self.num_hints * CLASSES_PER_HINT, (hint + 1) * CLASSES_PER_HINT)
        self.num_hints = hint + 1

    # ---- inspection -------------------------------------------------------------------------------------------

    cdef int check_policy(self) except -1:
        cdef const Row* rows = self.table.rows
        cdef int32_t cell, cohort, group, next, row
        cdef Label label
        cdef Py_ssize_t i, num_groups = 0, num_resident = 0, num_lost = 0
        cdef int64_t total = 0
        known = {}
        kids = {}
        for cell in range(NUM_CELLS):
            total += self.hit[cell] + self.sur[cell]
            holders = []
            youngest = None
            cohort = self.queues[ALL][cell].first
            while cohort != 0:
                if self.cohorts[cohort].num_groups <= 0 or self._cell_of(&self.cohorts[cohort]) != cell:
                    raise BlockStateError(f"invariant broken: cohort {cohort} is astray in cell {cell}")
                if youngest is not None and self.cohorts[cohort].t0 < youngest:
                    raise BlockStateError(f"invariant broken: cohort {cohort} is out of order")
                youngest = self.cohorts[cohort].t0
                next = self.cohorts[cohort].next[ALL]
                if not (self.cohorts[next].prev[ALL] == cohort
                        if next != 0 else self.youngest[cell // NUM_BINS] == cohort):
                    raise BlockStateError(f"invariant broken: cohort {cohort} is not its neighbour's neighbour")
                num_groups += self.check_cohort(cohort, known)
                if self.cohorts[cohort].groups[HOLDERS].first != 0:
                    holders.append(cohort)
                cohort = 0 if cohort == self.queues[ALL][cell].last else next
            listed = []
            cohort = self.queues[HOLDERS][cell].first
            while cohort != 0:
                listed.append(cohort)
                cohort = self.cohorts[cohort].next[HOLDERS]
            if (self.occupied[cell >> 6] >> (cell & 63) & 1) != (self.queues[ALL][cell].first != 0):
                raise BlockStateError(f"invariant broken: cell {cell} is marked wrongly")
            if not (cell % NUM_BINS == NUM_BINS - 1 or self.queues[ALL][cell].first == 0
                    or self.due <= self.ends[cell]
                    == self.cohorts[self.queues[ALL][cell].first].t0 + EDGES[cell % NUM_BINS + 1]):
                raise BlockStateError(f"invariant broken: cell {cell} ages too late")
            if sorted(listed) != sorted(holders):
                raise BlockStateError(f"invariant broken: cell {cell} lists {listed}, {holders} have resident members")
            if self._in_use(cell // NUM_BINS):
                row = self.rank_of[cell]
                if self.ranked[row] != cell:
                    raise BlockStateError(f"invariant broken: cell {cell} has another rank")
                if (self.holders[row >> 6] >> (row & 63) & 1) != (listed != []):
                    raise BlockStateError(f"invariant broken: cell {cell} is marked wrongly")
        for group in list(known):
            row = self.groups[group].tail
            if row != 0 and rows[row].next != 0:
                raise BlockStateError(f"invariant broken: group {group} goes on behind its tail")
            while row != 0:
                num_resident += 1
                known[group] -= 1
                if rows[row].key == NULL or group_in(self._place_of(row).label) != group:
                    raise BlockStateError(f"invariant broken: row {row} is in no group")
                if rows[row].prev != 0:
                    if rows[rows[row].prev].next != row:
                        raise BlockStateError(f"invariant broken: row {row} is not its neighbour's")
                parent = self._place_of(row).parent
                if parent != 0 and rows[parent].generation == self.members[row].parent_generation:
                    if rows[parent].key == NULL:
                        raise BlockStateError(f"invariant broken: row {row} has an absent predecessor")
                    kids[parent] = kids.get(parent, 0) + 1
                row = rows[row].prev
        if total != self.total:
            raise BlockStateError(f"invariant broken: {total} are counted, the total is {self.total}")
        if num_groups != self.num_groups:
            raise BlockStateError(f"invariant broken: {num_groups} groups are linked, {self.num_groups} counted")
        if num_resident != self.table.num_resident:
            raise BlockStateError(
                f"invariant broken: {num_resident} members are resident, {self.table.num_resident} rows")
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if rows[row].key == NULL:
                continue
            if self.memory.find(rows[row].hash) != 0:
                raise BlockStateError(f"invariant broken: row {row} is resident and remembered")
            # A child left behind by a failed store may have counted itself out of another's.
            if self.num_lost == 0 and self.members[row].kids > kids.get(row, 0):
                raise BlockStateError(f"invariant broken: row {row} counts too many children")
        for label in self.memory.groups():
            group = group_in(label)
            if group not in known:
                raise BlockStateError(f"invariant broken: a remembered key is in group {group}, which is not there")
            known[group] -= 1
        for i in range(self.num_new):
            group = group_in(self.new_keys[i].group)
            if group not in known:
                raise BlockStateError(f"invariant broken: a new key is in group {group}, which is not there")
            known[group] -= 1
        if self.num_leaving != 0:
            raise BlockStateError(f"invariant broken: {self.num_leaving} victims are not remembered yet")
        for i in range(self.num_buckets):
            next = self.buckets[i]
            while next != 0:
                num_lost += 1
                if not (self.lost[next].num_children > 0
                        and self._bucket_of(self.lost[next].row, self.lost[next].generation) == &self.buckets[i]):
                    raise BlockStateError(f"invariant broken: lost parent {next} is in a wrong bucket")
                next = self.lost[next].next
        if num_lost != self.num_lost:
            raise BlockStateError(f"invariant broken: {num_lost} lost parents are linked, {self.num_lost} counted")
        self.memory.check()
        for group in known:
            if known[group] != 0:
                raise BlockStateError(f"invariant broken: group {group} counts {known[group]} members too many")
        return 0

    cdef Py_ssize_t check_cohort(self, int32_t cohort, dict known) except -1:
        """Enter what each group of a cohort knows in `known`, and return how many groups there are."""
        cdef int32_t group = self.cohorts[cohort].groups[ALL].first, last = 0
        cdef Py_ssize_t num_known = 0
        groups = []
        holders = []
        while group != 0:
            if self.groups[group].num_known <= 0 or self.groups[group].cohort != cohort:
                raise BlockStateError(f"invariant broken: group {group} is astray in cohort {cohort}")
            if self.groups[group].prev[ALL] != last:
                raise BlockStateError(f"invariant broken: group {group} is not its neighbour's neighbour")
            groups.append(group)
            known[group] = self.groups[group].num_known
            num_known += self.groups[group].num_known
            if self.groups[group].tail != 0:
                holders.append(group)
            last = group
            group = self.groups[group].next[ALL]
        if last != self.cohorts[cohort].groups[ALL].last:
            raise BlockStateError(f"invariant broken: cohort {cohort} ends with another group than {last}")
        if num_known != self.cohorts[cohort].num_known:
            raise BlockStateError(f"invariant broken: cohort {cohort} counts other keys than {num_known}")
        if len(groups) != self.cohorts[cohort].num_groups:
            raise BlockStateError(f"invariant broken: cohort {cohort} counts other groups than {groups}")
        listed = []
        group = self.cohorts[cohort].groups[HOLDERS].first
        while group != 0:
            listed.append(group)
            group = self.groups[group].next[HOLDERS]
        if sorted(listed) != sorted(holders):
            raise BlockStateError(f"invariant broken: cohort {cohort} lists {listed}, {holders} have resident members")
        return len(groups)


CachePolicy.register(GittinsCachePolicy)
