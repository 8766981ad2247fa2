"""AgedGroups: known keys in groups, by class and age. Groups of a class that were created together age together.

Compiled because every use creates, leaves and links groups, and up to 256 groups age within one call.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvcache.policies.gittins.values cimport count_survivors

from kvcache.block import BlockStateError

cdef enum:
    AGEING_STEPS = 256          # groups that one use moves to their next bin; the rest waits for the next use
    MOST_NEIGHBOURS = 512       # groups visited in each direction to find a group's place among the holders
    NEVER = 0x7fffffff

ctypedef fused Linked:
    Group
    Cohort


cdef inline void insert(Linked* items, int which, Queue* queue, int32_t item, int32_t prev) noexcept nogil:
    """Link an item behind `prev`, which is in the queue; 0: first."""
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
    """Unlink an item from its queue."""
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


@cython.final
cdef class AgedGroups:
    """AgedGroups(values)

    Groups of known keys, in cohorts, in cells of class and age.

    `values` counts the keys that outlive an age bin. The order of `holders` follows its ranks.
    """

    def __cinit__(self, ValueTable values not None):
        self.values = values

    def __dealloc__(self):
        free(self.groups)
        free(self.cohorts)

    cdef int grow(self, int64_t size) except -1:
        """Make room for `size - 1` groups, and for one cohort per group."""
        cdef void* block = NULL
        if size <= MOST_GROUPS:
            block = realloc(self.groups, size * sizeof(Group))
        if block != NULL:
            self.groups = <Group*> block
            block = realloc(self.cohorts, size * sizeof(Cohort))
        if block == NULL:
            raise MemoryError(f"no memory for {size} groups")
        self.cohorts = <Cohort*> block
        self.size = <int32_t> size
        return 0

    cdef void clear(self) noexcept nogil:
        cdef int cell
        self.groups_fresh = 1
        self.groups_free = 0
        self.num_groups = 0
        self.cohorts_fresh = 1
        self.cohorts_free = 0
        memset(self.queues, 0, sizeof(self.queues))
        memset(self.youngest, 0, sizeof(self.youngest))
        for cell in range(NUM_CELLS):
            self.ends[cell] = NEVER
        memset(self.holders, 0, sizeof(self.holders))
        memset(self.due, 0, sizeof(self.due))
        self.now = 0

    cdef int32_t make_group(self, int32_t cls, int32_t length) noexcept nogil:
        """Create an empty group, the youngest of its class."""
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
        # Groups of one tick and class age together, so one cohort moves between cells instead of each group.
        if cohort == 0 or self.cohorts[cohort].t0 != self.now:
            cohort = _make_cohort(self, cls)
        made = &self.groups[group]
        self.last_number += 1
        made.number = self.last_number
        made.length = length
        made.num_known = 0
        made.tail = 0
        made.cohort = cohort
        queue = &self.cohorts[cohort].groups[ALL]
        insert(self.groups, ALL, queue, group, queue.last)
        self.cohorts[cohort].num_groups += 1
        self.num_groups += 1
        return group

    cdef void free_group(self, int32_t group) noexcept nogil:
        """Free an empty group."""
        cdef Group* groups = self.groups
        cdef Cohort* cohort = &self.cohorts[groups[group].cohort]
        take_out(groups, ALL, &cohort.groups[ALL], group)
        cohort.num_groups -= 1
        if cohort.num_groups == 0:
            _free_cohort(self, groups[group].cohort)
        groups[group].serial += 1
        groups[group].prev[ALL] = self.groups_free
        self.groups_free = group
        self.num_groups -= 1

    cdef void age(self) noexcept nogil:
        """Move cohorts that have outlived their bin to the next one, at most 256 groups in all."""
        cdef int32_t cell, due
        cdef int cls, num_left = AGEING_STEPS
        for cls in range(NUM_CLASSES):
            if self.now < self.due[cls]:
                continue
            due = NEVER
            # In ascending order: a cohort that was moved to the next bin may be late there, too.
            for cell in range(cls * NUM_BINS, (cls + 1) * NUM_BINS):
                num_left = _age_cell(self, cell, num_left)
                if num_left < 0:
                    self.due[cls] = 0  # more are late
                    return
                due = min(due, self.ends[cell])
            self.due[cls] = due

    cdef void link_holder(self, int32_t group) noexcept nogil:
        """Link a group with its first resident member into its cohort's holders, by age."""
        cdef Queue* queue = &self.cohorts[self.groups[group].cohort].groups[HOLDERS]
        cdef int32_t prev = queue.last
        cdef int _step
        if prev == 0:
            _link_cohort(self, self.groups[group].cohort)
        # Mostly it is the youngest. After 512 steps, the place is close enough.
        for _step in range(MOST_NEIGHBOURS):
            if prev == 0 or <int32_t> (self.groups[prev].number - self.groups[group].number) < 0:
                break
            prev = self.groups[prev].prev[HOLDERS]
        insert(self.groups, HOLDERS, queue, group, prev)

    cdef void unlink_holder(self, int32_t group) noexcept nogil:
        """Unlink a group from its cohort's holders."""
        cdef int32_t cohort = self.groups[group].cohort
        cdef Queue* queue = &self.cohorts[cohort].groups[HOLDERS]
        take_out(self.groups, HOLDERS, queue, group)
        if queue.first == 0:
            _unlink_cohort(self, cohort)

    cdef void mark_holders(self) noexcept nogil:
        """Recompute the set of cells with resident blocks, because the ranks have changed."""
        cdef int rank
        memset(self.holders, 0, sizeof(self.holders))
        for rank in range(self.values.num_ranked):
            if self.queues[HOLDERS][self.values.ranked[rank]].first != 0:
                self.holders[rank >> 6] |= <uint64_t> 1 << (rank & 63)

    cdef list listed(self, BlockTable table):
        """Return (class, bin, resident keys in path order) of each group, the oldest of a cell first."""
        cdef int32_t cell, cohort, group, row
        lists = []
        for cell in range(self.values.num_ranked):
            cohort = self.queues[HOLDERS][cell].first
            while cohort != 0:
                group = self.cohorts[cohort].groups[HOLDERS].first
                while group != 0:
                    keys = []
                    row = self.groups[group].tail
                    while row != 0:
                        keys.append(<object> table.rows[row].key)
                        row = table.rows[row].prev
                    lists.append((cell // NUM_BINS, cell % NUM_BINS, keys[::-1]))
                    group = self.groups[group].next[HOLDERS]
                cohort = self.cohorts[cohort].next[HOLDERS]
        return lists

    cdef int check(self, dict known) except -1:
        """Check all links. Raise BlockStateError if one is wrong. Write the known keys of each group to `known`."""
        cdef int32_t cell, cohort, next, rank
        cdef Py_ssize_t num_groups = 0
        for cell in range(NUM_CELLS):
            holders = []
            youngest = None
            cohort = self.queues[ALL][cell].first
            while cohort != 0:
                if self.cohorts[cohort].num_groups <= 0 or cell_of(&self.cohorts[cohort]) != cell:
                    raise BlockStateError(f"invariant broken: cohort {cohort} is astray in cell {cell}")
                if youngest is not None and self.cohorts[cohort].t0 < youngest:
                    raise BlockStateError(f"invariant broken: cohort {cohort} is out of order")
                youngest = self.cohorts[cohort].t0
                next = self.cohorts[cohort].next[ALL]
                if not (self.cohorts[next].prev[ALL] == cohort
                        if next != 0 else self.youngest[cell // NUM_BINS] == cohort):
                    raise BlockStateError(f"invariant broken: cohort {cohort} is not its neighbour's neighbour")
                num_groups += _check_cohort(self, cohort, known)
                if self.cohorts[cohort].groups[HOLDERS].first != 0:
                    holders.append(cohort)
                cohort = 0 if cohort == self.queues[ALL][cell].last else next
            listed = []
            cohort = self.queues[HOLDERS][cell].first
            while cohort != 0:
                listed.append(cohort)
                cohort = self.cohorts[cohort].next[HOLDERS]
            if not (cell % NUM_BINS == NUM_BINS - 1 or self.queues[ALL][cell].first == 0
                    or self.due[cell // NUM_BINS] <= self.ends[cell]
                    == self.cohorts[self.queues[ALL][cell].first].t0 + self.values.edges[cell % NUM_BINS + 1]):
                raise BlockStateError(f"invariant broken: cell {cell} ages too late")
            if sorted(listed) != sorted(holders):
                raise BlockStateError(f"invariant broken: cell {cell} lists {listed}, {holders} have resident members")
            if self.values.is_in_use(cell // NUM_BINS):
                rank = self.values.rank_of[cell]
                if (self.holders[rank >> 6] >> (rank & 63) & 1) != (listed != []):
                    raise BlockStateError(f"invariant broken: cell {cell} is marked wrongly")
        if num_groups != self.num_groups:
            raise BlockStateError(f"invariant broken: {num_groups} groups are linked, {self.num_groups} counted")
        return 0


cdef int32_t _make_cohort(AgedGroups aged, int32_t cls) noexcept nogil:
    """Append an empty cohort of this tick to a class."""
    cdef int32_t cohort = _take_cohort(aged)
    cdef int32_t prev = aged.youngest[cls]
    cdef Cohort* made = &aged.cohorts[cohort]
    made.t0 = aged.now
    aged.due[cls] = min(aged.due[cls], aged.now + aged.values.edges[1])
    made.cls = <uint8_t> cls
    made.prev[ALL] = prev
    if prev != 0:
        aged.cohorts[prev].next[ALL] = cohort
    aged.youngest[cls] = cohort
    _enter_cell(aged, cell_of(made), cohort)
    return cohort


cdef int32_t _take_cohort(AgedGroups aged) noexcept nogil:
    # Room is guaranteed: there are at most as many cohorts as groups.
    cdef int32_t cohort = aged.cohorts_free
    if cohort != 0:
        aged.cohorts_free = aged.cohorts[cohort].prev[ALL]
    else:
        cohort = aged.cohorts_fresh
        aged.cohorts_fresh += 1
    memset(&aged.cohorts[cohort], 0, sizeof(Cohort))
    return cohort


cdef void _free_cohort(AgedGroups aged, int32_t cohort) noexcept nogil:
    """Free an empty cohort."""
    cdef Cohort* cohorts = aged.cohorts
    cdef int32_t prev = cohorts[cohort].prev[ALL]
    cdef int32_t next = cohorts[cohort].next[ALL]
    _leave_cell(aged, cell_of(&cohorts[cohort]), cohort)
    if prev != 0:
        cohorts[prev].next[ALL] = next
    if next != 0:
        cohorts[next].prev[ALL] = prev
    else:
        aged.youngest[cohorts[cohort].cls] = prev
    cohorts[cohort].prev[ALL] = aged.cohorts_free
    aged.cohorts_free = cohort


cdef int32_t _split_cohort(AgedGroups aged, int32_t cohort, int32_t n) noexcept nogil:
    """Move the first `n` groups, but not all, of its cell's oldest cohort to a new cohort before it."""
    cdef int32_t older = _take_cohort(aged)
    cdef Cohort* source = &aged.cohorts[cohort]
    cdef Cohort* made = &aged.cohorts[older]
    cdef int32_t group = source.groups[ALL].first
    cdef int32_t last = 0, _i
    made.t0 = source.t0
    made.cls = source.cls
    made.bin = source.bin
    made.prev[ALL] = source.prev[ALL]
    made.next[ALL] = cohort
    if source.prev[ALL] != 0:
        aged.cohorts[source.prev[ALL]].next[ALL] = older
    source.prev[ALL] = older
    aged.queues[ALL][cell_of(source)].first = older
    made.groups[ALL].first = group
    for _i in range(n):
        # A group with resident blocks is listed under its cohort: it leaves the old list before its cohort changes.
        if aged.groups[group].tail != 0:
            aged.unlink_holder(group)
        aged.groups[group].cohort = older
        made.num_known += aged.groups[group].num_known
        if aged.groups[group].tail != 0:
            aged.link_holder(group)
        last = group
        group = aged.groups[group].next[ALL]
    made.groups[ALL].last = last
    source.groups[ALL].first = group
    aged.groups[last].next[ALL] = 0
    aged.groups[group].prev[ALL] = 0
    made.num_groups = n
    source.num_groups -= n
    source.num_known -= made.num_known
    return older


cdef inline void _enter_cell(AgedGroups aged, int32_t cell, int32_t cohort) noexcept nogil:
    """Add a cohort, the youngest of its cell, to the cell."""
    cdef Queue* queue = &aged.queues[ALL][cell]
    if queue.first == 0:
        _set_oldest(aged, cell, cohort)
    queue.last = cohort


cdef inline void _leave_cell(AgedGroups aged, int32_t cell, int32_t cohort) noexcept nogil:
    cdef Queue* queue = &aged.queues[ALL][cell]
    if queue.first == queue.last:
        queue.first = queue.last = 0
        aged.ends[cell] = NEVER
    elif queue.first == cohort:
        _set_oldest(aged, cell, aged.cohorts[cohort].next[ALL])
    elif queue.last == cohort:
        queue.last = aged.cohorts[cohort].prev[ALL]


cdef inline void _set_oldest(AgedGroups aged, int32_t cell, int32_t cohort) noexcept nogil:
    aged.queues[ALL][cell].first = cohort
    aged.ends[cell] = NEVER
    if cell % NUM_BINS < NUM_BINS - 1:
        aged.ends[cell] = aged.cohorts[cohort].t0 + aged.values.edges[cell % NUM_BINS + 1]


cdef inline int _age_cell(AgedGroups aged, int32_t cell, int num_left) noexcept nogil:
    """Move a cell's late cohorts to its next bin. Return how many groups may still move, or -1 if some must wait."""
    cdef int32_t cohort
    while aged.ends[cell] <= aged.now:
        cohort = aged.queues[ALL][cell].first
        if aged.cohorts[cohort].num_groups > num_left:
            if num_left == 0:
                return -1
            cohort = _split_cohort(aged, cohort, num_left)
        num_left -= aged.cohorts[cohort].num_groups
        aged.num_aged += aged.cohorts[cohort].num_groups
        count_survivors(aged.values, cell, aged.cohorts[cohort].num_known)
        _move_to_next_bin(aged, cell, cohort)
    return num_left


cdef inline void _move_to_next_bin(AgedGroups aged, int32_t cell, int32_t cohort) noexcept nogil:
    """Move the oldest cohort of a cell. In its class, it already follows the youngest cohort of the next bin."""
    cdef bint is_holder = aged.cohorts[cohort].groups[HOLDERS].first != 0
    _leave_cell(aged, cell, cohort)
    if is_holder:
        _unlink_cohort(aged, cohort)
    aged.cohorts[cohort].bin += 1
    _enter_cell(aged, cell + 1, cohort)
    if is_holder:
        _link_cohort(aged, cohort)


cdef void _link_cohort(AgedGroups aged, int32_t cohort) noexcept nogil:
    """Link a cohort into its cell's holders, by age."""
    cdef int32_t cell = cell_of(&aged.cohorts[cohort])
    cdef int32_t rank = aged.values.rank_of[cell]
    cdef Queue* queue = &aged.queues[HOLDERS][cell]
    cdef int32_t prev = queue.last
    cdef int _step
    cdef uint32_t number = aged.groups[aged.cohorts[cohort].groups[ALL].first].number
    # By the oldest group: parts of one cohort, which aged in two calls, are of the same time.
    for _step in range(MOST_NEIGHBOURS):
        if prev == 0 or <int32_t> (aged.groups[aged.cohorts[prev].groups[ALL].first].number - number) < 0:
            break
        prev = aged.cohorts[prev].prev[HOLDERS]
    insert(aged.cohorts, HOLDERS, queue, cohort, prev)
    aged.holders[rank >> 6] |= <uint64_t> 1 << (rank & 63)


cdef void _unlink_cohort(AgedGroups aged, int32_t cohort) noexcept nogil:
    cdef int32_t cell = cell_of(&aged.cohorts[cohort])
    cdef Queue* queue = &aged.queues[HOLDERS][cell]
    cdef int32_t rank = aged.values.rank_of[cell]
    take_out(aged.cohorts, HOLDERS, queue, cohort)
    if queue.first == 0:
        aged.holders[rank >> 6] &= ~(<uint64_t> 1 << (rank & 63))


cdef Py_ssize_t _check_cohort(AgedGroups aged, int32_t cohort, dict known) except -1:
    """Write the known keys of each group of a cohort to `known`, and return the number of groups."""
    cdef int32_t group = aged.cohorts[cohort].groups[ALL].first, last = 0
    cdef Py_ssize_t num_known = 0
    groups = []
    holders = []
    while group != 0:
        if aged.groups[group].num_known <= 0 or aged.groups[group].cohort != cohort:
            raise BlockStateError(f"invariant broken: group {group} is astray in cohort {cohort}")
        if aged.groups[group].prev[ALL] != last:
            raise BlockStateError(f"invariant broken: group {group} is not its neighbour's neighbour")
        groups.append(group)
        known[group] = aged.groups[group].num_known
        num_known += aged.groups[group].num_known
        if aged.groups[group].tail != 0:
            holders.append(group)
        last = group
        group = aged.groups[group].next[ALL]
    if last != aged.cohorts[cohort].groups[ALL].last:
        raise BlockStateError(f"invariant broken: cohort {cohort} ends with another group than {last}")
    if num_known != aged.cohorts[cohort].num_known:
        raise BlockStateError(f"invariant broken: cohort {cohort} counts other keys than {num_known}")
    if len(groups) != aged.cohorts[cohort].num_groups:
        raise BlockStateError(f"invariant broken: cohort {cohort} counts other groups than {groups}")
    listed = []
    group = aged.cohorts[cohort].groups[HOLDERS].first
    while group != 0:
        listed.append(group)
        group = aged.groups[group].next[HOLDERS]
    if sorted(listed) != sorted(holders):
        raise BlockStateError(f"invariant broken: cohort {cohort} lists {listed}, {holders} have resident members")
    return len(groups)
