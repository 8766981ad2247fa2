"""Replies: answer the requests of routers, each as fast as its client reads.

A client that does not read its replies must hold neither the memory nor the thread of the publisher.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import zmq

from kvcache.exporters.kv_events.wire import END_OF_REPLAY

_MAX_OWED = 64  # replies that are sent at the same time
_MAX_REQUESTS = 256  # answered between two looks
_MAX_MESSAGES = 256  # to one client between two looks
_MAX_QUEUED = 64  # messages in the memory of each client's connection
_STANDSTILL_S = 10.0
_MAX_KEPT_BYTES = 1 << 28
MAX_FRAME_BYTES = 1 << 16
"""Of a request or a subscription."""

Messages = Iterator[tuple[bytes, bytes, bytes]]
"""Topic, number and payload of each message of a reply."""


class ReplayBuffer:
    """The last batches that were sent: at most `max_batches`, and 256 MiB. `num_batches` counts all."""

    def __init__(self, topic: bytes, max_batches: int) -> None:
        self.num_batches = 0
        self._topic, self._max_batches = topic, max_batches
        self._payloads: deque[bytes] = deque()
        self._num_bytes = 0

    def add(self, payload: bytes) -> tuple[bytes, bytes, bytes]:
        """Keep a batch, and return its message."""
        message = self._topic, self.num_batches.to_bytes(8, "big"), payload
        self.num_batches += 1
        self._payloads.append(payload)
        self._num_bytes += len(payload)
        # The last batch is kept, however large it is.
        while len(self._payloads) > (self._max_batches if self._num_bytes <= _MAX_KEPT_BYTES else 1):
            self._num_bytes -= len(self._payloads.popleft())
        return message

    def messages(self, request: bytes) -> Messages:
        """Yield the messages of a reply: every kept batch from the requested number on, and the end."""
        seq = int.from_bytes(request, "big")
        while seq < self.num_batches:
            # The client sees by the number that older batches are no longer kept.
            first = self.num_batches - len(self._payloads)
            seq = max(seq, first)
            yield self._topic, seq.to_bytes(8, "big"), self._payloads[seq - first]
            seq += 1
        yield b"", END_OF_REPLAY, b""


class Replies:
    """The ROUTER socket of a publisher, unbound, and the replies that clients are owed.

    `num_rejected` counts requests that were refused, or whose client no longer read.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.num_rejected = 0
        self._owed: dict[bytes, Iterator[None]] = {}  # replies that are being sent, by client
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
        for client in [*self._owed]:
            self._send_more(client)
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
                self._owed[client] = self._sending(client, messages_of(request))
                self._send_more(client)
        return bool(self._owed)

    def _send_more(self, client: bytes) -> None:
        if next(self._owed[client], self) is self:
            del self._owed[client]

    def _sending(self, client: bytes, messages: Messages) -> Iterator[None]:
        """Send a reply, and yield while its client takes no more. A client that has gone, or stands still, is left."""
        for number, message in enumerate(messages, 1):
            end_s = time.monotonic() + _STANDSTILL_S
            while True:
                try:
                    self.socket.send_multipart((client, b"", *message))
                    break
                except zmq.ZMQError as error:
                    if error.errno != zmq.EAGAIN or time.monotonic() > end_s:
                        self.num_rejected += 1
                        return
                yield
            if number % _MAX_MESSAGES == 0:
                yield
