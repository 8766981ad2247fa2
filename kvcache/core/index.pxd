# An open-addressing index from key hash to row, in buckets of one cache line (index.h says how and why).

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from "index.h" nogil:
    ctypedef struct Bucket "kv_bucket":
        uint32_t tag[8]
        int32_t row[8]
    const uint32_t BUCKET_SLOTS "KV_SLOTS"
    const uint32_t BUCKET_FULL "KV_FULL"
    void* zeroed "kv_zeroed"(size_t num_bytes) noexcept
    uint32_t equal "kv_equal"(const void* values, uint32_t x) noexcept
    uint32_t used "kv_used"(const Bucket* bucket) noexcept
    void index_insert "kv_index_insert"(Bucket* buckets, uint32_t mask, uint64_t hash, int32_t row) noexcept
    int32_t index_guess "kv_index_guess"(const Bucket* buckets, uint32_t mask, uint64_t hash) noexcept
    void index_delete "kv_index_delete"(Bucket* buckets, uint32_t mask, uint64_t hash, int32_t row) noexcept

cdef extern from *:
    """
    #define kv_prefetch(address) __builtin_prefetch(address)
    #define kv_lowest_bit(bits) __builtin_ctz(bits)
    static inline int kv_same_bytes(PyObject *a, PyObject *b) {
        return a == b || (PyBytes_GET_SIZE(a) == PyBytes_GET_SIZE(b)
                          && memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), PyBytes_GET_SIZE(a)) == 0);
    }
    """
    void prefetch "kv_prefetch"(const void* address) noexcept nogil
    int lowest_bit "kv_lowest_bit"(uint32_t bits) noexcept nogil
    bint same_bytes "kv_same_bytes"(PyObject* a, PyObject* b) noexcept nogil


cdef inline uint32_t slots_for(Py_ssize_t n) noexcept nogil:
    # At most half full.
    cdef uint32_t size = BUCKET_SLOTS
    while size < 2 * n:
        size <<= 1
    return size
