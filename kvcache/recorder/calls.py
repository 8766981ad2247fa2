"""RecordedCalls: make the calls of one manager under one lock, and queue a record of each for the recorder's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvcache.keys import as_key_list
from kvcache.recorder.ops import LISTS, Op
from kvcache.request import ReqContext
from kvcache.specs import PrepareStoreOutput

_RECORD_UNITS = 16  # in units of 8 bytes: a record without its keys
_MAX_RUN = 4096
_MAX_NUMBER = 1 << 62
_MAX_TEXT = 200


class CallQueue:
    """Records that wait for the recorder's thread.

    Parameters
    ----------
    max_bytes : int
        Memory for waiting records. If it is used up, further records are lost, and counted.
    clock : callable
        Returns the timestamps of calls, in seconds.

    Attributes
    ----------
    lock : RLock
        Held during each recorded call, so that records are in the order of the calls.
    is_open : bool
        Whether records are accepted.
    is_inside : bool
        Whether the thread that holds the lock is inside a recorded call.
    run : list of bytes
        Keys that were looked up one at a time, all with the result `run_answer`: the last record, which may grow.

    Notes
    -----
    A record is a tuple: units of memory, `Op`, and values; see `kvcache.recorder.format.FrameEncoder`.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.is_open = self.is_ended = self.is_inside = False
        self.num_lost = 0
        self.run: list[bytes] = []
        self.run_answer: Any = None
        self._num_records = 0
        self._num_unreported = 0
        self._max_units = max_bytes // 8
        self._num_units = 0  # in the queue
        self._num_writing = 0  # held by the thread
        self._check_units = 0  # limit for unchecked records; above it, wake the thread or lose the record
        self._records: deque[tuple[Any, ...]] = deque()
        self._bell = threading.Event()

    @property
    def num_records(self) -> int:
        """Number of records: calls and their inputs."""
        return self._num_records + len(self.run)

    def put_call(self, op: Op, context: Any, keys: Any, flag: Any, answer: Any) -> None:
        """Queue the record of a call. The caller holds the lock."""
        num_keys = len(keys)
        if type(answer) is PrepareStoreOutput:
            stored = answer.keys_to_store
            num_keys += 2 * len(stored)
            answer = "output", stored.copy(), len(answer.evicted_keys), answer.store_spec
        positions, num_positions = None, 0
        if context is not None and isinstance(context, ReqContext):
            positions = context.positions
            if positions is not None:
                num_positions = len(positions)
        num_units = _RECORD_UNITS + num_keys
        self.put((num_units, op, self.clock(), context, positions, num_positions, keys, flag, answer))

    def put(self, record: tuple[Any, ...]) -> bool:
        """Queue a record if there is memory for it. The caller holds the lock."""
        if self.run:
            self.end_run()
        num_units = self._num_units + record[0]
        if num_units > self._check_units and not self._has_room(num_units):
            return False
        self._records.append(record)
        self._num_units = num_units
        self._num_records += 1
        return True

    def _has_room(self, num_units: int) -> bool:
        if not self.is_open:
            return False
        if num_units + self._num_writing > self._max_units:
            self.num_lost += 1
            self._num_unreported += 1
            self._check_units = 0  # the next record is checked, and reports the loss
            return False
        if num_units * 4 > self._max_units:
            self._bell.set()
        if self._num_unreported:
            self._records.append((0, Op.LOST, self._num_unreported))
            self._num_unreported = 0
        return True

    def open(self) -> None:
        """Accept records from now on."""
        self.is_open = True
        self._check_units = self._max_units // 4

    def put_run(self, key: bytes, answer: Any) -> None:
        """Queue a look-up of one key, the first of a run. The caller holds the lock."""
        run = [key]
        if self.put((_MAX_RUN // 4, Op.STATUS_RUN, run, answer)):
            self._num_records -= 1
            self.run, self.run_answer = run, answer

    def end_run(self) -> None:
        """End the run. The caller holds the lock."""
        self._num_records += len(self.run)
        self.run, self.run_answer = [], None

    def put_input(self, op: Op, *values: Any, num_keys: int = 0) -> None:
        """Queue an input of a recorded call. Outside a recorded call, do nothing."""
        # This fails only while another thread is in a call, to which this input does not belong.
        if self.lock.acquire(blocking=False):
            if self.is_inside:
                self.put((_RECORD_UNITS + num_keys, op, *values))
            self.lock.release()

    def take(self) -> deque[tuple[Any, ...]]:
        """Take out all records."""
        with self.lock:
            self.end_run()
            taken, self._records = self._records, deque()
            self._num_writing, self._num_units = self._num_units, 0
            # While the thread is working, every record is checked.
            self._check_units = 0
        return taken

    def release(self, num_units: int) -> None:
        """Release the memory of written records."""
        with self.lock:
            self._num_writing -= num_units
            if self._num_writing <= 0 and self.is_open and not self._num_unreported:
                self._check_units = self._max_units // 4

    def wait(self, seconds: float) -> None:
        """Wait until the queue is a quarter full or closed, or until the timeout."""
        self._bell.wait(seconds)
        self._bell.clear()

    def close(self) -> None:
        """Accept no more records. The thread writes the rest and ends."""
        self.is_open = False
        self.is_ended = True
        self._check_units = -1
        self._bell.set()

    def forget(self) -> None:
        """Drop everything in a forked child, which has no recorder thread."""
        self.lock = threading.RLock()
        self.is_open = self.is_inside = False
        self._check_units = -1
        self.end_run()
        self._records.clear()


class RecordedCalls:
    """Makes the calls of one manager and queues a record of each (a `kvcache.control.watch.Wrapper`).

    Parameters
    ----------
    queue : CallQueue
        Takes the records.
    names : tuple of str
        The recorded methods.
    """

    def __init__(self, queue: CallQueue, names: tuple[str, ...]) -> None:
        self.names = names
        self._queue = queue

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable that records the calls of `method`."""
        shape = getattr(self, f"_{name}", None)
        if shape is not None:
            return shape(method)  # type: ignore[no-any-return]
        op = Op[name.upper()]
        return self._of_keys(op, method) if op in LISTS else self._of_key(op, method)

    def _make(self, op: Op, context: Any, keys: Any, flag: Any, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call and record it, with its result or error."""
        queue = self._queue
        lock = queue.lock
        lock.acquire()  # half the cost of `with`
        try:
            if queue.is_inside:
                return call(*args)  # part of another call
            queue.is_inside = True
            try:
                answer = call(*args)
            except BaseException as error:
                self._put_error(op, context, keys, flag, error)
                raise
            finally:
                queue.is_inside = False
            queue.put_call(op, context, keys, flag, answer)
            return answer
        finally:
            lock.release()

    def _put_error(self, op: Op, context: Any, keys: Any, flag: Any, error: BaseException) -> None:
        if op is not Op.REPORT_PREFILLS:
            # Release objects of other types in the caller's thread, not in the recorder's thread.
            keys = [key if type(key) is bytes else None for key in keys]
        self._queue.put_call(op, context, keys, flag, ("error", type(error).__name__))

    # ---- one recording function per call signature -------------------------------------------------------------

    def _of_keys(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        queue = self._queue

        # Same as `_make`, but inlined: engines make most calls here.
        def recorded(keys: Any, req_context: Any = None) -> Any:
            # Copy the keys: the caller may change its list before the recorder's thread has read it.
            keys = keys.copy() if type(keys) is list else as_key_list(keys)
            lock = queue.lock
            lock.acquire()
            try:
                if queue.is_inside:
                    return method(keys, req_context)
                queue.is_inside = True
                try:
                    answer = method(keys, req_context)
                except BaseException as error:
                    self._put_error(op, req_context, keys, 0, error)
                    raise
                finally:
                    queue.is_inside = False
                queue.put_call(op, req_context, keys, 0, answer)
                return answer
            finally:
                lock.release()

        return recorded

    def _of_key(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(key: Any, req_context: Any = None) -> Any:
            args = (key,) if req_context is None else (key, req_context)
            return self._make(op, req_context, [key], 0, method, *args)

        return recorded

    def _lookup(self, method: Callable[..., Any]) -> Callable[..., Any]:
        of_key, of_keys = self._of_key(Op.LOOKUP_ONE, method), self._of_keys(Op.LOOKUP, method)

        def lookup(keys: Any = None, req_context: Any = None, *, key: Any = None) -> Any:
            if keys is None:
                keys = key
            return (of_key if isinstance(keys, bytes) else of_keys)(keys, req_context)

        return lookup

    def _status(self, method: Callable[..., Any]) -> Callable[..., Any]:
        slow, queue = self._of_key(Op.STATUS, method), self._queue
        if "on_schedule_end" in self.names:
            return slow  # with tiers, the result depends on them and on the clock

        # Engines look up key by key: use the shortest record.
        def status(key: Any, req_context: Any = None) -> Any:
            lock = queue.lock
            lock.acquire()
            try:
                answer = method(key)
                if answer == queue.run_answer and len(queue.run) < _MAX_RUN:
                    queue.run.append(key)
                elif not queue.is_inside:
                    queue.put_run(key, answer)
                return answer
            except BaseException as error:
                if not queue.is_inside:
                    self._put_error(Op.STATUS, None, [key], 0, error)
                raise
            finally:
                lock.release()

        return status

    def _complete_store(self, method: Callable[..., Any]) -> Callable[..., Any]:
        stored = Op.COMPLETE_STORE

        def complete_store(keys: Any, req_context: Any = None, success: Any = True) -> None:
            if req_context is True or req_context is False:
                success, req_context = req_context, None
            keys = as_key_list(keys).copy()
            self._make(stored, req_context, keys, int(bool(success)), method, keys, req_context, success)

        return complete_store

    def _reorder(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda req_context: self._make(Op.REORDER, req_context, (), 0, method, req_context)

    def _on_request_finished(self, method: Callable[..., Any]) -> Callable[..., Any]:
        finished = Op.REQUEST_FINISHED

        def on_request_finished(req_context: Any, *, use_positions: bool = False) -> None:
            call = partial(method, use_positions=True) if use_positions else method
            self._make(finished, req_context, (), int(bool(use_positions)), call, req_context)

        return on_request_finished

    def _on_schedule_end(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: self._make(Op.SCHEDULE_END, None, (), 0, method)

    def _reset_cache(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: self._make(Op.RESET, None, (), 0, method)

    def _hint(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def hint(request_or_keys: Any, next_use: Any) -> None:
            context = request_or_keys if isinstance(request_or_keys, ReqContext) else None
            keys = [] if context is not None else as_key_list(request_or_keys).copy()
            text = next_use[:_MAX_TEXT] if isinstance(next_use, str) else type(next_use).__name__
            self._make(Op.HINT, context, keys, text, method, keys if context is None else context, next_use)

        return hint

    def _report_prefills(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def report_prefills(parts: Any, seconds: float) -> None:
            parts = list(parts)
            numbers = [[max(0, min(int(number), _MAX_NUMBER)) for number in part] for part in parts]
            self._make(Op.REPORT_PREFILLS, None, numbers, float(seconds), method, parts, seconds)

        return report_prefills

    def _take_events(self, method: Callable[..., Any]) -> Callable[..., Any]:
        queue = self._queue

        def take_events(max_events: int | None = None) -> Any:
            with queue.lock:
                events = list(method() if max_events is None else method(max_events))
                if events and not queue.is_inside:
                    flag = 0 if max_events is None else min(max_events, _MAX_NUMBER) + 1
                    named = [(event.keys, bool(event.removed)) for event in events]
                    num_keys = sum(len(keys) for keys, _ in named)
                    record = (Op.TAKE_EVENTS, queue.clock(), None, None, 0, (), flag, ("events", named))
                    queue.put((_RECORD_UNITS + num_keys, *record))
            return iter(events)

        return take_events
