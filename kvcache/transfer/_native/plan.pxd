from libc.stdint cimport int64_t, uintptr_t

from kvcache.transfer._native.runs cimport Group, Layout, Plan, Segment

cdef class Geometry:
    cdef Layout layout
    cdef Segment* pieces
    cdef object owner

    cdef void _add(self, Group* group, uintptr_t address, int64_t stride, int64_t n_bytes) noexcept
    cdef Plan* plan(self, device_ids, group_sizes, block_indices, host_ids) except NULL
