cimport cython
from libc.stdint cimport int32_t, int64_t

cdef enum:
    NUM_BINS = 54
    CLASSES_PER_HINT = 8
    NUM_HINTS = 4               # none, end, soon, later
    END = 1                     # the hint that blocks will not be used
    FIRST_SHARED = CLASSES_PER_HINT * NUM_HINTS     # classes of shared blocks, in use while `splits_shared`
    NUM_SHARED = 4
    NUM_CLASSES = FIRST_SHARED + NUM_SHARED
    NUM_CELLS = NUM_CLASSES * NUM_BINS              # cell: class * NUM_BINS + bin
    FIRST_JUDGED = 1            # uses in the bins from here (4 s) decide whether to split off shared blocks
    END_JUDGED = 7              # to here (16 s), exclusive


# Successive ages of a class: the expected uses and time of a block that has reached them, both times 65,536, and the
# probability that it grows older than they are.
cdef struct Part:
    int64_t uses
    int64_t time
    int64_t stays


@cython.final
cdef class ValueTable:
    cdef int32_t[NUM_BINS + 1] edges    # ages, in ticks of 2,048 ms, at which a bin begins
    cdef int64_t[NUM_CELLS] hit
    cdef int64_t[NUM_CELLS] sur
    cdef int64_t[NUM_HINTS * NUM_CELLS] moved       # keys that a late hint moved from the cell, by hint
    cdef int64_t total
    cdef int64_t[NUM_BINS] chances
    cdef int64_t[NUM_CELLS] value
    cdef Part[NUM_CELLS] parts          # of each class, from `first_part` to the end of its cells, by age
    cdef int[NUM_CLASSES] first_part
    cdef int32_t[NUM_CELLS] ranked      # cells in the order of the table
    cdef int32_t[NUM_CELLS] rank_of
    cdef int num_ranked                 # number of cells of the classes in use
    cdef int num_hints                  # 1 + the highest hint in use
    cdef bint knows_shared              # the classes of shared blocks are in use
    cdef int64_t num_again              # uses of keys 4 to 16 s after their previous use; halved at 65,536
    cdef int64_t num_shared             # of these, uses of widely shared keys
    cdef readonly bint splits_shared    # widely shared blocks form separate classes now

    cdef void clear(self) noexcept nogil
    cdef void rebuild(self) noexcept nogil
    cdef void take_up_hint(self, int32_t hint) noexcept nogil
    cdef bint is_in_use(self, int cls) noexcept nogil
    cdef int check(self) except -1


cdef inline void count_hits(ValueTable values, int cls, int bin, int32_t n, int32_t num_shared) noexcept nogil:
    # `num_shared` of the `n` keys are widely shared.
    values.hit[cls * NUM_BINS + bin] += n
    values.total += n
    if FIRST_JUDGED <= bin < END_JUDGED:
        values.num_again += n
        values.num_shared += num_shared


cdef inline void count_survivors(ValueTable values, int32_t cell, int32_t n) noexcept nogil:
    values.sur[cell] += n
    values.total += n


cdef inline void count_moved(ValueTable values, int32_t cell, int hint, int32_t n) noexcept nogil:
    values.moved[cell * NUM_HINTS + hint] += n
    values.total += n
