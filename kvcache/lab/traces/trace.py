"""Read request traces: Mooncake and Qwen-Bailian JSONL, plain or compressed, one line at a time.

A trace may be larger than memory; `kvcache.lab.traces.compact.CompactTrace` holds a whole one in files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from kvcache.lab.traces.requests import BadRecord, Request, TraceFile
from kvcache.lab.traces.requests import TraceError as TraceError
from kvcache.lab.traces.sessions import SessionTrace, holds_sessions
from kvcache.registry import how_to_install

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Int64Array

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SHOWN_CHARS = 60
# Larger than any prompt or clock; sums fit into 64 bits.
_MAX_TOKENS = 1 << 40
_MAX_TIME = 10**18
_SIZES = [1 << power for power in range(2, 14)]


def _read_mooncake(record: dict[str, Any], block_size: int) -> Request:
    ids, input_length = _ids(record), _length(record, "input_length")
    _check_blocks(len(ids), input_length, block_size)
    return Request(ids, input_length, _length(record, "output_length"), _time(record) / 1000)


def _read_bailian(record: dict[str, Any], block_size: int) -> Request:
    for name in ("chat_id", "parent_chat_id", "turn"):
        if type(_field(record, name)) is not int:
            raise BadRecord(f"{name} must be an int, got {shown(record[name])}")
    if not isinstance(_field(record, "type"), str):
        raise BadRecord(f"type must be a string, got {shown(record['type'])}")
    ids = _ids(record)
    # Some published files list no lengths: then every block counts as full.
    input_length = _length(record, "input_length") if "input_length" in record else block_size * len(ids)
    _check_blocks(len(ids), input_length, block_size)
    output_length = _length(record, "output_length") if "output_length" in record else 0
    return Request(ids, input_length, output_length, _time(record))


_FORMATS: dict[str, tuple[int, Callable[[dict[str, Any], int], Request]]] = {
    "mooncake": (512, _read_mooncake),
    "bailian": (16, _read_bailian),
}


def open_trace(
    path: str | os.PathLike[str], block_size: int | None = None, skip_bad: bool = False, users: int = 40, seed: int = 0
) -> TraceFile:
    """Open a trace of requests, or recorded sessions; `block_size` is that of a listed block, None: the format's."""
    if holds_sessions(Path(path)):
        return SessionTrace(path, users, seed, skip_bad)
    return Trace(path, block_size, skip_bad)


class Trace(TraceFile):
    """The requests of a trace file, in file order; the first good line settles the format.

    The file is plain, gzip or zstd, detected by its first bytes; ``-`` is standard input. `block_size` are the tokens
    of a listed block, by default the `block_size` of the line, or 512 for Mooncake and 16 for Qwen-Bailian. A line
    whose ids and tokens do not agree with it is bad. Bad lines raise TraceError, or are counted in `num_skipped` if
    `skip_bad`.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int | None = None, skip_bad: bool = False) -> None:
        self.path = Path(path)
        self.name = "standard input" if str(path) == "-" else self.path.name
        self.num_skipped = 0
        self._skip_bad = skip_bad
        self._line = 0
        self.format = ""
        self.block_size = block_size or 0
        try:
            # A copy of the descriptor, so that closing the trace leaves standard input open.
            self._raw = os.fdopen(os.dup(0), "rb") if str(path) == "-" else self.path.open("rb")
        except OSError as error:
            raise TraceError(f"cannot open trace {self.path}: {error.strerror}") from error
        try:
            self.size_bytes = max(1, os.fstat(self._raw.fileno()).st_size)
            self._lines = unpacked(self._raw)
            self._requests = self._read()
            self._first: Request | None = next(self._requests, None)
            if self._first is None:
                skipped = f" ({self.num_skipped} bad lines)" if self.num_skipped else ""
                raise TraceError(f"trace {self.path} holds no request{skipped}")
        except OSError as error:
            self._raw.close()
            raise TraceError(f"cannot read trace {self.path}: {error.strerror or error}") from error
        except BaseException:
            self._raw.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    @property
    def position_bytes(self) -> int:
        return 0 if self._raw.closed or not self._raw.seekable() else self._raw.tell()

    def __iter__(self) -> Iterator[Request]:
        first, self._first = self._first, None
        if first is not None:
            yield first
        yield from self._requests

    def _read(self) -> Iterator[Request]:
        while True:
            try:
                line = self._lines.readline()
            except (OSError, EOFError, zlib.error) as error:
                raise TraceError(f"{self.path}:{self._line + 1}: cannot be read: {error}") from error
            if not line:
                return
            self._line += 1
            if line.isspace():
                continue
            try:
                yield self._parse(line)
            except BadRecord as error:
                if not self._skip_bad:
                    raise TraceError(f"{self.path}:{self._line}: {error}") from error
                self.num_skipped += 1

    def _parse(self, line: bytes) -> Request:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            text = line.strip().decode("utf-8", "replace")
            raise BadRecord(f"not JSON ({error}): {shown(text)}") from error
        if not isinstance(record, dict):
            raise BadRecord(f"must be a JSON object, got {shown(record)}")
        # The first good line settles the format.
        name = self.format or ("bailian" if "chat_id" in record else "mooncake")
        default_size, read = _FORMATS[name]
        block_size = self.block_size or record.get("block_size", default_size)
        if type(block_size) is not int or block_size < 1 or record.get("block_size", block_size) != block_size:
            expected = f"the {self.block_size} tokens that were given or read" if self.block_size else "an int >= 1"
            raise BadRecord(f"block_size must be {expected}, got {shown(record['block_size'])}")
        request = read(record, block_size)
        self.format, self.block_size = name, block_size
        return request


def unpacked(raw: io.BufferedReader) -> BinaryIO:
    """Return the content of a file that is plain, gzip or zstd."""
    magic = raw.peek(4)[:4]
    if magic.startswith(_GZIP_MAGIC):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if magic != _ZSTD_MAGIC:
        return raw
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise TraceError(f"{raw.name} is zstd{how_to_install(error)}") from error
    return io.BufferedReader(_ZstdFrames(raw, zstandard), 1 << 18)


class _ZstdFrames(io.RawIOBase):
    """The content of zstd frames; raises EOFError if the last frame is cut, unlike zstandard's own reader."""

    def __init__(self, packed: BinaryIO, library: Any) -> None:
        super().__init__()
        self._packed = packed
        # `zstd --long=31` writes windows of 2 GiB.
        self._unpacker = library.ZstdDecompressor(max_window_size=1 << 31)
        self._broken = library.ZstdError
        self._frame: Any = None
        self._rest = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            packed = self._rest or self._packed.read(1 << 16)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the zstd frame is cut short")
                return 0
            frame = self._frame = self._frame or self._unpacker.decompressobj()
            try:
                self._content = memoryview(frame.decompress(packed))
            except self._broken as error:
                raise OSError(str(error)) from error
            self._rest = frame.unused_data
            if frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def shown(value: object) -> str:
    """Return a value as an error shows it, cut to 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return repr(text) if isinstance(value, str) else text


def _field(record: dict[str, Any], name: str) -> Any:
    try:
        return record[name]
    except KeyError:
        hint = "; kvcache trace make reads other formats" if name == "hash_ids" else ""
        raise BadRecord(f"lacks {name!r}, has {shown(', '.join(record))}{hint}") from None


def _ids(record: dict[str, Any]) -> Int64Array:
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list):
        raise BadRecord(f"hash_ids must be a list of ints, got {shown(ids)}")
    for value in ids:
        if type(value) is not int:
            raise BadRecord(f"hash_ids must be ints, got {shown(value)}")
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        wide = next(value for value in ids if not -(1 << 63) <= value < 1 << 63)
        raise BadRecord(f"hash_ids must fit 64 bits, got {shown(wide)}") from None


def _check_blocks(num_ids: int, num_tokens: int, block_size: int) -> None:
    """Raise unless `num_ids` blocks have so many tokens, with the partial last block or without it."""
    num_full, rest = divmod(num_tokens, block_size)
    if num_ids - num_full in (0, rest > 0):
        return
    wanted = f"{num_full}" if not rest else f"{num_full + 1} (or {num_full}, without the partial last one)"
    fitting = [size for size in _SIZES if num_ids - num_tokens // size in (0, num_tokens % size > 0)]
    hint = f"; they fit --block-size {' or '.join(map(str, fitting))}" if fitting else ""
    raise BadRecord(f"hash_ids must be {wanted} for {num_tokens} tokens in blocks of {block_size}, got {num_ids}{hint}")


def _length(record: dict[str, Any], name: str) -> int:
    value = _field(record, name)
    if type(value) is not int or not 0 <= value <= _MAX_TOKENS:
        raise BadRecord(f"{name} must be an int in 0..2**40, got {shown(value)}")
    return value


def _time(record: dict[str, Any]) -> float:
    value = _field(record, "timestamp")
    if type(value) not in (int, float) or not 0 <= value <= _MAX_TIME:
        raise BadRecord(f"timestamp must be a number in 0..1e18, got {shown(value)}")
    return float(value)
