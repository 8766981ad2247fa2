/* An open-addressing index from key hash to row, in buckets of one cache line.
 *
 * A key's home is the bucket that its tag names, the low half of its hash taken as a fraction of all buckets, so that any
 * number of buckets will do; a full bucket overflows into the next. The used slots
 * of a bucket stand together at its start, so that one comparison of all eight finds a tag, a row or the first empty
 * slot: there is no loop whose end the processor would guess wrongly, and no tombstone. The tag is the hash's low half:
 * a slot can be moved without its key, and most look-ups of keys that are not there never see a row.
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

/* Zeroed memory that is all there: large arrays are looked up by hash, so that they are aligned for huge pages (fewer
   TLB misses) and written now (a page first touched in a scheduler's call would stall it). Freed by free(). */
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

/* Zero memory that kv_zeroed gave, at once: the kernel takes the pages of a large block back, and later calls fault them
   in anew, one at a time, instead of one call that writes them all. */
static inline void kv_clear(void *block, size_t num_bytes)
{
    const size_t huge = (size_t)1 << 21;
#ifdef __linux__
    if (num_bytes >= huge && madvise(block, (num_bytes + huge - 1) / huge * huge, MADV_DONTNEED) == 0)
        return;
#endif
    memset(block, 0, num_bytes);
}

/* Which of eight values equal x: a bit each. */
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

/* Buckets from one to another, going forward. */
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

/* Fetch the bucket behind a hash's home if that one is full, so that what overflowed from it is there when it is wanted. */
static inline void kv_prefetch_overflow(const kv_bucket *buckets, uint32_t num_buckets, uint64_t hash)
{
    const kv_bucket *home = &buckets[kv_home((uint32_t)hash, num_buckets)];
    __builtin_prefetch(home + (home->row[KV_SLOTS - 1] != 0));
}

/* A walk over the rows whose tag is a hash's: the caller compares hash and key. */
typedef struct {
    uint32_t at;        /* bucket */
    uint32_t same;      /* its slots that are still to be seen, a bit each */
} kv_probe;

/* The next such row, or 0. */
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

/* Insert a hash that a walk to its end has not found: there, without a second walk. */
static inline void kv_index_add(kv_bucket *buckets, const kv_probe *probe, uint64_t hash, int32_t row)
{
    int slot = __builtin_ctz(~kv_used(&buckets[probe->at]));
    buckets[probe->at].tag[slot] = (uint32_t)hash;
    buckets[probe->at].row[slot] = row;
}

/* Empty a slot; the bucket's last used one takes its place. */
static inline void kv_take_out(kv_bucket *bucket, int slot, uint32_t used)
{
    int last = 31 - __builtin_clz(used);
    bucket->tag[slot] = bucket->tag[last];
    bucket->row[slot] = bucket->row[last];
    bucket->row[last] = 0;
}

/* A bucket that was full lost a slot: bring back what overflowed through it. */
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
