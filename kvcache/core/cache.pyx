"""BlockCache: the batch operations of a compiled policy over a pool of its own.

Compiled because each verb is a loop over a request's keys in the scheduler's thread.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memset

from kvcache.core.deadlines cimport Deadlines
from kvcache.core.index cimport Bucket, clear
from kvcache.core.eviction_queue cimport FREE, WITHHELD
from kvcache.core.memory cimport new_list, pause_collector, resume_collector
from kvcache.core.priority cimport PriorityClasses
from kvcache.core.table cimport (
    NO_POSITION, NUM_PRIORITIES, ONE_SHOT, PINNED, Position, PyByteArray_AS_STRING, PyList_GET_ITEM, PyList_SET_ITEM,
    as_list, detach, attach,
)
from kvcache.core.request_keys cimport Named, RequestKeys, number_of

import numpy as np

from kvcache.block import BlockStateError
from kvcache.request import NEXT_USES
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput

cdef extern from "Python.h":
    void Py_SET_SIZE(object keys, Py_ssize_t n) noexcept

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

cdef extern from "Python.h":
    PyObject* PyDict_GetItemWithError(dict positions, object key) except? NULL
    bint PyDict_Next(dict positions, Py_ssize_t* at, PyObject** key, PyObject** value) noexcept

cdef enum:
    ABSENT = 0
    PENDING = 1
    READY = 2

cdef enum:
    RUN_CHUNK = 16          # keys looked up together where the first miss ends the walk
    CHECKED_SIZE = 256      # debug builds check tables up to this size after every call, larger ones as much rarer


cdef class BlockCache(PriorityClasses):
    """BlockCache(cache_capacity)

    What a manager asks of a compiled policy (`kvcache.policies.base.BlockCacheOps`), over rows.
    """

    @cython.critical_section
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
    def open_request(self, int32_t priority=0, int64_t ttl_ns=0, next_use=None):
        """Return the request_keys of a new request, with its retention hint."""
        cdef RequestKeys request_keys = RequestKeys()
        self._begin(request_keys)
        request_keys.priority = priority
        request_keys.next_use = _next_use_of(next_use)
        request_keys.ttl_ns = ttl_ns
        if self.tracks_uses:
            request_keys.track_uses()
        if not self.keeps_queues:
            request_keys.priority = 0
        elif priority != 0 and self.deadlines is None:
            self.deadlines = Deadlines(self.num_rows)
        return request_keys

    @cython.critical_section
    def has_used(self, RequestKeys request_keys not None):
        """Return whether a request has used a key since the last reset."""
        self._begin(request_keys)
        return request_keys.num_seen != 0

    @cython.critical_section
    def match_prefix(self, list keys not None, RequestKeys request_keys, Py_ssize_t start=0):
        """Return where the run of ready keys that begins at `start` ends: `start` itself if that key is not ready."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i = start, stop
        if not 0 <= start <= n:
            raise ValueError(f"start must be in 0..{n}, got {start}")
        self._begin(request_keys)
        if start == 0 and request_keys is not None and request_keys.num_named != 0 and n > 1:
            self._resolve(keys, request_keys, False)
            while i < n and self._state_of(self.batch_rows[i]) == READY:
                i += 1
            return i
        stop = start
        while i == stop and stop < n:
            stop = min(stop + RUN_CHUNK, n)
            self._find(keys, i, stop)
            while i < stop and self._state_of(self.batch_rows[i]) == READY:
                i += 1
        if start == 0 and request_keys is not None and n > 1:
            # What was found now spares the request's later calls the same look-ups.
            request_keys.reserve(n)
            request_keys.meet(keys, 0, stop, self.batch_hashes, self.batch_rows, self.rows, True, self.batch_named)
            request_keys.version = self.version
        return i

    cdef int32_t _state_of(self, int32_t row) noexcept nogil:
        return ABSENT if row == 0 else READY if self.rows[row].ref_cnt >= 0 else PENDING

    @cython.critical_section
    def status_of(self, key):
        """Return the state of one key: 0 absent, 1 being written, 2 ready."""
        self._begin(None)
        return self._state_of(self._row_of(key))

    @cython.critical_section
    def status(self, list keys not None):
        """Return the state of each key as one byte: 0 absent, 1 being written, 2 ready."""
        cdef Py_ssize_t i, n = len(keys)
        cdef bytes states = PyBytes_FromStringAndSize(NULL, n)
        cdef char* state = PyBytes_AS_STRING(states)
        self._begin(None)
        self._find(keys, 0, n)
        for i in range(n):
            state[i] = <char> self._state_of(self.batch_rows[i])
        return states

    @cython.critical_section
    def locate(self, list keys not None):
        """Return the id of each key's block, without taking a reference; -1 where it is absent or being written."""
        cdef Py_ssize_t i, n = len(keys)
        cdef list ids
        cdef object block_id
        self._begin(None)
        self._find(keys, 0, n)
        ids = new_list(n)
        for i in range(n):
            block_id = -1 if self._state_of(self.batch_rows[i]) != READY else self.batch_rows[i] - self.first
            Py_INCREF(block_id)
            PyList_SET_ITEM(ids, i, <PyObject*> block_id)
        return ids

    @cython.critical_section
    def withhold(self, block_ids):
        """Give these free slots to no key until `give_back`.

        Raises
        ------
        BlockStateError
            A slot holds a block, or is withheld already; nothing has changed.
        """
        cdef set slots = _slots(block_ids, self.num_rows - self.first)
        cdef int32_t row
        self._begin(None)
        for block_id in slots:
            row = self.first + <int32_t> block_id
            if self._is_withheld(row) or (row < self.first + self.num_fresh and self.rows[row].key != NULL):
                raise BlockStateError(f"slot is not free: {block_id}")
        for block_id in slots:
            row = self.first + <int32_t> block_id
            self.rows[row].where = WITHHELD
            self.rows[row].ref_cnt = True
        self.withheld = slots if self.withheld is None else self.withheld | slots
        self.num_free -= len(slots)
        self._after()

    @cython.critical_section
    def give_back(self, block_ids):
        """Free slots that were withheld, in the order given.

        Raises
        ------
        BlockStateError
            A slot is not withheld; nothing has changed.
        """
        cdef list ids = list(dict.fromkeys(block_ids))
        cdef set slots = _slots(ids, self.num_rows - self.first)
        cdef int32_t row
        self._begin(None)
        if self.withheld is None or not slots <= self.withheld:
            raise BlockStateError(f"slots are not withheld: {sorted(slots - (self.withheld or set()))}")
        for block_id in ids:
            row = self.first + <int32_t> block_id
            self.rows[row].where = FREE
            if not self.rows[row].ref_cnt:
                self.rows[row].next = self.free_head
                self.free_head = row
        self.withheld -= slots
        self.num_free += len(slots)
        self._after()

    cdef bint _is_withheld(self, int32_t row) noexcept:
        return self.withheld is not None and (row - self.first) in self.withheld

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
        if request_keys is not None:
            self._begin(request_keys)
        elif self.tracks_uses:
            # Without a context, a call is a request of its own.
            request_keys = RequestKeys()
            request_keys.track_uses()
        self._resolve(key_list, request_keys, True)
        self._read_positions(key_list, request_keys)
        self._reserve_retention(n)
        self.reserve_policy(n)
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
        cdef bint is_positioned
        cdef Named* named
        for i in range(n):
            named = &request_keys.named[self.batch_named[i]]
            if named.seen == 0:
                request_keys.used[request_keys.num_seen] = <int32_t> self.batch_named[i]
                request_keys.num_seen += 1
                named.seen = request_keys.num_seen
                if request_keys.uses != NULL:
                    is_positioned = request_keys.num_positions != 0 and self.batch_ends[i] != NO_POSITION
                    request_keys.add_use(self.batch_named[i], self.batch_ends[i], is_positioned)
                self.fresh_rows[num_fresh] = self.batch_rows[i]
                self.fresh_hashes[num_fresh] = self.batch_hashes[i]
                num_fresh += 1
        if num_fresh and self.tracks_uses:
            self.on_request_use(request_keys, self.fresh_rows, self.fresh_hashes, num_fresh)
        elif num_fresh:
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
        self._begin(request_keys)
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
            self._read_positions(keys, request_keys)
            self.reserve_policy(n)
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
        self._begin(request_keys)
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
        self._begin(names)
        if self.tracks_uses:
            return self._reserve_leading(keys, names, request_keys, admitted)
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
        stored = new_list(num_new)
        evicted = new_list(needed)
        output = _new_output(stored, num_new, evicted, &ids)
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
        return output

    cdef object _reserve_leading(
        self, list keys, RequestKeys names, RequestKeys request_keys, const uint8_t* admitted
    ):
        """Give slots to as many leading absent keys as the policy takes; it is never refused."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i, num_new = 0, num_gated = 0, num_offered = 0, last_place = -1, num_taken, num_victims = 0
        cdef uint32_t mark
        cdef int32_t row
        cdef Named* named
        cdef int64_t* ids
        cdef list stored, evicted
        if names.uses == NULL:
            names.track_uses()
        self._resolve(keys, names, True)
        self._read_positions(keys, names)
        mark = self._next_mark()
        for i in range(n):
            row = self.batch_rows[i]
            named = &names.named[self.batch_named[i]]
            if named.mark == mark:
                continue
            named.mark = mark
            num_offered += 1
            last_place = self.batch_named[i]
            if row != 0:
                self.rows[row].mark = mark
            elif admitted == NULL or admitted[i]:
                self.batch_wanted[num_new] = i
                self.batch_places[num_new] = last_place
                num_new += 1
            else:
                num_gated += 1
        stored = new_list(num_new)
        evicted = new_list(max(num_new - self.num_free, 0))
        output = _new_output(stored, num_new, evicted, &ids)
        self.reserve_policy(n)
        if request_keys is not None:
            self._count(request_keys, n)
        else:
            for i in range(n):
                named = &names.named[self.batch_named[i]]
                if named.seen == 0:
                    names.used[names.num_seen] = <int32_t> self.batch_named[i]
                    names.num_seen += 1
                    named.seen = names.num_seen
                    names.add_use(self.batch_named[i], 0, False)
        num_taken = self.on_offer(
            names, self.batch_places, num_new, num_offered, last_place, self.fresh_rows, &num_victims)
        self.num_evictable -= num_victims
        self._release(self.fresh_rows, num_victims, evicted)
        if num_taken:
            self._admit_wanted(keys, names, num_taken, stored, ids)
        # Both were made at their longest, so that nothing had to be allocated meanwhile.
        Py_SET_SIZE(stored, num_taken)
        Py_SET_SIZE(evicted, num_victims)
        self.declined_blocks += num_new - num_taken
        self.gated_blocks += num_gated + num_new - num_taken
        self._after()
        if num_taken < num_new:
            output.store_spec.block_ids = output.store_spec.block_ids[:num_taken]
        return output

    cdef int _read_positions(self, list keys, RequestKeys request_keys) except -1:
        """Read where the keys of a call stand in the prompt, for a policy that tracks uses."""
        cdef Py_ssize_t i
        cdef uint64_t call = self.num_calls
        cdef PyObject* value
        if request_keys is None or request_keys.uses == NULL or request_keys.positions is None:
            return 0
        request_keys.read_positions()
        for i in range(len(keys)):
            value = PyDict_GetItemWithError(request_keys.positions, <object> PyList_GET_ITEM(keys, i))
            self.batch_ends[i] = NO_POSITION if value == NULL else number_of(value)
        if self.num_calls != call:
            raise BlockStateError("a key or value of the positions called the manager")
        return 0

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
        if self.tracks_uses:
            self.on_admit(names, self.batch_places, self.fresh_rows, n)
        else:
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
        cdef PyObject* key
        cdef list ready
        self._begin(request_keys)
        self._resolve(keys, request_keys, False)
        self._reserve_heaps(n)
        for i in range(n):
            row = self.batch_rows[i]
            if row != 0 and self.rows[row].ref_cnt < 0:
                self.rows[row].ref_cnt = 0
                self.fresh_rows[num_ready] = row
                self.batch_wanted[num_ready] = i
                num_ready += 1
        # By ascending stamps each joins the end of its list; of a request that was ordered, the head is there.
        if num_ready != 0 and self.rows[self.fresh_rows[0]].stamp > self.rows[self.fresh_rows[num_ready - 1]].stamp:
            for i in range(num_ready - 1, -1, -1):
                attach(self, self.fresh_rows[i])
        else:
            for i in range(num_ready):
                attach(self, self.fresh_rows[i])
        self.num_pending -= num_ready
        self.num_evictable += num_ready
        self._after()
        if num_ready == n:
            return keys
        ready = new_list(num_ready)
        for i in range(num_ready):
            key = PyList_GET_ITEM(keys, self.batch_wanted[i])
            Py_INCREF(<object> key)
            PyList_SET_ITEM(ready, i, key)
        return ready

    @cython.critical_section
    def abort(self, list keys not None, RequestKeys request_keys):
        """Drop blocks that were being written, freeing their slots in the order given, and return how many."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i, num_dropped = 0
        cdef int32_t row
        cdef list dropped
        self._begin(request_keys)
        self._resolve(keys, request_keys, False)
        self.reserve_policy(n)
        dropped = new_list(n)
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
    def reorder(self, RequestKeys request_keys not None, dict positions):
        """Order the keys that a running request used: the head of its prompt stays its youngest block.

        Parameters
        ----------
        request_keys : RequestKeys
            The request's.
        positions : dict or None
            Key to end token; None: the order of first use is the prompt's.

        Notes
        -----
        Keys that were used since the last time go behind the request's tail, where they follow it in the prompt; the
        whole request becomes the most recent when it has doubled, or a key belongs between two older ones. So the cost
        is linear in the request's keys, however many calls they come in.
        """
        cdef Py_ssize_t n, num_old, num_new
        cdef int64_t first, last
        self._begin(request_keys)
        n = request_keys.num_seen
        num_old = request_keys.num_ordered
        num_new = n - num_old
        if num_new == 0 or not self.keeps_queues:
            return
        self._reserve_batch(n)
        self._reserve_heaps(num_new)
        if num_old != 0 and n <= 2 * <Py_ssize_t> request_keys.num_in_full:
            self._sort_used(request_keys, num_old, n, positions)
            first = self.batch_positions[0].position
            last = self.batch_positions[num_new - 1].position
            self._rows_in_order(request_keys, num_new)
            if first >= request_keys.last_position:
                self.on_append(self.batch_rows, num_new, request_keys.next_stamp,
                               self._row_named(request_keys, request_keys.tail))
                request_keys.next_stamp -= num_new
                request_keys.last_position = last
                request_keys.tail = request_keys.used[self.batch_positions[num_new - 1].at]
                request_keys.num_ordered = <uint32_t> n
                self._after()
                return
            if last < request_keys.first_position:
                self.on_reorder(self.batch_rows, num_new)
                request_keys.first_position = first
                request_keys.num_ordered = <uint32_t> n
                self._after()
                return
        self._sort_used(request_keys, 0, n, positions)
        request_keys.first_position = self.batch_positions[0].position
        request_keys.last_position = self.batch_positions[n - 1].position
        request_keys.tail = request_keys.used[self.batch_positions[n - 1].at]
        request_keys.num_ordered = request_keys.num_in_full = <uint32_t> n
        # Room for the keys that will follow the tail before the request has doubled.
        self.stamp += n
        request_keys.next_stamp = self.stamp
        self._rows_in_order(request_keys, n)
        self.on_reorder(self.batch_rows, n)
        self._after()

    @cython.critical_section
    def end_request(self, RequestKeys request_keys not None, dict positions, bint use_positions=False):
        """Order all keys that the request used: as first used, or by `positions` (key to end token).

        With `use_positions` every key of `positions` is used, if it was not before. A hint that raises is applied once
        more, so that its time counts from the request's end.
        """
        cdef Py_ssize_t n
        cdef list keys = None
        if use_positions and positions:
            keys = _by_position(positions)
        self._begin(request_keys)
        if keys is not None:
            self._resolve(keys, request_keys, True)
            self._read_positions(keys, request_keys)
            self._reserve_retention(len(keys))
            self.reserve_policy(len(keys))
            self._count(request_keys, len(keys))
        n = request_keys.num_seen
        if keys is None or n != len(keys):
            self._reserve_batch(n)
            self._reserve_retention(n)
            self._sort_used(request_keys, 0, n, positions)
            self._rows_in_order(request_keys, n)
        self.on_reorder(self.batch_rows, n)
        if self.deadlines is not None and request_keys.priority > 0:
            # Blocks that came one by one now have one end, at which the tail falls back before the head.
            self._retain(self.batch_rows, n, request_keys)
        self._after()

    @cython.critical_section
    def take_hint(
        self, list keys, RequestKeys request_keys, dict positions, next_use, int32_t priority, int64_t ttl_ns
    ):
        """Take a hint of next use that comes after the uses: for `keys`, or if that is None, for a request's used keys.

        Parameters
        ----------
        keys : list of bytes or None
            In prefix order.
        request_keys : RequestKeys or None
            The request's, whose later uses carry the hint, too.
        positions : dict or None
            Key to end token, of the request.
        next_use : str
            ``"end"``, ``"soon"`` or ``"later"``.
        priority, ttl_ns : int
            What that stands for.
        """
        cdef Py_ssize_t i, n
        cdef int32_t code = _next_use_of(next_use)
        cdef int64_t newest_position
        self._begin(request_keys)
        if keys is not None:
            n = len(keys)
            self._resolve(keys, None, False)
        else:
            n = request_keys.num_seen
            newest_position = request_keys.newest_position
            self._reserve_batch(n)
            self._sort_used(request_keys, 0, n, positions)
            request_keys.newest_position = newest_position
            self._rows_in_order(request_keys, n)
            for i in range(n):
                self.batch_hashes[i] = request_keys.named[request_keys.used[self.batch_positions[i].at]].hash
        if priority != 0 and self.keeps_queues and self.deadlines is None:
            self.deadlines = Deadlines(self.num_rows)
        self._reserve_retention(n)
        self.reserve_policy(n)
        if keys is None:
            request_keys.next_use = code
            if self.keeps_queues and request_keys.priority <= 1:
                request_keys.priority = priority
                request_keys.ttl_ns = ttl_ns
        self.on_hint(self.batch_rows, self.batch_hashes, n, code)
        if self.deadlines is not None:
            self._restate(self.batch_rows, n, priority, ttl_ns)
        self._after()

    cdef int _sort_used(self, RequestKeys request_keys, Py_ssize_t start, Py_ssize_t stop, dict positions) except -1:
        """Write the used keys from `start` to `stop`, in the order of the prompt, to `batch_positions`.

        One without a position stays behind the key that it was used after.
        """
        cdef Py_ssize_t i
        cdef uint64_t call = self.num_calls
        cdef bint is_sorted = True
        cdef int64_t position = request_keys.newest_position if start != 0 else -1
        cdef PyObject* value
        for i in range(start, stop):
            if positions is not None:
                value = PyDict_GetItemWithError(positions, <object> request_keys.named[request_keys.used[i]].key)
                if value != NULL:
                    position = number_of(value)
                if self.num_calls != call:
                    raise BlockStateError("a key or value of the positions called the manager")
                is_sorted = is_sorted and (i == start or position >= self.batch_positions[i - start - 1].position)
            self.batch_positions[i - start].position = position
            self.batch_positions[i - start].at = i
        request_keys.newest_position = position
        if not is_sorted:
            qsort(self.batch_positions, stop - start, sizeof(Position), &_compare)
        return 0

    cdef void _rows_in_order(self, RequestKeys request_keys, Py_ssize_t n) noexcept nogil:
        """Write the rows of the first `n` of `batch_positions` to the batch."""
        cdef Py_ssize_t i
        for i in range(n):
            self.batch_rows[i] = self._row_named(request_keys, request_keys.used[self.batch_positions[i].at])

    cdef int32_t _row_named(self, RequestKeys request_keys, Py_ssize_t place) noexcept nogil:
        """Return the row of a key that the request has named, or 0."""
        cdef Named* named = &request_keys.named[place]
        if request_keys.version != self.version and (
                named.row == 0 or self.rows[named.row].generation != named.generation):
            named.row = self._find_one(named.key, named.hash)
            named.generation = self.rows[named.row].generation
        return named.row

    @cython.critical_section
    def reset(self):
        """Forget everything; block ids start again at 0."""
        cdef int32_t row, lane
        cdef Py_ssize_t num_dropped = 0
        cdef list blocks = None
        self.num_calls += 1
        if self.caller_blocks != NULL:
            # Let go at the end: a subclass of BlockStatus may have a finalizer.
            blocks = new_list(self.num_resident)
            for row in range(self.first, self.first + self.num_fresh):
                if self.rows[row].key != NULL:
                    PyList_SET_ITEM(blocks, num_dropped, self.caller_blocks[row].status)
                    self.caller_blocks[row].status = NULL
                    num_dropped += 1
        # Rows are overwritten as they are used again; their keys are dropped a few in each later call.
        self.num_stale = max(self.num_stale, self.num_fresh)
        if self.caller_blocks != NULL:
            self.num_fresh = 0
            self._drop_stale(0)
        if self.withheld is not None:
            for block_id in self.withheld:
                self.rows[self.first + <int32_t> block_id].where = FREE
            self.withheld = None
        for lane in range(self.first):
            self.rows[lane].prev = self.rows[lane].next = lane
            self.lanes[lane].num_listed = self.lanes[lane].num_nodes = 0
            self.lanes[lane].cursor_mark = 0
        clear(self.buckets, (<size_t> self.num_buckets) * sizeof(Bucket))
        memset(self.num_in_list, 0, sizeof(self.num_in_list))
        self.num_fresh = self.free_head = 0
        self.num_free = self.num_rows - self.first
        self.num_resident = self.num_evictable = self.num_referenced = self.num_pending = 0
        self.version += 1
        self._start_epoch()
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


cdef int32_t _next_use_of(next_use) except -1:
    return 0 if next_use is None else 1 + NEXT_USES.index(next_use)


cdef int _compare(const void* a, const void* b) noexcept nogil:
    cdef const Position* one = <const Position*> a
    cdef const Position* other = <const Position*> b
    if one.position != other.position:
        return -1 if one.position < other.position else 1
    return -1 if one.at < other.at else 1


cdef list _by_position(dict positions):
    # The dict's own order, which mostly is the prompt's, unless a position is smaller than the one before it.
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* value
    cdef int64_t position, last = INT64_MIN
    while PyDict_Next(positions, &at, &key, &value):
        position = number_of(value)
        if position < last:
            return sorted(positions, key=positions.__getitem__)
        last = position
    return list(positions)


cdef set _slots(block_ids, Py_ssize_t num_slots):
    cdef set slots = set()
    for block_id in block_ids:
        if type(block_id) is not int or not 0 <= block_id < num_slots:
            raise ValueError(f"a block id must be an int in 0..{num_slots - 1}, got {block_id!r}")
        slots.add(block_id)
    return slots


cdef object _new_spec(Py_ssize_t n, int64_t** ids):
    # Not through __init__, nor through a memoryview: the array is new, of the right kind, and kept by the spec.
    cdef Py_buffer buffer
    cdef bint was_on = pause_collector()
    try:
        array = _empty(n, _int64)
        PyObject_GetBuffer(array, &buffer, PyBUF_WRITABLE)
        ids[0] = <int64_t*> buffer.buf
        PyBuffer_Release(&buffer)
        spec = CPULoadStoreSpec.__new__(CPULoadStoreSpec)
        spec.block_ids = array
    finally:
        resume_collector(was_on)
    return spec


cdef object _new_output(list stored, Py_ssize_t n, list evicted, int64_t** ids):
    spec = _new_spec(n, ids)
    cdef bint was_on = pause_collector()
    try:
        output = PrepareStoreOutput.__new__(PrepareStoreOutput)
        output.keys_to_store = stored
        output.store_spec = spec
        output.evicted_keys = evicted
    finally:
        resume_collector(was_on)
    return output
