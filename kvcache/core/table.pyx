"""BlockTable: blocks by key. It assigns and frees rows and slots, and finds the oldest evictable row.

Compiled because a batch of keys is resolved here once per request. Block `b` of a pool is in row `first + b`.
"""

from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from kvcache.core.eviction_queue cimport FREE, HEAPED, LISTED, PINNED, WITHHELD, EvictionQueue, HeapNode, Row
from kvcache.core.index cimport (
    Bucket, Probe, buckets_for, clear, hash_of, home_of, index_delete, index_first, index_insert, index_next,
    prefetch, prefetch_overflow, same_bytes, used, zeroed,
)
from kvcache.core.memory cimport new_list

from kvcache.block import BlockStateError
from kvcache.options import check_int

cdef extern from *:
    """
    static uint64_t kv_epoch = 0;
    #define kv_next_epoch() __atomic_add_fetch(&kv_epoch, 1, __ATOMIC_RELAXED)
    """
    uint64_t next_epoch "kv_next_epoch"() noexcept nogil

cdef enum:
    CHUNK = 64              # keys whose look-ups are in flight together
    AHEAD = 12              # buckets fetched ahead of a loop over known hashes
    KEYS_AHEAD = 8          # key objects fetched ahead of their hashing: header and bytes
    UNEVEN = 24             # keys that a batch has room for beyond those asked for
    LONG_QUEUE = 32768      # from this many nodes on, a heap gets room for every row


cdef class Batch:
    """Batch()

    The keys of one call: rows, hashes, and the results that the call writes.
    """

    def __dealloc__(self):
        PyMem_Free(self.in_prompt)

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room for `n` keys. If there was too little, the contents are lost."""
        cdef Py_ssize_t size
        cdef void* block
        if n <= self.size:
            return 0
        # With a power of two, the same key of each array would share a set of the processor's cache.
        size = max(n, 2 * self.size) + UNEVEN
        block = PyMem_Malloc(size * (sizeof(Position) + 6 * sizeof(int64_t) + 4 * sizeof(int32_t)))
        if block == NULL:
            raise MemoryError(f"no memory for a call of {n} keys")
        PyMem_Free(self.in_prompt)
        self.in_prompt = <Position*> block
        self.hashes = <uint64_t*> (self.in_prompt + size)
        self.used_hashes = self.hashes + size
        self.ends = <int64_t*> (self.used_hashes + size)
        self.places = <Py_ssize_t*> (self.ends + size)
        self.picked = self.places + size
        self.picked_places = self.picked + size
        self.rows = <int32_t*> (self.picked_places + size)
        self.used_rows = self.rows + size
        self.picked_rows = self.used_rows + size
        self.victims = self.picked_rows + size
        self.size = size
        return 0


cdef class BlockTable:
    """BlockTable(cache_capacity, num_lists=1, keeps_queues=True)

    Blocks by key, 1 to 2**30 - 1, in rows, each in one of `num_lists` recency lists (1 to 8) of the policy.

    With `keeps_queues`, evictable rows stand in the queue of their list. A policy with an order of its own needs none.
    """

    def __cinit__(self, cache_capacity, int32_t num_lists=1, bint keeps_queues=True):
        cdef int32_t queue
        check_int("cache_capacity", cache_capacity, 1, (1 << 30) - 1)
        if not 1 <= num_lists <= MAX_LISTS:
            raise ValueError(f"num_lists must be in 1..{MAX_LISTS}, got {num_lists}")
        self.cache_capacity = cache_capacity
        self.keeps_queues = keeps_queues
        self.first = num_lists
        self.num_rows = self.first + <int32_t> self.cache_capacity
        self.num_buckets = buckets_for(self.cache_capacity)
        self.rows = <Row*> zeroed(self.num_rows * sizeof(Row))
        self.queues = <EvictionQueue*> PyMem_Calloc(self.first, sizeof(EvictionQueue))
        self.buckets = <Bucket*> zeroed(self.num_buckets * sizeof(Bucket))
        self.caller_blocks = <CallerBlock*> PyMem_Calloc(self.num_rows, sizeof(CallerBlock))
        if self.rows == NULL or self.queues == NULL or self.buckets == NULL or self.caller_blocks == NULL:
            raise MemoryError(f"no memory for a table of {self.cache_capacity} blocks")
        for queue in range(self.first):
            self.rows[queue].prev = self.rows[queue].next = queue
        self.num_free = self.cache_capacity
        self.mark = 1
        # Half of the numbers are for rows that become the oldest.
        self.stamp = self.oldest_stamp = <uint64_t> 1 << 63
        self.epoch = next_epoch()

    def __dealloc__(self):
        cdef int32_t row, queue
        if self.rows != NULL:
            for row in range(self.first, self.first + max(self.num_fresh, self.num_stale)):
                Py_XDECREF(self.rows[row].key)
                if self.caller_blocks != NULL:
                    Py_XDECREF(self.caller_blocks[row].status)
        if self.queues != NULL:
            for queue in range(self.first):
                PyMem_Free(self.queues[queue].nodes)
        free(self.rows)
        free(self.buckets)
        PyMem_Free(self.queues)
        PyMem_Free(self.caller_blocks)
        PyMem_Free(self.aside)

    cdef int reserve_heaps(self, Py_ssize_t n) except -1:
        """Make room for `n` rows to return to any queues, so that `attach` cannot fail."""
        cdef int32_t queue_idx
        cdef Py_ssize_t size
        cdef Py_ssize_t most = self.num_rows - self.first   # no queue holds more rows than there are
        cdef EvictionQueue* queue
        cdef void* nodes
        for queue_idx in range(self.first):
            queue = &self.queues[queue_idx]
            size = min(queue.num_nodes + n, most)
            if size <= queue.size:
                continue
            # A long queue gets all the room at once; pages stay unused until needed. Growing would copy megabytes.
            size = min(max(size, 2 * <Py_ssize_t> queue.size), most) if size < LONG_QUEUE else most
            nodes = PyMem_Realloc(queue.nodes, size * sizeof(HeapNode))
            if nodes == NULL:
                raise MemoryError(f"no memory for {size} blocks that came back out of order")
            queue.nodes = <HeapNode*> nodes
            queue.size = <int32_t> size
        return 0

    cdef int reserve_aside(self, Py_ssize_t n) except -1:
        cdef void* block
        if n > self.aside_size:
            block = PyMem_Realloc(self.aside, n * sizeof(int32_t))
            if block == NULL:
                raise MemoryError(f"no memory to protect {n} blocks")
            self.aside = <int32_t*> block
            self.aside_size = n
        return 0

    cdef uint32_t next_mark(self) noexcept nogil:
        cdef int32_t row
        self.mark += 1
        if self.mark == 0:
            for row in range(self.num_rows):
                self.rows[row].mark = 0
            self.mark = 1
        return self.mark

    cdef int32_t find_one(self, PyObject* key, uint64_t hash) noexcept nogil:
        cdef Probe probe
        cdef int32_t row = index_first(self.buckets, self.num_buckets, hash, &probe)
        while row != 0 and not (self.rows[row].hash == hash and same_bytes(self.rows[row].key, key)):
            row = index_next(self.buckets, self.num_buckets, hash, &probe)
        return row

    cdef int find(self, list keys, Py_ssize_t start, Py_ssize_t stop, Batch batch) except -1:
        """Write hash and row (0: absent) of each key to the batch. Raise ValueError naming an invalid key.

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
        batch.reserve(stop)
        found = batch.rows
        hashes = batch.hashes
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
                if i + AHEAD < high:
                    prefetch_overflow(buckets, num_buckets, hashes[i + AHEAD])
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
                # Two keys may share a tag, so compare the rest of the hash now; rarely, another row must be searched.
                if rows[row].hash != hashes[i] or not same_bytes(rows[row].key, key):
                    found[i] = self.find_one(key, hashes[i])
        return 0

    cdef int32_t row_of(self, key) except -1:
        """Return the row of one key, or 0."""
        if type(key) is not bytes or not key:
            raise ValueError(f"key must be exact, non-empty bytes, got {key!r}")
        return self.find_one(<PyObject*> key, hash_of(<PyObject*> key))

    cdef void admit(
        self, list keys, const uint64_t* hashes, const Py_ssize_t* picked, Py_ssize_t n, int32_t* out
    ) noexcept:
        """Assign rows to the picked `keys`, PINNED and not ready. The caller has checked that `n` rows are free."""
        cdef Py_ssize_t i, at
        cdef int32_t row
        cdef PyObject* key
        cdef Row* rows = self.rows
        cdef Bucket* buckets = self.buckets
        cdef uint32_t num_buckets = self.num_buckets
        for i in range(n):
            if i + AHEAD < n:
                at = picked[i + AHEAD]
                prefetch(&buckets[home_of(<uint32_t> hashes[at], num_buckets)])
                prefetch(PyList_GET_ITEM(keys, at))
            at = picked[i]
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
                rows[row].ref_cnt = False   # no longer in the free list
            Py_INCREF(<object> key)
            rows[row].key = key
            rows[row].hash = hashes[at]
            rows[row].ref_cnt = -1
            rows[row].where = PINNED
            rows[row].mark = 0
            rows[row].is_shared = False
            rows[row].generation += 1
            index_insert(buckets, num_buckets, hashes[at], row)
            out[i] = row
        self.num_resident += n
        self.num_free -= n

    cdef void release(self, const int32_t* victims, Py_ssize_t n, list keys) noexcept:
        """Free PINNED rows that are in no list. Move their keys to the new list `keys`, of length `n`."""
        cdef Py_ssize_t i
        cdef int32_t row
        cdef Row* rows = self.rows
        cdef Bucket* buckets = self.buckets
        cdef uint32_t num_buckets = self.num_buckets
        for i in range(n):
            if i + 2 * AHEAD < n:
                row = victims[i + 2 * AHEAD]
                prefetch(&buckets[home_of(<uint32_t> rows[row].hash, num_buckets)])
                prefetch(rows[row].key)     # the new owner soon drops it
            if i + AHEAD < n:
                prefetch_overflow(buckets, num_buckets, rows[victims[i + AHEAD]].hash)
            row = victims[i]
            index_delete(buckets, num_buckets, rows[row].hash, row)
            PyList_SET_ITEM(keys, i, rows[row].key)
            rows[row].key = NULL
            rows[row].where = FREE
            rows[row].generation += 1
            rows[row].next = self.free_head
            self.free_head = row
        self.num_resident -= n
        self.num_free += n
        self.version += n != 0

    cdef Py_ssize_t take_oldest(self, int32_t list_idx, Py_ssize_t n, int32_t* out) noexcept nogil:
        """Remove up to `n` evictable rows from their queue, oldest first, and return their number."""
        cdef EvictionQueue* queue = &self.queues[list_idx]
        cdef Row* rows = self.rows
        cdef uint64_t first_in_heap = queue.nodes[0].stamp if queue.num_nodes else <uint64_t> -1
        cdef int32_t row = rows[list_idx].next
        cdef Py_ssize_t got = 0
        # Mostly they are the first rows of the list, which are cut off in one piece. `take_victim` does the rest.
        if queue.cursor_mark != self.mark:
            while got < n and row != list_idx and may_leave(self, row) and rows[row].stamp < first_in_heap:
                prefetch_release(self, row)
                rows[row].where = PINNED
                out[got] = row
                got += 1
                row = rows[row].next
            rows[list_idx].next = row
            rows[row].prev = list_idx
            queue.num_listed -= <int32_t> got
            self.num_in_list[list_idx] -= got
        while got < n:
            row = take_victim(self, list_idx)
            if row == 0:
                break
            out[got] = row
            got += 1
        return got

    cdef void return_aside(self) noexcept nogil:
        """Return rows that were set aside during victim selection to their queues."""
        cdef Py_ssize_t i
        for i in range(self.num_aside):
            attach(self, self.aside[i])
        self.num_aside = 0

    cdef bint is_withheld(self, int32_t row) noexcept:
        return self.withheld is not None and (row - self.first) in self.withheld

    cdef int withhold(self, set slots) except -1:
        """Withhold free slots: assign them to no key."""
        cdef int32_t row
        for block_id in slots:
            row = self.first + <int32_t> block_id
            if self.is_withheld(row) or (row < self.first + self.num_fresh and self.rows[row].key != NULL):
                raise BlockStateError(f"slot is not free: {block_id}")
        for block_id in slots:
            row = self.first + <int32_t> block_id
            self.rows[row].where = WITHHELD
            self.rows[row].ref_cnt = True
        self.withheld = slots if self.withheld is None else self.withheld | slots
        self.num_free -= len(slots)
        return 0

    cdef int give_back(self, list slots) except -1:
        """Free withheld slots, all different, in the order given."""
        cdef int32_t row
        if self.withheld is None or not self.withheld.issuperset(slots):
            raise BlockStateError(f"slots are not withheld: {sorted(set(slots) - (self.withheld or set()))}")
        for block_id in slots:
            row = self.first + <int32_t> block_id
            self.rows[row].where = FREE
            if not self.rows[row].ref_cnt:
                self.rows[row].next = self.free_head
                self.free_head = row
        self.withheld.difference_update(slots)
        self.num_free += len(slots)
        return 0

    cdef void drop_stale(self, int32_t stop) noexcept:
        """Release keys from before the last reset, down to row `stop`. Each call releases a few; reset stays short."""
        while self.num_stale > stop:
            self.num_stale -= 1
            Py_XDECREF(self.rows[self.first + self.num_stale].key)
            self.rows[self.first + self.num_stale].key = NULL

    cdef list reset(self):
        """Forget every key. Return the callers' blocks, which must be released last, after all other changes.

        Rows are overwritten when they are used again. Each later call drops a few of their keys.
        """
        cdef int32_t row, queue
        cdef Py_ssize_t num_dropped = 0
        cdef list blocks = None
        if self.caller_blocks != NULL:
            blocks = new_list(self.num_resident)
            for row in range(self.first, self.first + self.num_fresh):
                if self.rows[row].key != NULL:
                    PyList_SET_ITEM(blocks, num_dropped, self.caller_blocks[row].status)
                    self.caller_blocks[row].status = NULL
                    num_dropped += 1
        # Dropping a million keys at once would block the scheduler, so without blocks of callers it is postponed.
        self.num_stale = max(self.num_stale, self.num_fresh)
        if self.caller_blocks != NULL:
            self.num_fresh = 0
            self.drop_stale(0)
        if self.withheld is not None:
            for block_id in self.withheld:
                self.rows[self.first + <int32_t> block_id].where = FREE
            self.withheld = None
        for queue in range(self.first):
            self.rows[queue].prev = self.rows[queue].next = queue
            self.queues[queue].num_listed = self.queues[queue].num_nodes = 0
            self.queues[queue].cursor_mark = 0
        clear(self.buckets, (<size_t> self.num_buckets) * sizeof(Bucket))
        memset(self.num_in_list, 0, sizeof(self.num_in_list))
        self.num_fresh = self.free_head = 0
        self.num_free = self.num_rows - self.first
        self.num_resident = self.num_evictable = self.num_referenced = self.num_pending = 0
        self.version += 1
        self.epoch = next_epoch()
        return blocks

    cdef list keys_of_list(self, int32_t list_idx):
        """Return the keys of a list, oldest first."""
        cdef int32_t row
        cdef list found = []
        for row in range(self.first, self.first + self.num_fresh):
            if self.rows[row].key != NULL and self.rows[row].list_idx == list_idx:
                found.append((self.rows[row].stamp, <object> self.rows[row].key))
        return [key for _, key in sorted(found)]

    cdef int check(self) except -1:
        """Check every row, queue and slot. Raise BlockStateError naming the broken invariant. O(capacity)."""
        cdef int32_t row, queue_idx, i, num_listed
        cdef Py_ssize_t withheld = 0, resident = 0, evictable = 0, referenced = 0, pending = 0
        cdef Py_ssize_t unused = 0, used_slots = 0
        cdef Py_ssize_t[MAX_LISTS] in_list
        cdef EvictionQueue* queue
        cdef uint32_t bits
        memset(in_list, 0, sizeof(in_list))
        for row in range(self.first, self.first + self.num_fresh):
            if self.rows[row].where == FREE or self.rows[row].where == WITHHELD:
                _hold(self.rows[row].key == NULL, f"free row {row} holds a key")
                withheld += self.rows[row].where == WITHHELD and not self.rows[row].ref_cnt
                continue
            resident += 1
            in_list[self.rows[row].list_idx] += 1
            _hold(self.find_one(self.rows[row].key, self.rows[row].hash) == row, f"row {row} is not found by its key")
            _hold(hash_of(self.rows[row].key) == self.rows[row].hash, f"row {row} has another hash")
            if self.caller_blocks == NULL:
                referenced += self.rows[row].ref_cnt > 0
                pending += self.rows[row].ref_cnt < 0
                evictable += self.rows[row].ref_cnt == 0
                _hold((self.rows[row].ref_cnt == 0) == (self.rows[row].where != PINNED),
                      f"row {row} has {self.rows[row].ref_cnt} references, and stands in {self.rows[row].where}")
            else:
                _hold(self.rows[row].where != PINNED,
                      f"row {row} of a caller's block is detached")
        for queue_idx in range(self.first):
            queue = &self.queues[queue_idx]
            num_listed = 0
            row = self.rows[queue_idx].next
            while row != queue_idx:
                num_listed += 1
                _hold(self.rows[row].where == LISTED and self.rows[row].list_idx == queue_idx,
                      f"row {row} is in no list")
                _hold(self.rows[self.rows[row].next].prev == row, f"row {row} is not its neighbour's neighbour")
                _hold(self.rows[row].next == queue_idx or self.rows[row].stamp < self.rows[self.rows[row].next].stamp,
                      f"row {row} stands behind an older one")
                row = self.rows[row].next
            _hold(num_listed == queue.num_listed, f"queue {queue_idx} links {num_listed}, counts {queue.num_listed}")
            _hold(queue.num_nodes <= queue.size, f"queue {queue_idx} has {queue.num_nodes} nodes in {queue.size}")
            for i in range(queue.num_nodes):
                row = queue.nodes[i].row
                _hold(self.rows[row].where == HEAPED and self.rows[row].list_idx == queue_idx
                      and self.rows[row].prev == i and queue.nodes[i].stamp == self.rows[row].stamp,
                      f"node {i} of queue {queue_idx} is astray")
                _hold(i == 0 or queue.nodes[(i - 1) >> 2].stamp < queue.nodes[i].stamp,
                      f"node {i} of queue {queue_idx} is misplaced")
            used_slots += num_listed + queue.num_nodes
        if self.caller_blocks == NULL:
            _hold((evictable, referenced, pending) == (self.num_evictable, self.num_referenced, self.num_pending),
                  f"counts {(self.num_evictable, self.num_referenced, self.num_pending)} should be "
                  f"{(evictable, referenced, pending)}")
            _hold(not self.keeps_queues or used_slots == evictable,
                  f"{used_slots} rows are in eviction queues, {evictable} are evictable")
        row = self.free_head
        while row != 0:
            _hold(self.rows[row].where == FREE or self.rows[row].where == WITHHELD and self.rows[row].ref_cnt,
                  f"row {row} is in use and free")
            unused += 1
            row = self.rows[row].next
        _hold(resident == self.num_resident and resident + unused + withheld == self.num_fresh, "rows are lost")
        num_withheld = 0 if self.withheld is None else len(self.withheld)
        _hold(self.num_free == self.num_rows - self.first - resident - num_withheld, f"num_free is {self.num_free}")
        for i in range(MAX_LISTS):
            _hold(in_list[i] == self.num_in_list[i], f"list {i} holds {in_list[i]}, counts {self.num_in_list[i]}")
        used_slots = 0
        for i in range(<int32_t> self.num_buckets):
            bits = used(&self.buckets[i])
            _hold(bits & (bits + 1) == 0, f"bucket {i} has an empty slot before a used one: {bits:08b}")
            used_slots += bin(bits).count("1")
        _hold(used_slots == resident, f"{used_slots} slots are used for {resident} rows")
        return 0


cdef int _hold(bint condition, str fault) except -1:
    if not condition:
        raise BlockStateError(f"invariant broken: {fault}")
    return 0
