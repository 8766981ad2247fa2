"""KVEventSubscriber: a router's end: a view that digests verify, and that replays and snapshots repair.

Messages get lost on the way; a router that acts on a view has to know whether it is right.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec
import zmq

from kvcache.exporters.kv_events.view import BlockView
from kvcache.exporters.kv_events.wire import (
    DIGEST_PREFIX,
    DIGEST_REQUEST,
    END_OF_REPLAY,
    MAX_SEQ,
    SNAPSHOT_REQUEST,
    Digest,
    EventBatch,
)

_CONNECTIONS = "inproc://connections"
_MAX_WAITING = 1000
_MAX_MESSAGE_BYTES = 1 << 26
_MAX_ANSWER_BYTES = 1 << 29  # a full replay buffer has 256 MiB, a snapshot some 40 bytes a block
_POLL_S = 1.0


class KVEventSubscriber:
    """Keep a verified view of one publisher's blocks.

    Missed batches are replayed. If that fails, if a digest disagrees, or if another publisher has taken the place of
    the view's, a snapshot replaces the view.

    Parameters
    ----------
    endpoint, replay_endpoint : str
        The publisher's.
    topic : str
        Beginning of the publisher's topic.
    timeout_s : float
        How long the answers to one message may take: a digest, a replay, and a snapshot if one is needed.

    Attributes
    ----------
    view : BlockView
        The publisher's blocks, as far as its messages have arrived.
    is_verified : bool
        Whether the last digest agreed with the view.

    Notes
    -----
    For one thread. A message that is not a batch of maps is counted in `rejected_messages` and ignored. An answer of
    more than 512 MiB is dropped. A restart of the publisher shows by its epoch. The subscriber asks for the epoch when
    `poll` finds a new connection, and before batches are replayed.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: str = "kv", timeout_s: float = 5.0) -> None:
        self.view = BlockView()
        self.is_verified = False
        self.num_replays = self.num_snapshots = self.rejected_messages = 0
        self._timeout_s, self._end_s = timeout_s, 0.0
        self._next: int | None = None
        self._epoch: int | None = None  # of the view's publisher; None: unknown
        self._must_verify = False
        # Number and time of the latest batch on the SUB socket, which keeps a publisher's order.
        self._live = (-1, 0.0)
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self._digest_decoder = msgspec.msgpack.Decoder(Digest)
        self._topic = topic.encode()
        self._replay_endpoint = replay_endpoint
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, _MAX_WAITING)  # messages beyond it are lost, and replayed
        self._sub.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._sub.subscribe(self._topic)
        self._sub.subscribe(DIGEST_PREFIX + self._topic)
        self._sub.monitor(_CONNECTIONS, zmq.EVENT_CONNECTED)
        self._connections = self._context.socket(zmq.PAIR)
        self._connections.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread would wait for room
        self._connections.connect(_CONNECTIONS)
        self._sub.connect(endpoint)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply the messages that have arrived, waiting at most `timeout_s` for the first; return their number.

        It returns after a second although more messages arrive, and at most the subscriber's own `timeout_s` later if
        an answer is awaited.
        """
        num_messages, end_s = 0, float("inf")
        self._verify_after_connecting()
        while time.monotonic() < end_s and self._sub.poll(0 if num_messages else int(timeout_s * 1000)):
            frames = self._sub.recv_multipart()
            if num_messages == 0:
                end_s = time.monotonic() + _POLL_S
            if not self._verify_after_connecting():
                self.receive(frames)
            num_messages += 1
        return num_messages

    def receive(self, frames: list[bytes]) -> None:
        """Apply one message: `frames` are topic, sequence number and payload, as they came from a socket."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.rejected_messages += 1
            return
        topic, seq_bytes, payload = frames
        seq = int.from_bytes(seq_bytes, "big")
        if seq > MAX_SEQ:
            self.rejected_messages += 1
            return
        if self._must_verify:
            self.verify()
        self._end_s = time.monotonic() + self._timeout_s
        try:
            if topic.startswith(DIGEST_PREFIX + self._topic):
                self._check(self._digest_decoder.decode(payload))
            elif topic.startswith(self._topic):
                self._apply(seq, self._decoder.decode(payload))
        except (msgspec.DecodeError, ValueError):
            self.rejected_messages += 1

    def verify(self) -> None:
        """Ask the publisher for a digest, and repair the view if it is wrong: for publishers that send no digests.

        Raises
        ------
        TimeoutError
            No whole answer came in time; `is_verified` is False then.
        """
        self._end_s = time.monotonic() + self._timeout_s
        self._must_verify = True
        self._catch_up(None)

    def resync(self) -> None:
        """Replace the view by a snapshot of the publisher's.

        Raises
        ------
        TimeoutError
            No whole snapshot came in time.
        """
        self._end_s = time.monotonic() + self._timeout_s
        self._resync()

    def close(self) -> None:
        """Release the sockets."""
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _resync(self) -> None:
        self.is_verified = False
        self.num_snapshots += 1
        view = BlockView()
        try:
            for frames in self._ask(SNAPSHOT_REQUEST):
                if frames[-2] == END_OF_REPLAY:
                    end = self._digest_decoder.decode(frames[-1])
                    self.is_verified = view.digests() == end.digests
                    if self.is_verified:
                        self.view, self._next, self._epoch = view, end.seq, end.epoch
                        self._must_verify = False
                        return
                    break
                view.apply(self._decoder.decode(frames[-1]))
        except (msgspec.DecodeError, ValueError) as error:
            raise TimeoutError(f"no whole snapshot from {self._replay_endpoint}: {error}") from error
        raise TimeoutError(f"no whole snapshot from {self._replay_endpoint}")

    def _apply(self, seq: int, batch: EventBatch) -> None:
        live_seq, live_ts = self._live
        is_restart = seq < live_seq or (seq == live_seq and batch.ts != live_ts)
        self._live = seq, batch.ts
        if self._next is None or is_restart:
            self.is_verified = False
            if seq == 0:
                self.view.clear()
                self._next, self._epoch = 0, None
            else:
                self._resync()
        if self._next is not None and seq > self._next:
            self.num_replays += 1
            self._catch_up(seq)
        if seq == self._next:  # neither a replay nor a snapshot had it, and it is not another publisher's late one
            self.view.apply(batch)
            self._next = seq + 1

    def _catch_up(self, end_seq: int | None) -> None:
        """Replay the missing batches and compare digests; if that fails, take a snapshot.

        The replay of a publisher without digests must reach the batch before `end_seq`; None: it has to have digests.
        """
        self.is_verified = False
        is_first, digest = True, None
        requests = () if self._next is None else (DIGEST_REQUEST, self._next.to_bytes(8, "big"))
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            for frames in self._ask(*requests) if requests else ():
                seq, is_end = int.from_bytes(frames[-2], "big"), frames[-2] == END_OF_REPLAY
                assert self._next is not None
                if is_first:
                    is_first = False
                    digest = self._digest_decoder.decode(frames[-1]) if is_end and frames[-1] else None
                    is_other = digest is not None and (digest.epoch != self._epoch or digest.seq < self._next)
                    if not is_end or is_other or (digest is None and end_seq is None):
                        break  # the batches of another publisher do not fit the view
                elif is_end and digest is not None:
                    self.is_verified = self._next == digest.seq and self.view.digests() == digest.digests
                elif is_end:
                    if end_seq is not None and self._next >= end_seq:
                        return
                elif seq > self._next:
                    break  # the buffer no longer has it
                elif seq == self._next and (digest is None or seq < digest.seq):
                    self.view.apply(self._decoder.decode(frames[-1]))
                    self._next += 1
        self._must_verify &= not self.is_verified
        if not self.is_verified:
            self._resync()

    def _check(self, message: Digest) -> None:
        if self._next is None or message.seq < self._live[0] or self._epoch not in (None, message.epoch):
            self._live = message.seq, 0.0
            self._resync()
        elif message.seq >= self._next:
            self.num_replays += 1
            self._catch_up(message.seq + 1)
        if self._next == message.seq + 1:
            self.is_verified = self.view.digests() == message.digests
            if self.is_verified:
                self._epoch = message.epoch
            else:
                self._resync()

    def _verify_after_connecting(self) -> bool:
        """Verify the view if a connection is new: another publisher may be at its end. Return whether it was.

        Messages that wait then came over the old connection, or are part of the answer.
        """
        while self._connections.poll(0):
            self._connections.recv_multipart()
            self._must_verify |= self._next is not None
        if not self._must_verify:
            return False
        for _ in range(2 * _MAX_WAITING):
            if not self._sub.poll(0):
                break
            self._sub.recv_multipart()
        self.verify()
        return True

    def _ask(self, *requests: bytes) -> Iterator[list[bytes]]:
        """Yield the messages of the answer, up to each request's end, to `_end_s`, or to the largest size."""
        num_ends = num_bytes = 0
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 10 * _MAX_WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.connect(self._replay_endpoint)
            for request in requests:
                socket.send_multipart((b"", request))
            while (left_s := self._end_s - time.monotonic()) > 0 and socket.poll(int(left_s * 1000) + 1):
                frames = socket.recv_multipart()
                num_bytes += sum(map(len, frames))
                if len(frames) < 2 or num_bytes > _MAX_ANSWER_BYTES:
                    raise ValueError(f"{self._replay_endpoint} sent {len(frames)} frames, in all {num_bytes} bytes")
                yield frames
                num_ends += frames[-2] == END_OF_REPLAY
                if num_ends == len(requests):
                    return
        finally:
            socket.close()
