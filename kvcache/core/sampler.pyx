"""Sampler: logs the uses of a few keys, selected by hash; `run_distances` computes stack distances from such a log.

Compiled because every key of every request passes the filter in the scheduler's thread, one to two nanoseconds each.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memmove, memset

from kvcache.core.index cimport hash_of
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport PyList_GET_ITEM

import numpy as np

from kvcache.options import check_int


@cython.final
cdef class Sampler:
    """Sampler(max_uses, max_halvings)

    Log which keys requests use, for keys whose hash is below a threshold. A full log halves the threshold.

    Parameters
    ----------
    max_uses : int
        Length of the log, >= 2; 12 bytes each.
    max_halvings : int
        Limit of halvings, 0..63. After that, a full log drops its oldest half.

    Notes
    -----
    Spatially hashed sampling, Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15. Unlike SHARDS,
    the log itself is kept: every use in it was sampled at the same rate.
    """

    cdef Py_ssize_t max_uses
    cdef int max_halvings
    cdef readonly int num_halvings
    cdef readonly Py_ssize_t num_sampled    # uses in the log
    cdef readonly bint is_window            # the log has dropped its oldest uses
    cdef int64_t num_uses                   # of all keys, since the start of the log
    cdef int64_t num_requests               # since the last reset
    cdef Py_ssize_t num_old                 # the older part of the log, and the uses of all keys in it
    cdef int64_t num_old_uses
    cdef uint64_t mask                      # a key is sampled if these bits of its hash are 0
    cdef uint64_t* hashes                   # [max_uses]
    cdef uint32_t* requests                 # [max_uses]: the request's number, modulo 2**32

    def __cinit__(self, max_uses, max_halvings):
        check_int("max_uses", max_uses, 2, (1 << 30) - 1)
        check_int("max_halvings", max_halvings, 0, 63)
        self.max_uses = max_uses
        self.max_halvings = max_halvings
        cdef size_t size = max_uses
        self.hashes = <uint64_t*> PyMem_Malloc(size * sizeof(uint64_t))
        self.requests = <uint32_t*> PyMem_Malloc(size * sizeof(uint32_t))
        if self.hashes == NULL or self.requests == NULL:
            raise MemoryError(f"no memory for a log of {max_uses} uses")
        # Touch the pages now, not in the call that finishes a request.
        memset(self.hashes, 0, size * sizeof(uint64_t))
        memset(self.requests, 0, size * sizeof(uint32_t))

    def __dealloc__(self):
        PyMem_Free(self.hashes)
        PyMem_Free(self.requests)

    def take(self, request_keys):
        """Log the keys that a request used, in the order first named."""
        if type(request_keys) is RequestKeys:
            with cython.critical_section(self):
                self._take_request(<RequestKeys> request_keys)
        else:
            self.take_keys(list(request_keys.keys))

    cdef void _take_request(self, RequestKeys request_keys) noexcept nogil:
        cdef Py_ssize_t i
        if request_keys.num_seen == 0:
            return
        self.num_requests += 1
        for i in range(request_keys.num_named):
            if request_keys.named[i].seen != 0:
                self._log(request_keys.named[i].hash)

    @cython.critical_section
    def take_keys(self, list keys not None):
        """Log a request by the keys that it used, in prefix order. Each key is exact bytes."""
        cdef Py_ssize_t i
        if not keys:
            return
        self.num_requests += 1
        for i in range(len(keys)):
            self._log(hash_of(PyList_GET_ITEM(keys, i)))

    cdef void _log(self, uint64_t hash) noexcept nogil:
        if self.num_sampled == self.max_uses and hash & self.mask == 0:
            self._make_room()
        if hash & self.mask == 0:
            self.hashes[self.num_sampled] = hash
            self.requests[self.num_sampled] = <uint32_t> self.num_requests
            self.num_sampled += 1
        self.num_uses += 1

    cdef void _make_room(self) noexcept nogil:
        cdef Py_ssize_t i, kept = 0
        if self.num_halvings < self.max_halvings:
            self.num_halvings += 1
            self.mask = ~((<uint64_t> -1) >> self.num_halvings)
            for i in range(self.num_sampled):
                self.hashes[kept] = self.hashes[i]
                self.requests[kept] = self.requests[i]
                kept += self.hashes[kept] & self.mask == 0
            self.num_old = self.num_sampled = kept
            self.num_old_uses = self.num_uses
            # A few keys with many uses each may all be below the new threshold. Then drop the oldest uses.
            if kept <= self.max_uses - (self.max_uses >> 2):
                return
        self._drop_oldest()

    cdef void _drop_oldest(self) noexcept nogil:
        cdef Py_ssize_t cut = self.num_old, left
        if cut == 0 or cut == self.num_sampled:
            cut = self.num_sampled >> 1
            self.num_old_uses = self.num_uses * cut // self.num_sampled
        left = self.num_sampled - cut
        memmove(self.hashes, self.hashes + cut, left * sizeof(uint64_t))
        memmove(self.requests, self.requests + cut, left * sizeof(uint32_t))
        self.num_uses -= self.num_old_uses
        self.num_old_uses = self.num_uses
        self.num_old = self.num_sampled = left
        self.is_window = True

    def snapshot(self):
        """Return a copy of the log, and the number of uses and requests that it represents.

        Returns
        -------
        tuple of (numpy.ndarray, numpy.ndarray, int, int)
            Hashes, uint64, shape (n,), and request numbers, int64, shape (n,), both in order; all uses, and all
            requests, since the log begins.
        """
        cdef int64_t newest, num_uses
        cdef bint is_window
        with cython.critical_section(self):
            newest = self.num_requests
            num_uses = self.num_uses
            is_window = self.is_window
            hashes = PyBytes_FromStringAndSize(<const char*> self.hashes, self.num_sampled * sizeof(uint64_t))
            numbers = PyBytes_FromStringAndSize(<const char*> self.requests, self.num_sampled * sizeof(uint32_t))
        # Numbers are kept modulo 2**32; no log spans as many requests.
        ages = (np.uint32(newest & 0xFFFFFFFF) - np.frombuffer(numbers, np.uint32)).astype(np.int64)
        num_requests = int(ages[0]) + 1 if is_window else newest
        return np.frombuffer(hashes, np.uint64), newest - ages, num_uses, num_requests

    @cython.critical_section
    def reset(self):
        """Clear the log. Every key is sampled again."""
        self.num_halvings = 0
        self.num_sampled = self.num_old = 0
        self.num_uses = self.num_requests = self.num_old_uses = 0
        self.mask = 0
        self.is_window = False


def run_distances(const int64_t[::1] keys, const int64_t[::1] starts):
    """Return for each use the smallest LRU capacity, less one, at which it ends a leading run of hits.

    Parameters
    ----------
    keys : numpy.ndarray
        Small numbers for the keys, 0 <= key < n; int64, shape (n,), in order, each request's head first.
    starts : numpy.ndarray
        Where each request begins in `keys`; int64, ascending from 0.

    Returns
    -------
    numpy.ndarray
        int64, shape (n,): the number of other keys used since the last use of this key or of a key before it in the
        request, whichever is larger. n if one of these keys has not been used before.

    Notes
    -----
    O(n log n), with a binary indexed tree over the times of last use. A request's uses take effect together, and leave
    its head the most recent.
    """
    cdef Py_ssize_t n = keys.shape[0]
    cdef Py_ssize_t num_requests = starts.shape[0]
    cdef Py_ssize_t r, i, begin, end, at, time = 0
    cdef int64_t longest, later, num_live = 0
    cdef int64_t[::1] out
    array = np.empty(n, np.int64)
    out = array
    cdef int32_t* tree = <int32_t*> PyMem_Calloc(n + 1, sizeof(int32_t))
    cdef int32_t* last = <int32_t*> PyMem_Calloc(n + 1, sizeof(int32_t))      # 0: never
    try:
        if tree == NULL or last == NULL:
            raise MemoryError(f"no memory for the distances of {n} uses")
        for r in range(num_requests):
            begin = starts[r]
            end = starts[r + 1] if r + 1 < num_requests else n
            longest = 0
            for i in range(begin, end):
                if last[keys[i]] == 0:
                    longest = n
                elif longest < n:
                    later = num_live
                    at = last[keys[i]]
                    while at > 0:
                        later -= tree[at]
                        at &= at - 1
                    longest = max(longest, later)
                out[i] = longest
            for i in range(end - 1, begin - 1, -1):
                at = last[keys[i]]
                num_live += at == 0
                while 0 < at <= n:
                    tree[at] -= 1
                    at += at & -at
                time += 1
                last[keys[i]] = <int32_t> time
                at = time
                while at <= n:
                    tree[at] += 1
                    at += at & -at
    finally:
        PyMem_Free(tree)
        PyMem_Free(last)
    return array
