"""KVEventSubscriber: a router's end: a view that is verified, and mended by replays and snapshots.

Messages get lost on the way; whoever acts on a view has to know whether it is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import zmq

from kvcache.exporters.kv_events.view import BlockView
from kvcache.exporters.kv_events.wire import DIGEST_PREFIX, END_OF_REPLAY, MAX_SEQ, SNAPSHOT_REQUEST, Digest, EventBatch


class KVEventSubscriber:
    """Keep a verified view of one publisher's blocks.

    Missed batches are replayed; where that fails, or a digest disagrees, the view is replaced by a snapshot.

    Parameters
    ----------
    endpoint, replay_endpoint : str
        The publisher's.
    topic : str
        The publisher's.
    timeout_s : float
        How long to wait for the next message of a replay or a snapshot.

    Attributes
    ----------
    view : BlockView
        What the publisher holds, as far as it has been heard.
    is_verified : bool
        Whether the last digest agreed with the view.

    Notes
    -----
    For one thread. A message that is no batch is counted in `rejected_messages` and ignored.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str, *, topic: str = "kv-events", timeout_s: float = 5.0
    ) -> None:
        self.view = BlockView()
        self.is_verified = False
        self.num_replays = self.num_snapshots = self.rejected_messages = 0
        self._timeout_ms = int(timeout_s * 1000)
        self._next: int | None = None
        self._last_ts = 0.0
        # Number and time of the latest batch on the SUB socket, which keeps a publisher's order.
        self._live = (-1, 0.0)
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self._digest_decoder = msgspec.msgpack.Decoder(Digest)
        self._topic = topic.encode()
        self._replay_endpoint = replay_endpoint
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.setsockopt(zmq.MAXMSGSIZE, 1 << 26)
        self._sub.subscribe(self._topic)
        self._sub.subscribe(DIGEST_PREFIX + self._topic)
        self._sub.connect(endpoint)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply the messages that have arrived, waiting at most `timeout_s` for the first; return their number.

        Parameters
        ----------
        timeout_s : float
            How long to wait for the first message.

        Returns
        -------
        int
            Messages applied.
        """
        num_messages = 0
        while self._sub.poll(0 if num_messages else int(timeout_s * 1000)):
            self.receive(self._sub.recv_multipart())
            num_messages += 1
        return num_messages

    def receive(self, frames: list[bytes]) -> None:
        """Apply one message, as it came from the socket.

        Parameters
        ----------
        frames : list of bytes
            Topic, sequence number, payload.
        """
        if len(frames) != 3 or len(frames[1]) != 8:
            self.rejected_messages += 1
            return
        topic, seq_bytes, payload = frames
        seq = int.from_bytes(seq_bytes, "big")
        if seq > MAX_SEQ:
            self.rejected_messages += 1
            return
        try:
            if topic == DIGEST_PREFIX + self._topic:
                self._check(self._digest_decoder.decode(payload))
            elif topic == self._topic:
                self._apply(seq, self._decoder.decode(payload))
        except (msgspec.DecodeError, ValueError):
            self.rejected_messages += 1

    def resync(self) -> None:
        """Replace the view by a snapshot of the publisher's; TimeoutError where none arrives whole."""
        self.num_snapshots += 1
        view = BlockView()
        try:
            for frames in self._ask(SNAPSHOT_REQUEST):
                if frames[-2] == END_OF_REPLAY:
                    end = self._digest_decoder.decode(frames[-1])
                    self.is_verified = view.digests() == (end.digests or {})
                    if self.is_verified:
                        self.view, self._next = view, end.seq
                        return
                    break
                batch = self._decoder.decode(frames[-1])
                self._last_ts = max(self._last_ts, batch.ts)
                view.apply(batch)
        except (msgspec.DecodeError, ValueError) as error:
            raise TimeoutError(f"no whole snapshot from {self._replay_endpoint}: {error}") from error
        raise TimeoutError(f"no whole snapshot from {self._replay_endpoint}")

    def close(self) -> None:
        """Release the sockets."""
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _apply(self, seq: int, batch: EventBatch) -> None:
        live_seq, live_ts = self._live
        # A new publisher's clock may be behind the old one's: the order of messages shows it, too.
        is_restart = seq < live_seq or (seq == live_seq and batch.ts != live_ts)
        self._live = seq, batch.ts
        if self._next is None or is_restart or (seq < self._next and batch.ts > self._last_ts):
            # The first message ever, or the first of a publisher that has started again.
            self.is_verified = False
            self._last_ts = batch.ts
            if seq == 0:
                self.view.clear()
                self._next = 0
            else:
                self.resync()
        if self._next is not None and seq > self._next:
            self._replay(self._next, seq)
        if self._next is None or seq < self._next:
            return  # the replay or the snapshot had it already
        self._take(seq, batch)

    def _take(self, seq: int, batch: EventBatch) -> None:
        self.view.apply(batch)
        self._next, self._last_ts = seq + 1, batch.ts

    def _replay(self, start_seq: int, end_seq: int) -> None:
        self.num_replays += 1
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            for frames in self._ask(start_seq.to_bytes(8, "big")):
                if frames[-2] == END_OF_REPLAY:
                    if self._next is not None and self._next >= end_seq:
                        return
                    break
                seq = int.from_bytes(frames[-2], "big")
                if self._next is None or seq > self._next:
                    break  # the buffer no longer has it
                if seq == self._next:
                    self._take(seq, self._decoder.decode(frames[-1]))
        self.resync()

    def _check(self, message: Digest) -> None:
        if message.digests is None:
            return
        if self._next is None or message.seq < self._live[0]:
            self.is_verified = False
            self._live = message.seq, 0.0
            self.resync()
        elif message.seq >= self._next:
            self._replay(self._next, message.seq + 1)
        if self._next == message.seq + 1:
            self.is_verified = self.view.digests() == message.digests
            if not self.is_verified:
                self.resync()

    def _ask(self, request: bytes) -> Iterator[list[bytes]]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", request))
            while socket.poll(self._timeout_ms):
                frames = socket.recv_multipart()
                if len(frames) < 2:
                    raise ValueError(f"{self._replay_endpoint} sent a reply of {len(frames)} frames")
                yield frames
                if frames[-2] == END_OF_REPLAY:
                    return
        finally:
            socket.close()
