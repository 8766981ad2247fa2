"""The file format of recordings: records, and frames of them. `kvcache.lab.traces.recording` reads them.

A file begins with `MAGIC` and a version (4 bytes). Then come frames: a length (4 bytes) and a gzip stream. The first
frame is JSON about the manager. The others are MessagePack: the number of the first record, and an array of records. A
request is 0 (none), 1 (not a `ReqContext`) or its number from 2 on; keys are one string of their hashes.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from kvcache.core.index import key_hashes
from kvcache.hints import actions_of, own_use
from kvcache.keys import GROUP_PART
from kvcache.recorder.files import frame_bytes
from kvcache.recorder.ops import BAD_CONTEXT, FIRST_CONTEXT, NO_CONTEXT, Op
from kvcache.request import ReqContext
from kvcache.specs import LoadStoreSpec

_LOG = logging.getLogger(__name__)
_HEAD_BYTES = 16  # of a frame, before its records
_RAW_BYTES = 1 << 18  # of a written frame, unless one record is longer


class Keys(list[bytes | None]):
    """Hashes of keys, 8 bytes each; None for an object that is not a key. In files, one string of bytes."""


class Raised(msgspec.Struct, tag=True, frozen=True):
    """The call raised an error of this name."""

    name: str


class Stored(msgspec.Struct, tag=True, frozen=True):
    """The result of `prepare_store`."""

    keys: Keys
    num_evicted: int
    block_ids: list[int]


class Events(msgspec.Struct, tag=True, frozen=True):
    """The result of `take_events`: keys, and whether they were removed."""

    events: list[tuple[Keys, bool]]


_ENCODER = msgspec.msgpack.Encoder()


class FrameEncoder:
    """Encodes records from a `CallQueue` as frames. Each frame can be read on its own.

    A frame has at most `max_bytes`. `salt` has 32 bytes. With `has_groups`, the KV-cache group of each positioned key
    is recorded: an arbiter needs it.
    """

    def __init__(self, salt: bytes, max_bytes: int, has_groups: bool = False) -> None:
        self._salt = salt
        self._max_bytes = max_bytes
        # gzip adds less than 1 % to random bytes.
        self._max_raw_bytes = min(_RAW_BYTES, max_bytes - max_bytes // 100 - 64)
        self._has_groups = has_groups
        self._number = self.num_lost = 0
        self._num_requests = FIRST_CONTEXT
        # The number of each request, and its positions that were encoded so far.
        self._requests: weakref.WeakKeyDictionary[ReqContext, tuple[int, Any, int]] = weakref.WeakKeyDictionary()
        # Open requests, and those from before the last reset, of which a manager stores nothing more.
        self._open: weakref.WeakSet[ReqContext] = weakref.WeakSet()
        self._old: weakref.WeakSet[ReqContext] = weakref.WeakSet()

    def frames(self, records: deque[Any]) -> Iterator[tuple[bytes, int]]:
        """Take all records out. Yield frames, each with the number of calls in it, and count lost calls."""
        self._rows: list[tuple[bytes, int]] = []
        while records:
            op, *values = records.popleft()
            try:
                if op is Op.STATUS_RUN:
                    keys, answer = values
                    self._add(op, 0.0, NO_CONTEXT, self._hash(keys), None, answer, num_calls=len(keys))
                elif op in (Op.LOST, Op.STATS):
                    self._add(op, 0.0, NO_CONTEXT, b"", *values)
                else:
                    self._call(op, *values)
            except Exception:
                _LOG.debug("a record of %s could not be encoded", op.name, exc_info=True)
                self._lose(1)
        return self._frames(self._rows)

    def _frames(self, rows: list[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
        if len(rows) > 1 and _HEAD_BYTES + sum(len(row) for row, _ in rows) > self._max_raw_bytes:
            middle = len(rows) // 2
            yield from self._frames(rows[:middle])
            yield from self._frames(rows[middle:])
            return
        frame = frame_bytes(_ENCODER.encode((self._number, [msgspec.Raw(row) for row, _ in rows])))
        num_calls = sum(number for _, number in rows)
        if len(frame) > self._max_bytes:  # this is one record
            self._rows = []
            self._lose(max(1, num_calls))
            yield from self._frames(self._rows)
        elif rows:
            # A run has the number of its first call.
            self._number += sum(max(1, number) for _, number in rows)
            yield frame, num_calls

    def _add(self, *row: Any, num_calls: int = 1) -> None:
        self._rows.append((_ENCODER.encode(row), num_calls))

    def _lose(self, num_calls: int) -> None:
        self.num_lost += num_calls
        self._note(Op.LOST, NO_CONTEXT, b"", num_calls)

    def _note(self, op: Op, context: int, keys: bytes, value: Any) -> None:
        self._add(op, 0.0, context, keys, value, num_calls=0)

    def _hash(self, keys: Any) -> Any:
        return key_hashes(list(keys), self._salt)

    def _call(
        self, op: Op, time_s: float, context: Any, keys: Any, flag: Any, answer: Any, inputs: Any, positions: Any
    ) -> None:
        number = NO_CONTEXT if context is None else self._number_of(context, *(positions or (None, 0)))
        if op is Op.RESET_CACHE:
            # A reader that starts at this frame has no earlier requests.
            self._requests.clear()
            self._old = self._open.copy()
        elif op is Op.ON_REQUEST_FINISHED and number != BAD_CONTEXT:
            self._open.discard(context)
            self._old.discard(context)
        elif number >= FIRST_CONTEXT:
            self._open.add(context)
        rows = [(op, self._results(value) if op is Op.TIER_FINISHED else value, tier) for op, value, tier in inputs]
        self._add(op, time_s, number, self._hash(keys), flag, self._answer(answer), rows)

    def _results(self, results: Any) -> list[Any]:
        return [result and [result[0], *map(self._hash, result[1:4]), *result[4:]] for result in results]

    def _number_of(self, context: Any, positions: Any, num_positions: int) -> int:
        """Return a request's number. Add its hint if it is new, and the positions added since the last record."""
        if not isinstance(context, ReqContext):
            return BAD_CONTEXT
        number, known, num_known = self._requests.get(context, (self._num_requests, None, 0))
        if number == self._num_requests:
            self._num_requests += 1
            self._requests[context] = number, known, num_known
            if hint := _hint_of(context) | ({"predates_reset": True} if context in self._old else {}):
                self._note(Op.CONTEXT, number, b"", hint)
        if num_positions and (positions is not known or num_positions != num_known):
            first = num_known if positions is known else 0
            keys = list(islice(positions, first, num_positions))
            ends = [end if type(end) is int else 0 for end in islice(positions.values(), first, num_positions)]
            self._note(Op.POSITIONS, number, self._hash(keys), [first, *ends])
            if self._has_groups:
                groups = [key[GROUP_PART] if type(key) is bytes else b"" for key in keys]
                self._note(Op.GROUPS, number, self._hash(groups), None)
            self._requests[context] = number, positions, num_positions
        return number

    def _answer(self, answer: Any) -> Any:
        match answer:
            case None | bool() | int() | str():
                return answer
            case LoadStoreSpec():
                ids = block_ids_of(answer)
                return type(answer).__name__ if ids is None else ids
            case type():
                return Raised(answer.__name__)
            case list():
                return Events([(self._hash(event.keys), bool(event.removed)) for event in answer])
            case keys, num_evicted, spec:
                return Stored(self._hash(keys), num_evicted, block_ids_of(spec) or [])
        return type(answer).__name__


def _hint_of(context: ReqContext) -> dict[str, Any]:
    """Return the hint of a request's context, and that of its client."""
    actions = actions_of(context)
    # Ignored fields are counted, so a rerun needs one, too.
    ignored = {"priority": None} if any(action.reason for action in actions) else {}
    return {"kvcache": {"next_use": own_use(actions), **ignored}} if actions else {}


def block_ids_of(spec: Any) -> list[int] | None:
    """Return the block ids of a spec, or None if it has no usable ids."""
    try:
        return np.asarray(spec.block_ids, np.int64).tolist()  # type: ignore[no-any-return]
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
