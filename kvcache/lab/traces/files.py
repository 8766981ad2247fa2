"""Open files that are plain, gzip or zstd, and standard input; name other packed and binary files."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvcache.lab.traces.requests import TraceError
from kvcache.registry import how_to_install

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# The first bytes of files that are not text: their format, and the command that opens them.
_BINARY = {
    b"BZh": "bzip2: bzip2 -dc FILE > log.jsonl",
    b"\xfd7zXZ\0": "xz: xz -dc FILE > log.jsonl",
    b"PK\x03\x04": "zip: unzip -p FILE > log.jsonl (if it is a workbook of Excel, save it as CSV)",
    b"7z\xbc\xaf": "7z: 7z x -so FILE > log.jsonl",
    b"\x04\x22\x4d\x18": "lz4: lz4 -dc FILE > log.jsonl",
    b"SQLite format 3\0": "SQLite: sqlite3 -json FILE 'select * from TABLE' | jq -c '.[]' > log.jsonl "
    "(sqlite3 FILE .tables lists the tables)",
    b"PAR1": "Parquet: duckdb -c \"copy (from 'FILE') to 'log.jsonl' (format json)\"",
    b"Obj\x01": "Avro: duckdb -c \"load avro; copy (from read_avro('FILE')) to 'log.jsonl' (format json)\"",
    b"ARROW1": "Arrow: python -c \"import pandas as p; p.read_feather('FILE').to_json('log.jsonl', orient='records', "
    'lines=True)"',
}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Opened = tuple[io.BufferedReader, BinaryIO]
"""A file, and its content, unpacked."""


def open_lines(path: str | os.PathLike[str], is_text: bool = True) -> Opened:
    """Open a file, or standard input for ``-``; return it and its content, unpacked.

    TraceError if text is expected and the content is binary: it names the format and the command that opens it.
    """
    try:
        # A copy of the descriptor, so that closing the trace leaves standard input open.
        raw = os.fdopen(os.dup(0), "rb") if str(path) == "-" else Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise TraceError(f"cannot open trace {path}: {error.strerror}") from error
    try:
        content = _unpacked(raw)
        return raw, _text(content, path) if is_text else content
    except OSError as error:
        raw.close()
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from error
    except TraceError:
        raw.close()
        raise


def _text(content: Any, path: str | os.PathLike[str]) -> BinaryIO:
    """Return text as UTF-8; TraceError naming the format of a binary file."""
    try:
        head = content.peek(1 << 10)
    except (OSError, EOFError, zlib.error):
        return cast(BinaryIO, content)  # the reader names the error and its line
    if head.startswith(_UTF16):
        return io.BufferedReader(_Recoded(content), 1 << 18)
    for magic, text in _BINARY.items():
        if head.startswith(magic):
            raise TraceError(f"{path} is {text}")
    if head[257:262] == b"ustar":
        raise TraceError(f"{path} is a tar archive: tar -xOf FILE > log.jsonl")
    if b"\0" in head:
        raise TraceError(f"{path} is binary: write it as JSONL or CSV (oracleGeneral: --format oracleGeneral)")
    return cast(BinaryIO, content)


class _Recoded(io.RawIOBase):
    """UTF-16 text as UTF-8."""

    def __init__(self, content: BinaryIO) -> None:
        super().__init__()
        self._content = content
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (chunk := self._content.read(1 << 16)):
            self._rest = self._decoder.decode(chunk).encode()
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _unpacked(raw: io.BufferedReader) -> BinaryIO:
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
        # The largest window of `zstd --long=31` is 2 GiB.
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
