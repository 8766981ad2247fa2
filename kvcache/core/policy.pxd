# A compiled policy: the hooks that a cache calls, and their contract. All of it is here.
#
# A policy decides which block leaves. It has a table of rows, one per block, and is called with batches of them: `rows`
# are in the order of the keys, the head of the prompt first. Hooks are C loops: they run no Python, allocate nothing
# (`reserve_policy` does, before anything changes) and cannot fail. `kvcache/policies/lru.pyx` is the shortest policy.
#
# What a policy does with a row (`kvcache/core/table.pxd`): `enter` a list, `move_to_tail` of one, `take_victim` and
# `take_oldest` out of one. A row that is referenced or being written keeps its place in its list and is never taken.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.batch cimport Batch
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport BlockTable

cdef extern from *:
    """
    #ifdef KVCACHE_DEBUG
    #define KV_DEBUG 1
    #else
    #define KV_DEBUG 0
    #endif
    """
    const bint KV_DEBUG

cdef class ReplacementPolicy:
    cdef BlockTable table       # made by the subclass, in __cinit__: it says how many lists there are
    cdef int64_t now_ns         # the time that the cache was last given
    cdef bint tracks_uses       # whether requests keep `KeyUse`, and the hooks of the last group are called

    # Every policy has these three.

    # Count one use of each key: `rows` from last to first, so that the head becomes the most recent. rows[i] is 0 where
    # the key is absent: a ghost perhaps, by its hash.
    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil
    # New rows enter, from first to last. They are PINNED: their blocks are still to be written.
    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # Take up to `n` rows of a priority out of their lists, the least valuable first, write them to `victims` and return
    # how many; called for ascending priorities until there are enough.
    cdef Py_ssize_t select_victims(self, int32_t priority, Py_ssize_t n, int32_t* victims) noexcept nogil

    # A policy may have these; by default they do what is said, or nothing.

    # A request begins: it is about to use its first key. For policies whose clock counts requests.
    cdef void on_request(self) noexcept nogil
    # Order a request: move each row (0: absent), from last to first, to the most-recent end of its own list. No use.
    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # Order keys behind a request's tail: each row just behind (older than) the one before it, the first behind `tail`
    # (0: it has left). Row i takes the stamp `stamp - i` and keeps its list.
    cdef void on_append(self, const int32_t* rows, Py_ssize_t n, uint64_t stamp, int32_t tail) noexcept nogil
    # Somebody said when keys (row 0: absent) will be used next, after they were used: coded as in RequestKeys.
    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use) noexcept nogil
    # Rows leave without being remembered: failed stores. They stand in no list any more.
    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # Forget ghosts and adaptive state; no row is left.
    cdef void on_reset(self) noexcept nogil
    # Make room, before anything changes, for what a call of `n` keys may need.
    cdef int reserve_policy(self, Py_ssize_t n) except -1
    # Follow with arrays of one's own: the table has grown from `num_rows_before` to `table.num_rows`.
    cdef int on_grow(self, int32_t num_rows_before) except -1
    # Raise BlockStateError where the policy's own state does not hold.
    cdef int check_policy(self) except -1

    # A policy that tracks uses has these in place of on_request, on_use and, for stores, on_insert.

    # Count one use each of the keys that `request` has just used for the first time: its last `n` used ones.
    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil
    # Return how many leading ones of `n` absent keys, at `places` of `request`, to take, and write the rows that leave
    # for them to `victims`. `num_offered` different keys were offered, the last of them at `last_place`. Such a store
    # is never refused.
    cdef Py_ssize_t on_offer(
        self, RequestKeys request, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered,
        Py_ssize_t last_place, int32_t* victims, Py_ssize_t* num_victims) noexcept nogil
    # The rows of the keys taken enter.
    cdef void on_admit(
        self, RequestKeys request, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n) noexcept nogil

    # What whoever drives a policy calls.

    cdef int use_keys(self, list keys, Batch batch) except -1
    cdef Py_ssize_t count_uses(self, RequestKeys request, Batch batch, Py_ssize_t n) noexcept nogil
    cdef void choose_victims(self, Py_ssize_t n, int32_t* victims) noexcept nogil
    cdef int check_all(self) except -1
    cdef bint is_check_due(self) noexcept
