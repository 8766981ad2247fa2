"""Units: the rule of gittins for models with several KV-cache groups, which stores and evicts whole stretches.

Compiled because it is a policy. Such a model resumes a prompt only where the keys of its windowed groups are resident,
too. One missing windowed key makes all blocks back to the previous such place useless.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from kvcache.core.eviction_queue cimport Row
from kvcache.core.index cimport Probe, hash_of_bytes, index_first, index_next, zeroed
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport PyBytes_CheckExact, PyBytes_GET_SIZE, count_rows, ref_of
from kvcache.policies.gittins.groups cimport HOLDERS, class_of, lowest_bit
from kvcache.policies.gittins.policy cimport (
    GROUPED, NUM_LISTS, QUEUED, WINDOWED, GittinsCachePolicy, Label, MadeGroup, group_in,
)
from kvcache.policies.gittins.values cimport CLASSES_PER_HINT, NUM_BINS

from kvcache.block import BlockStateError
from kvcache.options import check_int
from kvcache.policies.base import CachePolicy

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(PyObject* key) noexcept nogil

cdef enum:
    MOST_KEY_GROUPS = 64
    MOST_KEY_BYTES = 512
    GROUP_BYTES = 4
    WAY_BACK = 8            # a passed boundary is given up if an older one is nearer than this many times its slots
    MOST_PASSED = 2048      # groups with a blocked tail that one store skips
    LEAVING = NUM_LISTS     # in place of a list, of a row that is being removed
    MOST_ENDS = 2           # ends of a request: behind its leading resident anchors, and behind its prompt

# What this rule keeps of a row.
cdef struct Unit:
    uint32_t needs          # of a windowed key: live boundaries whose set holds it
    bint is_boundary        # of an anchor: a request can resume behind it

# A new key of a store: its place in the request, the index of its position on the path, and that of its unit's end.
cdef struct NewKey:
    Py_ssize_t place
    Py_ssize_t index
    Py_ssize_t end
    bint is_windowed


@cython.final
cdef class UnitGittinsPolicy(GittinsCachePolicy):
    """UnitGittinsPolicy(cache_capacity)

    `gittins` for models with several KV-cache groups. Call `set_group_windows` before the first use.

    Notes
    -----
    The keys of the first group without a window are *anchors*: they have classes and ages. A boundary is an anchor at
    which a request can resume, because its *set*, the windowed keys just before its end, is resident. A stretch up to
    such an end is stored whole or declined. Keys that nothing needs any more leave first. Windowed keys have no value
    of their own: they leave with their boundaries.
    """

    group_policy = None

    cdef int num_groups
    cdef int anchor_group
    cdef int32_t* windows               # [num_groups], in blocks; 0: no window
    cdef int32_t set_size               # the sum of all windows
    cdef int32_t largest_window
    cdef Unit* units                    # [num_rows]
    cdef int32_t queue_first            # keys that nothing needs, oldest first; 0: none
    cdef int32_t queue_last
    # Of the store in progress. `on_offer` fills them, `on_admit` reads them.
    cdef Py_ssize_t* path               # [path_size]: places of the request's anchors, head first
    cdef Py_ssize_t path_size
    cdef Py_ssize_t path_length
    cdef NewKey* new                    # [new_size]: the absent keys in the order in which they are stored
    cdef Py_ssize_t new_size
    cdef Py_ssize_t num_new
    cdef Py_ssize_t hit
    cdef Py_ssize_t[MOST_ENDS] ends
    cdef int num_ends
    # [anchors_size]: the anchors among the keys of one call.
    cdef int32_t* anchor_places
    cdef int32_t* anchor_rows
    cdef uint64_t* anchor_hashes
    cdef Py_ssize_t anchors_size
    cdef bint has_orphans               # a failed store removed a parent: its children do not protect it any more

    def __cinit__(self, cache_capacity):
        self.takes_any = True
        self.units = <Unit*> zeroed(self.table.num_rows * sizeof(Unit))
        if self.units == NULL:
            raise MemoryError(f"no memory for {cache_capacity} blocks")

    def __dealloc__(self):
        free(self.units)
        free(self.windows)
        free(self.path)
        free(self.new)
        free(self.anchor_places)
        free(self.anchor_rows)
        free(self.anchor_hashes)

    cdef int reserve_policy(self, Py_ssize_t n) except -1:
        cdef void* places
        cdef void* rows
        cdef void* hashes
        GittinsCachePolicy.reserve_policy(self, n)
        if n > self.anchors_size:
            places = realloc(self.anchor_places, 2 * n * sizeof(int32_t))
            rows = realloc(self.anchor_rows, 2 * n * sizeof(int32_t))
            hashes = realloc(self.anchor_hashes, 2 * n * sizeof(uint64_t))
            if places != NULL:
                self.anchor_places = <int32_t*> places
            if rows != NULL:
                self.anchor_rows = <int32_t*> rows
            if hashes != NULL:
                self.anchor_hashes = <uint64_t*> hashes
            if places == NULL or rows == NULL or hashes == NULL:
                raise MemoryError(f"no memory for a call of {n} keys")
            self.anchors_size = 2 * n
        return 0

    def set_group_windows(self, group_windows):
        """Set the window of each KV-cache group in blocks; None: the group has no window.

        Raises
        ------
        ValueError
            A window is neither None nor an int >= 1, not exactly one group has no window, or there are too many groups.
        BlockStateError
            The policy holds blocks already.
        """
        cdef int group
        windows = list(group_windows)
        for window in windows:
            if window is not None:
                check_int("a window of group_windows", window)
        if not 1 <= len(windows) <= MOST_KEY_GROUPS:
            raise ValueError(f"group_windows must name 1 to {MOST_KEY_GROUPS} groups, got {len(windows)}")
        if windows.count(None) != 1:
            raise ValueError(f"exactly one group of group_windows must have no window (None), got {windows}")
        if self.table.num_resident:
            raise BlockStateError("group_windows must be set before the first block is stored")
        self.windows = <int32_t*> realloc(self.windows, len(windows) * sizeof(int32_t))
        self.num_groups = <int> len(windows)
        for group in range(self.num_groups):
            self.windows[group] = windows[group] or 0
        self.anchor_group = <int> windows.index(None)
        self.set_size = sum(window or 0 for window in windows)
        self.largest_window = max(window or 0 for window in windows)

    @property
    def leave_first(self):
        """Keys that nothing needs, oldest first."""
        cdef int32_t row = self.queue_first
        keys = []
        while row != 0:
            keys.append(<object> self.table.rows[row].key)
            row = self.table.rows[row].next
        return keys

    @property
    def listed(self):
        """The lists of anchors: (class, bin, keys in path order) of each group, the oldest of a cell first."""
        cdef int32_t cell, cohort, group, row
        lists = []
        for cell in range(self.values.num_ranked):
            cohort = self.aged.queues[HOLDERS][cell].first
            while cohort != 0:
                group = self.aged.cohorts[cohort].groups[HOLDERS].first
                while group != 0:
                    keys = []
                    row = self.aged.groups[group].tail
                    while row != 0:
                        keys.append(<object> self.table.rows[row].key)
                        row = self.table.rows[row].prev
                    lists.append((cell // NUM_BINS, cell % NUM_BINS, keys[::-1]))
                    group = self.aged.groups[group].next[HOLDERS]
                cohort = self.aged.cohorts[cohort].next[HOLDERS]
        return lists

    # ---- keys and positions -------------------------------------------------------------------------------------

    cdef int _group_of(self, PyObject* key) noexcept nogil:
        """Return the KV-cache group that a key names, or -1 if the model has no such group."""
        cdef Py_ssize_t size
        cdef const uint8_t* at
        cdef uint32_t group
        if not PyBytes_CheckExact(key):
            return -1
        size = PyBytes_GET_SIZE(key)
        if not GROUP_BYTES < size <= MOST_KEY_BYTES:
            return -1
        at = <const uint8_t*> PyBytes_AS_STRING(key) + size - GROUP_BYTES
        group = <uint32_t> at[0] << 24 | <uint32_t> at[1] << 16 | <uint32_t> at[2] << 8 | at[3]
        return <int> group if group < <uint32_t> self.num_groups else -1

    cdef uint64_t _name(self, PyObject* anchor, int group, char* name) noexcept nogil:
        """Write the name of the same position in another group to `name`, and return its hash."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(anchor)
        memcpy(name, PyBytes_AS_STRING(anchor), size - GROUP_BYTES)
        memset(name + size - GROUP_BYTES, 0, GROUP_BYTES - 1)
        name[size - 1] = <char> group
        return hash_of_bytes(name, size)

    cdef int32_t _windowed_row(self, PyObject* anchor, int group) noexcept nogil:
        """Return the row of the windowed key at an anchor's position, or 0."""
        cdef char[MOST_KEY_BYTES] name
        cdef uint64_t hash = self._name(anchor, group, name)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(anchor)
        cdef Probe probe
        cdef int32_t row = index_first(self.table.buckets, self.table.num_buckets, hash, &probe)
        while row != 0 and not (
                self.table.rows[row].hash == hash and PyBytes_GET_SIZE(self.table.rows[row].key) == size
                and memcmp(PyBytes_AS_STRING(self.table.rows[row].key), name, size) == 0):
            row = index_next(self.table.buckets, self.table.num_buckets, hash, &probe)
        return row

    cdef Py_ssize_t _windowed_place(self, RequestKeys names, PyObject* anchor, int group) noexcept nogil:
        """Return the place in the request of the windowed key at an anchor's position, or -1."""
        cdef char[MOST_KEY_BYTES] name
        cdef uint64_t hash = self._name(anchor, group, name)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(anchor)
        cdef Probe probe
        cdef Py_ssize_t place
        if names.buckets == NULL:
            for place in range(names.num_named):
                if self._has_name(names.named[place].key, name, size):
                    return place
            return -1
        place = index_first(names.buckets, names.num_buckets, hash, &probe)
        while place != 0 and not self._has_name(names.named[place - 1].key, name, size):
            place = index_next(names.buckets, names.num_buckets, hash, &probe)
        return place - 1

    cdef bint _has_name(self, PyObject* key, const char* name, Py_ssize_t size) noexcept nogil:
        return PyBytes_GET_SIZE(key) == size and memcmp(PyBytes_AS_STRING(key), name, size) == 0

    cdef PyObject* _anchor_at(self, RequestKeys names, Py_ssize_t index) noexcept nogil:
        return names.named[self.path[index]].key

    cdef bint _is_set_resident(self, RequestKeys names, Py_ssize_t end) noexcept nogil:
        """Return whether all windowed keys that a resumption at `end` needs are resident."""
        cdef Py_ssize_t i
        cdef int group
        for group in range(self.num_groups):
            for i in range(max(end - self.windows[group], 0) if self.windows[group] else end, end):
                if self._windowed_row(self._anchor_at(names, i), group) == 0:
                    return False
        return True

    cdef bint _is_chain(self, RequestKeys names, Py_ssize_t end) noexcept nogil:
        """Return whether each anchor before `end` is the parent of the next, as far as a window reaches.

        A boundary is given up along its parents. They differ from the path if a request has not named all its keys.
        """
        cdef Py_ssize_t i
        cdef int32_t parent = 0, row = names.row_now(self.table, self.path[end - 1])
        for i in range(end - 1, max(end - self.largest_window, 0) - 1, -1):
            if row == 0:
                return False
            parent = self._parent_of(row)
            row = names.row_now(self.table, self.path[i - 1]) if i > 0 else 0
            if parent != row and i > max(end - self.largest_window, 0):
                return False
        return end > self.largest_window or parent == 0

    # ---- the leave-first queue ----------------------------------------------------------------------------------

    cdef void _queue(self, int32_t row) noexcept nogil:
        """Append a key that nothing needs to the queue, unless it is in it. An anchor leaves its list."""
        cdef Row* rows = self.table.rows
        if rows[row].list_idx == QUEUED or rows[row].list_idx == LEAVING:
            return
        if rows[row].list_idx == GROUPED:
            self._unlink(row)
        count_rows(self.table, rows[row].list_idx, -1)
        count_rows(self.table, QUEUED, 1)
        rows[row].list_idx = QUEUED
        rows[row].prev = self.queue_last
        rows[row].next = 0
        if self.queue_last != 0:
            rows[self.queue_last].next = row
        else:
            self.queue_first = row
        self.queue_last = row

    cdef void _unqueue(self, int32_t row) noexcept nogil:
        """Remove a key from the queue, if it is in it. An anchor becomes the tail of its group's list."""
        if self.table.rows[row].list_idx != QUEUED:
            return
        self._unlink_queued(row)
        count_rows(self.table, QUEUED, -1)
        if self._place_of(row).label != 0:
            self._append(self._place_of(row).label, row, GROUPED)
            count_rows(self.table, GROUPED, 1)
        else:
            self.table.rows[row].list_idx = WINDOWED
            count_rows(self.table, WINDOWED, 1)

    cdef void _unlink_queued(self, int32_t row) noexcept nogil:
        cdef Row* rows = self.table.rows
        cdef int32_t prev = rows[row].prev
        cdef int32_t next = rows[row].next
        if prev != 0:
            rows[prev].next = next
        else:
            self.queue_first = next
        if next != 0:
            rows[next].prev = prev
        else:
            self.queue_last = prev

    # ---- boundaries ---------------------------------------------------------------------------------------------

    cdef void _make_boundary(self, RequestKeys names, Py_ssize_t end, int32_t anchor) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t row
        cdef int group
        self.units[anchor].is_boundary = True
        self._unqueue(anchor)
        for group in range(self.num_groups):
            if self.windows[group] == 0:
                continue
            for i in range(max(end - self.windows[group], 0), end):
                row = self._windowed_row(self._anchor_at(names, i), group)
                self.units[row].needs += 1
                self._unqueue(row)

    cdef void _give_up(self, int32_t anchor) noexcept nogil:
        """End a boundary, if there is one. Keys that nothing else needs are queued, windowed keys before the anchor."""
        cdef int group
        cdef int32_t row, ancestor, _step
        if self.units[anchor].is_boundary:
            self.units[anchor].is_boundary = False
            for group in range(self.num_groups - 1, -1, -1):
                ancestor = anchor
                for _step in range(self.windows[group]):
                    if ancestor == 0:
                        break
                    row = self._windowed_row(self.table.rows[ancestor].key, group)
                    if row != 0 and self.units[row].needs > 0:
                        self.units[row].needs -= 1
                        if self.units[row].needs == 0:
                            self._queue(row)
                    ancestor = self._parent_of(ancestor)
        if self.members[anchor].kids == 0:
            self._queue(anchor)

    cdef void _pass_boundary(self, RequestKeys names) noexcept nogil:
        """Give up the boundary at the hit if another one is close before it: the request has made a deeper one."""
        cdef Py_ssize_t i, hit = self.hit
        cdef int32_t row, anchor = names.row_now(self.table, self.path[hit - 1])
        if not self.units[anchor].is_boundary:
            return
        for i in range(max(hit - WAY_BACK * self.set_size, 0), hit - 1):
            row = names.row_now(self.table, self.path[i])
            if row != 0 and self.units[row].is_boundary:
                self._give_up(anchor)
                return

    # ---- use ------------------------------------------------------------------------------------------------------

    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n
    ) noexcept nogil:
        """Count a use of each anchor. Windowed keys count no use."""
        cdef Py_ssize_t i, count = 0, first = request.num_seen - n
        cdef int32_t place
        cdef int32_t* places = self.anchor_places
        cdef int32_t* anchor_rows = self.anchor_rows
        cdef uint64_t* anchor_hashes = self.anchor_hashes
        for i in range(n):
            place = request.used[first + i]
            if self._group_of(request.named[place].key) != self.anchor_group:
                request.uses[place].note = 0
                continue
            places[count] = place
            anchor_rows[count] = rows[i]
            anchor_hashes[count] = hashes[i]
            count += 1
            if rows[i] != 0:
                self._unqueue(rows[i])
        if count != 0:
            self._use_keys(request, anchor_rows, anchor_hashes, places, count, self._length_of(request, count))

    cdef int32_t _length_of(self, RequestKeys request, Py_ssize_t n) noexcept nogil:
        """Return the number of positions of a request: its last one, in steps of the first. Else `n`."""
        cdef int64_t first
        if not request.num_positions or request.head == 0:
            return <int32_t> n
        first = request.uses[request.head - 1].position
        return <int32_t> (request.largest_position // first) if first > 0 else <int32_t> n

    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use
    ) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(n):
            if rows[i] != 0 and self._place_of(rows[i]).label != 0:
                self._unqueue(rows[i])
        GittinsCachePolicy.on_hint(self, rows, hashes, n, next_use)

    # ---- stores ---------------------------------------------------------------------------------------------------

    cdef Py_ssize_t on_offer(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place,
        int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Mark the keys to store. They are whole units, but where too many blocks are in use."""
        cdef Py_ssize_t i, num_taken
        num_victims[0] = 0
        self.num_new = self.num_ends = 0
        self.hit = 0
        for i in range(n):
            names.uses[places[i]].is_taken = True
        self._recall(names, places, n, num_offered, last_place)
        if self._read_path(names):
            self._find_ends(names)
            self._order_new_keys(names)
        for i in range(n):
            names.uses[places[i]].is_taken = False
        self._protect(names)
        num_taken = self._make_room(names, victims, num_victims)
        self._remember_rows(victims, num_victims[0])
        for i in range(num_taken):
            names.uses[self.new[i].place].is_taken = True
        self.num_new = num_taken
        if num_taken == 0:
            self._complete(names)
        return num_taken

    cdef void _recall(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place
    ) noexcept nogil:
        """Remember new anchors again that were dropped since their use."""
        cdef Py_ssize_t i
        cdef int32_t ghost, cls
        cdef MadeGroup[CLASSES_PER_HINT] made
        memset(made, 0, sizeof(made))
        if names.next_use >= self.values.num_hints:
            self._take_up_hint(names.next_use)
        for i in range(n):
            if self._group_of(names.named[places[i]].key) != self.anchor_group:
                names.uses[places[i]].note = 0
                continue
            ghost = self._ghost_of(names, places[i])
            if ghost == 0:
                cls = 0 if self._is_last(names, <int32_t> places[i], places[i] == last_place) else 2
                ghost = self._remember(names.named[places[i]].hash, self._join_group(
                    &made[cls], names.next_use * CLASSES_PER_HINT + cls, self._length_of(names, num_offered)))
            names.uses[places[i]].note = ghost

    cdef bint _read_path(self, RequestKeys names) noexcept nogil:
        """List the request's anchors. Return False if there is no memory for them: nothing is stored then."""
        cdef int32_t place = names.head
        cdef Py_ssize_t size
        cdef void* block
        self.path_length = 0
        if names.num_named > self.path_size:
            size = 2 * names.num_named
            block = realloc(self.path, size * sizeof(Py_ssize_t))
            if block == NULL:
                return False
            self.path = <Py_ssize_t*> block
            self.path_size = size
            block = realloc(self.new, (size + 1) * sizeof(NewKey))
            if block == NULL:
                self.path_size = 0
                return False
            self.new = <NewKey*> block
        while place != 0:
            if self._group_of(names.named[place - 1].key) == self.anchor_group:
                self.path[self.path_length] = place - 1
                self.path_length += 1
            place = names.uses[place - 1].after
        return True

    cdef void _find_ends(self, RequestKeys names) noexcept nogil:
        """Find the hit and the request's ends: behind its leading resident anchors, and behind the offered keys."""
        cdef Py_ssize_t i, place, full = 0, limit = 0, hit
        cdef int group
        # The engine offers the windowed keys of its prompt's end, so the deepest one tells where that is.
        for i in range(self.path_length - 1 if names.num_seen > self.path_length else -1, -1, -1):
            for group in range(self.num_groups):
                if self.windows[group] != 0 and limit == 0:
                    place = self._windowed_place(names, self._anchor_at(names, i), group)
                    if place >= 0 and names.named[place].mark == self.table.mark:
                        limit = i + 1
            if limit != 0:
                break
        while full < (limit if limit else self.path_length) and names.row_now(self.table, self.path[full]) != 0:
            full += 1
        hit = full
        while hit > 0 and not self._is_set_resident(names, hit):
            hit -= 1
        self.hit = hit
        if limit == 0:
            return
        if full > hit:
            self.ends[0] = full
            self.num_ends = 1
        if limit > full and limit > hit:
            self.ends[self.num_ends] = limit
            self.num_ends += 1

    cdef void _order_new_keys(self, RequestKeys names) noexcept nogil:
        """List the new keys head first, each set behind its end. A missing anchor ends the list."""
        cdef Py_ssize_t i, j, place
        cdef int group, end = 0
        for i in range(self.path_length):
            if names.row_now(self.table, self.path[i]) == 0:
                if not names.uses[self.path[i]].is_taken:
                    return
                self._add_new(names, self.path[i], i, i, False)
            if end < self.num_ends and i + 1 == self.ends[end]:
                end += 1
                for group in range(self.num_groups):
                    if self.windows[group] == 0:
                        continue
                    for j in range(max(i + 1 - self.windows[group], 0), i + 1):
                        place = self._windowed_place(names, self._anchor_at(names, j), group)
                        if place >= 0 and names.named[place].seen and names.uses[place].is_taken:
                            self._add_new(names, place, j, i, True)

    cdef void _add_new(
        self, RequestKeys names, Py_ssize_t place, Py_ssize_t index, Py_ssize_t end, bint is_windowed
    ) noexcept nogil:
        names.uses[place].is_taken = False      # so that no key is listed twice
        self.new[self.num_new].place = place
        self.new[self.num_new].index = index
        self.new[self.num_new].end = end
        self.new[self.num_new].is_windowed = is_windowed
        self.num_new += 1

    cdef void _protect(self, RequestKeys names) noexcept nogil:
        """Mark the rows of the request's path and of the sets of its ends: they are not evicted for it."""
        cdef Py_ssize_t i
        cdef int32_t row
        cdef int group, end
        for i in range(self.path_length):
            self.table.rows[names.row_now(self.table, self.path[i])].mark = self.table.mark
        for end in range(self.num_ends):
            for group in range(self.num_groups):
                if self.windows[group] == 0:
                    continue
                for i in range(max(self.ends[end] - self.windows[group], 0), self.ends[end]):
                    row = self._windowed_row(self._anchor_at(names, i), group)
                    self.table.rows[row].mark = self.table.mark

    cdef Py_ssize_t _make_room(self, RequestKeys names, int32_t* victims, Py_ssize_t* num_victims) noexcept nogil:
        """Evict for one unit after the other. Return how many of the new keys are stored."""
        cdef Py_ssize_t start = 0, stop, need, room = self.table.num_free
        cdef int end = 0
        while start < self.num_new:
            stop = start
            while end < self.num_ends and self.ends[end] <= self.new[start].end:
                end += 1
            while stop < self.num_new and (end == self.num_ends or self.new[stop].end < self.ends[end]):
                stop += 1
            need = stop - room
            if need > 0:
                if not self._is_worth(names, start, need - self.table.num_in_list[QUEUED]):
                    return start
                need = self._evict_blocks(need, victims + num_victims[0])
                num_victims[0] += need
                room += need
                if room < stop:
                    return room
            start = stop
        return start

    cdef bint _is_worth(self, RequestKeys names, Py_ssize_t at, Py_ssize_t n) noexcept nogil:
        """Return whether a new key is worth more than the cheapest three quarters of `n` listed anchors."""
        cdef Py_ssize_t place = self.path[self.new[at].index]
        cdef int32_t row = names.row_now(self.table, place)
        cdef Label label = self._label_of(row, 0 if row != 0 else self._ghost_of(names, place))
        cdef int64_t worth = self.values.value[class_of(self.aged, group_in(label)) * NUM_BINS]
        cdef int word
        cdef uint64_t bits
        cdef int32_t cell, cohort, group
        if n > 0:
            n -= n // 4
        for word in range((self.values.num_ranked + 63) >> 6):
            bits = self.aged.holders[word]
            while bits != 0:
                if n <= 0:
                    return True
                cell = self.values.ranked[(word << 6) + lowest_bit(bits)]
                bits &= bits - 1
                if worth <= self.values.value[cell]:
                    return False
                # Each group here lists an anchor, so this visits at most `n`.
                cohort = self.aged.queues[HOLDERS][cell].first
                while cohort != 0 and n > 0:
                    group = self.aged.cohorts[cohort].groups[HOLDERS].first
                    while group != 0 and n > 0:
                        n -= self.aged.groups[group].num_listed
                        group = self.aged.groups[group].next[HOLDERS]
                    cohort = self.aged.cohorts[cohort].next[HOLDERS]
        return n <= 0

    cdef Py_ssize_t _evict_blocks(self, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Select up to `n` victims: queued keys, then the boundaries of the least value. Return their number."""
        cdef Py_ssize_t got = self._evict_queued(n, victims), got_before = -1
        cdef int word, num_left = MOST_PASSED
        cdef uint64_t bits
        cdef int32_t cell, cohort, group, tail
        while got_before < got < n:
            got_before = got
            for word in range((self.values.num_ranked + 63) >> 6):
                bits = self.aged.holders[word]
                while bits != 0:
                    cell = self.values.ranked[(word << 6) + lowest_bit(bits)]
                    bits &= bits - 1
                    cohort = self.aged.queues[HOLDERS][cell].first
                    # A parent that follows its child may unlink any group. An unlinked group keeps its link, and no
                    # group is linked meanwhile, so the walk goes on in the same order.
                    while cohort != 0:
                        group = self.aged.cohorts[cohort].groups[HOLDERS].first
                        while group != 0:
                            tail = self.aged.groups[group].tail
                            while tail != 0 and self._is_idle(tail) and self.members[tail].kids == 0:
                                self._give_up(tail)
                                got += self._evict_queued(n - got, victims + got)
                                if got == n:
                                    return got
                                tail = self.aged.groups[group].tail
                            if tail != 0:
                                num_left -= 1
                                self.num_passed += 1
                                if num_left == 0:
                                    return got
                            group = self.aged.groups[group].next[HOLDERS]
                        cohort = self.aged.cohorts[cohort].next[HOLDERS]
        return got

    cdef bint _is_idle(self, int32_t row) noexcept nogil:
        return ref_of(self.table, row) == 0 and self.table.rows[row].mark != self.table.mark

    cdef Py_ssize_t _evict_queued(self, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Select up to `n` queued victims, oldest first. A parent that nothing needs any more follows its child."""
        cdef Py_ssize_t got = 0
        cdef int32_t prev = 0, row = self.queue_first
        while row != 0 and got < n:
            if self._is_idle(row):
                self._remove(row)
                victims[got] = row
                got += 1
            else:
                prev = row
            row = self.table.rows[prev].next if prev != 0 else self.queue_first
        return got

    cdef void _remove(self, int32_t row) noexcept nogil:
        """Remove a queued key."""
        self._unlink_queued(row)
        count_rows(self.table, QUEUED, -1)
        self.table.rows[row].list_idx = LEAVING
        self._follow(row)

    cdef void _follow(self, int32_t row) noexcept nogil:
        """Remove a row from its parent. The parent is queued if nothing needs it any more."""
        if self.has_orphans:
            self._give_up_around(row)
        cdef int32_t parent = self._leave_parent(row) if self._place_of(row).label != 0 else 0
        if parent != 0 and self.members[parent].kids == 0 and not self.units[parent].is_boundary:
            self._queue(parent)

    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        cdef Py_ssize_t i, index
        cdef int32_t row, parent
        for i in range(n):
            row = names.row_now(self.table, self.new[i].place)
            index = self.new[i].index
            memset(&self.units[row], 0, sizeof(Unit))
            self.members[row].kids = 0
            self._place_of(row).label = 0
            self._place_of(row).parent = 0
            if self.new[i].is_windowed:
                self.table.rows[row].list_idx = WINDOWED
                count_rows(self.table, WINDOWED, 1)
                continue
            parent = names.row_now(self.table, self.path[index - 1]) if index > 0 else 0
            self._set_parent(row, parent)
            if parent != 0:
                self._unqueue(parent)
            self._append(self._forget(names.uses[self.new[i].place].note), row, GROUPED)
            count_rows(self.table, GROUPED, 1)
        self._complete(names)

    cdef void _complete(self, RequestKeys names) noexcept nogil:
        """End a store: make the boundaries whose sets are complete, and queue new keys that no boundary needs."""
        cdef Py_ssize_t i, deepest = self.hit
        cdef int32_t row
        cdef int end
        for end in range(self.num_ends):
            row = names.row_now(self.table, self.path[self.ends[end] - 1])
            if row != 0 and self._is_set_resident(names, self.ends[end]) and self._is_chain(names, self.ends[end]):
                if not self.units[row].is_boundary:
                    self._make_boundary(names, self.ends[end], row)
                deepest = self.ends[end]
        for i in range(self.num_new):
            row = names.row_now(self.table, self.new[i].place)
            if self.new[i].is_windowed and self.units[row].needs == 0:
                self._queue(row)
        if deepest > self.hit > 0:
            self._pass_boundary(names)
        self._trim()

    # ---- failures and resets ----------------------------------------------------------------------------------------

    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Remove blocks of failed stores. Boundaries that need them end."""
        cdef Py_ssize_t i
        cdef int32_t row
        # The caller has counted the rows out of their lists, but each may change its list before its turn.
        for i in range(n):
            count_rows(self.table, self.table.rows[rows[i]].list_idx, 1)
        for i in range(n):
            row = rows[i]
            self.has_orphans = self.has_orphans or self.members[row].kids > 0
            self._give_up_around(row)
            count_rows(self.table, self.table.rows[row].list_idx, -1)
            if self.table.rows[row].list_idx == QUEUED:
                self._unlink_queued(row)
            elif self.table.rows[row].list_idx == GROUPED:
                self._unlink(row)
            self.table.rows[row].list_idx = LEAVING
            self._follow(row)
        if n:
            self._remember_rows(rows, n)
            self._trim()

    cdef void _give_up_around(self, int32_t row) noexcept nogil:
        """Give up the boundaries whose set is at or before a row's position. Only after failed stores: O(capacity)."""
        cdef int32_t anchor = row, boundary, ancestor, _step
        if self._place_of(row).label == 0:
            if self.units[row].needs == 0:
                return
            anchor = self._windowed_row(self.table.rows[row].key, self.anchor_group)
        for boundary in range(self.table.first, self.table.first + self.table.num_fresh):
            if self.table.rows[boundary].key == NULL or not self.units[boundary].is_boundary:
                continue
            ancestor = boundary
            for _step in range(self.largest_window):
                if ancestor == anchor:
                    self._give_up(boundary)
                if ancestor == 0:
                    break
                ancestor = self._parent_of(ancestor)

    cdef void on_reset(self) noexcept nogil:
        GittinsCachePolicy.on_reset(self)
        self.has_orphans = False
        self.queue_first = self.queue_last = 0
        if self.units != NULL:
            memset(self.units, 0, self.table.num_rows * sizeof(Unit))

    cdef Py_ssize_t _check_unlisted(self, dict known, dict kids) except -1:
        cdef const Row* rows = self.table.rows
        cdef int32_t row, ancestor, windowed, last = 0
        cdef int group
        cdef Py_ssize_t num_queued = 0, num_windowed = 0
        needs = {}
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if rows[row].key == NULL or not self.units[row].is_boundary:
                continue
            for group in range(self.num_groups):
                ancestor = row
                for _ in range(self.windows[group]):
                    if ancestor == 0:
                        break
                    windowed = self._windowed_row(rows[ancestor].key, group)
                    needs[windowed] = needs.get(windowed, 0) + 1
                    ancestor = self._parent_of(ancestor)
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if rows[row].key != NULL and self.units[row].needs != needs.pop(row, 0):
                raise BlockStateError(f"invariant broken: row {row} counts {self.units[row].needs} boundaries")
            if rows[row].key != NULL and rows[row].list_idx == WINDOWED:
                num_windowed += 1
                if self.units[row].needs == 0:
                    raise BlockStateError(f"invariant broken: row {row} is not needed, nor does it leave first")
        if needs:
            raise BlockStateError(f"invariant broken: boundaries need keys that are not resident: {needs}")
        row = self.queue_first
        while row != 0:
            num_queued += 1
            if rows[row].list_idx != QUEUED or rows[row].prev != last:
                raise BlockStateError(f"invariant broken: row {row} is astray in the queue")
            if self.units[row].needs or self.units[row].is_boundary or self.members[row].kids:
                raise BlockStateError(f"invariant broken: row {row} leaves first, but it is needed")
            if self._place_of(row).label != 0:
                known[group_in(self._place_of(row).label)] -= 1
                if self._place_of(row).parent != 0:
                    kids[self.members[row].parent_tag] = kids.get(self.members[row].parent_tag, 0) + 1
            last = row
            row = rows[row].next
        if last != self.queue_last:
            raise BlockStateError(f"invariant broken: the queue ends with row {last}, not {self.queue_last}")
        return num_queued + num_windowed


CachePolicy.register(UnitGittinsPolicy)
