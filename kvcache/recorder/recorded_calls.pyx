"""RecordedCalls: the calls of one manager, each made and written to a log.

Compiled because it runs in the scheduler's thread, around every call.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

import json
import sys

import numpy as np

from kvcache.core.event_log cimport TakenEvents
from kvcache.core.memory cimport pause_collector, resume_collector
from kvcache.core.request_keys cimport RequestKeys
from kvcache.recorder.call_log cimport (
    A_BLOCKS, A_ERROR, A_EVENTS, A_FALSE, A_INT, A_NONE, A_OTHER, A_OUTPUT, A_TRUE, COMPLETE_LOAD, COMPLETE_STORE,
    CONTEXT, GROUPS, HINT, IS_COMING, LOOKUP, LOOKUP_ONE, POSITIONS, PREPARE_LOAD, PREPARE_STORE, REORDER,
    REPORT_PREFILLS, REQUEST_FINISHED, RESET, SCHEDULE_END, SPAN_BYTES, STATUS, TAKE_EVENTS, TOUCH, CallLog, RequestLog,
    kv_put_number,
)

from kvcache.keys import as_key_list
from kvcache.request import NEXT_USES as _NEXT_USES, ReqContext
from kvcache.specs import BlockIDsLoadStoreSpec, CPULoadStoreSpec

cdef extern from *:
    """
    #include <unistd.h>
    #define kv_fetch_to_write(at) __builtin_prefetch((at), 1)
    """
    void kv_fetch_to_write(const char* at) noexcept nogil
    int usleep(unsigned int microseconds) nogil

cdef extern from "Python.h":
    int PyDict_Next(object of, Py_ssize_t* at, PyObject** key, PyObject** value) noexcept
    bint PyLong_CheckExact(PyObject* value) noexcept
    # Of an exact int it raises nothing.
    int64_t PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow) noexcept

cdef enum:
    LINE_BYTES = 64
    FETCHED_BYTES = 512     # ahead of a record: a record or two of a short request
    NUM_WAITS = 10
    WAIT_US = 20

cdef bytes UNREADABLE = b'{"kvcache": "?"}'
cdef uint64_t num_recordings = 0
cdef Py_ssize_t positions_offset = kv_slot_offset(ReqContext.positions)
cdef Py_ssize_t request_keys_offset = kv_slot_offset(ReqContext.request_keys)
cdef Py_ssize_t retention_offset = kv_slot_offset(ReqContext.retention)
cdef Py_ssize_t params_offset = kv_slot_offset(ReqContext.kv_transfer_params)
cdef int64_t MAX_NUMBER = <int64_t> 1 << 62


cdef inline bint _is_number(PyObject* value, int64_t* number) noexcept:
    """Read an int that a record has room for; compared as an object, it would cost as much as the rest of a record."""
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    number[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return not overflow and -MAX_NUMBER < number[0] < MAX_NUMBER


cdef bytes _said_by(context):
    # What a request says of itself, as JSON; None: nothing.
    retention = context.retention
    said = {}
    if retention is not None:
        said["retention"] = {name: getattr(retention, name) for name in type(retention).__dataclass_fields__}
    params = context.kv_transfer_params
    if type(params) is dict and "kvcache" in params:
        said["kvcache"] = params["kvcache"]
    if not said:
        return None
    try:
        text = json.dumps(said).encode()
    except (TypeError, ValueError):
        return UNREADABLE
    return text if len(text) <= 4096 else UNREADABLE


cdef bytes _said_by_keys(RequestKeys request_keys):
    # Of a request from before the recording, this is what is left of it.
    cdef int next_use = request_keys.next_use
    if request_keys.priority == 0 and next_use == 0:
        return None
    retention = {"priority": request_keys.priority, "next_use": _NEXT_USES[next_use - 1] if next_use else None}
    if request_keys.ttl_ns:
        retention["ttl_s"] = request_keys.ttl_ns / 1e9
    return json.dumps({"retention": retention}).encode()


cdef int open_ids(spec, Py_buffer* ids) except -1:
    # A spec of our own holds int64; of another's, what is no list of ids stands for an empty one.
    if type(spec) is CPULoadStoreSpec:
        try:
            PyObject_GetBuffer(spec.block_ids, ids, PyBUF_SIMPLE)
            return 0
        except (BufferError, ValueError):
            pass  # there are gaps in it
    try:
        array = np.ascontiguousarray(getattr(spec, "block_ids", ()), np.int64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, np.int64)
    PyObject_GetBuffer(array, ids, PyBUF_SIMPLE)
    return 0


cdef bytes _kind_of(error):
    # Only the kind of an error counts.
    return None if error is None else type(error).__name__.encode()[:100]


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

    may_pause = False

    def __cinit__(self, CallLog log not None, tuple names not None):
        self.log = log
        self.names = names
        self.num_contexts = self.first_context = 2
        self.nobody = log.nobody
        self.bad = RequestLog()
        self.bad.number = 1
        global num_recordings
        num_recordings += 1
        self.recording = num_recordings

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

    # ---- beginning and end -------------------------------------------------------------------------------------

    cdef bint _is_any_inside(self, codes) except -1:
        if self.num_inside:
            return True
        if not codes:
            return False
        # Nothing here runs Python: no other thread goes on meanwhile.
        for frame in sys._current_frames().values():
            while frame is not None:
                if frame.f_code in codes:
                    return True
                frame = frame.f_back
        return False

    def is_quiet(self, frozenset codes not None):
        """Return whether no thread is inside a call.

        Parameters
        ----------
        codes : frozenset of code
            Those of the manager's methods: a thread that has called one may be on its way to what is recorded, or have
            it behind it and counters before it. Empty: only what is recorded counts.
        """
        cdef bint was_collecting = pause_collector()
        try:
            return not self._is_any_inside(codes)
        finally:
            resume_collector(was_collecting)

    def begin(self, frozenset codes not None, uint64_t num_entered, bint is_forced):
        """Record from now on, unless a call is made or was since `num_entered` was read: then return False.

        With `is_forced` in any case; where a call is made, the recording begins with a lost record.
        """
        cdef CallLog log = self.log
        cdef bint is_quiet = self.is_quiet(codes) and self.num_entered == num_entered
        if not is_quiet and not is_forced:
            return False
        # Requests that were introduced before are in no record.
        self.first_context = self.num_contexts
        self.last_context = self.last_request = None
        log.is_closed = False
        if not is_quiet:
            log.lose()
        return True

    def end(self, frozenset codes not None, uint64_t num_entered, bytes stats not None):
        """Record statistics and nothing after them, unless a call is made or was since `num_entered` was read.

        Returns
        -------
        bool
            Whether it is done.
        """
        cdef CallLog log = self.log
        if not self.is_quiet(codes) or self.num_entered != num_entered:
            return False
        log.write_stats(stats)
        log.is_closed = True
        return True

    # ---- whose turn it is --------------------------------------------------------------------------------------

    cdef void wait_for_turn(self) noexcept:
        """Wait while another thread is inside a call: who is first is known only then, and it may not be for long."""
        cdef int _i
        for _i in range(NUM_WAITS):
            with nogil:
                usleep(WAIT_US)
            if not self.num_inside:
                return
        self.log.lose_order()

    # ---- requests ----------------------------------------------------------------------------------------------

    cdef RequestLog introduce(self, bytes said):
        """Number a request and record what it says of itself, if anything."""
        cdef CallLog log = self.log
        cdef RequestLog request = RequestLog.__new__(RequestLog)
        request.number = self.num_contexts
        request.recording = self.recording
        request.said = said
        self.num_contexts += 1
        if said is not None and log.has_room(40 + len(said)):
            log.at[0] = CONTEXT
            log.at += 1
            log.put_number(request.number)
            log.put_text(said)
            log.num_records += 1
        return request

    cdef RequestLog known(self, RequestKeys request_keys):
        """Return what is known of a request by its keys, or None."""
        cdef RequestLog request
        if request_keys.recorded is None:
            return None
        request = <RequestLog> request_keys.recorded
        # A number from before a reset means nothing to who reads from there on.
        if request.recording != self.recording or request.number < self.first_context:
            return None
        return request

    cdef RequestLog log_of_keys(self, RequestKeys request_keys):
        """Return what is known of a request by its keys; one that was not introduced says what its keys know of it."""
        cdef RequestLog request = self.known(request_keys)
        if request is None:
            request = <RequestLog> request_keys.recorded
            if request is not None and request.recording == self.recording:
                said = request.said
            else:
                said = _said_by_keys(request_keys)
            request = self.introduce(said)
            request_keys.recorded = request
        return request

    cdef RequestLog log_of_context(self, context):
        """Return what is known of a request by its context; one that is new is introduced."""
        cdef RequestLog request
        cdef PyObject* found = kv_slot(context, request_keys_offset)
        cdef PyObject* key
        cdef PyObject* one
        cdef Py_ssize_t at = 0
        while found != NULL and PyDict_Next(<object> found, &at, &key, &one):
            if key == <PyObject*> self:
                request = <RequestLog> one
                if request.number >= self.first_context:
                    return request
            elif type(<object> one) is RequestKeys:
                request = self.known(<RequestKeys> one)
                if request is not None:
                    return request
        if kv_slot(context, retention_offset) == kv_slot(context, params_offset) == <PyObject*> None:
            return self.introduce(None)
        return self.introduce(_said_by(context))

    cdef RequestLog _request_of(self, context):
        cdef RequestLog request
        cdef PyObject* positions
        if context is None:
            return self.nobody
        if type(context) is RequestKeys:
            if (<RequestKeys> context).recorded is not None:
                request = <RequestLog> (<RequestKeys> context).recorded
                if request.recording == self.recording and request.number >= self.first_context:
                    return request
            return self.log_of_keys(<RequestKeys> context)
        if context is self.last_context:
            request = self.last_request
        else:
            if type(context) is not ReqContext and not isinstance(context, ReqContext):
                return self.bad
            request = self.log_of_context(context)
            # There, so that it is forgotten with the request.
            context.request_keys[self] = request
            self.last_context = context
            self.last_request = request
        positions = kv_slot(context, positions_offset)
        if positions != NULL and positions != <PyObject*> None:
            self.put_positions(request, <object> positions)
        return request

    cdef int put_positions(self, RequestLog request, positions) except -1:
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
        if log.has_room(64 + 20 * (n - known)):
            log.at[0] = POSITIONS
            log.at += 1
            log.put_number(request.number)
            # Whether these are all, or come to those before.
            log.put_number(known != 0)
            log.put_number(n - known)
            while known < n and PyDict_Next(positions, &at, &key, &value):
                hash = log.hash_key(key)
                memcpy(log.at, &hash, 8)
                log.at += 8
                if not _is_number(value, &end_token):
                    end_token = 0
                log.put_number(<uint64_t> (end_token << 1 ^ (end_token >> 63)))
                known += 1
            log.num_records += 1
            if log.has_groups:
                log.at[0] = GROUPS
                log.at += 1
                log.put_number(request.number)
                log.put_number(known - first)
                while first < known and PyDict_Next(positions, &start, &key, &value):
                    hash = log.hash_group(key)
                    memcpy(log.at, &hash, 2)
                    log.at += 2
                    first += 1
                log.num_records += 1
        request.positions, request.num_positions, request.next_position = positions, n, at
        return 0

    # ---- records of calls --------------------------------------------------------------------------------------

    cdef inline RequestLog _begin(self, int op, context, Py_ssize_t num_bytes, keys):
        """Begin a record of so many bytes and those of the keys, if any; None: there is no room for it."""
        cdef CallLog log = self.log
        cdef RequestLog request = self._request_of(context)
        cdef int64_t now_ns = log.now_ns()
        if log.clock_owner != 0:
            if log.clock_owner != PyThread_get_thread_ident():
                log.lose_order()  # what the clock answered was meant for another call
            log.clock_owner = 0
        # Only now: the clock may have changed the list, and so may who runs while a chunk is opened.
        cdef Py_ssize_t num_key_bytes = 0 if keys is None else log.keys_bytes(keys)
        # From here to the record's end nothing may run Python: another thread could take the chunk away.
        if not log.has_room(64 + num_bytes + num_key_bytes):
            return None
        if keys is not None and log.keys_bytes(keys) > num_key_bytes:
            log.lose()
            return None
        log.at[0] = op
        log.at = kv_put_number(log.put_time(log.at + 1, now_ns), request.number)
        log.num_records += 1
        # The recorder's thread had a chunk's memory last.
        kv_fetch_to_write(log.at + FETCHED_BYTES)
        kv_fetch_to_write(log.at + FETCHED_BYTES + LINE_BYTES)
        kv_fetch_to_write(log.end - FETCHED_BYTES // 2)
        return request

    cdef inline void _put_one(self, key) noexcept:
        cdef uint64_t hash = self.log.hash_key(<PyObject*> key)
        memcpy(self.log.at, &hash, 8)
        self.log.at += 8

    cdef inline void _put_answer(self, answer) noexcept:
        cdef char* at = self.log.at
        cdef int64_t number
        self.log.at = at + 1
        if answer is None:
            at[0] = A_NONE
        elif answer is False:
            at[0] = A_FALSE
        elif answer is True:
            at[0] = A_TRUE
        elif _is_number(<PyObject*> answer, &number) and number >= 0:
            at[0] = A_INT
            self.log.at = kv_put_number(at + 1, <uint64_t> number)
        else:
            at[0] = A_OTHER

    cdef inline void _put_outcome(self, bytes error) noexcept:
        """End the record of a call that answers nothing: it did, or raised an error of this kind."""
        cdef CallLog log = self.log
        log.at[0] = A_NONE if error is None else A_ERROR
        log.at += 1
        if error is not None:
            log.put_text(error)

    cdef int record_one(self, int op, context, key, answer) except -1:
        cdef CallLog log = self.log
        with cython.critical_section(log):
            try:
                if not log.is_closed and self._begin(op, context, 16, None) is not None:
                    self._put_one(key)
                    self._put_answer(answer)
            finally:
                self.num_inside -= 1
        return 0

    cdef int record_batch(self, int op, context, keys, int flag, answer) except -1:
        cdef CallLog log = self.log
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(op, context, 0, keys)
                if request is not None:
                    log.put_keys(keys, request)
                    if flag >= 0:
                        log.put_number(flag)
                    self._put_answer(answer)
            finally:
                self.num_inside -= 1
        return 0

    cdef int record_load(self, context, keys, spec) except -1:
        cdef Py_buffer ids
        if type(spec) is not CPULoadStoreSpec and not isinstance(spec, BlockIDsLoadStoreSpec):
            return self.record_batch(PREPARE_LOAD, context, keys, -1, spec)
        open_ids(spec, &ids)
        try:
            return self.record_blocks(context, keys, <const int64_t*> ids.buf, ids.len // 8, False)
        finally:
            PyBuffer_Release(&ids)

    cdef int record_blocks(self, context, keys, const int64_t* ids, Py_ssize_t num_ids, bint are_slots) except -1:
        cdef CallLog log = self.log
        cdef RequestLog request
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(PREPARE_LOAD, context, SPAN_BYTES + 8 * num_ids, keys)
                if request is not None:
                    log.put_keys(keys, request)
                    log.at[0] = A_BLOCKS
                    log.at += 1
                    if are_slots:
                        log.put_slots(ids, num_ids)
                    else:
                        log.put_ids(ids, num_ids)
            finally:
                self.num_inside -= 1
        return 0

    cdef int record_store(self, context, keys, output) except -1:
        cdef Py_buffer ids
        if output is None:
            return self.record_batch(PREPARE_STORE, context, keys, -1, None)
        stored = output.keys_to_store
        cdef Py_ssize_t num_evicted = len(output.evicted_keys)
        open_ids(output.store_spec, &ids)
        try:
            return self.record_output(context, keys, stored, num_evicted, <const int64_t*> ids.buf, ids.len // 8, False)
        finally:
            PyBuffer_Release(&ids)

    cdef int record_output(
        self, context, keys, stored, Py_ssize_t num_evicted, const int64_t* ids, Py_ssize_t num_ids, bint are_slots
    ) except -1:
        cdef CallLog log = self.log
        cdef RequestLog request
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(
                    PREPARE_STORE, context, log.keys_bytes(stored) + SPAN_BYTES + 8 * num_ids, keys)
                if request is not None:
                    log.put_keys(keys, request)
                    log.at[0] = A_OUTPUT
                    log.at += 1
                    log.put_keys(stored, request)
                    log.put_number(num_evicted)
                    if are_slots:
                        log.put_slots(ids, num_ids)
                    else:
                        log.put_ids(ids, num_ids)
            finally:
                self.num_inside -= 1
        return 0

    cdef int record_simple(self, int op, context, int flag) except -1:
        cdef CallLog log = self.log
        with cython.critical_section(log):
            try:
                if not log.is_closed and self._begin(op, context, 16, None) is not None:
                    if flag >= 0:
                        log.put_number(flag)
                    self._put_outcome(None)
            finally:
                self.num_inside -= 1
        return 0

    cdef int record_reset(self) except -1:
        self.record_simple(RESET, None, -1)
        self.last_context = self.last_request = None
        self.first_context = self.num_contexts
        return 0

    cdef int record_failure(self, int op, context, keys, int flag, error) except -1:
        """Record a call that raised."""
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef bytes kind = _kind_of(error)
        cdef bint is_one = op == LOOKUP_ONE or op == STATUS or op == IS_COMING
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(op, context, 128, None if is_one else keys)
                if request is not None:
                    if is_one:
                        self._put_one(keys)
                    elif keys is not None:
                        log.put_keys(keys, request)
                    if flag >= 0:
                        log.put_number(flag)
                    self._put_outcome(kind)
            finally:
                self.num_inside -= 1
        return 0

    cdef int record_events(self, list events, max_events) except -1:
        cdef CallLog log = self.log
        cdef uint64_t digest = 0
        cdef Py_ssize_t num_keys = 0
        with cython.critical_section(log):
            try:
                if events and not log.is_closed:
                    for event in events:
                        num_keys += len(event.keys)
                        digest = log.digest_of(digest, event.keys, event.removed)
                    self._put_events(max_events, len(events), num_keys, digest)
            finally:
                self.num_inside -= 1
        return 0

    cdef int record_taken(self, TakenEvents taken, max_events) except -1:
        cdef CallLog log = self.log
        cdef uint64_t digest = 0
        cdef Py_ssize_t num_keys = 0, i
        with cython.critical_section(log):
            try:
                if taken.num_events and not log.is_closed:
                    for i in range(taken.num_events):
                        num_keys += taken.events[i].num_keys
                        digest = log.digest_of(digest, <list> taken.events[i].keys, taken.events[i].removed)
                    self._put_events(max_events, taken.num_events, num_keys, digest)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _put_events(self, max_events, Py_ssize_t num_events, Py_ssize_t num_keys, uint64_t digest) except -1:
        cdef CallLog log = self.log
        if self._begin(TAKE_EVENTS, None, 48, None) is not None:
            log.put_number(0 if max_events is None else <uint64_t> min(max_events, MAX_NUMBER) + 1)
            log.at[0] = A_EVENTS
            log.at += 1
            log.put_number(num_events)
            log.put_number(num_keys)
            memcpy(log.at, &digest, 8)
            log.at += 8
        return 0

    cdef int _record_hint(self, context, list keys, bytes text, error) except -1:
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef bytes kind = _kind_of(error)
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(HINT, context, 160 + len(text), keys)
                if request is not None:
                    log.put_keys(keys, request)
                    log.put_text(text)
                    self._put_outcome(kind)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_prefills(self, list numbers, double seconds, error) except -1:
        cdef CallLog log = self.log
        cdef bytes kind = _kind_of(error)
        cdef Py_ssize_t i, n = len(numbers)
        cdef uint64_t number
        with cython.critical_section(log):
            try:
                if not log.is_closed and self._begin(REPORT_PREFILLS, None, 160 + 10 * n, None) is not None:
                    log.put_number(n)
                    for i in range(n):
                        number = numbers[i]
                        log.put_number(number)
                    memcpy(log.at, &seconds, 8)
                    log.at += 8
                    self._put_outcome(kind)
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
        self.enter()
        try:
            answer = self._lookup(keys, req_context)
        except BaseException as error:
            self.record_failure(LOOKUP_ONE if is_one else LOOKUP, req_context, keys, -1, error)
            raise
        if is_one:
            self.record_one(LOOKUP_ONE, req_context, keys, answer)
        else:
            self.record_batch(LOOKUP, req_context, keys, -1, answer)
        return answer

    def status(self, key, req_context=None):
        """See `BlockPool.status` and `TieredOffloadingManager.status`."""
        self.enter()
        try:
            answer = self._status(key) if req_context is None else self._status(key, req_context)
        except BaseException as error:
            self.record_failure(STATUS, req_context, key, -1, error)
            raise
        self.record_one(STATUS, req_context, key, answer)
        return answer

    def is_coming(self, key, req_context=None):
        """See `TieredOffloadingManager.is_coming`."""
        self.enter()
        try:
            answer = self._is_coming(key, req_context)
        except BaseException as error:
            self.record_failure(IS_COMING, req_context, key, -1, error)
            raise
        self.record_one(IS_COMING, req_context, key, answer)
        return answer

    def touch(self, keys, req_context=None):
        """See `OffloadingManager.touch`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self.enter()
        try:
            self._touch(keys, req_context)
        except BaseException as error:
            self.record_failure(TOUCH, req_context, keys, -1, error)
            raise
        self.record_batch(TOUCH, req_context, keys, -1, None)

    def prepare_load(self, keys, req_context=None):
        """See `OffloadingManager.prepare_load`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self.enter()
        try:
            spec = self._prepare_load(keys, req_context)
        except BaseException as error:
            self.record_failure(PREPARE_LOAD, req_context, keys, -1, error)
            raise
        self.record_load(req_context, keys, spec)
        return spec

    def complete_load(self, keys, req_context=None):
        """See `OffloadingManager.complete_load`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self.enter()
        try:
            self._complete_load(keys, req_context)
        except BaseException as error:
            self.record_failure(COMPLETE_LOAD, req_context, keys, -1, error)
            raise
        self.record_batch(COMPLETE_LOAD, req_context, keys, -1, None)

    def prepare_store(self, keys, req_context=None):
        """See `OffloadingManager.prepare_store`."""
        if type(keys) is not list:
            keys = as_key_list(keys)
        self.enter()
        try:
            output = self._prepare_store(keys, req_context)
        except BaseException as error:
            self.record_failure(PREPARE_STORE, req_context, keys, -1, error)
            raise
        self.record_store(req_context, keys, output)
        return output

    def complete_store(self, keys, req_context=None, success=True):
        """See `OffloadingManager.complete_store`."""
        if req_context is True or req_context is False:
            success, req_context = req_context, None
        if type(keys) is not list:
            keys = as_key_list(keys)
        cdef bint flag = True if success else False
        self.enter()
        try:
            self._complete_store(keys, req_context, success)
        except BaseException as error:
            self.record_failure(COMPLETE_STORE, req_context, keys, flag, error)
            raise
        self.record_batch(COMPLETE_STORE, req_context, keys, flag, None)

    def reorder(self, req_context):
        """See `BlockPool.reorder`."""
        self.enter()
        try:
            self._reorder(req_context)
        except BaseException as error:
            self.record_failure(REORDER, req_context, None, -1, error)
            raise
        self.record_simple(REORDER, req_context, -1)

    def on_request_finished(self, req_context, *, use_positions=False):
        """See `OffloadingManager.on_request_finished`."""
        cdef bint flag = True if use_positions else False
        self.enter()
        try:
            if flag:
                self._on_request_finished(req_context, use_positions=True)
            else:
                self._on_request_finished(req_context)
        except BaseException as error:
            self.record_failure(REQUEST_FINISHED, req_context, None, flag, error)
            raise
        self.record_simple(REQUEST_FINISHED, req_context, flag)
        self.last_context = self.last_request = None

    def on_schedule_end(self):
        """See `OffloadingManager.on_schedule_end`."""
        self.enter()
        try:
            self._on_schedule_end()
        except BaseException as error:
            self.record_failure(SCHEDULE_END, None, None, -1, error)
            raise
        self.record_simple(SCHEDULE_END, None, -1)

    def hint(self, request_or_keys, next_use):
        """See `OffloadingManager.hint`."""
        self.make_hint(self._hint, request_or_keys, next_use)

    cdef int make_hint(self, method, request_or_keys, next_use) except -1:
        """Make a hint by `method`, and record it."""
        cdef bint is_request = isinstance(request_or_keys, ReqContext)
        keys = [] if is_request else as_key_list(request_or_keys)
        context = request_or_keys if is_request else None
        text = str(next_use).encode()[:200]
        self.enter()
        self.is_hinting = True
        try:
            method(context if is_request else keys, next_use)
        except BaseException as error:
            self._record_hint(context, keys, text, error)
            raise
        finally:
            self.is_hinting = False
        self._record_hint(context, keys, text, None)
        return 0

    def report_prefills(self, parts, seconds):
        """See `TieredOffloadingManager.report_prefills`."""
        parts = list(parts)
        cdef list numbers = [max(0, min(int(number), 1 << 62)) for part in parts for number in part]
        cdef double recorded_s = seconds
        self.enter()
        try:
            self._report_prefills(parts, seconds)
        except BaseException as error:
            self._record_prefills(numbers, recorded_s, error)
            raise
        self._record_prefills(numbers, recorded_s, None)

    def reset_cache(self):
        """See `OffloadingManager.reset_cache`."""
        self.enter()
        try:
            self._reset_cache()
        except BaseException as error:
            self.record_failure(RESET, None, None, -1, error)
            raise
        self.record_reset()

    def take_events(self, max_events=None):
        """See `OffloadingManager.take_events`."""
        self.enter()
        try:
            events = list(self._take_events() if max_events is None else self._take_events(max_events))
        except BaseException as error:
            self.num_inside -= 1
            raise
        self.record_events(events, max_events)
        return iter(events)
