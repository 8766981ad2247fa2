"""Histograms with power-of-two buckets, and block ages, for measurements in the scheduler's thread.

Compiled because the age of every stored block is recorded, and an observation must cost only nanoseconds.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kvcache.core.index cimport bit_length

cdef extern from "time.h":
    int CLOCK_MONOTONIC_COARSE

cdef uint64_t AGE_TICK_NS = 10_000_000

cdef struct Filled:
    uint32_t at     # ticks since start; 0: never
    uint32_t tag    # of the key's hash


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t> now.tv_sec * 1_000_000_000 + <uint64_t> now.tv_nsec


@cython.final
cdef class Histogram:
    """Histogram(unit, lowest, highest)

    Count observations in buckets whose bounds are powers of two.

    Parameters
    ----------
    unit : float
        Value of one tick, such as 1e-9 for seconds counted in nanoseconds.
    lowest, highest : int
        Exponents of the first and the last bound, in ticks: 0 <= lowest < highest < 64.

    Raises
    ------
    ValueError
        A value is out of range.

    Notes
    -----
    An observation costs tens of nanoseconds, whatever has been observed. A thread that reads meanwhile may find an
    observation in a bucket and not yet in the sum.
    """

    cdef uint64_t[65] buckets    # by the number of bits of an observation in ticks
    cdef double total            # ticks
    cdef uint64_t largest        # ticks
    cdef double unit
    cdef int lowest
    cdef int highest

    def __cinit__(self, double unit, int lowest, int highest):
        if not unit > 0:
            raise ValueError(f"unit must be > 0, got {unit}")
        if not 0 <= lowest < highest < 64:
            raise ValueError(f"exponents must be 0 <= lowest < highest < 64, got {lowest} and {highest}")
        self.unit = unit
        self.lowest = lowest
        self.highest = highest

    cdef inline void add(self, uint64_t ticks) noexcept nogil:
        # As in Prometheus, a bound belongs to its bucket: subtract 1, since 2**k has as many bits as larger values.
        self.buckets[bit_length(ticks - 1) if ticks else 0] += 1
        self.total += <double> ticks
        if ticks > self.largest:
            self.largest = ticks

    def observe(self, double value):
        """Count one observation, in the histogram's unit. Negative values count as zero; invalid values are ignored."""
        cdef double ticks = value / self.unit
        if ticks < 9.0e18:   # false for NaN and values out of range
            self.add(<uint64_t> (ticks + 0.5) if ticks > 0 else 0)

    def observe_ticks(self, uint64_t ticks):
        """Count one observation, in ticks."""
        self.add(ticks)

    @property
    def max(self):
        """The largest observation, in the histogram's unit."""
        return self.largest * self.unit

    def data(self):
        """Return the bounds, the counts per bucket (one more above the last bound), and their sum, in the unit."""
        cdef int i
        cdef uint64_t below = 0, above = 0
        for i in range(self.lowest + 1):
            below += self.buckets[i]
        for i in range(self.highest + 1, 65):
            above += self.buckets[i]
        bounds = tuple([(<uint64_t> 1 << i) * self.unit for i in range(self.lowest, self.highest + 1)])
        counts = (below, *[self.buckets[i] for i in range(self.lowest + 1, self.highest + 1)], above)
        return bounds, counts, self.total * self.unit


@cython.final
cdef class BlockAges:
    """BlockAges(num_blocks)

    When each slot of a pool was last filled, and how old blocks were when they were evicted.

    Parameters
    ----------
    num_blocks : int
        Slots, 8 bytes each.

    Attributes
    ----------
    histogram : Histogram
        Ages at eviction, in seconds.

    Raises
    ------
    ValueError
        The number is not positive.

    Notes
    -----
    Ages are exact to some hundredths of a second, up to 497 days. Calls may be left out: a slot is remembered with its
    key's hash, and of a block whose coming was left out no age is counted.
    """

    cdef Filled* filled          # [num_blocks]
    cdef Py_ssize_t num_blocks
    cdef readonly Histogram histogram
    cdef uint64_t start_ns

    def __cinit__(self, Py_ssize_t num_blocks):
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        self.filled = <Filled*> PyMem_Calloc(num_blocks, sizeof(Filled))
        if self.filled == NULL:
            raise MemoryError(f"no memory for the ages of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.histogram = Histogram(1e-9 * AGE_TICK_NS, 0, 26)
        # Start two ticks early, because the coarse clock lags; a slot that was never filled has 0.
        self.start_ns = now_ns() - 2 * AGE_TICK_NS

    def __dealloc__(self):
        PyMem_Free(self.filled)

    def note(self, block_ids, list stored not None, list evicted not None):
        """Count the ages of evicted blocks, and note which keys their slots, and others, are filled with.

        Parameters
        ----------
        block_ids : numpy.ndarray
            int64, the slots that were handed out; those of evicted blocks first, the last evicted before all others,
            which is how pools hand them out. Ids that are not the pool's are passed over.
        stored : list of bytes
            The key that each slot was handed out for.
        evicted : list of bytes
            The keys that were evicted, in order.
        """
        cdef Py_buffer view
        cdef timespec coarse
        cdef uint64_t tick
        cdef Py_ssize_t i, n, num_evicted
        cdef int64_t block_id
        cdef Filled* slot
        # Compute all hashes first: hashing may run Python.
        for key in evicted:
            hash(key)
        for key in stored:
            hash(key)
        PyObject_GetBuffer(block_ids, &view, PyBUF_SIMPLE)
        try:
            if view.itemsize != sizeof(int64_t):
                raise ValueError(f"block_ids must be int64, got items of {view.itemsize} bytes")
            clock_gettime(CLOCK_MONOTONIC_COARSE, &coarse)
            tick = <uint64_t> coarse.tv_sec * 1_000_000_000 + <uint64_t> coarse.tv_nsec
            tick = (tick - self.start_ns) // AGE_TICK_NS if tick > self.start_ns else 0
            n = min(view.len // <Py_ssize_t> sizeof(int64_t), len(stored))
            num_evicted = len(evicted)
            for i in range(n):
                block_id = (<int64_t*> view.buf)[i]
                if not 0 <= block_id < self.num_blocks:
                    continue
                slot = &self.filled[block_id]
                if i < num_evicted and slot.at and slot.tag == <uint32_t> hash(evicted[num_evicted - 1 - i]):
                    self.histogram.add(tick - slot.at if tick > slot.at else 0)
                slot.at = <uint32_t> tick
                slot.tag = <uint32_t> hash(stored[i])
        finally:
            PyBuffer_Release(&view)
