"""Loops over the blocks of a prompt, compiled because a scheduler waits for each of them."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

from kvcache.block import READY
from kvcache.specs import CPULoadStoreSpec

MAX_KEY_BYTES = 36


def pack_keys(keys, Py_ssize_t first=0):
    """Return the keys of a list from `first` on, or of a dict to end positions: as a list, packed, and their length.

    ValueError: the lengths differ or exceed `MAX_KEY_BYTES`.
    """
    cdef list new = list(keys)[first:]
    cdef list ends = list(keys.values())[first:] if isinstance(keys, dict) else []
    cdef Py_ssize_t i, n = len(new), num_ends = len(ends), num_bytes = len(new[0]) if n else 1
    cdef uint32_t* head
    cdef char* out
    for key in new:
        if type(key) is not bytes or len(<bytes> key) != num_bytes or num_bytes > MAX_KEY_BYTES:
            raise ValueError(f"keys of a node's pool must have one length of at most {MAX_KEY_BYTES} bytes")
    packed = PyBytes_FromStringAndSize(NULL, 4 + 4 * num_ends + n * num_bytes)
    head = <uint32_t*> PyBytes_AS_STRING(packed)
    out = <char*> (head + 1 + num_ends)
    head[0] = <uint32_t> n
    for i in range(num_ends):
        head[1 + i] = ends[i]
    for i in range(n):
        memcpy(out + i * num_bytes, PyBytes_AS_STRING(<bytes> new[i]), num_bytes)
    return new, packed, num_bytes


def count_leases(
    const int64_t[::1] slots, int step, uint32_t[::1] counts, uint64_t[::1] readers, const uint8_t[::1] writers,
    int engine,
):
    """Count a lease more or less (`step` 1 or -1) of each slot, and set or clear the engine's bit in `readers`.

    Return how many slots got their first lease or lost their last one, and how many another engine wrote.
    """
    cdef Py_ssize_t i, num_changed = 0, num_others = 0
    cdef int64_t slot
    cdef uint64_t bit = (<uint64_t> 1) << engine
    for i in range(slots.shape[0]):
        slot = slots[i]
        num_changed += counts[slot] == (step < 0)
        num_others += writers[slot] != engine
        counts[slot] += step
        readers[slot] = readers[slot] | bit if counts[slot] else readers[slot] & ~bit
    return num_changed, num_others


@cython.final
cdef class HeldBlocks:
    """The `keys` and `slots` of the blocks that a request holds; fast for keys in the order of the prompt."""

    cdef readonly list keys
    cdef readonly list slots
    cdef Py_ssize_t cursor          # behind the place of the last key that was found
    cdef dict places                # of all keys; None until a key is asked for out of order

    def __cinit__(self):
        self.clear()

    def clear(self):
        self.keys, self.slots, self.cursor, self.places = [], [], 0, None

    def add(self, list keys not None, bytes slots not None):
        """Add keys with their slots, of 4 bytes, except for those with a negative slot. Return how many are added."""
        cdef const int32_t* slot = <const int32_t*> PyBytes_AS_STRING(slots)
        cdef Py_ssize_t i, num_old = len(self.keys)
        for i in range(min(len(keys), len(slots) // 4)):
            if slot[i] >= 0:
                self.keys.append(keys[i])
                self.slots.append(slot[i])
        self.places = None
        return len(self.keys) - num_old

    def __contains__(self, key):
        return self.find(key) >= 0

    cdef Py_ssize_t find(self, key) except -2:
        """Return the place of a key, or -1. A walk in order compares addresses only."""
        cdef Py_ssize_t place = self.cursor, n = len(self.keys)
        if place == n or self.keys[place] is not key:
            place = 0
            if n == 0 or self.keys[0] is not key:
                if self.places is None:
                    self.places = {held: place for place, held in enumerate(self.keys)}
                place = self.places.get(key, -1)
        if place >= 0:
            self.cursor = place + 1
        return place

    def load_spec(self, list keys not None):
        """Return the spec that loads blocks. KeyError: one is not held."""
        cdef Py_ssize_t i, place
        ids = np.empty(len(keys), np.int64)
        cdef int64_t[::1] out = ids
        for i in range(len(keys)):
            place = self.find(keys[i])
            if place < 0:
                raise KeyError(f"block is not held: {keys[i]!r}")
            out[i] = self.slots[place]
        # Slots need no checks.
        spec = CPULoadStoreSpec.__new__(CPULoadStoreSpec)
        spec.block_ids = ids
        return spec


cdef class LastLookUp:
    """Answers for the blocks that the last look-up holds; `acquire` of the subclass answers for all others."""

    cdef object request
    cdef HeldBlocks held

    def remember(self, request, HeldBlocks held):
        self.request, self.held = request, held

    def status(self, key, req_context):
        """Return the state of one key: absent 0, being written 1, ready and held 2, ask again 3."""
        if self.held is not None and req_context is self.request and self.held.find(key) >= 0:
            return READY
        return self.acquire(key, req_context)
