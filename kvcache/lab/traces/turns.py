"""Requests of conversations whose records lack the whole prompt: the new tokens of a turn, or counts only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcache.lab.traces.requests import BadRecord, TraceError

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Int64Array


WHOLE = (
    "the lines of session {!r} begin with the same block, so they hold whole prompts: remove session_id and delay "
    "(jq -c 'del(.session_id, .delay)')"
)


SHORTEST_PROMPT = 16
"""A smaller count is that of a turn's new tokens, not of a whole prompt."""


class Access(NamedTuple):
    """One request of a log; `time` is in seconds, None if it is unknown."""

    ids: list[int] | Int64Array
    input_length: int
    output_length: int
    time: float | None


@dataclass(slots=True)
class _Session:
    time: float | None
    first_id: int | None
    num_turns: int = 0
    num_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    parent: bytes = b""
    tail: Any = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, tokens: Int64Array, block_size: int) -> None:
        """Append tokens; only full blocks get an id."""
        row = np.concatenate((self.tail, tokens))
        ids, self.parent = chain(row, block_size, self.parent)
        self.ids += ids
        self.tail = row[len(ids) * block_size :]
        self.num_tokens += len(tokens)


class DeltaSessions:
    """Sessions of AIPerf and Dynamo: each line has the new tokens of a turn, after all earlier prompts and answers.

    The content of an answer is unknown, and treated as unique to its session. Answers take no time: a turn follows the
    previous one after its ``delay``.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sessions: dict[str, _Session] = {}

    def access(self, record: Mapping[str, Any], hash_ids: list[int], listed: int, time: float | None) -> Access:
        """Return the request of a turn, with all turns before it; `hash_ids` name blocks of `listed` tokens."""
        name = str(record.get("session_id", f"line {len(self._sessions)}"))
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(None, hash_ids[0] if hash_ids else None)
        elif hash_ids and hash_ids[0] == session.first_id:
            raise TraceError(WHOLE.format(name))
        length, answer = int(record["input_length"]), int(record.get("output_length") or 0)
        blocks = np.array(hash_ids, dtype=np.int64)[:, None] * listed + np.arange(listed)
        tokens = blocks.ravel()[:length]
        # The answer, and tokens without a known id, are unique to the session.
        own = seed_of(name, str(session.num_turns)) + np.arange(length - len(tokens) + answer)
        session.add(np.concatenate((tokens, own[: length - len(tokens)])), self._block_size)
        session.time = session.time if time is None else time
        request = Access(list(session.ids), session.num_tokens, answer, session.time)
        session.add(own[len(own) - answer :], self._block_size)
        session.num_turns += 1
        return request

    def follows(self, record: Mapping[str, Any], delay_s: float) -> float | None:
        """Return the arrival of a turn without a time: `delay_s` after the previous turn, or None for a first turn."""
        session = self._sessions.get(str(record.get("session_id")))
        return None if session is None or session.time is None else session.time + delay_s


class SessionKind:
    """Decides whether lines with a session hold whole prompts or, as those of AIPerf and Dynamo, new tokens only.

    All lines of a file are of one kind: `holds_deltas`, None until a line shows it. Lines wait in
    `waiting` until it is known.
    """

    _MOST_WAITING = 10_000

    def __init__(self) -> None:
        self.holds_deltas: bool | None = None
        self.waiting: list[dict[str, Any]] = []
        self._heads: dict[str, int | None] = {}
        self._has_turns = self._has_ids = False

    def judge(self, record: dict[str, Any], has_time: bool, listed: int) -> None:
        """Compare a line, whose blocks have `listed` tokens, with the earlier ones of its session."""
        name, ids = str(record.get("session_id")), record.get("hash_ids") or []
        self.waiting.append(record)
        if record.get("delay") is not None:
            if self.holds_deltas is False:
                raise TraceError(WHOLE.format(name))
            self.holds_deltas = True
        if self.holds_deltas is not None:
            return
        self._has_ids |= bool(ids)
        # The id of a partial block changes when the block fills.
        head = ids[0] if ids and count_of(record.get("input_length"), "input_length") >= listed else None
        known = self._heads.get(name)
        if name in self._heads:
            self._has_turns = True
            if not has_time:
                self.holds_deltas = True
            elif None not in (head, known):
                self.holds_deltas = head != known
        self._heads[name] = head if known is None else known
        if len(self.waiting) >= self._MOST_WAITING:
            self.decide()

    def decide(self) -> None:
        """Decide if no line has shown the kind: sessions of several lines hold deltas."""
        if self.holds_deltas is None:
            if self._has_turns and not self._has_ids:
                raise TraceError(
                    "sessions without hash_ids: input_length may count a whole prompt or its new tokens. Call "
                    "session_id conversation if it counts whole prompts; give later turns a delay if it counts new ones"
                )
            self.holds_deltas = self._has_turns


class CountedConversations:
    """Conversations with token counts only: each prompt begins with the previous one.

    The first `shared_tokens` of all prompts are the same. `lengths` are the shortest and the longest prompt.
    """

    def __init__(self, block_size: int, shared_tokens: int) -> None:
        self._block_size = block_size
        self._num_shared = shared_tokens // block_size
        self._latest: dict[str, tuple[float, int]] = {}
        self.lengths = (1 << 62, 0)

    def access(self, name: str, place: float, length: int, answer: int, time: float | None) -> Access:
        """Return a request; `place` is its turn, or its time, and orders the requests of a conversation."""
        last_place, last_length = self._latest.get(name, (place, 0))
        is_falling = length != last_length and (place < last_place) != (length < last_length)
        if is_falling and max(length, last_length) >= SHORTEST_PROMPT:
            raise TraceError(
                f"conversation {name!r}: a later prompt has {min(length, last_length)} tokens, an earlier one "
                f"{max(length, last_length)}. The counts must be those of whole prompts, with cached tokens; where a "
                "history was cut, give the rest another name"
            )
        self._latest[name] = max((last_place, last_length), (place, length))
        self.lengths = (min(self.lengths[0], length), max(self.lengths[1], length))
        num_blocks = length // self._block_size
        shared = min(num_blocks, self._num_shared)
        ids = [*(seed_of() + np.arange(shared)).tolist(), *(seed_of(name) + np.arange(shared, num_blocks)).tolist()]
        return Access(ids, length, answer, time)


def count_of(value: Any, name: str) -> int:
    """Return a count of tokens, which a CSV holds as text."""
    try:
        count = int(str(value))
    except ValueError:
        count = -1
    if isinstance(value, bool) or count < 0:
        raise BadRecord(f"{name} must be an int >= 0, got {value!r}")
    return count


def seed_of(*names: str) -> int:
    """Return a number in 0..2**62-1 from which ids of tokens or blocks count, far from those of other names."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def chain(row: Any, block_size: int, parent: bytes = b"") -> tuple[list[int], bytes]:
    """Return an id in 0..2**63-1 for each full block of tokens, and the digest that chains the next block's."""
    ids = []
    for first in range(0, len(row) - block_size + 1, block_size):
        parent = hashlib.blake2b(parent + row[first : first + block_size].tobytes(), digest_size=8).digest()
        ids.append(int.from_bytes(parent, "little") >> 1)
    return ids, parent
