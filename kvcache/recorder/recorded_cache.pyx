"""RecordedCache: the operations of a pool's cache, each made and written to a log.

Compiled because it stands between the pool and its cache at every call of the scheduler. The cache is called from C, so
that a recorded call costs its record and no second call.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from kvcache.core.cache cimport BlockCache
from kvcache.core.event_log cimport EventLog, TakenEvents
from kvcache.core.request_keys cimport RequestKeys
from kvcache.recorder.call_log cimport (
    COMPLETE_LOAD, COMPLETE_STORE, LOOKUP, PREPARE_LOAD, PREPARE_STORE, REFUSED, REORDER, REQUEST_FINISHED, RESET,
    STATUS, TOUCH, CallLog,
)
from kvcache.recorder.recorded_calls cimport RecordedCalls, kv_slot, kv_slot_offset

import numpy as np

from kvcache.specs import CPULoadStoreSpec, PrepareStoreOutput

cdef extern from *:
    """
    /* What an array of numpy holds, without a buffer, which costs as much as all the rest of a record. */
    static inline const int64_t *kv_int64s(PyObject *array)
    {
        return *(const int64_t **)((char *)array + sizeof(PyObject));
    }
    """
    const int64_t* kv_int64s(PyObject* array) noexcept

cdef Py_ssize_t ids_offset = kv_slot_offset(CPULoadStoreSpec.block_ids)
cdef Py_ssize_t stored_offset = kv_slot_offset(PrepareStoreOutput.keys_to_store)
cdef Py_ssize_t evicted_offset = kv_slot_offset(PrepareStoreOutput.evicted_keys)
cdef Py_ssize_t spec_offset = kv_slot_offset(PrepareStoreOutput.store_spec)


cdef bint _knows_arrays() except -1:
    # numpy's headers have had the data first since its beginning; should that change, buffers are asked.
    cdef Py_buffer buffer
    cdef const int64_t* data
    array = np.arange(3, dtype=np.int64)
    data = kv_int64s(<PyObject*> array)
    PyObject_GetBuffer(array, &buffer, PyBUF_SIMPLE)
    try:
        return buffer.buf == <const void*> data
    finally:
        PyBuffer_Release(&buffer)


cdef bint knows_arrays = _knows_arrays()


@cython.final
cdef class RecordedCache:
    """RecordedCache(cache, calls)

    What a pool calls in place of its cache while it is recorded (`kvcache.control.pool.BlockPool.wrap_cache`).

    Parameters
    ----------
    cache : BlockCache
        The pool's cache.
    calls : RecordedCalls
        What writes the records.

    Notes
    -----
    A call that the pool refuses by itself, such as one with a context that is none, changes nothing and is not
    recorded.
    """

    cdef BlockCache cache
    cdef RecordedCalls calls

    def __cinit__(self, BlockCache cache not None, RecordedCalls calls not None):
        self.cache = cache
        self.calls = calls

    # ---- operations of the cache -------------------------------------------------------------------------------

    def lookup(self, list keys not None, RequestKeys request_keys):
        """See `BlockCache.lookup`."""
        self.calls.enter()
        try:
            num_ready = self.cache.lookup(keys, request_keys)
        except BaseException as error:
            self.calls.record_failure(LOOKUP, request_keys, keys, -1, error)
            raise
        self.calls.record_batch(LOOKUP, request_keys, keys, -1, num_ready)
        return num_ready

    def status_of(self, key):
        """See `BlockCache.status_of`."""
        cdef int state
        cdef CallLog log = self.calls.log
        self.calls.enter()
        try:
            state = self.cache.status_of(key)
        except BaseException as error:
            self.calls.record_failure(STATUS, None, key, -1, error)
            raise
        with cython.critical_section(log):
            try:
                if not log.is_closed:
                    log.put_status(<PyObject*> key, state)
            finally:
                self.calls.num_inside -= 1
        return state

    def needs_time(self, RequestKeys request_keys not None, dict positions):
        """See `BlockCache.needs_time`."""
        # A policy reads them in the use that follows.
        self._note_positions(request_keys, positions)
        return self.cache.needs_time(request_keys, positions)

    def touch(self, list keys not None, RequestKeys request_keys):
        """See `BlockCache.touch`."""
        self.calls.enter()
        try:
            self.cache.touch(keys, request_keys)
        except BaseException as error:
            self.calls.record_failure(TOUCH, request_keys, keys, -1, error)
            raise
        self.calls.record_batch(TOUCH, request_keys, keys, -1, None)

    def pin(self, list keys not None, RequestKeys request_keys):
        """See `BlockCache.pin`."""
        self.calls.enter()
        try:
            spec = self.cache.pin(keys, request_keys)
        except BaseException as error:
            self.calls.record_failure(PREPARE_LOAD, request_keys, keys, -1, error)
            raise
        cdef PyObject* ids = kv_slot(spec, ids_offset)
        if knows_arrays:
            self.calls.record_blocks(request_keys, keys, kv_int64s(ids), len(keys), True)
        else:
            self.calls.record_load(request_keys, keys, spec)
        return spec

    def unpin(self, list keys not None, RequestKeys request_keys):
        """See `BlockCache.unpin`."""
        self.calls.enter()
        try:
            self.cache.unpin(keys, request_keys)
        except BaseException as error:
            self.calls.record_failure(COMPLETE_LOAD, request_keys, keys, -1, error)
            raise
        self.calls.record_batch(COMPLETE_LOAD, request_keys, keys, -1, None)

    def reserve(self, list keys not None, RequestKeys request_keys, admit=None):
        """See `BlockCache.reserve`."""
        self.calls.enter()
        try:
            output = self.cache.reserve(keys, request_keys, admit)
        except BaseException as error:
            self.calls.record_failure(PREPARE_STORE, request_keys, keys, -1, error)
            raise
        cdef PyObject* stored
        if output is None or not knows_arrays:
            self.calls.record_store(request_keys, keys, output)
        else:
            stored = kv_slot(output, stored_offset)
            self.calls.record_output(
                request_keys, keys, <object> stored, len(<list> kv_slot(output, evicted_offset)),
                kv_int64s(kv_slot(<object> kv_slot(output, spec_offset), ids_offset)), len(<list> stored), True)
        return output

    def commit(self, list keys not None, RequestKeys request_keys):
        """See `BlockCache.commit`."""
        self.calls.enter()
        try:
            ready = self.cache.commit(keys, request_keys)
        except BaseException as error:
            self.calls.record_failure(COMPLETE_STORE, request_keys, keys, True, error)
            raise
        self.calls.record_batch(COMPLETE_STORE, request_keys, keys, True, None)
        return ready

    def abort(self, list keys not None, RequestKeys request_keys):
        """See `BlockCache.abort`."""
        self.calls.enter()
        try:
            num_dropped = self.cache.abort(keys, request_keys)
        except BaseException as error:
            self.calls.record_failure(COMPLETE_STORE, request_keys, keys, False, error)
            raise
        self.calls.record_batch(COMPLETE_STORE, request_keys, keys, False, None)
        return num_dropped

    def reorder(self, RequestKeys request_keys not None, dict positions):
        """See `BlockCache.reorder`."""
        self._note_positions(request_keys, positions)
        self.calls.enter()
        try:
            self.cache.reorder(request_keys, positions)
        except BaseException as error:
            self.calls.record_failure(REORDER, request_keys, None, -1, error)
            raise
        self.calls.record_simple(REORDER, request_keys, -1)

    def end_request(self, RequestKeys request_keys not None, dict positions, bint use_positions=False):
        """See `BlockCache.end_request`."""
        self._note_positions(request_keys, positions)
        self.calls.enter()
        try:
            self.cache.end_request(request_keys, positions, use_positions)
        except BaseException as error:
            self.calls.record_failure(REQUEST_FINISHED, request_keys, None, use_positions, error)
            raise
        self.calls.record_simple(REQUEST_FINISHED, request_keys, use_positions)

    def reset(self):
        """See `BlockCache.reset`."""
        self.calls.enter()
        try:
            self.cache.reset()
        except BaseException as error:
            self.calls.record_failure(RESET, None, None, -1, error)
            raise
        self.calls.record_reset()

    # ---- what the pool does without it -------------------------------------------------------------------------

    def introduce(self, context, RequestKeys request_keys not None):
        """Number a request, and record what its context says of it, if anything."""
        with cython.critical_section(self.calls.log):
            request_keys.recorded = self.calls.log_of_context(context)

    def refuse(self):
        """Record that a call ends before it reaches the cache, for what the clock answered."""
        cdef CallLog log = self.calls.log
        with cython.critical_section(log):
            if not self.calls.is_hinting and not log.is_closed and log.has_room(8):
                log.at[0] = REFUSED
                log.at += 1
                log.num_records += 1
                log.clock_owner = 0

    def end_unknown(self, context, bint use_positions):
        """Record the end of a request that has named no key."""
        self.calls.enter()
        self.calls.record_simple(REQUEST_FINISHED, context, use_positions)
        self.calls.last_context = self.calls.last_request = None

    def hint(self, method, request_or_keys, next_use):
        """Make a hint by `method`, and record it."""
        self.calls.make_hint(method, request_or_keys, next_use)

    def take_events(self, EventLog events not None, max_events):
        """Take events out of a log, record them, and return them."""
        cdef TakenEvents taken
        self.calls.enter()
        try:
            taken = events.take(max_events)
        except BaseException:
            self.calls.num_inside -= 1
            raise
        # Before any is read: that may let other threads run.
        self.calls.record_taken(taken, max_events)
        return taken

    cdef int _note_positions(self, RequestKeys request_keys, dict positions) except -1:
        cdef CallLog log = self.calls.log
        if positions is not None:
            with cython.critical_section(log):
                if not log.is_closed:
                    self.calls.put_positions(self.calls.log_of_keys(request_keys), positions)
        return 0
