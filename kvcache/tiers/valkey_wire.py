"""Commands over many blocks on one connection to a Valkey or Redis server, straight from and into host memory.

A client library copies each value three times. Here a value is received into the host block itself. Each answer has a
deadline, because a time limit on each read never ends for a server that sends a byte at a time.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MISSING = -1
"""Returned by `Channel.read_value` for a key without a value."""
_MAX_VALUE_BYTES = 1 << 29
_MAX_LINE_BYTES = 4096
_READ_BYTES = 1 << 14
_SEND_BUFFERS = 256
_LEAST_S = 0.001
# Servers write 64 KiB at a time; waking up for each costs more than the copy.
_WAKE_BYTES = 1 << 17


class WireError(OSError):
    """The server does not speak the protocol, or not in time; the connection must be closed."""


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
def channel(client: Any, timeout_s: float) -> Iterator[Channel]:
    """Take a connection from a client's pool, and return it; close it if anything was raised."""
    pool = client.connection_pool
    connection = pool.get_connection("GET")
    try:
        # The library cannot receive into given memory.
        yield Channel(connection._sock, timeout_s)
    except BaseException:
        # The next batch must not read the rest of this batch's answers.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


class _Receiver(io.RawIOBase):
    """The bytes that a socket receives until `end_s`."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.end_s = 0.0
        self.timeout_s = timeout_s
        self._socket = sock
        self._wake_bytes = 1

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        # The caller fills a buffer that is larger than its own, so all these bytes are on their way.
        wake_bytes = min(len(target), _WAKE_BYTES) if len(target) > _READ_BYTES else 1
        if wake_bytes != self._wake_bytes and type(self._socket) is socket.socket:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes
        try:
            # Or a stall near the end could double the time.
            self.limit_wait()
            num_bytes = self._socket.recv_into(target)
        except TimeoutError:
            raise self._too_late() from None
        if not num_bytes:
            raise WireError("the server closed the connection")
        self.check_time()
        return num_bytes

    def check_time(self) -> None:
        """Raise WireError if the time is over."""
        if time.monotonic() > self.end_s:
            raise self._too_late()

    def limit_wait(self) -> None:
        """Let the next call of the socket wait until `end_s` at most."""
        self._socket.settimeout(max(_LEAST_S, self.end_s - time.monotonic()))

    def _too_late(self) -> WireError:
        return WireError(f"an answer took more than {self.timeout_s:.3g} s")


class Channel:
    """Sends batches of commands over a connection, and reads their answers in order.

    Sending one batch, or receiving one answer, may take `timeout_s`.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket = sock
        self._receiver = _Receiver(sock, timeout_s)
        self.reader = io.BufferedReader(self._receiver, _READ_BYTES)

    def limit(self, timeout_s: float) -> None:
        """Set the time limit of later batches and answers, more than 0."""
        self._socket.settimeout(timeout_s)
        self._receiver.timeout_s = timeout_s

    def send(self, buffers: Iterable[Any]) -> None:
        """Send buffers, one after the other."""
        self._receiver.end_s = time.monotonic() + self._receiver.timeout_s
        try:
            waiting = list(buffers)
            if type(self._socket) is not socket.socket:
                for buffer in waiting:
                    self._receiver.limit_wait()
                    self._socket.sendall(buffer)
                return
            lengths = [len(buffer) for buffer in waiting]
            first, num_bytes = 0, sum(lengths)
            while num_bytes:
                self._receiver.limit_wait()
                num_sent = self._socket.sendmsg(waiting[first : first + _SEND_BUFFERS])
                num_bytes -= num_sent
                while num_sent and num_sent >= lengths[first]:
                    num_sent -= lengths[first]
                    first += 1
                if num_sent:
                    waiting[first] = memoryview(waiting[first])[num_sent:]
                    lengths[first] -= num_sent
                self._receiver.check_time()
        except TimeoutError:
            raise WireError(f"the server took nothing for {self._receiver.timeout_s:.3g} s") from None

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
                num_left -= len(self.reader.read(min(num_left, _READ_BYTES)))
        if self.reader.read(2) != b"\r\n":
            raise WireError("a value does not end where its length says")
        return num_bytes

    def _line(self) -> tuple[bytes, bytes]:
        self._receiver.end_s = time.monotonic() + self._receiver.timeout_s
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
