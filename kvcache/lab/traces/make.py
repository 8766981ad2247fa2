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
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.lab.simulate.reading import doubts
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.files import unpacked
from kvcache.lab.traces.formats import CONVERSATIONS, COUNTS, OBJECTS, describe, plain_name
from kvcache.lab.traces.requests import TIME_UNITS, BadRecord, Request, TraceError
from kvcache.lab.traces.trace import check_blocks, ids_of, parse_object, shown
from kvcache.lab.traces.turns import Access, CountedConversations, DeltaSessions, chain, count_of

if TYPE_CHECKING:
    from typing import BinaryIO

FORMATS = ("jsonl", "oracleGeneral", "csv")
_TOKENS = ("prompt_token_ids", "token_ids", "input_ids", "prompt")
_TEXTS = ("prompt", "text", "input")
_CHATS = ("messages", "conversations", "input", "prompt")
_TIMES = ("timestamp", "time", "arrived_at", "created", "clock_time", "created_at", "start_time", "starttime")
_ANSWERS = ("output_length", "completion_tokens", "output_tokens")
# Columns of accesses to other caches: a column `id` or `key` names an object only beside these.
_ACCESSES = {*OBJECTS, *_TIMES, "size", "obj_size", "object_size", "op", "ttl", "next_access_vtime", "tenant", "ns"}
_ROLES = {"human": "user", "gpt": "assistant"}
_LISTED_TOKENS = 512
_ORACLE_GENERAL = struct.Struct("<IQIq")  # time in seconds, object, its size, the position of its next access
_MAX_TOKEN = (1 << 31) - 1

Tokenize = Callable[[Any], Iterable[int]]


@dataclass(slots=True)
class MadeTrace:
    """The result of `make_trace`.

    `late_requests` were out of order and were sorted. `expanded_records` hold a conversation of several answers,
    each of which became a request. `doubts` are lines about the times.
    """

    block_size: int
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    skipped_records: int = 0
    late_requests: int = 0
    expanded_records: int = 0
    untimed_requests: int = 0
    doubts: list[str] = field(default_factory=list)


def make_trace(
    log: Path,
    write: Callable[[str], object],
    block_size: int,
    *,
    log_format: str | None = None,
    tokenize: Tokenize | None = None,
    time_unit: str | None = None,
    shared_tokens: int = 0,
    skip_bad: bool = False,
    progressed: Callable[[int, int], None] = lambda requests, position_bytes: None,
) -> MadeTrace:
    """Write a log as Mooncake JSONL in order of time, with a `block_size` on each line.

    Only full blocks are listed. A log is JSONL (token ids, or text that `tokenize` turns into them), token counts of
    conversations (JSONL or CSV), or a libCacheSim trace, of which each access is a request of one block. Files are
    plain, gzip or zstd.

    `write` takes each line. `log_format` is ``"jsonl"``, ``"oracleGeneral"`` or ``"csv"``, by default by the file's
    name. `tokenize` turns a string or a list of chat messages into token ids. Times that are numbers count
    `time_unit` (s, ms, us or ns; by default s, and ms in sessions of AIPerf), others are ISO 8601. The first
    `shared_tokens` of counted conversations are the same. With `skip_bad`, bad records are counted instead of raised.
    `progressed` takes the number of requests and of bytes read so far. TraceError if the log cannot be read, holds no
    request, or holds a bad record.
    """
    log_format = log_format or _format_of(log)
    if log_format not in FORMATS:
        raise ValueError(f"log_format must be one of {', '.join(FORMATS)}, got {log_format!r}")
    made = MadeTrace(block_size)
    reader = _Reader(log_format, block_size, tokenize, time_unit, shared_tokens)

    def requests() -> Iterator[Request]:
        last_s = -1.0
        for number, (record, position_bytes) in enumerate(_read(log, log_format), start=1):
            try:
                accesses = reader.read(record)
            except BadRecord as error:
                if not skip_bad:
                    raise TraceError(f"{log}: record {number}: {error}") from error
                made.skipped_records += 1
                continue
            except TraceError as error:
                raise TraceError(f"{log}: record {number}: {error}") from error
            made.expanded_records += len(accesses) > 1
            for access in accesses:
                made.untimed_requests += access.time is None
                # Without times, a second between requests keeps their order.
                last_s = last_s + 1 if access.time is None else access.time
                made.requests += 1
                made.blocks += len(access.ids)
                made.tokens += access.input_length
                yield Request(np.array(access.ids, np.int64), access.input_length, access.output_length, last_s)
            progressed(made.requests, position_bytes)

    with tempfile.TemporaryDirectory(prefix="kvcache-trace-") as folder:
        compact = CompactTrace.spool(requests(), block_size, Path(folder))
        made.late_requests = compact.num_late
        made.doubts = doubts(compact, made.untimed_requests)
        for request in compact:
            line = {
                "timestamp": round((request.arrival_s - float(compact.arrivals_s[0])) * 1000, 3),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids.tolist(),
                "block_size": block_size,
            }
            write(json.dumps(line) + "\n")
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
    return chain(np.fromiter(tokens, dtype="<i4"), block_size)[0]


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


class _Reader:
    """Turns the records of a log into requests."""

    def __init__(
        self, log_format: str, block_size: int, tokenize: Tokenize | None, time_unit: str | None, shared_tokens: int
    ) -> None:
        self._format = log_format
        self._block_size = block_size
        self._tokenize = tokenize
        self._unit = time_unit
        self._deltas = DeltaSessions(block_size)
        self._counted = CountedConversations(block_size, shared_tokens)
        self._whole: set[bytes] = set()
        self._is_first = True

    def read(self, record: Any) -> list[Access]:
        """Return the requests of a record: one, or one for each answer of a conversation."""
        if self._format == "oracleGeneral":
            if len(record) < _ORACLE_GENERAL.size:
                raise BadRecord(f"must have {_ORACLE_GENERAL.size} bytes, got {len(record)}")
            time, name, _, _ = _ORACLE_GENERAL.unpack(record)
            # The file's ids are unsigned, those of a trace signed.
            return [Access([name - (name >> 63 << 64)], self._block_size, 0, float(time))]
        if self._format == "csv":
            record = {plain_name(str(name)): value for name, value in record.items() if name is not None}
            column = _first(record, OBJECTS)
            if column is not None and (column in OBJECTS[:4] or record.keys() <= _ACCESSES):
                digest = hashlib.blake2b(record[column].strip().encode(), digest_size=8).digest()
                access = [int.from_bytes(digest, "little") >> 1]
                return [Access(access, self._block_size, 0, _time(record, self._unit or "s"))]
        else:
            record, self._is_first = parse_object(record, self._is_first), False
        # Check for counts and deltas first: their records may also have text, which is not the whole prompt.
        conversation, count = _first(record, CONVERSATIONS), _first(record, COUNTS)
        if ("delay" in record or "session_id" in record) and "input_length" in record:
            return [self._delta(record)]
        if conversation is not None and count is not None:
            time = _time(record, self._unit or "s")
            place = count_of(record["turn"], "turn") if record.get("turn") not in (None, "") else time
            if place is None:
                raise BadRecord("a conversation of token counts needs a turn or a time")
            length, answer = count_of(record[count], count), _answer(record)
            return [self._counted.access(str(record[conversation]), place, length, answer, time)]
        return self._prompts(record)

    def _delta(self, record: dict[str, Any]) -> Access:
        named = ids_of(record).tolist() if record.get("hash_ids") else []
        listed, length = record.get("block_size", _LISTED_TOKENS), count_of(record["input_length"], "input_length")
        if named:
            check_blocks(len(named), length, listed)
        unit = self._unit or "ms"
        time = _time(record, unit)
        if time is None:
            time = self._deltas.follows(record, float(record.get("delay") or 0) * TIME_UNITS[unit])
        return self._deltas.access(record, named, listed, time)

    def _prompts(self, record: dict[str, Any]) -> list[Access]:
        time, answer = _time(record, self._unit or "s"), _answer(record)
        if record.get("message_mode") == "delta" or ("delay" in record and "text_input" in record):
            raise TraceError("the text of single turns without the answers: log whole prompts (docs: own-traces)")
        chat = next((found for name in _CHATS if (found := _messages(record.get(name)))), None)
        if chat is None:
            tokens = self._tokens(record)
            return [Access(chained_ids(tokens, self._block_size), len(tokens), answer, time)]
        accesses = []
        for end in self._asked(chat):
            tokens = self._tokenized(chat[:end])
            accesses.append(Access(chained_ids(tokens, self._block_size), len(tokens), answer, time))
        return accesses

    def _asked(self, chat: list[dict[str, Any]]) -> list[int]:
        """Return the ends of the prompts in a chat: before each answer, if the chat ends with one.

        If an earlier record is the beginning of the chat, its answers have had their requests already.
        """
        if chat[-1].get("role") != "assistant":
            return [len(chat)]
        digest, ends = hashlib.blake2b(digest_size=16), []
        for i, message in enumerate(chat):
            if i and message.get("role") == "assistant":
                ends.append(i)
            digest.update(json.dumps(message, sort_keys=True).encode())
            if digest.digest() in self._whole and i < len(chat) - 1:
                ends.clear()
        self._whole.add(digest.digest())
        return ends or [len(chat)]

    def _tokens(self, record: Mapping[str, Any]) -> list[int]:
        for name in _TOKENS:
            tokens = record.get(name)
            if isinstance(tokens, list):
                for token in tokens:
                    if type(token) is not int or not 0 <= token <= _MAX_TOKEN:
                        raise BadRecord(f"{name} must be ints in 0..2**31-1, got {shown(token)}")
                return tokens
        prompt = next((record[name] for name in _TEXTS if isinstance(record.get(name), str) and record[name]), None)
        if prompt is None and "hash_ids" in record:
            raise BadRecord("hash_ids: this is a trace already; kvcache plan and kvcache replay read it as it is")
        if prompt is None:
            known = describe({name: value for name, value in record.items() if name not in (*_CHATS, *_TEXTS)})
            expected = ", ".join(dict.fromkeys((*_TOKENS, *_TEXTS, *_CHATS)))
            raise BadRecord(known or f"must have token ids or text under one of {expected}, has {_names(record)}")
        return self._tokenized(prompt)

    def _tokenized(self, prompt: Any) -> list[int]:
        if self._tokenize is None:
            raise BadRecord(f"text needs a tokenizer (--tokenizer NAME), got {shown(prompt)}")
        try:
            return list(self._tokenize(prompt))
        except Exception as error:  # a chat template may raise anything
            raise BadRecord(f"the tokenizer refuses {shown(prompt)}: {error}") from error


def _names(record: Mapping[str, Any]) -> str:
    return shown(", ".join(record))


def _messages(value: Any) -> list[dict[str, Any]] | None:
    """Return a list of chat messages, also from JSON text in an export; None if the value is something else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return None
    if "from" in value[0]:
        return [{"role": _ROLES.get(one["from"], one["from"]), "content": one.get("value")} for one in value]
    return value


def _answer(request: Mapping[str, Any]) -> int:
    usage = request.get("usage")
    named = {**usage, **request} if isinstance(usage, dict) else request
    name = _first(named, _ANSWERS)
    if name is None:
        return 0
    return count_of(named[name], name)


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
    return next((name for name in names if named.get(name) not in (None, "")), None)
