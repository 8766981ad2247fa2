cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport BlockTable

# A windowed key of a set: the anchor at its position, its place + 1 in the request (0: unused), and its row (0: absent,
# or passing).
cdef struct SetKey:
    int32_t anchor
    int32_t place
    int32_t row


@cython.final
cdef class GroupSets:
    cdef BlockTable table
    cdef int num_groups
    cdef int anchor_group
    cdef int num_full                   # groups without a window: slots of an anchor with its companions
    cdef int32_t* windows               # [num_groups], in blocks; 0: no window
    cdef int32_t size                   # the sum of all windows
    cdef int32_t largest_window
    cdef int32_t* reach                 # [largest_window]: anchors before an end, deep to shallow
    cdef SetKey* keys                   # [size]: the set that was read last

    cdef int group_of(self, PyObject* key) noexcept nogil
    cdef int32_t windowed_row(self, PyObject* anchor, int group) noexcept nogil
    cdef int32_t neighbour(self, RequestKeys names, int32_t place, int group) noexcept nogil
    cdef Py_ssize_t read(self, RequestKeys names, int32_t end) noexcept nogil
    cdef bint is_offered(self, RequestKeys names, int32_t anchor, int group) noexcept nogil
    cdef bint is_end_offered(self, RequestKeys names, int32_t end) noexcept nogil
    cdef bint is_run_whole(self, RequestKeys names, int group, int32_t end) noexcept nogil


cdef inline int32_t anchor_before(RequestKeys names, int32_t anchor) noexcept nogil:
    # Return the anchor before one on the path, or 0.
    cdef int32_t place = names.uses[anchor - 1].before
    while place != 0 and names.uses[place - 1].note < 0:
        place = names.uses[place - 1].before
    return place


cdef inline int32_t anchor_after(RequestKeys names, int32_t anchor) noexcept nogil:
    # Return the anchor behind one on the path; behind 0, the first.
    cdef int32_t place = names.uses[anchor - 1].after if anchor != 0 else names.head
    while place != 0 and names.uses[place - 1].note < 0:
        place = names.uses[place - 1].after
    return place


cdef inline int64_t position_of(RequestKeys names, int32_t anchor) noexcept nogil:
    return names.uses[anchor - 1].position if anchor != 0 else -1
