# From a key to its row: a keyed hash, and an open-addressing index. index.h explains the design.

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from "index.h" nogil:
    ctypedef struct Bucket "kv_bucket":
        uint32_t tag[8]
        int32_t row[8]
    ctypedef struct Probe "kv_probe":
        pass
    const uint32_t BUCKET_SLOTS "KV_SLOTS"
    void* zeroed "kv_zeroed"(size_t num_bytes) noexcept
    void clear "kv_clear"(void* block, size_t num_bytes) noexcept
    uint32_t used "kv_used"(const Bucket* bucket) noexcept
    uint32_t home_of "kv_home"(uint32_t tag, uint32_t num_buckets) noexcept
    void prefetch_overflow "kv_prefetch_overflow"(
        const Bucket* buckets, uint32_t num_buckets, uint64_t hash) noexcept
    void index_insert "kv_index_insert"(Bucket* buckets, uint32_t num_buckets, uint64_t hash, int32_t row) noexcept
    int32_t index_first "kv_index_first"(
        const Bucket* buckets, uint32_t num_buckets, uint64_t hash, Probe* probe) noexcept
    int32_t index_next "kv_index_next"(
        const Bucket* buckets, uint32_t num_buckets, uint64_t hash, Probe* probe) noexcept
    uint64_t kv_hash_bytes(const char* at, uint64_t size, const uint64_t* secret) noexcept
    void index_add "kv_index_add"(Bucket* buckets, const Probe* probe, uint64_t hash, int32_t row) noexcept
    void index_delete "kv_index_delete"(Bucket* buckets, uint32_t num_buckets, uint64_t hash, int32_t row) noexcept

cdef extern from *:
    """
    /* The number of bits of x; 0 for 0. */
    static inline int kv_bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }
    #define kv_prefetch(address) __builtin_prefetch(address)
    static inline int kv_same_bytes(PyObject *a, PyObject *b) {
        return a == b || (PyBytes_GET_SIZE(a) == PyBytes_GET_SIZE(b)
                          && memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), PyBytes_GET_SIZE(a)) == 0);
    }
    static inline uint64_t kv_hash(PyObject *key, const uint64_t *secret) {
        return kv_hash_bytes(PyBytes_AS_STRING(key), (uint64_t)PyBytes_GET_SIZE(key), secret);
    }
    """
    int bit_length "kv_bit_length"(uint64_t x) noexcept nogil
    void prefetch "kv_prefetch"(const void* address) noexcept nogil
    bint same_bytes "kv_same_bytes"(PyObject* a, PyObject* b) noexcept nogil
    uint64_t kv_hash(PyObject* key, const uint64_t* secret) noexcept nogil

cdef uint64_t[4] secret


cdef inline uint64_t hash_of(PyObject* key) noexcept nogil:
    return kv_hash(key, secret)


cdef inline uint64_t hash_of_bytes(const char* at, Py_ssize_t size) noexcept nogil:
    return kv_hash_bytes(at, size, secret)


cdef inline uint32_t buckets_for(Py_ssize_t n) noexcept nogil:
    # At most half full: one look-up in seventeen reads a second bucket.
    return <uint32_t> (n // (BUCKET_SLOTS // 2)) + 1


cdef inline uint32_t tight_buckets_for(Py_ssize_t n) noexcept nogil:
    # At most five sixths full, to save memory: every other look-up reads a second bucket.
    return <uint32_t> (6 * n // (5 * BUCKET_SLOTS)) + 1
