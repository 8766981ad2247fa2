"""Channel: bytes over one connection, sent from and received into host memory, each answer within a deadline.

A limit on each read would never expire if a server sends one byte at a time.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterable
from typing import Any

READ_BYTES = 1 << 14
_SEND_BUFFERS = 256
_LEAST_S = 0.001
# Servers write 64 KiB at a time; waking up for each costs more than the copy.
_WAKE_BYTES = 1 << 17


class WireError(OSError):
    """The server does not speak the protocol, or not in time; the connection must be closed."""


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
        wake_bytes = min(len(target), _WAKE_BYTES) if len(target) > READ_BYTES else 1
        if wake_bytes != self._wake_bytes and type(self._socket) is socket.socket:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes
        try:
            # Without this limit, a stall near the end could double the time.
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
        """Limit the next call of the socket to `end_s`."""
        self._socket.settimeout(max(_LEAST_S, self.end_s - time.monotonic()))

    def _too_late(self) -> WireError:
        return WireError(f"an answer took more than {self.timeout_s:.3g} s")


class Channel:
    """Sends batches of buffers over a connection, and reads answers in order from `reader`.

    Sending one batch, or receiving one answer, may take `timeout_s`.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket = sock
        self._receiver = _Receiver(sock, timeout_s)
        self.reader = io.BufferedReader(self._receiver, READ_BYTES)

    def limit(self, timeout_s: float) -> None:
        """Set the time limit of later batches and answers, more than 0."""
        self._socket.settimeout(timeout_s)
        self._receiver.timeout_s = timeout_s

    def send(self, buffers: Iterable[Any]) -> None:
        """Send buffers, one after the other."""
        self.restart_clock()
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

    def restart_clock(self) -> None:
        """Restart the time limit for the next batch or answer."""
        self._receiver.end_s = time.monotonic() + self._receiver.timeout_s
