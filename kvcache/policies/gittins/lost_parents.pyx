"""LostParents: blocks removed by failed stores while resident blocks continued them, by their former rows.

Compiled because each evicted block may search here, inside a C loop over victims.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kvcache.core.index cimport zeroed

from kvcache.block import BlockStateError

cdef enum:
    BLOCKS_PER_BUCKET = 4


@cython.final
cdef class LostParents:
    """LostParents(num_blocks)

    Lost parents by row and generation. Each is kept until the last of its children is evicted.

    Parameters
    ----------
    num_blocks : int
        The policy's capacity. It sets the number of buckets, not the maximum number of entries.
    """

    def __cinit__(self, Py_ssize_t num_blocks):
        self.num_buckets = num_blocks // BLOCKS_PER_BUCKET + 16
        self.buckets = <int32_t*> zeroed(self.num_buckets * sizeof(int32_t))
        if self.buckets == NULL:
            raise MemoryError(f"no memory for {num_blocks} blocks")
        self.clear()

    def __dealloc__(self):
        free(self.parents)
        free(self.buckets)

    def __reduce__(self):
        raise TypeError("lost parents belong to one policy and cannot be pickled")

    cdef int grow(self, int64_t size) except -1:
        """Make room for `size - 1` lost parents."""
        cdef void* block = NULL
        if size < 1 << 31:
            block = realloc(self.parents, size * sizeof(LostParent))
        if block == NULL:
            raise MemoryError(f"no memory for {size} lost parents")
        self.parents = <LostParent*> block
        self.size = <int32_t> size
        return 0

    cdef void clear(self) noexcept nogil:
        if self.num_lost > 0:
            memset(self.buckets, 0, self.num_buckets * sizeof(int32_t))
        self.num_lost = 0
        self.num_fresh = 1
        self.free_head = 0

    cdef void add(self, int32_t row, uint32_t generation, uint64_t hash, uint32_t num_children) noexcept nogil:
        """Add a parent that is being removed; `reserve_lost` has made room."""
        cdef int32_t* bucket = _bucket_of(self, row, generation)
        cdef int32_t at = self.free_head
        if at != 0:
            self.free_head = self.parents[at].next
        else:
            at = self.num_fresh
            self.num_fresh += 1
        self.parents[at].hash = hash
        self.parents[at].row = row
        self.parents[at].generation = generation
        self.parents[at].num_children = num_children
        self.parents[at].next = bucket[0]
        bucket[0] = at
        self.num_lost += 1

    cdef bint take_child(self, int32_t row, uint32_t generation, uint64_t* hash) noexcept nogil:
        """Return whether a parent is lost, and write its hash. Remove one child, and the entry with the last."""
        cdef int32_t* link = _bucket_of(self, row, generation)
        cdef LostParent* lost
        cdef int32_t at
        while link[0] != 0:
            at = link[0]
            lost = &self.parents[at]
            self.num_searched += 1
            if lost.row == row and lost.generation == generation:
                hash[0] = lost.hash
                lost.num_children -= 1
                if lost.num_children == 0:
                    link[0] = lost.next
                    lost.next = self.free_head
                    self.free_head = at
                    self.num_lost -= 1
                return True
            link = &lost.next
        return False

    cdef int check(self) except -1:
        """Raise BlockStateError unless each entry is counted and in its bucket."""
        cdef Py_ssize_t i, num_lost = 0
        cdef int32_t at
        for i in range(self.num_buckets):
            at = self.buckets[i]
            while at != 0:
                num_lost += 1
                if not (self.parents[at].num_children > 0
                        and _bucket_of(self, self.parents[at].row, self.parents[at].generation) == &self.buckets[i]):
                    raise BlockStateError(f"invariant broken: lost parent {at} is in a wrong bucket")
                at = self.parents[at].next
        if num_lost != self.num_lost:
            raise BlockStateError(f"invariant broken: {num_lost} lost parents are linked, {self.num_lost} counted")
        return 0


cdef inline int32_t* _bucket_of(LostParents lost, int32_t row, uint32_t generation) noexcept nogil:
    cdef uint32_t mixed = <uint32_t> row * <uint32_t> 2654435761 ^ generation * <uint32_t> 2246822519
    return &lost.buckets[(<uint64_t> (mixed * <uint32_t> 3266489917) * lost.num_buckets) >> 32]
