cimport cython
from libc.stdint cimport int32_t, int64_t

cdef enum:
    NUM_BINS = 54
    CLASSES_PER_HINT = 8
    NUM_HINTS = 4               # none, end, soon, later
    FIRST_SHARED = CLASSES_PER_HINT * NUM_HINTS     # classes of shared blocks, while they are told apart
    NUM_SHARED = 4
    NUM_CLASSES = FIRST_SHARED + NUM_SHARED
    NUM_CELLS = NUM_CLASSES * NUM_BINS              # cell: class * NUM_BINS + bin
    FIRST_JUDGED = 1            # bins in which a use tells whose blocks come back within seconds: from 4 s on
    END_JUDGED = 7              # and before 16 s


@cython.final
cdef class ValueTable:
    cdef int32_t[NUM_BINS + 1] edges    # ages, in ticks of 2,048 ms, at which a bin begins
    cdef int64_t[NUM_CELLS] hit
    cdef int64_t[NUM_CELLS] sur
    cdef int64_t total
    cdef int64_t[NUM_BINS] chances
    cdef int64_t[NUM_CELLS] value
    cdef int32_t[NUM_CELLS] ranked      # cells in the order of the table
    cdef int32_t[NUM_CELLS] rank_of
    cdef int num_ranked                 # cells of the classes in use
    cdef int num_hints                  # 1 + the highest hint in use
    cdef bint knows_shared              # the classes of shared blocks are in use
    cdef int64_t num_again              # uses of keys 4 to 16 s after their last one, halved at 65,536
    cdef int64_t num_shared             # of these, of widely shared keys
    cdef readonly bint splits_shared    # they are told apart now

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
