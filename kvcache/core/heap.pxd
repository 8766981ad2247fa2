# A 4-ary min-heap over (rank, stamp). Each row records its position: at[r * step] for row r.
#
# Four children share a cache line or two, which halves the cache misses of a descent in a binary heap.

from libc.stdint cimport int32_t, uint64_t

from kvcache.core.index cimport prefetch

cdef enum:
    LINES_BELOW = 6     # cache lines of sixteen nodes that stand together

cdef struct HeapNode:
    uint64_t rank
    uint64_t stamp
    int32_t row


cdef inline bint before(const HeapNode* a, const HeapNode* b) noexcept nogil:
    return a.rank < b.rank or (a.rank == b.rank and a.stamp < b.stamp)


cdef inline void sift_up(int32_t* at, Py_ssize_t step, HeapNode* nodes, int32_t i, HeapNode node) noexcept nogil:
    cdef int32_t parent
    while i > 0:
        parent = (i - 1) >> 2
        if not before(&node, &nodes[parent]):
            break
        nodes[i] = nodes[parent]
        at[nodes[i].row * step] = i
        i = parent
    nodes[i] = node
    at[node.row * step] = i


cdef inline void sift_down(
    int32_t* at, Py_ssize_t step, HeapNode* nodes, int32_t n, int32_t i, HeapNode node
) noexcept nogil:
    cdef int32_t child, least
    cdef Py_ssize_t below
    while 4 * i + 1 < n:
        # The descent's next level is known only when the children are loaded: prefetch all sixteen grandchildren.
        below = 16 * <Py_ssize_t> i + 5
        if below < n:
            for child in range(LINES_BELOW):
                prefetch(<char*> &nodes[below] + 64 * child)
        least = 4 * i + 1
        for child in range(least + 1, min(least + 4, n)):
            if before(&nodes[child], &nodes[least]):
                least = child
        if not before(&nodes[least], &node):
            break
        nodes[i] = nodes[least]
        at[nodes[i].row * step] = i
        i = least
    nodes[i] = node
    at[node.row * step] = i


cdef inline void heap_put(
    int32_t* at, Py_ssize_t step, HeapNode* nodes, int32_t n, int32_t i, HeapNode node
) noexcept nogil:
    # Replace a node, and move the new one up or down.
    if before(&node, &nodes[i]):
        sift_up(at, step, nodes, i, node)
    else:
        sift_down(at, step, nodes, n, i, node)
