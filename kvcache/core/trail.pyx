"""Trail: the keys that one request has named, and the rows they were found in.

Compiled because every call of a request walks over it; what it remembers spares the later calls their hashing.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdlib cimport free

from kvcache.core.index cimport (
    BUCKET_FULL, after, buckets_for, equal, home_of, index_guess, index_insert, lowest_bit, same_bytes, used, zeroed,
)

cdef extern from "Python.h":
    PyObject* PyList_GET_ITEM(object keys, Py_ssize_t i) noexcept


@cython.final
cdef class Trail:
    """Trail()

    The keys that one request has named: each once, with its row and whether its use was counted.
    """

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.num_named):
            Py_XDECREF(self.named[i].key)
        PyMem_Free(self.named)
        free(self.buckets)

    def __len__(self):
        return self.num_named

    def __reduce__(self):
        raise TypeError("a request's trail belongs to one manager and cannot be pickled")

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
        buckets = <Bucket*> zeroed(num_buckets * sizeof(Bucket))
        if named == NULL or buckets == NULL:
            free(buckets)
            raise MemoryError(f"no memory for a request of {size} keys")
        free(self.buckets)
        self.buckets = buckets
        self.num_buckets = num_buckets
        for i in range(self.num_named):
            index_insert(buckets, self.num_buckets, self.named[i].hash, <int32_t> i + 1)
        self.size = size
        return 0

    cdef Py_ssize_t locate(self, PyObject* key, uint64_t hash) noexcept nogil:
        """Return where the key stands in `named`, or -1."""
        cdef uint32_t at = home_of(<uint32_t> hash, self.num_buckets)
        cdef uint32_t taken, same
        cdef Named* named
        if self.num_named == 0:
            return -1
        while True:
            taken = used(&self.buckets[at])
            same = equal(self.buckets[at].tag, <uint32_t> hash) & taken
            while same:
                named = &self.named[self.buckets[at].row[lowest_bit(same)] - 1]
                if named.hash == hash and same_bytes(named.key, key):
                    return named - self.named
                same &= same - 1
            if taken != BUCKET_FULL:
                return -1
            at = after(at, self.num_buckets)

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
            place = -1
            if self.num_named and index_guess(self.buckets, self.num_buckets, hashes[i]) != 0:
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
