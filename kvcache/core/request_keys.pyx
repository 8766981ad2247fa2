"""RequestKeys: the keys that one request has named, and the rows they were found in.

Compiled because every call of a request walks over it; what it remembers spares the later calls their hashing.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free
from libc.string cimport memset

from kvcache.core.index cimport (
    Bucket, Probe, buckets_for, index_first, index_insert, index_next, same_bytes, zeroed,
)

cdef extern from "Python.h":
    PyObject* PyList_GET_ITEM(object keys, Py_ssize_t i) noexcept
    bint PyDict_Next(object positions, Py_ssize_t* at, PyObject** key, PyObject** value) noexcept


@cython.final
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
        PyMem_Free(self.used)
        free(self.buckets)

    def __len__(self):
        return self.num_named

    def __reduce__(self):
        raise TypeError("a request's request_keys belongs to one manager and cannot be pickled")

    cdef void forget(self) noexcept:
        """Start afresh, after a reset of the table."""
        cdef Py_ssize_t i
        for i in range(self.num_named):
            Py_XDECREF(self.named[i].key)
        self.num_named = 0
        self.num_seen = self.num_ordered = 0
        self.head = self.finger = 0
        self.num_positions = self.positions_at = 0
        memset(self.policy_state, 0, sizeof(self.policy_state))
        self.version = 0
        if self.buckets != NULL:
            memset(self.buckets, 0, (<size_t> self.num_buckets) * sizeof(Bucket))

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room for `n` more keys, so that `meet` cannot fail."""
        cdef Py_ssize_t size, i
        cdef void* named
        cdef Bucket* buckets
        cdef uint32_t num_buckets
        if self.num_named + n <= self.size:
            return 0
        size = max(self.num_named + n, 2 * self.size)
        num_buckets = buckets_for(size)
        named = PyMem_Realloc(self.named, size * sizeof(Named))
        if named != NULL:
            self.named = <Named*> named
        cdef void* used = PyMem_Realloc(self.used, size * sizeof(int32_t))
        if used != NULL:
            self.used = <int32_t*> used
        buckets = <Bucket*> zeroed(num_buckets * sizeof(Bucket))
        if named == NULL or used == NULL or buckets == NULL:
            free(buckets)
            raise MemoryError(f"no memory for a request of {size} keys")
        free(self.buckets)
        self.buckets = buckets
        self.num_buckets = num_buckets
        for i in range(self.num_named):
            index_insert(buckets, self.num_buckets, self.named[i].hash, <int32_t> i + 1)
        self.size = size
        return self.track_uses() if self.uses != NULL else 0

    cdef int track_uses(self) except -1:
        """Keep what `KeyUse` says of each used key from now on."""
        cdef Py_ssize_t size = max(self.size, 1)
        cdef void* block = PyMem_Realloc(self.uses, size * sizeof(KeyUse))
        if block == NULL:
            raise MemoryError(f"no memory for a request of {size} keys")
        self.uses = <KeyUse*> block
        return 0

    cdef int read_positions(self) except -1:
        """Read the positions that have been added since the last time; changed ones are not seen."""
        cdef PyObject* key
        cdef PyObject* value
        cdef int64_t position
        if self.positions is None:
            return 0
        while self.num_positions < len(self.positions) and PyDict_Next(
                self.positions, &self.positions_at, &key, &value):
            position = number_of(value)
            if self.num_positions == 0 or position > self.largest_position:
                self.largest_position = position
            self.num_positions += 1
        return 0

    cdef void add_use(self, Py_ssize_t place, int64_t position, bint is_positioned) noexcept nogil:
        """Append a key, which has just become the request's last used one, and link it by its position."""
        cdef KeyUse* uses = self.uses
        cdef int32_t before = self.finger
        cdef int32_t after
        if not is_positioned:
            position = uses[self.used[self.num_seen - 2]].position if self.num_seen > 1 else -1
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

    cdef Py_ssize_t locate(self, PyObject* key, uint64_t hash) noexcept nogil:
        """Return where the key stands in `named`, or -1."""
        cdef Probe probe
        cdef int32_t place = index_first(self.buckets, self.num_buckets, hash, &probe) if self.num_named else 0
        while place != 0 and not (self.named[place - 1].hash == hash and same_bytes(self.named[place - 1].key, key)):
            place = index_next(self.buckets, self.num_buckets, hash, &probe)
        return place - 1

    cdef void meet(self, list keys, Py_ssize_t start, Py_ssize_t stop, const uint64_t* hashes, const int32_t* found,
                   const Row* rows, bint add, Py_ssize_t* places) noexcept:
        """Write where keys that were just looked up stand in `named` (-1: nowhere), and the rows they were found in.

        With `add` those that are not there yet are appended; `reserve` has made room.
        """
        cdef Py_ssize_t i, place
        cdef PyObject* key
        cdef Named* named
        for i in range(start, stop):
            key = PyList_GET_ITEM(keys, i)
            place = self.locate(key, hashes[i])
            places[i] = place
            if place < 0:
                if not add:
                    continue
                places[i] = place = self.num_named
                self.num_named += 1
                named = &self.named[place]
                Py_INCREF(<object> key)
                named.key = key
                named.hash = hashes[i]
                named.seen = 0
                named.mark = 0
                index_insert(self.buckets, self.num_buckets, hashes[i], <int32_t> place + 1)
            self.named[place].row = found[i]
            self.named[place].generation = rows[found[i]].generation
