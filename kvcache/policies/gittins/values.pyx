"""ValueTable: how often keys of each class and age were used again, and the resulting value of a block.

Compiled because each run of used keys is counted here, and all values are recomputed within a call.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

from kvcache.block import BlockStateError

cdef enum:
    FEWEST_AGAIN = 1024         # uses at these ages that are needed to estimate the share of widely shared keys
    MOST_AGAIN = 65536
    HALVING_TOTAL = 1 << 21
    MOST_CHANCE = 64512
    PRIOR = 4096                # weight of the counts over all classes against a class's own counts
    PRIOR_FEW = 512             # for shared blocks and the hint `end`, which differ most from all classes


@cython.final
cdef class ValueTable:
    """ValueTable()

    Counts of hits and survivors per class and age bin, the value of each such cell, and the order of the cells.

    A class is in use after its hint was first given, or after shared blocks were first split off. Cells of other
    classes have no rank.
    """

    def __cinit__(self):
        # 0, 2, 3, then four per octave: 4, 5, 6, 7, 8, 10, 12, 14, 16, ...
        cdef int b
        self.edges[0] = 0
        self.edges[1] = 2
        self.edges[2] = 3
        for b in range(3, NUM_BINS + 1):
            self.edges[b] = (4 + (b - 3) % 4) << (b - 3) // 4

    cdef void clear(self) noexcept nogil:
        """Clear all counts. Only the classes without a hint stay in use."""
        _forget_counts(self)
        self.num_again = self.num_shared = 0
        self.splits_shared = self.knows_shared = False
        self.num_hints = 1
        self.num_ranked = 0
        _take_up_classes(self, 0, CLASSES_PER_HINT)
        _work_out(self)

    cdef void rebuild(self) noexcept nogil:
        """Recompute all values and ranks. The caller updates all state that depends on ranks."""
        _judge_sharing(self)
        _work_out(self)

    cdef void take_up_hint(self, int32_t hint) noexcept nogil:
        """Start to use the classes of a hint that was not given before. Ranks change."""
        _take_up_classes(self, self.num_hints * CLASSES_PER_HINT, (hint + 1) * CLASSES_PER_HINT)
        self.num_hints = hint + 1

    cdef bint is_in_use(self, int cls) noexcept nogil:
        return self.knows_shared if cls >= FIRST_SHARED else cls < self.num_hints * CLASSES_PER_HINT

    cdef int check(self) except -1:
        """Check counts and ranks. Raise BlockStateError naming the broken invariant."""
        cdef int32_t cell
        cdef int64_t total = 0
        for cell in range(NUM_CELLS):
            total += self.hit[cell] + self.sur[cell] + _num_moved(self, cell)
            if self.is_in_use(cell // NUM_BINS) and self.ranked[self.rank_of[cell]] != cell:
                raise BlockStateError(f"invariant broken: cell {cell} has another rank")
        if total != self.total:
            raise BlockStateError(f"invariant broken: {total} are counted, the total is {self.total}")
        return 0


cdef void _forget_counts(ValueTable values) noexcept nogil:
    memset(values.hit, 0, sizeof(values.hit))
    memset(values.sur, 0, sizeof(values.sur))
    memset(values.moved, 0, sizeof(values.moved))
    values.total = 0


cdef inline int64_t _num_moved(ValueTable values, int cell) noexcept nogil:
    """Return how many keys late hints have moved from a cell."""
    cdef const int64_t* moved = &values.moved[cell * NUM_HINTS]
    return moved[1] + moved[2] + moved[3]


cdef void _judge_sharing(ValueTable values) noexcept nogil:
    """Split off shared blocks if over 9/16 of the uses after seconds are widely shared; merge them again below 3/8."""
    cdef bint splits
    if values.num_again >= FEWEST_AGAIN:
        splits = 16 * values.num_shared > (6 if values.splits_shared else 9) * values.num_again
        if splits and not values.splits_shared:
            # The counts so far are of classes that contained the shared blocks.
            _forget_counts(values)
            if not values.knows_shared:
                values.knows_shared = True
                _take_up_classes(values, FIRST_SHARED, NUM_CLASSES)
        values.splits_shared = splits
    if values.num_again >= MOST_AGAIN:
        values.num_again >>= 1
        values.num_shared >>= 1


cdef void _take_up_classes(ValueTable values, int first, int end) noexcept nogil:
    """Compute the values of classes that were not in use before, and rank them in the current table."""
    cdef int cls, b
    for cls in range(first, end):
        _value_class(values, cls)
        for b in range(NUM_BINS):
            values.ranked[values.num_ranked] = cls * NUM_BINS + b
            values.num_ranked += 1
    _rank_cells(values)


cdef void _work_out(ValueTable values) noexcept nogil:
    """Compute the value of each cell, and the order of the cells, from the counts."""
    cdef int cls, b, cell
    cdef int64_t chance = 4096
    cdef int64_t[NUM_BINS] num_hit
    cdef int64_t[NUM_BINS] num_sur
    memset(num_hit, 0, sizeof(num_hit))
    memset(num_sur, 0, sizeof(num_sur))
    # Old traffic counts less: the counts are halved each time they are full.
    if values.total >= HALVING_TOTAL:
        values.total = 0
        for cell in range(NUM_CELLS):
            values.hit[cell] >>= 1
            values.sur[cell] >>= 1
            for b in range(NUM_HINTS):
                values.moved[cell * NUM_HINTS + b] >>= 1
            values.total += values.hit[cell] + values.sur[cell] + _num_moved(values, cell)
    for cls in range(NUM_CLASSES):
        if values.is_in_use(cls):
            for b in range(NUM_BINS):
                num_hit[b] += values.hit[cls * NUM_BINS + b]
                num_sur[b] += values.sur[cls * NUM_BINS + b]
    for b in range(NUM_BINS):
        chance = ((num_hit[b] << 16) + 2048 * chance) // (num_hit[b] + num_sur[b] + 2048)
        values.chances[b] = chance
    for cls in range(NUM_CLASSES):
        if values.is_in_use(cls):
            _value_class(values, cls)
    _rank_cells(values)


cdef void _value_class(ValueTable values, int cls) noexcept nogil:
    cdef int64_t* hit = &values.hit[cls * NUM_BINS]
    cdef int64_t* sur = &values.sur[cls * NUM_BINS]
    cdef int64_t expected = 0, num_hit = 0, factor, guess, count, h, nu, de, s, leaves
    cdef bint is_end = cls // CLASSES_PER_HINT == END
    cdef int64_t weight = PRIOR_FEW if cls >= FIRST_SHARED or is_end else PRIOR
    # Until it is learned otherwise, no block is used after the hint `end`.
    cdef int64_t prior = 0 if is_end else 65536 if cls & 1 or cls >= FIRST_SHARED else 32768
    cdef int b, hint, cell, end = (cls + 1) * NUM_BINS, top = end, part
    cdef Part* parts = values.parts
    for b in range(NUM_BINS):
        expected += (hit[b] + sur[b] + _num_moved(values, cls * NUM_BINS + b)) * values.chances[b]
        num_hit += hit[b]
    expected >>= 16
    factor = ((num_hit << 16) + 1024 * prior) // (expected + 1024)
    # From the oldest bin to the newest: join a bin with older ones while waiting for them raises the uses per time.
    for b in range(NUM_BINS - 1, -1, -1):
        cell = cls * NUM_BINS + b
        guess = min(MOST_CHANCE, (factor * values.chances[b]) >> 16)
        count = hit[b] + sur[b] + _num_moved(values, cell) + weight
        h = min(MOST_CHANCE, ((hit[b] << 16) + weight * guess) // count)
        nu = h
        de = (values.edges[b + 1] - values.edges[b]) * (65536 - h // 2)
        s = 65536 - h
        # A late hint moves a part to another class, where it stays while that is worth more than its last value here.
        # After `end`, it is not used.
        for hint in range(END, NUM_HINTS):
            if values.moved[cell * NUM_HINTS + hint] != 0:
                leaves = min(s, (values.moved[cell * NUM_HINTS + hint] << 16) // count)
                s -= leaves
                part = values.first_part[hint * CLASSES_PER_HINT + cls % CLASSES_PER_HINT]
                while (hint != END and part < (hint * CLASSES_PER_HINT + cls % CLASSES_PER_HINT + 1) * NUM_BINS
                        and (parts[part].uses << 32) // parts[part].time > values.value[cell]):
                    nu += leaves * parts[part].uses >> 16
                    de += leaves * parts[part].time >> 16
                    leaves = leaves * parts[part].stays >> 16
                    part += 1
        while top < end and parts[top].uses * de > nu * parts[top].time:
            nu += s * parts[top].uses >> 16
            de += s * parts[top].time >> 16
            s = s * parts[top].stays >> 16
            top += 1
        top -= 1
        parts[top] = Part(nu, de, s)
        values.value[cell] = (nu << 32) // de
    values.first_part[cls] = top


cdef void _rank_cells(ValueTable values) noexcept nogil:
    """Order the cells by value, then by bin, descending, then by class."""
    cdef int32_t cell
    cdef int i, j
    cdef uint64_t[NUM_CELLS] ranks      # all three in one number; a value has at most 34 bits
    cdef uint64_t rank
    # Insertion sort: from one table to the next, few cells move.
    for i in range(values.num_ranked):
        cell = values.ranked[i]
        rank = <uint64_t> values.value[cell] << 16 | (NUM_BINS - cell % NUM_BINS) << 8 | cell // NUM_BINS
        j = i
        while j > 0 and rank < ranks[j - 1]:
            ranks[j] = ranks[j - 1]
            values.ranked[j] = values.ranked[j - 1]
            j -= 1
        ranks[j] = rank
        values.ranked[j] = cell
    for i in range(values.num_ranked):
        values.rank_of[values.ranked[i]] = i
