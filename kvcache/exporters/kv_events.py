"""KV events for routers: what a cache holds, published in vLLM's wire format, with digests to verify a view of it.

A router that places requests by prefix keeps a view of every engine's blocks. Messages get lost, so a view drifts; a
digest every few batches tells the router whether its view is right, and a snapshot brings it back.

Wire format (vLLM's ``vllm.distributed.kv_events``): PUB frames ``topic, sequence number, payload``; the number has 8
bytes, big-endian, the payload is a msgpack array ``[timestamp, events, data_parallel_rank]``. A DEALER or REQ socket on
the replay endpoint sends a sequence number and gets every buffered batch from it on, then the number -1. Two things
are our own:

- frames with topic ``"digest." + topic``: msgpack maps ``{"seq", "digests": {medium: [count, sum]}}``, or
  ``{"seq", "gap": 1}`` before a batch that sums up events which were too many to send one by one;
- the request ``snapshot`` on the replay endpoint: what is held now, as batches of `BlockStored`, then the number -1.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import zmq

from kvcache.core.event_log import TakenEvents
from kvcache.events import OffloadingEvent
from kvcache.keys import get_offload_block_hash, get_offload_group_idx

_LOG = logging.getLogger(__name__)

DIGEST_PREFIX = b"digest."
SNAPSHOT_REQUEST = b"snapshot"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_SNAPSHOT_KEYS = 4096
_POLL_MS = 20
_MAX_BATCH_EVENTS = 64
_ENOUGH_BATCH_KEYS = 512
"""A batch that has so many is sent: about a millisecond of work, after which another thread may have the GIL."""
_GATHER_S = 0.001
"""Rest of the publishing thread after it was woken: what comes meanwhile wakes nobody, and goes out with the rest."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that came to a medium; the fields of vLLM's struct of this name.

    Parameters
    ----------
    block_hashes : list of bytes
        The blocks.
    parent_block_hash : bytes or None
        Always None.
    token_ids : list of int
        Always empty.
    block_size : int
        Tokens of a block.
    lora_id, lora_name : None
        Not known here.
    medium : str
        ``"CPU"`` or ``"STORAGE"``.
    group_idx : int
        KV-cache group.
    locality : str
        ``"LOCAL"``.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that left a medium; the fields of vLLM's struct of this name.

    Parameters
    ----------
    block_hashes : list of bytes
        The blocks.
    medium : str
        ``"CPU"`` or ``"STORAGE"``.
    group_idx : int
        KV-cache group.
    locality : str
        ``"LOCAL"``.
    """

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Every medium was emptied."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message: when, what, and by which data-parallel rank.

    Parameters
    ----------
    ts : float
        Seconds since the epoch, never back.
    events : list
        In order.
    data_parallel_rank : int
        The engine's rank.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Digest(msgspec.Struct, omit_defaults=True):
    """What a view holds after batch `seq`: per medium the number of blocks and the sum of their hashes; or a gap.

    Parameters
    ----------
    seq : int
        The last batch that it covers.
    digests : dict of str to (int, int), optional
        Medium to count and sum.
    gap : int, optional
        1: the next batch sums up events that were too many.
    """

    seq: int
    digests: dict[str, tuple[int, int]] | None = None
    gap: int | None = None


class BlockView:
    """The blocks that each medium holds, as a router sees them, and their digest.

    Notes
    -----
    The digest of a medium is the number of its blocks and the sum, modulo 2**64, of the first eight bytes of
    ``blake2b(hash + group index as 4 bytes, big-endian)``: independent of the order in which blocks came.
    """

    def __init__(self) -> None:
        self._held: dict[str, set[tuple[bytes, int]]] = {}
        self._sums: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def media(self) -> dict[str, frozenset[tuple[bytes, int]]]:
        """Return the blocks of each medium that holds any, as (block hash, group index).

        Returns
        -------
        dict of str to frozenset
            Medium to (block hash, group index) pairs.
        """
        return {medium: frozenset(held) for medium, held in self._held.items() if held}

    def holds(self, medium: str, block_hash: bytes, group_idx: int = 0) -> bool:
        """Return whether a medium holds a block.

        Parameters
        ----------
        medium : str
            The medium.
        block_hash : bytes
            The block.
        group_idx : int
            Its KV-cache group.

        Returns
        -------
        bool
            Whether it is held.
        """
        return (block_hash, group_idx) in self._held.get(medium, ())

    def add(self, medium: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Note blocks that came to a medium; those that it holds already change nothing.

        Parameters
        ----------
        medium : str
            The medium.
        blocks : iterable of (bytes, int)
            Block hash and group index.
        """
        held = self._held.setdefault(medium, set())
        new = set(blocks) - held
        held |= new
        self._sums[medium] = (self._sums.get(medium, 0) + sum(map(_block_hash, new))) % (1 << 64)

    def discard(self, medium: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Note blocks that left a medium; those that it does not hold change nothing.

        Parameters
        ----------
        medium : str
            The medium.
        blocks : iterable of (bytes, int)
            Block hash and group index.
        """
        held = self._held.setdefault(medium, set())
        gone = held.intersection(blocks)
        held -= gone
        self._sums[medium] = (self._sums.get(medium, 0) - sum(map(_block_hash, gone))) % (1 << 64)

    def clear(self) -> None:
        """Empty every medium."""
        self._held.clear()
        self._sums.clear()

    def digests(self) -> dict[str, tuple[int, int]]:
        """Return count and sum of each medium that holds any block.

        Returns
        -------
        dict of str to (int, int)
            Medium to count and sum.
        """
        return {medium: (len(held), self._sums[medium]) for medium, held in self._held.items() if held}

    def apply(self, batch: EventBatch) -> None:
        """Apply one batch of events, in order.

        Parameters
        ----------
        batch : EventBatch
            The next batch.
        """
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                continue
            change = self.add if isinstance(event, BlockStored) else self.discard
            group_idx = event.group_idx or 0
            change(event.medium or "", [(block_hash, group_idx) for block_hash in event.block_hashes])


def _block_hash(block: tuple[bytes, int]) -> int:
    return int.from_bytes(hashlib.blake2b(block[0] + block[1].to_bytes(4, "big"), digest_size=8).digest(), "big")


def _block_of(key: bytes) -> tuple[bytes, int]:
    # A bare block hash is a key, too.
    return (get_offload_block_hash(key), get_offload_group_idx(key)) if len(key) > 4 else (key, 0)


def _by_group(keys: Iterable[bytes]) -> dict[int, list[bytes]]:
    groups: dict[int, list[bytes]] = {}
    for key in keys:
        block_hash, group_idx = _block_of(key)
        groups.setdefault(group_idx, []).append(block_hash)
    return groups


class KVEventPublisher:
    """Publish a manager's events to routers; the caller never waits.

    Parameters
    ----------
    endpoint : str
        Where the PUB socket binds: ``"tcp://127.0.0.1:5557"``; with port 0 the system chooses one, see `endpoint`.
    replay_endpoint : str, optional
        Where the ROUTER socket for replays and snapshots binds.
    topic : str
        First frame of every message.
    block_size : int
        Tokens of a block, for events that do not say.
    buffer_batches : int
        Batches that are kept for replay.
    queue_events : int
        Events that may wait for the publishing thread. Beyond it they are merged by key into one batch, so that memory
        stays bounded by the number of blocks, and a gap is announced.
    digest_every : int
        Batches between two digests; 0: none.
    data_parallel_rank : int
        Rank of the engine, in every batch.

    Attributes
    ----------
    endpoint, replay_endpoint : str
        As bound.

    Raises
    ------
    ValueError
        A number is out of range, or an endpoint cannot be bound (the message names it).

    Notes
    -----
    A slow subscriber loses messages at ZeroMQ's high-water mark; nobody else does, and the publisher does not wait.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "kv-events",
        block_size: int = 0,
        buffer_batches: int = 10_000,
        queue_events: int = 100_000,
        digest_every: int = 64,
        data_parallel_rank: int = 0,
    ) -> None:
        for name, value, least in (
            ("buffer_batches", buffer_batches, 1),
            ("queue_events", queue_events, 1),
            ("digest_every", digest_every, 0),
            ("block_size", block_size, 0),
            ("data_parallel_rank", data_parallel_rank, 0),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        self._topic = topic.encode()
        self._block_size = block_size
        self._rank = data_parallel_rank
        self._digest_every = digest_every
        self._queue_events = queue_events
        self._queue: deque[OffloadingEvent | TakenEvents | None] = deque()
        # Each is changed by one thread alone; what lies between them is queued, or being sent.
        self._num_queued = self._num_sent = 0
        self._merged: dict[tuple[str, bytes], bool] | None = None
        self._num_merged = 0
        self._last_number = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._view = BlockView()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._seq = 0
        self._last_ts = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._num_rejected = 0
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self.endpoint = _bind(self._pub, endpoint)
            self._router = None if replay_endpoint is None else self._context.socket(zmq.ROUTER)
            self.replay_endpoint = None if self._router is None else _bind(self._router, replay_endpoint or "")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        if self._router is not None:
            # A client that does not read its replies must not hold memory, nor the thread.
            self._router.setsockopt(zmq.SNDHWM, 100_000)
            self._router.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
            self._router.setsockopt(zmq.SNDTIMEO, 0)
        self._thread = threading.Thread(target=self._run, name="kvcache-kv-events", daemon=True)
        self._thread.start()

    # ---- the scheduler's thread ------------------------------------------------------------------------------

    def publish(self, events: Iterable[OffloadingEvent]) -> None:
        """Queue events, as `manager.take_events` returns them; for one thread.

        What a manager returned is queued as it is, however many events; others cost an append each. Once the queue is
        full, O(keys): they are merged by key.

        Parameters
        ----------
        events : iterable of OffloadingEvent
            As `manager.take_events` returns them.
        """
        if type(events) is TakenEvents:
            num_events = len(events)
            if num_events == 0:
                return
            if self._merged is None and self._num_queued - self._num_sent + num_events <= self._queue_events:
                self._follow(events.next_number, num_events)
                self._append(events.move(), num_events)
                return
        num_new = 0
        for event in events:
            num_new += 1
            if event.number:
                self._follow(event.number, 1)
            if self._num_queued - self._num_sent < self._queue_events and self._merged is None:
                self._append(event, 1)
                continue
            with self._lock:
                merged = self._merged = {} if self._merged is None else self._merged
                self._num_merged += 1
                for key in event.keys:
                    merged[event.medium, key] = event.removed
        if num_new and not self._wake.is_set():
            self._wake.set()

    def _follow(self, number: int, num_events: int) -> None:
        """Take note of the numbers of events that come next."""
        if self._last_number and number != self._last_number + 1:
            # The manager's log has dropped events: what it holds is not known, so nothing is claimed.
            self.publish_cleared()
        self._last_number = number + num_events - 1

    def _append(self, item: OffloadingEvent | TakenEvents | None, num_events: int) -> None:
        # Counted first, so that `flush` misses nothing.
        self._num_queued += num_events
        self._queue.append(item)
        # To wake a thread costs more than all the rest, and nothing once it has been woken.
        if not self._wake.is_set():
            self._wake.set()

    def publish_cleared(self) -> None:
        """Queue that everything has been forgotten: call it with `manager.reset_cache`."""
        with self._lock:
            self._merged = None
            self._append(None, 1)

    # ---- what others may ask, from any thread ----------------------------------------------------------------

    def snapshot(self) -> tuple[int, dict[str, frozenset[tuple[bytes, int]]]]:
        """Return the number of the next batch, and the blocks that were held when it was taken, by medium.

        Returns
        -------
        tuple of (int, dict)
            Number of the next batch, and the blocks of each medium.
        """
        with self._lock:
            return self._seq, self._view.media()

    def stats(self) -> dict[str, int]:
        """Return counters since start: batches sent, events merged because the queue was full, bad requests refused.

        Returns
        -------
        dict of str to int
            Counters by name.
        """
        return {
            "sent_batches": self._seq,
            "merged_events": self._num_merged,
            "rejected_requests": self._num_rejected,
            "queued_events": self._num_queued - self._num_sent,
        }

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything queued so far was sent; return whether that came in time. Not for the scheduler.

        Parameters
        ----------
        timeout_s : float
            How long to wait.

        Returns
        -------
        bool
            Whether everything was sent in time.
        """
        end_s = time.monotonic() + timeout_s
        while self._num_sent != self._num_queued or self._merged is not None or self._wake.is_set():
            if time.monotonic() >= end_s or not self._thread.is_alive():
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued and release the sockets; waits at most `timeout_s`. May be called twice.

        Parameters
        ----------
        timeout_s : float
            How long to wait.
        """
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout_s)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the publishing thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                is_last = self._is_closed
                if self._wake.wait(_POLL_MS / 1000) and not is_last:
                    time.sleep(_GATHER_S)
                self._wake.clear()
                self._send_queued()
                if self._router is not None:
                    self._answer_requests(self._router)
                if is_last:
                    break
        except Exception:
            _LOG.exception("kvcache publishes no more KV events")
        finally:
            self._context.destroy(linger=200)

    def _send_queued(self) -> None:
        for taken in self._take_batches():
            self._send([event for item in taken for event in self._wire(item)])
            self._num_sent += len(taken)
        with self._lock:
            merged = self._merged
            # The scheduler may queue again once what it merged has been taken, and no sooner: order is kept.
            if merged is not None and not self._queue:
                self._merged = None
            else:
                merged = None
        if merged:
            events: list[Any] = []
            for removed in (True, False):
                by_medium: dict[str, list[bytes]] = {}
                for (medium, key), is_removed in merged.items():
                    if is_removed is removed:
                        by_medium.setdefault(medium, []).append(key)
                for medium, keys in by_medium.items():
                    events += self._wire(OffloadingEvent(keys, self._block_size, medium, removed))
            self._send_control(Digest(self._seq, gap=1))
            self._send(events)

    def _take_batches(self) -> Iterator[list[OffloadingEvent | None]]:
        batch: list[OffloadingEvent | None] = []
        num_keys = 0
        for event in self._take_queued():
            batch.append(event)
            num_keys += 0 if event is None else len(event.keys)
            if len(batch) == _MAX_BATCH_EVENTS or num_keys >= _ENOUGH_BATCH_KEYS:
                yield batch
                batch, num_keys = [], 0
        if batch:
            yield batch

    def _take_queued(self) -> Iterator[OffloadingEvent | None]:
        while self._queue:
            item = self._queue.popleft()
            if type(item) is TakenEvents:
                yield from item
            else:
                yield item

    def _wire(self, event: OffloadingEvent | None) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
        if event is None:
            yield AllBlocksCleared()
            return
        medium = "CPU" if event.medium == "CPU" else "STORAGE"
        locality = "LOCAL"
        for group_idx, hashes in _by_group(event.keys).items():
            if event.removed:
                yield BlockRemoved(hashes, medium, group_idx, locality)
            else:
                size = event.block_size or self._block_size
                yield BlockStored(hashes, None, [], size, None, medium, None, group_idx=group_idx, locality=locality)

    def _send(self, events: list[Any]) -> None:
        if not events:
            return
        # Never back, so that a subscriber can tell a new publisher's low numbers from messages that it had already.
        self._last_ts = max(time.time(), self._last_ts)
        batch = EventBatch(self._last_ts, events, self._rank)
        payload = self._encoder.encode(batch)
        with self._lock:
            seq = self._seq
            self._seq += 1
            self._view.apply(batch)
            is_due = self._digest_every and self._seq % self._digest_every == 0
            digests = self._view.digests() if is_due else None
        self._buffer.append((seq, payload))
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        if digests is not None:
            self._send_control(Digest(seq, digests))

    def _send_control(self, message: Digest) -> None:
        self._pub.send_multipart(
            (DIGEST_PREFIX + self._topic, message.seq.to_bytes(8, "big"), self._encoder.encode(message))
        )

    def _answer_requests(self, router: Any) -> None:
        while router.poll(0):
            frames = router.recv_multipart()
            # REQ sockets put an empty frame before the request, DEALER sockets need not.
            client, request = frames[0], frames[-1]
            is_known = len(frames) in (2, 3) and (len(request) == 8)
            try:
                if is_known and request == SNAPSHOT_REQUEST:
                    self._reply_snapshot(router, client)
                elif is_known:
                    self._reply_replay(router, client, int.from_bytes(request, "big"))
                else:
                    self._num_rejected += 1
            except zmq.ZMQError:
                # Its buffer is full, or it has gone: it may ask again.
                self._num_rejected += 1

    def _reply_replay(self, router: Any, client: bytes, start_seq: int) -> None:
        for seq, payload in self._buffer:
            if seq >= start_seq:
                router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _reply_snapshot(self, router: Any, client: bytes) -> None:
        seq, media = self.snapshot()
        for medium, blocks in media.items():
            groups: dict[int, list[bytes]] = {}
            for block_hash, group_idx in blocks:
                groups.setdefault(group_idx, []).append(block_hash)
            for group_idx, hashes in groups.items():
                for i in range(0, len(hashes), _SNAPSHOT_KEYS):
                    part = hashes[i : i + _SNAPSHOT_KEYS]
                    event = BlockStored(part, None, [], self._block_size, None, medium, None, group_idx=group_idx)
                    payload = self._encoder.encode(EventBatch(time.time(), [event], self._rank))
                    router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        # Its payload tells which batch comes next, and whether the snapshot arrived whole.
        end = self._encoder.encode(Digest(seq, self._view.digests()))
        router.send_multipart((client, b"", b"", END_OF_REPLAY, end))


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
        How long a replay or a snapshot may take.

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
        try:
            if topic == DIGEST_PREFIX + self._topic:
                self._check(self._digest_decoder.decode(payload))
            elif topic == self._topic:
                self._apply(seq, self._decoder.decode(payload))
        except (msgspec.DecodeError, msgspec.ValidationError):
            self.rejected_messages += 1

    def resync(self) -> None:
        """Replace the view by a snapshot of the publisher's; TimeoutError where none arrives whole."""
        self.num_snapshots += 1
        view = BlockView()
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
        raise TimeoutError(f"no whole snapshot from {self._replay_endpoint}")

    def close(self) -> None:
        """Release the sockets."""
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _apply(self, seq: int, batch: EventBatch) -> None:
        if self._next is None or (seq < self._next and batch.ts > self._last_ts):
            # The first message ever, or the first of a publisher that has started again.
            self.is_verified = False
            if seq == 0:
                self.view.clear()
                self._next = 0
            else:
                self.resync()
        if self._next is not None and seq > self._next:
            self._replay(self._next)
        if self._next is None or seq < self._next:
            return  # the replay or the snapshot had it already
        self._take(seq, batch)

    def _take(self, seq: int, batch: EventBatch) -> None:
        self.view.apply(batch)
        self._next, self._last_ts = seq + 1, batch.ts

    def _replay(self, start_seq: int) -> None:
        self.num_replays += 1
        for frames in self._ask(start_seq.to_bytes(8, "big")):
            if frames[-2] == END_OF_REPLAY:
                return
            seq = int.from_bytes(frames[-2], "big")
            if self._next is None or seq > self._next:
                break  # the buffer no longer has it
            if seq == self._next:
                self._take(seq, self._decoder.decode(frames[-1]))
        self.resync()

    def _check(self, message: Digest) -> None:
        if message.digests is None:
            return
        if self._next is None:
            self.resync()
        elif message.seq >= self._next:
            self._replay(self._next)
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
                yield frames
                if frames[-2] == END_OF_REPLAY:
                    return
        finally:
            socket.close()


def _bind(socket: Any, endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot bind {endpoint!r}: {error}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
