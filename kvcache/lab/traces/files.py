"""Open files that are plain, gzip or zstd, and standard input."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvcache.lab.traces.requests import TraceError
from kvcache.registry import how_to_install

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

Opened = tuple[io.BufferedReader, BinaryIO]
"""A file, and its content, unpacked."""


def open_lines(path: str | os.PathLike[str]) -> Opened:
    """Open a file, or standard input for ``-``; return it and its content, unpacked."""
    try:
        # A copy of the descriptor, so that closing the trace leaves standard input open.
        raw = os.fdopen(os.dup(0), "rb") if str(path) == "-" else Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise TraceError(f"cannot open trace {path}: {error.strerror}") from error
    try:
        return raw, unpacked(raw)
    except OSError as error:
        raw.close()
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from error


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
