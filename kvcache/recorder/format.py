"""The file format of recordings: records, frames of them, and their reader.

A file begins with `MAGIC` and a version (4 bytes). Then come frames: a length (4 bytes) and a gzip stream. The first
frame is JSON about the manager. The others are MessagePack: the number of the first record, and an array of records. A
request is 0 (none), 1 (not a `ReqContext`) or its number from 2 on; keys are one string of their hashes.

A reader checks every length and type before it uses them. A truncated, damaged or hostile file raises
`RecordingError`, or is read up to the damage. Equal records compress a thousandfold, so a reader limits the expanded
size by the file's size, unless its user trusts the file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import numpy as np

from kvcache.core.index import key_hashes
from kvcache.keys import GROUP_PART
from kvcache.recorder.files import MAGIC, VERSION, frame_bytes, older_file
from kvcache.recorder.ops import BAD_CONTEXT, FIRST_CONTEXT, NO_CONTEXT, ONE_KEY, Op
from kvcache.request import ReqContext, Retention, parse_hint
from kvcache.specs import LoadStoreSpec

_LOG = logging.getLogger(__name__)
MAX_FRAME_BYTES = 1 << 25
_MAX_SHORT_BYTES = 1 << 20  # of a frame of several records: four times what writers put into one
_MAX_FRAME_RATIO = 4  # of a longer frame, whose one record holds mostly hashes
_FREE_MEMORY_BYTES, _MEMORY_RATIO = 1 << 26, 128
"""Memory that the calls of a recording may take: a fixed part, and bytes for each byte of the file (30 are usual)."""
_CALL_BYTES, _KEY_BYTES = 200, 100  # of memory, in a reader that keeps all calls as requests
_FREE_RAW_BYTES, _MAX_RATIO = 1 << 24, 64
_HEAD_BYTES = 16  # of a frame, before its records
_RAW_BYTES = 1 << 18  # of a written frame, unless one record is longer
_MARKS = {(0).to_bytes(8, "little"): b"", (1).to_bytes(8, "little"): None}
"""In place of a key's hash: the key was empty, or not bytes."""
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class RecordingError(ValueError):
    """A file is not a recording, or is damaged. The message describes the position."""


class CutHead(RecordingError):
    """A file is truncated in its header, because its process was killed or the disk was full."""


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


Answer = None | bool | int | str | list[int] | Raised | Stored | Events
"""The result of a call. A list: block ids. A text: the type of a result that cannot be compared."""


class Result(msgspec.Struct, array_like=True, frozen=True):
    """A `TierResult`, with its keys hashed."""

    job_id: _Natural | None
    done: Keys
    failed: Keys
    removed: Keys
    error: str
    start_s: float | None
    end_s: float | None


class Input(msgspec.Struct, array_like=True, frozen=True):
    """A value that a call depended on, besides its arguments: of the clock (`tier` is -1), or of a tier.

    `value` is seconds, the answer of a look-up, the id of an accepted job or None, results, or the name of a method
    that raised.
    """

    op: Op
    value: int | float | str | list[Result | None] | None
    tier: int


class Call(msgspec.Struct, array_like=True):
    """One record: a call with its result, or a note between two calls.

    `context` is the number of the request, 0 without one, and 1 for an object that is not a `ReqContext`. `keys` is
    one key for the calls of `ONE_KEY`, and pairs of keys and ends for positions. `flag` is another argument, such as 1
    for a failed `complete_store`, or the value of a note. `inputs` are what the call depended on, in order, and
    `number` is the position in the recording, from 0 on.
    """

    op: Op
    time_s: float
    context: _Natural
    if TYPE_CHECKING:  # they depend on the operation
        keys: Any
        flag: Any = None
    else:
        keys: Keys
        flag: int | str | list[int] | dict[str, Any] | None = None
    answer: Answer = None
    inputs: list[Input] = []
    number: int = 0


def _decode_keys(kind: type, value: Any) -> Keys:
    if kind is not Keys or type(value) is not bytes or len(value) % 8:
        raise ValueError("keys are expected")
    hashes = [value[i : i + 8] for i in range(0, len(value), 8)]
    return Keys([_MARKS.get(key, key) for key in hashes])


_DECODER = msgspec.msgpack.Decoder(tuple[_Natural, list[Call]], dec_hook=_decode_keys)
_LONG_DECODER = msgspec.msgpack.Decoder(tuple[_Natural, tuple[Call]], dec_hook=_decode_keys)
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
            if hint := _hint_of(context):
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
            case None | bool() | int():
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
    """Return the hint of a request's context, and that of its client. "?" means an invalid hint."""
    hint: dict[str, Any] = {}
    if isinstance(context.retention, Retention):
        hint["retention"] = asdict(context.retention)
    params = context.kv_transfer_params
    if isinstance(params, dict) and "kvcache" in params:
        try:
            hint["kvcache"] = asdict(parse_hint(params["kvcache"]))
        except ValueError:
            hint["kvcache"] = "?"
    return hint


def block_ids_of(spec: Any) -> list[int] | None:
    """Return the block ids of a spec, or None if it has no usable ids."""
    try:
        return np.asarray(spec.block_ids, np.int64).tolist()  # type: ignore[no-any-return]
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


class _Limits:
    """The memory and bytes to which files of `num_bytes` may still expand."""

    def __init__(self, num_bytes: int) -> None:
        self._memory_bytes = _FREE_MEMORY_BYTES + _MEMORY_RATIO * num_bytes
        self._raw_bytes = _FREE_RAW_BYTES + _MAX_RATIO * num_bytes

    def take(self, rows: Sequence[Call], num_bytes: int, path: Path) -> None:
        """Subtract the records of a frame of `num_bytes`; RecordingError if less is left."""
        num_calls = sum(len(row.keys) if row.op is Op.STATUS_RUN else 1 for row in rows)
        self._memory_bytes -= _CALL_BYTES * num_calls + _KEY_BYTES * sum(len(row.keys) for row in rows)
        self._raw_bytes -= num_bytes
        if self._memory_bytes < 0 or self._raw_bytes < 0:
            raise _expands(path)


def _expands(path: Path) -> RecordingError:
    return RecordingError(f"{path} expands to more than a file of its size should: --trusted lifts the limit")


def _frames(file: BinaryIO, path: Path, is_trusted: bool) -> Iterator[bytes]:
    """Yield the content of each frame. Raise EOFError if the file ends within one, and ValueError if one is damaged."""
    while head := file.read(4):
        num_bytes = int.from_bytes(head, "little")
        packed = file.read(num_bytes)
        if len(head) < 4 or len(packed) < num_bytes:
            raise EOFError
        limit = min(MAX_FRAME_BYTES, _MAX_SHORT_BYTES + _MAX_FRAME_RATIO * num_bytes)
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            raw = unpacker.decompress(packed, MAX_FRAME_BYTES if is_trusted else limit)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if not unpacker.eof and len(raw) == limit < MAX_FRAME_BYTES:
            raise _expands(path)
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError(f"this is no frame of at most {MAX_FRAME_BYTES} bytes")
        yield raw


def _read_header(file: BinaryIO, path: Path, is_trusted: bool) -> tuple[dict[str, Any], Iterator[bytes]]:
    """Return the header of a file and its other frames."""
    head = file.read(len(MAGIC) + 4)
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise RecordingError(f"{path} is no recording of kvcache")
    version = int.from_bytes(head[len(MAGIC) :], "little")
    if len(head) == len(MAGIC) + 4 and version != VERSION:
        raise RecordingError(f"{path} is a recording of format {version}, this kvcache reads format {VERSION}")
    frames = _frames(file, path, is_trusted)
    try:
        header = msgspec.json.decode(next(frames))
    except (EOFError, StopIteration):
        raise CutHead(f"{path} is no recording of kvcache, or was cut in its header") from None
    except RecordingError:
        raise
    except (ValueError, RecursionError):
        raise RecordingError(f"{path}: the header is damaged") from None
    if not isinstance(header, dict) or not isinstance(header.get("manager"), dict):
        raise RecordingError(f"{path}: the header has no configuration")
    if type(header.setdefault("segment", 0)) is not int:
        raise RecordingError(f"{path}: the segment must be an int, got {header['segment']!r:.40}")
    return header, frames


class Recording:
    """A recording, file after file; RecordingError if the newest file, `path`, is not one.

    If ``path.1`` belongs to the same recording, it is read before. If a kill between the two files left the newest one
    missing or truncated in its header, only ``path.1`` is read. `header` is that of the oldest file, and `is_whole`
    is whether this file is the first of the recording. `end` describes why reading stopped early (or ""), and
    `num_lost` is the number of records that were not written, according to the part that was read.

    A file that expands to far more memory or bytes than its size suggests raises RecordingError, unless `is_trusted`:
    a recording of nothing but look-ups of one key may be such a file, too.
    """

    def __init__(self, path: str | os.PathLike[str], is_trusted: bool = False) -> None:
        self.path = Path(path)
        self._is_trusted = is_trusted
        self._cut = ""
        older = older_file(self.path)
        try:
            self.header = _header_of(self.path, is_trusted)
            self._files = [self.path]
        except (CutHead, FileNotFoundError) as error:
            if not older.is_file():
                raise
            self._cut = str(error) if isinstance(error, CutHead) else f"{self.path} is missing"
            self.header = _header_of(older, is_trusted)
            self._files = [older]
        if self.header["segment"] and not self._cut:
            with contextlib.suppress(RecordingError, OSError):
                before = _header_of(older, is_trusted)
                if (before.get("id"), before["segment"] + 1) == (self.header.get("id"), self.header["segment"]):
                    self._files.insert(0, older)
                    self.header = before
        self.is_whole = self.header["segment"] == 0
        self.end = ""
        self.num_lost = 0

    def __iter__(self) -> Iterator[Call]:
        """Yield calls with their inputs, and the notes between them, up to the end or to the damage."""
        self.end = ""
        self.num_lost = 0
        number: int | None = None
        limits = None if self._is_trusted else _Limits(sum(map(_size_of, self._files)))
        for path in self._files:
            with path.open("rb") as file:
                _, frames = _read_header(file, path, self._is_trusted)
                try:
                    for raw in frames:
                        first_record, rows = self._decode(raw, path)
                        if number not in (None, first_record):
                            self.end = f"{path}: records {number} to {first_record - 1} are missing"
                            return
                        number = first_record
                        if limits is not None:
                            limits.take(rows, len(raw), path)
                        for record in _expanded(rows):
                            record.number = number
                            if record.op is Op.LOST:
                                self.num_lost += record.flag
                            yield record
                            number += 1
                except RecordingError:
                    raise  # the file is not damaged, but expands beyond its limits
                except EOFError:
                    self.end = f"{path} is cut at byte {file.tell()}"
                    return
                except (ValueError, RecursionError) as error:
                    self.end = f"{path} is damaged before byte {file.tell()}: {error}"
                    return
        self.end = self._cut

    def _decode(self, raw: bytes, path: Path) -> tuple[int, Sequence[Call]]:
        """Return the number of a frame's first record, and its records, of which a long frame has only one."""
        if len(raw) <= _MAX_SHORT_BYTES or self._is_trusted:
            return _DECODER.decode(raw)
        try:
            return _LONG_DECODER.decode(raw)
        except msgspec.ValidationError as error:
            if "length 1" in str(error):
                raise _expands(path) from None
            raise


def _size_of(path: Path) -> int:
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _expanded(rows: Sequence[Call]) -> Iterator[Call]:
    """Yield the records of a frame, with each run of look-ups as single calls."""
    time_s = 0.0
    for record in rows:
        if record.op is Op.STATUS_RUN:
            for key in record.keys:
                yield Call(Op.STATUS, time_s, NO_CONTEXT, key, None, record.answer)
        else:
            time_s = record.time_s or time_s
            yield _checked(record)


def _checked(record: Any) -> Call:
    """Return a record with its keys in the form that its operation has."""
    if record.op in ONE_KEY:
        (record.keys,) = record.keys
    elif record.op is Op.POSITIONS and type(record.flag) is list:
        record.flag, *ends = record.flag
        record.keys = list(zip(record.keys, ends, strict=True))
    elif record.op is Op.POSITIONS or (record.op is Op.LOST and type(record.flag) is not int):
        raise ValueError(f"{record.op.name} has the value {record.flag!r:.40}")
    return record  # type: ignore[no-any-return]


def _header_of(path: Path, is_trusted: bool) -> dict[str, Any]:
    with path.open("rb") as file:
        return _read_header(file, path, is_trusted)[0]
