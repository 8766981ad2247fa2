cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache.core.table cimport BlockTable
from kvcache.policies.gittins.values cimport NUM_BINS, NUM_CELLS, NUM_CLASSES, ValueTable

cdef enum:
    MOST_GROUPS = 1 << 27
    GROUPS_PER_CALL = 16        # limit of groups that one call creates
    NUM_WORDS = (NUM_CELLS + 63) // 64

cdef extern from *:
    """
    #define kv_lowest_bit(bits) __builtin_ctzll(bits)
    """
    int lowest_bit "kv_lowest_bit"(uint64_t bits) noexcept nogil

cdef enum:
    ALL = 0
    HOLDERS = 1                 # groups with resident members
    NUM_QUEUES = 2

cdef struct Queue:
    int32_t first
    int32_t last

# Known keys with the same request as last use and the same class.
cdef struct Group:
    int32_t length          # keys of the request
    int32_t num_known       # 0: free
    int32_t cohort
    int32_t[NUM_QUEUES] prev    # in the cohort's queues; free: the next free one
    int32_t[NUM_QUEUES] next
    int32_t tail            # last resident member in path order, 0: none; maintained by the policy
    uint32_t serial         # incremented when the group is freed
    uint32_t number         # order of creation

# Groups of a class that were created in the same tick, in order of creation. They age together. The cohorts of a class
# are created, age and are linked in one order. So a cell is a section of its class, and its queues are ordered by age.
cdef struct Cohort:
    int32_t t0
    int32_t num_groups      # 0: free
    int32_t num_known       # known keys of all its groups
    Queue[NUM_QUEUES] groups
    int32_t[NUM_QUEUES] prev    # in the class's queue, and in the cell's HOLDERS queue; if free: the next free one
    int32_t[NUM_QUEUES] next
    uint8_t cls
    uint8_t bin


@cython.final
cdef class AgedGroups:
    cdef ValueTable values
    cdef Group* groups                  # [size]; 0: none
    cdef int32_t size
    cdef int32_t groups_fresh
    cdef int32_t groups_free
    cdef Py_ssize_t num_groups
    cdef uint32_t last_number
    cdef Cohort* cohorts                # [size]; 0: none
    cdef int32_t cohorts_fresh
    cdef int32_t cohorts_free
    cdef Queue[NUM_QUEUES][NUM_CELLS] queues    # of cohorts; for ALL, the section that is in the cell
    cdef int32_t[NUM_CLASSES] youngest          # cohort of each class
    cdef int32_t[NUM_CELLS] ends                # when the oldest cohort of a cell leaves it; NEVER: the cell is empty
    cdef uint64_t[NUM_WORDS] holders    # a bit per cell that has resident blocks, by rank
    cdef int32_t now
    cdef int32_t[NUM_CLASSES] due       # no cohort of the class leaves its bin before this time
    cdef uint64_t num_aged              # groups moved to their next bin since the start

    cdef int grow(self, int64_t size) except -1
    cdef void clear(self) noexcept nogil
    cdef int32_t make_group(self, int32_t cls, int32_t length) noexcept nogil
    cdef void free_group(self, int32_t group) noexcept nogil
    cdef void link_holder(self, int32_t group) noexcept nogil
    cdef void unlink_holder(self, int32_t group) noexcept nogil
    cdef void mark_holders(self) noexcept nogil
    cdef void age(self) noexcept nogil
    cdef list listed(self, BlockTable table)
    cdef int check(self, dict known) except -1


cdef inline int reserve_groups(AgedGroups aged) except -1:
    # Make room for one more call.
    if aged.num_groups + GROUPS_PER_CALL >= aged.size:
        aged.grow(2 * <int64_t> aged.size)
    return 0


cdef inline int32_t cell_of(const Cohort* cohort) noexcept nogil:
    return cohort.cls * NUM_BINS + cohort.bin


cdef inline int class_of(AgedGroups aged, int32_t group) noexcept nogil:
    return aged.cohorts[aged.groups[group].cohort].cls


cdef inline void add_known(AgedGroups aged, int32_t group, int32_t n) noexcept nogil:
    if n != 0:
        aged.groups[group].num_known += n
        aged.cohorts[aged.groups[group].cohort].num_known += n


cdef inline void leave_group(AgedGroups aged, int32_t group, int32_t n) noexcept nogil:
    # Remove `n` known keys from a group. Free the group if no key is left.
    add_known(aged, group, -n)
    if aged.groups[group].num_known == 0:
        aged.free_group(group)
