# The bytes of a transfer, run by run: where the blocks of an engine's tensors lie, and where in the host pool.
#
# In a header, so that the loops that copy and list runs inline the walk: a call per run would cost as much as the copy.

from libc.stdint cimport int32_t, int64_t

cdef struct Segment:           # contiguous bytes of a device block: a layer, or adjacent layers
    char* base                 # its bytes in device block 0
    int64_t stride             # from one device block to the next
    int64_t host_offset        # within the device block's part of a host block
    int64_t n_bytes


cdef struct Group:             # one KV-cache group
    Segment* segments
    int64_t num_segments
    int64_t part_bytes         # one device block of this group, in a host block
    int64_t num_blocks         # device blocks that every tensor of the group has


cdef struct Layout:
    Group* groups
    int64_t num_groups
    char* host
    int64_t host_stride
    int64_t num_host_blocks
    int64_t factor             # device blocks in a host block


cdef struct Span:              # the blocks of one group in one transfer
    Group* group
    const int32_t* device_ids
    const int32_t* host_ids
    int64_t first_part         # where in its first host block the group's first device block lies
    int64_t end_unit           # a unit is one segment of one device block; units count over the whole transfer


cdef struct Plan:              # one transfer, checked; spans and ids follow it in the same piece of memory
    int64_t num_bytes
    int64_t num_units
    Span* spans


cdef struct Run:
    char* host
    char* device
    int64_t n_bytes


cdef struct Cursor:
    const Layout* layout
    const Span* span
    int64_t unit               # the unit after `ahead`
    int64_t end
    int64_t block              # index of the unit's device block in its span
    int64_t segment
    int64_t part
    int64_t host_index
    Run ahead
    bint more


cdef inline void enter(Cursor* cursor, int64_t index) noexcept nogil:
    # index counts units from the start of cursor.span.
    cdef const Span* span = cursor.span
    cdef int64_t logical
    cursor.block = index // span.group.num_segments
    cursor.segment = index - cursor.block * span.group.num_segments
    logical = span.first_part + cursor.block
    cursor.host_index = logical // cursor.layout.factor
    cursor.part = logical - cursor.host_index * cursor.layout.factor


cdef inline bint step(Cursor* cursor) noexcept nogil:
    """Put the next unit's bytes into `ahead`."""
    cdef const Span* span = cursor.span
    cdef Group* group
    cdef Segment* segment
    if cursor.unit >= cursor.end:
        return False
    while cursor.unit >= span.end_unit:
        cursor.span = span = span + 1
        if cursor.unit < span.end_unit:
            enter(cursor, 0)
    group = span.group
    segment = &group.segments[cursor.segment]
    cursor.ahead.host = (
        cursor.layout.host + span.host_ids[cursor.host_index] * cursor.layout.host_stride
        + cursor.part * group.part_bytes + segment.host_offset
    )
    cursor.ahead.device = segment.base + span.device_ids[cursor.block] * segment.stride
    cursor.ahead.n_bytes = segment.n_bytes
    cursor.unit += 1
    cursor.segment += 1
    if cursor.segment == group.num_segments:
        cursor.segment = 0
        cursor.block += 1
        cursor.part += 1
        if cursor.part == cursor.layout.factor:
            cursor.part = 0
            cursor.host_index += 1
    return True


cdef inline void open_runs(
    Cursor* cursor, const Layout* layout, const Plan* plan, int64_t first, int64_t end,
) noexcept nogil:
    """Stand before unit `first` of a transfer, to go on to `end`."""
    cdef int64_t start = 0
    cursor.layout = layout
    cursor.span = plan.spans
    cursor.unit = first
    cursor.end = end
    if first < end:
        while first >= cursor.span.end_unit:
            start = cursor.span.end_unit
            cursor.span += 1
        enter(cursor, first - start)
    cursor.more = step(cursor)


cdef inline bint next_run(Cursor* cursor, Run* run) noexcept nogil:
    """Give the next run; units that touch on both sides are one."""
    if not cursor.more:
        return False
    run[0] = cursor.ahead
    cursor.more = step(cursor)
    while cursor.more:
        if cursor.ahead.device != run.device + run.n_bytes or cursor.ahead.host != run.host + run.n_bytes:
            break
        run.n_bytes += cursor.ahead.n_bytes
        cursor.more = step(cursor)
    return True
