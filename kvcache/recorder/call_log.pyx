"""CallLog: a bounded buffer of bytes that calls are written to while they are made.

Compiled because it is written to in the scheduler's thread, at every call. Nothing here waits, takes a lock or touches
a file: a thread of the recorder takes full chunks away, and where there is no chunk left, calls are counted and not
recorded.

A chunk stands for itself: keys that a call before it named are named anew. Inside it, the keys of a call that an
earlier one named (the very objects, in the same order) are a reference to those, and cost a comparison of pointers.
Other keys are a pointer each: the recorder's thread puts the hash in its place.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from kvcache.core.key_hash cimport kv_hash
from kvcache.core.memory cimport pause_collector, resume_collector

cdef extern from *:
    """
    static inline void kv_narrow(char *to, const int64_t *from, Py_ssize_t n)
    {
        for (Py_ssize_t i = 0; i < n; i++) {
            int32_t narrow = (int32_t)from[i];
            memcpy(to + 4 * i, &narrow, 4);
        }
    }
    static inline void kv_widen(char *to, const char *from, Py_ssize_t n)
    {
        for (Py_ssize_t i = 0; i < n; i++) {
            int32_t narrow;
            memcpy(&narrow, from + 4 * i, 4);
            int64_t wide = narrow;
            memcpy(to + 8 * i, &wide, 8);
        }
    }
    """
    void kv_narrow(char* to, const int64_t* values, Py_ssize_t n) noexcept nogil
    void kv_widen(char* to, const char* values, Py_ssize_t n) noexcept nogil

cdef extern from "Python.h":
    char* PyByteArray_AS_STRING(object chunk) noexcept
    Py_ssize_t PyBytes_GET_SIZE(PyObject* key) noexcept nogil
    PyObject** PySequence_Fast_ITEMS(object keys) noexcept
    PyThread_type_lock PyThread_allocate_lock() noexcept nogil
    void PyThread_free_lock(PyThread_type_lock lock) noexcept nogil
    bint PyThread_acquire_lock(PyThread_type_lock lock, int waits) noexcept nogil
    int PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds, int is_signalled) noexcept nogil
    void PyThread_release_lock(PyThread_type_lock lock) noexcept nogil

cdef enum:
    LEAST_KEPT = 3          # a shorter list costs less written out than looked for
    MAX_RECORD_BYTES = 1 << 26
    CHUNK_SLACK = 64        # for what is put in front of a chunk's first record
    GROUP_BYTES = 4         # at a key's end
    KEYS_IN_A_ROW = 4096    # let go of before another thread may have the GIL: some tens of microseconds

# Keys of a chunk that are pointers still (strong; NO_KEY: there was none), or block ids, which lie before it (IDS: of 8
# bytes, SLOTS: of 4); from the chunk's end down, one after the other.
cdef struct Span:
    uint32_t offset
    uint32_t n

cdef uint32_t IDS = 0xffffffff, SLOTS = 0xfffffffe

cdef PyObject* NO_KEY = <PyObject*> <size_t> 1


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class RequestLog:
    """RequestLog()

    What a log remembers of one request: its number, the keys that it named last, and which positions were written.
    """


@cython.final
cdef class CallLog:
    """CallLog(salt, chunk_bytes, max_chunks, max_record_bytes)

    The buffer that calls are written to.

    Parameters
    ----------
    salt : bytes
        32 bytes, the key of the hash that stands for a key.
    chunk_bytes : int
        Bytes of one chunk.
    max_chunks : int
        Chunks that are full, or being written to a file, at most; calls beyond that are not recorded.
    max_record_bytes : int
        A longer record is lost. One that is longer than a chunk takes the place of as many as it needs.

    Attributes
    ----------
    num_records, num_lost, num_overlapped : int
        Records written so far, records for which there was no room, and calls that were made while another thread was
        inside one, so that their order is not known.
    has_groups : bool
        Whether the KV-cache group of keys with a position is recorded: an arbiter decides by it.
    """

    def __cinit__(
        self, bytes salt not None, Py_ssize_t chunk_bytes, Py_ssize_t max_chunks, Py_ssize_t max_record_bytes,
        clock=None,
    ):
        if len(salt) != sizeof(self.secret):
            raise ValueError(f"salt must be {sizeof(self.secret)} bytes, got {len(salt)}")
        if chunk_bytes < 1024 or max_chunks < 1:
            raise ValueError(f"a log needs chunks of at least 1024 bytes, got {max_chunks} of {chunk_bytes}")
        memcpy(self.secret, <const char*> salt, sizeof(self.secret))
        self.chunk_bytes = chunk_bytes
        self.num_chunks = self.max_chunks = max_chunks
        self.max_record_bytes = min(max_record_bytes, MAX_RECORD_BYTES)
        # Written now: a page that is first touched in a scheduler's call would stall it.
        self.idle = [bytearray(chunk_bytes) for _ in range(max_chunks)]
        self.full = []
        self.clock = clock
        self.bell = PyThread_allocate_lock()
        if self.bell == NULL:
            raise MemoryError("no memory for a lock")
        PyThread_acquire_lock(self.bell, True)
        self.is_closed = True
        self.nobody = RequestLog()
        self.run_answer = -1

    def __dealloc__(self):
        if self.bell != NULL:
            PyThread_free_lock(self.bell)

    # ---- the recorder's thread ---------------------------------------------------------------------------------

    cdef void _ring(self) noexcept:
        """Wake the recorder's thread; by a lock of C, since a call of Python could let other threads run."""
        if not self.is_rung:
            self.is_rung = True
            PyThread_release_lock(self.bell)

    def wait(self, double seconds):
        """Wait for a full chunk or the end, for so long at most; return whether the end has come."""
        cdef long long microseconds = <long long> (seconds * 1e6)
        with nogil:
            PyThread_acquire_lock_timed(self.bell, microseconds, False)
        with cython.critical_section(self):
            PyThread_acquire_lock(self.bell, False)  # it may have rung since
            self.is_rung = False
            return self.is_ended

    def take(self):
        """Return what was written and not taken yet; a record that is being written is not cut.

        Keys are hashed here, without the GIL.

        Returns
        -------
        list of (bytearray, int, int, int, bytes, bytes)
            Chunk, bytes used of it, number of its first record, records in it, and the block ids that belong to them:
            lengths of the lists (uint32), then all ids (int64). The chunk is the caller's until `give_back`.
        """
        cdef bint was_collecting
        with cython.critical_section(self):
            was_collecting = pause_collector()
            try:
                self._close_chunk()
            finally:
                resume_collector(was_collecting)
            taken = self.full
            self.full = []
        return [(*one[:4], *self._finish(one[0], one[4])) for one in taken]

    cdef tuple _finish(self, bytearray chunk, Py_ssize_t end):
        """Put hashes in the place of the pointers in a chunk, let go of the keys, and return the block ids."""
        cdef char* base = PyByteArray_AS_STRING(chunk)
        cdef char* stop = base + end
        cdef char* next = base + len(chunk)
        cdef char* at
        cdef uint64_t* hashes = <uint64_t*> malloc(len(chunk))
        cdef PyObject* key
        cdef uint64_t hash
        cdef Span span
        cdef Py_ssize_t j, num_hashed = 0, num_lists = 0, num_ids = 0
        with nogil:
            while next > stop:
                next -= SPAN_BYTES
                memcpy(&span, next, SPAN_BYTES)
                if span.offset >= SLOTS:
                    next -= (8 if span.offset == IDS else 4) * <Py_ssize_t> span.n
                    num_lists += 1
                    num_ids += span.n
                    continue
                if hashes == NULL:
                    continue
                at = base + span.offset
                for j in range(span.n):
                    memcpy(&key, at + 8 * j, 8)
                    hashes[num_hashed] = self.hash_key(key)
                    num_hashed += 1
        cdef bytes counts = PyBytes_FromStringAndSize(NULL, 4 * num_lists)
        cdef bytes ids = PyBytes_FromStringAndSize(NULL, 8 * num_ids)
        cdef char* count_at = PyBytes_AS_STRING(counts)
        cdef char* ids_at = PyBytes_AS_STRING(ids)
        num_hashed = 0
        next = base + len(chunk)
        while next > stop:
            next -= SPAN_BYTES
            memcpy(&span, next, SPAN_BYTES)
            if span.offset == IDS:
                next -= 8 * <Py_ssize_t> span.n
                memcpy(count_at, &span.n, 4)
                memcpy(ids_at, next, 8 * <Py_ssize_t> span.n)
                ids_at += 8 * <Py_ssize_t> span.n
                count_at += 4
                continue
            if span.offset == SLOTS:
                next -= 4 * <Py_ssize_t> span.n
                memcpy(count_at, &span.n, 4)
                kv_widen(ids_at, next, span.n)
                count_at += 4
                ids_at += 8 * <Py_ssize_t> span.n
                continue
            at = base + span.offset
            for j in range(span.n):
                memcpy(&key, at + 8 * j, 8)
                hash = hashes[num_hashed] if hashes != NULL else self.hash_key(key)
                memcpy(at + 8 * j, &hash, 8)
                if key != NO_KEY:
                    Py_DECREF(<object> key)
                num_hashed += 1
                if num_hashed % KEYS_IN_A_ROW == 0:
                    with nogil:
                        pass
        free(hashes)
        return counts, ids

    @cython.critical_section
    def give_back(self, bytearray chunk not None):
        """Take back a chunk that has been written to a file."""
        if len(chunk) == self.chunk_bytes:
            self.idle.append(chunk)
        else:
            self.num_chunks -= (len(chunk) + self.chunk_bytes - 1) // self.chunk_bytes

    @cython.critical_section
    def close(self):
        """Record nothing from now on."""
        self.is_closed = self.is_ended = True
        self._ring()

    def hash_of(self, key):
        """Return what stands for a key: 8 bytes."""
        return self.hash_key(<PyObject*> key).to_bytes(8, "little")

    # ---- room --------------------------------------------------------------------------------------------------

    cdef int _close_chunk(self) except -1:
        cdef Py_ssize_t used, end
        if self.chunk is None:
            return 0
        used = self.at - self.base
        end = self.end - self.base
        self.full.append((self.chunk, used, self.first_record, self.num_records - self.first_record, end))
        self.chunk = None
        self.base = self.at = self.end = NULL
        self.run_answer = -1
        return 0

    cdef int lose(self) except -1:
        """Count a record that is not written; the next chunk, which begins with the next record, names it."""
        self._close_chunk()
        self.num_lost += 1
        self.num_unreported += 1
        return 0

    cdef int lose_order(self) except -1:
        """Count a call whose order among others is not known: what is held after it is not known, either."""
        self.num_overlapped += 1
        if not self.is_closed:
            self.lose()
        return 0

    cdef bint _open_chunk(self, Py_ssize_t num_bytes) except -1:
        """Begin a chunk with room for so many bytes; False: there is none, and a record is lost."""
        cdef bint was_collecting = pause_collector()
        try:
            return self._change_chunk(num_bytes)
        finally:
            resume_collector(was_collecting)

    cdef bint _change_chunk(self, Py_ssize_t num_bytes) except -1:
        if self.chunk is not None:
            self._close_chunk()
            self._ring()
        if num_bytes > self.max_record_bytes or not self._take_room(num_bytes + CHUNK_SLACK):
            self.lose()
            return False
        self.base = self.at = PyByteArray_AS_STRING(self.chunk)
        self.end = self.base + len(self.chunk)
        self.first_record = self.num_records
        self.num_lists = 0
        self.last_ns = 0
        self.chunk_number += 1
        if self.num_unreported:
            self.at[0] = LOST
            self.at = kv_put_number(self.at + 1, self.num_unreported)
            self.num_unreported = 0
            self.num_records += 1
        return True

    cdef bint _take_room(self, Py_ssize_t num_bytes) except -1:
        """Take a chunk of at least so many bytes, in the place of as many of the usual size as it needs, if free."""
        cdef Py_ssize_t n = (num_bytes + self.chunk_bytes - 1) // self.chunk_bytes
        if n > len(self.idle) + self.max_chunks - self.num_chunks:
            return False
        if n == 1 and self.idle:
            self.chunk = self.idle.pop()
            return True
        try:
            self.chunk = bytearray(max(num_bytes, self.chunk_bytes))
        except MemoryError:
            return False
        self.num_chunks += n
        while self.num_chunks > self.max_chunks:
            self.idle.pop()
            self.num_chunks -= 1
        return True

    # ---- what records are made of ------------------------------------------------------------------------------

    cdef uint64_t hash_key(self, PyObject* key) noexcept nogil:
        cdef uint64_t hash
        if key == NO_KEY or not PyBytes_CheckExact(key):
            return 1
        if PyBytes_GET_SIZE(key) == 0:
            return 0
        hash = kv_hash(key, self.secret)
        return hash if hash > 1 else hash + 2

    cdef uint64_t digest_of(self, uint64_t before, keys, bint removed) except? 0:
        """Return the digest of events up to one of these keys."""
        cdef uint64_t digest = before * 31 + removed + 2 * <uint64_t> len(keys)
        for key in keys:
            digest = digest * <uint64_t> 1099511628211 ^ self.hash_key(<PyObject*> key)
        return digest

    cdef uint64_t hash_group(self, PyObject* key) noexcept:
        cdef Py_ssize_t n
        if not PyBytes_CheckExact(key):
            return 0
        n = min(PyBytes_GET_SIZE(key), GROUP_BYTES)
        try:
            group = PyBytes_FromStringAndSize(PyBytes_AS_STRING(<object> key) + PyBytes_GET_SIZE(key) - n, n)
        except MemoryError:
            return 0
        return kv_hash(<PyObject*> group, self.secret)

    cdef void _put_bytes(self, const char* data, Py_ssize_t n) noexcept:
        memcpy(self.at, data, n)
        self.at += n

    cdef void put_text(self, bytes text) noexcept:
        self.put_number(len(text))
        self._put_bytes(<const char*> text, len(text))

    cdef int64_t _asked_ns(self) noexcept:
        try:
            return <int64_t> (<double> self.clock() * 1e9)
        except Exception:
            return 0

    cdef void put_keys(self, object keys, RequestLog request) noexcept:
        """Write a list or tuple of keys: a reference to an earlier list of the chunk, or each of them."""
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(keys), i, start
        cdef PyObject** items = PySequence_Fast_ITEMS(keys)
        cdef PyObject* key
        cdef KeptKeys* one
        cdef char* kept
        cdef char* at = self.at
        cdef int k
        if n >= LEAST_KEPT:
            for k in range(NUM_KEPT + 1):
                one = &request.kept[k] if k < NUM_KEPT else &self.run
                if one.chunk != self.chunk_number or one.n < n:
                    continue
                kept = self.base + one.offset
                if memcmp(kept, items, sizeof(PyObject*)) == 0:
                    start = 0
                elif memcmp(kept + 8 * (one.n - n), items, sizeof(PyObject*)) == 0:
                    start = one.n - n
                else:
                    continue
                if memcmp(kept + 8 * start, items, n * sizeof(PyObject*)) == 0:
                    at = kv_put_number(at, <uint64_t> n << 1 | 1)
                    at = kv_put_number(at, self.num_lists - one.number)
                    self.at = kv_put_number(at, start)
                    return
            at = kv_put_number(at, <uint64_t> n << 1)
            self.num_lists += 1
            one = &request.kept[request.oldest]
            request.oldest = (request.oldest + 1) % NUM_KEPT
            one.chunk = self.chunk_number
            one.number = self.num_lists
            one.offset = at - self.base
            one.n = n
        else:
            at[0] = n << 1
            at += 1
            if n == 0:
                self.at = at
                return
        self._put_span(at - self.base, n)
        memcpy(at, items, n * sizeof(PyObject*))
        self.at = at + 8 * n
        for i in range(n):
            memcpy(&key, at + 8 * i, 8)
            if PyBytes_CheckExact(key):
                Py_INCREF(<object> key)
            else:
                # To let go of anything else may run Python.
                key = NO_KEY
                memcpy(at + 8 * i, &key, 8)

    cdef void _put_span(self, Py_ssize_t offset, Py_ssize_t n) noexcept:
        cdef Span span
        span.offset = <uint32_t> offset
        span.n = <uint32_t> n
        self.end -= SPAN_BYTES
        memcpy(self.end, &span, SPAN_BYTES)

    cdef void put_ids(self, const int64_t* ids, Py_ssize_t n) noexcept:
        """Write the block ids of an answer; not kept with the answer, whose memory the next one is to have."""
        self._put_span(IDS, n)
        self.end -= 8 * n
        memcpy(self.end, ids, 8 * n)

    cdef void put_slots(self, const int64_t* ids, Py_ssize_t n) noexcept:
        """Write block ids that are known to be slots of a pool, of less than 31 bits."""
        self._put_span(SLOTS, n)
        self.end -= 4 * n
        kv_narrow(self.end, ids, n)

    cdef int begin_run(self, PyObject* key, int answer) except -1:
        """Write the first look-up of a run: keys follow as long as they have the same answer."""
        cdef int64_t now_ns = self.now_ns()
        cdef uint32_t n = 1
        if not self.has_room(64):
            return 0
        self.at[0] = STATUS_RUN
        self.at = self.put_time(self.at + 1, now_ns)
        memcpy(self.at, &n, 4)
        self.at[4] = answer
        self.at += 5
        self.num_lists += 1
        self.run.chunk = self.chunk_number
        self.run.number = self.num_lists
        self.run.offset = self.at - self.base
        self.run.n = 1
        # To let go of anything else may run Python.
        if PyBytes_CheckExact(key):
            Py_INCREF(<object> key)
        else:
            key = NO_KEY
        memcpy(self.at, &key, 8)
        self.at += 8
        self._put_span(self.run.offset, 1)
        self.run_end = self.at
        self.run_answer = answer
        self.num_records += 1
        return 0

    # ---- records that are no calls -----------------------------------------------------------------------------

    @cython.critical_section
    def put_clock(self, double seconds):
        """Record what the manager's clock answered."""
        if self.has_room(16):
            self.at[0] = CLOCK
            memcpy(self.at + 1, &seconds, 8)
            self.at += 9
            self.num_records += 1
            self.clock_owner = PyThread_get_thread_ident()

    @cython.critical_section
    def put_tier_lookup(self, int tier, Py_ssize_t num_keys, answer):
        """Record what a tier answered to a look-up of so many keys."""
        if self.has_room(48):
            self.at[0] = TIER_LOOKUP
            self.at += 1
            self.put_number(tier)
            self.put_number(num_keys)
            if answer is None:
                self.put_number(0)
            elif type(answer) is int and 0 <= answer <= num_keys:
                self.put_number(<uint64_t> <Py_ssize_t> answer + 2)
            else:
                self.put_number(1)
            self.num_records += 1

    @cython.critical_section
    def put_tier_submit(self, int tier, bint is_load, uint64_t job_id, keys, bint is_taken):
        """Record whether a tier took a job."""
        if self.has_room(48 + self.keys_bytes(keys)):
            self.at[0] = TIER_SUBMIT
            self.at += 1
            self.put_number(tier)
            self.put_number(<uint64_t> is_load << 1 | is_taken)
            self.put_number(job_id)
            self.put_keys(keys, self.nobody)
            self.num_records += 1

    @cython.critical_section
    def put_tier_finished(self, int tier, list results not None):
        """Record what a tier reported: (job id or None, done, failed, removed, error) of each, or None for nonsense."""
        cdef Py_ssize_t num_bytes = 32
        for result in results:
            num_bytes += 24
            if result is not None:
                num_bytes += 3 * 48 + 8 * (len(result[1]) + len(result[2]) + len(result[3])) + len(result[4])
        if self.has_room(num_bytes):
            self.at[0] = TIER_FINISHED
            self.at += 1
            self.put_number(tier)
            self.put_number(len(results))
            for result in results:
                if result is None:
                    self.put_number(0)
                    continue
                self.put_number(1 if result[0] is None else <uint64_t> result[0] + 2)
                self.put_keys(result[1], self.nobody)
                self.put_keys(result[2], self.nobody)
                self.put_keys(result[3], self.nobody)
                self.put_text(result[4])
            self.num_records += 1

    @cython.critical_section
    def put_tier_times(self, int tier, list times not None):
        """Record when jobs that are reported next had begun and ended: (start, end) in seconds of each, or None."""
        cdef double seconds
        if self.has_room(32 + 17 * len(times)):
            self.at[0] = TIER_TIMES
            self.at += 1
            self.put_number(tier)
            self.put_number(len(times))
            for pair in times:
                self.at[0] = pair is not None
                self.at += 1
                if pair is not None:
                    for seconds in pair:
                        memcpy(self.at, &seconds, 8)
                        self.at += 8
            self.num_records += 1

    @cython.critical_section
    def put_tier_raised(self, int tier, int call):
        """Record that a method of a tier raised."""
        if self.has_room(24):
            self.at[0] = TIER_RAISED
            self.at += 1
            self.put_number(tier)
            self.put_number(call)
            self.num_records += 1

    cdef int write_stats(self, bytes text) except -1:
        """Record a manager's statistics, as JSON."""
        if self.has_room(24 + len(text)):
            self.at[0] = STATS
            self.at += 1
            self.put_text(text)
            self.num_records += 1
        return 0


@cython.final
cdef class RecordedClock:
    """RecordedClock(log, clock)

    A clock that records what another one answers.
    """

    cdef CallLog log
    cdef readonly object recorded

    def __cinit__(self, CallLog log not None, clock):
        self.log = log
        self.recorded = clock

    def __call__(self):
        """Return what the clock answers."""
        seconds = self.recorded()
        if type(seconds) is float or type(seconds) is int:
            self.log.put_clock(seconds)
        return seconds
