"""The file format of recordings: headers, frames, and how records are read back; docs/howto/record.md describes it.

A reader takes nothing on trust: every length is checked against what is there before anything is made of it, so that a
cut, damaged or hostile file ends in `RecordingError`, or is read up to the cut.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvcache.recorder.ops import EMPTY_KEY, FIRST_CONTEXT, NO_KEY, Answer, Op, TierCall

MAGIC = b"KVCLOG\r\n"
VERSION = 2
READABLE_VERSIONS = (1, 2)  # 2 added STATUS_RUN and REFUSED
FRAME = struct.Struct("<4sIIQII")
"""Tag, packed bytes, raw bytes, number of the first record, bytes of records, checksum of this and of what follows."""
FRAME_TAG = b"FRAM"
MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 1 << 27
MAX_FRAME_KEYS = 1 << 30
LEAST_KEPT_KEYS = 3
UNIT_S = 1024e-9
_HEADER = struct.Struct("<8sHHI")
_KEY_BYTES = 8
_EMPTY, _NO_KEY = EMPTY_KEY.to_bytes(8, "little"), NO_KEY.to_bytes(8, "little")


class RecordingError(ValueError):
    """A file is no recording, or is damaged; the message says where."""


class CutHead(RecordingError):
    """A file ends in its head: whoever began it was killed, or the disk was full."""


@dataclass(slots=True)
class Input:
    """What a call depended on beside its arguments: the clock, or an answer of a tier.

    Parameters
    ----------
    op : Op
        What it was.
    value : object
        Seconds; or what the tier was asked and answered.
    tier : int
        Which tier, from 0 on.
    """

    op: Op
    value: Any
    tier: int = -1


@dataclass(slots=True)
class Call:
    """One record: a call with its answer, or what became known between two.

    Parameters
    ----------
    number : int
        Its place in the recording, from 0 on.
    op : Op
        Which method.
    time_s : float
        When, in seconds of the clock that `Recorder` was given.
    context : int
        Number of the request; 0 none, 1 something that was no request.
    keys : list of bytes or None
        What stands for the keys: 8 bytes each; None in place of what was no key.
    flag : int
        Another argument, such as `success`.
    answer : tuple
        Its kind and what belongs to it.
    inputs : list of Input
        What it depended on, in order.
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


def frame_bytes(first_record: int, counts: bytes, block_ids: bytes, records: Any) -> bytes:
    """Return a frame: the records of one chunk, and the block ids of their answers.

    Parameters
    ----------
    first_record : int
        Number of the chunk's first record.
    counts, block_ids : bytes
        Lengths of the lists of block ids that belong to the records, in order (uint32), and all their ids (int64).
    records : buffer
        The records.
    """
    ids = np.frombuffer(block_ids, np.int64)
    # Neighbouring ids are often neighbours in the pool.
    steps = np.diff(ids, prepend=0).astype("<i8")
    narrow = steps.astype("<i4")
    is_narrow = bool((narrow == steps).all())
    raw = b"".join(
        (
            bytes(records),
            (len(counts) // 4).to_bytes(4, "little"),
            np.frombuffer(counts, np.uint32).astype("<u4", copy=False).tobytes(),
            b"\x04" if is_narrow else b"\x08",
            (narrow if is_narrow else steps).tobytes(),
        )
    )
    packed = zlib.compress(raw, 1)
    head = FRAME.pack(FRAME_TAG, len(packed), len(raw), first_record, len(records), 0)
    return head[:-4] + zlib.crc32(packed, zlib.crc32(head[:-4])).to_bytes(4, "little") + packed


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as recordings do."""
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
        It is no recording, one of another version, or damaged.
    """
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size and MAGIC.startswith(head[: len(MAGIC)]):
        raise CutHead(f"{name} is no recording of kvcache, or was cut as it was begun: it has {len(head)} bytes")
    if not head.startswith(MAGIC):
        raise RecordingError(f"{name} is no recording of kvcache")
    _, version, _, num_bytes = _HEADER.unpack(head)
    if version not in READABLE_VERSIONS:
        raise RecordingError(f"{name} is a recording of format {version}, this kvcache reads formats 1 to {VERSION}")
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
        The newest file; older ones of the same recording, ``path.1`` and so on, are read before it. Where it ends in
        its head or is missing, since a kill fell between two files, those are read alone.

    Attributes
    ----------
    header : dict
        Of the oldest file.
    is_whole : bool
        Whether the oldest file is the recording's first.
    end : str
        Why reading ended before the end, once it has; "" if it did not.
    num_lost : int
        Records that were not written, as far as read.

    Raises
    ------
    RecordingError
        The newest file is no recording, or its head is damaged.
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
        """Yield calls with what they depended on, and notes between them, up to the end or to what is damaged."""
        self.end = ""
        self.num_lost = 0
        inputs: list[Input] = []
        expected: int | None = None
        for path in self._files:
            with path.open("rb") as file:
                read_header(file, str(path))
                for first_record, raw, num_bytes in self._frames(file, path):
                    if expected is not None and first_record != expected:
                        self.end = f"{path}: records {expected} to {first_record - 1} are missing"
                        return
                    number = first_record
                    try:
                        for record in _decode(raw, num_bytes, first_record):
                            number += 1
                            if isinstance(record, Input):
                                inputs.append(record)
                                continue
                            if record.op is Op.REFUSED:
                                inputs = []
                                continue
                            if record.op is Op.LOST:
                                self.num_lost += record.flag
                            if record.op < Op.CONTEXT:
                                record.inputs, inputs = inputs, []
                            yield record
                    except (_Damage, ValueError, RecursionError) as error:
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
            tag, num_packed, num_raw, first_record, num_records, checksum = FRAME.unpack(head)
            if tag != FRAME_TAG or max(num_packed, num_raw) > MAX_FRAME_BYTES or num_records > num_raw:
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
                self.end = f"{path} is damaged at byte {at}: a frame of {num_raw} bytes is none"
                return
            yield first_record, raw, num_records


def older_files(path: Path) -> Iterator[Path]:
    """Yield the files that a recording to `path` was rotated to, newest first, as far as there are any."""
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


class _Damage(Exception):
    pass


class _Reader:
    """Reads one chunk's records."""

    def __init__(self, raw: bytes, num_bytes: int) -> None:
        self.raw = raw
        self.at = 0
        self.end = num_bytes
        self.num_keys = 0
        self.lists: list[list[bytes | None]] = []
        self.ids = _block_ids(raw, num_bytes)

    def byte(self) -> int:
        if self.at >= self.end:
            raise _Damage("a record is cut")
        self.at += 1
        return self.raw[self.at - 1]

    def number(self) -> int:
        number = shift = 0
        raw, at, end = self.raw, self.at, self.end
        while True:
            if at >= end or shift > 63:
                raise _Damage("a number is cut")
            byte = raw[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                self.at = at
                return number
            shift += 7

    def take(self, num_bytes: int) -> bytes:
        at = self.at
        if num_bytes > self.end - at:
            raise _Damage("a record is cut")
        self.at = at + num_bytes
        return self.raw[at : self.at]

    def key(self) -> bytes | None:
        return _key(self.take(_KEY_BYTES))

    def keys(self) -> list[bytes | None]:
        number = self.number()
        count = number >> 1
        self.num_keys += count
        if self.num_keys > MAX_FRAME_KEYS:
            raise _Damage("a frame names too many keys")
        if number & 1:
            back, start = self.number(), self.number()
            if back >= len(self.lists) or start + count > len(self.lists[-1 - back]):
                raise _Damage("keys are named that were not there")
            return self.lists[-1 - back][start : start + count]
        keys = self.new_keys(count)
        if count >= LEAST_KEPT_KEYS:
            self.lists.append(keys)
        return keys

    def new_keys(self, count: int) -> list[bytes | None]:
        data = self.take(count * _KEY_BYTES)
        keys: list[bytes | None] = [data[i : i + _KEY_BYTES] for i in range(0, len(data), _KEY_BYTES)]
        return [_key(key) for key in keys if key is not None] if _EMPTY in keys or _NO_KEY in keys else keys

    def run(self) -> Iterator[tuple[bytes | None, tuple[Any, ...]]]:
        """Yield key and answer of look-ups one by one."""
        count = int.from_bytes(self.take(4), "little")
        answer = Answer.INT, self.byte()
        self.lists.append(self.new_keys(count))
        return ((key, answer) for key in self.lists[-1])

    def seconds(self) -> float:
        seconds: float = struct.unpack("<d", self.take(8))[0]
        return seconds

    def text(self) -> str:
        return self.take(self.number()).decode(errors="replace")

    def answer(self) -> tuple[Any, ...]:
        kind = Answer(self.byte())
        if kind is Answer.INT:
            return kind, self.number()
        if kind is Answer.BLOCKS:
            return kind, self.next_ids()
        if kind is Answer.OUTPUT:
            return kind, self.keys(), self.number(), self.next_ids()
        if kind is Answer.ERROR:
            return kind, self.text()
        if kind is Answer.EVENTS:
            return kind, self.number(), self.number(), self.take(8)
        return (kind,)

    def next_ids(self) -> list[int]:
        try:
            return next(self.ids)
        except StopIteration:
            raise _Damage("block ids are missing") from None


def _key(key: bytes) -> bytes | None:
    return b"" if key == _EMPTY else None if key == _NO_KEY else key


def _block_ids(raw: bytes, start: int) -> Iterator[list[int]]:
    if len(raw) < start + 4:
        raise _Damage("block ids are cut")
    num_arrays = int.from_bytes(raw[start : start + 4], "little")
    at = start + 4 + 4 * num_arrays
    if len(raw) < at + 1 or raw[at] not in (4, 8):
        raise _Damage("block ids are cut")
    counts = np.frombuffer(raw, "<u4", num_arrays, start + 4)
    width = raw[at]
    total = int(counts.sum(dtype=np.int64))
    if len(raw) != at + 1 + width * total:
        raise _Damage("block ids are cut")
    ids = np.cumsum(np.frombuffer(raw, f"<i{width}", total, at + 1), dtype=np.int64).tolist()
    first = 0
    for count in counts.tolist():
        yield ids[first : first + count]
        first += count


_ONE_KEY = frozenset({Op.LOOKUP_ONE, Op.STATUS, Op.IS_COMING})
_GROUP_BYTES = 2
_LISTS = frozenset({Op.LOOKUP, Op.TOUCH, Op.PREPARE_LOAD, Op.COMPLETE_LOAD, Op.PREPARE_STORE, Op.COMPLETE_STORE})
_FLAGGED = frozenset({Op.COMPLETE_STORE, Op.REQUEST_FINISHED, Op.TAKE_EVENTS})
_CALLS = frozenset(op for op in Op if op < Op.CONTEXT)


def _decode(raw: bytes, num_bytes: int, first_record: int) -> Iterator[Call | Input]:
    """Yield the records of a chunk."""
    reader = _Reader(raw, num_bytes)
    now = 0
    number = first_record
    while reader.at < reader.end:
        op = Op(reader.byte())
        if op is Op.STATUS_RUN:
            now += reader.number()
            for key, answer in reader.run():
                yield Call(number, Op.STATUS, now * UNIT_S, 0, key, answer=answer)
                number += 1
            continue
        if op in _CALLS:
            call = Call(number, op)
            now += reader.number()
            call.time_s = now * UNIT_S
            call.context = reader.number()
            if op in _LISTS:
                call.keys = reader.keys()
            elif op in _ONE_KEY:
                call.keys = reader.key()
            elif op is Op.HINT:
                call.keys = (reader.keys(), reader.text())
            elif op is Op.REPORT_PREFILLS:
                count = reader.number()
                if count > reader.end - reader.at or count % 2:
                    raise _Damage("parts of prompts are cut")
                numbers = [reader.number() for _ in range(count)]
                call.keys = list(zip(numbers[::2], numbers[1::2], strict=True)), reader.seconds()
            if op in _FLAGGED:
                call.flag = reader.number()
            call.answer = reader.answer()
            yield call
        else:
            yield _decode_note(reader, op, number)
        number += 1


def _decode_note(reader: _Reader, op: Op, number: int) -> Call | Input:
    if op is Op.CONTEXT:
        context, text = reader.number(), reader.text()
        if context < FIRST_CONTEXT:
            raise _Damage(f"a request has number {context}")
        return Call(number, op, context=context, keys=json.loads(text))
    if op is Op.POSITIONS:
        context, flag, count = reader.number(), reader.number(), reader.number()
        if count > reader.end - reader.at:
            raise _Damage("positions are cut")
        pairs = []
        for _ in range(count):
            key, coded = reader.key(), reader.number()
            pairs.append((key, coded >> 1 if not coded & 1 else -(coded >> 1) - 1))
        return Call(number, op, context=context, keys=pairs, flag=flag)
    if op is Op.GROUPS:
        context, count = reader.number(), reader.number()
        data = reader.take(count * _GROUP_BYTES)
        groups = [data[i : i + _GROUP_BYTES] for i in range(0, len(data), _GROUP_BYTES)]
        return Call(number, op, context=context, keys=groups)
    if op is Op.CLOCK:
        return Input(op, reader.seconds())
    if op is Op.LOST:
        return Call(number, op, flag=reader.number())
    if op is Op.REFUSED:
        return Call(number, op)
    if op is Op.STATS:
        return Call(number, op, keys=json.loads(reader.text()))
    tier = reader.number()
    if op is Op.TIER_LOOKUP:
        return Input(op, (reader.number(), reader.number()), tier)
    if op is Op.TIER_SUBMIT:
        return Input(op, (reader.number(), reader.number(), reader.keys()), tier)
    if op is Op.TIER_RAISED:
        return Input(op, TierCall(reader.number()), tier)
    results: list[Any] = []
    count = reader.number()
    if count > reader.end - reader.at:
        raise _Damage("results are cut")
    if op is Op.TIER_TIMES:
        return Input(op, [(reader.seconds(), reader.seconds()) if reader.byte() else None for _ in range(count)], tier)
    for _ in range(count):
        job_id = reader.number()
        if job_id == 0:
            results.append(None)
            continue
        lists = [reader.keys() for _ in range(3)]
        results.append((None if job_id == 1 else job_id - 2, *lists, reader.text()))
    return Input(op, results, tier)
