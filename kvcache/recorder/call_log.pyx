"""CallLog and RecordedCalls: a manager's calls, written as bytes into a bounded buffer while they are made.

Compiled because it runs in the scheduler's thread, around every call. Nothing here waits, takes a lock or touches a
file: a thread of the recorder takes full chunks away, and where there is no chunk left, calls are counted and not
recorded.

A chunk stands for itself: keys that a call before it named are named anew. Inside it, the keys of a call that an
earlier one named (the very objects, in the same order) are a reference to those, and cost a comparison of pointers.
Other keys are a pointer each: the recorder's thread puts the hash in its place.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_DECREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

import json

from kvcache.core.key_hash cimport kv_hash
from kvcache.core.memory cimport pause_collector, resume_collector
from kvcache.keys import as_key_list
from kvcache.request import ReqContext
from kvcache.specs import BlockIDsLoadStoreSpec, CPULoadStoreSpec

cdef extern from *:
    """
    #include <structmember.h>
    #include <time.h>
    #include <unistd.h>
    /* Where a slot lies in the instances of its class: to read it so costs a tenth of an attribute. */
    static Py_ssize_t kv_slot_offset(PyObject *descriptor)
    {
        if (Py_TYPE(descriptor) != &PyMemberDescr_Type) {
            PyErr_SetString(PyExc_TypeError, "not the descriptor of a slot");
            return -1;
        }
        return ((PyMemberDescrObject *)descriptor)->d_member->offset;
    }
    static inline PyObject *kv_slot(PyObject *of, Py_ssize_t offset)
    {
        return *(PyObject **)((char *)of + offset);
    }
    /* Milliseconds are enough for when a request came, and cost a fifth of a clock that is read exactly. */
    static inline int64_t kv_coarse_ns(void)
    {
        struct timespec now;
    #ifdef CLOCK_MONOTONIC_COARSE
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    #else
        clock_gettime(CLOCK_MONOTONIC, &now);
    #endif
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    static inline char *kv_put_number(char *at, uint64_t number)
    {
        while (number >= 128) {
            *at++ = (char)(number | 128);
            number >>= 7;
        }
        *at++ = (char)number;
        return at;
    }
    """
    Py_ssize_t kv_slot_offset(object descriptor) except -1
    PyObject* kv_slot(object of, Py_ssize_t offset) noexcept
    int64_t kv_coarse_ns() noexcept nogil
    char* kv_put_number(char* at, uint64_t number) noexcept nogil
    int usleep(unsigned int microseconds) nogil

cdef extern from "Python.h":
    char* PyByteArray_AS_STRING(object chunk) noexcept
    bint PyBytes_CheckExact(PyObject* key) noexcept nogil
    Py_ssize_t PyBytes_GET_SIZE(PyObject* key) noexcept nogil
    PyObject** PySequence_Fast_ITEMS(object keys) noexcept
    Py_ssize_t PySequence_Fast_GET_SIZE(object keys) noexcept
    unsigned long PyThread_get_thread_ident() noexcept nogil
    int PyDict_Next(object of, Py_ssize_t* at, PyObject** key, PyObject** value) noexcept

cdef enum:
    # As in kvcache.recorder.ops, which tests compare.
    LOOKUP_ONE = 1
    LOOKUP = 2
    STATUS = 3
    TOUCH = 4
    PREPARE_LOAD = 5
    COMPLETE_LOAD = 6
    PREPARE_STORE = 7
    COMPLETE_STORE = 8
    REORDER = 9
    REQUEST_FINISHED = 10
    RESET = 11
    TAKE_EVENTS = 12
    SCHEDULE_END = 13
    IS_COMING = 14
    HINT = 15
    REPORT_PREFILLS = 16
    CONTEXT = 64
    POSITIONS = 65
    CLOCK = 66
    TIER_LOOKUP = 67
    TIER_SUBMIT = 68
    TIER_FINISHED = 69
    TIER_RAISED = 70
    LOST = 71
    STATS = 72
    TIER_TIMES = 73
    GROUPS = 74

    A_NONE = 0
    A_FALSE = 1
    A_TRUE = 2
    A_INT = 3
    A_BLOCKS = 4
    A_OUTPUT = 5
    A_ERROR = 6
    A_EVENTS = 7
    A_OTHER = 8

    NUM_KEPT = 2            # lists of keys of a request that later ones are compared with
    LEAST_KEPT = 3          # a shorter list costs less written out than looked for
    NUM_WAITS = 10
    WAIT_US = 20
    MAX_RECORD_BYTES = 1 << 26
    GROUP_BYTES = 4         # at a key's end
    SPAN_BYTES = 8          # of a Span at a chunk's end
    KEYS_IN_A_ROW = 4096    # let go of before another thread may have the GIL: some tens of microseconds

# Where a list of keys was written to a chunk.
cdef struct KeptKeys:
    uint64_t chunk          # its number
    uint64_t number         # the list's, there
    Py_ssize_t offset
    Py_ssize_t n

# Keys of a chunk that are pointers still (strong; NO_KEY: there was none): from its end down, one after the other.
cdef struct Span:
    uint32_t offset
    uint32_t n

cdef Py_ssize_t positions_offset = kv_slot_offset(ReqContext.positions)
cdef PyObject* NO_KEY = <PyObject*> <size_t> 1


@cython.final
cdef class RequestLog:
    """RequestLog()

    What a log remembers of one request: its number, the keys that it named last, and which positions were written.
    """

    cdef uint64_t number
    cdef KeptKeys[NUM_KEPT] kept
    cdef int oldest
    cdef object positions
    cdef Py_ssize_t num_positions
    cdef Py_ssize_t next_position


@cython.final
cdef class CallLog:
    """CallLog(salt, chunk_bytes, max_chunks)

    The buffer that calls are written to.

    Parameters
    ----------
    salt : bytes
        32 bytes, the key of the hash that stands for a key.
    chunk_bytes : int
        Bytes of one chunk.
    max_chunks : int
        Chunks that are full, or being written to a file, at most; calls beyond that are not recorded.

    Attributes
    ----------
    num_records, num_lost, num_overlapped : int
        Records written so far, records for which there was no room, and calls that were made while another thread was
        inside one, so that their order is not known.
    has_groups : bool
        Whether the KV-cache group of keys with a position is recorded: an arbiter decides by it.
    """

    cdef readonly uint64_t num_records
    cdef readonly uint64_t num_lost
    cdef public uint64_t num_overlapped
    cdef public bint has_groups
    cdef uint64_t[4] secret
    cdef Py_ssize_t chunk_bytes
    cdef Py_ssize_t max_chunks
    cdef Py_ssize_t num_chunks      # that exist
    cdef list idle
    cdef list full
    cdef object chunk
    cdef list blocks                # of the chunk: the specs whose ids the recorder's thread writes
    cdef char* base
    cdef char* at
    cdef char* end                  # where the spans begin
    cdef int64_t last_ns
    cdef uint64_t first_record      # of the chunk
    cdef uint64_t num_unreported    # lost, and not yet mentioned in a chunk
    cdef uint64_t num_lists         # of the chunk
    cdef uint64_t chunk_number
    cdef RequestLog nobody          # of calls without a request
    cdef bint is_closed
    cdef object clock
    cdef object wake

    def __cinit__(self, bytes salt not None, Py_ssize_t chunk_bytes, Py_ssize_t max_chunks, clock=None, wake=None):
        if len(salt) != sizeof(self.secret):
            raise ValueError(f"salt must be {sizeof(self.secret)} bytes, got {len(salt)}")
        if chunk_bytes < 1024 or max_chunks < 1:
            raise ValueError(f"a log needs chunks of at least 1024 bytes, got {max_chunks} of {chunk_bytes}")
        memcpy(self.secret, <const char*> salt, sizeof(self.secret))
        self.chunk_bytes = chunk_bytes
        self.num_chunks = self.max_chunks = max_chunks
        # Written now: a page that is first touched in a scheduler's call would stall it.
        self.idle = [bytearray(chunk_bytes) for _ in range(max_chunks)]
        self.full = []
        self.blocks = []
        self.clock = clock
        self.wake = wake
        self.nobody = RequestLog()

    # ---- the recorder's thread ---------------------------------------------------------------------------------

    def take(self):
        """Return what was written and not taken yet; a record that is being written is not cut.

        Keys are hashed here, without the GIL.

        Returns
        -------
        list of (bytearray, int, int, list)
            Chunk, bytes used of it, number of its first record, specs whose block ids belong to its records, in order.
            The chunk is the caller's until `give_back`.
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
        for one in taken:
            self._hash_keys(one[0], one[4])
        return [one[:4] for one in taken]

    cdef int _hash_keys(self, bytearray chunk, Py_ssize_t num_spans) except -1:
        """Put hashes in the place of the pointers in a chunk, and let go of the keys."""
        cdef char* base = PyByteArray_AS_STRING(chunk)
        cdef char* end = base + len(chunk)
        cdef char* at
        cdef uint64_t* hashes = <uint64_t*> malloc(len(chunk))
        cdef PyObject* key
        cdef uint64_t hash
        cdef Span span
        cdef Py_ssize_t i, j, num_hashed = 0
        if hashes != NULL:
            with nogil:
                for i in range(num_spans):
                    memcpy(&span, end - (i + 1) * SPAN_BYTES, SPAN_BYTES)
                    at = base + span.offset
                    for j in range(span.n):
                        memcpy(&key, at + 8 * j, 8)
                        hashes[num_hashed] = self._hash(key)
                        num_hashed += 1
        num_hashed = 0
        for i in range(num_spans):
            memcpy(&span, end - (i + 1) * SPAN_BYTES, SPAN_BYTES)
            at = base + span.offset
            for j in range(span.n):
                memcpy(&key, at + 8 * j, 8)
                hash = hashes[num_hashed] if hashes != NULL else self._hash(key)
                memcpy(at + 8 * j, &hash, 8)
                if key != NO_KEY:
                    Py_DECREF(<object> key)
                num_hashed += 1
                if num_hashed % KEYS_IN_A_ROW == 0:
                    with nogil:
                        pass
        free(hashes)
        return 0

    @cython.critical_section
    def give_back(self, bytearray chunk not None):
        """Take back a chunk that has been written to a file."""
        if len(chunk) == self.chunk_bytes:
            self.idle.append(chunk)
        else:
            self.num_chunks -= 1

    @cython.critical_section
    def close(self):
        """Record nothing from now on."""
        self.is_closed = True

    def hash_of(self, key):
        """Return what stands for a key: 8 bytes."""
        return self._hash(<PyObject*> key).to_bytes(8, "little")

    # ---- room --------------------------------------------------------------------------------------------------

    cdef int _close_chunk(self) except -1:
        cdef Py_ssize_t used, num_spans
        if self.chunk is None:
            return 0
        used = self.at - self.base
        num_spans = (self.base + len(self.chunk) - self.end) // SPAN_BYTES
        self.full.append((self.chunk, used, self.first_record, self.blocks, num_spans))
        self.chunk = None
        self.base = self.at = self.end = NULL
        self.blocks = []
        return 0

    cdef bint _open_chunk(self, Py_ssize_t num_bytes) except -1:
        """Begin a chunk with room for so many bytes; False: there is none, and a record is lost."""
        cdef bint was_collecting
        if self.wake is not None:
            # Other threads may run here, and have begun one.
            self.wake()
            if self.end - self.at >= num_bytes:
                return True
        was_collecting = pause_collector()
        try:
            return self._change_chunk(num_bytes)
        finally:
            resume_collector(was_collecting)

    cdef bint _change_chunk(self, Py_ssize_t num_bytes) except -1:
        self._close_chunk()
        if num_bytes + 64 <= self.chunk_bytes:
            if self.idle:
                self.chunk = self.idle.pop()
            elif self.num_chunks < self.max_chunks:
                self.num_chunks += 1
                self.chunk = bytearray(self.chunk_bytes)
        elif num_bytes <= MAX_RECORD_BYTES and (self.idle or self.num_chunks < self.max_chunks):
            # In place of one of the usual size.
            if self.num_chunks == self.max_chunks:
                self.idle.pop()
            else:
                self.num_chunks += 1
            self.chunk = bytearray(num_bytes + 64)
        if self.chunk is None:
            self.num_lost += 1
            self.num_unreported += 1
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

    cdef inline bint _has_room(self, Py_ssize_t num_bytes) except -1:
        if self.end - self.at >= num_bytes:
            return True
        return not self.is_closed and self._open_chunk(num_bytes)

    # ---- what records are made of ------------------------------------------------------------------------------

    cdef inline uint64_t _hash(self, PyObject* key) noexcept nogil:
        cdef uint64_t hash
        if key == NO_KEY or not PyBytes_CheckExact(key):
            return 1
        if PyBytes_GET_SIZE(key) == 0:
            return 0
        hash = kv_hash(key, self.secret)
        return hash if hash > 1 else hash + 2

    cdef uint64_t _hash_of_group(self, PyObject* key) noexcept:
        cdef Py_ssize_t n
        if not PyBytes_CheckExact(key):
            return 0
        n = min(PyBytes_GET_SIZE(key), GROUP_BYTES)
        try:
            group = PyBytes_FromStringAndSize(PyBytes_AS_STRING(<object> key) + PyBytes_GET_SIZE(key) - n, n)
        except MemoryError:
            return 0
        return kv_hash(<PyObject*> group, self.secret)

    cdef inline void _put_number(self, uint64_t number) noexcept:
        self.at = kv_put_number(self.at, number)

    cdef inline void _put_bytes(self, const char* data, Py_ssize_t n) noexcept:
        memcpy(self.at, data, n)
        self.at += n

    cdef inline void _put_text(self, bytes text) noexcept:
        self._put_number(len(text))
        self._put_bytes(<const char*> text, len(text))

    cdef inline int64_t _now_ns(self) noexcept:
        """Return when it is; this may run Python, and so must not be asked within a record."""
        if self.clock is None:
            return kv_coarse_ns()
        try:
            return <int64_t> (<double> self.clock() * 1e9)
        except Exception:
            return 0

    cdef inline void _put_time(self, int64_t now_ns) noexcept:
        if now_ns < self.last_ns:
            now_ns = self.last_ns
        self._put_number((now_ns - self.last_ns) >> 10)
        # In whole units, so that what is cut off is not lost for good.
        self.last_ns += (now_ns - self.last_ns) >> 10 << 10

    cdef inline Py_ssize_t _keys_bytes(self, object keys) noexcept:
        return 40 + SPAN_BYTES + 8 * PySequence_Fast_GET_SIZE(keys)

    cdef void _put_keys(self, object keys, RequestLog request) noexcept:
        """Write a list or tuple of keys: a reference to an earlier list of the chunk, or each of them."""
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(keys), i, start
        cdef PyObject** items = PySequence_Fast_ITEMS(keys)
        cdef PyObject* key
        cdef KeptKeys* one
        cdef char* kept
        cdef uint64_t hash
        cdef Span span
        cdef int k
        if n < LEAST_KEPT:
            self._put_number(<uint64_t> n << 1)
            for i in range(n):
                hash = self._hash(items[i])
                memcpy(self.at, &hash, 8)
                self.at += 8
            return
        for k in range(NUM_KEPT):
            one = &request.kept[k]
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
                self._put_number(<uint64_t> n << 1 | 1)
                self._put_number(self.num_lists - one.number)
                self._put_number(start)
                return
        self._put_number(<uint64_t> n << 1)
        self.num_lists += 1
        one = &request.kept[request.oldest]
        request.oldest = (request.oldest + 1) % NUM_KEPT
        one.chunk = self.chunk_number
        one.number = self.num_lists
        one.offset = self.at - self.base
        one.n = n
        for i in range(n):
            key = items[i]
            # To let go of anything else may run Python.
            if PyBytes_CheckExact(key):
                Py_INCREF(<object> key)
            else:
                key = NO_KEY
            memcpy(self.at + 8 * i, &key, 8)
        self.at += 8 * n
        span.offset = <uint32_t> one.offset
        span.n = <uint32_t> n
        self.end -= SPAN_BYTES
        memcpy(self.end, &span, SPAN_BYTES)

    # ---- records that are no calls -----------------------------------------------------------------------------

    @cython.critical_section
    def put_clock(self, double seconds):
        """Record what the manager's clock answered."""
        if self._has_room(16):
            self.at[0] = CLOCK
            memcpy(self.at + 1, &seconds, 8)
            self.at += 9
            self.num_records += 1

    @cython.critical_section
    def put_tier_lookup(self, int tier, Py_ssize_t num_keys, answer):
        """Record what a tier answered to a look-up of so many keys."""
        if self._has_room(48):
            self.at[0] = TIER_LOOKUP
            self.at += 1
            self._put_number(tier)
            self._put_number(num_keys)
            if answer is None:
                self._put_number(0)
            elif type(answer) is int and 0 <= answer <= num_keys:
                self._put_number(<uint64_t> <Py_ssize_t> answer + 2)
            else:
                self._put_number(1)
            self.num_records += 1

    @cython.critical_section
    def put_tier_submit(self, int tier, bint is_load, uint64_t job_id, keys, bint is_taken):
        """Record whether a tier took a job."""
        if self._has_room(48 + self._keys_bytes(keys)):
            self.at[0] = TIER_SUBMIT
            self.at += 1
            self._put_number(tier)
            self._put_number(<uint64_t> is_load << 1 | is_taken)
            self._put_number(job_id)
            self._put_keys(keys, self.nobody)
            self.num_records += 1

    @cython.critical_section
    def put_tier_finished(self, int tier, list results not None):
        """Record what a tier reported: (job id or None, done, failed, removed, error) of each, or None for nonsense."""
        cdef Py_ssize_t num_bytes = 32
        for result in results:
            num_bytes += 24
            if result is not None:
                num_bytes += 3 * 48 + 8 * (len(result[1]) + len(result[2]) + len(result[3])) + len(result[4])
        if self._has_room(num_bytes):
            self.at[0] = TIER_FINISHED
            self.at += 1
            self._put_number(tier)
            self._put_number(len(results))
            for result in results:
                if result is None:
                    self._put_number(0)
                    continue
                self._put_number(1 if result[0] is None else <uint64_t> result[0] + 2)
                self._put_keys(result[1], self.nobody)
                self._put_keys(result[2], self.nobody)
                self._put_keys(result[3], self.nobody)
                self._put_text(result[4])
            self.num_records += 1

    @cython.critical_section
    def put_tier_times(self, int tier, list times not None):
        """Record when jobs that are reported next had begun and ended: (start, end) in seconds of each, or None."""
        cdef double seconds
        if self._has_room(32 + 17 * len(times)):
            self.at[0] = TIER_TIMES
            self.at += 1
            self._put_number(tier)
            self._put_number(len(times))
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
        if self._has_room(24):
            self.at[0] = TIER_RAISED
            self.at += 1
            self._put_number(tier)
            self._put_number(call)
            self.num_records += 1

    @cython.critical_section
    def put_stats(self, bytes text not None):
        """Record a manager's statistics, as JSON."""
        if self._has_room(24 + len(text)):
            self.at[0] = STATS
            self.at += 1
            self._put_text(text)
            self.num_records += 1


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


@cython.final
cdef class RecordedCalls:
    """RecordedCalls(log, names)

    The calls of one manager, each made and recorded (a `kvcache.control.wrapped_calls.CallWrapper`).

    Parameters
    ----------
    log : CallLog
        Where they are recorded.
    names : tuple of str
        The methods that are recorded.
    """

    cdef CallLog log
    cdef readonly tuple names
    cdef object __weakref__
    cdef object _lookup, _status, _touch, _prepare_load, _complete_load, _prepare_store, _complete_store, _reorder
    cdef object _on_request_finished, _reset_cache, _take_events, _on_schedule_end, _is_coming, _hint, _report_prefills
    cdef object last_context
    cdef RequestLog last_request
    cdef RequestLog nobody
    cdef RequestLog bad
    cdef uint64_t num_contexts
    cdef uint64_t first_context     # since the last reset
    cdef int num_inside
    cdef unsigned long owner

    may_pause = False

    def __cinit__(self, CallLog log not None, tuple names not None):
        self.log = log
        self.names = names
        self.num_contexts = self.first_context = 2
        self.nobody = log.nobody
        self.bad = RequestLog()
        self.bad.number = 1

    def wrap(self, str name not None, method):
        """Return the recording call that is made in place of a bound method from now on."""
        if name == "lookup":
            self._lookup = method
        elif name == "status":
            self._status = method
        elif name == "touch":
            self._touch = method
        elif name == "prepare_load":
            self._prepare_load = method
        elif name == "complete_load":
            self._complete_load = method
        elif name == "prepare_store":
            self._prepare_store = method
        elif name == "complete_store":
            self._complete_store = method
        elif name == "reorder":
            self._reorder = method
        elif name == "on_request_finished":
            self._on_request_finished = method
        elif name == "reset_cache":
            self._reset_cache = method
        elif name == "take_events":
            self._take_events = method
        elif name == "on_schedule_end":
            self._on_schedule_end = method
        elif name == "is_coming":
            self._is_coming = method
        elif name == "report_prefills":
            self._report_prefills = method
        else:
            self._hint = method
        return getattr(self, name)

    # ---- whose turn it is --------------------------------------------------------------------------------------

    cdef inline void _enter(self) noexcept:
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef int _i
        if self.num_inside and self.owner != me:
            # Another thread is inside a call: who is first is known only if this one waits, and it may not for long.
            for _i in range(NUM_WAITS):
                with nogil:
                    usleep(WAIT_US)
                if not self.num_inside:
                    break
            else:
                self.log.num_overlapped += 1
        self.num_inside += 1
        self.owner = me

    # ---- requests ----------------------------------------------------------------------------------------------

    cdef RequestLog _introduce(self, context):
        """Number a request and record what it says of itself."""
        cdef CallLog log = self.log
        cdef RequestLog request = RequestLog()
        request.number = self.num_contexts
        self.num_contexts += 1
        # There, so that it is forgotten with the request.
        context.request_keys[self] = request
        retention = context.retention
        said = {}
        if retention is not None:
            said["retention"] = {name: getattr(retention, name) for name in type(retention).__dataclass_fields__}
        params = context.kv_transfer_params
        if type(params) is dict and "kvcache" in params:
            said["kvcache"] = params["kvcache"]
        text = b""
        if said:
            try:
                text = json.dumps(said).encode()
            except (TypeError, ValueError):
                text = b'{"kvcache": "?"}'
            if len(text) > 4096:
                text = b'{"kvcache": "?"}'
        if text and log._has_room(40 + len(text)):
            log.at[0] = CONTEXT
            log.at += 1
            log._put_number(request.number)
            log._put_text(text)
            log.num_records += 1
        return request

    cdef RequestLog _request_of(self, context):
        cdef RequestLog request
        cdef PyObject* positions
        if context is None:
            return self.nobody
        if context is self.last_context:
            request = self.last_request
        else:
            if type(context) is not ReqContext and not isinstance(context, ReqContext):
                return self.bad
            request = context.request_keys.get(self)
            # From before a reset: who reads from there on has not met it.
            if request is None or request.number < self.first_context:
                request = self._introduce(context)
            self.last_context = context
            self.last_request = request
        positions = kv_slot(context, positions_offset)
        if positions != NULL and positions != <PyObject*> None:
            self._put_positions(request, <object> positions)
        return request

    cdef int _put_positions(self, RequestLog request, positions) except -1:
        """Record the positions that a request has learned since the last time."""
        cdef Py_ssize_t at = 0, known = 0, n
        cdef PyObject* key
        cdef PyObject* value
        cdef Py_ssize_t first, start
        cdef CallLog log = self.log
        cdef uint64_t hash
        cdef int64_t end_token
        if type(positions) is not dict:
            return 0
        n = len(positions)
        if request.positions is positions and request.num_positions <= n:
            known, at = request.num_positions, request.next_position
        if known == n:
            return 0
        first, start = known, at
        if log._has_room(64 + 20 * (n - known)):
            log.at[0] = POSITIONS
            log.at += 1
            log._put_number(request.number)
            # Whether these are all, or come to those before.
            log._put_number(known != 0)
            log._put_number(n - known)
            while known < n and PyDict_Next(positions, &at, &key, &value):
                hash = log._hash(key)
                memcpy(log.at, &hash, 8)
                log.at += 8
                end_token = 0
                if type(<object> value) is int and -(1 << 62) < <object> value < (1 << 62):
                    end_token = <object> value
                log._put_number(<uint64_t> (end_token << 1 ^ (end_token >> 63)))
                known += 1
            log.num_records += 1
            if log.has_groups:
                log.at[0] = GROUPS
                log.at += 1
                log._put_number(request.number)
                log._put_number(known - first)
                while first < known and PyDict_Next(positions, &start, &key, &value):
                    hash = log._hash_of_group(key)
                    memcpy(log.at, &hash, 2)
                    log.at += 2
                    first += 1
                log.num_records += 1
        request.positions, request.num_positions, request.next_position = positions, n, at
        return 0

    # ---- records of calls --------------------------------------------------------------------------------------

    cdef inline RequestLog _begin(self, int op, context, Py_ssize_t num_bytes):
        """Begin a record; None: there is no room for it."""
        cdef CallLog log = self.log
        cdef RequestLog request = self._request_of(context)
        cdef int64_t now_ns = log._now_ns()
        # From here to the record's end nothing may run Python: another thread could take the chunk away.
        if not log._has_room(64 + num_bytes):
            return None
        log.at[0] = op
        log.at += 1
        log._put_time(now_ns)
        log._put_number(request.number)
        log.num_records += 1
        return request

    cdef inline void _put_one(self, key) noexcept:
        cdef uint64_t hash = self.log._hash(<PyObject*> key)
        memcpy(self.log.at, &hash, 8)
        self.log.at += 8

    cdef inline void _put_answer(self, answer, bint is_spec) noexcept:
        cdef CallLog log = self.log
        cdef uint64_t number
        if is_spec:
            log.at[0] = A_BLOCKS
            log.blocks.append(answer)
        elif answer is None:
            log.at[0] = A_NONE
        elif answer is False:
            log.at[0] = A_FALSE
        elif answer is True:
            log.at[0] = A_TRUE
        elif type(answer) is int and 0 <= <object> answer < 1 << 62:
            number = answer
            log.at[0] = A_INT
            log.at = kv_put_number(log.at + 1, number)
            return
        else:
            log.at[0] = A_OTHER
        log.at += 1

    cdef int _record_one(self, int op, context, key, answer) except -1:
        cdef CallLog log = self.log
        with cython.critical_section(log):
            try:
                if not log.is_closed and self._begin(op, context, 16) is not None:
                    self._put_one(key)
                    self._put_answer(answer, False)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_batch(self, int op, context, keys, int flag, answer) except -1:
        cdef CallLog log = self.log
        cdef bint is_spec
        cdef RequestLog request
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                is_spec = type(answer) is CPULoadStoreSpec or (
                    op == PREPARE_LOAD and isinstance(answer, BlockIDsLoadStoreSpec)
                )
                request = self._begin(op, context, log._keys_bytes(keys))
                if request is not None:
                    log._put_keys(keys, request)
                    if flag >= 0:
                        log._put_number(flag)
                    self._put_answer(answer, is_spec)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_store(self, context, keys, output) except -1:
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef Py_ssize_t num_bytes = log._keys_bytes(keys), num_evicted = 0
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                stored = spec = None
                if output is not None:
                    stored, spec, num_evicted = output.keys_to_store, output.store_spec, len(output.evicted_keys)
                    num_bytes += log._keys_bytes(stored)
                request = self._begin(PREPARE_STORE, context, num_bytes)
                if request is not None:
                    log._put_keys(keys, request)
                    if stored is None:
                        log.at[0] = A_NONE
                        log.at += 1
                    else:
                        log.at[0] = A_OUTPUT
                        log.at += 1
                        log._put_keys(stored, request)
                        log._put_number(num_evicted)
                        log.blocks.append(spec)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_simple(self, int op, context, int flag) except -1:
        cdef CallLog log = self.log
        with cython.critical_section(log):
            try:
                if not log.is_closed and self._begin(op, context, 16) is not None:
                    if flag >= 0:
                        log._put_number(flag)
                    log.at[0] = A_NONE
                    log.at += 1
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_failure(self, int op, context, keys, int flag, error) except -1:
        """Record a call that raised: only the kind of its error counts."""
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef bytes name = type(error).__name__.encode()[:100]
        cdef bint is_one = op == LOOKUP_ONE or op == STATUS or op == IS_COMING
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(op, context, 128 if is_one or keys is None else 128 + log._keys_bytes(keys))
                if request is not None:
                    if is_one:
                        self._put_one(keys)
                    elif keys is not None:
                        log._put_keys(keys, request)
                    if flag >= 0:
                        log._put_number(flag)
                    log.at[0] = A_ERROR
                    log.at += 1
                    log._put_text(name)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_events(self, list events, max_events) except -1:
        cdef CallLog log = self.log
        cdef uint64_t digest = 0
        cdef Py_ssize_t num_keys = 0
        with cython.critical_section(log):
            try:
                if not events or log.is_closed:
                    return 0
                for event in events:
                    num_keys += len(event.keys)
                    digest = digest * 31 + (1 if event.removed else 0) + 2 * <uint64_t> len(event.keys)
                    for key in event.keys:
                        digest = digest * <uint64_t> 1099511628211 ^ log._hash(<PyObject*> key)
                if self._begin(TAKE_EVENTS, None, 48) is not None:
                    log._put_number(0 if max_events is None else <uint64_t> max_events + 1)
                    log.at[0] = A_EVENTS
                    log.at += 1
                    log._put_number(len(events))
                    log._put_number(num_keys)
                    memcpy(log.at, &digest, 8)
                    log.at += 8
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_hint(self, context, list keys, bytes text, error) except -1:
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef bytes name = b"" if error is None else type(error).__name__.encode()[:100]
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(HINT, context, 160 + len(text) + log._keys_bytes(keys))
                if request is not None:
                    log._put_keys(keys, request)
                    log._put_text(text)
                    log.at[0] = A_NONE if error is None else A_ERROR
                    log.at += 1
                    if error is not None:
                        log._put_text(name)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_prefills(self, list numbers, double seconds, error) except -1:
        cdef CallLog log = self.log
        cdef bytes name = b"" if error is None else type(error).__name__.encode()[:100]
        cdef Py_ssize_t i, n = len(numbers)
        cdef uint64_t number
        with cython.critical_section(log):
            try:
                if not log.is_closed and self._begin(REPORT_PREFILLS, None, 160 + 10 * n) is not None:
                    log._put_number(n)
                    for i in range(n):
                        number = numbers[i]
                        log._put_number(number)
                    memcpy(log.at, &seconds, 8)
                    log.at += 8
                    log.at[0] = A_NONE if error is None else A_ERROR
                    log.at += 1
                    if error is not None:
                        log._put_text(name)
            finally:
                self.num_inside -= 1
        return 0

    # ---- calls -------------------------------------------------------------------------------------------------

    def lookup(self, keys=None, req_context=None, *, key=None):
        """See `OffloadingManager.lookup`."""
        if keys is None:
            keys = key
        cdef bint is_one = isinstance(keys, bytes)
        if not is_one and type(keys) is not list:
            keys = as_key_list(keys)
        self._enter()
        try:
            answer = self._lookup(keys, req_context)
        except BaseException as error:
            self._record_failure(LOOKUP_ONE if is_one else LOOKUP, req_context, keys, -1, error)
            raise
        if is_one:
            self._record_one(LOOKUP_ONE, req_context, keys, answer)
        else:
            self._record_batch(LOOKUP, req_context, keys, -1, answer)
        return answer

    def status(self, key, req_context=None):
        """See `BlockPool.status` and `TieredOffloadingManager.status`."""
        self._enter()
        try:
            answer = self._status(key) if req_context is None else self._status(key, req_context)
        except BaseException as error:
            self._record_failure(STATUS, req_context, key, -1, error)
            raise
        self._record_one(STATUS, req_context, key, answer)
        return answer

    def is_coming(self, key, req_context=None):
        """See `TieredOffloadingManager.is_coming`."""
        self._enter()
        try:
            answer = self._is_coming(key, req_context)
        except BaseException as error:
            self._record_failure(IS_COMING, req_context, key, -1, error)
            raise
        self._record_one(IS_COMING, req_context, key, answer)
        return answer

    def touch(self, keys, req_context=None):
        """See `OffloadingManager.touch`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self._enter()
        try:
            self._touch(keys, req_context)
        except BaseException as error:
            self._record_failure(TOUCH, req_context, keys, -1, error)
            raise
        self._record_batch(TOUCH, req_context, keys, -1, None)

    def prepare_load(self, keys, req_context=None):
        """See `OffloadingManager.prepare_load`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self._enter()
        try:
            spec = self._prepare_load(keys, req_context)
        except BaseException as error:
            self._record_failure(PREPARE_LOAD, req_context, keys, -1, error)
            raise
        self._record_batch(PREPARE_LOAD, req_context, keys, -1, spec)
        return spec

    def complete_load(self, keys, req_context=None):
        """See `OffloadingManager.complete_load`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self._enter()
        try:
            self._complete_load(keys, req_context)
        except BaseException as error:
            self._record_failure(COMPLETE_LOAD, req_context, keys, -1, error)
            raise
        self._record_batch(COMPLETE_LOAD, req_context, keys, -1, None)

    def prepare_store(self, keys, req_context=None):
        """See `OffloadingManager.prepare_store`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self._enter()
        try:
            output = self._prepare_store(keys, req_context)
        except BaseException as error:
            self._record_failure(PREPARE_STORE, req_context, keys, -1, error)
            raise
        self._record_store(req_context, keys, output)
        return output

    def complete_store(self, keys, req_context=None, success=True):
        """See `OffloadingManager.complete_store`."""
        if req_context is True or req_context is False:
            success, req_context = req_context, None
        if type(keys) is not list:
            keys = as_key_list(keys)
        cdef bint flag = True if success else False
        self._enter()
        try:
            self._complete_store(keys, req_context, success)
        except BaseException as error:
            self._record_failure(COMPLETE_STORE, req_context, keys, flag, error)
            raise
        self._record_batch(COMPLETE_STORE, req_context, keys, flag, None)

    def reorder(self, req_context):
        """See `BlockPool.reorder`."""
        self._enter()
        try:
            self._reorder(req_context)
        except BaseException as error:
            self._record_failure(REORDER, req_context, None, -1, error)
            raise
        self._record_simple(REORDER, req_context, -1)

    def on_request_finished(self, req_context, *, use_positions=False):
        """See `OffloadingManager.on_request_finished`."""
        cdef bint flag = True if use_positions else False
        self._enter()
        try:
            if flag:
                self._on_request_finished(req_context, use_positions=True)
            else:
                self._on_request_finished(req_context)
        except BaseException as error:
            self._record_failure(REQUEST_FINISHED, req_context, None, flag, error)
            raise
        self._record_simple(REQUEST_FINISHED, req_context, flag)
        self.last_context = self.last_request = None

    def on_schedule_end(self):
        """See `OffloadingManager.on_schedule_end`."""
        self._enter()
        try:
            self._on_schedule_end()
        except BaseException as error:
            self._record_failure(SCHEDULE_END, None, None, -1, error)
            raise
        self._record_simple(SCHEDULE_END, None, -1)

    def hint(self, request_or_keys, next_use):
        """See `OffloadingManager.hint`."""
        cdef bint is_request = isinstance(request_or_keys, ReqContext)
        keys = [] if is_request else as_key_list(request_or_keys)
        context = request_or_keys if is_request else None
        text = str(next_use).encode()[:200]
        self._enter()
        try:
            self._hint(context if is_request else keys, next_use)
        except BaseException as error:
            self._record_hint(context, keys, text, error)
            raise
        self._record_hint(context, keys, text, None)

    def report_prefills(self, parts, seconds):
        """See `TieredOffloadingManager.report_prefills`."""
        parts = list(parts)
        cdef list numbers = [max(0, min(int(number), 1 << 62)) for part in parts for number in part]
        cdef double recorded_s = seconds
        self._enter()
        try:
            self._report_prefills(parts, seconds)
        except BaseException as error:
            self._record_prefills(numbers, recorded_s, error)
            raise
        self._record_prefills(numbers, recorded_s, None)

    def reset_cache(self):
        """See `OffloadingManager.reset_cache`."""
        self._enter()
        try:
            self._reset_cache()
        except BaseException as error:
            self._record_failure(RESET, None, None, -1, error)
            raise
        self._record_simple(RESET, None, -1)
        self.last_context = self.last_request = None
        self.first_context = self.num_contexts

    def take_events(self, max_events=None):
        """See `OffloadingManager.take_events`."""
        self._enter()
        try:
            events = list(self._take_events() if max_events is None else self._take_events(max_events))
        except BaseException as error:
            self.num_inside -= 1
            raise
        self._record_events(events, max_events)
        return iter(events)
