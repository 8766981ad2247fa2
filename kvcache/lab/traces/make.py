"""Make a trace from a log of prompts, or from a trace of accesses to another cache.

A request's ids are chained: the id of a block is a hash of its tokens and of the id of the block before it, as engines
hash their blocks. So two requests share the ids of their common prefix and no others.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcache.lab.traces.requests import BadRecord, TraceError
from kvcache.lab.traces.trace import shown, unpacked

if TYPE_CHECKING:
    from typing import BinaryIO

FORMATS = ("jsonl", "oracleGeneral", "csv")
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TOKENS = ("prompt_token_ids", "token_ids", "input_ids", "prompt")
_TEXTS = ("prompt", "text", "input")
_TIMES = ("timestamp", "time", "arrived_at", "created", "clock_time")
_ANSWERS = ("output_length", "completion_tokens", "output_tokens")
_OBJECTS = ("obj_id", "object_id", "object", "obj", "id", "key")
_ORACLE_GENERAL = struct.Struct("<IQIq")  # time in seconds, object, its size, the position of its next access
_MAX_TOKEN = (1 << 31) - 1

Tokenize = Callable[[Any], Iterable[int]]


class Access(NamedTuple):
    """One record of a log; `time` is None if it has none."""

    ids: list[int]
    input_length: int
    output_length: int
    time: float | None


@dataclass(slots=True)
class MadeTrace:
    """What `make_trace` has written; `late_requests` came before the request on the line above them."""

    block_size: int
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    skipped_records: int = 0
    late_requests: int = 0
    has_times: bool = True


def make_trace(
    log: Path,
    write: Callable[[str], object],
    block_size: int,
    *,
    log_format: str | None = None,
    tokenize: Tokenize | None = None,
    time_unit: str = "s",
    skip_bad: bool = False,
    progressed: Callable[[int, int], None] = lambda requests, position_bytes: None,
) -> MadeTrace:
    """Write a log as Mooncake JSONL with a `block_size` on each line.

    Only full blocks are listed. A log is JSONL (token ids, or text that `tokenize` turns into them), or a libCacheSim
    trace, of which each access is a request of one block. Files are plain, gzip or zstd.

    `write` takes each line. `log_format` is ``"jsonl"``, ``"oracleGeneral"`` or ``"csv"``, by default by the file's
    name. `tokenize` turns a string or a list of chat messages into token ids. Times that are numbers count
    `time_unit` (s, ms, us or ns; oracleGeneral has seconds), others are ISO 8601. With `skip_bad`, bad records are
    counted instead of raised. `progressed` takes the number of requests and of bytes read so far. TraceError if the
    log cannot be read, holds no request, or holds a bad record.
    """
    log_format = log_format or _format_of(log)
    if log_format not in FORMATS:
        raise ValueError(f"log_format must be one of {', '.join(FORMATS)}, got {log_format!r}")
    made = MadeTrace(block_size)
    first_s = last_s = 0.0
    for number, (record, position_bytes) in enumerate(_read(log, log_format), start=1):
        try:
            access = _access(record, log_format, block_size, tokenize, time_unit)
        except BadRecord as error:
            if not skip_bad:
                raise TraceError(f"{log}: record {number}: {error}") from error
            made.skipped_records += 1
            continue
        now_s = access.time
        if now_s is None:
            made.has_times = False
            # Without times, a second between requests keeps their order.
            now_s = last_s + 1 if made.requests else 0.0
        if not made.requests:
            first_s = last_s = now_s
        made.late_requests += now_s < last_s
        last_s = max(last_s, now_s)
        line = {
            "timestamp": round((last_s - first_s) * 1000, 3),
            "input_length": access.input_length,
            "output_length": access.output_length,
            "hash_ids": access.ids,
            "block_size": block_size,
        }
        write(json.dumps(line) + "\n")
        made.requests += 1
        made.blocks += len(access.ids)
        made.tokens += access.input_length
        progressed(made.requests, position_bytes)
    if not made.requests:
        skipped = f" ({made.skipped_records} bad records)" if made.skipped_records else ""
        raise TraceError(f"{log} holds no request{skipped}")
    return made


def load_tokenizer(name: str) -> Tokenize:
    """Return a function that turns text, or a list of chat messages, into token ids.

    `name` is a folder, or a name on the Hugging Face hub.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)

    def tokenize(prompt: Any) -> Iterable[int]:
        if isinstance(prompt, str):
            return tokenizer(prompt)["input_ids"]  # type: ignore[no-any-return]
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]  # type: ignore[no-any-return]

    return tokenize


def chained_ids(tokens: Iterable[int], block_size: int) -> list[int]:
    """Return an id in 0..2**63-1 for each full block of a prompt."""
    row = np.fromiter(tokens, dtype="<i4")
    ids, parent = [], b""
    for first in range(0, len(row) - block_size + 1, block_size):
        parent = hashlib.blake2b(parent + row[first : first + block_size].tobytes(), digest_size=8).digest()
        ids.append(int.from_bytes(parent, "little") >> 1)
    return ids


def _format_of(log: Path) -> str:
    name = log.name.lower()
    return "oracleGeneral" if "oraclegeneral" in name else "csv" if ".csv" in name else "jsonl"


def _read(log: Path, log_format: str) -> Iterator[tuple[Any, int]]:
    """Yield each record, and how many bytes of the file have been read (0 for a pipe)."""
    try:
        with open(0, "rb", closefd=False) if str(log) == "-" else log.open("rb") as raw:
            for record in _records(unpacked(raw), log_format):
                yield record, raw.tell() if raw.seekable() else 0
    except (OSError, EOFError, csv.Error, zlib.error) as error:
        raise TraceError(f"cannot read {log}: {getattr(error, 'strerror', None) or error}") from error


def _records(content: BinaryIO, log_format: str) -> Iterator[Any]:
    if log_format == "oracleGeneral":
        while record := content.read(_ORACLE_GENERAL.size):
            yield record
    elif log_format == "csv":
        yield from csv.DictReader((line.decode("utf-8-sig", "replace") for line in content), skipinitialspace=True)
    else:
        yield from (line for line in content if not line.isspace())


def _access(record: Any, log_format: str, block_size: int, tokenize: Tokenize | None, time_unit: str) -> Access:
    if log_format == "oracleGeneral":
        if len(record) < _ORACLE_GENERAL.size:
            raise BadRecord(f"must have {_ORACLE_GENERAL.size} bytes, got {len(record)}")
        time, name, _, _ = _ORACLE_GENERAL.unpack(record)
        # The file's ids are unsigned, those of a trace signed.
        return Access([name - (name >> 63 << 64)], block_size, 0, float(time))
    if log_format == "csv":
        named = {str(key).strip().lower(): value for key, value in record.items() if key is not None}
        column = _first(named, _OBJECTS)
        if column is None or named[column] is None:
            raise BadRecord(f"must have one of the columns {', '.join(_OBJECTS)}, has {shown(', '.join(named))}")
        digest = hashlib.blake2b(named[column].strip().encode(), digest_size=8).digest()
        return Access([int.from_bytes(digest, "little") >> 1], block_size, 0, _time(named, time_unit))
    try:
        request = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON ({error}): {shown(record.strip().decode('utf-8', 'replace'))}") from error
    if not isinstance(request, dict):
        raise BadRecord(f"must be a JSON object, got {shown(request)}")
    tokens = _tokens(request, tokenize)
    return Access(chained_ids(tokens, block_size), len(tokens), _answer(request), _time(request, time_unit))


def _tokens(request: Mapping[str, Any], tokenize: Tokenize | None) -> list[int]:
    for name in _TOKENS:
        tokens = request.get(name)
        if isinstance(tokens, list):
            for token in tokens:
                if type(token) is not int or not 0 <= token <= _MAX_TOKEN:
                    raise BadRecord(f"{name} must be ints in 0..2**31-1, got {shown(token)}")
            return tokens
    prompt = request.get("messages")
    if not isinstance(prompt, list):
        prompt = next((request[name] for name in _TEXTS if isinstance(request.get(name), str)), None)
    if prompt is None and "hash_ids" in request:
        raise BadRecord("hash_ids: this is a trace already; kvcache plan and kvcache replay read it as it is")
    if prompt is None:
        expected = ", ".join([*_TOKENS, *_TEXTS[1:], "messages"])
        raise BadRecord(f"must have token ids or text under one of {expected}, has {shown(', '.join(request))}")
    if tokenize is None:
        raise BadRecord(f"text needs a tokenizer (--tokenizer NAME), got {shown(prompt)}")
    try:
        return list(tokenize(prompt))
    except Exception as error:  # of a template, of which anything may come
        raise BadRecord(f"the tokenizer refuses {shown(prompt)}: {error}") from error


def _answer(request: Mapping[str, Any]) -> int:
    usage = request.get("usage")
    named = {**usage, **request} if isinstance(usage, dict) else request
    name = _first(named, _ANSWERS)
    if name is None:
        return 0
    if type(named[name]) is not int or named[name] < 0:
        raise BadRecord(f"{name} must be an int >= 0, got {shown(named[name])}")
    return int(named[name])


def _time(named: Mapping[str, Any], unit: str) -> float | None:
    name = _first(named, _TIMES)
    if name is None:
        return None
    value = named[name]
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        seconds = float(value) * TIME_UNITS[unit]
        if not math.isfinite(seconds):
            raise ValueError
        return seconds
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        raise BadRecord(f"{name} must be a number or ISO 8601, got {shown(value)}") from None


def _first(named: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((name for name in names if named.get(name) is not None), None)
