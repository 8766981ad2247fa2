"""Replies: answer the requests of routers, each as fast as its client reads.

A client that does not read its replies must hold neither the memory nor the thread of the publisher.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import zmq

_MAX_OWED = 64  # replies that are sent at the same time
_MAX_REQUESTS = 256  # answered between two looks
_MAX_MESSAGES = 256  # to one client between two looks
_MAX_QUEUED = 64  # messages in the memory of each client's connection
_STANDSTILL_S = 10.0
MAX_FRAME_BYTES = 1 << 16
"""Of a request or a subscription."""

Messages = Iterator[tuple[bytes, bytes, bytes]]
"""Topic, number and payload of each message of a reply."""


class Replies:
    """The ROUTER socket of a publisher, unbound, and the replies that clients are owed.

    `num_rejected` counts requests that were refused, or whose client no longer read.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.num_rejected = 0
        # The messages of a client's reply, the next of them, and when the client took the last one.
        self._owed: dict[bytes, tuple[Messages, tuple[bytes, bytes, bytes] | None, float]] = {}
        # The limits apply to connections made after they were set.
        self.socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        self.socket.setsockopt(zmq.RCVHWM, 16)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.SNDTIMEO, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def answer(self, messages_of: Callable[[bytes], Messages]) -> bool:
        """Read the requests that have arrived, send more of every reply, and return whether any is unfinished.

        `messages_of` returns the messages of the reply to a request of 8 bytes.
        """
        for client, owed in [*self._owed.items()]:
            self._send(client, *owed)
        for _ in range(_MAX_REQUESTS):
            if not self.socket.poll(0):
                break
            frames = self.socket.recv_multipart()
            # REQ sockets put an empty frame before the request, DEALER sockets need not.
            client, request = frames[0], frames[-1]
            is_known = len(frames) in (2, 3) and len(request) == 8
            if not is_known or client in self._owed or len(self._owed) >= _MAX_OWED:
                self.num_rejected += 1
            else:
                messages = messages_of(request)
                self._send(client, messages, next(messages, None), time.monotonic())
        return bool(self._owed)

    def _send(
        self, client: bytes, messages: Messages, message: tuple[bytes, bytes, bytes] | None, since_s: float
    ) -> None:
        """Send as much of a reply as its client takes. A client that has gone, or stands still, may ask again."""
        self._owed.pop(client, None)
        for _ in range(_MAX_MESSAGES):
            if message is None:
                return
            try:
                self.socket.send_multipart((client, b"", *message))
            except zmq.ZMQError as error:
                if error.errno == zmq.EAGAIN and time.monotonic() - since_s <= _STANDSTILL_S:
                    break
                self.num_rejected += 1
                return
            message, since_s = next(messages, None), time.monotonic()
        self._owed[client] = messages, message, since_s
