"""The keyed hash of a key, under which its row, ghost or sample is looked up. `index.h` has hash and index.

Compiled because it is computed for every key of every call. PYTHONHASHSEED may fix the key of Python's own hash of
bytes; a client that knows it can send keys that all fall into one bucket. This hash draws its key in each process.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

import os


def key_hash(bytes key not None):
    """Return the hash of a key in this process, 0 <= hash < 2**64."""
    return hash_of(<PyObject*> key)


def key_hashes(list keys not None, bytes salt not None):
    """Return 8 bytes per key: its hash under a salt of 32 bytes, 0 for an empty key, 1 for a non-bytes item."""
    if len(salt) != 4 * sizeof(uint64_t):
        raise ValueError(f"salt must have 32 bytes, got {len(salt)}")
    cdef Py_ssize_t i, n = len(keys)
    cdef bytes hashes = PyBytes_FromStringAndSize(NULL, 8 * n)
    cdef uint64_t* out = <uint64_t*> PyBytes_AS_STRING(hashes)
    cdef uint64_t words[4]
    cdef uint64_t hash
    memcpy(words, PyBytes_AS_STRING(salt), sizeof(words))
    for i in range(n):
        key = keys[i]
        hash = 1
        if type(key) is bytes:
            hash = kv_hash(<PyObject*> key, words) if PyBytes_GET_SIZE(key) else 0
            if hash < 2 and PyBytes_GET_SIZE(key):
                hash += 2
        out[i] = hash
    return hashes


cdef bytes _drawn = os.urandom(sizeof(secret))
memcpy(secret, <const uint8_t*> _drawn, sizeof(secret))
