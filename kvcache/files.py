"""Write whole buffers to files: one system call may write only a part."""

from __future__ import annotations

import errno
import os


def write_all(fd: int, body: bytes | bytearray | memoryview, offset: int | None = None) -> None:
    """Write all bytes, at an offset or where the file stands; raise OSError if a call writes nothing."""
    view, written = memoryview(body), 0
    while written < len(view):
        rest = view[written:]
        num_bytes = os.write(fd, rest) if offset is None else os.pwrite(fd, rest, offset + written)
        if not num_bytes:
            raise OSError(errno.EIO, f"{written} of {len(view)} bytes were written")
        written += num_bytes
