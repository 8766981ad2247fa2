"""ReuseFilter: admit a key to be stored only once it has been offered often enough.

Compiled because it looks at every key of every `prepare_store`.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t

from kvcache.core.ghosts cimport GhostList
from kvcache.core.index cimport hash_of
from kvcache.core.table cimport (
    PyByteArray_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE, PyList_GET_ITEM,
)

from kvcache.options import check_int


@cython.final
cdef class ReuseFilter:
    """ReuseFilter(threshold, max_tracker_size=64000)

    Count how often keys are offered, in a table of the keys offered last.

    Parameters
    ----------
    threshold : int
        Offers after which a key is admitted, >= 2.
    max_tracker_size : int
        Keys remembered, >= 1; beyond them the one offered longest ago is forgotten, but never one of the call itself.

    Raises
    ------
    ValueError
        A size is not an int in its range.
    """

    cdef readonly Py_ssize_t threshold
    cdef readonly Py_ssize_t max_tracker_size
    cdef GhostList offers       # state: offers so far; used_at: the call that offered the key last
    cdef uint32_t call

    def __cinit__(self, threshold, max_tracker_size=64_000):
        check_int("store_threshold", threshold, 2, (1 << 31) - 1)
        check_int("max_tracker_size", max_tracker_size, 1, (1 << 29) - 1)
        self.threshold = threshold
        self.max_tracker_size = max_tracker_size
        self.clear()

    def __len__(self):
        with cython.critical_section(self):
            return self.offers.num_ghosts

    @cython.critical_section
    def clear(self):
        """Forget all offers."""
        self.offers = GhostList(2 * self.max_tracker_size)
        self.call = 0

    @cython.critical_section
    def admit(self, list keys not None):
        """Count an offer of each key, once per call, and return which keys may be stored.

        Parameters
        ----------
        keys : list of bytes
            The keys of one `prepare_store`.

        Returns
        -------
        bytearray
            1 or 0 per key.
        """
        cdef Py_ssize_t n = len(keys)
        cdef Py_ssize_t i
        cdef PyObject* key
        cdef int32_t ghost
        cdef uint64_t hash
        cdef char* flags
        for i in range(n):
            key = PyList_GET_ITEM(keys, i)
            if not PyBytes_CheckExact(key) or PyBytes_GET_SIZE(key) == 0:
                raise ValueError(f"key must be exact, non-empty bytes, got {<object> key!r}")
        admitted = bytearray(n)
        flags = PyByteArray_AS_STRING(admitted)
        self.offers.reserve(n)
        self.call += 1
        for i in range(n):
            hash = hash_of(PyList_GET_ITEM(keys, i))
            ghost = self.offers.find(hash)
            if ghost == 0 or self.offers.ghosts[ghost].used_at != self.call:
                ghost = self.offers.push(hash)
                self.offers.ghosts[ghost].used_at = self.call
                if self.offers.ghosts[ghost].state < self.threshold:
                    self.offers.ghosts[ghost].state += 1
            flags[i] = self.offers.ghosts[ghost].state >= self.threshold
        ghost = self.offers.ghosts[0].next
        while self.offers.num_ghosts > self.max_tracker_size and self.offers.ghosts[ghost].used_at != self.call:
            self.offers.drop(ghost)
            ghost = self.offers.ghosts[0].next
        return admitted
