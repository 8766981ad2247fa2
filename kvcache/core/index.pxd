# An open-addressing index from key to row: slots of a 32-bit tag and a row, linear probing, no tombstones.
#
# The tag is the hash's low half: its low bits are the home slot, so that a slot can be moved without its key, and the
# others spare most look-ups of keys that are not there a look at a row.

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from *:
    """
    #include <stdlib.h>
    #include <string.h>
    #ifdef __linux__
    #include <sys/mman.h>
    #endif
    /* Zeroed memory that is all there: large arrays are looked up by hash, so that they are aligned for huge pages
       (fewer TLB misses) and written now (a page first touched in a scheduler's call would stall it).
       Freed by free(). */
    static inline void *kv_zeroed(size_t num_bytes) {
        const size_t huge = (size_t)1 << 21;
        void *block = NULL;
        if (num_bytes < huge) {
            return calloc(1, num_bytes ? num_bytes : 1);
        }
        if (posix_memalign(&block, huge, (num_bytes + huge - 1) / huge * huge) != 0) {
            return NULL;
        }
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        madvise(block, (num_bytes + huge - 1) / huge * huge, MADV_HUGEPAGE);
    #endif
        return memset(block, 0, num_bytes);
    }
    #define kv_prefetch(address) __builtin_prefetch(address)
    static inline int kv_same_bytes(PyObject *a, PyObject *b) {
        return a == b || (PyBytes_GET_SIZE(a) == PyBytes_GET_SIZE(b)
                          && memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), PyBytes_GET_SIZE(a)) == 0);
    }
    """
    void* zeroed "kv_zeroed"(size_t num_bytes) noexcept nogil
    void prefetch "kv_prefetch"(const void* address) noexcept nogil
    bint same_bytes "kv_same_bytes"(PyObject* a, PyObject* b) noexcept nogil

cdef struct Slot:
    uint32_t tag
    int32_t row             # 0: empty


cdef inline uint32_t slots_for(Py_ssize_t n) noexcept nogil:
    # At most half full.
    cdef uint32_t size = 8
    while size < 2 * n:
        size <<= 1
    return size


cdef inline void index_insert(Slot* slots, uint32_t mask, uint64_t hash, int32_t row) noexcept nogil:
    cdef uint32_t at = <uint32_t> hash & mask
    while slots[at].row != 0:
        at = (at + 1) & mask
    slots[at].tag = <uint32_t> hash
    slots[at].row = row


cdef inline void index_delete(Slot* slots, uint32_t mask, uint64_t hash, int32_t row) noexcept nogil:
    cdef uint32_t hole = <uint32_t> hash & mask
    cdef uint32_t at
    while slots[hole].row != row:
        hole = (hole + 1) & mask
    at = (hole + 1) & mask
    while slots[at].row != 0:
        # A slot may move back to the hole only if that is not before its home.
        if ((at - slots[at].tag) & mask) >= ((at - hole) & mask):
            slots[hole] = slots[at]
            hole = at
        at = (at + 1) & mask
    slots[hole].row = 0
