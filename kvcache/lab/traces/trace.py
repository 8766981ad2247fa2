"""Read the requests of a file, one record at a time: traces, and logs of prompts, counts or accesses.

A trace may be larger than memory; `kvcache.lab.traces.compact.CompactTrace` holds a whole one in files.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.lab.traces.files import Opened, open_lines
from kvcache.lab.traces.formats import delimiter_of, describe_text
from kvcache.lab.traces.reader import ORACLE_GENERAL, RecordReader
from kvcache.lab.traces.records import shown
from kvcache.lab.traces.requests import BadRecord, ReadOptions, Request, TraceError, TraceFile
from kvcache.lab.traces.sessions import SessionTrace, is_session

if TYPE_CHECKING:
    from kvcache.lab.traces.turns import Access

FORMATS = ("jsonl", "oracleGeneral", "csv")
_PEEKED_BYTES = 1 << 14
_VLLM = re.compile(r"(?:\(\S+ pid=\d+\) )?[A-Z]+ (\d\d-\d\d \d\d:\d\d:\d\d) ")
_VLLM_PROMPT = re.compile(r"""[ :]prompt: ('(?:[^'\\]|\\.)+'|"(?:[^"\\]|\\.)+"), """)
_VLLM_TOKENS = re.compile(r"prompt_token_ids: (\[[\d, ]+\])")


def open_trace(
    path: str | os.PathLike[str], options: ReadOptions | None = None, users: int = 40, seed: int = 0
) -> TraceFile:
    """Open a file of requests, or recorded sessions that `users` people repeat."""
    options = options or ReadOptions()
    if Path(path).is_dir():
        return SessionTrace(path, users, seed, options.skip_bad)
    opened = open_lines(path, _format_of(path, options) != "oracleGeneral")
    try:
        # Standard input can be read only once, so peek at its first bytes, which stay in the buffer.
        if is_session(opened[1].peek(_PEEKED_BYTES)):  # type: ignore[attr-defined]
            return SessionTrace(path, users, seed, options.skip_bad, opened)
    except (OSError, EOFError, zlib.error):
        pass  # Trace names the error and its line.
    return Trace(path, options, opened)


class Trace(TraceFile):
    """The requests of a file, in file order; the first valid record sets the format.

    The file is plain, gzip or zstd, detected by its first bytes; ``-`` is standard input. A line whose ids and tokens
    do not agree with its block size is bad. Bad lines raise TraceError, or are counted in `num_skipped` if
    `options.skip_bad`.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: ReadOptions | None = None, opened: Opened | None = None
    ) -> None:
        self.path = Path(path)
        self.name = "standard input" if str(path) == "-" else self.path.name
        self.num_skipped = 0
        self.num_untimed = 0
        self._first_error = ""
        self._options = options or ReadOptions()
        self._file_format = _format_of(path, self._options)
        self._reader = RecordReader(self._options)
        self.reading = self._reader.reading
        self._raw, self._content = opened or open_lines(path, self._file_format != "oracleGeneral")
        try:
            self.size_bytes = max(1, os.fstat(self._raw.fileno()).st_size)
            self._requests = self._read()
            self._first: Request | None = next(self._requests, None)
            if self._first is None:
                left_out = [f"{number:,} {reason}" for reason, number in self.reading.left_out.items()]
                skipped = [f"{self.num_skipped} bad lines; the first: {self._first_error}"] if self.num_skipped else []
                reasons = ", ".join([*skipped, *left_out])
                raise TraceError(f"trace {self.path} holds no request{f' ({reasons})' if reasons else ''}")
        except BaseException:
            self._raw.close()
            raise

    @property
    def format(self) -> str:  # type: ignore[override]
        """The format of the first valid record."""
        return self._reader.format

    @property
    def block_size(self) -> int:  # type: ignore[override]
        """The number of tokens of a request's block."""
        return self._reader.block_size

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
        last_s = -1.0
        for accesses in self._accesses():
            for ids, input_length, output_length, time in accesses:
                self.num_untimed += time is None
                # Without times, a second between requests keeps their order.
                last_s = last_s + 1 if time is None else time
                yield Request(np.asarray(ids, np.int64), input_length, output_length, last_s)

    def _accesses(self) -> Iterator[list[Access]]:
        records = self._records()
        number = 0
        while True:
            try:
                number, record = next(records)
                if isinstance(record, bytes) and self._file_format != "oracleGeneral":
                    record = parse_object(record, not self._reader.format)
                    yield self._reader.read(record)
                else:
                    yield self._reader.read(record, is_row=True)
            except StopIteration:
                break
            except (BadRecord, TraceError) as error:
                if isinstance(error, TraceError) or not self._options.skip_bad:
                    raise TraceError(f"{self.path}:{number}: {error}") from error
                self.num_skipped += 1
                self._first_error = self._first_error or f"line {number}: {error}"
            except (OSError, EOFError, zlib.error, csv.Error) as error:
                raise TraceError(f"{self.path}:{number + 1}: cannot be read: {error}") from error
        try:
            yield self._reader.end()
        except (BadRecord, TraceError) as error:
            raise TraceError(f"{self.path}: {error}") from error

    def _records(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of each line or record, and the record: bytes, or the fields of a CSV."""
        content = self._content
        if self._file_format == "oracleGeneral":
            for number, record in enumerate(iter(lambda: content.read(ORACLE_GENERAL.size), b""), 1):
                yield number, record
            return
        first = content.readline()
        head = first[:_PEEKED_BYTES].decode("utf-8", "replace")
        delimiter = delimiter_of(head)
        lines = chain([first] if first else (), content)
        if delimiter or self._file_format == "csv":
            csv.field_size_limit(sys.maxsize)
            text = (line.decode("utf-8-sig", "replace") for line in lines)
            table = csv.DictReader(text, delimiter=delimiter or ",", skipinitialspace=True)
            for row in table:
                yield table.line_num, row
        elif _VLLM.match(head):
            yield from _vllm_requests(lines)
        else:
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield number, line


def _vllm_requests(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the prompts in vLLM's own log."""
    has_prompt = False
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", "replace")
        time = _VLLM.match(text)
        tokens, prompt = _VLLM_TOKENS.search(text), _VLLM_PROMPT.search(text)
        if time and (tokens or prompt):
            has_prompt = True
            # The log has no year. In a year near 1970, reports show durations, not dates.
            record: dict[str, Any] = {"time": f"1972-{time[1]}"}
            if tokens:
                record["prompt_token_ids"] = json.loads(tokens[1])
            elif prompt:
                record["prompt"] = ast.literal_eval(prompt[1])
            yield number, record
    if not has_prompt:
        raise TraceError(
            "vLLM's log without prompts: start it with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, or log the "
            "requests in front of it"
        )


def _format_of(path: str | os.PathLike[str], options: ReadOptions) -> str:
    name = Path(path).name.lower()
    by_name = "oracleGeneral" if "oraclegeneral" in name else "csv" if ".csv" in name or ".tsv" in name else "jsonl"
    return options.log_format or by_name


def parse_object(line: bytes, is_first: bool) -> dict[str, Any]:
    """Return the object of a line; raise BadRecord, or TraceError if a first line shows a file of another format."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        text = line.strip().decode("utf-8", "replace")
        if text.endswith("},"):
            return parse_object(text[:-1].encode(), is_first)
        known = describe_text(text)
        # If bad lines were skipped here, a file without any good line would seem empty.
        if known and is_first:
            raise TraceError(known) from error
        raise BadRecord(f"not JSON ({error}): {shown(text)}") from error
    if isinstance(record, dict):
        return record
    if isinstance(record, list) and is_first:
        raise TraceError(describe_text("["))
    raise BadRecord(f"must be a JSON object, got {shown(record)}")
