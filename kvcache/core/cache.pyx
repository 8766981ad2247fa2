"""BlockCache: the batch operations of a compiled policy over a pool of its own.

Compiled because each verb is a loop over a request's keys in the scheduler's thread.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memset

from kvcache.core.deadlines cimport Deadlines
from kvcache.core.index cimport Bucket
from kvcache.core.eviction_queue cimport FREE
from kvcache.core.priority cimport PriorityClasses
from kvcache.core.table cimport (
    NUM_PRIORITIES, ONE_SHOT, PINNED, PyByteArray_AS_STRING, PyList_GET_ITEM, PyList_New, PyList_SET_ITEM, as_list,
    detach, ref_of, attach,
)
from kvcache.core.request_keys cimport Named, RequestKeys

import numpy as np

from kvcache.block import BlockStateError
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput

cdef extern from *:
    """
    #ifdef KVCACHE_DEBUG
    #define KV_DEBUG 1
    #else
    #define KV_DEBUG 0
    #endif
    """
    const bint KV_DEBUG

DEBUG = bool(KV_DEBUG)

cdef object _empty = np.empty
cdef object _int64 = np.dtype(np.int64)
cdef Py_ssize_t _num_calls = 0  # in debug builds

cdef enum:
    RUN_CHUNK = 16          # keys looked up together where the first miss ends the walk
    CHECKED_SIZE = 256      # debug builds check tables up to this size after every call, larger ones as much rarer


cdef class BlockCache(PriorityClasses):
    """BlockCache(cache_capacity)

    What a manager asks of a compiled policy (`kvcache.policies.base.BlockCacheOps`), over rows.
    """

    def native(self, num_blocks):
        """Become the cache of a manager's pool of `num_blocks` slots, and return itself.

        Raises
        ------
        BlockStateError
            The policy is in use already.
        """
        if num_blocks != self.cache_capacity:
            raise ValueError(f"num_blocks must be the capacity, {self.cache_capacity}, got {num_blocks!r}")
        if self.is_native or self.num_resident:
            raise BlockStateError("the policy is in use already; a manager needs one of its own")
        self.is_native = True
        PyMem_Free(self.caller_blocks)
        self.caller_blocks = NULL
        return self

    def current_policy(self):
        """Return the policy: itself."""
        return self

    @cython.critical_section
    def open_request(self, int32_t priority=0, int64_t ttl_ns=0):
        """Return the request_keys of a new request, with its retention hint."""
        cdef RequestKeys request_keys = RequestKeys()
        request_keys.priority = priority
        request_keys.ttl_ns = ttl_ns
        if priority != 0 and self.deadlines is None:
            self.deadlines = Deadlines(self.num_rows)
        return request_keys

    @cython.critical_section
    def match_prefix(self, list keys not None, RequestKeys request_keys):
        """Return how many of the first keys are ready."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i = 0, start, stop
        if request_keys is not None and request_keys.num_named != 0 and n > 1:
            self._resolve(keys, request_keys, False)
            while i < n and self.batch_rows[i] != 0 and ref_of(self, self.batch_rows[i]) >= 0:
                i += 1
            return i
        start = 0
        while i == start and start < n:
            stop = min(start + RUN_CHUNK, n)
            self._find(keys, start, stop)
            while i < stop and self.batch_rows[i] != 0 and ref_of(self, self.batch_rows[i]) >= 0:
                i += 1
            start = stop
        if request_keys is not None and n > 1:
            # What was found now spares the request's later calls the same look-ups.
            request_keys.reserve(n)
            request_keys.meet(keys, 0, start, self.batch_hashes, self.batch_rows, self.rows, True, self.batch_named)
            request_keys.version = self.version
        return i

    @cython.critical_section
    def touch(self, keys, RequestKeys request_keys=None):
        """Count a use of each key, from last to first: each time without a request_keys, once per request with one.

        Parameters
        ----------
        keys : iterable of bytes
            In prefix order; unknown ones are ignored.
        request_keys : RequestKeys, optional
            The request's; keys that it has used before are only ordered.
        """
        cdef list key_list = as_list(keys)
        cdef Py_ssize_t n = len(key_list)
        self._resolve(key_list, request_keys, True)
        self._reserve_retention(n)
        if request_keys is None:
            if n:
                self.on_request()
                self.on_use(self.batch_rows, self.batch_hashes, n)
        elif self._count(request_keys, n) < n:
            self.on_reorder(self.batch_rows, n)
        if self.deadlines is not None:
            self._retain(self.batch_rows, n, request_keys)
        self._after()

    cdef Py_ssize_t _count(self, RequestKeys request_keys, Py_ssize_t n) noexcept nogil:
        """Count the uses of a resolved batch that the request has not counted yet, and return how many they were."""
        cdef Py_ssize_t i, num_fresh = 0
        cdef bint is_first = request_keys.num_seen == 0
        cdef Named* named
        for i in range(n):
            named = &request_keys.named[self.batch_named[i]]
            if named.seen == 0:
                request_keys.num_seen += 1
                named.seen = request_keys.num_seen
                self.fresh_rows[num_fresh] = self.batch_rows[i]
                self.fresh_hashes[num_fresh] = self.batch_hashes[i]
                num_fresh += 1
        if num_fresh:
            if is_first:
                self.on_request()
            self.on_use(self.fresh_rows, self.fresh_hashes, num_fresh)
        return num_fresh

    @cython.critical_section
    def pin(self, list keys not None, RequestKeys request_keys):
        """Take a reference on each key's block and return the blocks' ids, in order.

        Raises
        ------
        KeyError, BlockStateError
            A key is absent, or its block is being written; no reference has been taken.
        """
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i
        cdef int32_t row
        cdef int64_t* ids
        self._resolve(keys, request_keys, True)
        for i in range(n):
            row = self.batch_rows[i]
            if row == 0:
                raise KeyError(f"block is not in the cache: {keys[i]!r}")
            if self.rows[row].ref_cnt < 0:
                raise BlockStateError(f"block is not ready: {keys[i]!r}")
        spec = _new_spec(n, &ids)
        self._reserve_retention(n)
        if request_keys is not None:
            self._count(request_keys, n)
        for i in range(n):
            row = self.batch_rows[i]
            if self.rows[row].ref_cnt == 0:
                detach(self, row)
                self.num_referenced += 1
                self.num_evictable -= 1
            self.rows[row].ref_cnt += 1
            ids[i] = row - self.first
        if self.deadlines is not None and request_keys is not None:
            self._retain(self.batch_rows, n, request_keys)
        self._after()
        return spec

    @cython.critical_section
    def unpin(self, list keys not None, RequestKeys request_keys):
        """Give the references back.

        Raises
        ------
        KeyError, BlockStateError
            A key is absent, or has fewer references than are given back; nothing has changed.
        """
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i, j
        cdef int32_t row
        self._resolve(keys, request_keys, False)
        self._reserve_heaps(n)
        for i in range(n):
            row = self.batch_rows[i]
            if row != 0 and self.rows[row].ref_cnt > 0:
                self.rows[row].ref_cnt -= 1
                continue
            for j in range(i):
                self.rows[self.batch_rows[j]].ref_cnt += 1
            if row == 0:
                raise KeyError(f"block is not in the cache: {keys[i]!r}")
            raise BlockStateError(f"block has fewer references than are given back: {keys[i]!r}")
        # A request's head is its most recent block, so that from last to first the stamps ascend.
        for i in range(n - 1, -1, -1):
            row = self.batch_rows[i]
            if self.rows[row].ref_cnt == 0 and self.rows[row].where == PINNED:
                attach(self, row)
                self.num_referenced -= 1
                self.num_evictable += 1
        self._after()

    @cython.critical_section
    def reserve(self, list keys not None, RequestKeys request_keys, admit=None):
        """Give each absent key a slot, evicting exactly as many blocks as needed.

        Parameters
        ----------
        keys : list of bytes
            In prefix order; those present are left out and protected.
        request_keys : RequestKeys or None
            The request's.
        admit : bytearray, optional
            Per key, whether it may be stored.

        Returns
        -------
        PrepareStoreOutput or None
            None: too few blocks can leave; nothing has changed.
        """
        cdef Py_ssize_t n = len(keys)
        cdef RequestKeys names = RequestKeys() if request_keys is None else request_keys
        cdef const uint8_t* admitted = NULL
        cdef Py_ssize_t i, needed, num_new = 0, num_gated = 0, num_protected = 0
        cdef uint32_t mark
        cdef int32_t row
        cdef Named* named
        cdef int64_t* ids
        cdef list stored, evicted
        if admit is not None:
            if type(admit) is not bytearray or len(admit) != n:
                raise ValueError(f"admit must be a bytearray with a flag per key ({n}), got {admit!r}")
            admitted = <const uint8_t*> PyByteArray_AS_STRING(admit)
        self._resolve(keys, names, True)
        mark = self._next_mark()
        for i in range(n):
            row = self.batch_rows[i]
            if row != 0:
                if self.rows[row].mark != mark:
                    self.rows[row].mark = mark
                    num_protected += self.rows[row].ref_cnt == 0
                continue
            named = &names.named[self.batch_named[i]]
            if named.mark == mark:
                continue
            named.mark = mark
            if admitted == NULL or admitted[i]:
                self.batch_wanted[num_new] = i
                num_new += 1
            else:
                num_gated += 1
        needed = max(num_new - self.num_free, 0) if num_new else 0
        if needed > self.num_evictable - num_protected:
            return None
        stored = PyList_New(num_new)
        evicted = PyList_New(needed)
        spec = _new_spec(num_new, &ids)
        self._reserve_aside(num_protected)
        self._reserve_retention(n)
        self.gated_blocks += num_gated
        if request_keys is not None:
            self._count(request_keys, n)
        if needed:
            self._evict(needed, self.fresh_rows)
            self.num_evictable -= needed
            self._release(self.fresh_rows, needed, evicted)
        if num_new:
            self._admit_wanted(keys, names, num_new, stored, ids)
            if names.priority < 0:
                for i in range(num_new):
                    self.rows[self.fresh_rows[i]].priority = ONE_SHOT
        if self.deadlines is not None and request_keys is not None:
            self._retain(self.batch_rows, n, request_keys)
        self._after()
        return PrepareStoreOutput(stored, spec, evicted)

    cdef int _admit_wanted(self, list keys, RequestKeys names, Py_ssize_t n, list stored, int64_t* ids) except -1:
        """Give rows to the `n` wanted keys of a resolved batch, in the order offered."""
        cdef Py_ssize_t i, at
        cdef int32_t row
        cdef PyObject* key
        cdef Named* named
        self._admit(keys, self.batch_wanted, n, self.fresh_rows)
        for i in range(n):
            at = self.batch_wanted[i]
            row = self.fresh_rows[i]
            named = &names.named[self.batch_named[at]]
            named.row = row
            named.generation = self.rows[row].generation
            key = PyList_GET_ITEM(keys, at)
            Py_INCREF(<object> key)
            PyList_SET_ITEM(stored, i, key)
            ids[i] = row - self.first
            self.batch_rows[at] = row
        self.on_insert(self.fresh_rows, n)
        self.num_pending += n
        self.version += 1
        return 0

    @cython.critical_section
    def commit(self, list keys not None, RequestKeys request_keys):
        """Make blocks that were being written ready, and return their keys: `keys` itself where it is all of them."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i, num_ready = 0
        cdef int32_t row
        self._resolve(keys, request_keys, False)
        self._reserve_heaps(n)
        for i in range(n):
            row = self.batch_rows[i]
            if row != 0 and self.rows[row].ref_cnt < 0:
                self.rows[row].ref_cnt = 0
                attach(self, row)
                self.batch_wanted[num_ready] = i
                num_ready += 1
        self.num_pending -= num_ready
        self.num_evictable += num_ready
        self._after()
        return keys if num_ready == n else [keys[self.batch_wanted[i]] for i in range(num_ready)]

    @cython.critical_section
    def abort(self, list keys not None, RequestKeys request_keys):
        """Drop blocks that were being written, freeing their slots in the order given, and return how many."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i, num_dropped = 0
        cdef int32_t row
        cdef list dropped
        self._resolve(keys, request_keys, False)
        dropped = PyList_New(n)
        for i in range(n):
            row = self.batch_rows[i]
            if row != 0 and self.rows[row].ref_cnt < 0:
                # No longer one being written, should the key be named twice.
                self.rows[row].ref_cnt = 0
                self.num_in_list[self.rows[row].list_idx] -= 1
                self.fresh_rows[num_dropped] = row
                num_dropped += 1
        self.on_remove(self.fresh_rows, num_dropped)
        self._release(self.fresh_rows, num_dropped, dropped)
        self.num_pending -= num_dropped
        self.version += num_dropped != 0
        self._after()
        return num_dropped

    @cython.critical_section
    def end_request(self, RequestKeys request_keys not None, dict positions):
        """Order all keys that the request used: as first seen, or by `positions` (key to end token).

        A hint that raises is applied to them once more, so that its time counts from the request's end.
        """
        cdef Py_ssize_t i, at, n = request_keys.num_seen
        cdef Named* named
        cdef int32_t* rows
        self._reserve_batch(n)
        self._reserve_retention(n)
        for i in range(request_keys.num_named):
            named = &request_keys.named[i]
            if named.seen == 0:
                continue
            at = named.seen - 1
            if (named.row == 0 and request_keys.version != self.version) or (
                    named.row != 0 and self.rows[named.row].generation != named.generation):
                named.row = self._find_one(named.key, named.hash)
            self.batch_rows[at] = named.row
            self.batch_named[at] = i
        rows = self.batch_rows
        if positions is not None:
            order = self._by_position(request_keys, n, positions)
            for i in range(n):
                self.fresh_rows[i] = self.batch_rows[<Py_ssize_t> order[i]]
            rows = self.fresh_rows
        self.on_reorder(rows, n)
        if request_keys.priority > 0:
            # Blocks that came one by one now have one end, at which the tail falls back before the head.
            self._retain(rows, n, request_keys)
        self._after()

    cdef list _by_position(self, RequestKeys request_keys, Py_ssize_t n, dict positions):
        """Return the order of the n used keys; one without a position stays behind the key it was named after."""
        cdef Py_ssize_t i
        cdef list known = []
        last = -1
        for i in range(n):
            last = positions.get(<object> request_keys.named[self.batch_named[i]].key, last)
            known.append(last)
        return sorted(range(n), key=known.__getitem__)

    @cython.critical_section
    def reset(self):
        """Forget everything; block ids start again at 0."""
        cdef int32_t row, lane
        for row in range(self.first, self.first + self.num_fresh):
            if self.rows[row].key != NULL:
                Py_XDECREF(self.rows[row].key)
                self.rows[row].key = NULL
                if self.caller_blocks != NULL:
                    Py_XDECREF(self.caller_blocks[row].status)
                    self.caller_blocks[row].status = NULL
            self.rows[row].where = FREE
            self.rows[row].generation += 1
        for lane in range(self.first):
            self.rows[lane].prev = self.rows[lane].next = lane
            self.lanes[lane].num_listed = self.lanes[lane].num_nodes = 0
            self.lanes[lane].cursor_mark = 0
        memset(self.buckets, 0, (<size_t> self.num_buckets) * sizeof(Bucket))
        memset(self.num_in_list, 0, sizeof(self.num_in_list))
        self.num_fresh = self.free_head = 0
        self.num_free = self.num_rows - self.first
        self.num_resident = self.num_evictable = self.num_referenced = self.num_pending = 0
        self.version += 1
        if self.deadlines is not None:
            self.deadlines.clear()
        self.on_reset()
        self._after()

    # ---- what the cache share -------------------------------------------------------------------------------------

    cdef int _evict(self, Py_ssize_t n, int32_t* out) noexcept nogil:
        """Take `n` rows out of their lanes, least valuable first; the caller has made sure that there are so many."""
        cdef Py_ssize_t got = 0, i
        cdef int32_t priority
        self.num_aside = 0
        for priority in range(NUM_PRIORITIES):
            if got < n:
                got += self.select_victims(priority, n - got, out + got)
        for i in range(self.num_aside):
            attach(self, self.aside[i])
        return 0

    cdef int _after(self) except -1:
        global _num_calls
        if KV_DEBUG:
            _num_calls += 1
            if _num_calls * CHECKED_SIZE % self.cache_capacity < CHECKED_SIZE:
                self.check()
        return 0


cdef object _new_spec(Py_ssize_t n, int64_t** ids):
    # Not through __init__, nor through a memoryview: the array is new, of the right kind, and kept by the spec.
    cdef Py_buffer buffer
    array = _empty(n, _int64)
    PyObject_GetBuffer(array, &buffer, PyBUF_WRITABLE)
    ids[0] = <int64_t*> buffer.buf
    PyBuffer_Release(&buffer)
    spec = CPULoadStoreSpec.__new__(CPULoadStoreSpec)
    spec.block_ids = array
    return spec
