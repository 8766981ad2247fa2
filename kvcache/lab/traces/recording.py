"""Recording: read the records of a recording, as `kvcache.recorder.format` describes them.

A reader checks every length and type before it uses them. A truncated, damaged or hostile file raises
`RecordingError`, or is read up to the damage. Equal records compress a thousandfold, so a reader limits the expanded
size by the file's size, unless its user trusts the file.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec

from kvcache.recorder.files import MAGIC, VERSION, older_file
from kvcache.recorder.format import Events, Keys, Raised, Stored
from kvcache.recorder.ops import NO_CONTEXT, ONE_KEY, Op

MAX_FRAME_BYTES = 1 << 25
_MAX_SHORT_BYTES = 1 << 20  # of a frame of several records: four times what writers put into one
_MAX_FRAME_RATIO = 4  # of a longer frame, whose one record holds mostly hashes
_FREE_MEMORY_BYTES, _MEMORY_RATIO = 1 << 26, 128
"""Memory that the calls of a recording may take: a fixed part, and bytes for each byte of the file (30 are usual)."""
_CALL_BYTES, _KEY_BYTES = 200, 100  # of memory, in a reader that keeps all calls as requests
_FREE_RAW_BYTES, _MAX_RATIO = 1 << 24, 64
_MARKS = {(0).to_bytes(8, "little"): b"", (1).to_bytes(8, "little"): None}
"""In place of a key's hash: the key was empty, or not bytes."""
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class RecordingError(ValueError):
    """A file is not a recording, or is damaged. The message describes the position."""


class CutHead(RecordingError):
    """A file is truncated in its header, because its process was killed or the disk was full."""


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
