"""Turn the records of every format into requests: lines of traces, turns of sessions, and records of logs.

Ids that are made here are chained: the id of a block is a hash of its tokens and of the id of the block before it, as
engines hash their blocks. So two requests share the ids of their common prefix and no others.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.lab.traces.formats import CONVERSATIONS, COUNTS, MAKE, OBJECTS, describe
from kvcache.lab.traces.prompts import fields_of, prompts_of, unknown_fields
from kvcache.lab.traces.records import (
    BODIES,
    EMPTY,
    TOKENS,
    Clock,
    parsed,
    plain,
    reason_to_leave_out,
    requests_in,
    shown,
)
from kvcache.lab.traces.requests import TIME_UNITS, BadRecord, Reading, ReadOptions, TraceError, tokens_of
from kvcache.lab.traces.turns import (
    SHORTEST_PROMPT,
    Access,
    CountedConversations,
    DeltaSessions,
    SessionKind,
    chain,
    count_of,
    seed_of,
)

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Int64Array

ORACLE_GENERAL = struct.Struct("<IQIq")  # time in seconds, object, its size, the position of its next access
_ANSWERS = ("output_length", "completion_tokens", "output_tokens")
_CACHED_COUNTS = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_write_input_tokens")
# Columns of access logs of other caches. A column `id` or `key` names an object only if all columns are among them.
_ACCESSES = {*OBJECTS, "timestamp", "time", "clock_time", "size", "obj_size", "object_size", "op", "ttl"}
_ACCESSES |= {"next_access_vtime", "tenant", "ns"}
_LISTED_TOKENS = 512
_MADE_TOKENS = 16
_SIZES = [1 << power for power in range(2, 14)]


def _read_mooncake(record: dict[str, Any], block_size: int) -> tuple[Int64Array, int]:
    ids, input_length = ids_of(record), tokens_of(_field(record, "input_length"), "input_length")
    check_blocks(len(ids), input_length, block_size)
    return ids, input_length


def _read_bailian(record: dict[str, Any], block_size: int) -> tuple[Int64Array, int]:
    for name in ("chat_id", "parent_chat_id", "turn"):
        if type(_field(record, name)) is not int:
            raise BadRecord(f"{name} must be an int, got {shown(record[name])}")
    if not isinstance(_field(record, "type"), str):
        raise BadRecord(f"type must be a string, got {shown(record['type'])}")
    ids = ids_of(record)
    # Some published files list no lengths: then every block counts as full.
    input_length = tokens_of(record.get("input_length", block_size * len(ids)), "input_length")
    check_blocks(len(ids), input_length, block_size)
    return ids, input_length


# The tokens of a block, the unit of time, and the reader.
_TRACES: dict[str, tuple[int, str, Callable[[dict[str, Any], int], tuple[Int64Array, int]]]] = {
    "mooncake": (512, "ms", _read_mooncake),
    "bailian": (16, "s", _read_bailian),
}


class RecordReader:
    """Reads records; the first valid one sets the `format` and the `block_size`, the tokens of a request's block."""

    def __init__(self, options: ReadOptions) -> None:
        self.format = ""
        self.block_size = options.listed or 0
        self.reading = Reading()
        self._options = options
        self._clock = Clock(options.time_unit, options.time_zone)
        self._made_tokens = options.replayed or options.listed or _MADE_TOKENS
        self._sessions = SessionKind()
        self._deltas = DeltaSessions(self._made_tokens)
        self._counted = CountedConversations(self._made_tokens, options.shared_tokens)
        self._whole: set[bytes] = set()
        self._salts: dict[str, int] = {}

    def read(self, record: Any, is_row: bool = False) -> list[Access]:
        """Return the requests of a record: one, or one for each answer of a conversation; [] for other records.

        Only rows of a table may be accesses to another cache: in JSON, `object` has another meaning.
        """
        if isinstance(record, bytes):
            return [self._oracle(record)]
        named = plain(record)
        is_turn = named.get("session_id") is not None or named.get("delay") is not None
        if is_turn and named.get("input_length") not in EMPTY and not self._options.prompt_fields:
            return self._turn(named)
        if self.format in _TRACES or ("hash_ids" in named and not self.format):
            return self._line(named)
        accesses = []
        for request in requests_in(record):
            if reason := reason_to_leave_out(request, self._options.only):
                self.reading.left_out[reason] += 1
                continue
            accesses += self._request(request, is_row)
        return accesses

    def end(self) -> list[Access]:
        """Return the requests of sessions of a kind unknown so far; TraceError if counts are too small for prompts."""
        shortest, longest = self._counted.lengths
        if 0 < longest < SHORTEST_PROMPT:
            raise TraceError(
                f"prompts of {shortest} to {longest} tokens: these are not the lengths of whole prompts. A count "
                f"without the cached tokens (Anthropic) needs {' and '.join(_CACHED_COUNTS[:2])} beside it"
            )
        self._sessions.decide()
        return self._waited()

    def _line(self, named: dict[str, Any]) -> list[Access]:
        """Return the request of a line of a trace."""
        if self._options.only and (reason := reason_to_leave_out(named, self._options.only)).startswith("not "):
            self.reading.left_out[reason] += 1
            return []
        name = self.format or ("bailian" if "chat_id" in named else "mooncake")
        default_size, unit, read = _TRACES[name]
        if isinstance(named.get("hash_ids"), str):
            raise TraceError(describe(named))
        block_size = self.block_size or named.get("block_size", default_size)
        if type(block_size) is not int or block_size < 1 or named.get("block_size", block_size) != block_size:
            expected = f"the {self.block_size} tokens that were given or read" if self.block_size else "an int >= 1"
            raise BadRecord(f"block_size must be {expected}, got {shown(named['block_size'])}")
        ids, input_length = read(named, block_size)
        output_length = tokens_of(named.get("output_length", 0), "output_length")
        time = self._clock.time_of(named, unit)
        self.format, self.block_size = name, block_size
        return [self._of_model(named, Access(ids, input_length, output_length, time))]

    def _turn(self, named: dict[str, Any]) -> list[Access]:
        """Return the requests that can be read after a line with a session: its own, and waiting ones."""
        listed = named.get("block_size") or (self._options.replayed and self._options.listed) or _LISTED_TOKENS
        if type(listed) is not int or listed < 1:
            raise BadRecord(f"block_size must be an int >= 1, got {shown(listed)}")
        if named.get("hash_ids"):
            ids_of(named)
        self._sessions.judge(named, self._clock.time_of(named, "ms") is not None, listed)
        return [] if self._sessions.holds_deltas is None else self._waited()

    def _waited(self) -> list[Access]:
        waiting, self._sessions.waiting = self._sessions.waiting, []
        read = self._delta if self._sessions.holds_deltas else self._line
        return [access for named in waiting for access in read(named)]

    def _delta(self, named: dict[str, Any]) -> list[Access]:
        ids = ids_of(named).tolist() if named.get("hash_ids") else []
        listed = named.get("block_size") or (self._options.replayed and self._options.listed) or _LISTED_TOKENS
        length = count_of(named["input_length"], "input_length")
        if ids:
            check_blocks(len(ids), length, listed)
        time = self._clock.time_of(named, "ms")
        if time is None:
            unit = self._options.time_unit or "ms"
            time = self._deltas.follows(named, float(named.get("delay") or 0) * TIME_UNITS[unit])
        self._settle("sessions of deltas")
        self.reading.prompts["the new tokens of each turn"] += 1
        return [self._of_model(named, self._deltas.access(named, ids, listed, time))]

    def _settle(self, name: str) -> None:
        if not self.format:
            self.format, self.block_size = name, self._made_tokens

    def _oracle(self, record: bytes) -> Access:
        if len(record) < ORACLE_GENERAL.size:
            raise BadRecord(f"must have {ORACLE_GENERAL.size} bytes, got {len(record)}")
        time, name, _, _ = ORACLE_GENERAL.unpack(record)
        self._settle("oracleGeneral")
        # The file's ids are unsigned, those of a trace signed.
        return Access([name - (name >> 63 << 64)], self._made_tokens, 0, float(time))

    def _request(self, named: dict[str, Any], is_row: bool) -> list[Access]:
        """Return the requests of a record of a log."""
        if not self._options.prompt_fields:
            column = _first(named, OBJECTS)
            is_row = is_row and _first(named, (*BODIES, *TOKENS)) is None
            if is_row and column is not None and (column in OBJECTS[:4] or named.keys() <= _ACCESSES):
                digest = hashlib.blake2b(named[column].strip().encode(), digest_size=8).digest()
                self._settle("accesses")
                ids = [int.from_bytes(digest, "little") >> 1]
                return [Access(ids, self._made_tokens, 0, self._clock.time_of(named, "s"))]
            usage = _usage(named)
            conversation, count = _first(named, CONVERSATIONS), _first(usage, COUNTS)
            # Text beside counts may be a part of the prompt. If the user gives a tokenizer, it is the whole prompt.
            bodies = (*TOKENS, *(BODIES if self._options.tokenize else ()))
            has_prompt = _first(named, (name for name in bodies if name != conversation)) is not None
            if conversation is not None and count is not None and not has_prompt and _is_name(named[conversation]):
                return [self._count(named, usage, str(named[conversation]), count)]
        return self._prompts(named)

    def _count(self, named: dict[str, Any], usage: Mapping[str, Any], conversation: str, count: str) -> Access:
        time = self._clock.time_of(named, "s")
        place = count_of(named["turn"], "turn") if named.get("turn") not in (None, "") else time
        if place is None:
            raise BadRecord("a conversation of token counts needs a turn or a time")
        length = count_of(usage[count], count)
        names = [count]
        if count == "input_tokens":
            # Anthropic counts the tokens that its own cache read or wrote separately.
            names += [name for name in _CACHED_COUNTS if usage.get(name) not in EMPTY]
            length += sum(count_of(usage[name], name) for name in names[1:])
        self._settle("counts")
        self._note(named, names)
        return self._of_model(named, self._counted.access(conversation, place, length, _answer(usage), time))

    def _prompts(self, named: dict[str, Any]) -> list[Access]:
        if named.get("message_mode") == "delta" or ("delay" in named and named.keys() & {"text_input", "messages"}):
            raise TraceError("the text of single turns without the answers: log whole prompts (docs: own-traces)")
        if "hash_ids" in named:
            raise BadRecord("hash_ids: this is a trace, and the file began as a log: one format a file")
        fields = self._options.prompt_fields or fields_of(named)
        prompts = prompts_of(named, fields)
        time = self._clock.time_of(named, "s")
        requests = []
        for prompt in prompts:
            is_chat = bool(prompt) and isinstance(prompt, list) and isinstance(prompt[0], dict)
            ends = self._asked(prompt) if is_chat and not named.get("is_request") else [len(prompt)]
            requests += [self._tokens(prompt[:end]) for end in ends]
        self._settle("prompts")
        self.reading.expanded += len(requests) > 1
        self._note(named, fields, len(requests))
        answer = _answer(_usage(named))
        return [
            self._of_model(named, Access(chain(tokens, self._made_tokens)[0], len(tokens), answer, time))
            for tokens in requests
        ]

    def _note(self, named: Mapping[str, Any], fields: Iterable[str], number: int = 1) -> None:
        self.reading.prompts[" + ".join(f"`{name}`" for name in fields)] += number
        for name in unknown_fields(named, fields):
            self.reading.ignored[name] = None

    def _of_model(self, named: Mapping[str, Any], access: Access) -> Access:
        """Count the model of a request, and keep its blocks apart from those of other models and salts."""
        model, salt = named.get("model") or named.get("model_id"), named.get("cache_salt")
        if model is None and salt is None:
            return access
        if isinstance(model, str):
            self.reading.models[model] += 1
        number = self._salts.setdefault(f"{model}\0{salt}", seed_of(str(model), str(salt)) if self._salts else 0)
        return access._replace(ids=np.asarray(access.ids, np.int64) ^ number) if number else access

    def _asked(self, chat: list[dict[str, Any]]) -> list[int]:
        """Return the ends of the prompts in a chat: before each answer if the chat ends with one, else its end.

        If an earlier record is the beginning of the chat, its answers are left out: they already have requests.
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

    def _tokens(self, prompt: Any) -> Any:
        """Return the token ids of a prompt as an array."""
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], dict)):
            return np.array(prompt, dtype="<i4")
        if self._options.tokenize is None:
            text = f"a log of prompts: {MAKE} --tokenizer NAME: text needs a tokenizer, got {shown(prompt)}"
            raise BadRecord(text) if self.format else TraceError(text)
        try:
            return np.fromiter(self._options.tokenize(prompt), dtype="<i4")
        except Exception as error:  # a chat template may raise anything
            raise BadRecord(f"the tokenizer refuses {shown(prompt)}: {error}") from error


def _first(named: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((name for name in names if named.get(name) not in EMPTY), None)


def _is_name(value: Any) -> bool:
    return isinstance(parsed(value), str | int)


def _usage(named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with the token counts of its own `usage`, or of its response's `usage`."""
    for name in ("response_body", "response", "usage"):
        inner = parsed(named.get(name))
        inner = parsed(inner.get("usage")) if isinstance(inner, dict) and name != "usage" else inner
        if isinstance(inner, dict):
            named = plain(inner) | {field: value for field, value in named.items() if value not in EMPTY}
    return named


def _answer(named: Mapping[str, Any]) -> int:
    name = _first(named, _ANSWERS)
    return 0 if name is None else count_of(named[name], name)


def _field(record: dict[str, Any], name: str) -> Any:
    try:
        return record[name]
    except KeyError:
        raise BadRecord(f"lacks {name!r}, has {shown(', '.join(record))}") from None


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
    """Raise BadRecord unless `num_ids` blocks hold `num_tokens`, with or without the partial last block."""
    num_full, rest = divmod(num_tokens, block_size)
    if num_ids - num_full in (0, rest > 0):
        return
    wanted = f"{num_full}" if not rest else f"{num_full + 1} (or {num_full}, without the partial last one)"
    fitting = [size for size in _SIZES if num_ids - num_tokens // size in (0, num_tokens % size > 0)]
    hint = f"; they fit --block-size {' or '.join(map(str, fitting))}" if fitting else ""
    raise BadRecord(f"hash_ids must be {wanted} for {num_tokens} tokens in blocks of {block_size}, got {num_ids}{hint}")
