cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from kvcache.core.event_log cimport TakenEvents
from kvcache.core.request_keys cimport RequestKeys
from kvcache.recorder.call_log cimport CallLog, PyThread_get_thread_ident, RequestLog

cdef extern from *:
    """
    #include <structmember.h>
    /* Where a slot lies in the instances of its class: to read it so costs a tenth of an attribute. */
    static inline Py_ssize_t kv_slot_offset(PyObject *descriptor)
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


@cython.final
cdef class RecordedCalls:
    cdef CallLog log
    cdef readonly tuple names
    cdef object __weakref__
    cdef object _lookup, _status, _touch, _prepare_load, _complete_load, _prepare_store, _complete_store, _reorder
    cdef object _on_request_finished, _reset_cache, _take_events, _on_schedule_end, _is_coming, _hint, _report_prefills
    cdef object last_context
    cdef RequestLog last_request
    cdef RequestLog nobody
    cdef RequestLog bad
    cdef uint64_t recording         # its number in this process
    cdef uint64_t num_contexts
    cdef uint64_t first_context     # since the last reset
    cdef bint is_hinting
    cdef int num_inside             # a record of a call takes one off
    cdef readonly uint64_t num_entered
    cdef unsigned long owner

    cdef bint _is_any_inside(self, codes) except -1
    cdef void wait_for_turn(self) noexcept
    cdef RequestLog introduce(self, bytes said)
    cdef RequestLog known(self, RequestKeys request_keys)
    cdef RequestLog log_of_keys(self, RequestKeys request_keys)
    cdef RequestLog log_of_context(self, context)
    cdef RequestLog _request_of(self, context)
    cdef int put_positions(self, RequestLog request, positions) except -1
    cdef RequestLog _begin(self, int op, context, Py_ssize_t num_bytes, keys)
    cdef void _put_one(self, key) noexcept
    cdef void _put_answer(self, answer) noexcept
    cdef void _put_outcome(self, bytes error) noexcept
    cdef int record_one(self, int op, context, key, answer) except -1
    cdef int record_batch(self, int op, context, keys, int flag, answer) except -1
    cdef int record_load(self, context, keys, spec) except -1
    cdef int record_blocks(self, context, keys, const int64_t* ids, Py_ssize_t num_ids, bint are_slots) except -1
    cdef int record_output(
        self, context, keys, stored, Py_ssize_t num_evicted, const int64_t* ids, Py_ssize_t num_ids, bint are_slots
    ) except -1
    cdef int record_store(self, context, keys, output) except -1
    cdef int record_simple(self, int op, context, int flag) except -1
    cdef int record_reset(self) except -1
    cdef int record_failure(self, int op, context, keys, int flag, error) except -1
    cdef int record_events(self, list events, max_events) except -1
    cdef int record_taken(self, TakenEvents taken, max_events) except -1
    cdef int _put_events(self, max_events, Py_ssize_t num_events, Py_ssize_t num_keys, uint64_t digest) except -1
    cdef int _record_hint(self, context, list keys, bytes text, error) except -1
    cdef int _record_prefills(self, list numbers, double seconds, error) except -1
    cdef int make_hint(self, method, request_or_keys, next_use) except -1

    cdef inline void enter(self) noexcept:
        """Begin a call; its record ends it."""
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.num_inside and self.owner != me:
            self.wait_for_turn()
        self.num_inside += 1
        self.num_entered += 1
        self.owner = me
