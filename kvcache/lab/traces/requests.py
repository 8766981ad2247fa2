"""A request of a trace, and the interface of all sources of requests."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    Float64Array = npt.NDArray[np.float64]
    Int64Array = npt.NDArray[np.int64]


_MAX_TOKENS = 1 << 40
"""Larger than any prompt."""
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""The seconds of each unit of time."""


class ReplayError(Exception):
    """A replay has failed; its counts are invalid."""


class DataMismatchError(ReplayError):
    """A loaded block has other bytes than were stored."""


class TransferFailedError(ReplayError):
    """A handler could not move blocks."""


class TraceError(ValueError):
    """A trace cannot be read; the message holds the file, the line and the value."""


class BadRecord(ValueError):
    """A line, record or session of a trace or log is invalid."""


def tokens_of(value: object, name: str) -> int:
    """Return a number of tokens from a record; sums of them fit into 64 bits."""
    if type(value) is not int or not 0 <= value <= _MAX_TOKENS:
        raise BadRecord(f"{name} must be an int in 0..2**40, got {json.dumps(value):.60}")
    return value


Tokenize = Callable[[Any], Iterable[int]]
"""Turns a text, or a list of chat messages, into token ids."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a file.

    `listed` is the number of tokens of a block in a trace, by default that of its format; `replayed` that of a block
    made from a log, by default `listed`, else 16. `only` maps fields to the values that records must have.
    `prompt_fields` replaces the format's own fields of the prompt. Times that are numbers are in `time_unit`, and ISO
    8601 times without an offset in `time_zone`. Prompts of counted conversations share their first `shared_tokens`
    tokens.
    """

    listed: int | None = None
    replayed: int | None = None
    skip_bad: bool = False
    time_unit: str | None = None
    time_zone: tzinfo = UTC
    only: Mapping[str, str] = field(default_factory=dict)
    prompt_fields: tuple[str, ...] = ()
    tokenize: Tokenize | None = None
    shared_tokens: int = 0
    log_format: str | None = None


@dataclass(slots=True)
class Reading:
    """Facts on the records of a file, for the first lines of a report.

    Requests by `models` and by the fields of their `prompts`; records that were `left_out`, by reason; `ignored` fields
    that may be part of prompts; how many records were `expanded`, because they hold several requests.
    """

    models: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    ignored: dict[str, None] = field(default_factory=dict)
    expanded: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request: prefix-chained ids of its blocks (int64), tokens of prompt and answer, and arrival.

    `output_length` is 0 if the trace does not list it; `arrival_s` counts from the beginning of the trace.
    """

    hash_ids: Int64Array
    input_length: int
    output_length: int
    arrival_s: float


class Closable(ABC):
    """An object that a `with` statement closes."""

    @abstractmethod
    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TraceFile(Closable):
    """Requests that are read once from a file or folder: a context manager and an iterator.

    `num_skipped` counts bad lines or sessions so far, `num_untimed` lines without a time; `size_bytes` is the size of
    all files, at least 1, unknown for a pipe.
    """

    path: Path
    name: str
    format: str
    block_size: int
    num_skipped: int
    num_untimed: int = 0
    reading: Reading | None = None
    size_bytes: int

    @property
    @abstractmethod
    def position_bytes(self) -> int:
        """Bytes of `size_bytes` read so far; 0 for a pipe."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order of arrival."""

    def facts(self) -> dict[str, Any]:
        """Return the description of the source for a report."""
        facts = {"kind": "trace", "file": str(self.path), "format": self.format, "skipped_lines": self.num_skipped}
        names = ("models", "prompts", "left_out", "ignored", "expanded") if self.reading else ()
        return facts | {name: value for name in names if (value := getattr(self.reading, name))}
