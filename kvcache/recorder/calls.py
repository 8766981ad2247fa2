"""RecordedCalls: make the calls of one manager under one lock, and queue a record of each for the recorder's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcache.keys import as_key_list
from kvcache.recorder.ops import LISTS, ONE_KEY, Op
from kvcache.request import ReqContext

_RECORD_UNITS = 16  # in units of 8 bytes: a record without its keys
_MAX_RUN = 512
_MAX_NUMBER = 1 << 62
_MAX_TEXT = 200


class CallQueue:
    """Records that wait for the recorder's thread.

    `clock` returns the timestamps of calls, in seconds. Half of `max_bytes` is for records that wait, half for records
    that are being written. `lock` is held during each recorded call, so that records are in the order of the calls.
    `is_inside` is whether the thread that holds the lock is inside a recorded call, which has read `inputs`. A record
    is a tuple: units of memory, `Op`, and values; see `kvcache.recorder.format.FrameEncoder`.
    """

    __slots__ = ("__weakref__", "_max_units", "clock", "inputs", "is_inside", "is_open", "lock", "num_lost",
                 "num_records", "records", "room")  # fmt: skip

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.is_open, self.is_inside = True, False
        self.num_lost = self.num_records = 0
        self.inputs: list[tuple[Op, Any, int, int]] = []
        self.records: deque[Any] = deque()
        self.room = self._max_units = max_bytes // 16

    def put(self, op: Op, context: Any, keys: Any, flag: Any, answer: Any, num_more_keys: int = 0) -> None:
        """Queue the record of a call if there is memory for it. The caller holds the lock."""
        num_units = _RECORD_UNITS + len(keys) + num_more_keys
        if inputs := self.inputs or ():
            num_units += sum(one[-1] for one in inputs)
            self.inputs = []
        room = self.room - num_units
        if room >= 0:
            self.room = room
            self.num_records += 1
            positions = context.positions if isinstance(context, ReqContext) else None
            num_positions = len(positions) if positions else 0
            self.records.append(
                (num_units, op, self.clock(), context, positions, num_positions, keys, flag, answer, inputs)
            )
        elif self.is_open:
            self.num_lost += 1
            if self.records and self.records[-1][1] is Op.LOST:
                self.records[-1][2] += 1
            else:
                self.put_note(Op.LOST, 1)

    def put_note(self, op: Op, value: Any) -> None:
        """Queue a note. The caller holds the lock."""
        if self.is_open:
            self.num_records += 1
            self.records.append([0, op, value])

    def put_status(self, key: bytes, answer: int) -> None:
        """Queue the record of a short call: a run of equal answers is one record. The caller holds the lock."""
        self.room -= 1
        self.num_records += 1
        last: Any = self.records[-1] if self.records else (0, Op.LOST)
        if last[1] is Op.STATUS_RUN and last[3] == answer and last[0] < _MAX_RUN:
            last[0] += 1
            last[2].append(key)
        else:
            self.records.append([1, Op.STATUS_RUN, [key], answer])

    def put_input(self, op: Op, value: Any, tier: int = -1, num_keys: int = 0) -> None:
        """Note an input of the recorded call in progress. Outside a recorded call, do nothing."""
        # This fails only while another thread is in a call, to which this input does not belong.
        if self.lock.acquire(blocking=False):
            if self.is_inside:
                self.inputs.append((op, value, tier, _RECORD_UNITS + num_keys))
            self.lock.release()

    def take(self) -> deque[Any]:
        """Take out all records."""
        with self.lock:
            taken, self.records = self.records, deque()
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
        op = Op[name.upper()]
        if op in ONE_KEY:
            return self._of_key(op, method)
        if op in LISTS:
            return self._of_keys(op, method)
        make = self._maker(op, method)
        return lambda *context: make(*(context or (None,)), (), 0, *context)

    def _maker(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a call's context, keys, flag and arguments that makes and records the call."""
        queue, is_store = self._queue, op is Op.PREPARE_STORE

        def make(context: Any, keys: Any, flag: Any, *args: Any) -> Any:
            lock = queue.lock
            lock.acquire()  # half the cost of `with`
            try:
                if queue.is_inside:
                    return method(*args)  # part of another call
                queue.is_inside = True
                try:
                    answer = method(*args)
                except BaseException as error:
                    # Release objects of other types in the caller's thread, not in the recorder's thread.
                    keys = [key if type(key) is bytes else None for key in keys]
                    queue.put(op, context, keys, flag, type(error))
                    raise
                finally:
                    queue.is_inside = False
                if is_store and answer is not None:
                    stored = answer.keys_to_store
                    found = stored.copy(), len(answer.evicted_keys), answer.store_spec
                    queue.put(op, context, keys, flag, found, 2 * len(stored))
                else:
                    queue.put(op, context, keys, flag, answer)
                return answer
            finally:
                lock.release()

        return make

    # ---- one recording function per call signature -------------------------------------------------------------

    def _of_keys(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        make = self._maker(op, method)

        def recorded(keys: Any, req_context: Any = None) -> Any:
            # Copy the keys: the caller may change its list before the recorder's thread has read it.
            keys = keys.copy() if type(keys) is list else as_key_list(keys)
            return make(req_context, keys, 0, keys, req_context)

        return recorded

    def _of_key(self, op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
        make = self._maker(op, method)

        def recorded(key: Any, req_context: Any = None) -> Any:
            args = (key,) if req_context is None else (key, req_context)
            return make(req_context, [key], 0, *args)

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

        # Engines look up key by key.
        def status(key: Any, req_context: Any = None) -> Any:
            if type(key) is not bytes or not key or queue.room < 1:
                return slow(key)
            lock = queue.lock
            lock.acquire()
            try:
                answer = method(key)
                if not queue.is_inside:
                    queue.put_status(key, answer)
                return answer
            finally:
                lock.release()

        return status

    def _complete_store(self, method: Callable[..., Any]) -> Callable[..., Any]:
        make = self._maker(Op.COMPLETE_STORE, method)

        def complete_store(keys: Any, req_context: Any = None, success: Any = True) -> None:
            if req_context is True or req_context is False:
                success, req_context = req_context, None
            keys = keys.copy() if type(keys) is list else as_key_list(keys)
            make(req_context, keys, int(not success), keys, req_context, success)

        return complete_store

    def _on_request_finished(self, method: Callable[..., Any]) -> Callable[..., Any]:
        make = self._maker(Op.ON_REQUEST_FINISHED, lambda req_context, options: method(req_context, **options))

        def on_request_finished(req_context: Any, **options: Any) -> None:
            make(req_context, (), int(bool(options.get("use_positions"))), req_context, options)

        return on_request_finished

    def _hint(self, method: Callable[..., Any]) -> Callable[..., Any]:
        make = self._maker(Op.HINT, method)

        def hint(request_or_keys: Any, next_use: Any) -> None:
            context = request_or_keys if isinstance(request_or_keys, ReqContext) else None
            keys = [] if context is not None else as_key_list(request_or_keys).copy()
            text = next_use[:_MAX_TEXT] if isinstance(next_use, str) else type(next_use).__name__
            make(context, keys, text, keys if context is None else context, next_use)

        return hint

    def _report_prefills(self, method: Callable[..., Any]) -> Callable[..., Any]:
        make = self._maker(Op.REPORT_PREFILLS, method)

        def report_prefills(parts: Any, seconds: float) -> None:
            parts = list(parts)
            numbers = [[max(0, min(int(number), _MAX_NUMBER)) for number in part] for part in parts]
            make(None, (), {"parts": numbers, "seconds": float(seconds)}, parts, seconds)

        return report_prefills

    def _take_events(self, method: Callable[..., Any]) -> Callable[..., Any]:
        queue = self._queue

        def take_events(max_events: int | None = None) -> Any:
            with queue.lock:
                events = list(method() if max_events is None else method(max_events))
                if events and not queue.is_inside:
                    flag = 0 if max_events is None else min(max_events, _MAX_NUMBER) + 1
                    named = [(event.keys, bool(event.removed)) for event in events]
                    queue.put(Op.TAKE_EVENTS, None, (), flag, named, sum(len(keys) for keys, _ in named))
            return iter(events)

        return take_events
