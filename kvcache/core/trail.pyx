"""Trail: the keys that one request has named, and the rows they were found in.

Compiled because every call of a request walks over it; what it remembers spares the later calls their hashing.
"""

cimport cython
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF

from kvcache.core.index cimport same_bytes, slots_for


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
        PyMem_Free(self.slots)

    def __len__(self):
        return self.num_named

    def __reduce__(self):
        raise TypeError("a request's trail belongs to one manager and cannot be pickled")

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room for `n` more keys, so that `add` cannot fail."""
        cdef Py_ssize_t size, i
        cdef void* block
        cdef uint32_t num_slots, at
        if self.num_named + n <= self.size:
            return 0
        size = max(self.num_named + n, 2 * self.size)
        block = PyMem_Realloc(self.named, size * sizeof(Named))
        if block == NULL:
            raise MemoryError()
        self.named = <Named*> block
        num_slots = slots_for(size)
        if num_slots > self.mask + 1 or self.slots == NULL:
            block = PyMem_Calloc(num_slots, sizeof(int32_t))
            if block == NULL:
                raise MemoryError()
            PyMem_Free(self.slots)
            self.slots = <int32_t*> block
            self.mask = num_slots - 1
            for i in range(self.num_named):
                at = <uint32_t> self.named[i].hash & self.mask
                while self.slots[at] != 0:
                    at = (at + 1) & self.mask
                self.slots[at] = <int32_t> i + 1
        self.size = size
        return 0

    cdef Py_ssize_t locate(self, PyObject* key, uint64_t hash) noexcept nogil:
        """Return where the key stands in `named`, or -1."""
        cdef uint32_t at
        cdef Named* named
        if self.num_named == 0:
            return -1
        at = <uint32_t> hash & self.mask
        while self.slots[at] != 0:
            named = &self.named[self.slots[at] - 1]
            if named.hash == hash and same_bytes(named.key, key):
                return self.slots[at] - 1
            at = (at + 1) & self.mask
        return -1

    cdef Py_ssize_t add(self, PyObject* key, uint64_t hash, int32_t row, uint32_t generation) noexcept:
        """Append a key that is not there; `reserve` has made room."""
        cdef Named* named = &self.named[self.num_named]
        cdef uint32_t at = <uint32_t> hash & self.mask
        Py_INCREF(<object> key)
        named.key = key
        named.hash = hash
        named.row = row
        named.generation = generation
        named.seen = 0
        named.mark = 0
        while self.slots[at] != 0:
            at = (at + 1) & self.mask
        self.num_named += 1
        self.slots[at] = <int32_t> self.num_named
        return self.num_named - 1
