"""Transfers of one direction in a queue, and the threads that work on it.

Compiled because an engine's thread that never lets go of the GIL must not hold up a copy: the threads here are plain
C, and need no interpreter to start, run or finish a transfer.

Whoever changes this file keeps five rules, and then runs `make tsan`, which takes minutes and finds a broken one:

1. The mutex guards the list of jobs, and of each job `next_unit` and `num_active`. It is never held during a copy, nor
   while Python runs. The plan of a job does not change after `submit`.
2. Only the job at `head` is worked on. It ends when it has no unit left and no thread copies one (`num_active`). So
   jobs end in the order of submission, and no slice of a later job overlaps one of an earlier job.
3. The jobs before `head` have ended: no thread touches them, and only `get_finished` frees them.
4. A thread sleeps on `work` only while `_advance` has nothing to do. Each change that gives it something to do (a job
   in an empty queue, a new head, `stopping`) signals `work`; each end of a job signals `progress`.
5. The threads use the geometry's memory. They are joined before it is freed, also when the queue is dropped. A forked
   child has none of them, so it frees and joins nothing.
"""

import os

cimport cython

from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.signal cimport sigfillset, sigset_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport getpid

from kvcache.transfer._native.plan cimport Geometry
from kvcache.transfer._native.pthread cimport (
    pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_init, pthread_cond_signal, pthread_cond_t,
    pthread_cond_timedwait, pthread_cond_wait, pthread_condattr_destroy, pthread_condattr_init,
    pthread_condattr_setclock, pthread_condattr_t, pthread_create, pthread_join, pthread_mutex_destroy,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, pthread_sigmask, pthread_t,
)
from kvcache.transfer._native.runs cimport Cursor, Layout, Plan, Run, next_run, open_runs


cdef extern from "stream_copy.h" nogil:
    void kvcache_stream(char* dst, const char* src, size_t n)
    void kvcache_stream_fence()


cdef extern from "signal.h" nogil:
    int SIG_SETMASK


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


# Measured sizes: the slice that a thread takes at once, the bytes that are worth another thread, and the size from
# which streaming stores beat the C library's copy.
cdef enum:
    SLICE_BYTES = 262_144
    THREAD_BYTES = 1_048_576
    STREAM_JOB_BYTES = 1_048_576
    STREAM_RUN_BYTES = 8_192
    MAX_THREADS = 64


cdef struct Job:
    Job* next
    int64_t job_id
    Plan* plan
    int64_t units_per_slice
    int64_t next_unit
    int num_active
    int max_threads
    bint cancelled
    double start_s             # 0 before the first slice
    double end_s


cdef void _copy(const Layout* layout, const Plan* plan, bint to_host, int64_t first, int64_t end) noexcept nogil:
    cdef Cursor cursor
    cdef Run run
    cdef bint stream = plan.num_bytes >= STREAM_JOB_BYTES
    cdef char* dst
    cdef char* src
    open_runs(&cursor, layout, plan, first, end)
    while next_run(&cursor, &run):
        dst, src = (run.host, run.device) if to_host else (run.device, run.host)
        if stream and run.n_bytes >= STREAM_RUN_BYTES:
            kvcache_stream(dst, src, run.n_bytes)
        else:
            memcpy(dst, src, run.n_bytes)
    if stream:
        kvcache_stream_fence()


cdef double _clock() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9


cdef struct Queue:
    const Layout* layout
    bint to_host
    pthread_mutex_t mutex      # guards what follows
    pthread_cond_t work        # a job was queued, or the queue stops
    pthread_cond_t progress    # a job has ended, or the threads were joined
    bint stopping
    bint joining               # one caller joins the threads, the others wait for it
    Job* first                 # the oldest job that was not taken; those before `head` have ended
    Job* head                  # the oldest job that has not ended; only this one is worked on
    Job* tail
    int64_t submitted
    int64_t ended
    int num_threads
    pthread_t[MAX_THREADS] threads


cdef int64_t _append(Queue* queue, Job* job) noexcept nogil:
    """Append a job, and return its place in the order of submission. The mutex is held."""
    if queue.tail == NULL:
        queue.first = job
    else:
        queue.tail.next = job
    queue.tail = job
    if queue.head == NULL:
        queue.head = job
    queue.submitted += 1
    return queue.submitted


cdef void _end(Queue* queue) noexcept nogil:
    """End the oldest job. The mutex is held."""
    queue.head.end_s = _clock()
    queue.head = queue.head.next
    queue.ended += 1
    pthread_cond_broadcast(&queue.progress)


cdef bint _advance(Queue* queue) noexcept nogil:
    """Copy a slice of the oldest job, or end it; return whether there was anything to do. The mutex is held."""
    cdef Job* job = queue.head
    cdef int64_t first, end
    if job == NULL:
        return False
    if not job.start_s:
        job.start_s = _clock()
    if not job.num_active and (job.cancelled or job.next_unit == job.plan.num_units):
        _end(queue)
        if queue.stopping or (queue.head != NULL and queue.head.max_threads > 1):
            pthread_cond_broadcast(&queue.work)
        return True
    if job.cancelled or job.next_unit == job.plan.num_units or job.num_active == job.max_threads:
        return False
    first = job.next_unit
    end = job.next_unit = min(first + job.units_per_slice, job.plan.num_units)
    job.num_active += 1
    pthread_mutex_unlock(&queue.mutex)
    _copy(queue.layout, job.plan, queue.to_host, first, end)
    pthread_mutex_lock(&queue.mutex)
    job.num_active -= 1
    return True


cdef void* _work(void* argument) noexcept nogil:
    """Do what there is to do until the queue stops and is empty."""
    cdef Queue* queue = <Queue*> argument
    pthread_mutex_lock(&queue.mutex)
    while queue.head != NULL or not queue.stopping:
        if not _advance(queue):
            pthread_cond_wait(&queue.work, &queue.mutex)
    pthread_mutex_unlock(&queue.mutex)
    return NULL


cdef bint _help(Queue* queue, int64_t sequence, double end_s) noexcept nogil:
    """Copy, or sleep where threads do it, until a job has ended or the clock is at `end_s`; return if it has ended."""
    cdef timespec until
    cdef bint has_ended
    until.tv_sec = <int64_t> end_s
    until.tv_nsec = <int64_t> ((end_s - until.tv_sec) * 1e9)
    pthread_mutex_lock(&queue.mutex)
    while queue.ended < sequence and _clock() < end_s:
        if not _advance(queue):
            pthread_cond_timedwait(&queue.progress, &queue.mutex, &until)
    has_ended = queue.ended >= sequence
    # The threads may sleep because this one had taken their place.
    if queue.head != NULL:
        pthread_cond_broadcast(&queue.work)
    pthread_mutex_unlock(&queue.mutex)
    return has_ended


cdef void _join(Queue* queue) noexcept nogil:
    """Return once the threads of a stopping queue have ended; any number of callers."""
    cdef int i
    pthread_mutex_lock(&queue.mutex)
    # A thread can be joined once only.
    while queue.joining:
        pthread_cond_wait(&queue.progress, &queue.mutex)
    if queue.num_threads:
        queue.joining = True
        pthread_mutex_unlock(&queue.mutex)
        for i in range(queue.num_threads):
            pthread_join(queue.threads[i], NULL)
        pthread_mutex_lock(&queue.mutex)
        queue.num_threads = 0
        queue.joining = False
        pthread_cond_broadcast(&queue.progress)
    pthread_mutex_unlock(&queue.mutex)


@cython.no_gc_clear
cdef class CopyQueue:
    """CopyQueue(geometry, to_host, num_threads=0, inline_bytes=131072)

    Transfers of one direction, run by C threads in the order in which they were submitted.

    The queue keeps the geometry, and with it the memory, until its threads have ended. It has at most `num_threads`
    threads, 1..64; 0: one per CPU of this process, at most 4. A job gets one per MiB. A job of at most `inline_bytes`
    is copied by the caller at once if nothing is in flight.

    Any thread may call any method; jobs that two threads submit at once are queued in either order. Copying threads
    start with the first job they are needed for. A process that forks must make queues of its own.
    """

    cdef Geometry geometry
    cdef Queue queue
    cdef int max_threads
    cdef int64_t inline_bytes
    cdef int pid

    def __cinit__(self, Geometry geometry not None, bint to_host, int num_threads=0, int64_t inline_bytes=131072):
        cdef pthread_condattr_t attributes
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
        # By the monotonic clock: a step of the wall clock must not stretch a timed wait.
        pthread_condattr_init(&attributes)
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
        pthread_cond_init(&self.queue.progress, &attributes)
        pthread_condattr_destroy(&attributes)

    def __dealloc__(self):
        if self.geometry is None or getpid() != self.pid:
            return
        self._stop(True)
        _free_jobs(self.queue.first, NULL)
        pthread_mutex_destroy(&self.queue.mutex)
        pthread_cond_destroy(&self.queue.work)
        pthread_cond_destroy(&self.queue.progress)

    @cython.critical_section
    def submit(self, int64_t job_id, device_ids, group_sizes, block_indices, host_ids, bint lost=False):
        """Check a transfer as `Geometry.runs` does, queue it, and return its place in the order of submission.

        It raises before any byte moves: ValueError, or RuntimeError if the queue is closed or belongs to the parent
        process. With `lost`, the memory is gone: the job ends as failed when its turn comes, and moves nothing.
        """
        cdef Queue* queue = &self.queue
        cdef Plan* plan
        cdef Job* job
        cdef int64_t sequence
        cdef bint at_once, stopping
        self._check_process()
        plan = self.geometry.plan(device_ids, group_sizes, block_indices, host_ids)
        job = <Job*> calloc(1, sizeof(Job))
        if job == NULL:
            free(plan)
            raise MemoryError()
        job.job_id = job_id
        job.plan = plan
        job.cancelled = lost
        job.max_threads = <int> min(self.max_threads, 1 + plan.num_bytes // THREAD_BYTES)
        job.units_per_slice = max(1, SLICE_BYTES * plan.num_units // max(plan.num_bytes, 1))
        # From here on no Python runs, so the GIL (or the critical section) excludes other submissions: an empty queue
        # stays empty, and the caller may copy without the mutex. Releasing the GIL for microseconds can cost
        # milliseconds to get it back.
        pthread_mutex_lock(&queue.mutex)
        stopping = queue.stopping
        at_once = queue.head == NULL and (lost or plan.num_bytes <= self.inline_bytes)
        pthread_mutex_unlock(&queue.mutex)
        if stopping:
            _free_jobs(job, NULL)
            raise RuntimeError("the queue is closed")
        # If no thread can be started, none is busy, and the caller copies.
        if at_once or not self._start_threads(job.max_threads):
            job.start_s = _clock()
            if not lost:
                _copy(queue.layout, plan, queue.to_host, 0, plan.num_units)
            pthread_mutex_lock(&queue.mutex)
            sequence = _append(queue, job)
            _end(queue)
            pthread_mutex_unlock(&queue.mutex)
            return sequence
        pthread_mutex_lock(&queue.mutex)
        sequence = _append(queue, job)
        if job.max_threads > 1:
            pthread_cond_broadcast(&queue.work)
        else:
            pthread_cond_signal(&queue.work)
        pthread_mutex_unlock(&queue.mutex)
        return sequence

    def get_finished(self):
        """Return `(job_id, success, num_bytes, seconds)` of each job that ended since the last call, in order."""
        cdef Queue* queue = &self.queue
        cdef Job* job
        cdef Job* first
        cdef Job* stop
        cdef list ended = []
        self._check_process()
        pthread_mutex_lock(&queue.mutex)
        first, stop = queue.first, queue.head
        queue.first = stop
        if stop == NULL:
            queue.tail = NULL
        pthread_mutex_unlock(&queue.mutex)
        job = first
        try:
            while job != stop:
                ended.append((job.job_id, not job.cancelled, job.plan.num_bytes, job.end_s - job.start_s))
                job = job.next
        finally:
            _free_jobs(first, stop)
        return ended

    def wait(self, int64_t sequence, double most_s=INFINITY):
        """Return once the job that `submit` gave this place has ended, and all before it, or `most_s` have passed.

        The caller copies too, in the place of one of the threads: waking those can take longer than a small job.
        """
        cdef bint has_ended
        cdef double end_s = _clock() + most_s
        cdef int64_t submitted
        self._check_process()
        pthread_mutex_lock(&self.queue.mutex)
        submitted = self.queue.submitted
        has_ended = self.queue.ended >= sequence
        pthread_mutex_unlock(&self.queue.mutex)
        if sequence > submitted:
            raise ValueError(f"only {submitted} jobs were submitted, got {sequence}")
        while not has_ended and _clock() < end_s:
            with nogil:
                has_ended = _help(&self.queue, sequence, min(end_s, _clock() + 0.1))
            PyErr_CheckSignals()

    @cython.critical_section
    def close(self, bint abandon=False):
        """Take no more jobs, and return once those in flight have ended: as failed, if they are abandoned.

        Any number of threads may call it, any number of times; each returns when the copying threads have ended.
        """
        self._check_process()
        self._stop(abandon)

    cdef void _stop(self, bint abandon) noexcept:
        cdef Queue* queue = &self.queue
        cdef Job* job
        pthread_mutex_lock(&queue.mutex)
        queue.stopping = True
        job = queue.head
        while job != NULL:
            job.cancelled |= abandon
            job = job.next
        pthread_cond_broadcast(&queue.work)
        pthread_mutex_unlock(&queue.mutex)
        with nogil:
            _join(queue)

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


cdef void _free_jobs(Job* job, Job* stop) noexcept nogil:
    cdef Job* after
    while job != stop:
        after = job.next
        free(job.plan)
        free(job)
        job = after
