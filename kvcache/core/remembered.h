/* An index from 48 bits of a key's hash to the place of a remembered key, in buckets of one cache line.
 *
 * Built for low memory: ten places per bucket, nine tenths full. A bucket stores 16 bits of each hash; the place stores
 * the other 32, which also select the key's home bucket. If the home is full, the key goes to the next bucket with
 * room. Each bucket that it passed counts it, in one of eight counters selected by three bits of the hash. A search
 * ends at the first bucket whose counter is zero. A key never moves, so a deletion does not visit other keys.
 */
#ifndef KVCACHE_REMEMBERED_H
#define KVCACHE_REMEMBERED_H

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define KV_PLACES 10
#define KV_ALL_PLACES 0x3ffu
#define KV_MOST_PASSED 15u      /* a saturated counter stays at this value */

typedef struct {
    uint16_t tag[KV_PLACES];    /* 0: empty */
    uint32_t num_passed;        /* keys that passed this bucket because it was full: eight counters of four bits */
    int32_t place[KV_PLACES];
} kv_places;

static inline uint32_t kv_low_half(uint64_t hash)
{
    return (uint32_t)hash;
}

static inline uint16_t kv_place_tag(uint64_t hash)
{
    uint16_t tag = (uint16_t)(hash >> 48);
    return tag ? tag : 1;
}

static inline uint32_t kv_next_bucket(uint32_t at, uint32_t num_buckets)
{
    return at + 1 == num_buckets ? 0 : at + 1;
}

static inline uint32_t kv_place_home(uint32_t low, uint32_t num_buckets)
{
    return (uint32_t)((uint64_t)low * num_buckets >> 32);
}

/* Bit offset of the counter for this key. Does not use the bits that decide most about the home. */
static inline int kv_passed_shift(uint32_t low)
{
    return (int)(low & 7) * 4;
}

static inline uint32_t kv_num_passed(const kv_places *bucket, uint32_t low)
{
    return bucket->num_passed >> kv_passed_shift(low) & KV_MOST_PASSED;
}

/* Return a bit mask of the tags in a bucket that equal `tag`. */
static inline uint32_t kv_same_tags(const kv_places *bucket, uint16_t tag)
{
#ifdef __SSE2__
    const __m128i *at = (const __m128i *)bucket;
    __m128i wanted = _mm_set1_epi16((int16_t)tag);
    __m128i low = _mm_cmpeq_epi16(_mm_load_si128(at), wanted);
    __m128i high = _mm_cmpeq_epi16(_mm_load_si128(at + 1), wanted);
    return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high)) & KV_ALL_PLACES;
#else
    uint32_t bits = 0;
    for (int i = 0; i < KV_PLACES; i++)
        bits |= (uint32_t)(bucket->tag[i] == tag) << i;
    return bits;
#endif
}

/* Return the slot that holds a place, or -1. */
static inline int kv_slot_of_place(const kv_places *bucket, int32_t place)
{
#ifdef __SSE2__
    __m128i wanted = _mm_set1_epi32(place);
    __m128i a = _mm_cmpeq_epi32(_mm_loadu_si128((const __m128i *)bucket->place), wanted);
    __m128i b = _mm_cmpeq_epi32(_mm_loadu_si128((const __m128i *)(bucket->place + 4)), wanted);
    __m128i c = _mm_cmpeq_epi32(_mm_loadl_epi64((const __m128i *)(bucket->place + 8)), wanted);
    __m128i all = _mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, c));
    uint32_t bits = (uint32_t)_mm_movemask_epi8(all) & KV_ALL_PLACES;
    return bits ? __builtin_ctz(bits) : -1;
#else
    for (int i = 0; i < KV_PLACES; i++)
        if (bucket->place[i] == place)
            return i;
    return -1;
#endif
}

static inline void kv_places_insert(kv_places *buckets, uint32_t num_buckets, uint64_t hash, int32_t place)
{
    uint32_t low = kv_low_half(hash);
    uint32_t at = kv_place_home(low, num_buckets);
    uint32_t empty;
    while ((empty = kv_same_tags(&buckets[at], 0)) == 0) {
        buckets[at].num_passed += (uint32_t)(kv_num_passed(&buckets[at], low) != KV_MOST_PASSED) << kv_passed_shift(low);
        at = kv_next_bucket(at, num_buckets);
    }
    int slot = __builtin_ctz(empty);
    buckets[at].tag[slot] = kv_place_tag(hash);
    buckets[at].place[slot] = place;
}

/* Update the place of a key that is present. */
static inline void kv_places_move(kv_places *buckets, uint32_t num_buckets, uint32_t low, int32_t from, int32_t to)
{
    uint32_t at = kv_place_home(low, num_buckets);
    int slot;
    while ((slot = kv_slot_of_place(&buckets[at], from)) < 0)
        at = kv_next_bucket(at, num_buckets);
    buckets[at].place[slot] = to;
}

static inline void kv_places_delete(kv_places *buckets, uint32_t num_buckets, uint32_t low, int32_t place)
{
    uint32_t at = kv_place_home(low, num_buckets);
    int slot;
    while ((slot = kv_slot_of_place(&buckets[at], place)) < 0) {
        buckets[at].num_passed -= (uint32_t)(kv_num_passed(&buckets[at], low) != KV_MOST_PASSED) << kv_passed_shift(low);
        at = kv_next_bucket(at, num_buckets);
    }
    buckets[at].tag[slot] = 0;
    buckets[at].place[slot] = 0;
}

#endif
