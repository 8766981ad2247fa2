"""BlockSet: the blocks that one medium holds, and their digest: how many, and the sum of their values.

Compiled because publisher and subscriber look up every block of every event here; the publisher does so without the
GIL, so that no scheduler's call waits for it.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from kvcache.core.index cimport (
    Bucket, Probe, buckets_for, home_of, index_delete, index_first, index_insert, index_next, prefetch, zeroed,
)
from kvcache.core.key_hash cimport hash_of_bytes

cdef extern from *:
    """
    /* Up to eight bytes as a little-endian number. */
    static inline uint64_t kv_little_endian(const uint8_t *at, uint32_t size)
    {
        uint64_t word = 0;
        memcpy(&word, at, size);
    #if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
    #endif
        return word;
    }
    """
    uint64_t little_endian "kv_little_endian"(const uint8_t* at, uint32_t size) noexcept nogil

cdef enum:
    LEAST_CAPACITY = 64
    MAX_CAPACITY = 1 << 30
    AT_ONCE = 32            # keys whose cache misses overlap


def block_value(bytes block_hash not None, group_idx=0):
    """Return what a block adds to the sum of a digest.

    Parameters
    ----------
    block_hash : bytes
        The block.
    group_idx : int
        Its KV-cache group, 0 <= group_idx < 2**32.

    Returns
    -------
    int
        0 <= value < 2**64.

    Notes
    -----
    ``splitmix64`` (Steele, Lea & Flood, OOPSLA '14) folded over the key, the hash and then the group index as 4 bytes,
    big-endian, in little-endian words of 8 bytes, the last one filled up with zeros; the key's length comes first.
    """
    cdef bytes data = block_hash + group_bytes(group_idx)
    return value_of(<const uint8_t*> PyBytes_AS_STRING(data), <uint32_t> PyBytes_GET_SIZE(data))


@cython.final
cdef class BlockSet:
    """BlockSet()

    A set of blocks with a digest that does not depend on the order in which they came.

    Attributes
    ----------
    sum : int
        Of the blocks' values, modulo 2**64.
    """

    def __dealloc__(self):
        self.empty()

    def __reduce__(self):
        raise TypeError("a set of blocks belongs to one view and cannot be pickled")

    def __len__(self):
        return self.num_blocks

    @cython.critical_section
    def add(self, list hashes not None, group_idx=0):
        """Add blocks, or none where one hash is no bytes; one that is held already changes nothing."""
        self._change_hashes(hashes, group_idx, False)

    @cython.critical_section
    def discard(self, list hashes not None, group_idx=0):
        """Take blocks out; those that are not held change nothing."""
        self._change_hashes(hashes, group_idx, True)

    @cython.critical_section
    def clear(self):
        """Take all blocks out, and give the memory back."""
        self.empty()

    @cython.critical_section
    def holds(self, bytes block_hash not None, group_idx=0):
        """Return whether a block is held."""
        cdef bytes data = block_hash + group_bytes(group_idx)
        cdef Key key = Key(<const uint8_t*> PyBytes_AS_STRING(data), <uint32_t> PyBytes_GET_SIZE(data))
        return self._find(&key, hash_of_bytes(key.data, key.size)) != 0

    @cython.critical_section
    def blocks_held(self):
        """Return the blocks as a frozenset of (block hash, group index)."""
        cdef Key key
        cdef int32_t at
        found = []
        for at in range(1, self.num_fresh + 1):
            if self.blocks[at].size:
                key = Key(key_of(&self.blocks[at]), self.blocks[at].size)
                found.append((hash_bytes(&key), group_of(&key)))
        return frozenset(found)

    cdef int change(self, const Key* keys, Py_ssize_t n, bint removed) noexcept nogil:
        """Add blocks or take them out, in order; -1 where there is no memory for one, which ends it there."""
        cdef uint64_t[AT_ONCE] hashes
        cdef Probe probe
        cdef Py_ssize_t start = 0, i, m
        cdef int32_t at
        while start < n:
            m = min(<Py_ssize_t> AT_ONCE, n - start)
            for i in range(m):
                hashes[i] = hash_of_bytes(keys[start + i].data, keys[start + i].size)
                if self.capacity:
                    prefetch(&self.buckets[home_of(<uint32_t> hashes[i], self.num_buckets)])
            if removed and self.capacity:
                for i in range(m):
                    prefetch(&self.blocks[index_first(self.buckets, self.num_buckets, hashes[i], &probe)])
            for i in range(m):
                at = self._find(&keys[start + i], hashes[i])
                if removed:
                    if at != 0:
                        self._drop(at)
                elif at == 0 and self._add(&keys[start + i], hashes[i]) < 0:
                    return -1
            start += m
        return 0

    cdef Py_ssize_t find_hashes(
        self, const uint8_t* hashes, Py_ssize_t n, size_t max_bytes, int32_t* found, Key* keys, Py_ssize_t* num_found,
    ) noexcept nogil:
        """Look blocks up by their keys' hashes, 8 bytes each, not aligned, until their keys have `max_bytes`.

        `found` takes the `num_found` blocks that are held, and `keys` their keys, which lie here until something
        changes. Two keys of one hash are taken for one another: one pair in 2**64. Return how many hashes were read.
        """
        cdef uint64_t hash
        cdef Probe probe
        cdef Py_ssize_t i, count = 0
        cdef size_t num_bytes = 0
        cdef int32_t at
        num_found[0] = 0
        if self.capacity == 0:
            return n
        for i in range(min(n, <Py_ssize_t> AT_ONCE)):
            prefetch(&self.buckets[home_of(<uint32_t> hash_at(hashes, i), self.num_buckets)])
        for i in range(n):
            if num_bytes >= max_bytes:
                num_found[0] = count
                return i
            if i + AT_ONCE < n:
                prefetch(&self.buckets[home_of(<uint32_t> hash_at(hashes, i + AT_ONCE), self.num_buckets)])
            hash = hash_at(hashes, i)
            at = index_first(self.buckets, self.num_buckets, hash, &probe)
            while at != 0 and self.blocks[at].hash != hash:
                at = index_next(self.buckets, self.num_buckets, hash, &probe)
            if at == 0:
                continue
            found[count] = at
            keys[count] = Key(key_of(&self.blocks[at]), self.blocks[at].size)
            num_bytes += keys[count].size
            count += 1
        num_found[0] = count
        return n

    cdef void drop_found(self, const int32_t* found, Py_ssize_t n) noexcept nogil:
        """Take blocks out that `find_hashes` has found, but for one that it found twice."""
        cdef Py_ssize_t i
        for i in range(n):
            if self.blocks[found[i]].size:
                self._drop(found[i])

    cdef void empty(self) noexcept nogil:
        """Take all blocks out, and give the memory back."""
        cdef int32_t at
        for at in range(1, self.num_fresh + 1):
            if self.blocks[at].size > INLINE_BYTES:
                free(key_of(&self.blocks[at]))
        free(self.blocks)
        free(self.buckets)
        self.blocks = NULL
        self.buckets = NULL
        self.num_buckets = self.capacity = self.num_fresh = self.free_head = 0
        self.num_blocks = 0
        self.sum = 0

    cdef Key* copy_keys(self) noexcept nogil:
        """Return a copy of all keys, `num_blocks` of them, with their bytes behind them; NULL: no memory. Free it."""
        cdef Py_ssize_t num_bytes = self.num_blocks * sizeof(Key) + 1, i = 0
        cdef int32_t at
        cdef Key* keys
        cdef uint8_t* end
        for at in range(1, self.num_fresh + 1):
            num_bytes += self.blocks[at].size
        keys = <Key*> malloc(num_bytes)
        if keys == NULL:
            return NULL
        end = <uint8_t*> &keys[self.num_blocks]
        for at in range(1, self.num_fresh + 1):
            if self.blocks[at].size:
                keys[i] = Key(end, self.blocks[at].size)
                memcpy(end, key_of(&self.blocks[at]), self.blocks[at].size)
                end += self.blocks[at].size
                i += 1
        return keys

    cdef int32_t _find(self, const Key* key, uint64_t hash) noexcept nogil:
        """Return a key's block, or 0."""
        cdef Probe probe
        cdef int32_t at
        if self.capacity == 0:
            return 0
        at = index_first(self.buckets, self.num_buckets, hash, &probe)
        while at != 0:
            if (self.blocks[at].hash == hash and self.blocks[at].size == key.size
                    and memcmp(key_of(&self.blocks[at]), key.data, key.size) == 0):
                return at
            at = index_next(self.buckets, self.num_buckets, hash, &probe)
        return 0

    cdef int _add(self, const Key* key, uint64_t hash) noexcept nogil:
        """Add a key that is not held; -1: no memory, and nothing has changed."""
        cdef uint8_t* apart = NULL
        cdef Block* block
        cdef int32_t at
        if self.free_head == 0 and self.num_fresh == self.capacity and self._grow() < 0:
            return -1
        if key.size > INLINE_BYTES:
            apart = <uint8_t*> malloc(key.size)
            if apart == NULL:
                return -1
        at = self.free_head
        if at != 0:
            self.free_head = <int32_t> self.blocks[at].hash
        else:
            self.num_fresh += 1
            at = self.num_fresh
        block = &self.blocks[at]
        block.hash = hash
        block.size = key.size
        block.value = value_of(key.data, key.size)
        if apart != NULL:
            memcpy(block.key, &apart, sizeof(apart))
        memcpy(key_of(block), key.data, key.size)
        index_insert(self.buckets, self.num_buckets, hash, at)
        self.num_blocks += 1
        self.sum += block.value
        return 0

    cdef void _drop(self, int32_t at) noexcept nogil:
        """Take a block out."""
        cdef Block* block = &self.blocks[at]
        index_delete(self.buckets, self.num_buckets, block.hash, at)
        if block.size > INLINE_BYTES:
            free(key_of(block))
        self.num_blocks -= 1
        self.sum -= block.value
        block.size = 0
        block.hash = self.free_head
        self.free_head = at

    cdef int _grow(self) noexcept nogil:
        """Double the room; every block is in use. -1: no memory, and nothing has changed."""
        cdef int32_t capacity = max(<int32_t> LEAST_CAPACITY, 2 * self.capacity), at
        cdef uint32_t num_buckets = buckets_for(capacity)
        cdef Block* blocks
        cdef Bucket* buckets
        if capacity > MAX_CAPACITY:
            return -1
        blocks = <Block*> zeroed((1 + <size_t> capacity) * sizeof(Block))
        buckets = <Bucket*> zeroed(num_buckets * sizeof(Bucket))
        if blocks == NULL or buckets == NULL:
            free(blocks)
            free(buckets)
            return -1
        if self.capacity:
            memcpy(blocks, self.blocks, (1 + <size_t> self.capacity) * sizeof(Block))
        for at in range(1, self.capacity + 1):
            index_insert(buckets, num_buckets, blocks[at].hash, at)
        free(self.blocks)
        free(self.buckets)
        self.blocks, self.buckets = blocks, buckets
        self.capacity, self.num_buckets = capacity, num_buckets
        return 0

    cdef _change_hashes(self, list hashes, group_idx, bint removed):
        cdef bytes group = group_bytes(group_idx)
        cdef list datas = []
        cdef Py_ssize_t i
        cdef Key* keys
        for block_hash in hashes:
            if not isinstance(block_hash, bytes):
                raise ValueError(f"a block hash must be bytes, got {block_hash!r}")
            datas.append(<bytes> block_hash + group)
        keys = <Key*> malloc((len(datas) + 1) * sizeof(Key))
        if keys == NULL:
            raise MemoryError(f"no memory for {len(datas)} keys")
        for i in range(len(datas)):
            keys[i].data = <const uint8_t*> PyBytes_AS_STRING(datas[i])
            keys[i].size = <uint32_t> PyBytes_GET_SIZE(datas[i])
        outcome = self.change(keys, len(datas), removed)
        free(keys)
        if outcome < 0:
            raise MemoryError(f"no memory for {len(datas)} blocks beside {self.num_blocks}")


cdef inline uint64_t hash_at(const uint8_t* hashes, Py_ssize_t i) noexcept nogil:
    cdef uint64_t hash
    memcpy(&hash, hashes + i * sizeof(uint64_t), sizeof(uint64_t))
    return hash


cdef inline uint8_t* key_of(const Block* block) noexcept nogil:
    cdef uint8_t* apart
    if block.size <= INLINE_BYTES:
        return <uint8_t*> block.key
    memcpy(&apart, block.key, sizeof(apart))
    return apart


cdef bytes hash_bytes(const Key* key):
    """Return the block hash in a key."""
    return PyBytes_FromStringAndSize(<const char*> key.data, key.size - GROUP_BYTES)


cdef uint32_t group_of(const Key* key) noexcept nogil:
    """Return the group index in a key."""
    cdef const uint8_t* at = key.data + key.size - GROUP_BYTES
    return <uint32_t> at[0] << 24 | <uint32_t> at[1] << 16 | <uint32_t> at[2] << 8 | at[3]


cdef bytes group_bytes(group_idx):
    if not isinstance(group_idx, int) or not 0 <= group_idx < 1 << 32:
        raise ValueError(f"group_idx must be an int in 0..2**32-1, got {group_idx!r}")
    return group_idx.to_bytes(GROUP_BYTES, "big")


cdef uint64_t mix(uint64_t state) noexcept nogil:
    """splitmix64."""
    state += <uint64_t> 0x9E3779B97F4A7C15
    state = (state ^ state >> 30) * <uint64_t> 0xBF58476D1CE4E5B9
    state = (state ^ state >> 27) * <uint64_t> 0x94D049BB133111EB
    return state ^ state >> 31


cdef uint64_t value_of(const uint8_t* data, uint32_t size) noexcept nogil:
    cdef uint64_t value = mix(size)
    while size >= 8:
        value = mix(value ^ little_endian(data, 8))
        data += 8
        size -= 8
    return mix(value ^ little_endian(data, size)) if size else value
