"""For the offline optimum: the place of each block's next use, and the blocks whose next use is nearest.

Compiled: it visits every block of every request of a trace, up to a billion.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

cdef extern from *:
    """
    static inline int kvcache_highest_bit(unsigned long long word) { return 63 - __builtin_clzll(word); }
    """
    int highest_bit "kvcache_highest_bit"(uint64_t word) noexcept nogil

cdef enum:
    LEVELS = 6  # 64 ** 6 places
    NO_NEXT = -1
    NAMED_BEFORE = -2

ctypedef struct Latest:
    int64_t id
    int64_t place  # plus one; 0 is an empty slot


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    # SplitMix64's finisher.
    x = (x ^ (x >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t> 0x94D049BB133111EB
    return x ^ (x >> 31)


@cython.final
cdef class NextUses:
    """NextUses(part=0, num_parts=1)

    Find the place of each id's next use, going through a trace from its end to its beginning.

    Of `num_parts` parts by the hash of the ids, only the ids of `part` are linked. `num_ids` counts different ids so
    far. Memory: 32 to 64 bytes for each of them, half as much again while the table grows.
    """
    cdef Latest* slots
    cdef int64_t mask
    cdef readonly int64_t num_ids
    cdef uint64_t part
    cdef uint64_t num_parts

    def __cinit__(self, part=0, num_parts=1):
        if not 0 <= part < num_parts < 1 << 16:
            raise ValueError(f"part must be in 0..num_parts-1 and num_parts < 2**16, got {part!r} and {num_parts!r}")
        self.part = part
        self.num_parts = num_parts
        self.mask = (1 << 12) - 1
        self.slots = <Latest*> calloc(self.mask + 1, sizeof(Latest))
        if self.slots == NULL:
            raise MemoryError("no memory for the ids of a trace")

    def __dealloc__(self):
        free(self.slots)

    def link(self, const int64_t[::1] ids, const int64_t[::1] bounds, int64_t[::1] nexts):
        """Take requests that precede those taken before, and write the next use of each id to `nexts`.

        `bounds` holds the place in the trace where each request begins, and the end of the last one. `nexts` receives
        the place where the next request names the id: -1 without one, -2 if the same request has named it before.
        """
        cdef int64_t request, place, first, begin
        cdef Latest* slot
        cdef uint64_t hashed
        if bounds.shape[0] < 1 or nexts.shape[0] != ids.shape[0]:
            raise ValueError(f"{ids.shape[0]} ids need as many nexts, got {nexts.shape[0]}")
        first = bounds[0]
        if bounds[bounds.shape[0] - 1] - first != ids.shape[0]:
            raise ValueError(f"bounds must span {ids.shape[0]} places, got {first}..{bounds[bounds.shape[0] - 1]}")
        place = first + ids.shape[0]
        for request in range(bounds.shape[0] - 2, -1, -1):
            begin = bounds[request]
            if not first <= begin <= place:
                raise ValueError(f"bounds must ascend, got {begin} before {place}")
            while place > begin:
                place -= 1
                hashed = mix(<uint64_t> ids[place - first])
                if self.num_parts > 1 and (hashed >> 32) % self.num_parts != self.part:
                    continue
                if 2 * self.num_ids > self.mask:
                    self.grow()
                slot = self.find(ids[place - first], hashed)
                if slot.place == 0:
                    self.num_ids += 1
                    slot.id = ids[place - first]
                    nexts[place - first] = NO_NEXT
                elif slot.place - 1 < bounds[request + 1]:
                    # A later mention in the same request: what follows it follows this one.
                    nexts[place - first] = nexts[slot.place - 1 - first]
                    nexts[slot.place - 1 - first] = NAMED_BEFORE
                else:
                    nexts[place - first] = slot.place - 1
                slot.place = place + 1

    cdef inline Latest* find(self, int64_t id, uint64_t hashed) noexcept nogil:
        # At least half of the slots are empty.
        cdef uint64_t at = hashed & self.mask
        while self.slots[at].place != 0 and self.slots[at].id != id:
            at = (at + 1) & self.mask
        return &self.slots[at]

    cdef int grow(self) except -1:
        cdef Latest* old = self.slots
        cdef int64_t i, size = self.mask + 1
        cdef Latest* wider = <Latest*> calloc(2 * size, sizeof(Latest))
        if wider == NULL:
            raise MemoryError(f"no memory for {2 * size} ids of a trace")
        self.slots = wider
        self.mask = 2 * size - 1
        for i in range(size):
            if old[i].place != 0:
                self.find(old[i].id, mix(<uint64_t> old[i].id))[0] = old[i]
        free(old)
        return 0


@cython.final
cdef class NearestUses:
    """NearestUses(num_places, room)

    Keep at most `room` next uses, the nearest ones.

    A use is a place in the trace. Places order by request, then by depth, so the smaller place is nearer and shallower.
    A set of bits holds the kept places; a tree of bits above it finds the farthest. Memory is `num_places` / 8 bytes
    and a little, at any room; about 10 ns a place.
    """
    cdef uint64_t* levels[LEVELS]
    cdef int depth
    cdef int64_t num_places
    cdef int64_t room
    cdef int64_t kept

    def __cinit__(self, num_places, room):
        if not 0 <= num_places < 1 << 36:
            raise ValueError(f"num_places must be in 0..2**36-1, got {num_places!r}")
        if room < 1:
            raise ValueError(f"room must be >= 1, got {room!r}")
        self.num_places = num_places
        self.room = room
        cdef int64_t words = num_places
        while True:
            words = (words + 63) >> 6 or 1
            self.levels[self.depth] = <uint64_t*> calloc(words, sizeof(uint64_t))
            if self.levels[self.depth] == NULL:
                raise MemoryError(f"no memory for {num_places} places")
            self.depth += 1
            if words == 1:
                break

    def __dealloc__(self):
        cdef int level
        for level in range(self.depth):
            free(self.levels[level])

    def step(self, const int64_t[::1] nexts, const int64_t[::1] bounds, int64_t[::1] hits, Py_ssize_t parts=1):
        """Take the next requests, and write the leading run of hits of each to `hits`.

        `nexts` holds the next use of the places from ``bounds[0]`` on, as `NextUses.link` writes it; `bounds` holds
        the place where each request begins, and the end of the last one. Each place is `parts` blocks.
        """
        cdef int64_t first, request, place, begin, end, part, after, count
        cdef int64_t num_places = self.num_places
        if bounds.shape[0] < 1 or hits.shape[0] != bounds.shape[0] - 1 or parts < 1:
            raise ValueError(f"{hits.shape[0]} requests need one bound more, got {bounds.shape[0]}; parts {parts}")
        first = bounds[0]
        if first < 0 or nexts.shape[0] != bounds[bounds.shape[0] - 1] - first:
            raise ValueError(f"nexts must have one item a place, got {nexts.shape[0]}")
        # Below, `place` is one of these.
        if bounds[bounds.shape[0] - 1] * parts > num_places:
            raise ValueError(f"places must be less than {num_places}, got {bounds[bounds.shape[0] - 1] * parts}")
        for request in range(hits.shape[0]):
            begin, end = bounds[request], bounds[request + 1]
            if not first <= begin <= end <= first + nexts.shape[0]:
                raise ValueError(f"bounds must ascend, got {begin} and {end}")
            count = 0
            place = begin
            while place < end:
                # A block that the request has named before was there: the run would have ended at it.
                if nexts[place - first] == NAMED_BEFORE:
                    count += parts
                    place += 1
                    continue
                part = 0
                while part < parts and self.holds(place * parts + part):
                    part += 1
                count += part
                if part < parts:
                    break
                place += 1
            hits[request] = count
            for place in range(begin * parts, end * parts):
                self.drop(place)
            for place in range(begin, end):
                after = nexts[place - first]
                if after < 0:
                    continue
                if after < end or (after + 1) * parts > num_places:
                    raise ValueError(f"the next use of place {place} must come later and in the trace, got {after}")
                for part in range(parts):
                    self.add(after * parts + part)
            while self.kept > self.room:
                self.drop(self.farthest())

    cdef inline bint holds(self, int64_t place) noexcept nogil:
        return (self.levels[0][place >> 6] >> (place & 63)) & 1

    cdef inline void add(self, int64_t place) noexcept nogil:
        cdef int level
        cdef uint64_t before
        for level in range(self.depth):
            before = self.levels[level][place >> 6]
            self.levels[level][place >> 6] = before | (<uint64_t> 1 << (place & 63))
            if level == 0:
                self.kept += not (before >> (place & 63)) & 1
            # The bits above a word that was not empty are already set.
            if before:
                return
            place >>= 6

    cdef inline void drop(self, int64_t place) noexcept nogil:
        cdef int level
        if not self.holds(place):
            return
        self.kept -= 1
        for level in range(self.depth):
            self.levels[level][place >> 6] &= ~(<uint64_t> 1 << (place & 63))
            if self.levels[level][place >> 6]:
                return
            place >>= 6

    cdef inline int64_t farthest(self) noexcept nogil:
        # Called with at least one place kept, so no word on the way down is empty.
        cdef int level
        cdef int64_t place = 0
        for level in range(self.depth - 1, -1, -1):
            place = (place << 6) | highest_bit(self.levels[level][place])
        return place
