"""BlockTable: memory, the key index, and how rows come and go.

Compiled because a batch of keys is resolved here once per request. Block `b` of a pool lives in row `first + b`.
"""

from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvcache.core.index cimport (
    Bucket, Probe, buckets_for, home_of, index_delete, index_first, index_insert, index_next, prefetch, same_bytes,
    zeroed,
)
from kvcache.core.eviction_queue cimport FREE, PINNED, WITHHELD, EvictionQueue, Row
from kvcache.core.key_hash cimport hash_of
from kvcache.core.request_keys cimport Named

from kvcache.block import BlockStateError

cdef extern from *:
    """
    static uint64_t kv_epoch = 0;
    #define kv_next_epoch() __atomic_add_fetch(&kv_epoch, 1, __ATOMIC_RELAXED)
    """
    uint64_t next_epoch "kv_next_epoch"() noexcept nogil

cdef enum:
    STALE_PER_CALL = 8
    CHUNK = 64              # keys whose look-ups are in flight together
    AHEAD = 12              # buckets fetched ahead of a loop over known hashes
    KEYS_AHEAD = 8          # key objects fetched ahead of their hashing: header, cached hash, and bytes
    LONG_LANE = 32768       # nodes of a heap from which on it is given room for every row


cdef class BlockTable:
    """BlockTable(cache_capacity)

    Blocks by key: what the cache and the policies stand on.
    """

    def __cinit__(self, cache_capacity):
        if type(cache_capacity) is not int or not 1 <= cache_capacity < 1 << 30:
            raise ValueError(f"cache_capacity must be an int >= 1 and < 2**30, got {cache_capacity!r}")
        self.cache_capacity = cache_capacity
        self.keeps_queues = True

    def __dealloc__(self):
        cdef int32_t row, lane
        if self.rows != NULL:
            for row in range(self.first, self.first + max(self.num_fresh, self.num_stale)):
                Py_XDECREF(self.rows[row].key)
                if self.caller_blocks != NULL:
                    Py_XDECREF(self.caller_blocks[row].status)
        if self.lanes != NULL:
            for lane in range(self.first):
                PyMem_Free(self.lanes[lane].nodes)
        free(self.rows)
        free(self.buckets)
        for block in (<uintptr_t> self.lanes, <uintptr_t> self.caller_blocks, <uintptr_t> self.ranks,
                      <uintptr_t> self.batch_rows, <uintptr_t> self.batch_positions,
                      <uintptr_t> self.batch_hashes, <uintptr_t> self.batch_named, <uintptr_t> self.batch_wanted,
                      <uintptr_t> self.batch_places, <uintptr_t> self.batch_ends,
                      <uintptr_t> self.fresh_rows, <uintptr_t> self.fresh_hashes, <uintptr_t> self.aside):
            PyMem_Free(<void*> <uintptr_t> block)

    def __reduce__(self):
        raise TypeError(f"{type(self).__name__} lives in one process and cannot be pickled; send its name instead")

    # ---- memory -----------------------------------------------------------------------------------------------

    cdef int _allocate(self, int32_t num_lists, bint ranked) except -1:
        cdef int32_t lane
        cdef uint32_t num_buckets = buckets_for(self.cache_capacity)
        if not 1 <= num_lists <= MAX_LISTS:
            raise ValueError(f"num_lists must be in 1..{MAX_LISTS}, got {num_lists}")
        self.first = num_lists * NUM_PRIORITIES
        self.num_rows = self.first + <int32_t> self.cache_capacity
        self.rows = <Row*> zeroed(self.num_rows * sizeof(Row))
        self.lanes = <EvictionQueue*> PyMem_Calloc(self.first, sizeof(EvictionQueue))
        self.buckets = <Bucket*> zeroed(num_buckets * sizeof(Bucket))
        self.caller_blocks = <CallerBlock*> PyMem_Calloc(self.num_rows, sizeof(CallerBlock))
        if ranked:
            self.ranks = <uint64_t*> PyMem_Calloc(self.num_rows, sizeof(uint64_t))
        if (self.rows == NULL or self.lanes == NULL or self.buckets == NULL or self.caller_blocks == NULL
                or (ranked and self.ranks == NULL)):
            raise MemoryError(f"no memory for a table of {self.cache_capacity} blocks")
        self.num_buckets = num_buckets
        for lane in range(self.first):
            self.rows[lane].prev = self.rows[lane].next = lane
        if ranked:
            # Every row stands in a heap: all of the normal one's memory now, so that no call moves it.
            self.lanes[NORMAL].nodes = <HeapNode*> PyMem_Malloc(self.cache_capacity * sizeof(HeapNode))
            if self.lanes[NORMAL].nodes == NULL:
                raise MemoryError(f"no memory for a table of {self.cache_capacity} blocks")
            self.lanes[NORMAL].size = <int32_t> self.cache_capacity
        self.num_free = self.cache_capacity
        self.mark = 1
        self._start_epoch()
        self._reserve_batch(CHUNK)
        return 0

    cdef void _start_epoch(self) noexcept nogil:
        self.epoch = next_epoch()

    cdef int _grow(self) except -1:
        """Double the rows of a plain policy that was given more blocks than its capacity."""
        cdef int32_t num_rows = self.first + 2 * (self.num_rows - self.first)
        cdef uint32_t num_buckets = buckets_for(num_rows)
        cdef int32_t row
        cdef Bucket* buckets = <Bucket*> zeroed(num_buckets * sizeof(Bucket))
        cdef void* rows = realloc(self.rows, num_rows * sizeof(Row))
        if rows != NULL:
            self.rows = <Row*> rows
        cdef void* caller_blocks = PyMem_Realloc(self.caller_blocks, num_rows * sizeof(CallerBlock))
        if caller_blocks != NULL:
            self.caller_blocks = <CallerBlock*> caller_blocks
        cdef void* ranks = NULL
        if self.ranks != NULL:
            ranks = PyMem_Realloc(self.ranks, num_rows * sizeof(uint64_t))
            if ranks != NULL:
                self.ranks = <uint64_t*> ranks
        if buckets == NULL or rows == NULL or caller_blocks == NULL or (self.ranks != NULL and ranks == NULL):
            free(buckets)
            raise MemoryError(f"no memory for a table of {num_rows} blocks")
        memset(&self.rows[self.num_rows], 0, (num_rows - self.num_rows) * sizeof(Row))
        memset(&self.caller_blocks[self.num_rows], 0, (num_rows - self.num_rows) * sizeof(CallerBlock))
        if self.ranks != NULL:
            memset(&self.ranks[self.num_rows], 0, (num_rows - self.num_rows) * sizeof(uint64_t))
        free(self.buckets)
        self.buckets = buckets
        self.num_buckets = num_buckets
        for row in range(self.first, self.num_rows):
            if self.rows[row].key != NULL:
                index_insert(buckets, self.num_buckets, self.rows[row].hash, row)
        cdef int32_t num_rows_before = self.num_rows
        self.num_free += num_rows - num_rows_before
        self.num_rows = num_rows
        self.on_grow(num_rows_before)
        return 0

    cdef int _reserve_batch(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t size
        cdef void* block
        if n <= self.batch_size:
            return 0
        size = max(n, 2 * self.batch_size)
        block = PyMem_Realloc(self.batch_rows, size * sizeof(int32_t))
        if block != NULL:
            self.batch_rows = <int32_t*> block
            block = PyMem_Realloc(self.batch_hashes, size * sizeof(uint64_t))
        if block != NULL:
            self.batch_hashes = <uint64_t*> block
            block = PyMem_Realloc(self.batch_named, size * sizeof(Py_ssize_t))
        if block != NULL:
            self.batch_named = <Py_ssize_t*> block
            block = PyMem_Realloc(self.batch_wanted, size * sizeof(Py_ssize_t))
        if block != NULL:
            self.batch_wanted = <Py_ssize_t*> block
            block = PyMem_Realloc(self.batch_places, size * sizeof(Py_ssize_t))
        if block != NULL:
            self.batch_places = <Py_ssize_t*> block
            block = PyMem_Realloc(self.batch_ends, size * sizeof(int64_t))
        if block != NULL:
            self.batch_ends = <int64_t*> block
            block = PyMem_Realloc(self.fresh_rows, size * sizeof(int32_t))
        if block != NULL:
            self.fresh_rows = <int32_t*> block
            block = PyMem_Realloc(self.batch_positions, size * sizeof(Position))
        if block != NULL:
            self.batch_positions = <Position*> block
            block = PyMem_Realloc(self.fresh_hashes, size * sizeof(uint64_t))
        if block == NULL:
            raise MemoryError(f"no memory for a call of {n} keys")
        self.fresh_hashes = <uint64_t*> block
        self.batch_size = size
        return 0

    cdef int _reserve_heaps(self, Py_ssize_t n) except -1:
        """Make room for `n` rows to come back to whichever lanes, so that `attach` cannot fail."""
        cdef int32_t lane_idx
        cdef Py_ssize_t size
        cdef Py_ssize_t most = self.num_rows - self.first   # no lane holds more rows than there are
        cdef EvictionQueue* lane
        cdef void* nodes
        for lane_idx in range(self.first):
            lane = &self.lanes[lane_idx]
            size = min(lane.num_nodes + n, most)
            if size <= lane.size:
                continue
            # A long lane gets all the room there is, untouched until used: growing again would copy megabytes.
            size = min(max(size, 2 * <Py_ssize_t> lane.size), most) if size < LONG_LANE else most
            nodes = PyMem_Realloc(lane.nodes, size * sizeof(HeapNode))
            if nodes == NULL:
                raise MemoryError(f"no memory for {size} blocks that came back out of order")
            lane.nodes = <HeapNode*> nodes
            lane.size = <int32_t> size
        return 0

    cdef int _reserve_aside(self, Py_ssize_t n) except -1:
        cdef void* block
        if n > self.aside_size:
            block = PyMem_Realloc(self.aside, n * sizeof(int32_t))
            if block == NULL:
                raise MemoryError(f"no memory to protect {n} blocks")
            self.aside = <int32_t*> block
            self.aside_size = n
        return 0

    # ---- keys to rows -----------------------------------------------------------------------------------------

    cdef uint32_t _next_mark(self) noexcept nogil:
        cdef int32_t row
        self.mark += 1
        if self.mark == 0:
            for row in range(self.num_rows):
                self.rows[row].mark = 0
            self.mark = 1
        return self.mark

    cdef int32_t _find_one(self, PyObject* key, uint64_t hash) noexcept nogil:
        cdef Probe probe
        cdef int32_t row = index_first(self.buckets, self.num_buckets, hash, &probe)
        while row != 0 and not (self.rows[row].hash == hash and same_bytes(self.rows[row].key, key)):
            row = index_next(self.buckets, self.num_buckets, hash, &probe)
        return row

    cdef int _find(self, list keys, Py_ssize_t start, Py_ssize_t stop) except -1:
        """Write hash and row (0: absent) of each key to the batch arrays; ValueError names a key that is none.

        In passes, so that the cache misses of a chunk overlap: key, bucket, row, the row's key.
        """
        cdef Py_ssize_t low, high, i
        cdef PyObject* key
        cdef uint64_t hash
        cdef int32_t row
        cdef Probe probe
        cdef int32_t* found
        cdef uint64_t* hashes
        cdef Row* rows = self.rows
        cdef Bucket* buckets = self.buckets
        cdef uint32_t num_buckets = self.num_buckets
        self._reserve_batch(stop)
        found = self.batch_rows
        hashes = self.batch_hashes
        for low in range(start, stop, CHUNK):
            high = min(low + CHUNK, stop)
            for i in range(low, high):
                if i + KEYS_AHEAD < stop:
                    key = PyList_GET_ITEM(keys, i + KEYS_AHEAD)
                    prefetch(key)
                    prefetch(<char*> key + 64)
                key = PyList_GET_ITEM(keys, i)
                if not PyBytes_CheckExact(key) or PyBytes_GET_SIZE(key) == 0:
                    raise ValueError(f"key must be exact, non-empty bytes, got {<object> key!r}")
                hash = hash_of(key)
                hashes[i] = hash
                prefetch(&buckets[home_of(<uint32_t> hash, num_buckets)])
            for i in range(low, high):
                row = index_first(buckets, num_buckets, hashes[i], &probe)
                found[i] = row
                if row != 0:
                    prefetch(&rows[row])
            for i in range(low, high):
                row = found[i]
                if row != 0 and rows[row].key != PyList_GET_ITEM(keys, i):
                    prefetch(rows[row].key)
            for i in range(low, high):
                row = found[i]
                if row == 0:
                    continue
                key = PyList_GET_ITEM(keys, i)
                if rows[row].hash != hashes[i] or not same_bytes(rows[row].key, key):
                    found[i] = self._find_one(key, hashes[i])
        return 0

    cdef Py_ssize_t _walk(self, list keys, Py_ssize_t n, RequestKeys request_keys) noexcept:
        """Resolve leading keys that are the very objects of the request_keys, in its order, and return how many."""
        cdef Py_ssize_t i = 0, at = 0, j
        cdef Py_ssize_t num_named = request_keys.num_named
        cdef bint in_step = request_keys.version == self.version
        cdef PyObject* key
        cdef Named* named
        while i < n:
            key = PyList_GET_ITEM(keys, i)
            j = at
            while j < num_named and request_keys.named[j].key != key:
                j += 1
            if j == num_named:
                break
            named = &request_keys.named[j]
            # A row is trusted only while its generation says that it has not changed hands.
            if not in_step and (named.row == 0 or self.rows[named.row].generation != named.generation):
                named.row = self._find_one(key, named.hash)
                named.generation = self.rows[named.row].generation
            self.batch_rows[i] = named.row
            self.batch_hashes[i] = named.hash
            self.batch_named[i] = j
            at = j + 1
            i += 1
        if i == num_named:
            request_keys.version = self.version
        return i

    cdef int _begin(self, RequestKeys request_keys) except -1:
        """Refuse a batch operation on a policy without a manager; keys named before a reset are forgotten."""
        if not self.is_native:
            raise BlockStateError("the policy belongs to no manager, and has no pool for batch operations")
        self.num_calls += 1
        if self.num_stale > self.num_fresh:
            self._drop_stale(max(self.num_fresh, self.num_stale - STALE_PER_CALL))
        if request_keys is not None and request_keys.epoch != self.epoch:
            request_keys.forget()
            request_keys.epoch = self.epoch
        return 0

    cdef void _drop_stale(self, int32_t stop) noexcept:
        """Release keys from before the last reset, down to row `stop`: a little in each call, not all at the reset."""
        while self.num_stale > stop:
            self.num_stale -= 1
            Py_XDECREF(self.rows[self.first + self.num_stale].key)
            self.rows[self.first + self.num_stale].key = NULL

    cdef int _resolve(self, list keys, RequestKeys request_keys, bint add) except -1:
        """Fill the batch arrays for `keys`: row, hash and, with a request_keys, where in it (-1: nowhere)."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i = 0
        cdef bint was_empty
        self._reserve_batch(n)
        if request_keys is None:
            self._find(keys, 0, n)
            return 0
        was_empty = request_keys.num_named == 0
        # Comparing pointers pays only for a call that is not tiny beside the request.
        if not was_empty and 16 * n >= request_keys.num_named:
            i = self._walk(keys, n, request_keys)
        if i == n:
            return 0
        self._find(keys, i, n)
        if add:
            request_keys.reserve(n - i)
        request_keys.meet(keys, i, n, self.batch_hashes, self.batch_rows, self.rows, add, self.batch_named)
        if was_empty:
            request_keys.version = self.version
        return 0

    cdef int32_t _row_of(self, key) except -1:
        """Return the row of one key, or 0."""
        if type(key) is not bytes or not key:
            raise ValueError(f"key must be exact, non-empty bytes, got {key!r}")
        return self._find_one(<PyObject*> key, hash_of(<PyObject*> key))

    cdef int32_t _row_now(self, RequestKeys names, Py_ssize_t place) noexcept nogil:
        """Return the row of a key that a request has named, or 0."""
        cdef Named* named = &names.named[place]
        if named.row != 0:
            if self.rows[named.row].generation == named.generation:
                return named.row
        elif names.version == self.version:
            return 0
        return self._find_one(named.key, named.hash)

    # ---- rows come and go -------------------------------------------------------------------------------------

    cdef void _admit(self, list keys, const Py_ssize_t* wanted, Py_ssize_t n, int32_t* out) noexcept:
        """Give `n` keys of a resolved batch rows, PINNED and not ready; there are so many free ones."""
        cdef Py_ssize_t i, at
        cdef int32_t row
        cdef PyObject* key
        cdef Row* rows = self.rows
        cdef Bucket* buckets = self.buckets
        cdef uint32_t num_buckets = self.num_buckets
        cdef const uint64_t* hashes = self.batch_hashes
        for i in range(n):
            if i + AHEAD < n:
                at = wanted[i + AHEAD]
                prefetch(&buckets[home_of(<uint32_t> hashes[at], num_buckets)])
                prefetch(PyList_GET_ITEM(keys, at))
            at = wanted[i]
            key = PyList_GET_ITEM(keys, at)
            while True:
                if self.num_fresh < self.num_rows - self.first:
                    row = self.first + self.num_fresh
                    self.num_fresh += 1
                    if self.num_fresh <= self.num_stale:
                        Py_XDECREF(rows[row].key)
                        rows[row].key = NULL
                else:
                    row = self.free_head
                    self.free_head = rows[row].next
                if rows[row].where != WITHHELD:
                    break
                rows[row].ref_cnt = False   # no longer among the free ones
            Py_INCREF(<object> key)
            rows[row].key = key
            rows[row].hash = hashes[at]
            rows[row].ref_cnt = -1
            rows[row].where = PINNED
            rows[row].mark = 0
            rows[row].priority = NORMAL
            rows[row].generation += 1
            index_insert(buckets, num_buckets, hashes[at], row)
            out[i] = row
        self.num_resident += n
        self.num_free -= n

    cdef void _release(self, const int32_t* victims, Py_ssize_t n, list keys) noexcept:
        """Free PINNED rows that no list counts any more; `keys`, new and of that length, takes their keys over."""
        cdef Py_ssize_t i
        cdef int32_t row
        cdef Row* rows = self.rows
        cdef Bucket* buckets = self.buckets
        cdef uint32_t num_buckets = self.num_buckets
        for i in range(n):
            if i + AHEAD < n:
                prefetch(&buckets[home_of(<uint32_t> rows[victims[i + AHEAD]].hash, num_buckets)])
            row = victims[i]
            if rows[row].priority > NORMAL:
                self.deadlines.remove(row)
            index_delete(buckets, num_buckets, rows[row].hash, row)
            PyList_SET_ITEM(keys, i, rows[row].key)
            rows[row].key = NULL
            rows[row].where = FREE
            rows[row].generation += 1
            rows[row].next = self.free_head
            self.free_head = row
        self.num_resident -= n
        self.num_free += n

    # ---- a policy's answers; the defaults are those of one recency list ---------------------------------------

    cdef void on_request(self) noexcept nogil:
        """A request begins: the clock of those that have one."""

    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil:
        """Count one use each, from last to first; row 0: the key is absent, a ghost perhaps."""
        self.on_reorder(rows, n)

    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Move each row, from last to first, to the most-recent end of its list."""
        cdef Py_ssize_t i
        for i in range(n - 1, -1, -1):
            if rows[i] != 0:
                move_to_tail(self, rows[i], self.rows[rows[i]].list_idx)

    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use
    ) noexcept nogil:
        """Called with keys (row 0: absent) whose next use was said after they were used, coded as in RequestKeys."""

    cdef void on_append(self, const int32_t* rows, Py_ssize_t n, uint64_t stamp, int32_t tail) noexcept nogil:
        """Move each row to just behind (older than) the one before it, the first to behind `tail` (0: it has left).

        Row i takes the stamp `stamp - i`, and keeps its list.
        """
        cdef Py_ssize_t i
        for i in range(n):
            if rows[i] != 0:
                set_stamp(self, rows[i], stamp - i)

    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Let new rows enter their list, from first to last."""
        cdef Py_ssize_t i
        for i in range(n):
            enter(self, rows[i], 0)

    cdef Py_ssize_t select_victims(self, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil:
        """Take up to `n` victims of one priority out of their lanes, oldest first; return how many there were."""
        return self._take(0, priority, n, out)

    cdef Py_ssize_t _take(self, int32_t list_idx, int32_t priority, Py_ssize_t n, int32_t* out) noexcept nogil:
        """Take up to `n` rows that may leave out of a lane, oldest first; return how many there were."""
        cdef int32_t head = list_idx * NUM_PRIORITIES + priority
        cdef EvictionQueue* lane = &self.lanes[head]
        cdef Row* rows = self.rows
        cdef uint64_t first_in_heap = lane.nodes[0].stamp if lane.num_nodes else <uint64_t> -1
        cdef int32_t row = rows[head].next
        cdef Py_ssize_t got = 0
        # Mostly they are the list's first, and leave it in one piece; `take_oldest` does the rest.
        if lane.cursor_mark != self.mark:
            while got < n and row != head and may_leave(self, row) and rows[row].stamp < first_in_heap:
                rows[row].where = PINNED
                out[got] = row
                got += 1
                row = rows[row].next
            rows[head].next = row
            rows[row].prev = head
            lane.num_listed -= <int32_t> got
            self.num_in_list[list_idx] -= got
        while got < n:
            row = take_victim(self, list_idx, priority)
            if row == 0:
                break
            out[got] = row
            got += 1
        return got

    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil:
        """Let go of rows that leave without being remembered."""

    cdef void on_reset(self) noexcept nogil:
        """Forget ghosts and adaptive state."""

    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n
    ) noexcept nogil:
        """Count one use each of keys that `request` has just used for the first time: its last `n` used ones."""

    cdef Py_ssize_t on_offer(
        self, RequestKeys names, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered, Py_ssize_t last_place,
        int32_t* victims, Py_ssize_t* num_victims
    ) noexcept nogil:
        """Return how many leading ones of `n` absent keys to take, and take out the victims that make room for them.

        `places` are the keys' in `names`; `num_offered` different keys were offered, the last of them at `last_place`.
        Asked only of a policy that tracks uses, whose stores are never refused.
        """
        return 0

    cdef void on_admit(
        self, RequestKeys names, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n
    ) noexcept nogil:
        """Let the rows of the keys taken enter."""

    cdef int reserve_policy(self, Py_ssize_t n) except -1:
        """Make room, before anything changes, for what a call of `n` keys may need."""
        return 0

    cdef int on_grow(self, int32_t num_rows_before) except -1:
        """Follow with arrays of one's own when a plain policy's rows grow to `num_rows`."""
        return 0

    cdef int _check_policy(self) except -1:
        """Raise BlockStateError where the policy's own state does not hold."""
        return 0
