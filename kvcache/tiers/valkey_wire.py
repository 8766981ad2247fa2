"""Commands over many blocks on one connection to a Valkey or Redis server, straight from and into host memory.

A client library copies each value three times. Here a value is received into the host block itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcache.tiers.channel import READ_BYTES, Channel, WireError

MISSING = -1
"""Returned by `ServerChannel.read_value` for a key without a value."""
_MAX_VALUE_BYTES = 1 << 29
_MAX_LINE_BYTES = 4096


class ServerError(Exception):
    """The server answered one command with an error; the message is the first argument."""


def pack(*parts: bytes) -> bytes:
    """Return a command whose arguments are all small."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def pack_set(name: bytes, head: bytes, num_bytes: int, ttl_ms: int | None) -> tuple[bytes, bytes]:
    """Return the bytes of a SET command before and after its value."""
    start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b"
    before = start % (3 if ttl_ms is None else 5, len(name), name, len(head) + num_bytes, head)
    if ttl_ms is None:
        return before, b"\r\n"
    text = b"%d" % ttl_ms
    return before, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(text), text)


@contextmanager
def channel(client: Any, timeout_s: float) -> Iterator[ServerChannel]:
    """Take a connection from a client's pool, and return it; close it if anything was raised."""
    pool = client.connection_pool
    connection = pool.get_connection("GET")
    try:
        # The library cannot receive into given memory.
        yield ServerChannel(connection._sock, timeout_s)
    except BaseException:
        # The next batch must not read the rest of this batch's answers.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


class ServerChannel(Channel):
    """Sends batches of commands over a connection, and reads their answers in order.

    Sending one batch, or receiving one answer, may take `timeout_s`.
    """

    def read_count(self) -> int:
        """Read the answer of a command: its count, or 1 if it was confirmed."""
        kind, rest = self._line()
        if kind == b"+":
            return int(rest == b"OK")
        if kind == b":" and rest.isdigit():
            return int(rest)
        raise _error(kind, rest)

    def read_value(self, targets: Sequence[memoryview]) -> int:
        """Read a value into buffers, one after the other; return its length, or `MISSING`.

        If the length is not that of all buffers together, the value is skipped.
        """
        kind, rest = self._line()
        if (kind, rest) in ((b"$", b"-1"), (b"_", b"")):
            return MISSING
        if kind != b"$" or not rest.isdigit() or int(rest) > _MAX_VALUE_BYTES:
            raise _error(kind, rest)
        num_bytes = int(rest)
        if num_bytes == sum(map(len, targets)):
            for target in targets:
                self.reader.readinto(target)
        else:
            num_left = num_bytes
            while num_left:
                num_left -= len(self.reader.read(min(num_left, READ_BYTES)))
        if self.reader.read(2) != b"\r\n":
            raise WireError("a value does not end where its length says")
        return num_bytes

    def _line(self) -> tuple[bytes, bytes]:
        self.restart_clock()
        line = self.reader.readline(_MAX_LINE_BYTES)
        if len(line) == _MAX_LINE_BYTES:
            raise WireError("the server sends lines without an end")
        if len(line) < 3 or line[-2:] != b"\r\n":
            raise WireError(f"the server does not speak the protocol, but sends {line[:80]!r}")
        return line[:1], line[1:-2]


def _error(kind: bytes, rest: bytes) -> Exception:
    text = rest[:200].decode("utf-8", "backslashreplace")
    if kind == b"-":
        return ServerError(text)
    return WireError(f"the server does not speak the protocol, but sends {(kind + rest)[:80]!r}")
