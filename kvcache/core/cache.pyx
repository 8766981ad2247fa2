"""BlockCache: the batch operations of a manager's pool, over a table of blocks and a policy that selects victims.

Compiled because each operation loops over a request's keys in the scheduler's thread. The table serves as the lock.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.math cimport llrint
from libc.stdint cimport INT64_MIN, int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memmove, memset

from kvcache.core.event_log cimport EventLog
from kvcache.core.eviction_queue cimport LISTED, Row, link_before
from kvcache.core.index cimport home_of, prefetch
from kvcache.core.memory cimport new_list, new_object, pause_collector, resume_collector
from kvcache.core.policy cimport KV_DEBUG, ReplacementPolicy
from kvcache.core.request_keys cimport Named, RequestKeys, Span, number_of
from kvcache.core.table cimport (
    PINNED, Batch, BlockTable, PyByteArray_AS_STRING, PyList_GET_ITEM, PyList_SET_ITEM, attach, detach,
)

import numpy as np

from kvcache.block import BlockStateError
from kvcache.request import NEXT_USES as _NEXT_USES
from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput

cdef extern from "Python.h":
    bint PyDict_Next(dict positions, Py_ssize_t* at, PyObject** key, PyObject** value) noexcept
    void Py_SET_SIZE(object keys, Py_ssize_t n) noexcept

cdef object _empty = np.empty
cdef object _int64 = np.dtype(np.int64)

cdef enum:
    ABSENT = 0
    PENDING = 1
    READY = 2

cdef enum:
    END = 1                 # a request's hint of next use: its blocks will not be used

cdef enum:
    RUN_CHUNK = 16          # keys per look-up batch when the walk ends at the first miss
    STALE_PER_CALL = 8      # keys from before a reset that one call releases


cdef enum:
    MOST_GROUPS = 64            # keys of one position, which may leave together

# Distinct keys of a store: all, absent ones, those that the gate keeps out, resident ones without a reference, and
# those that are offered again; and the place of the last one.
cdef struct Offer:
    Py_ssize_t num_offered
    Py_ssize_t num_new
    Py_ssize_t num_gated
    Py_ssize_t num_protected
    Py_ssize_t num_again
    Py_ssize_t last_place


@cython.final
cdef class BlockCache:
    """BlockCache(policy)

    The cache of a manager's pool under a compiled policy. `kvcache.policies.base.BlockCacheOps` has the contract.

    Raises
    ------
    BlockStateError
        The policy is already in use.
    """

    cdef ReplacementPolicy policy
    cdef BlockTable table
    cdef Batch batch
    cdef EventLog events                        # or None
    cdef str medium
    cdef public Py_ssize_t lookups, looked_up_blocks, hit_blocks
    cdef public Py_ssize_t gated_blocks
    cdef readonly Py_ssize_t declined_blocks    # gated blocks that the policy declined to store

    def __cinit__(self, ReplacementPolicy policy not None):
        cdef BlockTable table = policy.table
        if table.caller_blocks == NULL or table.num_resident:
            raise BlockStateError("the policy is in use already; a manager needs one of its own")
        self.policy = policy
        self.table = table
        self.batch = Batch()
        self.batch.reserve(1)
        PyMem_Free(table.caller_blocks)
        table.caller_blocks = NULL

    def current_policy(self):
        return self.policy

    def keep_events(self, EventLog events not None, str medium not None):
        self.medium = medium
        self.events = events
        events.lock = self.table

    @property
    def num_free(self):
        return self.table.num_free

    @property
    def num_referenced(self):
        return self.table.num_referenced

    @property
    def num_pending(self):
        return self.table.num_pending

    cdef int _begin(self, RequestKeys request_keys) except -1:
        """Begin an operation. Forget keys that the request named before a reset or in another cache."""
        cdef BlockTable table = self.table
        table.num_calls += 1
        if table.num_stale > table.num_fresh:
            table.drop_stale(max(table.num_fresh, table.num_stale - STALE_PER_CALL))
        if request_keys is not None and request_keys.epoch != table.epoch:
            request_keys.forget()
            request_keys.epoch = table.epoch
        return 0

    cdef int _resolve(self, list keys, RequestKeys request_keys, bint add) except -1:
        if request_keys is None:
            return self.table.find(keys, 0, len(keys), self.batch)
        return request_keys.resolve(self.table, keys, self.batch, add)

    cdef void _announce(self, list keys, bint removed) noexcept:
        """Append an event of `keys`, if there are any, after everything has changed."""
        if self.events is not None:
            self.events.append(keys, self.medium, removed)

    cdef int _end(self) except -1:
        if KV_DEBUG and self.policy.is_check_due():
            self.check()
        return 0

    def check(self):
        """Check every row, queue and slot. Raise BlockStateError naming the broken invariant. O(capacity)."""
        cdef bint was_on = pause_collector()
        try:
            with cython.critical_section(self.table):
                self.policy.check_all()
        finally:
            resume_collector(was_on)

    # ---- requests ---------------------------------------------------------------------------------------------

    def open_request(self, next_use=None, Py_ssize_t num_keys=0):
        """Open a request: return its RequestKeys, with its hint of next use and room for `num_keys` keys."""
        cdef RequestKeys request_keys = RequestKeys.__new__(RequestKeys)
        request_keys.next_use = _next_use_of(next_use)
        with cython.critical_section(self.table):
            self._begin(request_keys)
            if num_keys > 0:
                request_keys.reserve(num_keys)
            if self.policy.tracks_uses:
                request_keys.track_uses()
        return request_keys

    def advance(self, double elapsed_s):
        """Advance the policy's clock."""
        if not 0 <= elapsed_s < 4e9:
            raise ValueError(f"the clock must give finite seconds, {elapsed_s!r} have passed")
        # Round, so that whole milliseconds stay whole milliseconds. After 52 days, adding 0.5 would round up whole ns.
        with cython.critical_section(self.table):
            self.policy.now_ns = llrint(elapsed_s * 1e9)

    def needs_time(self, RequestKeys request_keys not None, dict positions):
        with cython.critical_section(self.table):
            self._begin(request_keys)
            request_keys.positions = positions
            return request_keys.num_seen == 0

    def has_used(self, RequestKeys request_keys not None):
        with cython.critical_section(self.table):
            self._begin(request_keys)
            return request_keys.num_seen != 0

    def reorder(self, RequestKeys request_keys not None, dict positions):
        """Order the keys that a running request used, so that the head of its prompt stays its youngest block.

        New keys that follow the request's tail are placed behind it. The whole request is ordered again only if it has
        doubled or if a key belongs between two older keys, so that the total cost is linear in the request's keys.
        """
        with cython.critical_section(self.table):
            self._begin(request_keys)
            if self.table.keeps_queues and request_keys.num_seen != request_keys.num_ordered:
                self._reorder(request_keys, positions)
                self._end()

    cdef int _reorder(self, RequestKeys request_keys, dict positions) except -1:
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        cdef Py_ssize_t n = request_keys.num_seen, num_old = request_keys.num_ordered
        cdef Span span
        table.reserve_heaps(n - num_old)
        if num_old != 0 and n <= 2 * <Py_ssize_t> request_keys.num_in_full:
            request_keys.rows_in_prompt(table, num_old, positions, batch, &span)
            if span.first >= request_keys.last_position:
                self.policy.on_append(batch.rows, n - num_old, request_keys.next_stamp,
                                      request_keys.row_now(table, request_keys.tail))
                request_keys.next_stamp -= n - num_old
                request_keys.last_position = span.last
                request_keys.tail = span.tail
                request_keys.num_ordered = <uint32_t> n
                return 0
            if span.last < request_keys.first_position:
                self.policy.on_reorder(batch.rows, n - num_old)
                request_keys.first_position = span.first
                request_keys.num_ordered = <uint32_t> n
                return 0
        request_keys.rows_in_prompt(table, 0, positions, batch, &span)
        request_keys.first_position = span.first
        request_keys.last_position = span.last
        request_keys.tail = span.tail
        request_keys.num_ordered = request_keys.num_in_full = <uint32_t> n
        # Reserve stamps for the keys that follow the tail before the request doubles.
        table.stamp += n
        request_keys.next_stamp = table.stamp
        self.policy.on_reorder(batch.rows, n)
        return 0

    def end_request(self, RequestKeys request_keys not None, dict positions, bint use_positions=False):
        """Order all keys that the request used. After the hint "end", evict blocks that only it has used first."""
        cdef Py_ssize_t n
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        cdef list keys = None
        cdef Span span
        with cython.critical_section(table):
            self._begin(request_keys)
            if use_positions and positions:
                # In most requests these are the keys that it used already: skip the look-up.
                if request_keys.is_whole_prompt(positions):
                    request_keys.read_new_positions(table)
                    n = request_keys.num_seen
                else:
                    keys = _by_position(positions)
                    self._begin(request_keys)
                    request_keys.resolve(table, keys, batch, True)
                    request_keys.read_positions(table, keys, batch)
                    n = len(keys)
                self.policy.reserve_policy(n)
                if keys is not None:
                    self.policy.count_uses(request_keys, batch, n)
            n = request_keys.num_seen if table.keeps_queues else 0
            if n != 0 and (keys is None or n != len(keys)):
                request_keys.rows_in_prompt(table, 0, positions, batch, &span)
            self.policy.on_reorder(batch.rows, n)
            if request_keys.next_use == END:
                self._demote_own(request_keys, n)
            request_keys.has_ended = True
            self.policy.on_request_end(request_keys)
            self._end()

    cdef void _demote_own(self, RequestKeys request_keys, Py_ssize_t n) noexcept nogil:
        """Demote those of the batch's blocks that the request has stored and no other one has used."""
        cdef Py_ssize_t i
        cdef int32_t* rows = self.batch.rows
        for i in range(n):
            if not request_keys.named[self.batch.places[i]].is_own or self.table.rows[rows[i]].is_shared:
                rows[i] = 0
        self.policy.on_demote(rows, n)

    def take_hint(self, list keys, RequestKeys request_keys, dict positions, next_use):
        """Apply a hint of next use that arrives after the uses."""
        cdef Py_ssize_t n
        cdef int32_t code = _next_use_of(next_use)
        cdef int64_t newest_position
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        cdef Span span
        with cython.critical_section(table):
            self._begin(request_keys)
            if keys is not None:
                n = len(keys)
                table.find(keys, 0, n, batch)
            else:
                n = request_keys.num_seen
                # A hint does not change the order: the next uses still follow the position that was newest before.
                newest_position = request_keys.newest_position
                request_keys.rows_in_prompt(table, 0, positions, batch, &span)
                request_keys.newest_position = newest_position
            self.policy.reserve_policy(n)
            self.policy.on_hint(batch.rows, batch.hashes, n, code)
            if keys is None:
                request_keys.next_use = code
            if code == END:
                if keys is not None:
                    self.policy.on_demote(batch.rows, n)
                elif request_keys.has_ended:
                    self._demote_own(request_keys, n)
            self._end()

    # ---- look-ups ---------------------------------------------------------------------------------------------

    cdef int32_t _state_of(self, int32_t row) noexcept nogil:
        return ABSENT if row == 0 else READY if self.table.rows[row].ref_cnt >= 0 else PENDING

    def lookup(self, list keys, RequestKeys request_keys):
        cdef Py_ssize_t num_ready = self._match_prefix(keys, request_keys, 0)
        self.lookups += 1
        self.looked_up_blocks += len(keys)
        self.hit_blocks += num_ready
        return num_ready

    def match_prefix(self, list keys not None, RequestKeys request_keys, Py_ssize_t start=0):
        return self._match_prefix(keys, request_keys, start)

    cdef Py_ssize_t _match_prefix(self, list keys, RequestKeys request_keys, Py_ssize_t start) except -1:
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i = start, stop = start
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        if not 0 <= start <= n:
            raise ValueError(f"start must be in 0..{n}, got {start}")
        with cython.critical_section(table):
            self._begin(request_keys)
            if start == 0 and request_keys is not None and request_keys.num_named != 0 and n > 1:
                request_keys.resolve(table, keys, batch, False)
                while i < n and self._state_of(batch.rows[i]) == READY:
                    i += 1
                return i
            batch.reserve(n)
            while i == stop and stop < n:
                stop = min(stop + RUN_CHUNK, n)
                table.find(keys, i, stop, batch)
                while i < stop and self._state_of(batch.rows[i]) == READY:
                    i += 1
            if start == 0 and request_keys is not None and n > 1:
                # Keep the rows found here, so that the request's later calls skip these look-ups.
                request_keys.reserve(n)
                request_keys.meet(table, keys, 0, stop, batch, True)
                request_keys.version = table.version
            return i

    def status_of(self, key):
        cdef BlockTable table = self.table
        cdef int32_t row, state
        with cython.critical_section(table):
            self._begin(None)
            row = table.row_of(key)
            if row != 0 and row + 1 < table.num_rows:
                # Keys of a prompt are mostly stored together, in consecutive rows: prefetch the next one.
                prefetch(&table.buckets[home_of(<uint32_t> table.rows[row + 1].hash, table.num_buckets)])
                prefetch(table.rows[row + 1].key)
                prefetch(&table.rows[row + 2])
            state = self._state_of(row)
            self.lookups += 1
            self.looked_up_blocks += 1
            self.hit_blocks += state == READY
            return state

    def status(self, list keys not None):
        cdef Py_ssize_t i, n = len(keys)
        cdef bytes states = PyBytes_FromStringAndSize(NULL, n)
        cdef char* state = PyBytes_AS_STRING(states)
        with cython.critical_section(self.table):
            self._begin(None)
            self._resolve(keys, None, False)
            for i in range(n):
                state[i] = <char> self._state_of(self.batch.rows[i])
        return states

    def locate(self, list keys not None):
        cdef Py_ssize_t i, n = len(keys)
        cdef int32_t row
        cdef list ids
        cdef object block_id
        with cython.critical_section(self.table):
            self._begin(None)
            self._resolve(keys, None, False)
            ids = new_list(n)
            for i in range(n):
                row = self.batch.rows[i]
                block_id = row - self.table.first if self._state_of(row) == READY else -1
                Py_INCREF(block_id)
                PyList_SET_ITEM(ids, i, <PyObject*> block_id)
        return ids

    # ---- uses and references ----------------------------------------------------------------------------------

    def touch(self, list keys not None, RequestKeys request_keys):
        cdef Py_ssize_t n = len(keys)
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        with cython.critical_section(table):
            self._begin(request_keys)
            if request_keys is None:
                self.policy.use_keys(keys, batch)
            else:
                request_keys.resolve(table, keys, batch, True)
                request_keys.read_positions(table, keys, batch)
                self.policy.reserve_policy(n)
                if self.policy.count_uses(request_keys, batch, n) < n:
                    self.policy.on_reorder(batch.rows, n)
            self._end()

    def pin(self, list keys, RequestKeys request_keys):
        cdef Py_ssize_t i, n = len(keys)
        cdef int32_t row
        cdef int64_t* ids
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        with cython.critical_section(table):
            self._begin(request_keys)
            self._resolve(keys, request_keys, True)
            for i in range(n):
                row = batch.rows[i]
                if row == 0:
                    raise KeyError(f"block is not in the cache: {keys[i]!r}")
                if table.rows[row].ref_cnt < 0:
                    raise BlockStateError(f"block is not ready: {keys[i]!r}")
            # All that may raise or allocate comes before the first reference: a failed call has changed nothing.
            spec = _new_spec(n, &ids)
            if request_keys is not None:
                request_keys.read_positions(table, keys, batch)
                self.policy.reserve_policy(n)
                self.policy.count_uses(request_keys, batch, n)
            for i in range(n):
                row = batch.rows[i]
                if table.rows[row].ref_cnt == 0:
                    detach(table, row)
                    table.num_referenced += 1
                    table.num_evictable -= 1
                table.rows[row].ref_cnt += 1
                ids[i] = row - table.first
            self._end()
        return spec

    def unpin(self, list keys, RequestKeys request_keys):
        cdef Py_ssize_t i, j, n = len(keys)
        cdef int32_t row
        cdef BlockTable table = self.table
        cdef int32_t* rows
        with cython.critical_section(table):
            self._begin(request_keys)
            self._resolve(keys, request_keys, False)
            rows = self.batch.rows
            table.reserve_heaps(n)
            for i in range(n):
                row = rows[i]
                if row != 0 and table.rows[row].ref_cnt > 0:
                    table.rows[row].ref_cnt -= 1
                    continue
                for j in range(i):
                    table.rows[rows[j]].ref_cnt += 1
                if row == 0:
                    raise KeyError(f"block is not in the cache: {keys[i]!r}")
                raise BlockStateError(f"block has fewer references than are given back: {keys[i]!r}")
            # A request's head is its most recent block, so stamps ascend from last to first.
            for i in range(n - 1, -1, -1):
                row = rows[i]
                if table.rows[row].ref_cnt == 0 and table.rows[row].where == PINNED:
                    attach(table, row)
                    table.num_referenced -= 1
                    table.num_evictable += 1
            self._end()

    # ---- stores -----------------------------------------------------------------------------------------------

    def reserve(self, list keys, RequestKeys request_keys, admit=None):
        """Assign a slot to each absent key, and evict exactly as many blocks as needed.

        A policy that tracks uses may decline keys: it takes as many leading keys as it likes, and never refuses.
        """
        cdef RequestKeys names = RequestKeys.__new__(RequestKeys) if request_keys is None else request_keys
        cdef Py_ssize_t num_new, needed, num_taken, num_victims, most_victims, n = len(keys)
        cdef Offer offer
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        cdef bint may_decline = self.policy.tracks_uses
        cdef int64_t* ids
        cdef list stored, evicted
        cdef const uint8_t* admitted = NULL
        if admit is not None:
            if type(admit) is not bytearray or len(admit) != n:
                raise ValueError(f"admit must be a bytearray with a flag per key ({n}), got {admit!r}")
            admitted = <const uint8_t*> PyByteArray_AS_STRING(admit)
        with cython.critical_section(table):
            self._begin(names)
            if may_decline and names.uses == NULL:
                names.track_uses()
            if self.policy.again_list >= 0:
                batch.reserve(n + table.num_in_list[self.policy.again_list] + MOST_GROUPS)
            names.resolve(table, keys, batch, True)
            names.read_positions(table, keys, batch)
            offer = self._pick(names, n, admitted)
            num_new = offer.num_new
            needed = most_victims = max(num_new - table.num_free, 0)
            if needed > table.num_evictable - offer.num_protected and not may_decline:
                return None
            if self.policy.again_list >= 0:
                self.policy.num_again = offer.num_again
                most_victims = num_new + self.policy.num_more_victims(names, num_new)
            stored = new_list(num_new)
            evicted = new_list(most_victims)
            output = _new_output(stored, num_new, evicted, &ids)
            table.reserve_aside(offer.num_protected)
            self.policy.reserve_policy(n)
            if request_keys is not None:
                self.policy.count_uses(names, batch, n)
            elif may_decline:
                names.add_uses(batch, n)
            num_taken, num_victims = num_new, needed
            if may_decline:
                num_taken = self.policy.on_offer(
                    names, batch.picked_places, num_new, offer.num_offered, offer.last_place, batch.victims,
                    &num_victims)
                _keep_taken(self.policy, names, batch, num_new)
            elif needed:
                self.policy.choose_victims(needed, batch.victims)
            self._release(batch.victims, num_victims, evicted)
            if num_taken:
                self._admit(keys, names, num_taken, stored, ids)
                self._insert(names, num_taken)
            if request_keys is None and may_decline:
                self.policy.on_request_end(names)
            # Both lists were allocated at their maximum length, so that nothing was allocated in between.
            Py_SET_SIZE(stored, num_taken)
            Py_SET_SIZE(evicted, num_victims)
            self.declined_blocks += num_new - num_taken
            self.gated_blocks += offer.num_gated + num_new - num_taken
            self._announce(evicted, True)
            self._end()
        if num_taken < num_new:
            output.store_spec.block_ids = output.store_spec.block_ids[:num_taken]
        return output

    cdef Offer _pick(self, RequestKeys names, Py_ssize_t n, const uint8_t* admitted) noexcept:
        """Mark the keys of the batch, and pick the absent ones that are admitted, and then those of `again_list`."""
        cdef Batch batch = self.batch
        cdef BlockTable table = self.table
        cdef uint32_t mark = table.next_mark()
        cdef Offer offer
        cdef Named* named
        cdef Py_ssize_t i
        cdef int32_t row
        memset(&offer, 0, sizeof(offer))
        offer.last_place = -1
        for i in range(n):
            named = &names.named[batch.places[i]]
            if named.mark == mark:
                continue
            named.mark = mark
            offer.num_offered += 1
            offer.last_place = batch.places[i]
            row = batch.rows[i]
            if row != 0:
                table.rows[row].mark = mark
                offer.num_protected += table.rows[row].ref_cnt == 0
                if table.rows[row].list_idx == self.policy.again_list:
                    offer.num_again += 1
                    batch.picked_places[n - offer.num_again] = offer.last_place
            elif admitted == NULL or admitted[i]:
                batch.picked[offer.num_new] = i
                batch.picked_places[offer.num_new] = offer.last_place
                offer.num_new += 1
            else:
                offer.num_gated += 1
        _offer_again(batch.picked_places, offer.num_new, offer.num_again, n)
        return offer

    cdef void _insert(self, RequestKeys names, Py_ssize_t num_taken) noexcept:
        """Pass the admitted rows to the policy."""
        cdef Batch batch = self.batch
        if self.policy.tracks_uses:
            self.policy.on_admit(names, batch.picked_places, batch.picked_rows, num_taken)
        else:
            self.policy.on_insert(batch.picked_rows, num_taken)

    cdef void _release(self, const int32_t* victims, Py_ssize_t n, list evicted) noexcept:
        """Free the rows of evicted blocks, and append their keys to `evicted`."""
        self.table.release(victims, n, evicted)
        self.table.num_evictable -= n

    cdef void _admit(self, list keys, RequestKeys names, Py_ssize_t n, list stored, int64_t* ids) noexcept:
        """Assign rows to the first `n` picked keys of the batch, in the order offered."""
        cdef Py_ssize_t i, at
        cdef int32_t row
        cdef PyObject* key
        cdef Named* named
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        table.admit(keys, batch.hashes, batch.picked, n, batch.picked_rows)
        for i in range(n):
            at = batch.picked[i]
            row = batch.picked_rows[i]
            named = &names.named[batch.places[at]]
            # The request finds its new block without a look-up while the row's generation stays the same.
            named.row = row
            named.generation = table.rows[row].generation
            named.is_own = True
            key = PyList_GET_ITEM(keys, at)
            Py_INCREF(<object> key)
            PyList_SET_ITEM(stored, i, key)
            ids[i] = row - table.first
            batch.rows[at] = row
        table.num_pending += n
        table.version += 1

    def commit(self, list keys, RequestKeys request_keys):
        cdef Py_ssize_t i, num_ready = 0, n = len(keys)
        cdef int32_t row
        cdef PyObject* key
        cdef list ready = keys
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        cdef Row* rows = table.rows
        with cython.critical_section(table):
            self._begin(request_keys)
            self._resolve(keys, request_keys, False)
            table.reserve_heaps(n)
            for i in range(n):
                row = batch.rows[i]
                if row != 0 and rows[row].ref_cnt < 0:
                    rows[row].ref_cnt = 0
                    batch.picked_rows[num_ready] = row
                    batch.picked[num_ready] = i
                    num_ready += 1
            # If the request was ordered, its head is at the list's most-recent end. Otherwise, the last key is there.
            if num_ready != 0 and rows[batch.picked_rows[0]].stamp > rows[batch.picked_rows[num_ready - 1]].stamp:
                _attach_behind(table, batch.picked_rows, num_ready, self._row_before(request_keys, batch.picked[0]))
            else:
                for i in range(num_ready):
                    attach(table, batch.picked_rows[i])
            table.num_pending -= num_ready
            table.num_evictable += num_ready
            if num_ready != n:
                ready = new_list(num_ready)
                for i in range(num_ready):
                    key = PyList_GET_ITEM(keys, batch.picked[i])
                    Py_INCREF(<object> key)
                    PyList_SET_ITEM(ready, i, key)
            self._announce(ready, False)
            self._end()
            return ready

    cdef int32_t _row_before(self, RequestKeys request_keys, Py_ssize_t i) noexcept nogil:
        """Return the row of the key that the request named before key `i` of the batch, or 0."""
        cdef Py_ssize_t place = 0 if request_keys is None else self.batch.places[i]
        return request_keys.row_now(self.table, place - 1) if place > 0 else 0

    def abort(self, list keys, RequestKeys request_keys):
        """Drop blocks that were being written, and free their slots in the order given. Return the number of blocks."""
        cdef Py_ssize_t i, num_dropped = 0, n = len(keys)
        cdef int32_t row
        cdef list dropped
        cdef BlockTable table = self.table
        cdef Batch batch = self.batch
        with cython.critical_section(table):
            self._begin(request_keys)
            self._resolve(keys, request_keys, False)
            self.policy.reserve_policy(n)
            dropped = new_list(n)
            for i in range(n):
                row = batch.rows[i]
                if row != 0 and table.rows[row].ref_cnt < 0:
                    # Clear the state, in case the call names the key twice.
                    table.rows[row].ref_cnt = 0
                    table.num_in_list[table.rows[row].list_idx] -= 1
                    batch.picked_rows[num_dropped] = row
                    num_dropped += 1
            self.policy.on_failure(request_keys, batch.picked_rows, num_dropped)
            table.release(batch.picked_rows, num_dropped, dropped)
            table.num_pending -= num_dropped
            self._end()
        return num_dropped

    # ---- withheld slots, reset ----------------------------------------------------------------------------------

    def withhold(self, block_ids):
        """Assign these free slots to no key until `give_back`."""
        cdef list slots = _slots(block_ids, self.table.num_rows - self.table.first)
        with cython.critical_section(self.table):
            self._begin(None)
            self.table.withhold(set(slots))
            self._end()

    def give_back(self, block_ids):
        cdef list slots = _slots(block_ids, self.table.num_rows - self.table.first)
        with cython.critical_section(self.table):
            self._begin(None)
            self.table.give_back(slots)
            self._end()

    def reset(self):
        with cython.critical_section(self.table):
            self.table.num_calls += 1
            self.table.reset()
            self.policy.on_reset()
            if self.events is not None:
                self.events.forget()
            self._end()


cdef void _attach_behind(BlockTable table, const int32_t* rows, Py_ssize_t n, int32_t younger) noexcept nogil:
    """Return rows, the youngest first, to their queues, each behind the row before it if its stamp belongs there.

    `younger` is the row that the first one may be linked behind, or 0.
    """
    cdef Py_ssize_t i
    cdef int32_t row
    cdef int32_t queue
    cdef Row* row_of = table.rows
    for i in range(n):
        row = rows[i]
        queue = row_of[row].list_idx
        # The stamp of a queue's head is 0.
        if (younger != 0 and row_of[younger].where == LISTED and row_of[younger].list_idx == queue
                and row_of[row_of[younger].prev].stamp < row_of[row].stamp < row_of[younger].stamp
                and table.keeps_queues):
            link_before(row_of, row, younger)
            table.queues[queue].num_listed += 1
        else:
            attach(table, row)
        younger = row


cdef void _offer_again(Py_ssize_t* places, Py_ssize_t num_new, Py_ssize_t num_again, Py_ssize_t n) noexcept nogil:
    """Move the last `num_again` of `n` places behind the first `num_new`, in reverse order."""
    cdef Py_ssize_t i
    memmove(places + num_new, places + n - num_again, num_again * sizeof(Py_ssize_t))
    for i in range(num_new, num_new + num_again // 2):
        places[i], places[2 * num_new + num_again - 1 - i] = places[2 * num_new + num_again - 1 - i], places[i]


cdef void _keep_taken(ReplacementPolicy policy, RequestKeys names, Batch batch, Py_ssize_t n) noexcept nogil:
    """Keep those of the picked keys that the policy takes, in the order offered, if it takes others than the first."""
    cdef Py_ssize_t i, num_taken = 0
    if not policy.takes_any:
        return
    for i in range(n):
        if names.uses[batch.picked_places[i]].is_taken:
            names.uses[batch.picked_places[i]].is_taken = False
            batch.picked[num_taken] = batch.picked[i]
            batch.picked_places[num_taken] = batch.picked_places[i]
            num_taken += 1


cdef int32_t _next_use_of(next_use) except -1:
    return 0 if next_use is None else 1 + _NEXT_USES.index(next_use)


cdef list _by_position(dict positions):
    # Use the dict's own order, which is mostly that of the prompt, unless a position is smaller than the one before it.
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


cdef list _slots(block_ids, Py_ssize_t num_slots):
    # Each slot once, in the order given.
    cdef dict slots = {}
    for block_id in block_ids:
        if type(block_id) is not int or not 0 <= block_id < num_slots:
            raise ValueError(f"a block id must be an int in 0..{num_slots - 1}, got {block_id!r}")
        slots[block_id] = None
    return list(slots)


cdef object _new_spec(Py_ssize_t n, int64_t** ids):
    # Skip __init__ and memoryview: the array is new, has the right dtype, and is kept alive by the spec.
    cdef Py_buffer buffer
    cdef bint was_on = pause_collector()
    try:
        array = _empty(n, _int64)
        PyObject_GetBuffer(array, &buffer, PyBUF_WRITABLE)
        ids[0] = <int64_t*> buffer.buf
        PyBuffer_Release(&buffer)
        spec = new_object(CPULoadStoreSpec)
        spec.block_ids = array
    finally:
        resume_collector(was_on)
    return spec


cdef object _new_output(list stored, Py_ssize_t n, list evicted, int64_t** ids):
    spec = _new_spec(n, ids)
    cdef bint was_on = pause_collector()
    try:
        output = new_object(PrepareStoreOutput)
        output.keys_to_store = stored
        output.store_spec = spec
        output.evicted_keys = evicted
    finally:
        resume_collector(was_on)
    return output
