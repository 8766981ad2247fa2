"""RememberedKeys: a queue of key hashes by age, with a group for each, in about fourteen bytes a key.

Compiled because every use of an absent key looks here. Segments of sixteen keys, oldest first, save links between
keys. A segment names up to four groups, and each of its keys selects one of them with two bits. Neighbouring segments
that have become empty enough are merged. 48 bits of a key's keyed hash are kept. A search among n keys finds a wrong
key with a probability of n / 2**48 (1.4e-8 at 4,000,000); it then costs a wrong count, never a wrong block.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from kvcache.core.index cimport prefetch, zeroed
from kvcache.core.key_hash cimport hash_of

cdef extern from "remembered.h" nogil:
    uint32_t low_half "kv_low_half"(uint64_t hash) noexcept
    uint16_t tag_of "kv_place_tag"(uint64_t hash) noexcept
    uint32_t home_of "kv_place_home"(uint32_t low, uint32_t num_buckets) noexcept
    uint32_t bucket_after "kv_next_bucket"(uint32_t at, uint32_t num_buckets) noexcept
    uint32_t same_tags "kv_same_tags"(const Places* bucket, uint16_t tag) noexcept
    uint32_t num_passed_of "kv_num_passed"(const Places* bucket, uint32_t low) noexcept
    void places_insert "kv_places_insert"(Places* buckets, uint32_t num_buckets, uint64_t hash, int32_t place) noexcept
    void places_move "kv_places_move"(
        Places* buckets, uint32_t num_buckets, uint32_t low, int32_t before, int32_t now) noexcept
    void places_delete "kv_places_delete"(Places* buckets, uint32_t num_buckets, uint32_t low, int32_t place) noexcept

cdef extern from *:
    """
    #define kv_lowest(bits) __builtin_ctz(bits)
    #define kv_used_up_to(bits) ((bits) ? 32 - __builtin_clz(bits) : 0)
    """
    int lowest_bit "kv_lowest"(uint32_t bits) noexcept nogil
    int used_up_to "kv_used_up_to"(uint32_t bits) noexcept nogil

cdef enum:
    PLACE_SHIFT = 4             # SEGMENT_KEYS = 1 << PLACE_SHIFT
    PLACE_MASK = SEGMENT_KEYS - 1
    MOST_SEGMENTS = 1 << 27     # places are int32
    NOWHERE = -1


@cython.final
cdef class RememberedKeys:
    """RememberedKeys(num_keys)

    A queue of key hashes, oldest first, each with a group.

    Parameters
    ----------
    num_keys : int
        Keys that it has room for, >= 1; `reserve` makes more.
    """

    def __cinit__(self, Py_ssize_t num_keys):
        if num_keys < 1:
            raise ValueError(f"num_keys must be >= 1, got {num_keys}")
        self._grow_index(num_keys)
        # Room for half-full segments; pages stay untouched until used. Growing would copy megabytes.
        self._grow_segments(2 * (num_keys // SEGMENT_KEYS) + 8)
        self.clear()

    def __dealloc__(self):
        free(self.segments)
        free(self.buckets)

    def __reduce__(self):
        raise TypeError("remembered keys belong to one policy and cannot be pickled")

    def __len__(self):
        return self.num_keys

    def __contains__(self, key):
        return type(key) is bytes and self.find(hash_of(<PyObject*> key)) != 0

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room for `n` more keys, so that `append` and `renew` cannot fail."""
        # A segment is closed after at least four keys, one for each of its groups.
        cdef Py_ssize_t num_segments = self.num_in_use + n // SEGMENT_GROUPS + 4
        if self.num_keys + n > self.most_keys:
            self._grow_index(self.num_keys + n + (self.num_keys + n) // 8)
        if num_segments > self.num_segments:
            self._grow_segments(num_segments + num_segments // 8)
        return 0

    cdef int _grow_index(self, Py_ssize_t num_keys) except -1:
        cdef uint32_t num_buckets
        cdef Places* buckets
        cdef Places* before = self.buckets
        cdef Py_ssize_t i, slot, num_before = self.num_buckets
        if num_keys > <int64_t> SEGMENT_KEYS * MOST_SEGMENTS:
            raise MemoryError(f"no memory for {num_keys} remembered keys")
        num_buckets = <uint32_t> (num_keys // 9) + 1
        buckets = <Places*> zeroed(num_buckets * sizeof(Places))
        if buckets == NULL:
            raise MemoryError(f"no memory for {num_keys} remembered keys")
        for i in range(num_before):
            for slot in range(10):
                if before[i].tag[slot] != 0:
                    # The tag is the upper 16 bits of the hash, or 1 for 0: it produces the same tag again.
                    places_insert(
                        buckets, num_buckets,
                        <uint64_t> before[i].tag[slot] << 48 | self._low_at(before[i].place[slot]),
                        before[i].place[slot])
        free(before)
        self.buckets = buckets
        self.num_buckets = num_buckets
        self.most_keys = num_keys
        return 0

    cdef int _grow_segments(self, Py_ssize_t num_segments) except -1:
        cdef void* segments
        if num_segments > MOST_SEGMENTS:
            raise MemoryError(f"no memory for {num_segments} segments of remembered keys")
        segments = realloc(self.segments, num_segments * sizeof(Segment))
        if segments == NULL:
            raise MemoryError(f"no memory for {num_segments} segments of remembered keys")
        self.segments = <Segment*> segments
        self.num_segments = <int32_t> num_segments
        return 0

    cdef void clear(self) noexcept nogil:
        """Forget all keys."""
        memset(self.segments, 0, sizeof(Segment))
        memset(self.buckets, 0, self.num_buckets * sizeof(Places))
        self.num_fresh = 1
        self.free_head = 0
        self.num_in_use = 0
        self.num_keys = 0

    cdef inline uint32_t _low_at(self, int32_t place) noexcept nogil:
        return self.segments[place >> PLACE_SHIFT].low[place & PLACE_MASK]

    cdef void fetch(self, uint64_t hash) noexcept nogil:
        """Prefetch what `find` will read."""
        prefetch(&self.buckets[home_of(low_half(hash), self.num_buckets)])

    cdef void fetch_oldest(self) noexcept nogil:
        """Prefetch what `pop_oldest` will read, in the second oldest segment."""
        cdef int32_t segment = self.segments[self.segments[0].next].next
        cdef int i
        for i in range(used_up_to(self.segments[segment].held) if segment != 0 else 0):
            prefetch(&self.buckets[home_of(self.segments[segment].low[i], self.num_buckets)])
        prefetch(&self.segments[self.segments[segment].next])

    cdef int32_t find(self, uint64_t hash) noexcept nogil:
        """Return the place of a hash, or 0."""
        cdef uint32_t low = low_half(hash)
        cdef uint16_t tag = tag_of(hash)
        cdef uint32_t home = home_of(low, self.num_buckets)
        cdef uint32_t at = home
        cdef uint32_t same
        cdef int32_t place
        while True:
            same = same_tags(&self.buckets[at], tag)
            while same != 0:
                place = self.buckets[at].place[lowest_bit(same)]
                if self._low_at(place) == low:
                    return place
                same &= same - 1
            if num_passed_of(&self.buckets[at], low) == 0:
                return 0
            at = bucket_after(at, self.num_buckets)
            if at == home:
                return 0

    cdef void find_absent(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t* places
    ) noexcept nogil:
        """Write the place of each hash whose row is 0, or 0 if it is not remembered. Write 0 for the other hashes."""
        cdef Py_ssize_t i
        for i in range(n):
            if rows[i] == 0:
                prefetch(&self.buckets[home_of(low_half(hashes[i]), self.num_buckets)])
        for i in range(n):
            places[i] = self.find(hashes[i]) if rows[i] == 0 else 0

    cdef bint holds(self, int32_t place, uint64_t hash) noexcept nogil:
        """Return whether a place that a key once had still belongs to that key."""
        cdef int32_t segment = place >> PLACE_SHIFT
        return (0 < segment < self.num_fresh
                and self.segments[segment].held >> (place & PLACE_MASK) & 1
                and self.segments[segment].low[place & PLACE_MASK] == low_half(hash))

    cdef int32_t group_of(self, int32_t place) noexcept nogil:
        """Return the group of the key at a place."""
        cdef const Segment* segment = &self.segments[place >> PLACE_SHIFT]
        return segment.groups[segment.which >> 2 * (place & PLACE_MASK) & 3]

    cdef int32_t append(self, uint64_t hash, int32_t group) noexcept nogil:
        """Append a key that is not remembered yet, and return its place; `reserve` has made room."""
        cdef int32_t place = self._put_youngest(low_half(hash), group)
        places_insert(self.buckets, self.num_buckets, hash, place)
        self.num_keys += 1
        return place

    cdef void append_all(self, const HashInGroup* keys, Py_ssize_t n) noexcept nogil:
        """Append the keys that have a group."""
        cdef Py_ssize_t i
        for i in range(n):
            if keys[i].group != 0:
                self.append(keys[i].hash, keys[i].group)

    cdef int32_t renew(self, int32_t place, int32_t group) noexcept nogil:
        """Move a key to the youngest end, with a new group, and return its place; `reserve` has made room."""
        cdef uint32_t low = self._low_at(place)
        cdef int32_t now
        # Both steps may merge segments. Until then, mark the key with a place that no other key can have.
        places_move(self.buckets, self.num_buckets, low, place, NOWHERE)
        self._vacate(place)
        now = self._put_youngest(low, group)
        places_move(self.buckets, self.num_buckets, low, NOWHERE, now)
        return now

    cdef void remove(self, int32_t place) noexcept nogil:
        """Remove the key at a place. Keys of the neighbouring segments may move."""
        places_delete(self.buckets, self.num_buckets, self._low_at(place), place)
        self.num_keys -= 1
        self._vacate(place)

    cdef int32_t pop_oldest(self, Py_ssize_t most, Py_ssize_t* num_popped) noexcept nogil:
        """Remove the oldest key and the keys of its group that follow it, up to `most` or the segment's end.

        Return the group, and write the number of keys removed.
        """
        cdef int32_t at = self.segments[0].next
        cdef Segment* segment = &self.segments[at]
        cdef uint32_t held = segment.held
        cdef int i = lowest_bit(held)
        cdef int32_t group = segment.groups[segment.which >> 2 * i & 3]
        cdef Py_ssize_t count = 0
        while True:
            places_delete(self.buckets, self.num_buckets, segment.low[i], at << PLACE_SHIFT | i)
            count += 1
            held &= held - 1
            if held == 0:
                break
            i = lowest_bit(held)
            if count == most or segment.groups[segment.which >> 2 * i & 3] != group:
                break
        self.num_keys -= count
        segment.held = <uint16_t> held
        segment.num_held -= <uint8_t> count
        if held == 0:
            self._drop_segment(at)
        num_popped[0] = count
        return group

    cdef int32_t _put_youngest(self, uint32_t low, int32_t group) noexcept nogil:
        """Append a key to the youngest segment, and return its place."""
        cdef int32_t at = self.segments[0].prev
        cdef Segment* segment = &self.segments[at]
        cdef int which = 0, position = used_up_to(segment.held)
        if at != 0 and position < SEGMENT_KEYS:
            while which < segment.num_groups and segment.groups[which] != group:
                which += 1
            if which == SEGMENT_GROUPS:
                which = self._unused_group(segment)
                if which < SEGMENT_GROUPS:
                    segment.groups[which] = group
        else:
            which = SEGMENT_GROUPS
        if which == SEGMENT_GROUPS:
            if at != 0 and segment.prev != 0:
                self._merge(segment.prev, at)
            at = self._new_youngest()
            segment = &self.segments[at]
            which = position = 0
        if which == segment.num_groups:
            segment.groups[which] = group
            segment.num_groups += 1
        segment.low[position] = low
        segment.which = (segment.which & ~(<uint32_t> 3 << 2 * position)) | <uint32_t> which << 2 * position
        segment.held |= <uint16_t> (1 << position)
        segment.num_held += 1
        return at << PLACE_SHIFT | position

    cdef int _unused_group(self, const Segment* segment) noexcept nogil:
        """Return a group index of a segment that no key uses, or SEGMENT_GROUPS."""
        cdef uint32_t held = segment.held, in_use = 0
        while held != 0:
            in_use |= 1 << (segment.which >> 2 * lowest_bit(held) & 3)
            held &= held - 1
        return lowest_bit(~in_use)

    cdef int32_t _new_youngest(self) noexcept nogil:
        cdef int32_t last = self.segments[0].prev
        cdef int32_t at = self.free_head
        cdef Segment* segment
        if at != 0:
            self.free_head = self.segments[at].next
        else:
            at = self.num_fresh
            self.num_fresh += 1
        segment = &self.segments[at]
        segment.which = 0
        segment.held = 0
        segment.num_held = segment.num_groups = 0
        segment.prev = last
        segment.next = 0
        self.segments[last].next = at
        self.segments[0].prev = at
        self.num_in_use += 1
        return at

    cdef void _drop_segment(self, int32_t at) noexcept nogil:
        cdef int32_t prev = self.segments[at].prev
        cdef int32_t next = self.segments[at].next
        self.segments[prev].next = next
        self.segments[next].prev = prev
        self.segments[at].held = 0
        self.segments[at].next = self.free_head
        self.free_head = at
        self.num_in_use -= 1

    cdef void _vacate(self, int32_t place) noexcept nogil:
        """Empty a place that the index no longer names."""
        cdef int32_t at = place >> PLACE_SHIFT
        cdef Segment* segment = &self.segments[at]
        segment.held &= <uint16_t> ~(1 << (place & PLACE_MASK))
        segment.num_held -= 1
        if segment.held == 0:
            self._drop_segment(at)
            return
        # Not for every key: neighbours are on other cache lines. The youngest segment is still filling.
        if (segment.num_held & 3 == 0 or segment.num_held < 4) and segment.next != 0:
            if segment.prev != 0 and self._merge(segment.prev, at):
                return
            if self.segments[segment.next].next != 0:
                self._merge(at, segment.next)

    cdef bint _merge(self, int32_t older, int32_t younger) noexcept nogil:
        """Append the keys of a segment to its older neighbour, if there is room for the keys and the groups."""
        cdef Segment* into = &self.segments[older]
        cdef Segment* source
        cdef Segment merged
        cdef int32_t at
        cdef int i, turn, which, count = 0
        cdef uint32_t held
        if into.num_held + self.segments[younger].num_held > SEGMENT_KEYS:
            return False
        merged.num_groups = 0
        merged.which = 0
        for turn in range(2):
            source = into if turn == 0 else &self.segments[younger]
            held = source.held
            while held != 0:
                i = lowest_bit(held)
                held &= held - 1
                which = 0
                while which < merged.num_groups and (
                        merged.groups[which] != source.groups[source.which >> 2 * i & 3]):
                    which += 1
                if which == merged.num_groups:
                    if which == SEGMENT_GROUPS:
                        return False
                    merged.groups[which] = source.groups[source.which >> 2 * i & 3]
                    merged.num_groups += 1
                merged.low[count] = source.low[i]
                merged.which |= <uint32_t> which << 2 * count
                count += 1
        # Places move only to the left, so that no key takes a place that another key still has.
        count = 0
        for turn in range(2):
            at = older if turn == 0 else younger
            held = self.segments[at].held
            while held != 0:
                i = lowest_bit(held)
                held &= held - 1
                if at != older or i != count:
                    places_move(self.buckets, self.num_buckets, merged.low[count],
                                at << PLACE_SHIFT | i, older << PLACE_SHIFT | count)
                count += 1
        memcpy(into.low, merged.low, sizeof(merged.low))
        memcpy(into.groups, merged.groups, sizeof(merged.groups))
        into.which = merged.which
        into.num_groups = merged.num_groups
        into.num_held = <uint8_t> count
        into.held = <uint16_t> ((1 << count) - 1)
        self._drop_segment(younger)
        return True

    def remember(self, bytes key not None, int32_t group):
        """Append a key with a group, or move it to the youngest end. For tests; a policy works with hashes."""
        cdef uint64_t hash = hash_of(<PyObject*> key)
        cdef int32_t place
        if group < 1:
            raise ValueError(f"group must be >= 1, got {group}")
        self.reserve(1)
        place = self.find(hash)
        if place != 0:
            self.renew(place, group)
        else:
            self.append(hash, group)

    def forget(self, bytes key not None):
        """Remove a key, and return its group. Raise KeyError if it is not remembered. For tests."""
        cdef int32_t place = self.find(hash_of(<PyObject*> key))
        cdef int32_t group
        if place == 0:
            raise KeyError(f"key is not remembered: {key!r}")
        group = self.group_of(place)
        self.remove(place)
        return group

    def forget_oldest(self):
        """Remove the oldest key, and return its group. Raise IndexError if the queue is empty. For tests."""
        cdef Py_ssize_t num_popped
        if self.num_keys == 0:
            raise IndexError("no key is remembered")
        self.fetch_oldest()
        return self.pop_oldest(1, &num_popped)

    def forget_oldest_of_a_group(self, Py_ssize_t most):
        """Remove the oldest key and the keys of its group behind it, as `pop_oldest` does. For tests.

        Return the group and the number of keys. Raise IndexError if the queue is empty.
        """
        cdef Py_ssize_t num_popped
        cdef int32_t group
        if self.num_keys == 0 or most < 1:
            raise IndexError(f"no key is remembered, or none wanted: {most}")
        group = self.pop_oldest(most, &num_popped)
        return group, num_popped

    def groups(self):
        """Return the group of each key, oldest first."""
        cdef int32_t at = self.segments[0].next
        cdef int i
        groups = []
        while at != 0:
            for i in range(SEGMENT_KEYS):
                if self.segments[at].held >> i & 1:
                    groups.append(self.group_of(at << PLACE_SHIFT | i))
            at = self.segments[at].next
        return groups

    def check(self):
        """Check the segments and the index. Raise RuntimeError naming the broken invariant."""
        cdef int32_t at = self.segments[0].next, place
        cdef int i, slot
        cdef Py_ssize_t num_keys = 0, num_in_use = 0, num_indexed = 0, b
        cdef uint32_t home, way, low
        passed = {}
        while at != 0:
            num_in_use += 1
            if self.segments[at].held == 0:
                raise RuntimeError(f"invariant broken: segment {at} holds no key")
            if bin(self.segments[at].held).count("1") != self.segments[at].num_held:
                raise RuntimeError(f"invariant broken: segment {at} counts {self.segments[at].num_held} keys")
            if self.segments[at].num_groups > SEGMENT_GROUPS:
                raise RuntimeError(f"invariant broken: segment {at} has too many groups")
            if self.segments[self.segments[at].next].prev != at:
                raise RuntimeError(f"invariant broken: segment {at} is not its neighbour's neighbour")
            for i in range(SEGMENT_KEYS):
                if self.segments[at].held >> i & 1:
                    num_keys += 1
                    if (self.segments[at].which >> 2 * i & 3) >= self.segments[at].num_groups:
                        raise RuntimeError(f"invariant broken: key {i} of segment {at} is in no group")
            at = self.segments[at].next
        for b in range(self.num_buckets):
            for slot in range(10):
                place = self.buckets[b].place[slot]
                if (place == 0) != (self.buckets[b].tag[slot] == 0):
                    raise RuntimeError(f"invariant broken: slot {slot} of bucket {b} is half empty")
                if place != 0:
                    num_indexed += 1
                    if self.segments[place >> PLACE_SHIFT].held >> (place & PLACE_MASK) & 1 == 0:
                        raise RuntimeError(f"invariant broken: the index names place {place}, which holds no key")
                    low = self._low_at(place)
                    home = home_of(low, self.num_buckets)
                    while home != b:
                        passed[home, low & 7] = passed.get((home, low & 7), 0) + 1
                        home = bucket_after(home, self.num_buckets)
                    if self.find(<uint64_t> self.buckets[b].tag[slot] << 48 | self._low_at(place)) == 0:
                        raise RuntimeError(f"invariant broken: the key at place {place} is not found")
        for b in range(self.num_buckets):
            for low in range(8):
                way = num_passed_of(&self.buckets[b], low)
                num_passed = passed.get((b, low), 0)
                if way != num_passed and way != 15:
                    raise RuntimeError(f"invariant broken: bucket {b} counts {way} keys passed of {num_passed}")
        if not (num_keys == self.num_keys == num_indexed):
            raise RuntimeError(
                f"invariant broken: {num_keys} keys are held, {num_indexed} indexed, {self.num_keys} counted")
        if num_in_use != self.num_in_use:
            raise RuntimeError(f"invariant broken: {num_in_use} segments are linked, {self.num_in_use} counted")
