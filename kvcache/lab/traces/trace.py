"""Read request traces: Mooncake and Qwen-Bailian JSONL, plain or compressed, one line at a time.

A trace may be larger than memory; `kvcache.lab.traces.compact.CompactTrace` holds a whole one in files.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.lab.traces.files import Opened, open_lines
from kvcache.lab.traces.formats import describe, describe_text
from kvcache.lab.traces.requests import TIME_UNITS, BadRecord, Request, TraceFile, tokens_of
from kvcache.lab.traces.requests import TraceError as TraceError
from kvcache.lab.traces.sessions import SessionTrace, is_session
from kvcache.lab.traces.turns import seed_of

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Int64Array

_SHOWN_CHARS = 60
_PEEKED_BYTES = 1 << 14
_MAX_TIME = 10**18
_SIZES = [1 << power for power in range(2, 14)]


def _read_mooncake(record: dict[str, Any], block_size: int) -> Request:
    ids, input_length = ids_of(record), _length(record, "input_length")
    check_blocks(len(ids), input_length, block_size)
    return Request(ids, input_length, _length(record, "output_length", 0), _time(record))


def _read_bailian(record: dict[str, Any], block_size: int) -> Request:
    for name in ("chat_id", "parent_chat_id", "turn"):
        if type(_field(record, name)) is not int:
            raise BadRecord(f"{name} must be an int, got {shown(record[name])}")
    if not isinstance(_field(record, "type"), str):
        raise BadRecord(f"type must be a string, got {shown(record['type'])}")
    ids = ids_of(record)
    # Some published files list no lengths: then every block counts as full.
    input_length = _length(record, "input_length", block_size * len(ids))
    check_blocks(len(ids), input_length, block_size)
    return Request(ids, input_length, _length(record, "output_length", 0), _time(record))


# The tokens of a block, the seconds of a unit of time, and the reader.
_FORMATS: dict[str, tuple[int, float, Callable[[dict[str, Any], int], Request]]] = {
    "mooncake": (512, 1e-3, _read_mooncake),
    "bailian": (16, 1.0, _read_bailian),
}


def open_trace(
    path: str | os.PathLike[str],
    block_size: int | None = None,
    skip_bad: bool = False,
    users: int = 40,
    seed: int = 0,
    time_unit: str | None = None,
) -> TraceFile:
    """Open a trace of requests, or recorded sessions; `block_size` is that of a listed block, None: the format's."""
    if Path(path).is_dir():
        return SessionTrace(path, users, seed, skip_bad)
    opened = open_lines(path)
    try:
        # Standard input can be read only once, so peek at its first bytes, which stay in the buffer.
        if is_session(opened[1].peek(_PEEKED_BYTES)):  # type: ignore[attr-defined]
            return SessionTrace(path, users, seed, skip_bad, opened)
    except (OSError, EOFError, zlib.error):
        pass  # Trace names the error and its line.
    return Trace(path, block_size, skip_bad, time_unit, opened)


class Trace(TraceFile):
    """The requests of a trace file, in file order; the first good line settles the format.

    The file is plain, gzip or zstd, detected by its first bytes; ``-`` is standard input. `block_size` are the tokens
    of a listed block, by default the `block_size` of the line, or 512 for Mooncake and 16 for Qwen-Bailian. A line
    whose ids and tokens do not agree with it is bad. Bad lines raise TraceError, or are counted in `num_skipped` if
    `skip_bad`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block_size: int | None = None,
        skip_bad: bool = False,
        time_unit: str | None = None,
        opened: Opened | None = None,
    ) -> None:
        self.path = Path(path)
        self.name = "standard input" if str(path) == "-" else self.path.name
        self.num_skipped = 0
        self._skip_bad = skip_bad
        self._line = 0
        self.format = ""
        self.block_size = block_size or 0
        self._unit_s = TIME_UNITS[time_unit] if time_unit else 0.0
        self._last_s = -1.0
        self.num_untimed = 0
        self._first_ids: dict[Any, Any] = {}
        self._raw, self._lines = opened or open_lines(path)
        try:
            self.size_bytes = max(1, os.fstat(self._raw.fileno()).st_size)
            self._requests = self._read()
            self._first: Request | None = next(self._requests, None)
            if self._first is None:
                skipped = f" ({self.num_skipped} bad lines)" if self.num_skipped else ""
                raise TraceError(f"trace {self.path} holds no request{skipped}")
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
            except (BadRecord, TraceError) as error:
                if isinstance(error, TraceError) or not self._skip_bad:
                    raise TraceError(f"{self.path}:{self._line}: {error}") from error
                self.num_skipped += 1

    def _parse(self, line: bytes) -> Request:
        record = parse_object(line, not self.format)
        # The first good line settles the format.
        name = self.format or ("bailian" if "chat_id" in record else "mooncake")
        default_size, unit_s, read = _FORMATS[name]
        if "hash_ids" not in record and not self.format and (text := describe(record)):
            raise TraceError(text)
        block_size = self.block_size or record.get("block_size", default_size)
        if type(block_size) is not int or block_size < 1 or record.get("block_size", block_size) != block_size:
            expected = f"the {self.block_size} tokens that were given or read" if self.block_size else "an int >= 1"
            raise BadRecord(f"block_size must be {expected}, got {shown(record['block_size'])}")
        request = read(record, block_size)
        self._check_whole(record)
        # Without times, a second between requests keeps their order.
        self.num_untimed += math.isnan(request.arrival_s)
        now_s = self._last_s + 1 if math.isnan(request.arrival_s) else request.arrival_s * (self._unit_s or unit_s)
        self.format, self.block_size, self._last_s = name, block_size, now_s
        return replace(request, arrival_s=now_s)

    def _check_whole(self, record: dict[str, Any]) -> None:
        """Raise TraceError if a line holds only the new tokens of a session's turn."""
        session, ids, has_delay = record.get("session_id"), record["hash_ids"], record.get("delay") is not None
        if session is None and not has_delay:
            return
        first = self._first_ids.setdefault(session, ids[0] if ids else None)
        is_whole = record.get("timestamp") is not None and (not ids or first in (None, ids[0]))
        if has_delay or not is_whole:
            raise TraceError(
                "sessions of AIPerf or Dynamo, whose lines hold only the new tokens of a turn: kvcache trace make FILE "
                "OUT adds them up (jq -c 'del(.session_id, .delay)' if each line holds its whole prompt)"
            )


def parse_object(line: bytes, is_first: bool) -> dict[str, Any]:
    """Return the object of a line; raise BadRecord, or TraceError if a first line shows a file of another format."""
    try:
        record = json.loads(line)
        text = "" if isinstance(record, dict) else f"must be a JSON object, got {shown(record)}"
        known = describe_text("[") if isinstance(record, list) else ""
    except (ValueError, RecursionError) as error:
        record = line.strip().decode("utf-8", "replace")
        text, known = f"not JSON ({error}): {shown(record)}", describe_text(record)
    # If bad lines were skipped here, a file without any good line would seem empty.
    if known and is_first:
        raise TraceError(known)
    if text:
        raise BadRecord(text)
    return record  # type: ignore[no-any-return]


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


def ids_of(record: dict[str, Any]) -> Int64Array:
    """Return the ids of a record as signed numbers: unsigned ones wrap, and names are hashed."""
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list):
        raise BadRecord(f"hash_ids must be a list of ints, got {shown(ids)}")
    kind = str if ids and isinstance(ids[0], str) else int
    for value in ids:
        if type(value) is not kind:
            raise BadRecord(f"hash_ids must be ints, or all names, got {shown(value)}")
    if kind is str:
        return np.array([seed_of(name) for name in ids], dtype=np.int64)
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        wide = next((value for value in ids if not -(1 << 63) <= value < 1 << 64), None)
        if wide is not None:
            raise BadRecord(f"hash_ids must fit 64 bits, got {shown(wide)}") from None
        return np.array([value - (value >> 63 << 64) if value > 0 else value for value in ids], dtype=np.int64)


def check_blocks(num_ids: int, num_tokens: int, block_size: int) -> None:
    """Raise unless `num_ids` blocks have so many tokens, with the partial last block or without it."""
    num_full, rest = divmod(num_tokens, block_size)
    if num_ids - num_full in (0, rest > 0):
        return
    wanted = f"{num_full}" if not rest else f"{num_full + 1} (or {num_full}, without the partial last one)"
    fitting = [size for size in _SIZES if num_ids - num_tokens // size in (0, num_tokens % size > 0)]
    hint = f"; they fit --block-size {' or '.join(map(str, fitting))}" if fitting else ""
    raise BadRecord(f"hash_ids must be {wanted} for {num_tokens} tokens in blocks of {block_size}, got {num_ids}{hint}")


def _length(record: dict[str, Any], name: str, default: int | None = None) -> int:
    return tokens_of(_field(record, name) if default is None else record.get(name, default), name)


def _time(record: dict[str, Any]) -> float:
    value = record.get("timestamp")
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not 0 <= value <= _MAX_TIME:
        raise BadRecord(f"timestamp must be a number in 0..1e18, got {shown(value)}")
    return float(value)
