"""Batch: rows and hashes of the keys of one call, in arrays that all calls share.

Compiled because C loops fill and read it.
"""

from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint64_t


cdef void* resized(void* array, size_t num_bytes) except NULL:
    cdef void* block = PyMem_Realloc(array, num_bytes)
    if block == NULL:
        raise MemoryError(f"no memory for {num_bytes} bytes of a call's keys")
    return block


cdef class Batch:
    """Batch()

    The keys of one call: rows, hashes, and the results that the call writes.
    """

    def __dealloc__(self):
        PyMem_Free(self.rows)
        PyMem_Free(self.hashes)
        PyMem_Free(self.places)
        PyMem_Free(self.ends)
        PyMem_Free(self.used_rows)
        PyMem_Free(self.used_hashes)
        PyMem_Free(self.picked)
        PyMem_Free(self.picked_places)
        PyMem_Free(self.picked_rows)
        PyMem_Free(self.victims)
        PyMem_Free(self.in_prompt)

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room for `n` keys. Existing contents are kept."""
        cdef Py_ssize_t size
        if n <= self.size:
            return 0
        size = max(n, 2 * self.size)
        self.rows = <int32_t*> resized(self.rows, size * sizeof(int32_t))
        self.hashes = <uint64_t*> resized(self.hashes, size * sizeof(uint64_t))
        self.places = <Py_ssize_t*> resized(self.places, size * sizeof(Py_ssize_t))
        self.ends = <int64_t*> resized(self.ends, size * sizeof(int64_t))
        self.used_rows = <int32_t*> resized(self.used_rows, size * sizeof(int32_t))
        self.used_hashes = <uint64_t*> resized(self.used_hashes, size * sizeof(uint64_t))
        self.picked = <Py_ssize_t*> resized(self.picked, size * sizeof(Py_ssize_t))
        self.picked_places = <Py_ssize_t*> resized(self.picked_places, size * sizeof(Py_ssize_t))
        self.picked_rows = <int32_t*> resized(self.picked_rows, size * sizeof(int32_t))
        self.victims = <int32_t*> resized(self.victims, size * sizeof(int32_t))
        self.in_prompt = <Position*> resized(self.in_prompt, size * sizeof(Position))
        self.size = size
        return 0
