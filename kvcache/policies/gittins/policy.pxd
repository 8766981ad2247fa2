cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcache.core.eviction_queue cimport Row
from kvcache.core.ghosts cimport GhostList
from kvcache.core.policy_adapter cimport PolicyAdapter
from kvcache.core.request_keys cimport RequestKeys
from kvcache.policies.gittins.groups cimport MOST_GROUPS, AgedGroups, Queue
from kvcache.policies.gittins.values cimport CLASSES_PER_HINT, ValueTable

cdef enum:
    QUEUED_SHARE = 20           # above a tier, one in so many blocks may be queued, or pass

cdef enum:
    SHARING_SHIFT = 27          # bit offset in a label; MOST_GROUPS = 1 << SHARING_SHIFT

cdef enum:
    # The lists of the table.
    GROUPED = 0
    QUEUED = 1                  # blocks that leave first, oldest first
    WINDOWED = 2                # with several KV-cache groups: needed blocks of groups with a window
    PASSING = 3                 # above a tier, with several groups: blocks that the rule does not count as resident
    NUM_LISTS = 4

# A group that a request has made, and its serial then. Another serial: the group was freed.
cdef struct MadeGroup:
    int32_t group           # 0: none
    uint32_t serial

# State of a request, in the memory that RequestKeys keeps for a policy.
cdef struct RequestState:
    uint64_t era            # of the policy when the request was first seen; another one: the policy was reset
    int32_t num_leading     # leading known keys
    bint continues          # it continues an older request
    bint all_known          # all its keys so far were known
    MadeGroup[CLASSES_PER_HINT] groups      # by class without the hint

# Neighbouring keys mostly leave the same group and join the same group: such a run is counted at its end.
cdef struct Leaving:
    int32_t group           # 0: none
    int32_t num_keys
    int32_t num_shared      # widely shared keys among them

cdef struct Joining:
    int32_t group           # 0: none
    int32_t num_keys
    int32_t cls

# State of a known key: its group, and in the upper four bits its sharing. Sharing is the rounded logarithm of the
# number of new sessions (requests that continue no older one) that used the key. Zero in an array of labels: no label.
ctypedef int32_t Label

# A resident key, by its row. The table keeps no queues for this policy. `prev` and `next` of a row link the resident
# members of a group in path order, and its stamp holds a Place.
cdef struct Member:
    uint32_t kids           # resident keys with this parent
    uint32_t parent_tag     # lower half of its hash

cdef struct Place:
    Label label
    int32_t parent          # row when the key was stored, 0: none


cdef inline int32_t group_in(Label label) noexcept nogil:
    return label & (MOST_GROUPS - 1)


cdef inline int sharing_in(Label label) noexcept nogil:
    return label >> SHARING_SHIFT


cdef inline void push(Row* rows, Queue* queue, int32_t row) noexcept nogil:
    # Link a row behind the last one of a queue.
    rows[row].prev = queue.last
    rows[row].next = 0
    if queue.last != 0:
        rows[queue.last].next = row
    else:
        queue.first = row
    queue.last = row


cdef inline void pull(Row* rows, Queue* queue, int32_t row) noexcept nogil:
    # Unlink a row from a queue.
    cdef int32_t prev = rows[row].prev
    cdef int32_t next = rows[row].next
    if prev != 0:
        rows[prev].next = next
    else:
        queue.first = next
    if next != 0:
        rows[next].prev = prev
    else:
        queue.last = prev


cdef class GittinsCachePolicy(PolicyAdapter):
    cdef Member* members                # [num_rows]
    cdef ValueTable values
    cdef AgedGroups aged                # the groups of all known keys
    cdef GhostList memory               # remembered keys, each with its label
    cdef int32_t* found                 # [call_size]: remembered keys of one call
    cdef Py_ssize_t call_size
    cdef int64_t start_ms
    cdef uint64_t era
    cdef public bint stores_all
    cdef Py_ssize_t memory_size       # remembered keys
    cdef Queue queue                  # rows of the keys that leave first, oldest first
    cdef Py_ssize_t num_grouped         # the first `num_grouped` keys that `on_offer` accepted enter their groups
    cdef readonly uint64_t touches
    cdef readonly uint64_t num_passed           # groups skipped because of a protected tail, since the start

    # Final methods are called directly within `policy.pyx`, and are inlined there.
    @cython.final
    cdef void _trim(self) noexcept nogil
    @cython.final
    cdef int32_t _remember(self, uint64_t hash, Label label) noexcept nogil
    @cython.final
    cdef Label _forget(self, int32_t ghost) noexcept nogil
    @cython.final
    cdef Place* _place_of(self, int32_t row) noexcept nogil
    @cython.final
    cdef void _append(self, Label label, int32_t row, int32_t list_idx) noexcept nogil
    @cython.final
    cdef void _unlink(self, int32_t row) noexcept nogil
    @cython.final
    cdef Label _label_of(self, int32_t row, int32_t ghost) noexcept nogil
    @cython.final
    cdef int32_t _join_group(self, MadeGroup* made, int32_t cls, int32_t length) noexcept nogil
    @cython.final
    cdef void _use_keys(
        self, RequestKeys request, const int32_t* rows, const uint64_t* hashes, const int32_t* places, Py_ssize_t n,
        int32_t length) noexcept nogil
    @cython.final
    cdef void _join(self, Joining* joining, MadeGroup* made, int32_t cls, int32_t length) noexcept nogil
    @cython.final
    cdef void _take_up_hint(self, int32_t hint) noexcept nogil
    @cython.final
    cdef bint _is_last(self, RequestKeys request, int32_t place, bint is_last_of_call) noexcept nogil
    @cython.final
    cdef int32_t _ghost_of(self, RequestKeys names, Py_ssize_t place) noexcept nogil
    @cython.final
    cdef void _remember_rows(self, const int32_t* rows, Py_ssize_t n) noexcept nogil
    @cython.final
    cdef bint _may_leave(self, RequestKeys names, int32_t row, bint is_whole) noexcept nogil
    @cython.final
    cdef int32_t _leave_parent(self, int32_t row) noexcept nogil
    @cython.final
    cdef int32_t _parent_of(self, int32_t row) noexcept nogil
    @cython.final
    cdef void _set_parent(self, int32_t row, int32_t parent) noexcept nogil
    cdef Py_ssize_t _check_unlisted(self, dict known, dict kids) except -1
