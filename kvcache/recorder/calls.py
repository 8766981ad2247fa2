"""RecordedCalls: make the calls of one manager under one lock, and queue a record of each for the recorder's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvcache.keys import as_key_list
from kvcache.recorder.ops import LISTS, ONE_KEY, Op
from kvcache.request import ReqContext

_RECORD_UNITS = 16  # in units of 8 bytes: a record without its keys
_MAX_NUMBER = 1 << 62
_MAX_TEXT = 200
_OPS = {"on_request_finished": Op.REQUEST_FINISHED, "on_schedule_end": Op.SCHEDULE_END, "reset_cache": Op.RESET}


class CallQueue:
    """Records that wait for the recorder's thread.

    `clock` returns the timestamps of calls, in seconds. Half of `max_bytes` is for records that wait, half for records
    that are being written. `lock` is held during each recorded call, so that records are in the order of the calls.
    `is_inside` is whether the thread that holds the lock is inside a recorded call. A record is a tuple: units of
    memory, `Op`, and values; see `kvcache.recorder.format.FrameEncoder`.
    """

    __slots__ = ("__weakref__", "_max_units", "_num_taken", "clock", "is_inside", "is_open", "lock", "num_lost",
                 "records", "room")  # fmt: skip

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.is_open, self.is_inside = True, False
        self.num_lost = self._num_taken = 0
        self.records: deque[tuple[Any, ...]] = deque()
        self.room = self._max_units = max_bytes // 16

    @property
    def num_records(self) -> int:
        """Number of records: calls, their inputs, and notes of losses."""
        return self._num_taken + len(self.records)

    def put(self, record: tuple[Any, ...]) -> None:
        """Queue a record if there is memory for it. The caller holds the lock."""
        room = self.room - record[0]
        if room >= 0:
            self.room = room
            self.records.append(record)
        elif self.is_open:
            self.num_lost += 1
            num_lost = self.records.pop()[2] if self.records and self.records[-1][1] is Op.LOST else 0
            self.records.append((0, Op.LOST, num_lost + 1))

    def put_input(self, op: Op, value: Any, tier: int = -1, num_keys: int = 0) -> None:
        """Queue an input of a recorded call. Outside a recorded call, do nothing."""
        # This fails only while another thread is in a call, to which this input does not belong.
        if self.lock.acquire(blocking=False):
            if self.is_inside:
                self.put((_RECORD_UNITS + num_keys, op, value, tier))
            self.lock.release()

    def take(self) -> deque[tuple[Any, ...]]:
        """Take out all records."""
        with self.lock:
            taken, self.records = self.records, deque()
            self._num_taken += len(taken)
            self.room = self._max_units if self.is_open else -1
        return taken

    def close(self) -> None:
        """Accept no more records."""
        self.is_open = False
        self.room = -1

    def forget(self) -> None:
        """Drop everything in a forked child, which has no recorder thread."""
        self.lock = threading.RLock()
        self.is_inside = False
        self.close()
        self._num_taken += len(self.records)
        self.records.clear()


class RecordedCalls:
    """Makes the calls of one manager and queues a record of each (a `kvcache.control.watch.Wrapper`).

    `names` are the recorded methods.
    """

    def __init__(self, queue: CallQueue, names: tuple[str, ...]) -> None:
        self.names = names
        self._queue = queue

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable that records the calls of `method`."""
        shape = getattr(self, f"_{name}", None)
        if shape is not None:
            return shape(method)  # type: ignore[no-any-return]
        op = _OPS.get(name) or Op[name.upper()]
        if op in ONE_KEY:
            return self._of_key(op, method)
        if op in LISTS:
            return self._of_keys(op, method)
        return lambda *context: self._make(op, *(context or (None,)), (), 0, method, *context)

    def _make(self, op: Op, context: Any, keys: Any, flag: Any, method: Callable[..., Any], *args: Any) -> Any:
        """Make a call and record it, with its result or error."""
        queue = self._queue
        lock = queue.lock
        lock.acquire()  # half the cost of `with`
        try:
            if queue.is_inside:
                return method(*args)  # part of another call
            queue.is_inside = True
            num_units = _RECORD_UNITS + len(keys)
            found: Any = None
            try:
                answer = found = method(*args)
                if op is Op.PREPARE_STORE and answer is not None:
                    stored = answer.keys_to_store
                    num_units += 2 * len(stored)
                    found = stored.copy(), len(answer.evicted_keys), answer.store_spec
                return answer
            except BaseException as error:
                # Release objects of other types in the caller's thread, not in the recorder's thread.
                keys = [key if type(key) is bytes else None for key in keys]
                found = type(error)
                raise
            finally:
                queue.is_inside = False
                positions = getattr(context, "positions", None)
                num_positions = len(positions) if positions else 0
                queue.put((num_units, op, queue.clock(), context, positions, num_positions, keys, flag, found))
        finally:
            lock.release()

    # ---- one recording function per call signature -------------------------------------------------------------

    def _of_keys(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        make = self._make

        def recorded(keys: Any, req_context: Any = None) -> Any:
            # Copy the keys: the caller may change its list before the recorder's thread has read it.
            keys = keys.copy() if type(keys) is list else as_key_list(keys)
            return make(op, req_context, keys, 0, method, keys, req_context)

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

        # Engines look up key by key: the thread joins these short records into runs.
        def status(key: Any, req_context: Any = None) -> Any:
            if type(key) is not bytes or not key or queue.room < 1:
                return slow(key)
            lock = queue.lock
            lock.acquire()
            try:
                answer = method(key)
                if not queue.is_inside:
                    queue.room -= 1
                    queue.records.append((1, Op.STATUS_RUN, key, answer))
                return answer
            finally:
                lock.release()

        return status

    def _complete_store(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def complete_store(keys: Any, req_context: Any = None, success: Any = True) -> None:
            if req_context is True or req_context is False:
                success, req_context = req_context, None
            keys = keys.copy() if type(keys) is list else as_key_list(keys)
            self._make(
                Op.COMPLETE_STORE, req_context, keys, int(success is not True and not success),
                method, keys, req_context, success,
            )  # fmt: skip

        return complete_store

    def _on_request_finished(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def on_request_finished(req_context: Any, **options: Any) -> None:
            flag = int(bool(options.get("use_positions")))
            self._make(Op.REQUEST_FINISHED, req_context, (), flag, partial(method, **options), req_context)

        return on_request_finished

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
            flag = {"parts": numbers, "seconds": float(seconds)}
            self._make(Op.REPORT_PREFILLS, None, (), flag, method, parts, seconds)

        return report_prefills

    def _take_events(self, method: Callable[..., Any]) -> Callable[..., Any]:
        queue = self._queue

        def take_events(max_events: int | None = None) -> Any:
            with queue.lock:
                events = list(method() if max_events is None else method(max_events))
                if events and not queue.is_inside:
                    flag = 0 if max_events is None else min(max_events, _MAX_NUMBER) + 1
                    named = [(event.keys, bool(event.removed)) for event in events]
                    num_units = _RECORD_UNITS + sum(len(keys) for keys, _ in named)
                    queue.put((num_units, Op.TAKE_EVENTS, queue.clock(), None, None, 0, (), flag, named))
            return iter(events)

        return take_events
