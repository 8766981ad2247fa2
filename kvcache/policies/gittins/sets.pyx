"""GroupSets: where a request's keys of several KV-cache groups lie, and which of them a resumption needs.

Compiled because each store of such a request reads sets, and looks up their rows by name.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from kvcache.core.index cimport Probe, hash_of_bytes, index_first, index_next
from kvcache.core.request_keys cimport RequestKeys
from kvcache.core.table cimport BlockTable, PyBytes_CheckExact, PyBytes_GET_SIZE
from kvcache.policies.gittins.policy cimport PASSING

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(PyObject* key) noexcept nogil

cdef enum:
    MOST_KEY_BYTES = 512
    GROUP_BYTES = 4


@cython.final
cdef class GroupSets:
    """GroupSets(table, group_windows)

    The sets of the ends of requests, by the windows of the KV-cache groups.

    An anchor is a key of the group without a window. It is named by its place in its request + 1. In its request, the
    note of a windowed key is -1 - its group, and that of an anchor is >= 0.
    """

    def __cinit__(self, BlockTable table not None, list group_windows not None):
        cdef int group
        # A larger window would never be resident either.
        windows = [min(window or 0, table.cache_capacity + 1) for window in group_windows]
        self.table = table
        self.num_groups = <int> len(windows)
        self.num_full = <int> windows.count(0)
        self.anchor_group = <int> windows.index(0)
        self.size = sum(windows)
        self.largest_window = max(windows)
        self.windows = <int32_t*> malloc(len(windows) * sizeof(int32_t))
        self.reach = <int32_t*> malloc((self.largest_window + 1) * sizeof(int32_t))
        self.keys = <SetKey*> malloc((self.size + 1) * sizeof(SetKey))
        if self.windows == NULL or self.reach == NULL or self.keys == NULL:
            raise MemoryError(f"no memory for windows of {self.size} blocks")
        for group in range(self.num_groups):
            self.windows[group] = windows[group]

    def __dealloc__(self):
        free(self.windows)
        free(self.reach)
        free(self.keys)

    cdef int group_of(self, PyObject* key) noexcept nogil:
        """Return the KV-cache group that a key names, or -1 if the model has no such group."""
        cdef Py_ssize_t size
        cdef const uint8_t* at
        cdef uint32_t group
        if not PyBytes_CheckExact(key):
            return -1
        size = PyBytes_GET_SIZE(key)
        if not GROUP_BYTES < size <= MOST_KEY_BYTES:
            return -1
        at = <const uint8_t*> PyBytes_AS_STRING(key) + size - GROUP_BYTES
        group = <uint32_t> at[0] << 24 | <uint32_t> at[1] << 16 | <uint32_t> at[2] << 8 | at[3]
        return <int> group if group < <uint32_t> self.num_groups else -1

    cdef int32_t windowed_row(self, PyObject* anchor, int group) noexcept nogil:
        """Return the row of the windowed key at an anchor's position, or 0."""
        cdef char[MOST_KEY_BYTES] name
        cdef Py_ssize_t size = PyBytes_GET_SIZE(anchor)
        cdef uint64_t hash
        cdef Probe probe
        cdef int32_t row
        memcpy(name, PyBytes_AS_STRING(anchor), size - GROUP_BYTES)
        memset(name + size - GROUP_BYTES, 0, GROUP_BYTES - 1)
        name[size - 1] = <char> group
        hash = hash_of_bytes(name, size)
        row = index_first(self.table.buckets, self.table.num_buckets, hash, &probe)
        while row != 0 and not (
                self.table.rows[row].hash == hash and PyBytes_GET_SIZE(self.table.rows[row].key) == size
                and memcmp(PyBytes_AS_STRING(self.table.rows[row].key), name, size) == 0):
            row = index_next(self.table.buckets, self.table.num_buckets, hash, &probe)
        return row

    cdef int32_t neighbour(self, RequestKeys names, int32_t place, int group) noexcept nogil:
        """Return the place + 1 of a group's key at the position of the key at `place` - 1, or 0.

        Keys of one position are linked side by side. The note of a windowed key is -1 - its group.
        """
        cdef int64_t position = names.uses[place - 1].position
        cdef int32_t note, at = place
        cdef bint is_behind = False
        while True:
            if at == 0 or names.uses[at - 1].position != position:
                if is_behind:
                    return 0
                is_behind = True
                at = names.uses[place - 1].after
                continue
            note = names.uses[at - 1].note
            if (note >= 0 if group == self.anchor_group else note == -1 - group) and _has_same_hash(
                    names.named[at - 1].key, names.named[place - 1].key):
                return at
            at = names.uses[at - 1].after if is_behind else names.uses[at - 1].before

    cdef Py_ssize_t read(self, RequestKeys names, int32_t end) noexcept nogil:
        """Write the set of an end to `keys`, by group, shallow to deep. Return the number of its keys."""
        cdef Py_ssize_t i, length = 0, count = 0
        cdef int32_t place, row, anchor = end
        cdef int group
        while anchor != 0 and length < self.largest_window:
            self.reach[length] = anchor
            length += 1
            anchor = anchor_before(names, anchor)
        for group in range(self.num_groups):
            for i in range(min(self.windows[group], length) - 1, -1, -1):
                anchor = self.reach[i]
                place = self.neighbour(names, anchor, group)
                self.keys[count].anchor = anchor
                self.keys[count].place = place
                row = (names.row_now(self.table, place - 1) if place != 0
                       else self.windowed_row(names.named[anchor - 1].key, group))
                self.keys[count].row = row if self.table.rows[row].list_idx != PASSING else 0
                count += 1
        return count

    cdef bint is_offered(self, RequestKeys names, int32_t anchor, int group) noexcept nogil:
        """Return whether this call offers a windowed key, resident or not."""
        cdef int32_t place = self.neighbour(names, anchor, group)
        return place != 0 and names.named[place - 1].mark == self.table.mark

    cdef bint is_end_offered(self, RequestKeys names, int32_t end) noexcept nogil:
        """Return whether this call offers a windowed key of the last position before `end`."""
        cdef int group
        for group in range(self.num_groups):
            if self.windows[group] != 0 and self.is_offered(names, end, group):
                return True
        return False

    cdef bint is_run_whole(self, RequestKeys names, int group, int32_t end) noexcept nogil:
        """Return whether a group's set at `end` is offered or resident, and its next key is neither."""
        cdef int32_t anchor = anchor_after(names, end), _step
        if anchor != 0 and _is_present(self, names, anchor, group):
            return False
        for _step in range(self.windows[group]):
            if end == 0:
                break
            if not _is_present(self, names, end, group):
                return False
            end = anchor_before(names, end)
        return True


cdef bint _has_same_hash(PyObject* a, PyObject* b) noexcept nogil:
    """Return whether two keys differ in their group at most."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(a)
    return size == PyBytes_GET_SIZE(b) and memcmp(
        PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), size - GROUP_BYTES) == 0


cdef bint _is_present(GroupSets sets, RequestKeys names, int32_t anchor, int group) noexcept nogil:
    """Return whether a windowed key is offered or resident for the rule."""
    cdef int32_t row = sets.windowed_row(names.named[anchor - 1].key, group)
    return sets.is_offered(names, anchor, group) or (row != 0 and sets.table.rows[row].list_idx != PASSING)
