"""GhostList: the most recent keys that were evicted, by their hashes.

Compiled because every use of an absent key looks here. Ghosts keep the key's 64-bit keyed hash only: a false match
costs one adaptation step, never a wrong block.
"""

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from kvcache.core.index cimport slots_for, zeroed


cdef class GhostList:
    """GhostList(capacity)

    A recency list of key hashes that forgets its oldest beyond `capacity`.

    Parameters
    ----------
    capacity : int
        Ghosts kept, >= 1.
    """

    def __cinit__(self, Py_ssize_t capacity):
        if not 1 <= capacity < 1 << 30:
            raise ValueError(f"capacity must be >= 1 and < 2**30, got {capacity}")
        self.capacity = capacity
        self.mask = slots_for(capacity + 1) - 1
        self.ghosts = <Ghost*> PyMem_Calloc(capacity + 2, sizeof(Ghost))
        self.slots = <int32_t*> zeroed((<size_t> self.mask + 1) * sizeof(int32_t))
        if self.ghosts == NULL or self.slots == NULL:
            raise MemoryError(f"no memory for {capacity} ghosts")

    def __dealloc__(self):
        PyMem_Free(self.ghosts)
        free(self.slots)

    def __reduce__(self):
        raise TypeError("a ghost list belongs to one policy and cannot be pickled")

    def __len__(self):
        return self.num_ghosts

    def __contains__(self, key):
        return type(key) is bytes and self.find(<uint64_t> <Py_ssize_t> hash(key)) != 0

    def check(self):
        """Walk the list and the index; RuntimeError says what does not hold."""
        cdef int32_t ghost = self.ghosts[0].next
        cdef Py_ssize_t count = 0
        while ghost != 0:
            if self.find(self.ghosts[ghost].hash) != ghost:
                raise RuntimeError(f"ghost {ghost} is not found by its hash")
            if self.ghosts[self.ghosts[ghost].next].prev != ghost:
                raise RuntimeError(f"ghost {ghost} is not the neighbour of its neighbour")
            count += 1
            ghost = self.ghosts[ghost].next
        if count != self.num_ghosts or count > self.capacity:
            raise RuntimeError(f"{count} ghosts are linked, {self.num_ghosts} counted, {self.capacity} allowed")

    cdef int32_t find(self, uint64_t hash) noexcept nogil:
        cdef uint32_t at = <uint32_t> hash & self.mask
        while self.slots[at] != 0:
            if self.ghosts[self.slots[at]].hash == hash:
                return self.slots[at]
            at = (at + 1) & self.mask
        return 0

    cdef int32_t push(self, uint64_t hash) noexcept nogil:
        """Append a ghost (or refresh the one of that hash) and return it; the oldest goes if there are too many."""
        cdef int32_t ghost = self.find(hash)
        cdef uint32_t at
        if ghost != 0:
            self.refresh(ghost)
            return ghost
        if self.num_ghosts == self.capacity:
            self.drop(self.ghosts[0].next)
        if self.free_head != 0:
            ghost = self.free_head
            self.free_head = self.ghosts[ghost].next
        else:
            self.num_fresh += 1
            ghost = self.num_fresh
        self.ghosts[ghost].hash = hash
        self.ghosts[ghost].uses = 0
        self.ghosts[ghost].used_at = 0
        self._link_last(ghost)
        at = <uint32_t> hash & self.mask
        while self.slots[at] != 0:
            at = (at + 1) & self.mask
        self.slots[at] = ghost
        self.num_ghosts += 1
        return ghost

    cdef void refresh(self, int32_t ghost) noexcept nogil:
        """Move a ghost to the most-recent end."""
        self._unlink(ghost)
        self._link_last(ghost)

    cdef void drop(self, int32_t ghost) noexcept nogil:
        """Forget a ghost."""
        cdef uint32_t hole = <uint32_t> self.ghosts[ghost].hash & self.mask
        cdef uint32_t at
        while self.slots[hole] != ghost:
            hole = (hole + 1) & self.mask
        at = (hole + 1) & self.mask
        while self.slots[at] != 0:
            if ((at - <uint32_t> self.ghosts[self.slots[at]].hash) & self.mask) >= ((at - hole) & self.mask):
                self.slots[hole] = self.slots[at]
                hole = at
            at = (at + 1) & self.mask
        self.slots[hole] = 0
        self._unlink(ghost)
        self.ghosts[ghost].next = self.free_head
        self.free_head = ghost
        self.num_ghosts -= 1

    cdef void clear(self) noexcept nogil:
        """Forget all ghosts."""
        self.ghosts[0].prev = self.ghosts[0].next = 0
        self.num_fresh = self.free_head = 0
        self.num_ghosts = 0
        memset(self.slots, 0, (<size_t> self.mask + 1) * sizeof(int32_t))

    cdef void _link_last(self, int32_t ghost) noexcept nogil:
        cdef int32_t last = self.ghosts[0].prev
        self.ghosts[ghost].prev = last
        self.ghosts[ghost].next = 0
        self.ghosts[last].next = ghost
        self.ghosts[0].prev = ghost

    cdef void _unlink(self, int32_t ghost) noexcept nogil:
        cdef int32_t prev = self.ghosts[ghost].prev
        cdef int32_t next = self.ghosts[ghost].next
        self.ghosts[prev].next = next
        self.ghosts[next].prev = prev
