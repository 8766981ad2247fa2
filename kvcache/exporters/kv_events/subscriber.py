"""KVEventSubscriber: a router's end: a view of one publisher's blocks, which replays repair."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import zmq

from kvcache.exporters.kv_events.view import BlockView
from kvcache.exporters.kv_events.wire import END_OF_REPLAY, MAX_SEQ, EventBatch

_MAX_WAITING = 1000
_MAX_MESSAGE_BYTES = 1 << 26
_MAX_ANSWER_BYTES = 1 << 29  # a full replay buffer has 256 MiB
_POLL_S = 1.0


class KVEventSubscriber:
    """Keep a view of one publisher's blocks.

    Missed batches are replayed, those before the first message too. If the publisher no longer has them, the view
    begins again with the batches that it has: it may lack blocks, but lists none that was evicted meanwhile.

    Parameters
    ----------
    endpoint, replay_endpoint : str
        The publisher's.
    topic : str
        Beginning of the publisher's topic.
    timeout_s : float
        How long a replay may take.

    Attributes
    ----------
    view : BlockView
        The publisher's blocks, as far as its messages have arrived.
    num_replays, num_gaps, rejected_messages : int
        Replays requested, replays that came too late, and ignored messages, which are not batches of maps.

    Notes
    -----
    For one thread. A number that falls shows that another publisher has taken the place: the view begins anew.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: str = "kv@", timeout_s: float = 5.0) -> None:
        self.view = BlockView()
        self.num_replays = self.num_gaps = self.rejected_messages = 0
        self._timeout_s = timeout_s
        # The number of the batch that comes next, and of the latest on the SUB socket, which keeps a publisher's order.
        self._next, self._live = 0, -1
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self._topic = topic.encode()
        self._replay_endpoint = replay_endpoint
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, _MAX_WAITING)  # messages beyond it are lost, and replayed
        self._sub.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._sub.subscribe(self._topic)
        self._sub.connect(endpoint)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply the messages that have arrived, waiting at most `timeout_s` for the first; return their number.

        It returns after a second although more messages arrive, and at most the subscriber's own `timeout_s` later if
        a replay is awaited.
        """
        num_messages, end_s = 0, float("inf")
        while time.monotonic() < end_s and self._sub.poll(0 if num_messages else int(timeout_s * 1000)):
            frames = self._sub.recv_multipart()
            if num_messages == 0:
                end_s = time.monotonic() + _POLL_S
            self.receive(frames)
            num_messages += 1
        return num_messages

    def receive(self, frames: list[bytes]) -> None:
        """Apply one message: `frames` are topic, sequence number and payload, as they came from a socket.

        Raises
        ------
        TimeoutError
            Batches are missing, and no whole replay came in time. The next message asks for them again.
        """
        seq = int.from_bytes(frames[1], "big") if len(frames) == 3 and len(frames[1]) == 8 else MAX_SEQ + 1
        if seq > MAX_SEQ or not frames[0].startswith(self._topic):
            self.rejected_messages += 1
            return
        try:
            batch = self._decoder.decode(frames[2])
        except (msgspec.DecodeError, ValueError):
            self.rejected_messages += 1
            return
        if seq <= self._live:
            self.view.clear()
            self._next = 0
        self._live = seq
        if seq > self._next:
            self.replay()
        self._apply(seq, batch)

    def replay(self) -> None:
        """Apply the batches from the next one on that the publisher has kept: for a router that starts late.

        Raises
        ------
        TimeoutError
            No whole replay came in time.
        """
        self.num_replays += 1
        try:
            for frames in self._ask(self._next.to_bytes(8, "big")):
                self._apply(int.from_bytes(frames[-2], "big"), self._decoder.decode(frames[-1]))
        except (msgspec.DecodeError, ValueError) as error:
            raise TimeoutError(f"no whole replay from {self._replay_endpoint}: {error}") from error

    def close(self) -> None:
        """Release the sockets."""
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _apply(self, seq: int, batch: EventBatch) -> None:
        if seq > self._next:
            # The missing batches may have removed any block.
            self.view.clear()
            self.num_gaps += 1
        if seq >= self._next:  # a replay may have had it
            self.view.apply(batch)
            self._next = seq + 1

    def _ask(self, request: bytes) -> Iterator[list[bytes]]:
        """Yield the messages of the answer, up to its end."""
        num_bytes, end_s = 0, time.monotonic() + self._timeout_s
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 10 * _MAX_WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", request))
            while (remaining_s := end_s - time.monotonic()) > 0 and socket.poll(int(remaining_s * 1000) + 1):
                frames = socket.recv_multipart()
                num_bytes += sum(map(len, frames))
                if len(frames) < 2 or num_bytes > _MAX_ANSWER_BYTES:
                    raise ValueError(f"{len(frames)} frames, in all {num_bytes} bytes")
                if frames[-2] == END_OF_REPLAY:
                    return
                yield frames
        finally:
            socket.close()
        raise TimeoutError(f"no whole replay from {self._replay_endpoint}")
