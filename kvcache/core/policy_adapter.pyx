"""A compiled policy: the batch operations, the five primitives of a `CachePolicy`, and inspection.

Compiled because policies inherit it. A policy answers the hooks (`on_use`, `on_insert`, `select_victims`) of
`BlockTable`.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from kvcache.core.index cimport used
from kvcache.core.key_hash cimport hash_of
from kvcache.core.memory cimport new_list, pause_collector, resume_collector
from kvcache.core.eviction_queue cimport FREE, HEAPED, LISTED, WITHHELD, EvictionQueue
from kvcache.core.table cimport (
    MAX_LISTS, NORMAL, PINNED, PyList_SET_ITEM, as_list, lane_of, may_leave, detach, attach,
)
from kvcache.core.cache cimport BlockCache

import ctypes

from kvcache.core.cache import DEBUG
from kvcache.block import BlockStateError, BlockStatus

__all__ = ["DEBUG", "BlockStatusView", "ListView", "PolicyAdapter"]


class BlockStatusView(BlockStatus):
    """A read-only live view of a block in a compiled policy's own pool.

    Reading it once its block has left raises BlockStateError.
    """

    def __init__(self, table, row, generation, epoch):
        self._where = (table, row, generation, epoch)

    @property
    def ref_cnt(self):
        """Readers of the block; -1 while it is being written."""
        table, *row = self._where
        return table._peek(*row)[0]

    @property
    def block_id(self):
        """Slot in the pool."""
        table, *row = self._where
        return table._peek(*row)[1]

    @property
    def is_ready(self):
        """Whether the block's bytes are there to be read."""
        return self.ref_cnt >= 0


class ListView:
    """The keys of one list of a compiled policy, oldest first: `len`, `in` and iteration."""

    def __init__(self, table, list_idx):
        self._table = table
        self._list_idx = list_idx

    def __len__(self):
        return self._table._list_len(self._list_idx)

    def __contains__(self, key):
        return self._table._list_has(self._list_idx, key)

    def __iter__(self):
        return iter(self._table._list_keys(self._list_idx))

    def __repr__(self):
        return f"ListView({list(self)!r})"


cdef class PolicyAdapter(BlockCache):
    """PolicyAdapter(cache_capacity)

    Blocks by key, in one of two modes: a manager's pool (after `native`), where the table hands out slots and the batch
    cache do everything; or a plain `CachePolicy`, where callers bring their own `BlockStatus` objects.
    """

    # ---- the five primitives, over blocks that the caller brings ----------------------------------------------

    @cython.critical_section
    def get(self, key):
        """Return the block of `key`, or None.

        Returns
        -------
        BlockStatus or None
            The object that was inserted; in a manager's pool a read-only live view.
        """
        cdef int32_t row = self._row_of(key)
        if row == 0:
            return None
        if self.caller_blocks != NULL:
            return <object> self.caller_blocks[row].status
        return BlockStatusView(self, row, self.rows[row].generation, self.epoch)

    @cython.critical_section
    def insert(self, key, block):
        """Take a block in at the most-recent end.

        Parameters
        ----------
        key : bytes
            Not there yet.
        block : BlockStatus
            Kept; its `ref_cnt` is read in place from now on.
        """
        cdef list keys = [key]
        cdef Py_ssize_t at = 0
        cdef int32_t row
        cdef uintptr_t address
        self._refuse_native("insert")
        if not isinstance(block, BlockStatus):
            raise ValueError(f"block must be a BlockStatus, got {block!r}")
        address = ctypes.addressof(block)
        self._find(keys, 0, 1)
        if self.batch_rows[0] != 0:
            raise BlockStateError(f"block is in the cache already: {key!r}")
        if self.num_free == 0:
            self._grow()
        self._reserve_heaps(1)
        self.reserve_policy(1)
        self._admit(keys, &at, 1, &row)
        Py_INCREF(block)
        self.caller_blocks[row].status = <PyObject*> block
        self.caller_blocks[row].ref_cnt = <int32_t*> address
        self.on_insert(&row, 1)
        attach(self, row)
        self.version += 1
        self._after()

    @cython.critical_section
    def remove(self, key):
        """Remove a block without remembering it.

        Raises
        ------
        KeyError
            The key is not there.
        BlockStateError
            The policy's blocks belong to its manager.
        """
        cdef list keys = new_list(1)
        cdef list blocks = new_list(1)      # let go at the end: a subclass of BlockStatus may have a finalizer
        cdef int32_t row = self._row_of(key)
        if row == 0:
            raise KeyError(f"block is not in the cache: {key!r}")
        self._refuse_native("remove")
        self.reserve_policy(1)
        detach(self, row)
        self.num_in_list[self.rows[row].list_idx] -= 1
        self.on_remove(&row, 1)
        self._release_caller_blocks(&row, 1, keys, blocks)
        self.version += 1
        self._after()

    cdef void _release_caller_blocks(self, const int32_t* rows, Py_ssize_t n, list keys, list blocks) noexcept:
        """Free rows; `keys` and `blocks`, new and of length `n`, take over what they held."""
        cdef Py_ssize_t i
        for i in range(n):
            PyList_SET_ITEM(blocks, i, self.caller_blocks[rows[i]].status)
            self.caller_blocks[rows[i]].status = NULL
        self._release(rows, n, keys)

    @cython.critical_section
    def evict(self, n, protected):
        """Evict exactly `n` blocks, or none.

        Parameters
        ----------
        n : int
            Blocks to evict, 0 <= n.
        protected : iterable of bytes
            Keys that must stay.

        Returns
        -------
        list of (bytes, BlockStatus), or None
            Victims, in eviction order. None if fewer than `n` blocks may leave; nothing has changed then.
        """
        cdef list names = as_list(protected)
        cdef list keys, blocks
        cdef Py_ssize_t i, count = 0, wanted
        cdef int32_t row
        self._refuse_native("evict")
        if type(n) is not int or n < 0:
            raise ValueError(f"n must be an int >= 0, got {n!r}")
        self._find(names, 0, len(names))
        if n > self.num_resident:
            return None
        wanted = n
        keys = new_list(wanted)
        blocks = new_list(wanted)
        self._next_mark()
        for i in range(len(names)):
            self.rows[self.batch_rows[i]].mark = self.mark
        for row in range(self.first, self.first + self.num_fresh):
            if count == wanted:
                break
            count += self.rows[row].key != NULL and may_leave(self, row)
        if count < wanted:
            return None
        self._reserve_batch(wanted)
        self.reserve_policy(wanted)
        self._reserve_aside(self.num_resident)
        self._evict(wanted, self.fresh_rows)
        self._release_caller_blocks(self.fresh_rows, wanted, keys, blocks)
        self.version += wanted != 0
        self._after()
        return list(zip(keys, blocks))

    @cython.critical_section
    def order(self, keys):
        """Move each key, from last to first, to the most-recent end of its list; no use is counted."""
        cdef list key_list = as_list(keys)
        self._find(key_list, 0, len(key_list))
        self.on_reorder(self.batch_rows, len(key_list))
        self._after()

    @cython.critical_section
    def use(self, list keys not None, bint first):
        """Count one use of each key for one request; the clock advances only if `first`."""
        if self.tracks_uses:
            self.touch(keys)
            return
        self._find(keys, 0, len(keys))
        if first and keys:
            self.on_request()
        self.on_use(self.batch_rows, self.batch_hashes, len(keys))
        self._after()

    def clear(self):
        """Forget everything, ghosts and adaptive state too."""
        self.reset()

    cdef int _refuse_native(self, str verb) except -1:
        if self.is_native:
            raise BlockStateError(f"cannot {verb}: the policy's blocks belong to its manager")
        return 0

    # ---- inspection -------------------------------------------------------------------------------------------

    @cython.critical_section
    def _peek(self, int32_t row, uint32_t generation, uint64_t epoch):
        if self.rows[row].generation != generation or self.epoch != epoch:
            raise BlockStateError("the block has left the cache")
        return self.rows[row].ref_cnt, row - self.first

    def _list_len(self, int32_t list_idx):
        return self.num_in_list[list_idx]

    @cython.critical_section
    def _list_has(self, int32_t list_idx, key):
        cdef int32_t row = self._row_of(key)
        return row != 0 and self.rows[row].list_idx == list_idx

    @cython.critical_section
    def _list_keys(self, int32_t list_idx):
        cdef int32_t row
        found = []
        for row in range(self.first, self.first + self.num_fresh):
            if self.rows[row].key != NULL and self.rows[row].list_idx == list_idx:
                found.append((self.ranks[row] if self.ranks != NULL else 0, self.rows[row].stamp,
                              <object> self.rows[row].key))
        return [key for _, _, key in sorted(found)]

    @cython.critical_section
    def check(self):
        """Walk every row, lane and slot; BlockStateError says what does not hold. O(capacity)."""
        cdef bint was_on = pause_collector()
        try:
            self._check_rows()
            self._check_policy()
        finally:
            resume_collector(was_on)

    cdef int _check_rows(self) except -1:
        cdef int32_t row, lane_idx, i, num_listed
        cdef Py_ssize_t withheld = 0, resident = 0, evictable = 0, referenced = 0, pending = 0
        cdef Py_ssize_t unused = 0, raised = 0, used_slots = 0
        cdef Py_ssize_t[MAX_LISTS] in_list
        cdef EvictionQueue* lane
        cdef uint32_t bits
        memset(in_list, 0, sizeof(in_list))
        for row in range(self.first, self.first + self.num_fresh):
            if self.rows[row].where == FREE or self.rows[row].where == WITHHELD:
                _hold(self.rows[row].key == NULL, f"free row {row} holds a key")
                withheld += self.rows[row].where == WITHHELD and not self.rows[row].ref_cnt
                continue
            resident += 1
            in_list[self.rows[row].list_idx] += 1
            raised += self.rows[row].priority > NORMAL
            _hold(self._find_one(self.rows[row].key, self.rows[row].hash) == row, f"row {row} is not found by its key")
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
        for lane_idx in range(self.first):
            lane = &self.lanes[lane_idx]
            num_listed = 0
            row = self.rows[lane_idx].next
            while row != lane_idx:
                num_listed += 1
                _hold(self.rows[row].where == LISTED and lane_of(self, row) == lane_idx, f"row {row} is in no list")
                _hold(self.rows[self.rows[row].next].prev == row, f"row {row} is not its neighbour's neighbour")
                _hold(self.rows[row].next == lane_idx or self.rows[row].stamp < self.rows[self.rows[row].next].stamp,
                      f"row {row} stands behind an older one")
                row = self.rows[row].next
            _hold(num_listed == lane.num_listed, f"lane {lane_idx} links {num_listed} rows, counts {lane.num_listed}")
            _hold(lane.num_nodes <= lane.size, f"lane {lane_idx} has {lane.num_nodes} nodes in {lane.size}")
            for i in range(lane.num_nodes):
                row = lane.nodes[i].row
                _hold(self.rows[row].where == HEAPED and lane_of(self, row) == lane_idx and self.rows[row].prev == i
                      and lane.nodes[i].stamp == self.rows[row].stamp, f"node {i} of lane {lane_idx} is astray")
                _hold(i == 0 or (lane.nodes[(i - 1) >> 2].rank, lane.nodes[(i - 1) >> 2].stamp)
                      < (lane.nodes[i].rank, lane.nodes[i].stamp), f"node {i} of lane {lane_idx} is above its parent")
            used_slots += num_listed + lane.num_nodes
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
        _hold(raised == self.num_raised, f"{raised} rows are at a raised priority, {self.num_raised} have a deadline")
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
