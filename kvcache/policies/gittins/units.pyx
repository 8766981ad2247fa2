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
    GROUPED, NUM_LISTS, QUEUED, WINDOWED, GittinsCachePolicy, Label, MadeGroup, RequestState, group_in,
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

# What the rule does with a request.
cdef enum:
    NEW = 0                 # it has offered nothing yet
    OPEN = 1
    DECLINED = 2            # a unit was declined: the rest is declined, too
    BY_LRU = 3              # positions or a group are unknown, so all keys are stored, and the oldest leave first

# What this rule keeps of a row.
cdef struct Unit:
    uint32_t needs          # of a windowed key: live boundaries whose set holds it
    bint is_boundary        # of an anchor: a request can resume behind it

# State of a request, behind its RequestState.
cdef struct Progress:
    uint64_t era            # of the policy; another one: the policy was reset
    int64_t loaded          # the largest position of a windowed key that was loaded
    int32_t hit             # positions
    int32_t[MOST_ENDS] ends
    uint8_t num_ends
    uint8_t num_decided     # units; the last unit holds the anchors behind the last end
    uint8_t mode

# A new key of a store: its place in the request, the index of its position on the path, and its unit.
cdef struct NewKey:
    Py_ssize_t place
    Py_ssize_t index
    int unit
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

    A request's first call must name the positions of its prompt's keys, and use its anchors. Without positions, or with
    a key of an unknown group, sets cannot be found: such a request is served by lru, and counted (`lru_requests`).
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
    cdef int32_t passed_over            # the last queued row that is in use, for the rest of the store
    cdef int num_passes                 # rows and groups in use that this store may still pass over
    cdef readonly uint64_t lru_requests
    # [anchors_size]: the anchors among the keys of one call.
    cdef int32_t* anchor_places
    cdef int32_t* anchor_rows
    cdef uint64_t* anchor_hashes
    cdef Py_ssize_t anchors_size
    cdef bint has_failed                # a failed store may have left other requests' boundaries incomplete

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

    def gauges(self):
        """Return the gauges of `gittins`, and the number of requests that were served by lru."""
        return {**GittinsCachePolicy.gauges(self), "lru_requests": self.lru_requests}

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
        cdef int32_t row
        cdef int group
        for group in range(self.num_groups):
            for i in range(max(end - self.windows[group], 0) if self.windows[group] else end, end):
                row = self._windowed_row(self._anchor_at(names, i), group)
                if row == 0 or self.table.rows[row].list_idx == LEAVING:
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
        self._link_queued(row)

    cdef void _link_queued(self, int32_t row) noexcept nogil:
        cdef Row* rows = self.table.rows
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

    cdef void _pass_boundary(self, RequestKeys names, Py_ssize_t hit) noexcept nogil:
        """Give up the boundary at the hit if another one is close before it: the request has made a deeper one."""
        cdef Py_ssize_t i
        cdef int32_t row, anchor = names.row_now(self.table, self.path[hit - 1])
        if anchor == 0 or not self.units[anchor].is_boundary:
            return
        for i in range(max(hit - WAY_BACK * self.set_size, 0), hit - 1):
            row = names.row_now(self.table, self.path[i])
            if row != 0 and self.units[row].is_boundary:
                self._give_up(anchor)
                return

    # ---- use ------------------------------------------------------------------------------------------------------

    cdef Progress* _progress_of(self, RequestKeys request) noexcept nogil:
        cdef Progress* progress = <Progress*> (<char*> request.policy_state + sizeof(RequestState))
        if progress.era != self.era:
            memset(progress, 0, sizeof(Progress))
            progress.era = self.era
        return progress

    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n
    ) noexcept nogil:
        """Count a use of each anchor. Windowed keys count no use."""
        cdef Py_ssize_t i, count = 0, first = request.num_seen - n
        cdef int32_t place
        cdef int32_t* places = self.anchor_places
        cdef int32_t* anchor_rows = self.anchor_rows
        cdef uint64_t* anchor_hashes = self.anchor_hashes
        cdef Progress* progress = self._progress_of(request)
        cdef int group
        for i in range(n):
            place = request.used[first + i]
            request.uses[place].note = 0
            group = self._group_of(request.named[place].key)
            if group < 0 or not request.num_positions:
                self._serve_by_lru(progress)
            elif group == self.anchor_group:
                places[count] = place
                anchor_rows[count] = rows[i]
                anchor_hashes[count] = hashes[i]
                count += 1
            elif request.named[place].mark == 0:
                # It is not offered, so it is loaded.
                progress.loaded = max(progress.loaded, request.uses[place].position)
        if progress.mode == BY_LRU:
            # The first key of the call becomes the youngest.
            for i in range(n - 1, -1, -1):
                if rows[i] != 0 and self.table.rows[rows[i]].list_idx == QUEUED:
                    self._unlink_queued(rows[i])
                    self._link_queued(rows[i])
            return
        for i in range(count):
            if anchor_rows[i] != 0:
                self._unqueue(anchor_rows[i])
        if count != 0:
            self._use_keys(request, anchor_rows, anchor_hashes, places, count, self._length_of(request, count))

    cdef void _serve_by_lru(self, Progress* progress) noexcept nogil:
        self.lru_requests += progress.mode != BY_LRU
        progress.mode = BY_LRU

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
        cdef Py_ssize_t i, num_taken = 0
        cdef Progress* progress = self._progress_of(names)
        num_victims[0] = 0
        self.num_new = 0
        self.passed_over = 0
        self.num_passes = MOST_PASSED
        for i in range(n):
            names.uses[places[i]].is_taken = True
        self._recall(names, places, n, num_offered, last_place)
        if self._read_path(names):
            if progress.mode != BY_LRU:
                if progress.mode == NEW:
                    self._find_ends(names, progress)
                self._move_ends(names, progress, places, n)
                self._order_new_keys(names, progress)
                self._protect(names, progress)
                num_taken = self._make_room(names, progress, victims, num_victims)
            else:
                for i in range(n):
                    self._add_new(names, places[i], -1, 0, True)
                num_taken = min(n, self._evict_for(n, victims, num_victims))
        for i in range(n):
            names.uses[places[i]].is_taken = False
        self._remember_rows(victims, num_victims[0])
        for i in range(num_taken):
            names.uses[self.new[i].place].is_taken = True
        self.num_new = num_taken
        if num_taken == 0:
            self._complete(names, progress)
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

    cdef bint _is_offered(self, RequestKeys names, Py_ssize_t index, int group) noexcept nogil:
        """Return whether this call offers a windowed key, resident or not."""
        cdef Py_ssize_t place = self._windowed_place(names, self._anchor_at(names, index), group)
        return place >= 0 and names.named[place].mark == self.table.mark

    cdef bint _is_end_offered(self, RequestKeys names, Py_ssize_t end) noexcept nogil:
        """Return whether this call offers a windowed key of the last position before `end`."""
        cdef int group
        for group in range(self.num_groups):
            if self.windows[group] != 0 and self._is_offered(names, end - 1, group):
                return True
        return False

    cdef void _find_ends(self, RequestKeys names, Progress* progress) noexcept nogil:
        """Find the hit and the ends of a request: behind its leading resident anchors, and behind its prompt.

        A call that offers the path's last anchor offers the windowed keys of the prompt's end, too. Otherwise, the
        prompt is taken to end with the path, until windowed keys are offered.
        """
        cdef Py_ssize_t limit = self.path_length, full = 0, hit = 0
        progress.mode = OPEN
        if limit == 0:
            return
        if names.named[self.path[limit - 1]].mark == self.table.mark:
            # No windowed key is named if the path has all keys.
            limit = limit if names.num_seen > limit else 0
            while limit > 0 and not self._is_end_offered(names, limit):
                limit -= 1 if names.uses[self.path[limit - 1]].position > progress.loaded else limit
        while full < (limit if limit else self.path_length) and names.row_now(self.table, self.path[full]) != 0:
            full += 1
        if progress.loaded > 0:
            while hit < full and names.uses[self.path[hit]].position <= progress.loaded:
                hit += 1
        else:
            hit = full
            while hit > 0 and not self.units[names.row_now(self.table, self.path[hit - 1])].is_boundary:
                hit -= 1
        progress.hit = <int32_t> hit
        if full > hit and limit:
            progress.ends[0] = <int32_t> full
            progress.num_ends = 1
        if limit > full:
            progress.ends[progress.num_ends] = <int32_t> limit
            progress.num_ends += 1

    cdef void _move_ends(
        self, RequestKeys names, Progress* progress, const Py_ssize_t* places, Py_ssize_t n
    ) noexcept nogil:
        """Take the end of a set that the call offers as an end, if the request's ends are others.

        The engine has windowed keys only at such a place. If it offers all windowed keys, a run of them is longer.
        """
        cdef Py_ssize_t i, index = -1, last = -1, length = 0
        cdef int group, group_before = -1
        for i in range(n + 1):
            group = self._group_of(names.named[places[i]].key) if i < n else -1
            index = -1
            if group >= 0 and self.windows[group] != 0:
                index = self._index_of(names, places[i])
            if group_before < 0:
                length = 0
            elif not (group == group_before and index == last + 1):
                if length <= self.windows[group_before] and self._is_run_whole(names, group_before, last + 1):
                    self._add_end(names, progress, <int32_t> last + 1)
                length = 0
            group_before = group if index >= 0 else -1
            last = index
            length += 1

    cdef Py_ssize_t _index_of(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        """Return the index on the path of a key's position, or -1."""
        cdef Py_ssize_t low = 0, high = self.path_length, middle
        cdef int64_t position = names.uses[place].position
        while low < high:
            middle = (low + high) // 2
            if names.uses[self.path[middle]].position < position:
                low = middle + 1
            else:
                high = middle
        return low if low < self.path_length and names.uses[self.path[low]].position == position else -1

    cdef bint _is_run_whole(self, RequestKeys names, int group, Py_ssize_t end) noexcept nogil:
        """Return whether a group's set at `end` is offered or resident, and its next key is neither."""
        cdef Py_ssize_t i
        for i in range(max(end - self.windows[group], 0), min(end + 1, self.path_length)):
            if (self._windowed_row(self._anchor_at(names, i), group) != 0
                    or self._is_offered(names, i, group)) != (i < end):
                return False
        return True

    cdef void _add_end(self, RequestKeys names, Progress* progress, int32_t end) noexcept nogil:
        """Add an end. It replaces an end that the engine does not offer and that is not decided."""
        cdef int i, num_ends = progress.num_ends
        cdef int32_t* ends = progress.ends
        for i in range(num_ends):
            if ends[i] == end:
                return
        if end <= progress.hit:
            return
        i = num_ends - 1
        if num_ends and ends[i] == end + 1 == self.path_length and not self._is_end_offered(names, end + 1):
            # The engine computes the last token of a prompt again, so the prompt ends with its last block.
            ends[i] = end
            return
        if num_ends == MOST_ENDS:
            if progress.num_decided or self._is_end_offered(names, ends[0]):
                return
            ends[0] = ends[1]
            num_ends -= 1
        elif num_ends and end < ends[0] or progress.num_decided > num_ends:
            progress.num_decided += progress.num_decided > 0
        if num_ends and ends[0] > end:
            ends[1] = ends[0]
            ends[0] = end
        else:
            ends[num_ends] = end
        progress.num_ends = <uint8_t> (num_ends + 1)

    cdef void _order_new_keys(self, RequestKeys names, const Progress* progress) noexcept nogil:
        """List the new keys head first, each set behind its end. An anchor without its parent is not among them."""
        cdef Py_ssize_t i, j, place, last = -2
        cdef int group, unit = 0
        for i in range(self.path_length):
            if names.uses[self.path[i]].is_taken:
                if i == 0 or last == i - 1 or names.row_now(self.table, self.path[i - 1]) != 0:
                    self._add_new(names, self.path[i], i, unit, False)
                    last = i
            if unit < progress.num_ends and i + 1 == progress.ends[unit]:
                for group in range(self.num_groups):
                    if self.windows[group] == 0:
                        continue
                    for j in range(max(i + 1 - self.windows[group], 0), i + 1):
                        place = self._windowed_place(names, self._anchor_at(names, j), group)
                        if place >= 0 and names.named[place].seen and names.uses[place].is_taken:
                            self._add_new(names, place, j, unit, True)
                unit += 1

    cdef void _add_new(
        self, RequestKeys names, Py_ssize_t place, Py_ssize_t index, int unit, bint is_windowed
    ) noexcept nogil:
        names.uses[place].is_taken = False      # so that no key is listed twice
        self.new[self.num_new].place = place
        self.new[self.num_new].index = index
        self.new[self.num_new].unit = unit
        self.new[self.num_new].is_windowed = is_windowed
        self.num_new += 1

    cdef void _protect(self, RequestKeys names, const Progress* progress) noexcept nogil:
        """Mark the rows of the request's path and of the sets of its ends: they are not evicted for it."""
        cdef Py_ssize_t i
        cdef int32_t row
        cdef int group, end
        for i in range(self.path_length):
            self.table.rows[names.row_now(self.table, self.path[i])].mark = self.table.mark
        for end in range(progress.num_ends):
            for group in range(self.num_groups):
                if self.windows[group] == 0:
                    continue
                for i in range(max(progress.ends[end] - self.windows[group], 0), progress.ends[end]):
                    row = self._windowed_row(self._anchor_at(names, i), group)
                    self.table.rows[row].mark = self.table.mark

    cdef Py_ssize_t _make_room(
        self, RequestKeys names, Progress* progress, int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Decide and evict for one unit after the other. Return how many of the new keys are stored."""
        cdef Py_ssize_t start = 0, stop, need, room = self.table.num_free
        cdef int unit
        while start < self.num_new and progress.mode == OPEN:
            unit = self.new[start].unit
            stop = start
            while stop < self.num_new and self.new[stop].unit == unit:
                stop += 1
            if unit >= progress.num_decided:
                progress.num_decided = <uint8_t> (unit + 1)
                need = self._num_absent(names, progress, unit) - room
                if need > 0 and not self._is_worth(names, start, need - self.table.num_in_list[QUEUED]):
                    progress.mode = DECLINED
                    break
            room = self._evict_for(stop, victims, num_victims)
            if room < stop:
                progress.mode = DECLINED
                return room
            start = stop
        return start

    cdef Py_ssize_t _num_absent(self, RequestKeys names, const Progress* progress, int unit) noexcept nogil:
        """Return the number of absent keys of the path up to the end of a unit."""
        cdef Py_ssize_t i, num_absent = 0, stop = self.path_length
        cdef int32_t before = 0
        cdef int group, end
        if unit < progress.num_ends:
            stop = progress.ends[unit]
        for i in range(stop):
            num_absent += names.row_now(self.table, self.path[i]) == 0
        for end in range(min(unit + 1, progress.num_ends)):
            for group in range(self.num_groups):
                if self.windows[group] != 0:
                    for i in range(max(progress.ends[end] - self.windows[group], before), progress.ends[end]):
                        num_absent += self._windowed_row(self._anchor_at(names, i), group) == 0
            before = progress.ends[end]
        return num_absent

    cdef Py_ssize_t _evict_for(self, Py_ssize_t n, int32_t* victims, Py_ssize_t* num_victims) noexcept nogil:
        """Evict until `n` keys of this store have room, if possible. Return how many have."""
        cdef Py_ssize_t need = n - self.table.num_free - num_victims[0]
        if need > 0:
            num_victims[0] += self._evict_blocks(need, victims + num_victims[0])
        return self.table.num_free + num_victims[0]

    cdef bint _is_worth(self, RequestKeys names, Py_ssize_t at, Py_ssize_t n) noexcept nogil:
        """Return whether a new key is worth more than the cheapest three quarters of `n` listed anchors."""
        cdef Py_ssize_t place = self.path[self.new[at].index]
        cdef int32_t row = names.row_now(self.table, place)
        cdef Label label = self._label_of(row, 0 if row != 0 else self._ghost_of(names, place))
        cdef int64_t worth = self.values.value[class_of(self.aged, group_in(label)) * NUM_BINS if label != 0 else 0]
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
        cdef int word
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
                                self.num_passes -= 1
                                self.num_passed += 1
                                if self.num_passes <= 0:
                                    return got
                            group = self.aged.groups[group].next[HOLDERS]
                        cohort = self.aged.cohorts[cohort].next[HOLDERS]
        return got

    cdef bint _is_idle(self, int32_t row) noexcept nogil:
        return ref_of(self.table, row) == 0 and self.table.rows[row].mark != self.table.mark

    cdef Py_ssize_t _evict_queued(self, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Select up to `n` queued victims, oldest first. A parent that nothing needs any more follows its child.

        Rows in use keep their place, and the rest of the store passes over them at once.
        """
        cdef Py_ssize_t got = 0
        cdef int32_t prev = self.passed_over, row
        while got < n and self.num_passes > 0:
            row = self.table.rows[prev].next if prev != 0 else self.queue_first
            if row == 0:
                break
            if self._is_idle(row):
                self._remove(row)
                victims[got] = row
                got += 1
            else:
                prev = row
                self.num_passes -= 1
        self.passed_over = prev
        return got

    cdef void _remove(self, int32_t row) noexcept nogil:
        """Remove a queued key."""
        self._unlink_queued(row)
        count_rows(self.table, QUEUED, -1)
        self.table.rows[row].list_idx = LEAVING
        self._follow(row)

    cdef void _follow(self, int32_t row) noexcept nogil:
        """Remove a row from its parent. The parent is queued if nothing needs it any more."""
        cdef int32_t parent = self._leave_parent(row) if self._place_of(row).label != 0 else 0
        if parent != 0 and self.members[parent].kids == 0 and not self.units[parent].is_boundary:
            self._queue(parent)

    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        cdef Py_ssize_t i, index
        cdef int32_t row, parent, ghost
        cdef Progress* progress = self._progress_of(names)
        for i in range(n):
            row = names.row_now(self.table, self.new[i].place)
            index = self.new[i].index
            ghost = names.uses[self.new[i].place].note
            memset(&self.units[row], 0, sizeof(Unit))
            self.members[row].kids = 0
            self._place_of(row).label = 0
            self._place_of(row).parent = 0
            if self.new[i].is_windowed:
                self.table.rows[row].list_idx = WINDOWED
                count_rows(self.table, WINDOWED, 1)
                if progress.mode == BY_LRU:
                    self._place_of(row).label = self._forget(ghost) if ghost != 0 else 0
                    self._queue(row)
                continue
            parent = names.row_now(self.table, self.path[index - 1]) if index > 0 else 0
            self._set_parent(row, parent)
            if parent != 0:
                self._unqueue(parent)
            self._append(self._forget(ghost), row, GROUPED)
            count_rows(self.table, GROUPED, 1)
        self._complete(names, progress)

    cdef void _complete(self, RequestKeys names, const Progress* progress) noexcept nogil:
        """End a store: make the boundaries whose sets are complete."""
        cdef Py_ssize_t deepest = progress.hit
        cdef int32_t row
        cdef int end
        for end in range(progress.num_ends if progress.mode != BY_LRU else 0):
            row = names.row_now(self.table, self.path[progress.ends[end] - 1])
            if (row != 0 and self._is_set_resident(names, progress.ends[end])
                    and self._is_chain(names, progress.ends[end])):
                if not self.units[row].is_boundary:
                    self._make_boundary(names, progress.ends[end], row)
                deepest = progress.ends[end]
        if deepest > progress.hit > 0:
            self._pass_boundary(names, progress.hit)
        self._trim()

    cdef void on_request_end(self, RequestKeys names) noexcept nogil:
        """Queue windowed keys that no boundary needs. If the prompt was not offered to its end, queue its last anchor.

        No other request resumes at that anchor. During the request, other requests would evict the keys first.
        """
        cdef Py_ssize_t place
        cdef int32_t row, after, last = 0
        if self._progress_of(names).mode == BY_LRU:
            return
        for place in range(names.num_named):
            if names.named[place].seen and self._group_of(names.named[place].key) != self.anchor_group:
                row = names.row_now(self.table, place)
                if self.table.rows[row].list_idx == WINDOWED and row != 0 and self.units[row].needs == 0:
                    self._queue(row)
        after = names.head
        while after != 0:
            if self._group_of(names.named[after - 1].key) == self.anchor_group:
                row = names.row_now(self.table, after - 1)
                if row == 0:
                    if names.named[after - 1].mark == 0 and last != 0 and not self.units[last].is_boundary:
                        self._give_up(last)
                    return
                last = row
            after = names.uses[after - 1].after

    # ---- failures and resets ----------------------------------------------------------------------------------------

    cdef void on_failure(self, RequestKeys names, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Remove blocks of failed stores. The request's boundaries that need them end.

        If another request has made a boundary that counts on them, `needs` of other keys may be too low from then on:
        they may leave early, but no block is read before it was written.
        """
        cdef Py_ssize_t i
        cdef int32_t row
        for i in range(n):
            row = rows[i]
            if self.table.rows[row].list_idx == QUEUED:
                self._unlink_queued(row)
            elif self.table.rows[row].list_idx == GROUPED:
                self._unlink(row)
            self.table.rows[row].list_idx = LEAVING
        if n and names is not None and self._read_path(names):
            self._end_boundaries(names)
        for i in range(n):
            row = rows[i]
            if self.units[row].is_boundary:
                self._give_up(row)
            self.has_failed = self.has_failed or self.units[row].needs > 0 or self.members[row].kids > 0
        for i in range(n):
            self._follow(rows[i])
        if n:
            self._remember_rows(rows, n)
            self._trim()

    cdef void _end_boundaries(self, RequestKeys names) noexcept nogil:
        """Give up the request's boundaries whose set or path has lost a key."""
        cdef const Progress* progress = self._progress_of(names)
        cdef Py_ssize_t i = 0, end
        cdef int32_t row
        cdef int at
        cdef bint has_lost = False
        if progress.mode == BY_LRU:
            return
        for at in range(progress.num_ends):
            end = progress.ends[at]
            while i < end:
                has_lost = has_lost or self._is_leaving(names.row_now(self.table, self.path[i]))
                i += 1
            row = names.row_now(self.table, self.path[end - 1])
            if row == 0 or not self.units[row].is_boundary:
                continue
            if has_lost or not self._is_set_resident(names, end):
                self._give_up(row)

    cdef bint _is_leaving(self, int32_t row) noexcept nogil:
        return row != 0 and self.table.rows[row].list_idx == LEAVING

    cdef void on_reset(self) noexcept nogil:
        GittinsCachePolicy.on_reset(self)
        self.has_failed = False
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
            if rows[row].key != NULL and self.units[row].needs != needs.pop(row, 0) and not self.has_failed:
                raise BlockStateError(f"invariant broken: row {row} counts {self.units[row].needs} boundaries")
            num_windowed += rows[row].key != NULL and rows[row].list_idx == WINDOWED
        if needs and not self.has_failed:
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
