from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <time.h>
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
    char* kv_put_number(char* at, uint64_t number) noexcept nogil
    int64_t kv_coarse_ns() noexcept nogil

cdef extern from "Python.h":
    ctypedef void* PyThread_type_lock
    bint PyBytes_CheckExact(PyObject* key) noexcept nogil
    unsigned long PyThread_get_thread_ident() noexcept nogil
    Py_ssize_t PySequence_Fast_GET_SIZE(object keys) noexcept

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
    STATUS_RUN = 17
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
    REFUSED = 75

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
    SPAN_BYTES = 8          # of a Span at a chunk's end

# Where a list of keys was written to a chunk.
cdef struct KeptKeys:
    uint64_t chunk          # its number
    uint64_t number         # the list's, there
    Py_ssize_t offset
    Py_ssize_t n


cdef class RequestLog:
    cdef uint64_t number
    cdef uint64_t recording         # whose number it is
    cdef bytes said                 # what the request said of itself, as JSON
    cdef KeptKeys[NUM_KEPT] kept
    cdef int oldest
    cdef object positions
    cdef Py_ssize_t num_positions
    cdef Py_ssize_t next_position


cdef class CallLog:
    cdef readonly uint64_t num_records
    cdef readonly uint64_t num_lost
    cdef public uint64_t num_overlapped
    cdef public bint has_groups
    cdef uint64_t[4] secret
    cdef Py_ssize_t chunk_bytes
    cdef Py_ssize_t max_chunks
    cdef Py_ssize_t max_record_bytes
    cdef Py_ssize_t num_chunks      # that exist
    cdef list idle
    cdef list full
    cdef object chunk
    cdef char* base
    cdef char* at
    cdef char* end                  # where spans and block ids begin
    cdef int64_t last_ns
    cdef uint64_t first_record      # of the chunk
    cdef uint64_t num_unreported    # lost, and not yet mentioned in a chunk
    cdef uint64_t num_lists         # of the chunk
    cdef uint64_t chunk_number
    cdef RequestLog nobody          # of calls without a request
    cdef KeptKeys run               # keys that were looked up one by one last, without a request
    cdef char* run_end              # `at` while nothing else was written
    cdef int run_answer             # of all of them; -1: there is no run that could go on
    cdef unsigned long clock_owner  # the thread that has read the clock for its next call, or 0
    cdef bint is_closed             # nothing is recorded
    cdef bint is_ended              # nor will be
    cdef object clock
    cdef PyThread_type_lock bell    # held, but for when the recorder's thread is to wake
    cdef bint is_rung

    cdef void _ring(self) noexcept
    cdef int write_stats(self, bytes text) except -1
    cdef tuple _finish(self, bytearray chunk, Py_ssize_t end)
    cdef int _close_chunk(self) except -1
    cdef int lose(self) except -1
    cdef int lose_order(self) except -1
    cdef bint _open_chunk(self, Py_ssize_t num_bytes) except -1
    cdef bint _change_chunk(self, Py_ssize_t num_bytes) except -1
    cdef bint _take_room(self, Py_ssize_t num_bytes) except -1
    cdef uint64_t hash_key(self, PyObject* key) noexcept nogil
    cdef uint64_t digest_of(self, uint64_t before, keys, bint removed) except? 0
    cdef uint64_t hash_group(self, PyObject* key) noexcept
    cdef void _put_bytes(self, const char* data, Py_ssize_t n) noexcept
    cdef void put_text(self, bytes text) noexcept
    cdef int64_t _asked_ns(self) noexcept
    cdef void put_keys(self, object keys, RequestLog request) noexcept
    cdef void _put_span(self, Py_ssize_t offset, Py_ssize_t n) noexcept
    cdef void put_ids(self, const int64_t* ids, Py_ssize_t n) noexcept
    cdef void put_slots(self, const int64_t* ids, Py_ssize_t n) noexcept
    cdef int begin_run(self, PyObject* key, int answer) except -1

    cdef inline int put_status(self, PyObject* key, int answer) except -1:
        """Write a look-up of one key without a request: one more key of a run with the same answer."""
        cdef uint32_t n
        if (answer != self.run_answer or self.at != self.run_end or self.end - self.at < 8
                or not PyBytes_CheckExact(key)):
            return self.begin_run(key, answer)
        Py_INCREF(<object> key)
        memcpy(self.at, &key, 8)
        self.at += 8
        self.run_end = self.at
        self.run.n += 1
        n = <uint32_t> self.run.n
        memcpy(self.base + self.run.offset - 5, &n, 4)
        memcpy(self.end + 4, &n, 4)
        self.num_records += 1
        return 0

    cdef inline bint has_room(self, Py_ssize_t num_bytes) except -1:
        if self.end - self.at >= num_bytes:
            return True
        return not self.is_closed and self._open_chunk(num_bytes)

    cdef inline void put_number(self, uint64_t number) noexcept:
        self.at = kv_put_number(self.at, number)

    cdef inline int64_t now_ns(self) noexcept:
        """Return when it is; this may run Python, and so must not be asked within a record."""
        return kv_coarse_ns() if self.clock is None else self._asked_ns()

    cdef inline char* put_time(self, char* at, int64_t now_ns) noexcept:
        cdef int64_t units = (now_ns - self.last_ns) >> 10
        if units <= 0:
            at[0] = 0
            return at + 1
        # In whole units, so that what is cut off is not lost for good.
        self.last_ns += units << 10
        return kv_put_number(at, units)

    cdef inline Py_ssize_t keys_bytes(self, object keys) noexcept:
        return 40 + SPAN_BYTES + 8 * PySequence_Fast_GET_SIZE(keys)
