"""From keys to a message's bytes: events and digest in msgpack, byte for byte what msgspec makes of `wire`'s structs.

Compiled because it copies every key once more, and does so without the GIL.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy, strlen

from kvcache.exporters.kv_events.block_set cimport GROUP_BYTES, Key, group_of
from kvcache.exporters.kv_events.queue cimport CLEARED, CPU, NUM_MEDIA, STORED, EventKind, Medium

cdef enum:
    EVENT_BYTES = 256       # of an event, but for its hashes, at most
    BIN_BYTES = 5           # before a hash, at most
    HEAD_BYTES = 15         # before a batch's events, at most
    UINT_BYTES = 9          # at most

# What lies between an event's values: map headers, and names with their length.
cdef const char* STORED_HEAD = b"\x8a\xa4type\xabBlockStored\xacblock_hashes"
cdef const char* STORED_SIZE = b"\xb1parent_block_hash\xc0\xa9token_ids\x90\xaablock_size"
cdef const char* STORED_MEDIUM = b"\xa7lora_id\xc0\xa6medium"
cdef const char* STORED_GROUP = b"\xa9lora_name\xc0\xa9group_idx"
cdef const char* REMOVED_HEAD = b"\x85\xa4type\xacBlockRemoved\xacblock_hashes"
cdef const char* REMOVED_MEDIUM = b"\xa6medium"
cdef const char* REMOVED_GROUP = b"\xa9group_idx"
cdef const char* LOCALITY = b"\xa8locality\xa5LOCAL"
cdef const char* CLEARED_EVENT = b"\x81\xa4type\xb0AllBlocksCleared"
cdef const char* DIGEST_SEQ = b"\x83\xa3seq"
cdef const char* DIGEST_DIGESTS = b"\xa7digests"
cdef const char* DIGEST_EPOCH = b"\xa5epoch"
cdef const char* MEDIUM_CPU = b"\xa3CPU"
cdef const char* MEDIUM_STORAGE = b"\xa7STORAGE"


cdef Py_ssize_t encode_event(
    Buffer* out, EventKind kind, Medium medium, uint64_t block_size, const Key* keys, Py_ssize_t n,
) noexcept nogil:
    """Append an event, or one for each group among the keys; return how many, or -1 where there is no memory."""
    cdef Py_ssize_t num_events = 0, start = 0, end, i
    cdef uint64_t* order
    if kind == CLEARED:
        if reserve(out, EVENT_BYTES) < 0:
            return -1
        out.size = text(out.data + out.size, CLEARED_EVENT) - out.data
        return 1
    if n == 0:
        return 0
    if are_of_one_group(keys, n):
        return 1 if encode_group(out, kind, medium, block_size, keys, NULL, n) == 0 else -1
    order = <uint64_t*> malloc(n * sizeof(uint64_t))
    if order == NULL:
        return -1
    for i in range(n):
        order[i] = <uint64_t> group_of(&keys[i]) << 32 | <uint32_t> i
    qsort(order, n, sizeof(uint64_t), compare)
    while start < n:
        end = start + 1
        while end < n and order[end] >> 32 == order[start] >> 32:
            end += 1
        if encode_group(out, kind, medium, block_size, keys, order + start, end - start) < 0:
            num_events = -1
            break
        num_events += 1
        start = end
    free(order)
    return num_events


cdef int encode_group(
    Buffer* out, EventKind kind, Medium medium, uint64_t block_size, const Key* keys, const uint64_t* order,
    Py_ssize_t n,
) noexcept nogil:
    """Append one event of keys of one group: those that `order` names in its low halves, or the first `n`."""
    cdef size_t num_bytes = EVENT_BYTES
    cdef const Key* key = keys
    cdef uint8_t* at
    cdef uint32_t size
    cdef Py_ssize_t i
    for i in range(n):
        num_bytes += keys[i if order == NULL else <uint32_t> order[i]].size + BIN_BYTES
    if reserve(out, num_bytes) < 0:
        return -1
    at = text(out.data + out.size, STORED_HEAD if kind == STORED else REMOVED_HEAD)
    at = array(at, n)
    for i in range(n):
        key = &keys[i if order == NULL else <uint32_t> order[i]]
        size = key.size - GROUP_BYTES
        at = bin_head(at, size)
        memcpy(at, key.data, size)
        at += size
    if kind == STORED:
        at = uint(text(at, STORED_SIZE), block_size)
    at = text(text(at, STORED_MEDIUM if kind == STORED else REMOVED_MEDIUM), name_of(medium))
    at = uint(text(at, STORED_GROUP if kind == STORED else REMOVED_GROUP), group_of(key))
    out.size = text(at, LOCALITY) - out.data
    return 0


cdef int start_batch(Buffer* out) noexcept nogil:
    """Begin a batch: its events are appended next. -1: no memory."""
    out.size = 0
    if reserve(out, HEAD_BYTES) < 0:
        return -1
    out.size = HEAD_BYTES
    return 0


cdef int finish_batch(Buffer* out, double ts, Py_ssize_t num_events, uint64_t rank) noexcept nogil:
    """Write what comes before and behind a batch's events; -1: no memory."""
    cdef uint8_t[HEAD_BYTES] head
    cdef uint64_t bits
    cdef size_t size
    if reserve(out, UINT_BYTES) < 0:
        return -1
    memcpy(&bits, &ts, sizeof(bits))
    head[0] = 0x93
    size = array(number(head + 1, 0xCB, bits, 8), num_events) - head
    out.start = HEAD_BYTES - size
    memcpy(out.data + out.start, head, size)
    out.size = uint(out.data + out.size, rank) - out.data
    return 0


cdef size_t encode_digest(uint8_t* out, uint64_t seq, const MediumDigest* digests, uint64_t epoch) noexcept nogil:
    """Write a digest's message; return its size."""
    cdef uint8_t* at = text(uint(text(out, DIGEST_SEQ), seq), DIGEST_DIGESTS)
    cdef int medium, num_held = 0
    for medium in range(<int> NUM_MEDIA):
        num_held += digests[medium].num_blocks != 0
    at[0] = <uint8_t> (0x80 | num_held)
    at += 1
    for medium in range(<int> NUM_MEDIA):
        if digests[medium].num_blocks:
            at = text(at, name_of(medium))
            at = uint(uint(array(at, 2), digests[medium].num_blocks), digests[medium].sum)
    return uint(text(at, DIGEST_EPOCH), epoch) - out


cdef void put_seq(uint8_t* out, uint64_t seq) noexcept nogil:
    """Write a number as 8 bytes, big-endian."""
    put_big_endian(out, seq, 8)


cdef const char* name_of(int medium) noexcept nogil:
    return MEDIUM_CPU if medium == CPU else MEDIUM_STORAGE


cdef int compare(const void* a, const void* b) noexcept nogil:
    cdef uint64_t x = (<const uint64_t*> a)[0], y = (<const uint64_t*> b)[0]
    return (x > y) - (x < y)


cdef bint are_of_one_group(const Key* keys, Py_ssize_t n) noexcept nogil:
    cdef const uint8_t* group = keys[0].data + keys[0].size - GROUP_BYTES
    cdef Py_ssize_t i
    for i in range(1, n):
        if memcmp(keys[i].data + keys[i].size - GROUP_BYTES, group, GROUP_BYTES) != 0:
            return False
    return True


cdef int reserve(Buffer* out, size_t size) noexcept nogil:
    """Make room for `size` bytes more; -1: no memory, and nothing has changed."""
    cdef size_t capacity = max(2 * out.capacity, out.size + size)
    cdef uint8_t* data
    if size <= out.capacity - out.size:
        return 0
    data = <uint8_t*> realloc(out.data, capacity)
    if data == NULL:
        return -1
    out.data, out.capacity = data, capacity
    return 0


cdef inline void put_big_endian(uint8_t* out, uint64_t value, int size) noexcept nogil:
    cdef int i
    for i in range(size):
        out[i] = <uint8_t> (value >> 8 * (size - 1 - i))


cdef inline uint8_t* text(uint8_t* out, const char* constant) noexcept nogil:
    cdef size_t size = strlen(constant)
    memcpy(out, constant, size)
    return out + size


cdef inline uint8_t* number(uint8_t* out, uint8_t tag, uint64_t value, int size) noexcept nogil:
    out[0] = tag
    put_big_endian(out + 1, value, size)
    return out + 1 + size


cdef uint8_t* uint(uint8_t* out, uint64_t value) noexcept nogil:
    if value < 1 << 7:
        out[0] = <uint8_t> value
        return out + 1
    if value < 1 << 8:
        return number(out, 0xCC, value, 1)
    if value < 1 << 16:
        return number(out, 0xCD, value, 2)
    return number(out, 0xCE, value, 4) if value < <uint64_t> 1 << 32 else number(out, 0xCF, value, 8)


cdef uint8_t* array(uint8_t* out, uint64_t n) noexcept nogil:
    if n < 16:
        out[0] = <uint8_t> (0x90 | n)
        return out + 1
    return number(out, 0xDC, n, 2) if n < 1 << 16 else number(out, 0xDD, n, 4)


cdef inline uint8_t* bin_head(uint8_t* out, uint32_t size) noexcept nogil:
    if size < 1 << 8:
        return number(out, 0xC4, size, 1)
    return number(out, 0xC5, size, 2) if size < 1 << 16 else number(out, 0xC6, size, 4)
