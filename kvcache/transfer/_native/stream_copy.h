/* Copy bytes that will not be read again soon.
 *
 * The C library streams only copies of many megabytes: below, every line written is first read from memory, and what
 * the cache held is pushed out. Blocks are smaller than that, so a transfer of many of them streams by itself.
 */
#ifndef KVCACHE_STREAM_COPY_H
#define KVCACHE_STREAM_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Reads ahead of the copy, in bytes: far enough to hide memory's latency, near enough to stay within a small run. */
#define KVCACHE_AHEAD 1024

__attribute__((target("avx2")))
static void kvcache_stream_avx2(char *dst, const char *src, size_t n)
{
    size_t head = (size_t)(-(uintptr_t)dst) & 63;
    if (head > n)
        head = n;
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    for (; n >= 256; n -= 256, dst += 256, src += 256) {
        for (int line = 0; line < 256; line += 64)
            _mm_prefetch(src + KVCACHE_AHEAD + line, _MM_HINT_NTA);
        for (int part = 0; part < 256; part += 32)
            _mm256_stream_si256((__m256i *)(dst + part), _mm256_loadu_si256((const __m256i *)(src + part)));
    }
    memcpy(dst, src, n);
}

static void kvcache_stream(char *dst, const char *src, size_t n)
{
    if (__builtin_cpu_supports("avx2"))
        kvcache_stream_avx2(dst, src, n);
    else
        memcpy(dst, src, n);
}

/* Streaming stores are not ordered by locks: this comes before the copy is called done. */
static void kvcache_stream_fence(void)
{
    _mm_sfence();
}

#else

static void kvcache_stream(char *dst, const char *src, size_t n)
{
    memcpy(dst, src, n);
}

static void kvcache_stream_fence(void)
{
}

#endif
#endif
