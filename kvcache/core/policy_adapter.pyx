"""PolicyAdapter: exposes a compiled policy as a `CachePolicy` over caller-owned BlockStatus objects.

Compiled because policies inherit it: it builds the five primitives from a policy's hooks.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t

from kvcache.core.memory cimport new_list, pause_collector, resume_collector
from kvcache.core.policy cimport KV_DEBUG, ReplacementPolicy
from kvcache.core.table cimport Batch, BlockTable, PyList_SET_ITEM, as_list, attach, detach, may_leave

import ctypes

from kvcache.block import BlockStateError, BlockStatus
from kvcache.core.cache import BlockCache
from kvcache.options import check_int


class BlockStatusView(BlockStatus):
    """A read-only live view of a block in a compiled policy's own pool.

    Reading it after the block was evicted raises BlockStateError.
    """

    def __init__(self, policy, row, generation, epoch):
        self._where = (policy, row, generation, epoch)

    @property
    def ref_cnt(self):
        """Readers of the block; -1 while it is being written."""
        policy, *row = self._where
        return policy._peek(*row)[0]

    @property
    def block_id(self):
        """Slot in the pool."""
        policy, *row = self._where
        return policy._peek(*row)[1]


class ListView:
    """The keys of one list of a compiled policy, oldest first: `len`, `in` and iteration."""

    def __init__(self, policy, list_idx):
        self._policy = policy
        self._list_idx = list_idx

    def __len__(self):
        return self._policy._list_len(self._list_idx)

    def __contains__(self, key):
        return self._policy._list_has(self._list_idx, key)

    def __iter__(self):
        return iter(self._policy._list_keys(self._list_idx))

    def __repr__(self):
        return f"ListView({list(self)!r})"


cdef class PolicyAdapter(ReplacementPolicy):
    """PolicyAdapter(cache_capacity)

    A compiled policy. By default it is a plain `CachePolicy`: callers insert and remove their own `BlockStatus`
    objects. After `native`, its blocks belong to a manager's pool, and callers can only read them.
    """

    declines = False
    reads_clock = False
    group_policy = None

    def __cinit__(self, cache_capacity):
        self.batch = Batch()

    def __init__(self, cache_capacity):
        if self.table is None:
            raise TypeError(f"{type(self).__name__} is no policy: it has no table of blocks")

    def native(self, num_blocks):
        """Return the cache of a manager's pool of `num_blocks` slots. From now on, this policy selects its victims.

        Raises
        ------
        BlockStateError
            The policy is already in use.
        """
        if num_blocks != self.table.cache_capacity:
            raise ValueError(f"num_blocks must be the capacity, {self.table.cache_capacity}, got {num_blocks!r}")
        return BlockCache(self)

    def get(self, key):
        """Return the block of `key`, or None. In a manager's pool, it is a read-only live view."""
        cdef BlockTable table = self.table
        cdef int32_t row
        with cython.critical_section(table):
            row = table.row_of(key)
            if row == 0:
                return None
            if table.caller_blocks != NULL:
                return <object> table.caller_blocks[row].status
            return BlockStatusView(self, row, table.rows[row].generation, table.epoch)

    def insert(self, key, block):
        """Insert a block at the most-recent end. From now on, its `ref_cnt` is read in place."""
        cdef BlockTable table = self.table
        cdef list keys = [key]
        cdef Py_ssize_t at = 0
        cdef int32_t row
        cdef uintptr_t address
        if not isinstance(block, BlockStatus):
            raise ValueError(f"block must be a BlockStatus, got {block!r}")
        address = ctypes.addressof(block)
        with cython.critical_section(table):
            self._refuse_native("insert")
            table.find(keys, 0, 1, self.batch)
            if self.batch.rows[0] != 0:
                raise BlockStateError(f"block is in the cache already: {key!r}")
            if table.num_free == 0:
                raise BlockStateError(f"the policy holds {table.cache_capacity} blocks, its capacity, already")
            # What may raise comes first; from `admit` on nothing fails.
            table.reserve_heaps(1)
            self.reserve_policy(1)
            table.admit(keys, self.batch.hashes, &at, 1, &row)
            Py_INCREF(block)
            table.caller_blocks[row].status = <PyObject*> block
            table.caller_blocks[row].ref_cnt = <int32_t*> address
            self.on_insert(&row, 1)
            attach(table, row)
            table.version += 1
            self._end()

    def remove(self, key):
        """Remove a block without creating a ghost.

        Raises
        ------
        KeyError
            The key is not present.
        BlockStateError
            The policy's blocks belong to its manager.
        """
        cdef BlockTable table = self.table
        cdef list keys = new_list(1)
        cdef list blocks = new_list(1)      # released at the end: a subclass of BlockStatus may have a finalizer
        cdef int32_t row
        with cython.critical_section(table):
            row = table.row_of(key)
            if row == 0:
                raise KeyError(f"block is not in the cache: {key!r}")
            self._refuse_native("remove")
            self.reserve_policy(1)
            detach(table, row)
            table.num_in_list[table.rows[row].list_idx] -= 1
            self.on_remove(&row, 1)
            self._release(&row, 1, keys, blocks)
            self._end()

    cdef void _release(self, const int32_t* rows, Py_ssize_t n, list keys, list blocks) noexcept:
        """Free rows. Move their references to the new lists `keys` and `blocks`, both of length `n`."""
        cdef Py_ssize_t i
        for i in range(n):
            PyList_SET_ITEM(blocks, i, self.table.caller_blocks[rows[i]].status)
            self.table.caller_blocks[rows[i]].status = NULL
        self.table.release(rows, n, keys)

    def touch(self, keys):
        """Count a use of each key, from last to first. Unknown keys are ignored."""
        cdef list key_list = as_list(keys)
        with cython.critical_section(self.table):
            self._refuse_native("touch")
            self.use_keys(key_list, self.batch)
            self._end()

    def evict(self, n, protected):
        """Evict exactly `n` blocks, or none; see `CachePolicy.evict`."""
        cdef BlockTable table = self.table
        cdef list names = as_list(protected)
        cdef list keys, blocks
        cdef Py_ssize_t i, count = 0, wanted
        cdef int32_t row
        with cython.critical_section(table):
            self._refuse_native("evict")
            check_int("n", n, 0)
            table.find(names, 0, len(names), self.batch)
            if n > table.num_resident:
                return None
            wanted = n
            keys = new_list(wanted)
            blocks = new_list(wanted)
            table.next_mark()
            for i in range(len(names)):
                table.rows[self.batch.rows[i]].mark = table.mark
            # Count evictable blocks first: if they are too few, nothing changes.
            for row in range(table.first, table.first + table.num_fresh):
                if count == wanted:
                    break
                count += table.rows[row].key != NULL and may_leave(table, row)
            if count < wanted:
                return None
            self.batch.reserve(wanted)
            self.reserve_policy(wanted)
            table.reserve_aside(table.num_resident)
            self.choose_victims(wanted, self.batch.victims)
            self._release(self.batch.victims, wanted, keys, blocks)
            self._end()
        return list(zip(keys, blocks))

    def order(self, keys):
        """Move each key, from last to first, to the most-recent end of its list. Count no use."""
        cdef list key_list = as_list(keys)
        with cython.critical_section(self.table):
            self._refuse_native("order")
            self.table.find(key_list, 0, len(key_list), self.batch)
            self.on_reorder(self.batch.rows, len(key_list))
            self._end()

    def demote(self, keys):
        """Move each key, from first to last, to the least-recent end of a list: the last one is evicted first."""
        cdef list key_list = as_list(keys)
        with cython.critical_section(self.table):
            self._refuse_native("demote")
            self.table.find(key_list, 0, len(key_list), self.batch)
            self.on_demote(self.batch.rows, len(key_list))
            self._end()

    def use(self, list keys not None, bint first):
        """Count one use of each key for one request. Advance the clock only if `first`."""
        if self.tracks_uses or first:
            return self.touch(keys)
        with cython.critical_section(self.table):
            self._refuse_native("use")
            self.table.find(keys, 0, len(keys), self.batch)
            self.on_use(self.batch.rows, self.batch.hashes, len(keys))
            self._end()

    def clear(self):
        """Forget everything, including ghosts and adaptive state."""
        cdef list _blocks       # released at the end
        with cython.critical_section(self.table):
            self._refuse_native("clear")
            _blocks = self.table.reset()
            self.on_reset()
            self._end()

    cdef int _refuse_native(self, str operation) except -1:
        if self.table.caller_blocks == NULL:
            raise BlockStateError(f"cannot {operation}: the policy's blocks belong to its manager")
        return 0

    cdef int _end(self) except -1:
        if KV_DEBUG and self.is_check_due():
            self.check()
        return 0

    def _peek(self, int32_t row, uint32_t generation, uint64_t epoch):
        cdef BlockTable table = self.table
        with cython.critical_section(table):
            if table.rows[row].generation != generation or table.epoch != epoch:
                raise BlockStateError("the block has left the cache")
            return table.rows[row].ref_cnt, row - table.first

    def gauges(self):
        """Return the policy's gauges; see `CachePolicy.gauges`."""
        return {}

    def _list_len(self, int32_t list_idx):
        return self.table.num_in_list[list_idx]

    def _list_has(self, int32_t list_idx, key):
        cdef int32_t row
        with cython.critical_section(self.table):
            row = self.table.row_of(key)
            return row != 0 and self.table.rows[row].list_idx == list_idx

    def _list_keys(self, int32_t list_idx):
        with cython.critical_section(self.table):
            return self.table.keys_of_list(list_idx)

    def check(self):
        """Check every row, queue and slot. Raise BlockStateError naming the broken invariant. O(capacity)."""
        cdef bint was_on = pause_collector()
        try:
            with cython.critical_section(self.table):
                self.check_all()
        finally:
            resume_collector(was_on)
