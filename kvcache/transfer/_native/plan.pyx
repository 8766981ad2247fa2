"""Check a transfer against a KV-cache geometry, and lay it out as runs of bytes.

Compiled because it loops over blocks and layers.
"""

from operator import index

import numpy as np

cimport cython

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free

from kvcache.transfer._native.runs cimport Cursor, Group, Plan, Run, Segment, Span, next_run, open_runs


cdef enum:
    MAX_BLOCKS = 0x7fffffff


cdef int64_t MAX_BYTES = 0x7fffffffffffffff


cdef int _check_extent(str what, object address, object num_blocks, object stride) except -1:
    """Raise ValueError unless the address of every block can be computed."""
    if address < 0 or num_blocks < 0 or stride < 0 or address + num_blocks * stride > MAX_BYTES:
        raise ValueError(
            f"{what} must lie within 0..{MAX_BYTES}, got {num_blocks} blocks {stride} bytes apart at {address}"
        )
    return 0


cdef int _take(
    int32_t* out, const int64_t[::1] ids, int64_t first, int64_t n, int64_t limit, str what,
) except -1:
    """Copy ids, each read once and checked: the caller may change its array, and a bad id would write anywhere."""
    cdef int64_t i, block_id
    for i in range(n):
        block_id = (<const volatile int64_t*> &ids[first + i])[0]
        if not 0 <= block_id < limit:
            raise ValueError(f"a {what}'s id must be in 0..{limit - 1}, got {block_id}")
        out[i] = <int32_t> block_id
    return 0


# Threads may still copy when the collector finds the last reference, so memory is freed in __dealloc__ only.
@cython.no_gc_clear
cdef class Geometry:
    """Geometry(tensors, groups, host_address, host_stride_bytes, num_host_blocks, block_size_factor=1, owner=None)

    Where every byte of a block lies, on the device's side and in the host pool.

    `tensors` are (address, number of blocks, bytes from one block to the next). `groups` name, per KV-cache group, the
    (tensor, bytes to move) of each layer. A host block holds `block_size_factor` device blocks one after the other, and
    each of them the layers of its group: a part of a host block is one run too. `owner` owns the memory, and is
    referenced as long as the geometry.

    Numbers are checked (ValueError); addresses and the tensors that groups name are trusted.
    """

    def __cinit__(
        self, tensors, groups, host_address, host_stride_bytes, num_host_blocks, block_size_factor=1, owner=None,
    ):
        cdef int64_t num_segments, i
        cdef Group* group
        cdef Segment* segment
        # Converted once to ints, which do not overflow in Python; the loop below relies on the checks here.
        tensors = [(index(address), index(num_blocks), index(stride)) for address, num_blocks, stride in tensors]
        groups = [[(index(tensor), index(n_bytes)) for tensor, n_bytes in group_refs] for group_refs in groups]
        host_address, host_stride_bytes = index(host_address), index(host_stride_bytes)
        num_host_blocks, block_size_factor = index(num_host_blocks), index(block_size_factor)
        num_segments = sum(len(group_refs) for group_refs in groups)
        if not 1 <= block_size_factor <= MAX_BLOCKS:
            raise ValueError(f"block_size_factor must be in 1..{MAX_BLOCKS}, got {block_size_factor}")
        num_host_blocks = min(num_host_blocks, MAX_BLOCKS)
        _check_extent("the host pool", host_address, num_host_blocks, host_stride_bytes)
        for i, (address, num_blocks, stride) in enumerate(tensors):
            _check_extent(f"tensor {i}", address, num_blocks, stride)
        self.owner = owner
        self.layout.host = <char*> <uintptr_t> host_address
        self.layout.host_stride = host_stride_bytes
        self.layout.num_host_blocks = num_host_blocks
        self.layout.factor = block_size_factor
        self.layout.num_groups = len(groups)
        self.layout.groups = <Group*> calloc(max(len(groups), 1), sizeof(Group))
        self.pieces = <Segment*> calloc(max(num_segments, 1), sizeof(Segment))
        if self.layout.groups == NULL or self.pieces == NULL:
            raise MemoryError()
        segment = self.pieces
        for i, refs in enumerate(groups):
            group = &self.layout.groups[i]
            group.segments = segment
            # A rank that holds no layer of a group moves nothing for it, whatever the ids.
            group.num_blocks = MAX_BLOCKS
            needed = sum(n_bytes for _, n_bytes in refs) * block_size_factor
            if needed > host_stride_bytes:
                raise ValueError(
                    f"a host block has {host_stride_bytes} bytes, {block_size_factor} device blocks of group {i} "
                    f"need {needed}"
                )
            for tensor, n_bytes in refs:
                if n_bytes < 1:
                    raise ValueError(f"group {i} must copy >= 1 bytes of each block of tensor {tensor}, got {n_bytes}")
                address, num_blocks, stride = tensors[tensor]
                group.num_blocks = min(group.num_blocks, num_blocks)
                self._add(group, address, stride, n_bytes)
            segment += group.num_segments

    cdef void _add(self, Group* group, uintptr_t address, int64_t stride, int64_t n_bytes) noexcept:
        cdef Segment* next_one = &group.segments[group.num_segments]
        cdef Segment* last
        # Of tensors with one block, neighbours may be strangers.
        if group.num_segments and group.num_blocks > 1:
            last = next_one - 1
            if last.stride == stride and <uintptr_t> last.base + last.n_bytes == address:
                last.n_bytes += n_bytes
                group.part_bytes += n_bytes
                return
        next_one[0] = Segment(<char*> address, stride, group.part_bytes, n_bytes)
        group.num_segments += 1
        group.part_bytes += n_bytes

    def __dealloc__(self):
        free(self.layout.groups)
        free(self.pieces)

    def segments(self):
        """Return the pieces of one device block, by group: its layers, those that lie side by side as one.

        A piece is (address in device block 0, device blocks, stride of device blocks, offset in the host block, bytes).
        """
        cdef Group* group
        cdef Segment* segment
        cdef int64_t i, k
        cdef list found = []
        for i in range(self.layout.num_groups):
            group = &self.layout.groups[i]
            found.append([])
            for k in range(group.num_segments):
                segment = &group.segments[k]
                found[i].append(
                    (<uintptr_t> segment.base, group.num_blocks, segment.stride, segment.host_offset, segment.n_bytes)
                )
        return found

    def check(self, device_ids, group_sizes, block_indices, host_ids):
        """Return the bytes of one transfer, or raise ValueError as `runs` does."""
        cdef Plan* plan = self.plan(device_ids, group_sizes, block_indices, host_ids)
        num_bytes = plan.num_bytes
        free(plan)
        return num_bytes

    def runs(self, device_ids, group_sizes, block_indices, host_ids):
        """Return the runs of one transfer in host block order, as int64 rows of (host address, device address, bytes).

        The ids are int64, group after group; `group_sizes` and `block_indices` are those of `GPULoadStoreSpec`. An id
        that is out of range and lengths that do not fit are a ValueError.
        """
        cdef Plan* plan = self.plan(device_ids, group_sizes, block_indices, host_ids)
        cdef Cursor cursor
        cdef Run run
        cdef int64_t n = 0
        cdef int64_t[:, ::1] rows
        try:
            table = np.empty((plan.num_units, 3), dtype=np.int64)
            rows = table
            open_runs(&cursor, &self.layout, plan, 0, plan.num_units)
            while next_run(&cursor, &run):
                rows[n, 0] = <int64_t> run.host
                rows[n, 1] = <int64_t> run.device
                rows[n, 2] = run.n_bytes
                n += 1
        finally:
            free(plan)
        return table[:n].copy()

    cdef Plan* plan(self, device_ids, group_sizes, block_indices, host_ids) except NULL:
        """Check a transfer and lay it out in one piece of memory, which the caller frees."""
        cdef const int64_t[::1] device = np.ascontiguousarray(device_ids, dtype=np.int64)
        cdef const int64_t[::1] host = np.ascontiguousarray(host_ids, dtype=np.int64)
        cdef int64_t num_device = device.shape[0]
        cdef int64_t num_host = host.shape[0]
        cdef int64_t num_groups = self.layout.num_groups
        cdef int64_t i, size, first_index, first_part, need, first_device = 0, first_host = 0, units = 0, num_bytes = 0
        cdef Group* group
        cdef Plan* plan
        cdef int32_t* ids
        group_sizes, block_indices = list(group_sizes), list(block_indices)
        if len(group_sizes) != num_groups or len(block_indices) != num_groups:
            raise ValueError(
                f"there are {num_groups} KV-cache groups, got {len(group_sizes)} group_sizes "
                f"and {len(block_indices)} block_indices"
            )
        plan = <Plan*> calloc(1, sizeof(Plan) + num_groups * sizeof(Span) + (num_device + num_host) * sizeof(int32_t))
        if plan == NULL:
            raise MemoryError()
        try:
            plan.spans = <Span*> (plan + 1)
            ids = <int32_t*> (plan.spans + num_groups)
            for i in range(num_groups):
                size, first_index = group_sizes[i], block_indices[i]
                if size < 0 or first_index < 0 or size > num_device - first_device:
                    raise ValueError(
                        f"group_sizes must be >= 0 and add up to {num_device} block ids, and block_indices be >= 0, "
                        f"got {group_sizes} and {block_indices}"
                    )
                group = &self.layout.groups[i]
                first_part = first_index % self.layout.factor
                need = (first_part + size + self.layout.factor - 1) // self.layout.factor if size else 0
                if need > num_host - first_host:
                    raise ValueError(self._misfit(group_sizes, block_indices, num_host))
                if size and (MAX_BYTES - num_bytes) // size < group.part_bytes:
                    raise ValueError(f"{size} device blocks of {group.part_bytes} bytes are more than a job can move")
                units += size * group.num_segments
                num_bytes += size * group.part_bytes
                plan.spans[i] = Span(group, ids + first_device, ids + num_device + first_host, first_part, units)
                _take(&ids[first_device], device, first_device, size, group.num_blocks, "device block")
                _take(&ids[num_device + first_host], host, first_host, need, self.layout.num_host_blocks, "host block")
                first_device += size
                first_host += need
            if first_device != num_device or first_host != num_host:
                raise ValueError(self._misfit(group_sizes, block_indices, num_host))
        except BaseException:
            free(plan)
            raise
        plan.num_units = units
        plan.num_bytes = num_bytes
        return plan

    def _misfit(self, group_sizes, block_indices, num_host):
        return (
            f"{group_sizes} device blocks per group, from {block_indices} on, at {self.layout.factor} to a "
            f"host block do not fill {num_host} host blocks"
        )
