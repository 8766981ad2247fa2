"""gittins: keep the blocks with the highest expected uses per unit of occupancy time, learned by class and age.

Compiled because it is a PolicyAdapter. The rules are the project's own. Compare LHD (Beckmann, Chen & Cidon, NSDI '18)
and the Gittins index.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvcache.core.eviction_queue cimport Row
from kvcache.core.ghosts cimport GhostList, prefetch_ghost
from kvcache.core.index cimport Probe, bit_length, index_first, prefetch, zeroed
from kvcache.core.policy_adapter cimport PolicyAdapter
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport BlockTable, count_rows, may_leave, ref_of
from kvcache.policies.gittins.groups cimport (
    HOLDERS, AgedGroups, Cohort, Group, add_known, cell_of, class_of, leave_group, lowest_bit, reserve_groups,
)
from kvcache.policies.gittins.values cimport (
    CLASSES_PER_HINT, END, FIRST_SHARED, NUM_BINS, NUM_SHARED, ValueTable, count_hits, count_moved,
)

from kvcache.block import BlockStateError
from kvcache.policies.base import CachePolicy

cdef enum:
    TICK_SHIFT = 11             # a tick is 2,048 ms
    MEMORY_FACTOR = 4           # size of the memory of keys, in capacities
    MOST_SHARING = 15
    WIDELY_SHARED = 2           # a key is widely shared from this sharing on
    TOUCHES_PER_TABLE = 64
    MOST_PASSED = 2048          # groups with a protected tail that one store skips
    SPARE_KEYS = 4096           # two keys per key of the longest request, and one in SPARE_SHARE of the capacity,
    SPARE_SHARE = 2             # may be remembered for a while: growing the memory would take milliseconds
    AHEAD = 8                   # ghosts prefetched ahead of their use


cdef class GittinsCachePolicy(PolicyAdapter):
    """GittinsCachePolicy(cache_capacity)

    Keep the blocks with the highest expected uses per unit of occupancy time; do not store less valuable blocks.

    Notes
    -----
    Blocks are divided into classes: the request continues an older one or not, the block is the last of its request or
    not, the block was used before or not, and the request's hint of next use. For each class and age, the policy learns
    how often blocks are used again. Ages are wall-clock times in 54 bins. The table is rebuilt every 64 requests.

    Blocks that many sessions share, such as system prompts, may dominate the uses after 4 to 16 seconds. While they do,
    they form separate classes by the number of sessions that used them. Otherwise, the quick uses of these prompts
    would make the new blocks of ordinary sessions look as if they returned at once, too. The number of sessions is
    counted as its rounded logarithm (Morris, CACM 1978). When the classes are split, counting starts again.

    Blocks of a group are evicted from its tail, and no block is evicted while a resident block continues it. The policy
    remembers the class and age of the last ``4 * cache_capacity`` keys that were evicted or not stored. With a custom
    backend, where callers provide the blocks, it declines nothing.
    """

    reads_clock = True
    group_policy = "kvcache.policies.gittins.units:UnitGittinsPolicy"

    def __cinit__(self, cache_capacity):
        self.table = BlockTable(cache_capacity, NUM_LISTS, keeps_queues=False)
        self.tracks_uses = True
        self.members = <Member*> zeroed(self.table.num_rows * sizeof(Member))
        if self.members == NULL:
            raise MemoryError(f"no memory for {cache_capacity} blocks")
        self.values = ValueTable()
        self.aged = AgedGroups(self.values)
        # Pages stay untouched until used. Growing would copy megabytes.
        self.aged.grow(cache_capacity + SPARE_KEYS)
        self.memory_size = MEMORY_FACTOR * cache_capacity
        self.memory = GhostList(MEMORY_FACTOR * cache_capacity + cache_capacity // SPARE_SHARE + SPARE_KEYS, tight=True)
        self.on_reset()

    def __dealloc__(self):
        free(self.members)
        free(self.found)

    @property
    def now_ms(self):
        """The last time that the manager set, in milliseconds."""
        return self.now_ns // 1_000_000

    @now_ms.setter
    def now_ms(self, int64_t now_ms):
        self.now_ns = now_ms * 1_000_000

    def gauges(self):
        """Return the number of remembered keys, and the number of learned uses."""
        return {"remembered_keys": self.num_remembered, "learned_uses": self.touches}

    @property
    def num_remembered(self):
        """Number of keys that are known but not resident."""
        return self.memory.num_ghosts

    @property
    def worths(self):
        """The value, per class, of a block that has just been used, for requests without a hint."""
        return [self.values.value[cls * NUM_BINS] for cls in range(CLASSES_PER_HINT)]

    @property
    def splits_shared(self):
        """Whether widely shared blocks form separate classes now."""
        return self.values.splits_shared

    @property
    def num_aged(self):
        """Groups moved to their next bin since the start."""
        return self.aged.num_aged

    cdef int reserve_policy(self, Py_ssize_t n) except -1:
        """Make room for a call of `n` keys before anything changes. Each key may be remembered, and evict another."""
        cdef void* found
        self.memory.reserve(2 * n)
        reserve_groups(self.aged)
        if n > self.call_size:
            found = realloc(self.found, 2 * n * sizeof(int32_t))
            if found == NULL:
                raise MemoryError(f"no memory for a call of {n} keys")
            self.found = <int32_t*> found
            self.call_size = 2 * n
        return 0

    cdef void on_reset(self) noexcept nogil:
        self.memory.clear()
        self.values.clear()
        self.aged.clear()
        self.queue.first = self.queue.last = 0
        self.start_ms = -1
        self.era += 1
        self.touches = 0

    cdef void _trim(self) noexcept nogil:
        """Drop the oldest remembered keys beyond the size of the memory."""
        cdef Py_ssize_t i, num_over = self.memory.num_ghosts - self.memory_size
        cdef int32_t ahead = self.memory.ghosts[0].next
        for i in range(num_over + AHEAD):
            prefetch_ghost(self.memory, self.memory.ghosts[ahead].hash)
            ahead = self.memory.ghosts[ahead].next
            if i >= AHEAD:
                leave_group(self.aged, group_in(self._forget(self.memory.ghosts[0].next)), 1)

    cdef inline int32_t _remember(self, uint64_t hash, Label label) noexcept nogil:
        """Append a key that is not in the memory, and return its ghost; `reserve_policy` has made room."""
        cdef int32_t ghost = self.memory.append(hash)
        self.memory.ghosts[ghost].state = label
        return ghost

    cdef inline Label _forget(self, int32_t ghost) noexcept nogil:
        """Remove a key from the memory, and return its label."""
        self.memory.drop(ghost)
        return self.memory.ghosts[ghost].state

    cdef inline Place* _place_of(self, int32_t row) noexcept nogil:
        return <Place*> &self.table.rows[row].stamp

    cdef inline void _append(self, Label label, int32_t row, int32_t list_idx) noexcept nogil:
        """Append a row to its group, or to the queue."""
        cdef int32_t* tail = &self.aged.groups[group_in(label)].tail
        self._place_of(row).label = label
        self.table.rows[row].list_idx = list_idx
        if list_idx == QUEUED:
            push(self.table.rows, &self.queue, row)
            return
        if tail[0] != 0:
            self.table.rows[tail[0]].next = row
        else:
            self.aged.link_holder(group_in(label))
        self.table.rows[row].prev = tail[0]
        self.table.rows[row].next = 0
        tail[0] = row

    cdef inline void _unlink(self, int32_t row) noexcept nogil:
        """Remove a row from its group, or from the queue."""
        cdef int32_t prev = self.table.rows[row].prev
        cdef int32_t next = self.table.rows[row].next
        cdef int32_t group
        if self.table.rows[row].list_idx == QUEUED:
            pull(self.table.rows, &self.queue, row)
            return
        if prev != 0:
            self.table.rows[prev].next = next
        if next != 0:
            self.table.rows[next].prev = prev
        else:
            group = group_in(self._place_of(row).label)
            if prev == 0:
                self.aged.unlink_holder(group)
            self.aged.groups[group].tail = prev

    cdef inline Label _label_of(self, int32_t row, int32_t ghost) noexcept nogil:
        """Return the label of a key that is resident in `row` or remembered as `ghost`, or 0 if it is unknown."""
        if row != 0:
            return self._place_of(row).label
        return self.memory.ghosts[ghost].state if ghost != 0 else 0

    cdef int32_t _join_group(self, MadeGroup* made, int32_t cls, int32_t length) noexcept nogil:
        """Return the group of a class that a request may join, and count one more key in it."""
        cdef int32_t group = _group_to_join(self, made, cls, length)
        add_known(self.aged, group, 1)
        return group

    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n
    ) noexcept nogil:
        self._use_keys(request, rows, hashes, request.used + (request.num_seen - n), n,
                       <int32_t> (request.num_positions if request.num_positions else n))

    cdef void _use_keys(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, const int32_t* places, Py_ssize_t n,
        int32_t length
    ) noexcept nogil:
        """Count one use of `n` keys of a request of `length` keys."""
        cdef RequestState* state
        self._trim()
        _read_time(self)
        state = _open_state(self, request)
        self.aged.age()
        if request.next_use >= self.values.num_hints:
            self._take_up_hint(request.next_use)
        _find_absent(self, rows, hashes, n, self.found)
        _see_prefix(self, state, rows, n)
        _move_keys(self, request, state, rows, hashes, places, n, length)

    cdef inline void _join(self, Joining* joining, MadeGroup* made, int32_t cls, int32_t length) noexcept nogil:
        """Let one more key join the request's group of a class, which becomes `joining.group`."""
        if joining.group == 0 or joining.cls != cls:
            add_known(self.aged, joining.group, joining.num_keys)
            joining.group = _group_to_join(self, made, cls, length)
            joining.cls = cls
            joining.num_keys = 0
        joining.num_keys += 1

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        """Unused: `BlockCache` creates a request for each call without one."""

    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Do nothing: a group keeps its path's order."""

    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use
    ) noexcept nogil:
        """Move known keys to the classes of another hint. Their age starts at 0, as after a use."""
        cdef Py_ssize_t i
        cdef int32_t row, ghost, group, cls, cell, length
        cdef Label label
        cdef MadeGroup[CLASSES_PER_HINT] made
        memset(made, 0, sizeof(made))
        _read_time(self)
        if next_use >= self.values.num_hints:
            self._take_up_hint(next_use)
        for i in range(n):
            row = rows[i] if self.table.rows[rows[i]].list_idx != PASSING else 0
            ghost = self.memory.find(hashes[i]) if row == 0 else 0
            label = self._label_of(row, ghost)
            group = group_in(label)
            # The end of a session is not that of blocks which other sessions have used.
            if group == 0 or next_use == END and sharing_in(label) > 0:
                continue
            cls = class_of(self.aged, group)
            cell = cell_of(&self.aged.cohorts[self.aged.groups[group].cohort])
            cls = cls % CLASSES_PER_HINT if cls < FIRST_SHARED else 3
            if group == made[cls].group:
                continue  # the call names the key twice
            if cell // NUM_BINS // CLASSES_PER_HINT != next_use and cell < FIRST_SHARED * NUM_BINS:
                count_moved(self.values, cell, next_use, 1)
            length = self.aged.groups[group].length
            # A queued row keeps its place: nothing needs it, or it only passes through.
            if row != 0 and self.table.rows[row].list_idx == GROUPED:
                self._unlink(row)
            leave_group(self.aged, group, 1)
            group = self._join_group(&made[cls], next_use * CLASSES_PER_HINT + cls, length)
            label = group | sharing_in(label) << SHARING_SHIFT
            if row != 0 and self.table.rows[row].list_idx == GROUPED:
                self._append(label, row, GROUPED)
            elif row != 0:
                self._place_of(row).label = label
            else:
                self.memory.refresh(ghost)
                self.memory.ghosts[ghost].state = label

    cdef void _take_up_hint(self, int32_t hint) noexcept nogil:
        self.values.take_up_hint(hint)
        self.aged.mark_holders()

    cdef inline bint _is_last(self, RequestKeys request, int32_t place, bint is_last_of_call) noexcept nogil:
        if not request.num_positions:
            return is_last_of_call
        return request.uses[place].is_positioned and request.uses[place].position == request.largest_position

    cdef Py_ssize_t on_offer(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place,
        int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        cdef Py_ssize_t i, got, num_free = self.table.num_free, num_taken
        cdef int32_t ghost, cls, length
        cdef bint is_whole, is_move = self.stores_all and _state_of(self, names).era != self.era
        cdef MadeGroup[CLASSES_PER_HINT] made
        num_victims[0] = 0
        # Without a tier, a block behind a declined one cannot be hit.
        if not self.stores_all:
            n = _without_holes(self, names, places, n)
        length = <int32_t> (names.num_positions if names.num_positions else num_offered)
        if names.next_use >= self.values.num_hints:
            self._take_up_hint(names.next_use)
        memset(made, 0, sizeof(made))
        for i in range(n):
            ghost = self._ghost_of(names, places[i])
            if ghost == 0 and not is_move:
                cls = 0 if self._is_last(names, <int32_t> places[i], places[i] == last_place) else 2
                ghost = self._remember(
                    names.named[places[i]].hash,
                    self._join_group(&made[cls], names.next_use * CLASSES_PER_HINT + cls, length))
            names.uses[places[i]].note = ghost
        num_taken = n
        self.num_grouped = 0 if is_move else n
        if n > num_free:
            is_whole = names.num_named == num_offered
            if self.stores_all:
                num_victims[0] = _make_way(self, names, places + num_free, n - num_free, is_move, is_whole, victims)
            else:
                # Blocks that earlier calls queued for a tier leave first.
                got = _choose_queued(self, names, n - num_free, is_whole, victims)
                if got < n - num_free:
                    got += _choose(
                        self, names, places + num_free + got, n - num_free - got, is_whole, True, victims + got)
                num_victims[0] = got
            num_taken = num_free + num_victims[0]
            self._remember_rows(victims, num_victims[0])
        if num_taken == 0:
            self._trim()
        return num_taken

    cdef inline int32_t _ghost_of(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        """Return the ghost of a request's key, or 0. The key's note is its ghost at the last use or offer."""
        cdef int32_t ghost = names.uses[place].note
        if self.memory.holds(ghost, names.named[place].hash):
            return ghost
        return self.memory.find(names.named[place].hash)

    cdef void _remember_rows(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Append keys to the memory, in the given order. Their rows have left their groups."""
        cdef Py_ssize_t i
        cdef int32_t row
        # Each key goes to another cache line of the index. Prefetched while rows are selected, it would come too late.
        for i in range(n + AHEAD):
            if i < n:
                prefetch_ghost(self.memory, self.table.rows[rows[i]].hash)
            if i >= AHEAD:
                row = rows[i - AHEAD]
                if self._place_of(row).label != 0:
                    self._remember(self.table.rows[row].hash, self._place_of(row).label)

    cdef inline bint _may_leave(self, RequestKeys names, int32_t row, bint is_whole) noexcept nogil:
        cdef Py_ssize_t place
        if self.members[row].kids > 0 or ref_of(self.table, row) != 0 or self.table.rows[row].mark == self.table.mark:
            return False
        if is_whole:
            return True
        place = names.locate(self.table.rows[row].key, self.table.rows[row].hash)
        return place < 0 or not names.named[place].is_used

    cdef int32_t _leave_parent(self, int32_t row) noexcept nogil:
        """Remove a child from its parent, if the parent is resident. Return the parent's row, or 0."""
        cdef int32_t parent = self._parent_of(row)
        if parent != 0 and self.members[parent].kids > 0:
            self.members[parent].kids -= 1
            return parent
        return 0

    cdef int32_t _parent_of(self, int32_t row) noexcept nogil:
        """Return the row of a row's parent, or 0."""
        cdef uint32_t tag = self.members[row].parent_tag
        cdef int32_t parent = self._place_of(row).parent
        cdef Probe probe
        if parent != 0 and (self.table.rows[parent].key == NULL or <uint32_t> self.table.rows[parent].hash != tag):
            # A failed store removed the parent. It may have been stored again in another row. A wrong block with the
            # same tag counts one child too few.
            parent = index_first(self.table.buckets, self.table.num_buckets, tag, &probe)
        return parent

    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row, ghost, before, parent
        cdef Label label
        for i in range(min(n, AHEAD)):
            prefetch_ghost(self.memory, names.named[places[i]].hash)
        for i in range(n):
            row = rows[i]
            if i + AHEAD < n:
                prefetch_ghost(self.memory, names.named[places[i + AHEAD]].hash)
            ghost = names.uses[places[i]].note
            label = self._forget(ghost) if ghost != 0 else 0
            self.members[row].kids = 0
            before = names.uses[places[i]].before - 1
            parent = names.row_now(self.table, before) if before >= 0 else 0
            self._set_parent(row, parent)
            if i < self.num_grouped:
                self._append(label, row, GROUPED)
            else:
                self._place_of(row).label = label
        count_rows(self.table, GROUPED, min(n, self.num_grouped))
        # The tail of a prompt is evicted before its head.
        for i in range(n - 1, self.num_grouped - 1, -1):
            self._append(self._place_of(rows[i]).label, rows[i], QUEUED)
            count_rows(self.table, QUEUED, 1)
        self._trim()

    cdef inline void _set_parent(self, int32_t row, int32_t parent) noexcept nogil:
        self._place_of(row).parent = parent
        if parent != 0:
            self.members[row].parent_tag = <uint32_t> self.table.rows[parent].hash
            self.members[parent].kids += 1

    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row
        for i in range(n):
            row = rows[i]
            self._unlink(row)
            self._leave_parent(row)
        if n:
            self._remember_rows(rows, n)
            self._trim()

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Insert blocks that belong to no request."""
        cdef Py_ssize_t i
        cdef int32_t ghost
        cdef Label label
        cdef MadeGroup made
        for i in range(n):
            ghost = self.memory.find(self.table.rows[rows[i]].hash)
            if ghost != 0:
                label = self._forget(ghost)
            else:
                made.group = 0
                label = self._join_group(&made, 0, 1)
            self.members[rows[i]].kids = 0
            self._set_parent(rows[i], 0)
            self._append(label, rows[i], GROUPED)
        count_rows(self.table, GROUPED, n)

    cdef void select_victims(self, Py_ssize_t n, int32_t* out) noexcept nogil:
        """Select `n` victims, and decline nothing. Blocks behind a blocked tail come last, in the order of rows."""
        cdef Py_ssize_t i, got
        cdef int32_t row
        got = _choose(self, None, NULL, n, True, False, out)
        for i in range(got):
            self.table.rows[out[i]].mark = self.table.mark
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if got == n:
                break
            if self.table.rows[row].key != NULL and may_leave(self.table, row):
                _evict(self, row)
                out[got] = row
                got += 1
        self._remember_rows(out, got)
        self._trim()

    cdef int check_policy(self) except -1:
        cdef const Row* rows = self.table.rows
        cdef int32_t group, row, first, ghost
        cdef Label label
        cdef Py_ssize_t num_resident = 0
        known = {}
        kids = {}
        # Group 0 stands for the queue.
        self.values.check()
        self.aged.check(known)
        self.check_ghosts(self.memory)
        for group in [0, *known]:
            row = self.queue.last if group == 0 else self.aged.groups[group].tail
            first = 0
            if row != 0 and rows[row].next != 0:
                raise BlockStateError(f"invariant broken: group {group} goes on behind its tail")
            while row != 0:
                num_resident += 1
                label = self._place_of(row).label
                if rows[row].key == NULL or (
                        rows[row].list_idx != QUEUED if group == 0 else group_in(label) != group):
                    raise BlockStateError(f"invariant broken: row {row} is not of group {group}")
                if label != 0:
                    known[group_in(label)] -= 1
                if rows[row].prev != 0 and rows[rows[row].prev].next != row:
                    raise BlockStateError(f"invariant broken: row {row} is not its neighbour's")
                if self._place_of(row).parent != 0:
                    kids[self.members[row].parent_tag] = kids.get(self.members[row].parent_tag, 0) + 1
                first = row
                row = rows[row].prev
            if group == 0 and first != self.queue.first:
                raise BlockStateError(f"invariant broken: the oldest queued row is {first}, not {self.queue.first}")
        num_resident += self._check_unlisted(known, kids)
        if num_resident != self.table.num_resident:
            raise BlockStateError(
                f"invariant broken: {num_resident} members are resident, {self.table.num_resident} rows")
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if rows[row].key == NULL:
                continue
            # A parent that was stored again after a failed store does not count its older children.
            if self.members[row].kids > kids.get(<uint32_t> rows[row].hash, 0):
                raise BlockStateError(f"invariant broken: row {row} counts too many children")
        ghost = self.memory.ghosts[0].next
        while ghost != 0:
            group = group_in(self.memory.ghosts[ghost].state)
            if group not in known:
                raise BlockStateError(f"invariant broken: a remembered key is in group {group}, which is not there")
            known[group] -= 1
            ghost = self.memory.ghosts[ghost].next
        for group in known:
            if known[group] != 0:
                raise BlockStateError(f"invariant broken: group {group} counts {known[group]} members too many")
        return 0

    cdef Py_ssize_t _check_unlisted(self, dict known, dict kids) except -1:
        """Check the rows that are in no group's list, and return their number."""
        return 0


cdef void _find_absent(
    GittinsCachePolicy policy, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t* ghosts
) noexcept nogil:
    """Write the ghost of each key that is not resident, or 0."""
    cdef Py_ssize_t i
    for i in range(n + AHEAD):
        if i < n and rows[i] == 0:
            prefetch_ghost(policy.memory, hashes[i])
        if i >= AHEAD:
            ghosts[i - AHEAD] = policy.memory.find(hashes[i - AHEAD]) if rows[i - AHEAD] == 0 else 0


cdef int64_t _lowest_value(GittinsCachePolicy policy) noexcept nogil:
    """Return the value of the least valuable cell that holds resident blocks, or -1."""
    cdef int word
    for word in range((policy.values.num_ranked + 63) >> 6):
        if policy.aged.holders[word] != 0:
            return policy.values.value[policy.values.ranked[(word << 6) + lowest_bit(policy.aged.holders[word])]]
    return -1


cdef int32_t _group_to_join(GittinsCachePolicy policy, MadeGroup* made, int32_t cls, int32_t length) noexcept nogil:
    """Return the group of a class that a request may join."""
    cdef const Group* last = &policy.aged.groups[made.group]
    if (made.group == 0 or last.serial != made.serial or last.num_known == 0
            or policy.aged.cohorts[last.cohort].bin != 0 or policy.aged.cohorts[last.cohort].cls != cls):
        made.group = policy.aged.make_group(cls, length)
        made.serial = policy.aged.groups[made.group].serial
    return made.group


cdef inline RequestState* _state_of(GittinsCachePolicy policy, RequestKeys request) noexcept nogil:
    return <RequestState*> request.policy_state


cdef RequestState* _open_state(GittinsCachePolicy policy, RequestKeys request) noexcept nogil:
    """Return the state of a request. Its first use counts as a touch."""
    cdef RequestState* state = _state_of(policy, request)
    if state.era != policy.era:
        memset(state, 0, sizeof(RequestState))
        state.era = policy.era
        state.all_known = True
        policy.touches += 1
        if policy.touches % TOUCHES_PER_TABLE == 0:
            policy.values.rebuild()
            policy.aged.mark_holders()
    return state


cdef void _see_prefix(GittinsCachePolicy policy, RequestState* state, const int32_t* rows, Py_ssize_t n) noexcept nogil:
    """Decide whether the request continues an older one: it begins with all keys of that, but for one at most."""
    cdef Py_ssize_t i = 0
    cdef int32_t group
    if not state.all_known:
        return
    while i < n and policy._label_of(rows[i], policy.found[i]) != 0:
        i += 1
    state.all_known = i == n
    state.num_leading += <int32_t> i
    if i > 0 and not state.continues:
        group = group_in(policy._label_of(rows[i - 1], policy.found[i - 1]))
        state.continues = state.num_leading + 1 >= policy.aged.groups[group].length


cdef void _move_keys(
    GittinsCachePolicy policy, RequestKeys request, RequestState* state, const int32_t* rows, const uint64_t* hashes,
    const int32_t* places, Py_ssize_t n, int32_t length
) noexcept nogil:
    """Move each key from its group to the request's group of its class."""
    cdef Py_ssize_t i
    cdef int32_t cls
    cdef int sharing, num_widened = 0 if state.continues else _num_widened(policy)
    cdef int32_t cls_of_hint = request.next_use * CLASSES_PER_HINT
    cdef bint ends = request.next_use == END
    cdef bint splits = policy.values.splits_shared and (request.next_use == 0 or ends)
    cdef int64_t lowest = _lowest_value(policy) if policy.queue.first != 0 else 0
    cdef Leaving leaving
    cdef Joining joining
    cdef MadeGroup[NUM_SHARED] shared
    cdef Label label
    # A key leaves before it joins: the last key to leave frees its group, and the next key may get a new one.
    memset(&leaving, 0, sizeof(leaving))
    memset(&joining, 0, sizeof(joining))
    memset(shared, 0, sizeof(shared))
    for i in range(n):
        label = _leave(policy, rows[i], policy.found[i], &leaving)
        sharing = sharing_in(label)
        sharing += label != 0 and sharing < num_widened
        if splits and sharing > 0:
            cls = (sharing - 1) >> 2
            policy._join(&joining, &shared[cls], FIRST_SHARED + cls, length)
        else:
            cls = 4 * state.continues + 2 * (not policy._is_last(request, places[i], i == n - 1)) + (label != 0)
            # The end of a session is not that of blocks which other sessions have used.
            policy._join(&joining, &state.groups[cls], cls if ends and sharing > 0 else cls_of_hint + cls, length)
        label = joining.group | sharing << SHARING_SHIFT
        if rows[i] != 0:
            _label_row(policy, rows[i], label, lowest)
        else:
            request.uses[places[i]].note = _label_ghost(policy, policy.found[i], hashes[i], label)
    add_known(policy.aged, joining.group, joining.num_keys)
    _count_hits(policy, &leaving)


cdef inline Label _leave(GittinsCachePolicy policy, int32_t row, int32_t ghost, Leaving* leaving) noexcept nogil:
    """Take a used key out of its group, and return its label, or 0 if it is unknown."""
    cdef Label label = policy._label_of(row, ghost)
    # A queued row is not linked in its group. It stays where it is, for now.
    if row != 0 and policy.table.rows[row].list_idx == GROUPED:
        policy._unlink(row)
    if label != 0:
        if group_in(label) != leaving.group:
            _count_hits(policy, leaving)
            leaving.group = group_in(label)
            leaving.num_keys = leaving.num_shared = 0
        leaving.num_keys += 1
        leaving.num_shared += sharing_in(label) >= WIDELY_SHARED
    return label


cdef inline void _label_row(GittinsCachePolicy policy, int32_t row, Label label, int64_t lowest) noexcept nogil:
    """Append a used row to its new group. A queued row leaves the queue if it is worth more than `lowest`."""
    if policy.table.rows[row].list_idx == GROUPED:
        policy._append(label, row, GROUPED)
    elif policy.values.value[class_of(policy.aged, group_in(label)) * NUM_BINS] > lowest:
        policy._unlink(row)
        policy._append(label, row, GROUPED)
        count_rows(policy.table, QUEUED, -1)
        count_rows(policy.table, GROUPED, 1)
    else:
        policy._place_of(row).label = label


cdef inline int32_t _label_ghost(GittinsCachePolicy policy, int32_t ghost, uint64_t hash, Label label) noexcept nogil:
    """Move a used key that is not resident to the end of the memory, and return its ghost."""
    if ghost == 0:
        return policy._remember(hash, label)
    policy.memory.refresh(ghost)
    policy.memory.ghosts[ghost].state = label
    return ghost


cdef inline int _num_widened(GittinsCachePolicy policy) noexcept nogil:
    """Return the sharing below which this use raises it: sharing n with probability 1 / 2**((n + 1) // 2)."""
    cdef uint32_t draw = <uint32_t> (policy.touches * <uint64_t> 2654435761)
    return min(MOST_SHARING, 2 * (32 - bit_length(draw)) + 1)


cdef inline void _count_hits(GittinsCachePolicy policy, const Leaving* leaving) noexcept nogil:
    """Count the uses of a run of keys, which leave their group."""
    cdef const Cohort* cohort
    if leaving.num_keys != 0:
        cohort = &policy.aged.cohorts[policy.aged.groups[leaving.group].cohort]
        count_hits(policy.values, cohort.cls, cohort.bin, leaving.num_keys, leaving.num_shared)
        leave_group(policy.aged, leaving.group, leaving.num_keys)


cdef void _read_time(GittinsCachePolicy policy) noexcept nogil:
    cdef int64_t now_ms = policy.now_ns // 1_000_000
    cdef int64_t now
    if policy.start_ms < 0:
        policy.start_ms = now_ms
    now = (now_ms - policy.start_ms) >> TICK_SHIFT
    if now > policy.aged.now:
        policy.aged.now = <int32_t> now


cdef Py_ssize_t _without_holes(
    GittinsCachePolicy policy, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n
) noexcept nogil:
    """Return the number of keys before the first whose predecessor is neither resident nor among them."""
    cdef Py_ssize_t i, num_taken = n
    cdef int32_t before
    for i in range(n):
        before = names.uses[places[i]].before - 1
        if before >= 0 and not names.uses[before].is_taken and names.row_now(policy.table, before) == 0:
            num_taken = i
            break
        names.uses[places[i]].is_taken = True
    for i in range(num_taken):
        names.uses[places[i]].is_taken = False
    return num_taken


cdef Py_ssize_t _make_way(
    GittinsCachePolicy policy, RequestKeys names, const Py_ssize_t* waiting, Py_ssize_t n, bint is_move, bint is_whole,
    int32_t* victims
) noexcept nogil:
    """Select up to `n` victims, whatever the values of the waiting keys. Return their number.

    Keys worth more than a grouped block replace it. The other keys are queued, as are all keys of a move.
    """
    cdef Py_ssize_t share = max(1, policy.table.cache_capacity // QUEUED_SHARE)
    cdef Py_ssize_t num_over = policy.table.num_in_list[QUEUED] - share
    cdef Py_ssize_t got = _choose_queued(policy, names, min(n, num_over), is_whole, victims)
    if not is_move:
        if got < n:
            got += _choose(policy, names, waiting + got, n - got, is_whole, True, victims + got)
        policy.num_grouped += got - n
    num_over = policy.table.num_in_list[QUEUED] + n - got - share
    got += _choose_queued(policy, names, min(n - got, num_over), is_whole, victims + got)
    if got < n:
        got += _choose(policy, names, waiting, n - got, is_whole, False, victims + got)
    return got + _choose_queued(policy, names, n - got, is_whole, victims + got)


cdef Py_ssize_t _choose_queued(
    GittinsCachePolicy policy, RequestKeys names, Py_ssize_t n, bint is_whole, int32_t* victims
) noexcept nogil:
    """Select up to `n` queued victims, oldest first. Return their number."""
    cdef Py_ssize_t got = 0
    cdef int32_t row, next = policy.queue.first
    while next != 0 and got < n:
        row = next
        next = policy.table.rows[row].next
        if policy._may_leave(names, row, is_whole):
            _evict(policy, row)
            victims[got] = row
            got += 1
    return got


cdef Py_ssize_t _choose(
    GittinsCachePolicy policy, RequestKeys names, const Py_ssize_t* waiting, Py_ssize_t n, bint is_whole, bint by_worth,
    int32_t* victims
) noexcept nogil:
    """Select up to `n` grouped victims. `by_worth`: each is worth less than the waiting key that replaces it.

    Return their number. `is_whole`: the call names all keys of the request, and the resident ones are marked.
    """
    cdef Py_ssize_t got = 0, got_before = -1
    cdef int word, num_left = MOST_PASSED
    cdef uint64_t bits
    cdef int32_t cell, cohort, group, next_cohort, next, tail
    cdef int64_t worth = _worth_of(policy, names, waiting[0]) if by_worth else INT64_MAX
    cdef int64_t value
    # Evictions change which groups come next: walk again until a walk evicts nothing.
    while got > got_before:
        got_before = got
        for word in range((policy.values.num_ranked + 63) >> 6):
            bits = policy.aged.holders[word]
            while bits != 0:
                cell = policy.values.ranked[(word << 6) + lowest_bit(bits)]
                bits &= bits - 1
                value = policy.values.value[cell]
                if worth <= value:
                    return got
                next_cohort = policy.aged.queues[HOLDERS][cell].first
                while next_cohort != 0:
                    cohort = next_cohort
                    next_cohort = policy.aged.cohorts[cohort].next[HOLDERS]
                    next = policy.aged.cohorts[cohort].groups[HOLDERS].first
                    while next != 0:
                        group = next
                        next = policy.aged.groups[group].next[HOLDERS]
                        tail = policy.aged.groups[group].tail
                        while tail != 0 and policy._may_leave(names, tail, is_whole):
                            if worth <= value:
                                return got
                            _evict(policy, tail)
                            victims[got] = tail
                            got += 1
                            if got == n:
                                return got
                            if by_worth:
                                worth = _worth_of(policy, names, waiting[got])
                            tail = policy.aged.groups[group].tail
                        if tail != 0:
                            num_left -= 1
                            policy.num_passed += 1
                            if num_left == 0:
                                return got
    return got


cdef inline int64_t _worth_of(GittinsCachePolicy policy, RequestKeys names, Py_ssize_t place) noexcept nogil:
    cdef int32_t group = group_in(policy.memory.ghosts[names.uses[place].note].state)
    return policy.values.value[class_of(policy.aged, group) * NUM_BINS]


cdef inline void _evict(GittinsCachePolicy policy, int32_t tail) noexcept nogil:
    """Remove a victim from its group, and prefetch data for the next victim and for the release."""
    prefetch(&policy.members[policy.table.rows[tail].prev])
    # Keys of a prompt are mostly in consecutive rows.
    prefetch(&policy.table.rows[max(tail - 5, 0)])
    prefetch(&policy.members[max(tail - 8, 0)])
    prefetch(policy.table.rows[tail].key)
    _detach_row(policy, tail)


cdef inline void _detach_row(GittinsCachePolicy policy, int32_t row) noexcept nogil:
    """Remove a row from its group and its parent. Its key stays known."""
    count_rows(policy.table, policy.table.rows[row].list_idx, -1)
    policy._unlink(row)
    policy._leave_parent(row)


CachePolicy.register(GittinsCachePolicy)
