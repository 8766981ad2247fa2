"""RecordedCalls: make the calls of one manager under one lock, and queue a record of each for the recorder's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kvcache.keys import as_key_list
from kvcache.recorder.ops import Op
from kvcache.request import ReqContext

_RECORD_UNITS = 16  # in units of 8 bytes: a record without its keys
_MAX_RUN = 512
_MAX_NUMBER = 1 << 62
_MAX_TEXT = 200


def num_calls(record: Any) -> int:
    """Return how many records of a file a queued record stands for."""
    return len(record[1]) if record[0] is Op.STATUS_RUN else 1


class CallQueue:
    """Records that wait for the recorder's thread.

    `clock` returns the timestamps of calls, in seconds. Half of `max_bytes` is for records that wait, half for records
    that are being written. `lock` is held during each recorded call, so that records are in the order of the calls.
    `is_inside` is whether the thread that holds the lock is inside a recorded call, which has read `inputs`. Further
    keys with the answer `run_answer` (None: no answer) belong to the last record, whose keys are `run_keys`. A record
    begins with its `Op`; see `kvcache.recorder.format.FrameEncoder`.
    """

    __slots__ = ("__weakref__", "_max_units", "_num_taken", "clock", "inputs", "is_inside", "is_open", "lock",
                 "num_lost", "records", "room", "run_answer", "run_keys")  # fmt: skip

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.is_open, self.is_inside = True, False
        self.num_lost = self._num_taken = 0
        self.inputs: tuple[tuple[Op, Any, int], ...] = ()
        self.records: deque[Any] = deque()
        self.run_answer: int | None = None
        self.run_keys: list[bytes] = []
        self.room = self._max_units = max_bytes // 16

    @property
    def num_records(self) -> int:
        """Number of records so far."""
        # Without the lock, which a call may hold for long: `copy` is atomic.
        return self._num_taken + sum(map(num_calls, self.records.copy()))

    def put(self, record: Any, num_keys: int) -> bool:
        """Queue a record, and return True. Without memory for it, count it as lost. The caller holds the lock."""
        self.run_answer = None
        room = self.room - num_keys - _RECORD_UNITS
        if room >= 0:
            self.room = room
            self.records.append(record)
            return True
        if self.is_open:
            self.num_lost += 1
            if not self.records or self.records[-1][0] is not Op.LOST:
                self.records.append([Op.LOST, 0])
            self.records[-1][1] += 1
        return False

    def put_note(self, op: Op, value: Any) -> None:
        """Queue a note. The caller holds the lock."""
        if self.is_open:
            self.records.append([op, value])

    def begin_run(self, key: bytes, answer: int) -> None:
        """Queue the record of a `status`, to which further keys with this answer are added."""
        if not self.is_inside:
            keys = [key]
            if self.put((Op.STATUS_RUN, keys, answer), len(self.run_keys)):  # the keys that were added to the last run
                self.run_keys, self.run_answer = keys, answer

    def put_input(self, op: Op, value: Any, tier: int = -1, num_keys: int = 0) -> None:
        """Note an input of the recorded call in progress. Outside a recorded call, do nothing."""
        # This fails only while another thread is in a call, to which this input does not belong.
        if self.lock.acquire(blocking=False):
            if self.is_inside:
                self.inputs += ((op, value, tier),)
                self.room -= _RECORD_UNITS + num_keys
            self.lock.release()

    def take(self) -> deque[Any]:
        """Take out all records."""
        with self.lock:
            taken, self.records = self.records, deque()
            self._num_taken += sum(map(num_calls, taken))
            self.run_answer, self.run_keys = None, []
            self.room = self._max_units if self.is_open else -1
        return taken

    def close(self) -> None:
        """Accept no more records."""
        self.is_open = False
        self.room = -1
        self.run_answer = None

    def forget(self) -> None:
        """Drop everything in a forked child, which has no recorder thread."""
        self.lock = threading.RLock()
        self.is_inside = False
        self.close()
        self.take()


class RecordedCalls:
    """Makes the calls of one manager and queues a record of each (a `kvcache.control.watch.Wrapper`).

    `names` are the recorded methods.
    """

    def __init__(self, queue: CallQueue, names: tuple[str, ...]) -> None:
        self.names = names
        self._queue = queue

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable that records the calls of `method`."""
        shape: Any = getattr(self, f"_{name}", self._of_keys)
        return shape(Op[name.upper()], method)  # type: ignore[no-any-return]

    def _of_keys(self, op: Op, method: Callable[[Any, Any], Any], flag: Any = 0) -> Callable[..., Any]:
        """Return a function of keys and a request that calls `method` with them, and records the call."""
        queue, is_store = self._queue, op is Op.PREPARE_STORE

        # All in one function: each call of a Python function would cost 5 % of a short request.
        def recorded(keys: Any, req_context: Any = None) -> Any:
            if type(keys) is not list:
                keys = as_key_list(keys)
            lock = queue.lock
            lock.acquire()  # half the cost of `with`
            if queue.is_inside:
                lock.release()  # held once already: this call is part of another
                return method(keys, req_context)
            queue.is_inside = True
            queue.run_answer = None
            try:
                try:
                    answer = result = method(keys, req_context)
                    if is_store and answer is not None:
                        stored = answer.keys_to_store
                        result = stored.copy(), len(answer.evicted_keys), answer.store_spec
                        queue.room -= 2 * len(stored)
                except BaseException as error:
                    result = type(error)
                    # Release objects of other types in the caller's thread, not in the recorder's thread.
                    keys = [key if type(key) is bytes else None for key in keys]
                    raise
                finally:
                    positions: Any = req_context.positions if isinstance(req_context, ReqContext) else None
                    if positions:
                        positions = positions, len(positions)
                    # The caller may change its list before the recorder's thread has read it.
                    record = op, queue.clock(), req_context, keys.copy(), flag, result, queue.inputs, positions
                    room = queue.room - len(keys) - _RECORD_UNITS
                    if room >= 0:
                        queue.room = room
                        queue.records.append(record)
                    else:
                        queue.put(record, len(keys))  # it is lost
                return answer
            finally:
                queue.is_inside = False
                queue.inputs = ()
                lock.release()

        return recorded

    def _of_key(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        def of_list(keys: Any, req_context: Any) -> Any:
            return method(*keys) if req_context is None else method(*keys, req_context)

        recorded = self._of_keys(op, of_list)
        return lambda key, req_context=None: recorded([key], req_context)

    def _without_keys(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *context: self._of_keys(op, lambda keys, req_context: method(*context))([], *context)

    # ---- calls whose arguments are not a list of keys and a request, by the name of the method ------------------

    _reorder = _on_schedule_end = _without_keys

    def _reset_cache(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        # A version is no request. It decides nothing that a replay repeats, so the record is without it.
        return lambda *version, **named: self._of_keys(op, lambda keys, _: method(*version, **named))([])

    def _lookup(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        of_key, of_keys = self._of_key(Op.LOOKUP_ONE, method), self._of_keys(op, method)

        def lookup(keys: Any = None, req_context: Any = None, *, key: Any = None) -> Any:
            if keys is None:
                keys = key
            return (of_key if isinstance(keys, bytes) else of_keys)(keys, req_context)

        return lookup

    def _status(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        slow, queue = self._of_key(op, method), self._queue
        if "on_schedule_end" in self.names:
            return slow  # with tiers, the result depends on them and on the clock

        # Engines look up key by key.
        def status(key: Any, req_context: Any = None) -> Any:
            if type(key) is not bytes or not key:
                return slow(key)
            lock = queue.lock
            lock.acquire()
            try:
                answer = method(key)
                if answer == queue.run_answer and len(keys := queue.run_keys) < _MAX_RUN:
                    keys.append(key)
                else:
                    queue.begin_run(key, answer)
                return answer
            finally:
                lock.release()

        return status

    def _complete_store(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        stored, failed = self._of_keys(op, method), self._of_keys(op, partial(method, success=False), 1)

        def complete_store(keys: Any, req_context: Any = None, success: Any = True) -> Any:
            if req_context is True or req_context is False:
                success, req_context = req_context, None
            return (stored if success else failed)(keys, req_context)

        return complete_store

    def _on_request_finished(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        plain = self._of_keys(op, lambda keys, req_context: method(req_context))
        positioned = self._of_keys(op, lambda keys, req_context: method(req_context, use_positions=True), 1)
        return lambda req_context, *, use_positions=False: (positioned if use_positions else plain)([], req_context)

    def _hint(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        def hint(request_or_keys: Any, next_use: Any) -> Any:
            text = next_use[:_MAX_TEXT] if isinstance(next_use, str) else type(next_use).__name__
            is_request = isinstance(request_or_keys, ReqContext)
            make = self._of_keys(op, lambda keys, context: method(context if is_request else keys, next_use), text)
            return make([], request_or_keys) if is_request else make(request_or_keys)

        return hint

    def _prefetch(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        return self._of_keys(op, lambda keys, _: method(keys))

    def _report_prefills(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        def report_prefills(parts: Iterable[Any], seconds: float) -> Any:
            parts = list(parts)
            numbers = [[max(0, min(int(number), _MAX_NUMBER)) for number in part] for part in parts]
            flag = {"parts": numbers, "seconds": float(seconds)}
            return self._of_keys(op, lambda keys, context: method(parts, seconds), flag)([])

        return report_prefills

    def _take_events(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        queue = self._queue

        def take_events(max_events: int | None = None) -> Any:
            with queue.lock:
                events = list(method() if max_events is None else method(max_events))
                if events and not queue.is_inside:
                    flag = 0 if max_events is None else min(max_events, _MAX_NUMBER) + 1
                    num_keys = sum(len(event.keys) for event in events)
                    queue.put((op, queue.clock(), None, [], flag, events, (), None), num_keys)
            return iter(events)

        return take_events
