# What one thread writes and another reads without a lock: written after all that it stands for, read before it.

from libc.stdint cimport int64_t

cdef extern from *:
    """
    #define kv_load(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
    #define kv_store(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)
    #define kv_add(at, value) __atomic_add_fetch(at, value, __ATOMIC_ACQ_REL)
    """
    size_t load_size "kv_load"(const size_t* at) noexcept nogil
    void store_size "kv_store"(size_t* at, size_t value) noexcept nogil
    int64_t load_int "kv_load"(const int64_t* at) noexcept nogil
    void store_int "kv_store"(int64_t* at, int64_t value) noexcept nogil
    int64_t add_int "kv_add"(int64_t* at, int64_t value) noexcept nogil
