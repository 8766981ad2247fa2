# A compiled policy: the hooks that a cache calls, and their contract.
#
# A policy selects the blocks to evict. It has a table of rows, one per block, and is called with batches of rows.
# `rows` are in the order of the keys, the head of the prompt first. Hooks are C loops: they run no Python, allocate
# nothing (`reserve_policy` allocates, before anything changes) and cannot fail. The shortest policy is
# `kvcache/policies/lru.pyx`.
#
# A policy calls the row operations of `kvcache/core/table.pxd`: `enter` a list, `move_to_tail` of a list, `take_victim`
# and `take_oldest` from a list. A row that is referenced or being written keeps its place and is not evicted.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.ghosts cimport GhostList
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport Batch, BlockTable

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
    cdef BlockTable table       # created by the subclass in __cinit__, with its number of lists
    cdef int64_t now_ns         # the time last set by the cache
    cdef bint takes_any         # whether `on_offer` marks the keys that it takes, instead of taking leading ones
    cdef int32_t again_list     # offered rows of this list are offered again, behind the absent keys; -1: none
    cdef Py_ssize_t num_again   # such keys of the call in progress
    cdef bint tracks_uses       # whether requests keep `KeyUse` and the last group of hooks is called

    # Required hooks.

    # Count one use of each key. Process `rows` from last to first, so that the head becomes the most recent. If the key
    # is absent, rows[i] is 0, and hashes[i] may match a ghost.
    cdef void on_use(self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil
    # New rows enter, from first to last. They are PINNED: their blocks are not written yet.
    cdef void on_insert(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # Remove `n` rows from their lists, the least valuable first, and write them to `victims`. The caller has checked
    # that `n` are evictable.
    cdef void select_victims(self, Py_ssize_t n, int32_t* victims) noexcept nogil

    # Optional hooks. The default does what the comment says, or nothing.

    # Order a request: move each row (0: absent), from last to first, to the most-recent end of its list. Counts no use.
    cdef void on_reorder(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # Order new keys behind a request's tail: each row just behind (older than) the row before it, and the first one
    # just behind `tail` (0: evicted). Row i takes the stamp `stamp - i` and keeps its list.
    cdef void on_append(self, const int32_t* rows, Py_ssize_t n, uint64_t stamp, int32_t tail) noexcept nogil
    # Move each row (0: absent), from first to last, to the end of a list that is evicted first: nothing will use it.
    cdef void on_demote(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # A caller hinted, after the use, when keys (row 0: absent) will be used next. `next_use`: see RequestKeys.
    cdef void on_hint(
        self, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n, int32_t next_use) noexcept nogil
    # Failed stores: rows are removed without becoming ghosts. They are no longer in any list.
    cdef void on_remove(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # Clear ghosts and adaptive state. No row is left.
    cdef void on_reset(self) noexcept nogil
    # Allocate all that a call of `n` keys may need, before anything changes.
    cdef int reserve_policy(self, Py_ssize_t n) except -1
    # Raise BlockStateError if an invariant of the policy's own state is broken.
    cdef int check_policy(self) except -1

    # Hooks of a policy that tracks uses. They replace on_use and, for stores, on_insert.

    # Count one use of each key that `request` has just used for the first time: its last `n` used keys.
    cdef void on_request_use(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, Py_ssize_t n) noexcept nogil
    # Return how many rows more than `n` absent keys `on_offer` may evict.
    cdef Py_ssize_t num_more_victims(self, RequestKeys request, Py_ssize_t n) noexcept nogil
    # Return how many leading keys of `n` absent ones, at `places` of `request`, to store. Write the rows to evict to
    # `victims`. The call offered `num_offered` distinct keys, the last one at `last_place`. Such a store is never
    # refused. With `takes_any`, the keys are those whose `KeyUse.is_taken` is set, and the cache clears it.
    cdef Py_ssize_t on_offer(
        self, RequestKeys request, const Py_ssize_t* places, Py_ssize_t n, Py_ssize_t num_offered,
        Py_ssize_t last_place, int32_t* victims, Py_ssize_t* num_victims) noexcept nogil
    # The rows of the stored keys enter.
    cdef void on_admit(
        self, RequestKeys request, const Py_ssize_t* places, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # Stores of `request` (None: unknown) failed. The default calls `on_remove`.
    cdef void on_failure(self, RequestKeys request, const int32_t* rows, Py_ssize_t n) noexcept nogil
    # The request offers no more keys. It may still have stores in progress.
    cdef void on_request_end(self, RequestKeys request) noexcept nogil

    # Called by the drivers of a policy: caches and `PolicyAdapter`.

    cdef int use_keys(self, list keys, Batch batch) except -1
    cdef Py_ssize_t count_uses(self, RequestKeys request, Batch batch, Py_ssize_t n) noexcept nogil
    cdef void choose_victims(self, Py_ssize_t n, int32_t* victims) noexcept nogil
    cdef int check_all(self) except -1
    cdef int check_ghosts(self, GhostList ghosts) except -1     # for `check_policy`
    cdef bint is_check_due(self) noexcept
