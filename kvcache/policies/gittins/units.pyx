"""Units: the rule of gittins for models with several KV-cache groups, which stores and evicts whole stretches.

Compiled because it is a policy. Such a model resumes a prompt only where the keys of its windowed groups are resident,
too. One missing windowed key makes all blocks back to the previous such place useless.
"""

cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

from kvcache.core.eviction_queue cimport Row
from kvcache.core.ghosts cimport GhostList
from kvcache.core.index cimport zeroed
from kvcache.core.request_keys cimport STATE_SIZE, RequestKeys
from kvcache.core.table cimport count_rows, ref_of
from kvcache.policies.gittins.groups cimport HOLDERS, Queue, class_of, lowest_bit
from kvcache.policies.gittins.policy cimport (
    GROUPED, NUM_LISTS, PASSING, QUEUED, QUEUED_SHARE, WINDOWED, GittinsCachePolicy, Label, MadeGroup, RequestState,
    group_in, pull, push,
)
from kvcache.policies.gittins.sets cimport GroupSets, anchor_after, anchor_before, position_of
from kvcache.policies.gittins.values cimport CLASSES_PER_HINT, NUM_BINS

from kvcache.block import BlockStateError
from kvcache.options import check_windows
from kvcache.policies.base import CachePolicy

cdef enum:
    WAY_BACK = 8            # a passed boundary is given up if an older one is nearer than this many times its slots
    MOST_PASSED = 1024      # rows and groups in use that one store skips
    LEAVING = NUM_LISTS     # in place of a list, of a row that is being removed
    MOST_ENDS = 2           # ends of a prompt: behind its leading resident anchors, and behind its last one
    MEMORY_FACTOR = 4

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

# State of a request, behind its RequestState. An anchor of the path is named by its place + 1; 0: none.
cdef struct Progress:
    uint64_t era            # of the policy; another one: the policy was reset
    int64_t loaded          # the largest position of a windowed key that was loaded
    int32_t hit             # the anchor at which the request resumes; later the end before its reply's
    int32_t[MOST_ENDS + 2] ends     # the last anchor before each end; the last one may be its reply's
    int32_t num_named       # keys that the request had named after its first offer
    uint8_t has_reply_end
    uint8_t has_hit_end     # the first end is the hit: a tier may have read its blocks
    uint8_t num_ends
    uint8_t has_passed_hit     # it has made a deeper boundary
    uint8_t num_decided     # units; the last unit holds the anchors behind the last end
    uint8_t mode

# A new key of a store: its place in the request, the anchor at its position, and its unit.
cdef struct NewKey:
    Py_ssize_t place
    int32_t anchor
    int unit
    bint is_windowed


@cython.final
cdef class UnitGittinsPolicy(GittinsCachePolicy):
    """UnitGittinsPolicy(cache_capacity)

    `gittins` for models with several KV-cache groups. Call `set_group_windows` before the first use.

    Attributes
    ----------
    stores_all : bool
        Whether tiers below hold blocks, too. Declined blocks then pass through a share of the slots, first in, first
        out, and the rule does not count them as resident. Blocks read from a tier are treated like new blocks.
    spare_slots : int
        Slots that the rule and the share leave free. Passing blocks are evicted only if a store finds no free slot.

    Notes
    -----
    The keys of the first group without a window are *anchors*: they have classes and ages. A boundary is an anchor at
    which a request can resume, because its *set*, the windowed keys just before its end, is resident. A stretch up to
    such an end is stored whole or declined. Keys that nothing needs any more leave first. Windowed keys have no value
    of their own: they leave with their boundaries. The keys of other groups without a window are an anchor's
    *companions*: they are stored with it, leave with it, and count in slots.

    A request's first call must name the positions of its prompt's keys, and use its anchors. Without positions, or with
    a key of an unknown group or at no anchor's position (blocks of another size), sets cannot be found: such a request
    is served by lru, and counted (`lru_requests`).
    """

    group_policy = None

    cdef GroupSets sets
    cdef Unit* units                    # [num_rows]
    # Of the call in progress.
    cdef NewKey* new                    # [room]: the absent keys in the order in which they are stored
    cdef uint64_t* anchor_hashes        # [room], behind `new`: the anchors that the request uses for the first time
    cdef int32_t* anchor_rows
    cdef int32_t* anchor_places
    cdef Py_ssize_t* candidates         # [room]: the keys that the rule decides on, absent ones first
    cdef Py_ssize_t room
    cdef Py_ssize_t num_new
    cdef int32_t passed_over            # the last queued row that is in use, for the rest of the store
    cdef int num_passes                 # rows and groups in use that this store may still pass over
    cdef readonly uint64_t lru_requests
    cdef readonly uint64_t forced_blocks    # stored without a test, because the share was in use
    cdef public Py_ssize_t spare_slots
    cdef Queue share                    # rows above a tier that pass through host memory: first in, first out
    cdef Py_ssize_t share_slots
    cdef Py_ssize_t num_stored          # of the call in progress: leading new keys that the rule stores; the rest pass
    cdef Py_ssize_t most_victims
    cdef bint is_complete               # the call in progress has made its boundaries already
    cdef Py_ssize_t num_queued_anchors
    cdef bint has_failed                # a failed store may have left other requests' boundaries incomplete

    def __cinit__(self, cache_capacity):
        # Progress lies behind the RequestState.
        if sizeof(RequestState) + sizeof(Progress) > STATE_SIZE * sizeof(uint64_t):
            raise MemoryError(f"a request needs {sizeof(RequestState) + sizeof(Progress)} bytes of state")
        self.takes_any = True
        self.again_list = PASSING
        self.sets = GroupSets(self.table, [None])
        self.units = <Unit*> zeroed(self.table.num_rows * sizeof(Unit))
        if self.units == NULL:
            raise MemoryError(f"no memory for {cache_capacity} blocks")

    def __dealloc__(self):
        free(self.units)
        free(self.new)

    cdef int reserve_policy(self, Py_ssize_t n) except -1:
        cdef void* block
        cdef Py_ssize_t num_slots = self.table.cache_capacity - self.spare_slots
        self.share_slots = max(1, num_slots // QUEUED_SHARE) if self.stores_all else 0
        self.memory_size = MEMORY_FACTOR * ((num_slots - self.share_slots) // self.sets.num_full)
        # A request may name passing keys that a call does not offer.
        n += self.table.num_in_list[PASSING]
        GittinsCachePolicy.reserve_policy(self, n)
        if n > self.room:
            block = realloc(self.new, 2 * n * (sizeof(NewKey) + 2 * sizeof(uint64_t) + 2 * sizeof(int32_t)))
            if block == NULL:
                raise MemoryError(f"no memory for a call of {n} keys")
            self.room = 2 * n
            self.new = <NewKey*> block
            self.anchor_hashes = <uint64_t*> (self.new + self.room)
            self.candidates = <Py_ssize_t*> (self.anchor_hashes + self.room)
            self.anchor_rows = <int32_t*> (self.candidates + self.room)
            self.anchor_places = self.anchor_rows + self.room
        return 0

    def set_group_windows(self, group_windows):
        """Set the window of each KV-cache group in blocks; None: the group has no window.

        ValueError as `kvcache.options.check_windows`; BlockStateError: the policy holds blocks already.
        """
        windows = check_windows(group_windows)
        if self.table.num_resident:
            raise BlockStateError("group_windows must be set before the first block is stored")
        self.sets = GroupSets(self.table, windows)

    def gauges(self):
        """Return the gauges of `gittins`, the requests served by lru, and the blocks stored without a test."""
        return {
            **GittinsCachePolicy.gauges(self), "lru_requests": self.lru_requests, "forced_blocks": self.forced_blocks,
        }

    def free_slots(self, Py_ssize_t n):
        """Return up to `n` free slots, first those that were freed last."""
        cdef int32_t row = self.table.free_head
        slots = []
        while row != 0 and len(slots) < n:
            slots.append(row - self.table.first)
            row = self.table.rows[row].next
        return slots

    @property
    def leave_first(self):
        """Keys that nothing needs, oldest first."""
        return self._keys_from(self.queue.first)

    @property
    def passing(self):
        """Keys in the share, oldest first."""
        return self._keys_from(self.share.first)

    cdef list _keys_from(self, int32_t row):
        keys = []
        while row != 0:
            keys.append(<object> self.table.rows[row].key)
            row = self.table.rows[row].next
        return keys

    @property
    def listed(self):
        """The lists of anchors: (class, bin, keys in path order) of each group, the oldest of a cell first."""
        return self.aged.listed(self.table)

    cdef int32_t _row_of(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        """Return the row of a key that is resident for the rule, or 0."""
        cdef int32_t row = names.row_now(self.table, place)
        cdef int list_idx = self.table.rows[row].list_idx
        return row if list_idx != PASSING and list_idx != LEAVING else 0

    cdef Py_ssize_t _room(self) noexcept nogil:
        """Return how many more keys the rule may hold."""
        if not self.stores_all:
            return self.table.num_free
        return max(0, self.table.cache_capacity - self.spare_slots - self.share_slots
                   - self.table.num_resident + self.table.num_in_list[PASSING])

    cdef int32_t _companion(self, int32_t anchor, int group) noexcept nogil:
        """Return the row of another group without a window at an anchor's position, which leaves with it, or 0."""
        cdef int32_t row
        if self.sets.windows[group] != 0 or group == self.sets.anchor_group:
            return 0
        row = self.sets.windowed_row(self.table.rows[anchor].key, group)
        return row if self.table.rows[row].list_idx == WINDOWED else 0

    cdef bint _is_companion(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        """Return whether a key is of another group without a window."""
        cdef int group = -1 - names.uses[place].note
        return self.sets.num_full > 1 and group >= 0 and self.sets.windows[group] == 0

    cdef bint _has_set(self, RequestKeys names, int32_t end) noexcept nogil:
        """Return whether the set of an end is resident."""
        cdef Py_ssize_t i
        cdef int32_t row
        for i in range(self.sets.read(names, end)):
            row = self.sets.keys[i].row
            if row == 0 or self.table.rows[row].list_idx == LEAVING:
                return False
        return True

    cdef bint _is_resumable(self, RequestKeys names, int32_t end) noexcept nogil:
        """Return whether the set of an end is resident, and each anchor in its reach is the parent of the next.

        A boundary is given up along its parents. They differ from the path if a request has not named all its keys.
        Afterwards, `sets.keys` holds the set.
        """
        cdef Py_ssize_t i
        cdef int32_t before, row, parent
        if not self._has_set(names, end):
            return False
        for i in range(self.sets.largest_window):
            row = self._row_of(names, end - 1)
            if row == 0:
                return False
            before = anchor_before(names, end)
            parent = self._parent_of(row)
            if i + 1 < self.sets.largest_window and parent != (
                    self._row_of(names, before - 1) if before != 0 else 0):
                return False
            if before == 0:
                return parent == 0
            end = before
        return True

    cdef void _queue(self, int32_t row) noexcept nogil:
        """Append a key that nothing needs to the queue, unless it is in it. An anchor leaves its list."""
        cdef int list_idx = self.table.rows[row].list_idx
        if list_idx == QUEUED or list_idx == LEAVING:
            return
        if list_idx == GROUPED:
            self._unlink(row)
        self.num_queued_anchors += self._place_of(row).label != 0
        count_rows(self.table, list_idx, -1)
        count_rows(self.table, QUEUED, 1)
        self._append(self._place_of(row).label, row, QUEUED)

    cdef void _unqueue(self, int32_t row) noexcept nogil:
        """Remove a key from the queue, if it is in it. An anchor becomes the tail of its group's list."""
        if self.table.rows[row].list_idx != QUEUED:
            return
        self._unlink(row)
        count_rows(self.table, QUEUED, -1)
        if self._place_of(row).label != 0:
            self.num_queued_anchors -= 1
            self._append(self._place_of(row).label, row, GROUPED)
            count_rows(self.table, GROUPED, 1)
        else:
            self.table.rows[row].list_idx = WINDOWED
            count_rows(self.table, WINDOWED, 1)

    cdef void _give_up(self, int32_t anchor) noexcept nogil:
        """End a boundary, if there is one. Keys that nothing else needs are queued, windowed keys before the anchor."""
        cdef int group
        cdef int32_t row, ancestor, _step
        if self.units[anchor].is_boundary:
            self.units[anchor].is_boundary = False
            for group in range(self.sets.num_groups - 1, -1, -1):
                ancestor = anchor
                for _step in range(self.sets.windows[group]):
                    if ancestor == 0:
                        break
                    row = self.sets.windowed_row(self.table.rows[ancestor].key, group)
                    if row != 0 and self.units[row].needs > 0:
                        self.units[row].needs -= 1
                        if self.units[row].needs == 0:
                            self._queue(row)
                    ancestor = self._parent_of(ancestor)
        if self.members[anchor].kids == 0:
            self._queue(anchor)

    cdef void _pass_boundary(self, RequestKeys names, int32_t hit) noexcept nogil:
        """Give up the boundary at the hit if another one is close before it: the request has made a deeper one."""
        cdef int32_t row, anchor = names.row_now(self.table, hit - 1)
        cdef int32_t _step
        if anchor == 0 or not self.units[anchor].is_boundary:
            return
        for _step in range(WAY_BACK * self.sets.size - 1):
            hit = anchor_before(names, hit)
            if hit == 0:
                return
            row = names.row_now(self.table, hit - 1)
            if row != 0 and self.units[row].is_boundary:
                self._give_up(anchor)
                return

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
            group = self.sets.group_of(request.named[place].key)
            if group != self.sets.anchor_group:
                request.uses[place].note = -1 - group
            if group < 0 or not request.num_positions:
                self._serve_by_lru(progress)
            elif group == self.sets.anchor_group:
                places[count] = place
                anchor_rows[count] = rows[i] if self.table.rows[rows[i]].list_idx != PASSING else 0
                anchor_hashes[count] = hashes[i]
                count += 1
            elif request.named[place].mark == 0:
                # It is not offered, so it is loaded.
                progress.loaded = max(progress.loaded, request.uses[place].position)
        if progress.mode == BY_LRU:
            # The first key of the call becomes the youngest.
            for i in range(n - 1, -1, -1):
                if rows[i] != 0 and self.table.rows[rows[i]].list_idx == QUEUED:
                    self._unlink(rows[i])
                    self._append(self._place_of(rows[i]).label, rows[i], QUEUED)
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

    cdef Py_ssize_t on_offer(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place,
        int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Mark the keys to store. They are whole units, but where too many blocks are in use."""
        cdef Py_ssize_t i, num_taken = 0, num_absent = n
        cdef Progress* progress = self._progress_of(names)
        num_victims[0] = 0
        self.num_new = 0
        self.passed_over = 0
        self.num_passes = MOST_PASSED
        self.is_complete = False
        if self.stores_all:
            if not names.num_positions and progress.mode == NEW:
                return self._move_in(names, places, n, victims, num_victims)
            n = self._add_passing(names, progress, places, n)
            places = self.candidates
        if not names.num_positions:
            progress.mode = BY_LRU      # a call without a request
        self._recall(names, places, n, num_offered, last_place)
        for i in range(n):
            names.uses[places[i]].is_taken = True
        if progress.mode != BY_LRU:
            if progress.mode == NEW:
                self._find_ends(names, progress)
            self._move_reply_end(names, progress)
            if not progress.has_reply_end:
                self._move_ends(names, progress, places, n)
            if self.stores_all:
                self._leave_out(names, progress, n)
            self._order_new_keys(names, progress, places, n)
            self.num_stored = self._make_room(names, progress, victims, num_victims)
            if self.stores_all:
                self._pass_on(names, progress, num_absent, victims, num_victims)
            else:
                self.num_new = self.num_stored
        else:
            for i in range(num_absent):
                self._add_new(names, places[i], 0, 0, True)
            # Blocks that pass beyond the share would keep out a request's blocks for ever.
            num_victims[0] = self._evict_passing(
                min(num_absent - self.table.num_free, self.table.num_in_list[PASSING] - self.share_slots), victims)
            self.num_new = self.num_stored = min(
                num_absent, self._evict_for(None, num_absent, self.table.num_free, victims, num_victims))
        for i in range(n):
            names.uses[places[i]].is_taken = False
        self._remember_rows(victims, num_victims[0])
        for i in range(self.num_new):
            if names.row_now(self.table, self.new[i].place) == 0:
                names.uses[self.new[i].place].is_taken = True
                num_taken += 1
        if num_taken == 0:
            self._insert(names, progress)
        return num_taken

    cdef Py_ssize_t num_more_victims(self, RequestKeys request, Py_ssize_t n) noexcept nogil:
        """Return how many passing rows a store of `n` absent keys may let in or evict."""
        cdef Py_ssize_t num_more = self.table.num_in_list[PASSING]
        cdef const Progress* progress = self._progress_of(request)
        if not self.spare_slots:
            num_more = min(num_more, self.num_again + (
                request.num_seen if progress.mode == NEW and progress.loaded > 0 else 0))
        self.most_victims = n + num_more
        # The last victim may be an anchor with its companions.
        return num_more + self.sets.num_full - 1

    cdef Py_ssize_t _move_in(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Put blocks that a tier reads into the share. If it is in use, evict blocks for them without a test."""
        cdef Py_ssize_t i, need = n - self.table.num_free
        if need > 0:
            num_victims[0] = self._make_way_for(None, need, need, victims)
            self._remember_rows(victims, num_victims[0])
        self.num_new = min(n, self.table.num_free + num_victims[0])
        self.num_stored = 0
        for i in range(self.num_new):
            names.uses[places[i]].is_taken = True
            self.new[i] = NewKey(places[i], 0, 0, True)
        self._trim()
        return self.num_new

    cdef Py_ssize_t _make_way_for(
        self, RequestKeys names, Py_ssize_t n, Py_ssize_t need, int32_t* victims
    ) noexcept nogil:
        """Select `n` passing victims, oldest first. If fewer than `need` are idle, the rule evicts more blocks."""
        cdef Py_ssize_t got = self._evict_passing(n, victims), num_forced = 0
        if got < need:
            num_forced = self._evict_blocks(names, need - got, victims + got)
        self.forced_blocks += num_forced
        return got + num_forced

    cdef Py_ssize_t _evict_passing(self, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Select up to `n` passing victims, oldest first, and return their number."""
        cdef Py_ssize_t got = 0
        cdef int num_left = MOST_PASSED
        cdef int32_t row, next = self.share.first
        while next != 0 and got < n and num_left > 0:
            row = next
            next = self.table.rows[row].next
            # A tier or the engine is reading or writing the block.
            if ref_of(self.table, row) != 0:
                num_left -= 1
                continue
            pull(self.table.rows, &self.share, row)
            count_rows(self.table, PASSING, -1)
            self.table.rows[row].list_idx = LEAVING
            victims[got] = row
            got += 1
        return got

    cdef Py_ssize_t _add_passing(
        self, RequestKeys names, const Progress* progress, const Py_ssize_t* places, Py_ssize_t n
    ) noexcept nogil:
        """List, behind the absent keys, the passing keys that the call offers or that the request has loaded.

        The rule decides on them as on absent keys. Return the number of all.
        """
        cdef Py_ssize_t i, count = n + self.num_again
        cdef int32_t place, row
        for i in range(count):
            self.candidates[i] = places[i]
        if progress.mode == NEW and progress.loaded > 0:
            for i in range(names.num_seen):
                place = names.used[i]
                row = names.row_now(self.table, place)
                if (self.table.rows[row].list_idx == PASSING and names.named[place].mark != self.table.mark
                        and names.uses[place].position <= progress.loaded):
                    self.candidates[count] = place
                    count += 1
        return count

    cdef void _leave_out(self, RequestKeys names, const Progress* progress, Py_ssize_t n) noexcept nogil:
        """Decline the keys behind the last end that fits in host memory with its set: a tier would never be read."""
        cdef int64_t most = -1, position, tokens = names.uses[names.head - 1].position if names.head != 0 else 0
        cdef Py_ssize_t i, num_slots = self.table.cache_capacity
        cdef int end
        if tokens <= 0 or self.sets.num_full * (names.largest_position // tokens) + self.sets.size <= num_slots:
            return
        for end in range(progress.num_ends):
            position = position_of(names, progress.ends[end])
            if self.sets.num_full * (position // tokens) + self.sets.read(names, progress.ends[end]) <= num_slots:
                most = max(most, position)
        for i in range(n):
            if names.uses[self.candidates[i]].position > most:
                names.uses[self.candidates[i]].is_taken = False

    cdef void _pass_on(
        self, RequestKeys names, Progress* progress, Py_ssize_t num_absent, int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Put the absent keys that the rule declines into the share, the head of the prompt first.

        Passing keys that the rule stores leave the share. Where too many blocks are in use, the last keys are declined.
        """
        cdef Py_ssize_t i, need, num_over, num_new
        cdef int32_t row
        self._force_loads(names, progress, victims, num_victims)
        need = -self.table.num_free - num_victims[0]
        for i in range(self.num_stored):
            row = names.row_now(self.table, self.new[i].place)
            need += row == 0
            if row != 0:
                pull(self.table.rows, &self.share, row)
                count_rows(self.table, PASSING, -1)
                self.table.rows[row].list_idx = LEAVING
        num_new = self.num_stored
        for i in range(self.num_stored, self.num_new):
            if names.row_now(self.table, self.new[i].place) == 0:
                self.new[num_new] = self.new[i]
                num_new += 1
        self.num_new = num_new
        for i in range(num_absent):
            if names.uses[self.candidates[i]].is_taken:
                self._add_new(names, self.candidates[i], 0, 0, True)
        need += self.num_new - self.num_stored
        num_over = self.table.num_in_list[PASSING] + self.num_new - self.num_stored - self.share_slots
        num_over = min(num_over, self.most_victims - num_victims[0])
        i = self._make_way_for(names, max(need, num_over), need, victims + num_victims[0])
        num_victims[0] += i
        need -= i
        i = self.num_new
        while need > 0 and i > 0:
            i -= 1
            if names.row_now(self.table, self.new[i].place) == 0:
                memmove(&self.new[i], &self.new[i + 1], (self.num_new - i - 1) * sizeof(NewKey))
                self.num_new -= 1
                self.num_stored -= i < self.num_stored
                need -= 1

    cdef void _force_loads(
        self, RequestKeys names, Progress* progress, int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Store the first of the declined loads without a test, if they are more than the share has slots."""
        cdef Py_ssize_t num_loads = 0, room
        if self.num_stored != 0:
            return
        while (num_loads < self.num_new and names.row_now(self.table, self.new[num_loads].place) != 0
                and position_of(names, self.new[num_loads].anchor) <= progress.loaded):
            num_loads += 1
        if num_loads <= self.share_slots:
            return
        self._complete(names, progress)
        self.is_complete = True
        room = self._room()
        self.num_stored = min(num_loads - self.share_slots, self._evict_for(
            names, num_loads - self.share_slots, room, victims, num_victims))
        self.forced_blocks += self.num_stored

    cdef void _recall(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place
    ) noexcept nogil:
        """Remember new anchors again that were dropped since their use. Windowed keys must have an anchor."""
        cdef Py_ssize_t i
        cdef int32_t ghost, cls
        cdef MadeGroup[CLASSES_PER_HINT] made
        memset(made, 0, sizeof(made))
        if names.next_use >= self.values.num_hints:
            self._take_up_hint(names.next_use)
        for i in range(n):
            if self.sets.group_of(names.named[places[i]].key) != self.sets.anchor_group:
                names.uses[places[i]].note = min(names.uses[places[i]].note, -1)
                # Its group has blocks of another size.
                if self.sets.neighbour(names, <int32_t> places[i] + 1, self.sets.anchor_group) == 0:
                    self._serve_by_lru(self._progress_of(names))
                continue
            ghost = self._ghost_of(names, places[i])
            if ghost == 0:
                cls = 0 if self._is_last(names, <int32_t> places[i], places[i] == last_place) else 2
                ghost = self._remember(names.named[places[i]].hash, self._join_group(
                    &made[cls], names.next_use * CLASSES_PER_HINT + cls, self._length_of(names, num_offered)))
            names.uses[places[i]].note = ghost

    cdef void _find_ends(self, RequestKeys names, Progress* progress) noexcept nogil:
        """Find the hit and the ends of a request: behind its leading resident anchors, and behind its prompt.

        A call that offers the path's last anchor offers the windowed keys of the prompt's end, too. Otherwise, the
        prompt is taken to end with the path, until windowed keys are offered.
        """
        cdef int32_t limit = self._last_anchor(names), full = 0, hit, anchor = anchor_after(names, 0)
        cdef int64_t found = names.found_position if self.stores_all else 0
        progress.mode = OPEN
        progress.num_named = <int32_t> names.num_named
        if limit != 0 and names.named[limit - 1].mark == self.table.mark:
            while limit != 0 and not self.sets.is_end_offered(names, limit):
                limit = anchor_before(names, limit) if position_of(names, limit) > progress.loaded else 0
        while anchor != 0 and (limit == 0 or full != limit) and (
                position_of(names, anchor) <= found if found > 0 else names.row_now(self.table, anchor - 1) != 0):
            full = anchor
            anchor = anchor_after(names, anchor)
        hit = full
        while hit != 0 and (position_of(names, hit) > progress.loaded if progress.loaded > 0
                            else not self.units[names.row_now(self.table, hit - 1)].is_boundary):
            hit = anchor_before(names, hit)
        progress.hit = hit
        if self.stores_all and hit != 0 and progress.loaded > 0:
            progress.ends[0] = hit
            progress.num_ends = progress.has_hit_end = 1
        if limit == 0:
            return
        if full != hit:
            progress.ends[progress.num_ends] = full
            progress.num_ends += 1
        if limit != full:
            progress.ends[progress.num_ends] = limit
            progress.num_ends += 1

    cdef int32_t _last_anchor(self, RequestKeys names) noexcept nogil:
        cdef int32_t last = 0, after = names.finger
        while after != 0:
            last = after
            after = names.uses[after - 1].after
        return anchor_before(names, last) if last != 0 and names.uses[last - 1].note < 0 else last

    cdef void _move_reply_end(self, RequestKeys names, Progress* progress) noexcept nogil:
        """Take the path's last anchor as an end, if it is behind the prompt and the call offers windowed keys there.

        It replaces the reply's end of an earlier call. The boundary there is then passed like the one at the hit.
        """
        cdef int32_t last = self._last_anchor(names)
        if last <= progress.num_named or not self.sets.is_end_offered(names, last):
            return
        if not progress.has_reply_end:
            progress.has_reply_end = True
            progress.num_decided += progress.num_decided > progress.num_ends
            progress.num_ends += 1
        elif progress.ends[progress.num_ends - 1] != last:
            progress.hit = progress.ends[progress.num_ends - 1]
        progress.ends[progress.num_ends - 1] = last

    cdef void _move_ends(
        self, RequestKeys names, Progress* progress, const Py_ssize_t* places, Py_ssize_t n
    ) noexcept nogil:
        """Take the end of a set that the call offers as an end, if the request's ends are others.

        The engine has windowed keys only at such a place. If it offers all windowed keys, a run of them is longer.
        """
        cdef Py_ssize_t i, length = 0
        cdef int32_t anchor = 0, last = 0
        cdef int group = -1, group_before = -1
        for i in range(n + 1):
            group = -1 - names.uses[places[i]].note if i < n else -1
            anchor = self.sets.neighbour(names, <int32_t> places[i] + 1, self.sets.anchor_group) if group >= 0 else 0
            if last == 0:
                length = 0
            elif not (group == group_before and anchor != 0 and anchor == anchor_after(names, last)):
                if length <= self.sets.windows[group_before] and self.sets.is_run_whole(names, group_before, last):
                    self._add_end(names, progress, last)
                length = 0
            group_before = group
            last = anchor
            length += 1

    cdef void _add_end(self, RequestKeys names, Progress* progress, int32_t end) noexcept nogil:
        """Add an end. It replaces an end that the engine does not offer and that is not decided."""
        cdef int i, num_ends = progress.num_ends - progress.has_hit_end
        cdef int num_decided = progress.num_decided - progress.has_hit_end
        cdef int32_t* ends = progress.ends + progress.has_hit_end
        cdef int64_t position = position_of(names, end)
        cdef bint is_first
        for i in range(num_ends):
            if ends[i] == end:
                return
        if position <= position_of(names, progress.hit):
            return
        i = num_ends - 1
        if (num_ends and ends[i] == anchor_after(names, end) and anchor_after(names, ends[i]) == 0
                and not self.sets.is_end_offered(names, ends[i])):
            # The engine computes the last token of a prompt again, so the prompt ends with its last block.
            ends[i] = end
            return
        if num_ends == MOST_ENDS:
            if num_decided > 0 or self.sets.is_end_offered(names, ends[0]):
                return
            ends[0] = ends[1]
            num_ends -= 1
        is_first = num_ends and position < position_of(names, ends[0])
        if num_decided > 0 and (is_first or num_decided > num_ends):
            progress.num_decided += 1
        if is_first:
            ends[1] = ends[0]
        ends[0 if is_first else num_ends] = end
        progress.num_ends = <uint8_t> (progress.has_hit_end + num_ends + 1)

    cdef void _order_new_keys(
        self, RequestKeys names, const Progress* progress, const Py_ssize_t* places, Py_ssize_t n
    ) noexcept nogil:
        """List the new keys head first, each set behind its end. An anchor without its parent is not among them.

        The rows of the sets are protected.
        """
        cdef Py_ssize_t i, num_anchors = 0
        cdef int32_t anchor = 0, before, last = -1
        cdef int64_t position
        cdef int unit
        for i in range(n):
            if names.uses[places[i]].note >= 0 or self._is_companion(names, places[i]):
                num_anchors += 1
                if anchor == 0 or names.uses[places[i]].position < position_of(names, anchor):
                    anchor = self.sets.neighbour(names, <int32_t> places[i] + 1, self.sets.anchor_group)
        for unit in range(progress.num_ends + 1):
            position = position_of(names, progress.ends[unit]) if unit < progress.num_ends else INT64_MAX
            while num_anchors != 0 and anchor != 0 and position_of(names, anchor) <= position:
                if names.uses[anchor - 1].is_taken:
                    num_anchors -= 1
                    before = anchor_before(names, anchor)
                    if before == 0 or before == last or self._row_of(names, before - 1) != 0:
                        self._add_new(names, anchor - 1, anchor, unit, False)
                        last = anchor
                if self.sets.num_full > 1 and (last == anchor or self._row_of(names, anchor - 1) != 0):
                    num_anchors -= self._add_companions(names, anchor, unit)
                anchor = anchor_after(names, anchor)
            if unit < progress.num_ends:
                for i in range(self.sets.read(names, progress.ends[unit])):
                    self.table.rows[self.sets.keys[i].row].mark = self.table.mark
                    if self.sets.keys[i].place != 0 and names.uses[self.sets.keys[i].place - 1].is_taken:
                        self._add_new(names, self.sets.keys[i].place - 1, self.sets.keys[i].anchor, unit, True)

    cdef int _add_companions(self, RequestKeys names, int32_t anchor, int unit) noexcept nogil:
        """List the new companions of an anchor that is listed or resident. Return their number."""
        cdef int group, num_added = 0
        cdef int32_t place
        for group in range(self.sets.num_groups):
            if self.sets.windows[group] == 0 and group != self.sets.anchor_group:
                place = self.sets.neighbour(names, anchor, group)
                if place != 0 and names.uses[place - 1].is_taken:
                    self._add_new(names, place - 1, anchor, unit, True)
                    num_added += 1
        return num_added

    cdef void _add_new(
        self, RequestKeys names, Py_ssize_t place, int32_t anchor, int unit, bint is_windowed
    ) noexcept nogil:
        names.uses[place].is_taken = False      # so that no key is listed twice
        self.new[self.num_new] = NewKey(place, anchor, unit, is_windowed)
        self.num_new += 1

    cdef Py_ssize_t _make_room(
        self, RequestKeys names, Progress* progress, int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Decide and evict for one unit after the other. Return how many of the new keys are stored."""
        cdef Py_ssize_t start = 0, stop, need, num_queued, num_free = self._room(), room = num_free
        cdef int unit
        while start < self.num_new and progress.mode == OPEN:
            unit = self.new[start].unit
            stop = start
            while stop < self.num_new and self.new[stop].unit == unit:
                stop += 1
            if unit >= progress.num_decided:
                progress.num_decided = <uint8_t> (unit + 1)
                need = self._num_absent(names, progress, unit) - room
                num_queued = self.table.num_in_list[QUEUED] + self.num_queued_anchors * (self.sets.num_full - 1)
                # In anchors, rounded up.
                if need > 0 and not self._is_worth(names, self.new[start].anchor, max(
                        0, need - num_queued + self.sets.num_full - 1) // self.sets.num_full):
                    progress.mode = DECLINED
                    break
            room = self._evict_for(names, stop, num_free, victims, num_victims)
            if room < stop:
                progress.mode = DECLINED
                while room > 0 and self._is_companion(names, self.new[room].place):
                    room -= 1
                return room
            start = stop
        return start

    cdef Py_ssize_t _num_absent(self, RequestKeys names, const Progress* progress, int unit) noexcept nogil:
        """Return the number of absent keys of the path up to the end of a unit."""
        cdef Py_ssize_t i, num_absent = 0
        cdef int32_t anchor = 0, last = progress.ends[unit] if unit < progress.num_ends else 0
        cdef int64_t before = -1
        cdef int end
        while anchor == 0 or anchor != last:
            anchor = anchor_after(names, anchor)
            if anchor == 0:
                break
            num_absent += self.sets.num_full if self._row_of(names, anchor - 1) == 0 else 0
        for end in range(min(unit + 1, progress.num_ends)):
            for i in range(self.sets.read(names, progress.ends[end])):
                num_absent += self.sets.keys[i].row == 0 and position_of(names, self.sets.keys[i].anchor) > before
            before = position_of(names, progress.ends[end])
        return num_absent

    cdef Py_ssize_t _evict_for(
        self, RequestKeys names, Py_ssize_t n, Py_ssize_t room, int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Evict until `n` keys of this store have room, if possible. Return how many have; at first, `room` had."""
        cdef Py_ssize_t need = n - room - num_victims[0]
        if need > 0:
            num_victims[0] += self._evict_blocks(names, need, victims + num_victims[0])
        return room + num_victims[0]

    cdef bint _is_worth(self, RequestKeys names, int32_t anchor, Py_ssize_t n) noexcept nogil:
        """Return whether an anchor is worth more than the cheapest three quarters of `n` listed anchors."""
        cdef int32_t row = self._row_of(names, anchor - 1)
        cdef Label label = self._label_of(row, 0 if row != 0 else self._ghost_of(names, anchor - 1))
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
                cohort = self.aged.queues[HOLDERS][cell].first
                while cohort != 0 and n > 0:
                    group = self.aged.cohorts[cohort].groups[HOLDERS].first
                    while group != 0 and n > 0:
                        row = self.aged.groups[group].tail
                        while row != 0 and n > 0:
                            n -= 1
                            row = self.table.rows[row].prev
                        group = self.aged.groups[group].next[HOLDERS]
                    cohort = self.aged.cohorts[cohort].next[HOLDERS]
        return n <= 0

    cdef Py_ssize_t _evict_blocks(self, RequestKeys names, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Select up to `n` victims: queued keys, then the boundaries of the least value. Return their number."""
        cdef Py_ssize_t got = self._evict_queued(names, n, victims), got_before = -1
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
                            while tail != 0 and self._is_idle(names, tail):
                                self._give_up(tail)
                                got += self._evict_queued(names, n - got, victims + got)
                                if got >= n or self.num_passes <= 0:
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

    cdef bint _is_idle(self, RequestKeys names, int32_t row) noexcept nogil:
        """Return whether a row may leave. Marked rows stay, and anchors of the request `names`; None: no request."""
        cdef int group
        cdef int32_t companion
        if self.sets.num_full > 1 and self._place_of(row).label != 0:
            for group in range(self.sets.num_groups):
                companion = self._companion(row, group)
                if companion != 0 and not self._may_leave(names, companion, True):
                    return False
        return self._may_leave(names, row, names is None or self._place_of(row).label == 0)

    cdef Py_ssize_t _evict_queued(self, RequestKeys names, Py_ssize_t n, int32_t* victims) noexcept nogil:
        """Select up to `n` queued victims, oldest first. A parent that nothing needs any more follows its child.

        Rows in use keep their place, and the rest of the store passes over them at once.
        """
        cdef Py_ssize_t got = 0
        cdef int32_t prev = self.passed_over, row
        while got < n and self.num_passes > 0:
            row = self.table.rows[prev].next if prev != 0 else self.queue.first
            if row == 0:
                break
            if self._is_idle(names, row):
                self._unlink(row)
                count_rows(self.table, QUEUED, -1)
                self.table.rows[row].list_idx = LEAVING
                self._follow(row)
                victims[got] = row
                got += 1
                if self._place_of(row).label != 0:
                    self.num_queued_anchors -= 1
                    got += self._evict_companions(row, victims + got)
            else:
                prev = row
                self.num_passes -= 1
        self.passed_over = prev
        return got

    cdef Py_ssize_t _evict_companions(self, int32_t anchor, int32_t* victims) noexcept nogil:
        """Select the companions of an evicted anchor as victims. Return their number."""
        cdef Py_ssize_t got = 0
        cdef int32_t companion
        cdef int group
        for group in range(self.sets.num_groups if self.sets.num_full > 1 else 0):
            companion = self._companion(anchor, group)
            if companion != 0:
                count_rows(self.table, WINDOWED, -1)
                self.table.rows[companion].list_idx = LEAVING
                self.units[companion].needs = 0
                victims[got] = companion
                got += 1
        return got

    cdef void _follow(self, int32_t row) noexcept nogil:
        """Remove a row from its parent. The parent is queued if nothing needs it any more."""
        cdef int32_t parent = self._leave_parent(row) if self._place_of(row).label != 0 else 0
        if parent != 0 and self.members[parent].kids == 0 and not self.units[parent].is_boundary:
            self._queue(parent)

    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        self._insert(names, self._progress_of(names))

    cdef void _insert(self, RequestKeys names, Progress* progress) noexcept nogil:
        """Insert the new keys, and end the store."""
        cdef Py_ssize_t i
        cdef int32_t row, before, ghost
        for i in range(self.num_new):
            row = names.row_now(self.table, self.new[i].place)
            ghost = self._ghost_of(names, self.new[i].place) if not self.new[i].is_windowed else 0
            memset(&self.units[row], 0, sizeof(Unit))
            self.members[row].kids = 0
            self._place_of(row).label = 0
            self._place_of(row).parent = 0
            if i >= self.num_stored or (ghost == 0 and not self.new[i].is_windowed):
                push(self.table.rows, &self.share, row)
                self.table.rows[row].list_idx = PASSING
                count_rows(self.table, PASSING, 1)
                continue
            if self.new[i].is_windowed:
                self.table.rows[row].list_idx = WINDOWED
                count_rows(self.table, WINDOWED, 1)
                if progress.mode == BY_LRU:
                    ghost = names.uses[self.new[i].place].note
                    self._place_of(row).label = self._forget(ghost) if ghost > 0 else 0
                    self._queue(row)
                elif self._is_companion(names, self.new[i].place):
                    if self._row_of(names, self.new[i].anchor - 1) != 0:
                        self.units[row].needs = 1
                    else:
                        self._queue(row)
                continue
            before = anchor_before(names, self.new[i].anchor)
            before = self._row_of(names, before - 1) if before != 0 else 0
            self._set_parent(row, before)
            if before != 0:
                self._unqueue(before)
            self._append(self._forget(ghost), row, GROUPED)
            count_rows(self.table, GROUPED, 1)
        if not self.is_complete:
            self._complete(names, progress)
            self._trim()
            return
        # Nothing else needs the loads that were stored without a test.
        for i in range(self.num_stored):
            row = names.row_now(self.table, self.new[i].place)
            if self.table.rows[row].list_idx == WINDOWED and self.units[row].needs == 0:
                self._queue(row)
        for i in range(self.num_stored):
            row = names.row_now(self.table, self.new[i].place)
            if self.table.rows[row].list_idx == GROUPED and (
                    self.members[row].kids == 0 and not self.units[row].is_boundary):
                self._queue(row)
        self._trim()

    cdef void _complete(self, RequestKeys names, Progress* progress) noexcept nogil:
        """End a store: make the boundaries whose sets are complete. A live boundary's set is."""
        cdef Py_ssize_t i
        cdef int32_t row, deepest = progress.hit
        cdef int end
        for end in range(progress.has_passed_hit and progress.has_hit_end,
                         progress.num_ends if progress.mode != BY_LRU else 0):
            row = self._row_of(names, progress.ends[end] - 1)
            if row != 0 and (self.units[row].is_boundary or self._is_resumable(names, progress.ends[end])):
                if not self.units[row].is_boundary:
                    self.units[row].is_boundary = True
                    self._unqueue(row)
                    for i in range(self.sets.read(names, progress.ends[end])):
                        self.units[self.sets.keys[i].row].needs += 1
                        self._unqueue(self.sets.keys[i].row)
                deepest = progress.ends[end]
        if progress.hit != 0 and position_of(names, deepest) > position_of(names, progress.hit):
            progress.has_passed_hit = True
            self._pass_boundary(names, progress.hit)

    cdef void on_request_end(self, RequestKeys names) noexcept nogil:
        """Queue windowed keys that no boundary needs. If the prompt was not offered to its end, queue its last anchor.

        No other request resumes at that anchor. During the request, other requests would evict the keys first.
        """
        cdef Py_ssize_t place
        cdef int32_t row, anchor = 0, last = 0
        for place in range(names.num_named):
            if names.named[place].is_used and names.uses[place].note < 0:
                row = names.row_now(self.table, place)
                if row != 0 and self.table.rows[row].list_idx == WINDOWED and self.units[row].needs == 0:
                    self._queue(row)
        while self._progress_of(names).mode != BY_LRU:
            anchor = anchor_after(names, anchor)
            if anchor == 0:
                return
            row = names.row_now(self.table, anchor - 1)
            # Loads that were declined were not offered either.
            if self.stores_all and (self.table.rows[row].list_idx == PASSING or (
                    row == 0 and position_of(names, anchor) <= self._progress_of(names).loaded)):
                return
            if row == 0:
                if names.named[anchor - 1].mark == 0 and last != 0 and not self.units[last].is_boundary:
                    self._give_up(last)
                return
            last = row

    cdef void on_failure(self, RequestKeys names, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Remove blocks of failed stores. The request's boundaries that need them end.

        If another request has made a boundary that counts on them, `needs` of other keys may be too low from then on:
        they may leave early, but no block is read before it was written.
        """
        cdef Py_ssize_t i, place
        cdef int32_t row
        cdef int64_t lost = INT64_MAX
        for i in range(n):
            row = rows[i]
            if self.table.rows[row].list_idx == PASSING:
                pull(self.table.rows, &self.share, row)
            elif self.table.rows[row].list_idx != WINDOWED:
                self.num_queued_anchors -= (
                    self.table.rows[row].list_idx == QUEUED and self._place_of(row).label != 0)
                self._unlink(row)
            self.table.rows[row].list_idx = LEAVING
            if names is not None and (self._place_of(row).label != 0 or self.sets.num_full > 1):
                place = names.locate(self.table.rows[row].key, self.table.rows[row].hash)
                if place >= 0 and names.named[place].is_used and (
                        self._place_of(row).label != 0 or self._is_companion(names, place)):
                    lost = min(lost, names.uses[place].position)
        for i in range(n if self.sets.num_full > 1 else 0):
            self._fail_companions(rows[i])
        if n and names is not None:
            self._end_boundaries(names, lost)
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

    cdef void _fail_companions(self, int32_t anchor) noexcept nogil:
        """Queue the companions of an anchor whose store failed."""
        cdef int group
        cdef int32_t companion
        for group in range(self.sets.num_groups if self._place_of(anchor).label != 0 else 0):
            companion = self._companion(anchor, group)
            if companion != 0:
                self.units[companion].needs = 0
                self._queue(companion)

    cdef void _end_boundaries(self, RequestKeys names, int64_t lost) noexcept nogil:
        """Give up the request's boundaries whose set is incomplete, or at or behind the position `lost`."""
        cdef const Progress* progress = self._progress_of(names)
        cdef int32_t row
        cdef int end
        for end in range(progress.num_ends if progress.mode != BY_LRU else 0):
            row = names.row_now(self.table, progress.ends[end] - 1)
            if row != 0 and self.units[row].is_boundary and (
                    position_of(names, progress.ends[end]) >= lost or not self._has_set(names, progress.ends[end])):
                self._give_up(row)

    cdef void on_reset(self) noexcept nogil:
        GittinsCachePolicy.on_reset(self)
        self.has_failed = False
        self.num_queued_anchors = 0
        self.share.first = self.share.last = 0
        if self.units != NULL:
            memset(self.units, 0, self.table.num_rows * sizeof(Unit))

    cdef int check_ghosts(self, GhostList ghosts) except -1:
        cdef int32_t row
        ghosts.check()
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if self.table.rows[row].key != NULL and self.table.rows[row].list_idx != PASSING and (
                    ghosts.find(self.table.rows[row].hash)):
                raise BlockStateError(f"invariant broken: row {row} is resident and a ghost")
        return 0

    cdef Py_ssize_t _check_unlisted(self, dict known, dict kids) except -1:
        cdef const Row* rows = self.table.rows
        cdef int32_t row, ancestor, windowed
        cdef int group
        cdef Py_ssize_t num_windowed = 0
        needs = {}
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if rows[row].key != NULL and self._place_of(row).label != 0:
                for group in range(self.sets.num_groups):
                    windowed = self._companion(row, group)
                    if windowed != 0:
                        needs[windowed] = 1
            if rows[row].key == NULL or not self.units[row].is_boundary:
                continue
            for group in range(self.sets.num_groups):
                ancestor = row
                for _ in range(self.sets.windows[group]):
                    if ancestor == 0:
                        break
                    windowed = self.sets.windowed_row(rows[ancestor].key, group)
                    needs[windowed] = needs.get(windowed, 0) + 1
                    ancestor = self._parent_of(ancestor)
        for row in range(self.table.first, self.table.first + self.table.num_fresh):
            if rows[row].key == NULL:
                continue
            if self.units[row].needs != needs.pop(row, 0) and not self.has_failed:
                raise BlockStateError(f"invariant broken: row {row} counts {self.units[row].needs} boundaries")
            if rows[row].list_idx == QUEUED and (
                    self.units[row].needs or self.units[row].is_boundary or self.members[row].kids):
                raise BlockStateError(f"invariant broken: row {row} leaves first, but it is needed")
            num_windowed += rows[row].list_idx == WINDOWED
        if needs and not self.has_failed:
            raise BlockStateError(f"invariant broken: boundaries need keys that are not resident: {needs}")
        num_passing = len(self.passing)
        if num_passing != self.table.num_in_list[PASSING]:
            raise BlockStateError(f"invariant broken: {num_passing} rows pass, {self.table.num_in_list[PASSING]} count")
        return num_windowed + num_passing


CachePolicy.register(UnitGittinsPolicy)
