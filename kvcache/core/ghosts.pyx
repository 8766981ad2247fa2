"""GhostList: hashes of the most recently evicted keys.

Compiled because every use of an absent key looks here. A ghost keeps only the key's 64-bit keyed hash: a false match
costs one adaptation step, never a wrong block.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport free, realloc

from kvcache.core.index cimport (
    Bucket, Probe, buckets_for, clear as clear_memory, hash_of, index_delete, index_first, index_insert, index_next,
    prefetch, tight_buckets_for, zeroed,
)


cdef class GhostList:
    """GhostList(capacity, tight=False)

    A recency list of key hashes that forgets its oldest beyond `capacity`.

    If `tight`, the index may be five sixths full, not half: for histories of many times the cache's blocks.
    """

    def __cinit__(self, Py_ssize_t capacity, bint tight=False):
        if not 1 <= capacity < 1 << 30:
            raise ValueError(f"capacity must be >= 1 and < 2**30, got {capacity}")
        self.tight = tight
        self._grow(capacity)

    def __dealloc__(self):
        free(self.ghosts)
        free(self.buckets)

    def __len__(self):
        return self.num_ghosts

    def __contains__(self, key):
        return type(key) is bytes and self.find(hash_of(<PyObject*> key)) != 0

    def check(self):
        """Check the list and the index. Raise RuntimeError naming the broken invariant."""
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

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make room for `n` more ghosts, so that none is dropped for them. An eighth more is allocated."""
        if self.num_ghosts + n > self.capacity:
            self._grow((self.num_ghosts + n) // 8 * 9 + 8)
        return 0

    cdef int _grow(self, Py_ssize_t capacity) except -1:
        cdef uint32_t num_buckets = tight_buckets_for(capacity) if self.tight else buckets_for(capacity)
        cdef Bucket* buckets
        cdef void* ghosts = NULL
        cdef int32_t ghost
        # Pages of new ghosts stay untouched until they are used.
        if capacity < 1 << 30:
            ghosts = realloc(self.ghosts, (capacity + 2) * sizeof(Ghost))
        if ghosts == NULL:
            raise MemoryError(f"no memory for {capacity} ghosts")
        self.ghosts = <Ghost*> ghosts
        buckets = <Bucket*> zeroed(num_buckets * sizeof(Bucket))
        if buckets == NULL:
            raise MemoryError(f"no memory for {capacity} ghosts")
        if self.capacity == 0:
            self.ghosts[0].prev = self.ghosts[0].next = 0
        ghost = self.ghosts[0].next
        while ghost != 0:
            index_insert(buckets, num_buckets, self.ghosts[ghost].hash, ghost)
            ghost = self.ghosts[ghost].next
        free(self.buckets)
        self.buckets = buckets
        self.num_buckets = num_buckets
        self.capacity = capacity
        return 0

    cdef bint holds(self, int32_t ghost, uint64_t hash) noexcept nogil:
        """Return whether a ghost that a hash once had is still its ghost."""
        return 0 < ghost <= self.num_fresh and self.ghosts[ghost].hash == hash and self.ghosts[ghost].prev >= 0

    cdef int32_t find(self, uint64_t hash) noexcept nogil:
        """Return the ghost of a hash, or 0."""
        cdef Probe probe
        cdef int32_t ghost = index_first(self.buckets, self.num_buckets, hash, &probe)
        while ghost != 0 and self.ghosts[ghost].hash != hash:
            ghost = index_next(self.buckets, self.num_buckets, hash, &probe)
        return ghost

    cdef int32_t push(self, uint64_t hash) noexcept nogil:
        """Append a ghost, or refresh the one with that hash, and return it. If the list is full, drop the oldest."""
        cdef int32_t ghost = self.find(hash)
        if ghost != 0:
            self.refresh(ghost)
            return ghost
        if self.num_ghosts == self.capacity:
            self.drop(self.ghosts[0].next)
        return self.append(hash)

    cdef int32_t append(self, uint64_t hash) noexcept nogil:
        """Append a ghost that is not in the list, and return it; `reserve` has made room."""
        cdef int32_t ghost
        if self.free_head != 0:
            ghost = self.free_head
            self.free_head = self.ghosts[ghost].next
            prefetch(&self.ghosts[self.free_head])  # the next ghost taken: its link is needed first
        else:
            self.num_fresh += 1
            ghost = self.num_fresh
        self.ghosts[ghost].hash = hash
        self.ghosts[ghost].state = 0
        self.ghosts[ghost].used_at = 0
        self._link_last(ghost)
        index_insert(self.buckets, self.num_buckets, hash, ghost)
        self.num_ghosts += 1
        return ghost

    cdef void refresh(self, int32_t ghost) noexcept nogil:
        """Move a ghost to the most-recent end."""
        self._unlink(ghost)
        self._link_last(ghost)

    cdef void drop(self, int32_t ghost) noexcept nogil:
        """Forget a ghost."""
        index_delete(self.buckets, self.num_buckets, self.ghosts[ghost].hash, ghost)
        self._unlink(ghost)
        self.ghosts[ghost].prev = -1
        self.ghosts[ghost].next = self.free_head
        self.free_head = ghost
        self.num_ghosts -= 1

    cdef void clear(self) noexcept nogil:
        """Forget all ghosts."""
        if self.num_fresh == 0:
            # Clearing would return resident pages to the kernel, and the first calls would fault them in again.
            return
        self.ghosts[0].prev = self.ghosts[0].next = 0
        self.num_fresh = self.free_head = 0
        self.num_ghosts = 0
        clear_memory(self.buckets, self.num_buckets * sizeof(Bucket))

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
