"""RequestKeys: the keys that one request has named, the rows they were found in, and their order in the prompt.

Compiled because every call of a request walks over it. Later calls of the request skip hashing its keys.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, qsort
from libc.string cimport memcpy, memset

from kvcache.core.index cimport (
    Bucket, Probe, buckets_for, hash_of, index_add, index_first, index_insert, index_next, prefetch, same_bytes, zeroed,
)
from kvcache.core.table cimport NO_POSITION, Batch, BlockTable, Position, PyBytes_CheckExact, PyList_GET_ITEM

from kvcache.block import BlockStateError

cdef extern from "Python.h":
    PyObject* PyDict_GetItemWithError(dict positions, object key) except? NULL
    bint PyDict_Next(object positions, Py_ssize_t* at, PyObject** key, PyObject** value) noexcept
    bint PyLong_CheckExact(PyObject* value) noexcept


cdef enum:
    FEW_KEYS = 8            # up to this many keys are searched linearly, without an index
    AHEAD = 12              # rows fetched ahead of a loop over them


@cython.final
@cython.no_gc
cdef class RequestKeys:
    """RequestKeys()

    The keys that one request has named: each once, with its row and whether its use was counted.
    """

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.num_named):
            Py_XDECREF(self.named[i].key)
        PyMem_Free(self.named)
        PyMem_Free(self.uses)
        free(self.buckets)

    cdef void forget(self) noexcept:
        """Clear all keys and state, after a reset of the table."""
        cdef Py_ssize_t i
        for i in range(self.num_named):
            Py_XDECREF(self.named[i].key)
        self.num_named = 0
        self.num_seen = self.num_ordered = 0
        self.head = self.finger = 0
        self.num_positions = self.positions_at = self.prompt_at = 0
        self.num_in_order = 0
        self.found_position = 0
        self.is_out_of_order = False
        self.order_at = self.num_passed = 0
        memset(self.policy_state, 0, sizeof(self.policy_state))
        self.version = 0
        if self.buckets != NULL:
            memset(self.buckets, 0, (<size_t> self.num_buckets) * sizeof(Bucket))

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room for `n` more keys, so that `meet` cannot fail."""
        cdef Py_ssize_t size, i
        cdef char* block
        cdef Bucket* buckets = NULL
        if self.num_named + n <= self.size:
            return 0
        size = max(self.num_named + n, 2 * self.size, FEW_KEYS)
        # Allocate one block: the keys, then the order of their first uses.
        block = <char*> PyMem_Malloc(size * (sizeof(Named) + sizeof(int32_t)))
        if size > FEW_KEYS:
            buckets = <Bucket*> zeroed(buckets_for(size) * sizeof(Bucket))
        if block == NULL or (size > FEW_KEYS and buckets == NULL):
            PyMem_Free(block)
            free(buckets)
            raise MemoryError(f"no memory for a request of {size} keys")
        if self.num_named:
            memcpy(block, self.named, self.num_named * sizeof(Named))
            memcpy(block + size * sizeof(Named), self.used, self.num_seen * sizeof(int32_t))
        PyMem_Free(self.named)
        self.named = <Named*> block
        self.used = <int32_t*> (block + size * sizeof(Named))
        self.size = size
        if buckets != NULL:
            free(self.buckets)
            self.buckets = buckets
            self.num_buckets = buckets_for(size)
            for i in range(self.num_named):
                index_insert(buckets, self.num_buckets, self.named[i].hash, <int32_t> i + 1)
        return self.track_uses() if self.uses != NULL else 0

    cdef int track_uses(self) except -1:
        """Keep a `KeyUse` for each used key from now on."""
        cdef Py_ssize_t size = max(self.size, FEW_KEYS)
        cdef void* block = PyMem_Realloc(self.uses, size * sizeof(KeyUse))
        if block == NULL:
            raise MemoryError(f"no memory for a request of {size} keys")
        self.uses = <KeyUse*> block
        return 0

    cdef int resolve(self, BlockTable table, list keys, Batch batch, bint add) except -1:
        """Fill a batch for `keys`: row, hash, and place in `named` (-1: not named)."""
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i = 0
        cdef bint was_empty = self.num_named == 0
        batch.reserve(n)
        # Comparing pointers pays off only if the call is not tiny compared to the request.
        if not was_empty and 16 * n >= self.num_named:
            i = self.walk(table, keys, batch)
        if i == n:
            return 0
        table.find(keys, i, n, batch)
        if add:
            self.reserve(n - i)
        self.meet(table, keys, i, n, batch, add)
        if was_empty:
            self.version = table.version
        return 0

    cdef Py_ssize_t walk(self, BlockTable table, list keys, Batch batch) noexcept:
        """Resolve leading keys that are the same objects as named before, in the same order. Return their number."""
        cdef Py_ssize_t i = 0, at = 0, j, n = len(keys)
        cdef Py_ssize_t num_named = self.num_named
        cdef bint in_step = self.version == table.version
        cdef PyObject* key
        cdef Named* named
        if n != 0:
            key = PyList_GET_ITEM(keys, 0)
            if self.named[0].key != key and PyBytes_CheckExact(key):
                # The call covers a part of the request, or keys that it has not named.
                at = self.locate(key, hash_of(key))
                if at < 0:
                    return 0
        while i < n:
            key = PyList_GET_ITEM(keys, i)
            j = at
            while j < num_named and self.named[j].key != key:
                j += 1
            if j == num_named:
                break
            named = &self.named[j]
            # A row is valid only while its generation is unchanged.
            if not in_step and (named.row == 0 or table.rows[named.row].generation != named.generation):
                _set_row(named, table, table.find_one(key, named.hash))
            batch.rows[i] = named.row
            batch.hashes[i] = named.hash
            batch.places[i] = j
            at = j + 1
            i += 1
        if i == num_named:
            self.version = table.version
        return i

    cdef Py_ssize_t locate(self, PyObject* key, uint64_t hash) noexcept nogil:
        """Return the place of the key in `named`, or -1."""
        cdef Probe probe
        return self.seek(key, hash, &probe)

    cdef Py_ssize_t seek(self, PyObject* key, uint64_t hash, Probe* probe) noexcept nogil:
        """Do the same as `locate`. `probe` ends at the key's slot in the index, or at the slot where it belongs."""
        cdef int32_t place
        if self.buckets == NULL:
            for place in range(<int32_t> self.num_named):
                if self.named[place].hash == hash and same_bytes(self.named[place].key, key):
                    return place
            return -1
        place = index_first(self.buckets, self.num_buckets, hash, probe)
        while place != 0 and not (self.named[place - 1].hash == hash and same_bytes(self.named[place - 1].key, key)):
            place = index_next(self.buckets, self.num_buckets, hash, probe)
        return place - 1

    cdef void meet(
        self, BlockTable table, list keys, Py_ssize_t start, Py_ssize_t stop, Batch batch, bint add
    ) noexcept:
        """Write the places in `named` of keys that were just looked up, and store the rows they were found in.

        With `add`, append keys that are not named yet; `reserve` has made room.
        """
        cdef Py_ssize_t i, place
        cdef PyObject* key
        cdef Named* named
        cdef Probe probe
        cdef const uint64_t* hashes = batch.hashes
        cdef const int32_t* rows = batch.rows
        cdef Py_ssize_t* places = batch.places
        for i in range(start, stop):
            key = PyList_GET_ITEM(keys, i)
            place = self.seek(key, hashes[i], &probe)
            places[i] = place
            # The probe is still at the empty place where the search ended, so adding the key needs no second search.
            if place < 0:
                if not add:
                    continue
                places[i] = place = self.num_named
                self.num_named += 1
                named = &self.named[place]
                Py_INCREF(<object> key)
                named.key = key
                named.hash = hashes[i]
                named.row = 0
                named.mark = 0
                named.is_used = named.is_own = False
                if self.buckets != NULL:
                    index_add(self.buckets, &probe, hashes[i], <int32_t> place + 1)
            _set_row(&self.named[place], table, rows[i])

    cdef int32_t row_now(self, BlockTable table, Py_ssize_t place) noexcept nogil:
        """Return the row of a key that the request has named, or 0."""
        cdef Named* named = &self.named[place]
        if named.row != 0:
            if table.rows[named.row].generation == named.generation:
                return named.row
        elif self.version == table.version:
            return 0
        _set_row(named, table, table.find_one(named.key, named.hash))
        return named.row

    cdef int read_new_positions(self, BlockTable table) except -1:
        """Read the positions added since the last call, for a policy that tracks uses. Changed ones are ignored."""
        cdef uint64_t call = table.num_calls
        cdef PyObject* key
        cdef PyObject* value
        cdef int64_t position
        if self.uses == NULL or self.positions is None:
            return 0
        while self.num_positions < len(self.positions) and PyDict_Next(
                self.positions, &self.positions_at, &key, &value):
            position = number_of(value)
            if self.num_positions == 0 or position > self.largest_position:
                self.largest_position = position
            self.num_positions += 1
        _refuse_reentry(table, call)
        return 0

    cdef int read_positions(self, BlockTable table, list keys, Batch batch) except -1:
        """Read the positions added since the last call, and write the positions of the call's keys to the batch."""
        cdef Py_ssize_t i
        cdef uint64_t call = table.num_calls
        cdef PyObject* value
        if self.uses == NULL or self.positions is None:
            return 0
        self.read_new_positions(table)
        for i in range(len(keys)):
            value = _position_of(self.positions, PyList_GET_ITEM(keys, i), &self.prompt_at)
            batch.ends[i] = NO_POSITION if value == NULL else number_of(value)
        _refuse_reentry(table, call)
        return 0

    cdef Py_ssize_t add_uses(self, Batch batch, Py_ssize_t n) noexcept nogil:
        """Select the keys of a resolved batch that the request has not used before, and return their number."""
        cdef Py_ssize_t i, place, num_used = 0
        cdef Named* named
        cdef const Py_ssize_t* places = batch.places
        for i in range(n):
            place = places[i]
            named = &self.named[place]
            if not named.is_used:
                self.used[self.num_seen] = <int32_t> place
                self.num_seen += 1
                named.is_used = True
                if self.uses != NULL:
                    self.link_use(place, batch.ends[i], self.num_positions != 0 and batch.ends[i] != NO_POSITION)
                batch.used_rows[num_used] = batch.rows[i]
                batch.used_hashes[num_used] = batch.hashes[i]
                num_used += 1
        return num_used

    cdef void link_use(self, Py_ssize_t place, int64_t position, bint is_positioned) noexcept nogil:
        """Append a key, the request's newest used key, and link it by its position."""
        cdef KeyUse* uses = self.uses
        cdef int32_t before = self.finger
        cdef int32_t after
        if not is_positioned:
            position = uses[self.used[self.num_seen - 2]].position if self.num_seen > 1 else -1
        # Search from the key that was linked last: prompts are used in order, so most keys follow it directly.
        while before != 0 and uses[before - 1].position > position:
            before = uses[before - 1].before
        after = uses[before - 1].after if before != 0 else self.head
        while after != 0 and uses[after - 1].position <= position:
            before = after
            after = uses[after - 1].after
        uses[place].position = position
        uses[place].is_positioned = is_positioned
        uses[place].note = 0
        uses[place].is_taken = False
        uses[place].before = before
        uses[place].after = after
        if before != 0:
            uses[before - 1].after = <int32_t> place + 1
        else:
            self.head = <int32_t> place + 1
        if after != 0:
            uses[after - 1].before = <int32_t> place + 1
        self.finger = <int32_t> place + 1

    cdef bint is_in_order(self, dict positions) except -1:
        """Return whether the keys were first used in the order of the prompt.

        Each position is read once: a later call resumes where the last one stopped. It runs no Python.
        """
        cdef int64_t position
        cdef PyObject* key
        cdef PyObject* candidate
        cdef PyObject* value
        if positions is None:
            return not self.is_out_of_order
        while self.num_in_order < self.num_seen and not self.is_out_of_order:
            # Assume that the key is out of order until it is found to follow: so each exit of the loop is right.
            self.is_out_of_order = True
            key = self.named[self.used[self.num_in_order]].key
            candidate = NULL
            while candidate != key and PyDict_Next(positions, &self.order_at, &candidate, &value):
                self.num_passed += 1
            if candidate != key or not PyLong_CheckExact(value):
                break
            position = number_of(value)
            if self.num_in_order == 0:
                self.first_in_order = position
            elif position < self.last_in_order:
                break
            self.last_in_order = position
            self.num_in_order += 1
            self.is_out_of_order = False
        return not self.is_out_of_order

    cdef bint is_whole_prompt(self, dict positions) except -1:
        """Return whether the used keys are exactly the keys of `positions`, first used in prompt order."""
        return self.num_seen == len(positions) and self.is_in_order(positions) and self.num_passed == self.num_seen

    cdef int rows_in_prompt(
        self, BlockTable table, Py_ssize_t start, dict positions, Batch batch, Span* span
    ) except -1:
        """Write rows and hashes of the used keys from `start` on to the batch, in prompt order.

        A key without a position stays behind the key used before it. If there are no keys, `span` is not written.
        """
        cdef Py_ssize_t i, n = self.num_seen - start
        cdef bint is_sorted
        if n <= 0:
            return 0
        batch.reserve(n)
        is_sorted = self.is_in_order(positions)
        if is_sorted:
            # These keys follow the keys that were ordered before.
            span.first = self.first_in_order if start == 0 else self.last_position
            span.last = self.last_in_order
            span.tail = self.used[start + n - 1]
            self.newest_position = span.last
        else:
            self.sort_used(table, start, positions, batch)
            span.first = batch.in_prompt[0].position
            span.last = batch.in_prompt[n - 1].position
            span.tail = self.used[batch.in_prompt[n - 1].at]
        for i in range(n):
            batch.places[i] = self.used[start + i if is_sorted else batch.in_prompt[i].at]
        for i in range(n):
            if i + AHEAD < n:
                prefetch(&table.rows[self.named[batch.places[i + AHEAD]].row].generation)
            batch.rows[i] = self.row_now(table, batch.places[i])
            batch.hashes[i] = self.named[batch.places[i]].hash
        return 0

    cdef int sort_used(self, BlockTable table, Py_ssize_t start, dict positions, Batch batch) except -1:
        """Write the used keys from `start` on to `batch.in_prompt`, in prompt order."""
        cdef Py_ssize_t i
        cdef uint64_t call = table.num_calls
        cdef bint is_sorted = True
        cdef int64_t position = self.newest_position if start != 0 else -1
        cdef PyObject* value
        if start == 0:
            self.prompt_at = 0
        for i in range(start, self.num_seen):
            # A key without a position takes that of the key before it, and the sort keeps their order (`at`).
            if positions is not None:
                value = _position_of(positions, self.named[self.used[i]].key, &self.prompt_at)
                if value != NULL:
                    position = number_of(value)
                _refuse_reentry(table, call)
                is_sorted = is_sorted and (i == start or position >= batch.in_prompt[i - start - 1].position)
            batch.in_prompt[i - start].position = position
            batch.in_prompt[i - start].at = i
        self.newest_position = position
        if not is_sorted:
            qsort(batch.in_prompt, self.num_seen - start, sizeof(Position), &_compare)
        return 0


cdef inline void _set_row(Named* named, BlockTable table, int32_t row) noexcept nogil:
    # A block that was stored after the request's own had left is not its own.
    cdef uint32_t generation = table.rows[row].generation
    named.is_own = named.is_own and named.row == row and named.generation == generation
    named.row = row
    named.generation = generation


cdef PyObject* _position_of(dict positions, PyObject* key, Py_ssize_t* at) except? NULL:
    # The key is mostly right behind the key that was last looked up. Checking it first avoids the cache miss of a
    # look-up by hash. `at` only advances, so a prompt in another order costs at most one walk over the positions.
    cdef PyObject* candidate
    cdef PyObject* value
    while PyDict_Next(positions, at, &candidate, &value):
        if candidate == key:
            return value
    return PyDict_GetItemWithError(positions, <object> key)


cdef int _refuse_reentry(BlockTable table, uint64_t call) except -1:
    if table.num_calls != call:
        raise BlockStateError("a key or value of the positions called the manager")
    return 0


cdef int _compare(const void* a, const void* b) noexcept nogil:
    cdef const Position* one = <const Position*> a
    cdef const Position* other = <const Position*> b
    if one.position != other.position:
        return -1 if one.position < other.position else 1
    return -1 if one.at < other.at else 1
