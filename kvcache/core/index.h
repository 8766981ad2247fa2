/* From a key to its row: a keyed hash, and an open-addressing index in buckets of one cache line.
 *
 * The low half of a key's hash is its tag. The tag, as a fraction of all buckets, selects the key's home bucket, so the
 * number of buckets is arbitrary. A full bucket overflows into the next one. The used slots of a bucket are at its
 * start. One comparison of all eight slots finds a tag, a row or the first empty slot: the index needs no loop with a
 * mispredicted end, and no tombstones. Because the tag is stored, a slot can be moved without reading its key, and
 * most look-ups of absent keys never read a row.
 */
#ifndef KVCACHE_INDEX_H
#define KVCACHE_INDEX_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#define KV_SLOTS 8
#define KV_FULL 0xffu

typedef struct {
    uint32_t tag[KV_SLOTS];
    int32_t row[KV_SLOTS];      /* 0: empty */
} kv_bucket;

/* A keyed 64-bit hash of a key's bytes. One 64 x 64 -> 128 bit product folds sixteen bytes at a time (as in wyhash).
   A key of 36 bytes takes 4.4 ns; CPython takes 17 ns to hash a new bytes object and 3 ns to return a cached hash. */
static inline uint64_t kv_fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}
static inline uint64_t kv_word(const char *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}
static inline uint64_t kv_half_word(const char *at)
{
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}
static inline uint64_t kv_hash_bytes(const char *at, uint64_t size, const uint64_t *secret)
{
    uint64_t left = size, hash = secret[0] ^ size, low, high = 0;
    for (; left > 16; at += 16, left -= 16)
        hash = kv_fold(kv_word(at) ^ secret[1], kv_word(at + 8) ^ hash);
    if (left >= 8) {
        low = kv_word(at);
        high = kv_word(at + left - 8);
    } else if (left >= 4) {
        low = kv_half_word(at);
        high = kv_half_word(at + left - 4);
    } else {
        low = left == 0 ? 0
            : (uint64_t)(uint8_t)at[0] << 16 | (uint64_t)(uint8_t)at[left >> 1] << 8 | (uint8_t)at[left - 1];
    }
    return kv_fold(kv_fold(low ^ secret[2], high ^ hash) ^ secret[3], size ^ secret[1]);
}

/* Allocate zeroed memory and touch all pages. Large arrays are accessed by hash, so they are aligned for huge pages
   (fewer TLB misses). They are written now because a page fault would stall a scheduler's call. Freed by free(). */
static inline void *kv_zeroed(size_t num_bytes)
{
    const size_t huge = (size_t)1 << 21;
    size_t unit = num_bytes < huge ? sizeof(kv_bucket) : huge;
    size_t size = (num_bytes + unit - 1) / unit * unit;
    void *block = NULL;
    if (posix_memalign(&block, unit, size ? size : unit) != 0)
        return NULL;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (unit == huge)
        madvise(block, size, MADV_HUGEPAGE);
#endif
    return memset(block, 0, size);
}

/* Zero memory from kv_zeroed at once. The kernel takes back the pages of a large block, and later calls fault them in
   one at a time, instead of one call that writes them all. */
static inline void kv_clear(void *block, size_t num_bytes)
{
    const size_t huge = (size_t)1 << 21;
#ifdef __linux__
    if (num_bytes >= huge && madvise(block, (num_bytes + huge - 1) / huge * huge, MADV_DONTNEED) == 0)
        return;
#endif
    memset(block, 0, num_bytes);
}

/* Return a bit mask of the eight values that equal x. */
static inline uint32_t kv_equal(const void *values, uint32_t x)
{
#ifdef __SSE2__
    const __m128i *half = (const __m128i *)values;
    __m128i wanted = _mm_set1_epi32((int32_t)x);
    __m128i low = _mm_cmpeq_epi32(_mm_load_si128(half), wanted);
    __m128i high = _mm_cmpeq_epi32(_mm_load_si128(half + 1), wanted);
    return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(low, high), _mm_setzero_si128()));
#else
    const uint32_t *value = (const uint32_t *)values;
    uint32_t bits = 0;
    for (int i = 0; i < KV_SLOTS; i++)
        bits |= (uint32_t)(value[i] == x) << i;
    return bits;
#endif
}

static inline uint32_t kv_used(const kv_bucket *bucket)
{
    return KV_FULL ^ kv_equal(bucket->row, 0);
}

static inline uint32_t kv_home(uint32_t tag, uint32_t num_buckets)
{
    return (uint32_t)((uint64_t)tag * num_buckets >> 32);
}

static inline uint32_t kv_after(uint32_t at, uint32_t num_buckets)
{
    return at + 1 == num_buckets ? 0 : at + 1;
}

/* Number of steps forward from one bucket to another. */
static inline uint32_t kv_way(uint32_t from, uint32_t to, uint32_t num_buckets)
{
    return to >= from ? to - from : to + num_buckets - from;
}

static inline void kv_index_insert(kv_bucket *buckets, uint32_t num_buckets, uint64_t hash, int32_t row)
{
    uint32_t at = kv_home((uint32_t)hash, num_buckets);
    uint32_t used;
    while ((used = kv_used(&buckets[at])) == KV_FULL)
        at = kv_after(at, num_buckets);
    int slot = __builtin_ctz(~used);
    buckets[at].tag[slot] = (uint32_t)hash;
    buckets[at].row[slot] = row;
}

/* If the home bucket of a hash is full, prefetch the bucket after it, into which it overflows. */
static inline void kv_prefetch_overflow(const kv_bucket *buckets, uint32_t num_buckets, uint64_t hash)
{
    const kv_bucket *home = &buckets[kv_home((uint32_t)hash, num_buckets)];
    __builtin_prefetch(home + (home->row[KV_SLOTS - 1] != 0));
}

/* A walk over the rows whose tag matches a hash. The caller compares hash and key. */
typedef struct {
    uint32_t at;        /* bucket */
    uint32_t same;      /* bit mask of its slots still to visit */
} kv_probe;

/* Return the next such row, or 0. */
static inline int32_t kv_index_next(const kv_bucket *buckets, uint32_t num_buckets, uint64_t hash, kv_probe *probe)
{
    while (probe->same == 0) {
        if (kv_used(&buckets[probe->at]) != KV_FULL)
            return 0;
        probe->at = kv_after(probe->at, num_buckets);
        probe->same = kv_equal(buckets[probe->at].tag, (uint32_t)hash) & kv_used(&buckets[probe->at]);
    }
    int slot = __builtin_ctz(probe->same);
    probe->same &= probe->same - 1;
    return buckets[probe->at].row[slot];
}

static inline int32_t kv_index_first(const kv_bucket *buckets, uint32_t num_buckets, uint64_t hash, kv_probe *probe)
{
    probe->at = kv_home((uint32_t)hash, num_buckets);
    probe->same = kv_equal(buckets[probe->at].tag, (uint32_t)hash) & kv_used(&buckets[probe->at]);
    return kv_index_next(buckets, num_buckets, hash, probe);
}

/* Insert a hash at the end of a walk that did not find it, without a second walk. */
static inline void kv_index_add(kv_bucket *buckets, const kv_probe *probe, uint64_t hash, int32_t row)
{
    int slot = __builtin_ctz(~kv_used(&buckets[probe->at]));
    buckets[probe->at].tag[slot] = (uint32_t)hash;
    buckets[probe->at].row[slot] = row;
}

/* Empty a slot. The bucket's last used slot moves into its place. */
static inline void kv_take_out(kv_bucket *bucket, int slot, uint32_t used)
{
    int last = 31 - __builtin_clz(used);
    bucket->tag[slot] = bucket->tag[last];
    bucket->row[slot] = bucket->row[last];
    bucket->row[last] = 0;
}

/* A slot of a full bucket was freed: move back an entry that overflowed through the bucket. */
static inline void kv_index_refill(kv_bucket *buckets, uint32_t num_buckets, uint32_t hole)
{
    for (uint32_t at = kv_after(hole, num_buckets); at != hole; at = kv_after(at, num_buckets)) {
        uint32_t used = kv_used(&buckets[at]);
        for (int slot = 0; slot < KV_SLOTS && (used >> slot & 1); slot++) {
            uint32_t home = kv_home(buckets[at].tag[slot], num_buckets);
            if (kv_way(home, at, num_buckets) >= kv_way(hole, at, num_buckets)) {
                buckets[hole].tag[KV_SLOTS - 1] = buckets[at].tag[slot];
                buckets[hole].row[KV_SLOTS - 1] = buckets[at].row[slot];
                kv_take_out(&buckets[at], slot, used);
                hole = at;
                break;
            }
        }
        if (used != KV_FULL)
            return;
    }
}

static inline void kv_index_delete(kv_bucket *buckets, uint32_t num_buckets, uint64_t hash, int32_t row)
{
    uint32_t at = kv_home((uint32_t)hash, num_buckets);
    uint32_t same;
    while ((same = kv_equal(buckets[at].row, (uint32_t)row)) == 0)
        at = kv_after(at, num_buckets);
    uint32_t used = kv_used(&buckets[at]);
    kv_take_out(&buckets[at], __builtin_ctz(same), used);
    if (used == KV_FULL)
        kv_index_refill(buckets, num_buckets, at);
}

#endif
