"""Turn block ids and a KV-cache geometry into runs of bytes, and move them without the GIL.

Compiled because it loops over blocks and layers, and because an engine's thread that never lets go of the GIL must
not hold up a copy: the threads here are plain C, and need no interpreter to start, run or finish a transfer.
"""

import os

import numpy as np

cimport cython

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.signal cimport sigfillset, sigset_t
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec
from posix.unistd cimport getpid


cdef extern from "stream_copy.h" nogil:
    void kvcache_stream(char* dst, const char* src, size_t n)
    void kvcache_stream_fence()


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_create(pthread_t*, const void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_cond_init(pthread_cond_t*, const void*)
    int pthread_cond_destroy(pthread_cond_t*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_cond_timedwait(pthread_cond_t*, pthread_mutex_t*, const timespec*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_sigmask(int, const sigset_t*, sigset_t*)


cdef extern from "signal.h" nogil:
    int SIG_SETMASK


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


# Sizes from measurements (docs/howto/dataplane): what is handed from thread to thread at once, from when a job is
# worth another thread, and from when streaming stores beat the C library's copy.
cdef enum:
    SLICE_BYTES = 262_144
    THREAD_BYTES = 1_048_576
    STREAM_JOB_BYTES = 1_048_576
    STREAM_RUN_BYTES = 8_192
    MAX_THREADS = 64
    PAGE_BYTES = 4096
    MAX_BLOCKS = 0x7fffffff


cdef struct Segment:           # what lies together in one device block: a layer, or layers side by side
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


cdef struct Run:
    char* host
    char* device
    int64_t n_bytes


cdef struct Cursor:
    Layout* layout
    const Span* span
    int64_t unit               # the unit after `ahead`
    int64_t end
    int64_t block              # index of the unit's device block in its span
    int64_t segment
    int64_t part
    int64_t host_index
    Run ahead
    bint more


cdef struct Job:
    Job* next
    int64_t job_id
    int64_t num_bytes
    int64_t num_units
    int64_t units_per_slice
    int64_t next_unit
    int num_active
    int max_threads
    bint cancelled
    bint started
    double start_s
    double end_s
    int64_t num_spans
    Span* spans


cdef void _enter(Cursor* cursor, int64_t index) noexcept nogil:
    # index counts units from the start of cursor.span.
    cdef const Span* span = cursor.span
    cdef int64_t logical
    cursor.block = index // span.group.num_segments
    cursor.segment = index - cursor.block * span.group.num_segments
    logical = span.first_part + cursor.block
    cursor.host_index = logical // cursor.layout.factor
    cursor.part = logical - cursor.host_index * cursor.layout.factor


cdef inline bint _step(Cursor* cursor) noexcept nogil:
    """Put the next unit's bytes into `ahead`."""
    cdef const Span* span = cursor.span
    cdef Group* group
    cdef Segment* segment
    if cursor.unit >= cursor.end:
        return False
    while cursor.unit >= span.end_unit:
        cursor.span = span = span + 1
        if cursor.unit < span.end_unit:
            _enter(cursor, 0)
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


cdef void _open(Cursor* cursor, Layout* layout, const Job* job, int64_t first, int64_t end) noexcept nogil:
    """Stand before unit `first` of a transfer, to go on to `end`."""
    cdef int64_t start = 0
    cursor.layout = layout
    cursor.span = job.spans
    cursor.unit = first
    cursor.end = end
    if first < end:
        while first >= cursor.span.end_unit:
            start = cursor.span.end_unit
            cursor.span += 1
        _enter(cursor, first - start)
    cursor.more = _step(cursor)


cdef inline bint _next(Cursor* cursor, Run* run) noexcept nogil:
    """Give the next run; units that touch on both sides are one."""
    if not cursor.more:
        return False
    run[0] = cursor.ahead
    cursor.more = _step(cursor)
    while cursor.more:
        if cursor.ahead.device != run.device + run.n_bytes or cursor.ahead.host != run.host + run.n_bytes:
            break
        run.n_bytes += cursor.ahead.n_bytes
        cursor.more = _step(cursor)
    return True


cdef void _copy(Layout* layout, const Job* job, bint to_host, int64_t first, int64_t end) noexcept nogil:
    cdef Cursor cursor
    cdef Run run
    cdef bint stream = job.num_bytes >= STREAM_JOB_BYTES
    cdef char* dst
    cdef char* src
    _open(&cursor, layout, job, first, end)
    while _next(&cursor, &run):
        dst, src = (run.host, run.device) if to_host else (run.device, run.host)
        if stream and run.n_bytes >= STREAM_RUN_BYTES:
            kvcache_stream(dst, src, run.n_bytes)
        else:
            memcpy(dst, src, run.n_bytes)
    if stream:
        kvcache_stream_fence()


cdef int _take(
    int32_t* out, const int64_t[::1] ids, int64_t first, int64_t n, int64_t limit, str what,
) except -1:
    """Copy ids, each checked: the caller may change its array later, and a bad one would write anywhere."""
    cdef int64_t i
    for i in range(n):
        if not 0 <= ids[first + i] < limit:
            raise ValueError(f"a {what}'s id must be in 0..{limit - 1}, got {ids[first + i]}")
        out[i] = <int32_t> ids[first + i]
    return 0


cdef double _clock() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9


# Threads may still copy when the collector finds the last user: what they need goes after them, in __dealloc__ only.
@cython.no_gc_clear
cdef class Geometry:
    """Geometry(tensors, groups, host_address, host_stride_bytes, num_host_blocks, block_size_factor=1, owner=None)

    Where every byte of a block lies, on the device's side and in the host pool.

    Parameters
    ----------
    tensors : sequence of (int, int, int)
        Address, number of blocks and bytes from one block to the next, per tensor.
    groups : sequence of sequence of (int, int)
        Per KV-cache group, the tensor and the bytes to move of each of its layers.
    host_address : int
        First byte of the host pool.
    host_stride_bytes : int
        From one host block to the next.
    num_host_blocks : int
        Blocks of the host pool.
    block_size_factor : int
        Device blocks in a host block.
    owner : object
        Kept as long as the geometry is: who holds the memory.

    Raises
    ------
    ValueError
        A group's device blocks do not fit a host block, or a layer names a tensor that is not there.

    Notes
    -----
    In a host block, device blocks follow each other, and in each of them the layers of its group: a part of a host
    block is one run too. Addresses are trusted.
    """

    cdef Layout layout
    cdef Segment* pieces
    cdef object owner

    def __cinit__(
        self, tensors, groups, host_address, host_stride_bytes, num_host_blocks, block_size_factor=1, owner=None,
    ):
        cdef int64_t num_segments = sum(len(group) for group in groups)
        cdef int64_t i = 0
        cdef Group* group
        cdef Segment* segment
        if block_size_factor < 1:
            raise ValueError(f"block_size_factor must be >= 1, got {block_size_factor}")
        self.owner = owner
        self.layout.host = <char*> <uintptr_t> host_address
        self.layout.host_stride = host_stride_bytes
        self.layout.num_host_blocks = min(num_host_blocks, MAX_BLOCKS)
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
            for index, n_bytes in refs:
                if not 0 <= index < len(tensors):
                    raise ValueError(f"group {i} names tensor {index}, there are {len(tensors)}")
                address, num_blocks, stride = tensors[index]
                group.num_blocks = min(group.num_blocks, num_blocks)
                self._add(group, address, stride, n_bytes)
            segment += group.num_segments
            if group.part_bytes * self.layout.factor > self.layout.host_stride:
                raise ValueError(
                    f"a host block has {host_stride_bytes} bytes, {block_size_factor} device blocks of group {i} "
                    f"need {group.part_bytes * self.layout.factor}"
                )

    cdef void _add(self, Group* group, uintptr_t address, int64_t stride, int64_t n_bytes) noexcept:
        cdef Segment* last = &group.segments[group.num_segments - 1]
        # Of tensors with one block, neighbours may be strangers.
        if (
            group.num_segments and group.num_blocks > 1 and last.stride == stride
            and <uintptr_t> last.base + last.n_bytes == address
        ):
            last.n_bytes += n_bytes
        else:
            last = &group.segments[group.num_segments]
            last.base = <char*> address
            last.stride = stride
            last.host_offset = group.part_bytes
            last.n_bytes = n_bytes
            group.num_segments += 1
        group.part_bytes += n_bytes

    def __dealloc__(self):
        free(self.layout.groups)
        free(self.pieces)

    def segments(self, Py_ssize_t group_idx):
        """Return the pieces of one device block of a group: its layers, those that lie side by side as one.

        Returns
        -------
        list of (int, int, int, int)
            Address in device block 0, bytes from one device block to the next, offset in the host block, bytes.
        """
        cdef Group* group = self._group(group_idx)
        cdef Segment* segment
        cdef int64_t i
        cdef list found = []
        for i in range(group.num_segments):
            segment = &group.segments[i]
            found.append((<uintptr_t> segment.base, segment.stride, segment.host_offset, segment.n_bytes))
        return found

    def part_bytes(self, Py_ssize_t group_idx):
        """Return the bytes of one device block of a group, all layers together."""
        return self._group(group_idx).part_bytes

    cdef Group* _group(self, Py_ssize_t group_idx) except NULL:
        if not 0 <= group_idx < self.layout.num_groups:
            raise ValueError(f"group_idx must be in 0..{self.layout.num_groups - 1}, got {group_idx}")
        return &self.layout.groups[group_idx]

    def check(self, device_ids, group_sizes, block_indices, host_ids):
        """Return the bytes of one transfer, or raise ValueError as `runs` does."""
        cdef Job* job = self._job(0, device_ids, group_sizes, block_indices, host_ids)
        num_bytes = job.num_bytes
        free(job)
        return num_bytes

    def runs(self, device_ids, group_sizes, block_indices, host_ids):
        """Return the runs of one transfer, in host block order.

        Parameters
        ----------
        device_ids : ndarray of int64
            Device blocks, group after group.
        group_sizes, block_indices : sequence of int
            As in `GPULoadStoreSpec`.
        host_ids : ndarray of int64
            Host blocks, group after group.

        Returns
        -------
        ndarray of int64, shape (num_runs, 3)
            Host address, device address, bytes.

        Raises
        ------
        ValueError
            An id is out of range, or the lengths do not fit.
        """
        cdef Job* job = self._job(0, device_ids, group_sizes, block_indices, host_ids)
        cdef Cursor cursor
        cdef Run run
        cdef int64_t n = 0
        cdef int64_t[:, ::1] rows
        try:
            table = np.empty((job.num_units, 3), dtype=np.int64)
            rows = table
            _open(&cursor, &self.layout, job, 0, job.num_units)
            while _next(&cursor, &run):
                rows[n, 0] = <int64_t> run.host
                rows[n, 1] = <int64_t> run.device
                rows[n, 2] = run.n_bytes
                n += 1
        finally:
            free(job)
        return table[:n].copy()

    cdef Job* _job(self, int64_t job_id, device_ids, group_sizes, block_indices, host_ids) except NULL:
        """Check a transfer and lay it out in one piece of memory, which the caller frees."""
        cdef const int64_t[::1] device = np.ascontiguousarray(device_ids, dtype=np.int64)
        cdef const int64_t[::1] host = np.ascontiguousarray(host_ids, dtype=np.int64)
        cdef int64_t num_device = device.shape[0]
        cdef int64_t num_host = host.shape[0]
        cdef int64_t num_groups = self.layout.num_groups
        cdef int64_t i, size, first_part, need, first_device = 0, first_host = 0, units = 0, num_bytes = 0
        cdef Group* group
        cdef Job* job
        cdef int32_t* ids
        if len(group_sizes) != num_groups or len(block_indices) != num_groups:
            raise ValueError(
                f"there are {num_groups} KV-cache groups, got {len(group_sizes)} group_sizes "
                f"and {len(block_indices)} block_indices"
            )
        job = <Job*> calloc(1, sizeof(Job) + num_groups * sizeof(Span) + (num_device + num_host) * sizeof(int32_t))
        if job == NULL:
            raise MemoryError()
        try:
            job.job_id = job_id
            job.spans = <Span*> (job + 1)
            ids = <int32_t*> (job.spans + num_groups)
            for i in range(num_groups):
                size = group_sizes[i]
                if size < 0 or block_indices[i] < 0 or size > num_device - first_device:
                    raise ValueError(
                        f"group_sizes must be >= 0 and add up to {num_device} block ids, and block_indices be >= 0, "
                        f"got {list(group_sizes)} and {list(block_indices)}"
                    )
                group = &self.layout.groups[i]
                first_part = block_indices[i] % self.layout.factor
                need = (first_part + size + self.layout.factor - 1) // self.layout.factor if size else 0
                if need > num_host - first_host:
                    raise ValueError(self._misfit(group_sizes, block_indices, num_host))
                if size and group.num_segments:
                    units += size * group.num_segments
                num_bytes += size * group.part_bytes
                job.spans[i] = Span(group, ids + first_device, ids + num_device + first_host, first_part, units)
                _take(&ids[first_device], device, first_device, size, group.num_blocks, "device block")
                _take(&ids[num_device + first_host], host, first_host, need, self.layout.num_host_blocks, "host block")
                first_device += size
                first_host += need
            if first_device != num_device or first_host != num_host:
                raise ValueError(self._misfit(group_sizes, block_indices, num_host))
        except BaseException:
            free(job)
            raise
        job.num_spans = num_groups
        job.num_units = units
        job.num_bytes = num_bytes
        return job

    def _misfit(self, group_sizes, block_indices, num_host):
        return (
            f"{list(group_sizes)} device blocks per group, from {list(block_indices)} on, at {self.layout.factor} to a "
            f"host block do not fill {num_host} host blocks"
        )


cdef struct Queue:
    Layout* layout
    bint to_host
    bint stopping
    pthread_mutex_t mutex
    pthread_cond_t work        # a job came, or the queue stops
    pthread_cond_t progress    # a job ended
    Job* head                  # not ended yet, oldest first; only the oldest is worked on
    Job* tail
    Job* ended_head            # not taken yet, oldest first
    Job* ended_tail
    int64_t submitted
    int64_t ended
    int num_threads
    pthread_t[MAX_THREADS] threads


cdef void _end(Queue* queue, Job* job) noexcept nogil:
    """Append a job to the ended ones. The mutex is held."""
    job.next = NULL
    job.end_s = _clock()
    if queue.ended_tail == NULL:
        queue.ended_head = job
    else:
        queue.ended_tail.next = job
    queue.ended_tail = job
    queue.ended += 1
    pthread_cond_broadcast(&queue.progress)


cdef void* _work(void* argument) noexcept nogil:
    """Copy slices of the oldest job until the queue stops and is empty."""
    cdef Queue* queue = <Queue*> argument
    cdef Job* job
    cdef int64_t first, end
    pthread_mutex_lock(&queue.mutex)
    while True:
        job = queue.head
        if job != NULL and not job.started:
            job.started = True
            job.start_s = _clock()
        if job != NULL and not job.num_active and (job.cancelled or job.next_unit == job.num_units):
            queue.head = job.next
            if queue.head == NULL:
                queue.tail = NULL
            if queue.stopping or (queue.head != NULL and queue.head.max_threads > 1):
                pthread_cond_broadcast(&queue.work)
            _end(queue, job)
        elif (
            job != NULL and not job.cancelled and job.next_unit < job.num_units and job.num_active < job.max_threads
        ):
            first = job.next_unit
            end = job.next_unit = min(first + job.units_per_slice, job.num_units)
            job.num_active += 1
            pthread_mutex_unlock(&queue.mutex)
            _copy(queue.layout, job, queue.to_host, first, end)
            pthread_mutex_lock(&queue.mutex)
            job.num_active -= 1
        elif job == NULL and queue.stopping:
            break
        else:
            pthread_cond_wait(&queue.work, &queue.mutex)
    pthread_mutex_unlock(&queue.mutex)
    return NULL


@cython.no_gc_clear
cdef class CopyQueue:
    """CopyQueue(geometry, to_host, num_threads=0, inline_bytes=131072)

    Transfers of one direction, run by C threads in the order in which they were submitted.

    Parameters
    ----------
    geometry : Geometry
        Where the bytes lie; the queue keeps it, and with it the memory, until its threads have ended.
    to_host : bool
        Whether bytes go from the device's blocks to the host's.
    num_threads : int
        At most so many threads, 1..64; 0: by the CPUs this process may use, at most 4. A job gets one per MiB.
    inline_bytes : int
        A job of at most so many bytes is copied by the caller at once if nothing is in flight.

    Notes
    -----
    One thread submits; any may wait. Threads start with the first job they are needed for. A process that forks must
    make queues of its own.
    """

    cdef Geometry geometry
    cdef Queue queue
    cdef int max_threads
    cdef int64_t inline_bytes
    cdef int pid
    cdef bint closed

    def __cinit__(self, Geometry geometry not None, bint to_host, int num_threads=0, int64_t inline_bytes=131072):
        if not 0 <= num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads must be in 0..{MAX_THREADS}, got {num_threads}")
        self.geometry = geometry
        self.max_threads = num_threads or min(4, len(os.sched_getaffinity(0)))
        self.inline_bytes = inline_bytes
        self.pid = getpid()
        self.queue.layout = &geometry.layout
        self.queue.to_host = to_host
        pthread_mutex_init(&self.queue.mutex, NULL)
        pthread_cond_init(&self.queue.work, NULL)
        pthread_cond_init(&self.queue.progress, NULL)

    def __dealloc__(self):
        if self.geometry is None or getpid() != self.pid:
            return
        self._stop(True)
        _free_jobs(self.queue.ended_head)
        pthread_mutex_destroy(&self.queue.mutex)
        pthread_cond_destroy(&self.queue.work)
        pthread_cond_destroy(&self.queue.progress)

    def submit(self, int64_t job_id, device_ids, group_sizes, block_indices, host_ids, bint lost=False):
        """Check a transfer and queue it.

        Parameters
        ----------
        job_id : int
            Given back when the job has ended.
        device_ids, host_ids : ndarray of int64
            Blocks, group after group; copied.
        group_sizes, block_indices : sequence of int
            As in `GPULoadStoreSpec`.
        lost : bool
            Whether the memory is known to be gone: the job ends as failed when its turn comes, and moves nothing.

        Returns
        -------
        int
            The job's place in the order of submission, for `wait`.

        Raises
        ------
        ValueError
            An id is out of range, or the lengths do not fit; no byte has moved.
        RuntimeError
            The queue is closed, or belongs to the process that forked this one.
        """
        cdef Queue* queue = &self.queue
        cdef Job* job
        cdef int64_t sequence
        cdef bint at_once
        self._check_open()
        job = self.geometry._job(job_id, device_ids, group_sizes, block_indices, host_ids)
        job.cancelled = lost
        job.max_threads = <int> min(self.max_threads, 1 + job.num_bytes // THREAD_BYTES)
        job.units_per_slice = max(1, SLICE_BYTES * job.num_units // max(job.num_bytes, 1))
        # Nobody else appends, and an empty queue stays empty: the caller may copy without the mutex. It keeps the
        # GIL: giving it up for some microseconds can cost milliseconds to get it back.
        pthread_mutex_lock(&queue.mutex)
        sequence = queue.submitted = queue.submitted + 1
        at_once = queue.head == NULL and (lost or job.num_bytes <= self.inline_bytes)
        pthread_mutex_unlock(&queue.mutex)
        # Where no thread can be had none is busy either, and the caller does what it must.
        if at_once or not self._start_threads(job.max_threads):
            job.start_s = _clock()
            if not lost:
                _copy(queue.layout, job, queue.to_host, 0, job.num_units)
            pthread_mutex_lock(&queue.mutex)
            _end(queue, job)
            pthread_mutex_unlock(&queue.mutex)
            return sequence
        pthread_mutex_lock(&queue.mutex)
        if queue.tail == NULL:
            queue.head = job
        else:
            queue.tail.next = job
        queue.tail = job
        if job.max_threads > 1:
            pthread_cond_broadcast(&queue.work)
        else:
            pthread_cond_signal(&queue.work)
        pthread_mutex_unlock(&queue.mutex)
        return sequence

    def take_ended(self):
        """Return `(job_id, success, num_bytes, seconds)` of each job that ended since the last call, in order."""
        cdef Job* job
        cdef Job* first
        cdef list ended = []
        self._check_process()
        pthread_mutex_lock(&self.queue.mutex)
        first = job = self.queue.ended_head
        self.queue.ended_head = self.queue.ended_tail = NULL
        pthread_mutex_unlock(&self.queue.mutex)
        while job != NULL:
            ended.append((job.job_id, not job.cancelled, job.num_bytes, job.end_s - job.start_s))
            job = job.next
        _free_jobs(first)
        return ended

    def wait(self, int64_t sequence):
        """Return once the job that `submit` gave this place has ended, and all before it."""
        cdef Queue* queue = &self.queue
        cdef bint ended = False
        cdef timespec until
        self._check_process()
        if sequence > queue.submitted:
            raise ValueError(f"only {queue.submitted} jobs were submitted, got {sequence}")
        while not ended:
            with nogil:
                clock_gettime(CLOCK_REALTIME, &until)
                until.tv_nsec += 100_000_000
                if until.tv_nsec >= 1_000_000_000:
                    until.tv_nsec -= 1_000_000_000
                    until.tv_sec += 1
                pthread_mutex_lock(&queue.mutex)
                if queue.ended < sequence:
                    pthread_cond_timedwait(&queue.progress, &queue.mutex, &until)
                ended = queue.ended >= sequence
                pthread_mutex_unlock(&queue.mutex)
            PyErr_CheckSignals()

    def cancel(self, int64_t job_id):
        """Let a job that has not ended end as failed, as soon as its copying threads notice.

        Returns
        -------
        bool
            Whether there was such a job. What it has copied by then stays copied.
        """
        cdef Job* job
        cdef bint found = False
        self._check_process()
        pthread_mutex_lock(&self.queue.mutex)
        job = self.queue.head
        while job != NULL:
            if job.job_id == job_id:
                job.cancelled = found = True
            job = job.next
        pthread_cond_broadcast(&self.queue.work)
        pthread_mutex_unlock(&self.queue.mutex)
        return found

    def close(self, bint abandon=False):
        """Take no more jobs, and return once those in flight have ended: as failed, if they are abandoned."""
        self._check_process()
        self.closed = True
        self._stop(abandon)

    cdef void _stop(self, bint abandon) noexcept:
        cdef Queue* queue = &self.queue
        cdef Job* job
        cdef int i
        pthread_mutex_lock(&queue.mutex)
        queue.stopping = True
        job = queue.head
        while job != NULL:
            job.cancelled |= abandon
            job = job.next
        pthread_cond_broadcast(&queue.work)
        pthread_mutex_unlock(&queue.mutex)
        with nogil:
            for i in range(queue.num_threads):
                pthread_join(queue.threads[i], NULL)
        queue.num_threads = 0

    cdef int _start_threads(self, int n) noexcept:
        """Have `n` threads, or as many as the system gives; return how many there are."""
        cdef sigset_t all_signals, before
        cdef int error = 0
        if self.queue.num_threads >= n:
            return n
        # Signals belong to the interpreter's threads.
        sigfillset(&all_signals)
        pthread_sigmask(SIG_SETMASK, &all_signals, &before)
        while self.queue.num_threads < n and not error:
            error = pthread_create(&self.queue.threads[self.queue.num_threads], NULL, _work, &self.queue)
            self.queue.num_threads += not error
        pthread_sigmask(SIG_SETMASK, &before, NULL)
        return self.queue.num_threads

    cdef int _check_process(self) except -1:
        if getpid() != self.pid:
            raise RuntimeError(f"this queue belongs to process {self.pid}, not to its fork {getpid()}")
        return 0

    cdef int _check_open(self) except -1:
        self._check_process()
        if self.closed:
            raise RuntimeError("the queue is closed")
        return 0


cdef void _free_jobs(Job* job) noexcept nogil:
    cdef Job* after
    while job != NULL:
        after = job.next
        free(job)
        job = after


cdef struct Stretch:
    char* start
    char* end


cdef void* _touch(void* argument) noexcept nogil:
    cdef Stretch* stretch = <Stretch*> argument
    cdef volatile char* byte = stretch.start
    while byte < stretch.end:
        byte[0] = 0
        byte += PAGE_BYTES
    return NULL


def touch_pages(uintptr_t address, int64_t num_bytes, int num_threads):
    """Write a zero to every page of a fresh mapping, so that the system backs it now and in parallel.

    Parameters
    ----------
    address : int
        First byte, at a page's start.
    num_bytes : int
        Length of the mapping.
    num_threads : int
        Threads that share the work, 1..64.
    """
    cdef pthread_t[MAX_THREADS] threads
    cdef Stretch[MAX_THREADS] stretches
    cdef int64_t num_pages = (num_bytes + PAGE_BYTES - 1) // PAGE_BYTES
    cdef int i, started = 0
    if not 1 <= num_threads <= MAX_THREADS:
        raise ValueError(f"num_threads must be in 1..{MAX_THREADS}, got {num_threads}")
    with nogil:
        for i in range(num_threads):
            stretches[i].start = <char*> address + num_pages * i // num_threads * PAGE_BYTES
            stretches[i].end = <char*> address + min(num_pages * (i + 1) // num_threads * PAGE_BYTES, num_bytes)
        while started < num_threads - 1 and not pthread_create(&threads[started], NULL, _touch, &stretches[started]):
            started += 1
        # The caller does the last stretch, and those for which no thread could be had.
        for i in range(started, num_threads):
            _touch(&stretches[i])
        for i in range(started):
            pthread_join(threads[i], NULL)
