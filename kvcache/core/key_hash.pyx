"""The keyed hash of a key: which row, ghost or sample it is looked up under.

Compiled because it is taken of every key of every call. Python's own hash of bytes has a key that PYTHONHASHSEED may
fix, and a client who knows it can send keys that all fall into one bucket; this one's key is drawn in each process.
"""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t
from libc.string cimport memcpy

import os


def key_hash(bytes key not None):
    """Return the hash of a key in this process, 0 <= hash < 2**64."""
    return hash_of(<PyObject*> key)


cdef bytes _drawn = os.urandom(sizeof(secret))
memcpy(secret, <const uint8_t*> _drawn, sizeof(secret))
