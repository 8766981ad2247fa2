"""Read recorded sessions of agents, and merge them into the traffic of some users.

A file holds one session as JSON: ``block_size``, ``requests`` with ``t`` (seconds since the session began), ``in``,
``out`` and ``hash_ids``; a request of a sub-agent holds ``requests`` of its own. Ids belong to the session
(``hash_id_scope: "local"``) except those of the system prompt and the tools, which sessions of the same lengths share.
Only sessions under way are in memory.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import zlib
from collections.abc import Generator, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcache.lab.traces.files import Opened, open_lines
from kvcache.lab.traces.requests import BadRecord, Request, TraceError, TraceFile, tokens_of

if TYPE_CHECKING:
    from kvcache.lab.traces.requests import Int64Array

_SUFFIXES = tuple(f".{kind}{packed}" for kind in ("json", "jsonl") for packed in ("", ".gz", ".zst"))
_STAGGER_S = 600.0
_MAX_S = 1e9


class _Step(NamedTuple):
    at_s: float
    ids: Int64Array
    input_length: int
    output_length: int


class SessionTrace(TraceFile):
    """The requests of recorded sessions, as of `users` people; each begins the next session after the last.

    `path` is a folder of session files (``.json``, ``.jsonl``, also packed with gzip or zstd) or one file, which may be
    `opened` already; each line of ``.jsonl`` is a session. People begin within the first ten minutes; `seed` draws
    when, and the order of the files. Raise TraceError if no session is found, or, unless `skip_bad`, if one is bad.
    """

    format = "sessions"
    position_bytes = 0

    def __init__(
        self,
        path: str | os.PathLike[str],
        users: int = 40,
        seed: int = 0,
        skip_bad: bool = False,
        opened: Opened | None = None,
    ) -> None:
        if type(users) is not int or users < 1:
            raise ValueError(f"users must be an int >= 1, got {users!r}")
        self.path = Path(path)
        self.name = self.path.name or str(path)
        self.num_skipped = 0
        self.block_size = 0
        self._skip_bad = skip_bad
        self._users = users
        self._draw = random.Random(seed)
        self._num_ids = 0
        self._shared: dict[tuple[int, int, int], int] = {}
        self._global: dict[int, int] = {}
        self._files = [self.path] if opened else _session_files(self.path)
        self._opened = opened
        self.size_bytes = max(1, sum(file.stat().st_size for file in self._files if file.exists()))
        self._draw.shuffle(self._files)
        self._sessions = self._read()
        self._first = next(self._sessions, None)
        if self._first is None:
            skipped = f" ({self.num_skipped} bad ones)" if self.num_skipped else ""
            raise TraceError(f"{self.path} holds no session{skipped}")

    def close(self) -> None:
        """Close the open file."""
        self._sessions.close()

    def __iter__(self) -> Iterator[Request]:
        # (when its next request comes, user, when its session began, the session, which request)
        due: list[tuple[float, int, float, list[_Step], int]] = []
        for user in range(self._users):
            session = self._next_session()
            if session is None:
                break
            start_s = self._draw.uniform(0.0, _STAGGER_S) if user else 0.0
            heapq.heappush(due, (start_s + session[0].at_s, user, start_s, session, 0))
        while due:
            now_s, user, start_s, session, i = heapq.heappop(due)
            step = session[i]
            yield Request(step.ids, step.input_length, step.output_length, now_s)
            if i + 1 < len(session):
                heapq.heappush(due, (start_s + session[i + 1].at_s, user, start_s, session, i + 1))
                continue
            following = self._next_session()
            if following is not None:
                heapq.heappush(due, (now_s + following[0].at_s, user, now_s, following, 0))

    def _next_session(self) -> list[_Step] | None:
        session, self._first = self._first, None
        return next(self._sessions, None) if session is None else session

    def _read(self) -> Generator[list[_Step], None, None]:
        for file in self._files:
            for where, text in _documents(file, self._opened):
                try:
                    if isinstance(text, Exception):
                        raise BadRecord(f"cannot be read: {text}")
                    session = self._parse(text)
                except BadRecord as error:
                    if not self._skip_bad:
                        raise TraceError(f"{where}: {error}") from error
                    self.num_skipped += 1
                    continue
                if session:
                    yield session
            self.position_bytes += file.stat().st_size if file.exists() else 0

    def _parse(self, text: bytes) -> list[_Step]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("requests"), list):
            raise BadRecord("must be a JSON object with a list 'requests'")
        block_size = record.get("block_size")
        if type(block_size) is not int or not 1 <= block_size <= 1 << 20:
            raise BadRecord(f"block_size must be an int >= 1, got {block_size!r}")
        if self.block_size and block_size != self.block_size:
            raise BadRecord(f"block_size must be {self.block_size} as in the sessions before, got {block_size}")
        scope = record.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise BadRecord(f"hash_id_scope must be 'local' or 'global', got {scope!r}")
        tools, system = (tokens_of(record.get(name, 0), name) for name in ("tool_tokens", "system_tokens"))
        ids_of = self._global if scope == "global" else {}
        num_shared = (tools + system) // block_size if scope == "local" else 0
        steps: list[_Step] = []
        for request in _flat(record["requests"], 0.0):
            named = request.get("hash_ids")
            if not isinstance(named, list) or any(type(value) is not int for value in named):
                raise BadRecord("hash_ids must be a list of ints")
            input_length = tokens_of(request.get("in"), "in")
            num_full, rest = divmod(input_length, block_size)
            if len(named) - num_full not in (0, rest > 0):
                raise BadRecord(
                    f"hash_ids must be those of {input_length} tokens in blocks of {block_size}, got {len(named)}"
                )
            ids = []
            for place, value in enumerate(named):
                found = ids_of.get(value)
                if found is None:
                    # Local ids differ between sessions, but blocks of the same tools and system prompt are the same.
                    if place < num_shared:
                        found = self._shared.setdefault((tools, system, place), self._num_ids)
                    else:
                        found = self._num_ids
                    self._num_ids += found == self._num_ids
                    ids_of[value] = found
                ids.append(found)
            out = tokens_of(request.get("out", 0), "out")
            steps.append(_Step(request["at_s"], np.array(ids, dtype=np.int64), input_length, out))
        steps.sort(key=lambda step: step.at_s)
        self.block_size = block_size
        return steps


def is_session(head: bytes) -> bool:
    """Return whether a file with these first bytes has sessions: objects with ``requests`` and a ``block_size``."""
    before, _, behind = head.partition(b'"requests"')
    is_object = head.lstrip()[:1] == b"{" and b'"hash_ids"' not in before
    return is_object and bool(behind) and (b'"hash_ids"' in behind or b'"block_size"' in head)


def _session_files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            path.stat()
            return [path]
        return sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    except OSError as error:
        raise TraceError(f"cannot open sessions {path}: {error.strerror}") from error


def _documents(path: Path, opened: Opened | None = None) -> Iterator[tuple[str, bytes | Exception]]:
    """Yield the name of each document of a file, and its text or the error of reading it."""
    try:
        raw, file = opened or open_lines(path)
        with raw:
            line = file.readline()
            if ".jsonl" not in path.name and (".json" in path.name or not _is_json(line)):
                yield str(path), line + file.read()
                return
            for number, text in enumerate(chain([line], file), 1):
                if not text.isspace():
                    yield f"{path}:{number}", text
    except (OSError, EOFError, zlib.error) as error:
        yield str(path), error


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _flat(requests: list[Any], base_s: float) -> Iterator[dict[str, Any]]:
    """Yield the requests of a session and of its sub-agents, with their times in the session."""
    for request in requests:
        if not isinstance(request, Mapping):
            raise BadRecord("requests must be JSON objects")
        at_s: Any = request.get("t")
        if type(at_s) not in (int, float) or not 0 <= at_s <= _MAX_S:
            raise BadRecord(f"t must be seconds in 0..1e9, got {at_s!r}")
        nested = request.get("requests")
        if isinstance(nested, list):
            # Recorders count from the beginning of either the session or the sub-agent.
            times = [inner.get("t") for inner in nested if isinstance(inner, Mapping)]
            begins = [t for t in times if isinstance(t, int | float)]
            yield from _flat(nested, base_s if begins and min(begins) >= at_s else base_s + at_s)
        if "hash_ids" in request or not isinstance(nested, list):
            yield {**request, "at_s": base_s + at_s}
