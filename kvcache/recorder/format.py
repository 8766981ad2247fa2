"""The file format of recordings: headers, frames of records, and their reader; see docs/howto/record.md.

A reader checks every length and type before it uses them. A truncated, damaged or hostile file raises
`RecordingError`, or is read up to the damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvcache.core.key_hash import key_hashes
from kvcache.recorder.ops import (
    BAD_CONTEXT,
    EMPTY_KEY,
    FIRST_CONTEXT,
    LISTS,
    NO_CONTEXT,
    NO_KEY,
    ONE_KEY,
    Answer,
    Op,
    TierCall,
)  # fmt: skip
from kvcache.request import ReqContext, Retention, parse_hint
from kvcache.specs import LoadStoreSpec

MAGIC = b"KVCLOG\r\n"
VERSION = 3
FRAME = struct.Struct("<4sIIQII")
"""Tag, packed bytes, raw bytes, number of the first record, bytes of JSON, CRC-32 of this and of the packed bytes."""
FRAME_TAG = b"FRAM"
MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 1 << 25
_MAX_FRAME_KEYS = 1 << 27
_HEADER = struct.Struct("<8sHHI")
_EMPTY, _NO_KEY = EMPTY_KEY.to_bytes(8, "little"), NO_KEY.to_bytes(8, "little")
_LEAST_SHARED = 3
_KEPT_LISTS = 2


class RecordingError(ValueError):
    """A file is not a recording, or is damaged. The message describes the position."""


class CutHead(RecordingError):
    """A file is truncated in its header, because its process was killed or the disk was full."""


@dataclass(slots=True)
class Input:
    """A value that a call depended on, besides its arguments: the clock, or an answer of a tier.

    Parameters
    ----------
    op : Op
        Its kind.
    value : object
        Seconds, or the call to the tier and its result.
    tier : int
        Index of the tier, from 0 on.
    """

    op: Op
    value: Any
    tier: int = -1


@dataclass(slots=True)
class Call:
    """One record: a call with its result, or a note between two calls.

    Parameters
    ----------
    number : int
        Position in the recording, from 0 on.
    op : Op
        The method.
    time_s : float
        Timestamp, in seconds of the clock passed to `Recorder`.
    context : int
        Number of the request. 0: no request. 1: an object that is not a `ReqContext`.
    keys : list of bytes or None
        Hashes of the keys, 8 bytes each. None for an object that is not a key.
    flag : int
        Another argument, such as `success`.
    answer : tuple
        The kind and values of the result.
    inputs : list of Input
        The values that the call depended on, in order.
    """

    number: int
    op: Op
    time_s: float = 0.0
    context: int = 0
    keys: Any = None
    flag: int = 0
    answer: tuple[Any, ...] = (Answer.NONE,)
    inputs: list[Input] = field(default_factory=list)


def header_bytes(header: dict[str, Any]) -> bytes:
    """Return the head of a file."""
    text = json.dumps(header, sort_keys=True).encode()
    head = _HEADER.pack(MAGIC, VERSION, 0, len(text)) + text
    return head + zlib.crc32(head).to_bytes(4, "little")


def frame_bytes(first_record: int, text: bytes, hashes: bytes) -> bytes:
    """Return a frame: records as JSON, and the hashes of their keys. Raise ValueError if it is too long."""
    if len(text) + len(hashes) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(text) + len(hashes)} bytes is longer than {MAX_FRAME_BYTES}")
    packed = zlib.compress(text + hashes, 1)
    head = FRAME.pack(FRAME_TAG, len(packed), len(text) + len(hashes), first_record, len(text), 0)
    return head[:-4] + zlib.crc32(packed, zlib.crc32(head[:-4])).to_bytes(4, "little") + packed


class FrameEncoder:
    """Encodes records from a `CallQueue` as frames. Each frame can be read on its own.

    Parameters
    ----------
    salt : bytes
        32 bytes, the salt of the keys' hashes.
    has_groups : bool
        Whether to record the KV-cache group of each positioned key, which an arbiter needs for decisions.
    """

    def __init__(self, salt: bytes, has_groups: bool = False) -> None:
        self._salt = salt
        self._has_groups = has_groups
        self._num_requests = FIRST_CONTEXT
        self._requests: weakref.WeakKeyDictionary[ReqContext, _Request] = weakref.WeakKeyDictionary()

    def encode(self, first_record: int, records: Sequence[tuple[Any, ...]]) -> tuple[bytes, int]:
        """Return a frame of records and the number of the next record."""
        self._lists: list[list[bytes]] = []
        # Numbers of the lists that each request named last. Most of its later calls name parts of them again.
        self._kept: dict[int, list[int]] = {}
        self._rows: list[list[Any]] = []
        number = first_record
        for _, op, *values in records:
            if op is Op.STATUS_RUN:
                keys, answer = values
                self._rows.append([op, self._keys(keys, 0), self._answer(answer, 0)])
                number += len(keys) - 1
            elif op < Op.CONTEXT:
                self._rows.append(self._call(op, *values))
            else:
                self._rows.append([op, *(self._finished(*values) if op is Op.TIER_FINISHED else values)])
        number += len(self._rows)
        text = json.dumps({"lists": [len(keys) for keys in self._lists], "rows": self._rows}, separators=(",", ":"))
        hashes = b"".join(key_hashes(keys, self._salt) for keys in self._lists)
        return frame_bytes(first_record, text.encode(), hashes), number

    def _keys(self, keys: list[bytes], context: int) -> Any:
        """Return a reference to keys: the number of a list, or [number, first, stop] of a part of an earlier one."""
        n = len(keys)
        kept = self._kept.setdefault(context, []) if n >= _LEAST_SHARED else []
        for number in reversed(kept):
            whole = self._lists[number]
            if keys[0] in whole:
                first = whole.index(keys[0])
                if whole[first : first + n] == keys:
                    return [number, first, first + n]
        self._lists.append(keys)
        kept.append(len(self._lists) - 1)
        del kept[:-_KEPT_LISTS]
        return len(self._lists) - 1

    def _call(
        self, op: Op, time_s: float, context: Any, positions: Any, num_positions: int, keys: Any, flag: Any, answer: Any
    ) -> list[Any]:
        number = NO_CONTEXT if context is None else self._number_of(context, positions, num_positions)
        if op is Op.RESET:
            # A reader that starts at this frame has no earlier requests.
            self._requests.clear()
        elif type(keys) is list and op is not Op.REPORT_PREFILLS:
            keys = self._keys(keys, number)
        return [op, int(time_s * 1e6), number, keys, flag, self._answer(answer, number)]

    def _number_of(self, context: Any, positions: Any, num_positions: int) -> int:
        """Return a request's number. Add its hint if it is new, and the positions added since the last record."""
        if not isinstance(context, ReqContext):
            return BAD_CONTEXT
        known = self._requests.get(context)
        if known is None:
            known = self._requests[context] = _Request(self._num_requests)
            self._num_requests += 1
            if said := _hint_of(context):
                self._rows.append([Op.CONTEXT, known.number, said])
        if num_positions and (positions is not known.positions or num_positions != known.num_positions):
            first = known.num_positions if positions is known.positions else 0
            keys = list(islice(positions, first, num_positions))
            ends = [end if type(end) is int else 0 for end in islice(positions.values(), first, num_positions)]
            groups = None
            if self._has_groups:
                hashes = key_hashes([key[-4:] if type(key) is bytes else b"" for key in keys], self._salt)
                groups = [int.from_bytes(hashes[i : i + 2], "little") for i in range(0, len(hashes), 8)]
            row = [Op.POSITIONS, known.number, self._keys(keys, known.number), ends, int(first > 0), groups]
            self._rows.append(row)
            known.positions, known.num_positions = positions, num_positions
        return known.number

    def _answer(self, answer: Any, context: int) -> list[Any]:
        match answer:
            case None:
                return [Answer.NONE]
            case True | False:
                return [Answer.TRUE if answer else Answer.FALSE]
            case int() if answer >= 0:
                return [Answer.INT, int(answer)]
            case LoadStoreSpec():
                ids = block_ids_of(answer)
                return [Answer.OTHER] if ids is None else [Answer.BLOCKS, ids]
            case "output", keys, num_evicted, spec:
                return [Answer.OUTPUT, self._keys(keys, context), num_evicted, block_ids_of(spec) or []]
            case "error", name:
                return [Answer.ERROR, name]
            case "events", events:
                hashed = [(key_hashes(keys, self._salt), is_removed) for keys, is_removed in events]
                return [Answer.EVENTS, *events_digest(hashed)]
        return [Answer.OTHER]

    def _finished(self, tier: int, results: list[Any]) -> tuple[int, list[Any]]:
        return tier, [one and [one[0], *(self._keys(keys, 0) for keys in one[1:4]), one[4]] for one in results]


class _Request:
    """A request's number, and its positions that were encoded so far."""

    __slots__ = ("num_positions", "number", "positions")

    def __init__(self, number: int) -> None:
        self.number = number
        self.positions: Any = None
        self.num_positions = 0


def _hint_of(context: ReqContext) -> dict[str, Any]:
    """Return the hint of a request's context, and that of its client. "?" means an invalid hint."""
    said: dict[str, Any] = {}
    if isinstance(context.retention, Retention):
        said["retention"] = asdict(context.retention)
    params = context.kv_transfer_params
    if isinstance(params, dict) and "kvcache" in params:
        try:
            said["kvcache"] = asdict(parse_hint(params["kvcache"]))
        except ValueError:
            said["kvcache"] = "?"
    return said


def block_ids_of(spec: Any) -> list[int] | None:
    """Return the block ids of a spec, or None if it has no usable ids."""
    try:
        return np.asarray(spec.block_ids, np.int64).tolist()  # type: ignore[no-any-return]
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def events_digest(events: Sequence[tuple[bytes, bool]]) -> tuple[int, int, str]:
    """Return the number of events, the number of their keys, and a digest of the keys' hashes and the removed flags."""
    digest = hashlib.blake2b(digest_size=8)
    for hashes, is_removed in events:
        digest.update(len(hashes).to_bytes(8, "little") + bytes([bool(is_removed)]) + hashes)
    return len(events), sum(len(hashes) for hashes, _ in events) // 8, digest.hexdigest()


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins with the magic bytes of recordings."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(file: BinaryIO, name: str) -> dict[str, Any]:
    """Read the head of a file.

    Raises
    ------
    RecordingError
        The file is not a recording, has another version, or is damaged.
    """
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size and MAGIC.startswith(head[: len(MAGIC)]):
        raise CutHead(f"{name} is no recording of kvcache, or was cut at its begin: it has {len(head)} bytes")
    if not head.startswith(MAGIC):
        raise RecordingError(f"{name} is no recording of kvcache")
    _, version, _, num_bytes = _HEADER.unpack(head)
    if version != VERSION:
        raise RecordingError(f"{name} is a recording of format {version}, this kvcache reads format {VERSION}")
    if num_bytes > MAX_HEADER_BYTES:
        raise RecordingError(f"{name}: the header is damaged: it claims {num_bytes} bytes")
    text = file.read(num_bytes)
    checksum = file.read(4)
    if len(checksum) < 4:
        raise CutHead(f"{name}: the header is cut")
    if zlib.crc32(head + text).to_bytes(4, "little") != checksum:
        raise RecordingError(f"{name}: the header is damaged")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise RecordingError(f"{name}: the header is damaged") from None
    if not isinstance(header, dict) or not isinstance(header.get("manager"), dict):
        raise RecordingError(f"{name}: the header has no configuration")
    return header


class Recording:
    """A recording, file after file.

    Parameters
    ----------
    path : path-like
        The newest file. The older files of the same recording, ``path.1`` and so on, are read before it. If a kill
        during rotation left the newest file missing or truncated in its header, only the older ones are read.

    Attributes
    ----------
    header : dict
        The header of the oldest file.
    is_whole : bool
        Whether the oldest file is the first of the recording.
    end : str
        Why reading stopped early; "" if it did not.
    num_lost : int
        Number of records that were not written, according to the part that was read.

    Raises
    ------
    RecordingError
        The newest file is not a recording, or its head is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        files = [self.path, *older_files(self.path)]
        self._cut = ""
        try:
            newest = _header_of(self.path)
        except (CutHead, FileNotFoundError) as error:
            if len(files) == 1:
                raise
            self._cut = str(error) if isinstance(error, CutHead) else f"{self.path} is missing"
            del files[0]
            newest = _header_of(files[0])
        self._files = files[:1]
        self.header = newest
        number = _segment(newest)
        for older in files[1:]:
            try:
                header = _header_of(older)
            except RecordingError:
                break
            if header.get("id") != newest.get("id") or _segment(header) != number - 1:
                break
            number -= 1
            self._files.insert(0, older)
            self.header = header
        self.is_whole = number == 0
        self.end = ""
        self.num_lost = 0

    def __iter__(self) -> Iterator[Call]:
        """Yield calls with their inputs, and the notes between them, up to the end or to the damage."""
        self.end = ""
        self.num_lost = 0
        inputs: list[Input] = []
        expected: int | None = None
        for path in self._files:
            with path.open("rb") as file:
                read_header(file, str(path))
                for first_record, raw, num_text in self._frames(file, path):
                    if expected is not None and first_record != expected:
                        self.end = f"{path}: records {expected} to {first_record - 1} are missing"
                        return
                    number = first_record
                    try:
                        for record in _Frame(raw, num_text).records(first_record):
                            number += not isinstance(record, Call) or record.op is not Op.GROUPS
                            if isinstance(record, Input):
                                inputs.append(record)
                                continue
                            if record.op is Op.LOST:
                                self.num_lost += record.flag
                            if record.op < Op.CONTEXT:
                                record.inputs, inputs = inputs, []
                            yield record
                    except _DAMAGES as error:
                        self.end = f"{path}: record {number} is damaged: {error}"
                        return
                    expected = number
                if self.end:
                    return
        self.end = self._cut

    def _frames(self, file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes, int]]:
        while head := file.read(FRAME.size):
            at = file.tell() - len(head)
            if len(head) < FRAME.size:
                self.end = f"{path} is cut at byte {at}"
                return
            tag, num_packed, num_raw, first_record, num_text, checksum = FRAME.unpack(head)
            if tag != FRAME_TAG or max(num_packed, num_raw) > MAX_FRAME_BYTES or num_text > num_raw:
                self.end = f"{path} is damaged at byte {at}"
                return
            packed = file.read(num_packed)
            if len(packed) < num_packed:
                self.end = f"{path} is cut at byte {at}"
                return
            if zlib.crc32(packed, zlib.crc32(head[:-4])) != checksum:
                self.end = f"{path} is damaged at byte {at}: the checksum is wrong"
                return
            try:
                unpacker = zlib.decompressobj()
                raw = unpacker.decompress(packed, num_raw + 1)
            except zlib.error as error:
                self.end = f"{path} is damaged at byte {at}: {error}"
                return
            if len(raw) != num_raw or not unpacker.eof:
                self.end = f"{path} is damaged at byte {at}: a frame does not have {num_raw} bytes"
                return
            yield first_record, raw, num_text


def older_files(path: Path) -> Iterator[Path]:
    """Yield the older files of a recording to `path`, newest first."""
    number = 1
    while (older := path.with_name(f"{path.name}.{number}")).is_file():
        yield older
        number += 1


def _header_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return read_header(file, str(path))


def _segment(header: dict[str, Any]) -> int:
    number = header.get("segment", 0)
    return number if type(number) is int else 0


class _Frame:
    """The records of one frame. If they are damaged, raises an error of `_DAMAGES`."""

    def __init__(self, raw: bytes, num_text: int) -> None:
        document = json.loads(raw[:num_text])
        self._rows = _typed(document["rows"], list)
        self._lists: list[list[bytes | None]] = []
        self._num_keys = 0
        at = num_text
        for size in document["lists"]:
            stop = at + 8 * _number(size)
            if stop > len(raw):
                raise ValueError("the keys are cut")
            self._lists.append([_key(raw[i : i + 8]) for i in range(at, stop, 8)])
            at = stop
        if at != len(raw):
            raise ValueError("there are more keys than lists")

    def records(self, number: int) -> Iterator[Call | Input]:
        """Yield the records, numbered from `number` on."""
        time_s = 0.0
        for op, *values in self._rows:
            op = Op(op)
            if op is Op.STATUS_RUN:
                reference, answer = values
                found = self._answer(answer)
                for key in self._keys(reference):
                    yield Call(number, Op.STATUS, time_s, 0, key, answer=found)
                    number += 1
                continue
            if op < Op.CONTEXT:
                call = self._call(number, op, *values)
                time_s = call.time_s
                yield call
            elif op in _NOTES:
                yield from self._note(number, op, *values)
            else:
                yield self._input(op, *values)
            number += 1

    def _keys(self, reference: Any) -> list[bytes | None]:
        if type(reference) is int:
            keys = self._lists[_number(reference)]
        else:
            number, first, stop = map(_number, reference)
            if stop > len(self._lists[number]):
                raise ValueError("keys are named that are not there")
            keys = self._lists[number][first:stop]
        self._num_keys += len(keys)
        if self._num_keys > _MAX_FRAME_KEYS:
            raise ValueError("a frame names too many keys")
        return keys

    def _call(self, number: int, op: Op, time_us: Any, context: Any, keys: Any, flag: Any, answer: Any) -> Call:
        call = Call(number, op, _number(time_us) * 1e-6, _number(context), answer=self._answer(answer))
        if op is Op.REPORT_PREFILLS:
            call.keys = [(_number(first), _number(count)) for first, count in keys], float(flag)
        elif op is Op.HINT:
            call.keys = self._keys(keys), _typed(flag, str)
        else:
            call.flag = _number(flag)
            if op in ONE_KEY:
                (call.keys,) = self._keys(keys)
            elif op in LISTS:
                call.keys = self._keys(keys)
        return call

    def _answer(self, row: list[Any]) -> tuple[Any, ...]:
        match row:
            case [Answer.NONE | Answer.FALSE | Answer.TRUE | Answer.OTHER as kind]:
                return (Answer(kind),)
            case [Answer.INT, int(number)]:
                return Answer.INT, number
            case [Answer.BLOCKS, list(ids)]:
                return Answer.BLOCKS, [_number(one) for one in ids]
            case [Answer.OUTPUT, keys, int(num_evicted), list(ids)]:
                return Answer.OUTPUT, self._keys(keys), num_evicted, [_number(one) for one in ids]
            case [Answer.ERROR, str(name)]:
                return Answer.ERROR, name
            case [Answer.EVENTS, int(num_events), int(num_keys), str(digest)]:
                return Answer.EVENTS, num_events, num_keys, digest
        raise ValueError(f"an answer of kind {row[:1]!s:.20}")

    def _note(self, number: int, op: Op, *values: Any) -> Iterator[Call]:
        if op is Op.LOST:
            (lost,) = values
            yield Call(number, op, flag=_number(lost))
        elif op is Op.STATS:
            (stats,) = values
            yield Call(number, op, keys=_typed(stats, dict))
        elif op is Op.CONTEXT:
            context, said = values
            yield Call(number, op, context=_request(context), keys=_typed(said, dict))
        else:
            context, reference, ends, adds, groups = values
            keys = self._keys(reference)
            pairs = [(key, _typed(end, int)) for key, end in zip(keys, ends, strict=True)]
            yield Call(number, op, context=_request(context), keys=pairs, flag=_number(adds))
            if groups is not None:
                hashed = [_number(group).to_bytes(2, "little") for group in groups]
                yield Call(number, Op.GROUPS, context=_request(context), keys=hashed)

    def _input(self, op: Op, *values: Any) -> Input:
        if op is Op.CLOCK:
            (seconds,) = values
            return Input(op, float(seconds))
        tier, value = values
        if op is Op.TIER_LOOKUP:
            num_keys, answer = value
            value = _number(num_keys), None if answer is None else _typed(answer, int)
        elif op is Op.TIER_SUBMIT:
            job_id, is_taken = value
            value = _number(job_id), bool(is_taken)
        elif op is Op.TIER_RAISED:
            value = TierCall(value)
        elif op is Op.TIER_TIMES:
            value = [None if one is None else (float(one[0]), float(one[1])) for one in value]
        else:
            value = [None if one is None else self._result(*one) for one in value]
        return Input(op, value, _number(tier))

    def _result(self, job_id: Any, done: Any, failed: Any, removed: Any, error: Any) -> tuple[Any, ...]:
        lists = [self._keys(keys) for keys in (done, failed, removed)]
        return None if job_id is None else _number(job_id), *lists, _typed(error, str)


_DAMAGES = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)
_NOTES = frozenset({Op.CONTEXT, Op.POSITIONS, Op.LOST, Op.STATS})


def _key(hashed: bytes) -> bytes | None:
    return b"" if hashed == _EMPTY else None if hashed == _NO_KEY else hashed


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__} is expected, got a {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"a number is expected, got {value!s:.20}")
    return value


def _request(value: Any) -> int:
    if _number(value) < FIRST_CONTEXT:
        raise ValueError(f"a request has number {value}")
    return int(value)
