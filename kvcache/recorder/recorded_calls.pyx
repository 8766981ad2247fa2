"""RecordedCalls: the calls of one manager, each made and written to a log.

Compiled because it runs in the scheduler's thread, around every call.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

import json

from kvcache.recorder.call_log cimport (
    A_BLOCKS, A_ERROR, A_EVENTS, A_FALSE, A_INT, A_NONE, A_OTHER, A_OUTPUT, A_TRUE, COMPLETE_LOAD, COMPLETE_STORE,
    CONTEXT, GROUPS, HINT, IS_COMING, LOOKUP, LOOKUP_ONE, POSITIONS, PREPARE_LOAD, PREPARE_STORE, REORDER,
    REPORT_PREFILLS, REQUEST_FINISHED, RESET, SCHEDULE_END, STATUS, TAKE_EVENTS, TOUCH, CallLog, RequestLog,
    kv_put_number,
)

from kvcache.keys import as_key_list
from kvcache.request import ReqContext
from kvcache.specs import BlockIDsLoadStoreSpec, CPULoadStoreSpec

cdef extern from *:
    """
    #include <structmember.h>
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
    """
    Py_ssize_t kv_slot_offset(object descriptor) except -1
    PyObject* kv_slot(object of, Py_ssize_t offset) noexcept
    int usleep(unsigned int microseconds) nogil

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() noexcept nogil
    int PyDict_Next(object of, Py_ssize_t* at, PyObject** key, PyObject** value) noexcept
    bint PyLong_CheckExact(PyObject* value) noexcept
    # Of an exact int it raises nothing.
    int64_t PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow) noexcept

cdef enum:
    NUM_WAITS = 10
    WAIT_US = 20

cdef Py_ssize_t positions_offset = kv_slot_offset(ReqContext.positions)
cdef int64_t MAX_NUMBER = <int64_t> 1 << 62


cdef inline bint _is_number(PyObject* value, int64_t* number) noexcept:
    """Read an int that a record has room for; compared as an object, it would cost as much as the rest of a record."""
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    number[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return not overflow and -MAX_NUMBER < number[0] < MAX_NUMBER


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
        if text and log.has_room(40 + len(text)):
            log.at[0] = CONTEXT
            log.at += 1
            log.put_number(request.number)
            log.put_text(text)
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

    cdef inline RequestLog _begin(self, int op, context, Py_ssize_t num_bytes):
        """Begin a record; None: there is no room for it."""
        cdef CallLog log = self.log
        cdef RequestLog request = self._request_of(context)
        cdef int64_t now_ns = log.now_ns()
        # From here to the record's end nothing may run Python: another thread could take the chunk away.
        if not log.has_room(64 + num_bytes):
            return None
        log.at[0] = op
        log.at += 1
        log.put_time(now_ns)
        log.put_number(request.number)
        log.num_records += 1
        return request

    cdef inline void _put_one(self, key) noexcept:
        cdef uint64_t hash = self.log.hash_key(<PyObject*> key)
        memcpy(self.log.at, &hash, 8)
        self.log.at += 8

    cdef inline void _put_answer(self, answer, bint is_spec) noexcept:
        cdef CallLog log = self.log
        cdef int64_t number
        if is_spec:
            log.at[0] = A_BLOCKS
            log.blocks.append(answer)
        elif answer is None:
            log.at[0] = A_NONE
        elif answer is False:
            log.at[0] = A_FALSE
        elif answer is True:
            log.at[0] = A_TRUE
        elif _is_number(<PyObject*> answer, &number) and number >= 0:
            log.at[0] = A_INT
            log.at = kv_put_number(log.at + 1, <uint64_t> number)
            return
        else:
            log.at[0] = A_OTHER
        log.at += 1

    cdef inline void _put_outcome(self, bytes error) noexcept:
        """End the record of a call that answers nothing: it did, or raised an error of this kind."""
        cdef CallLog log = self.log
        log.at[0] = A_NONE if error is None else A_ERROR
        log.at += 1
        if error is not None:
            log.put_text(error)

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
                request = self._begin(op, context, log.keys_bytes(keys))
                if request is not None:
                    log.put_keys(keys, request)
                    if flag >= 0:
                        log.put_number(flag)
                    self._put_answer(answer, is_spec)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_store(self, context, keys, output) except -1:
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef Py_ssize_t num_bytes = log.keys_bytes(keys), num_evicted = 0
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                stored = spec = None
                if output is not None:
                    stored, spec, num_evicted = output.keys_to_store, output.store_spec, len(output.evicted_keys)
                    num_bytes += log.keys_bytes(stored)
                request = self._begin(PREPARE_STORE, context, num_bytes)
                if request is not None:
                    log.put_keys(keys, request)
                    if stored is None:
                        log.at[0] = A_NONE
                        log.at += 1
                    else:
                        log.at[0] = A_OUTPUT
                        log.at += 1
                        log.put_keys(stored, request)
                        log.put_number(num_evicted)
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
                        log.put_number(flag)
                    self._put_outcome(None)
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_failure(self, int op, context, keys, int flag, error) except -1:
        """Record a call that raised."""
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef bytes kind = _kind_of(error)
        cdef bint is_one = op == LOOKUP_ONE or op == STATUS or op == IS_COMING
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(op, context, 128 if is_one or keys is None else 128 + log.keys_bytes(keys))
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
                        digest = digest * <uint64_t> 1099511628211 ^ log.hash_key(<PyObject*> key)
                if self._begin(TAKE_EVENTS, None, 48) is not None:
                    log.put_number(0 if max_events is None else <uint64_t> max_events + 1)
                    log.at[0] = A_EVENTS
                    log.at += 1
                    log.put_number(len(events))
                    log.put_number(num_keys)
                    memcpy(log.at, &digest, 8)
                    log.at += 8
            finally:
                self.num_inside -= 1
        return 0

    cdef int _record_hint(self, context, list keys, bytes text, error) except -1:
        cdef CallLog log = self.log
        cdef RequestLog request
        cdef bytes kind = _kind_of(error)
        with cython.critical_section(log):
            try:
                if log.is_closed:
                    return 0
                request = self._begin(HINT, context, 160 + len(text) + log.keys_bytes(keys))
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
                if not log.is_closed and self._begin(REPORT_PREFILLS, None, 160 + 10 * n) is not None:
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
