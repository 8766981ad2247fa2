"""PublishingThread: takes events, encodes and sends them, and answers the requests of routers.

It is Python: a batch holds the interpreter's lock for some 0.5 ms, and then hands it over.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from kvcache.core.event_log import EventLog
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.prompts import PromptBlock, PromptBlocks
from kvcache.exporters.kv_events.view import BlockView, as_ints
from kvcache.exporters.kv_events.wire import (
    DIGEST_PREFIX,
    DIGEST_REQUEST,
    END_OF_REPLAY,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Digest,
    EventBatch,
    KVEvent,
    array_event,
)
from kvcache.request import Prompt

_LOG = logging.getLogger(__name__)
_LEAST_WAIT_MS, _MAX_WAIT_MS = 4, 16  # between two looks: a wake-up takes the interpreter's lock from the scheduler
_PAUSE_S = 0.0002  # hands the interpreter's lock over between two batches
_MAX_BATCH_KEYS = 1024
_MAX_PIECE_BYTES = 1 << 22
_EVENT_COST = 8  # of an event without keys, in keys
_MAX_KEPT_BYTES = 1 << 28
_SNAPSHOT_KEYS = 4096  # of one message; copying and encoding them takes some 1 ms
_MAX_OWED = 64  # replies that are sent at the same time
_MAX_REQUESTS = 256  # answered between two looks
_MAX_REPLIES = 256  # messages to one client between two looks
_MAX_QUEUED_REPLIES = 64  # messages in the memory of each client's connection
_STANDSTILL_S = 10.0
_MAX_FRAME_BYTES = 1 << 16  # of a request or a subscription
_EPOCH_BITS = 53  # exact in every language

Source = Iterator[OffloadingEvent | None]
"""Events to send; None: everything was cleared."""
Description = tuple[list[bytes], Prompt]
"""Keys that are about to be stored, and the prompt that they are of."""
SpecKind = tuple[str, int | None]
"""What a KV-cache group holds: vLLM's name, and the size of a sliding window."""


class PublishingThread(threading.Thread):
    """Sends events and answers requests; parameters and errors as of `KVEventPublisher`.

    Attributes
    ----------
    endpoint, replay_endpoint : str
        As bound.
    num_queued, num_read : int
        Events that were ever queued, written by the queueing thread, and read, written by this one.
    num_batches : int
        Batches sent: the number of the next one.
    num_rejected : int
        Requests that were refused.
    num_begun, num_done : int
        Looks at the queue that were begun, and that are done.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        block_size: int,
        buffer_batches: int,
        digest_every: int,
        rank: int,
        hash_format: str,
        encoding: str,
        spec_kinds: tuple[SpecKind, ...],
    ) -> None:
        super().__init__(name="kvcache-kv-events", daemon=True)
        self._queue: deque[Source | Description] = deque()
        self.num_queued = self.num_read = 0
        self.num_batches = self.num_rejected = self.num_begun = self.num_done = 0
        self._topic = topic.encode()
        self._block_size, self._digest_every, self._rank = block_size, digest_every, rank
        self._kept: deque[bytes] = deque()
        self._max_kept, self._num_kept_bytes = buffer_batches, 0
        self._has_ints, self._has_arrays = hash_format == "int", encoding == "array"
        self._spec_kinds = spec_kinds
        self._view = BlockView()
        self._prompts = PromptBlocks(lambda key: self._view.is_held(key[:-4], int.from_bytes(key[-4:], "big")))
        self._has_warned = False
        self._view_lock = threading.Lock()  # `snapshot` reads in other threads
        self._log: EventLog | None = None
        self._log_lock = threading.RLock()  # reentrant: `stop` may run in a finalizer
        self._is_stopped_by_user = False
        self._last_number, self._last_ts = 0, 0.0
        self._owed: dict[bytes, _Reply] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._epoch = secrets.randbits(_EPOCH_BITS)
        self._owner = os.getpid()
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            self.endpoint = _bind(self._pub, endpoint)
            self._router = None if replay_endpoint is None else self._context.socket(zmq.ROUTER)
            if self._router is not None:
                # A client that does not read its replies must hold neither memory nor the thread. The limits apply to
                # connections made after they were set, so they are set before the socket is bound.
                self._router.setsockopt(zmq.SNDHWM, _MAX_QUEUED_REPLIES)
                self._router.setsockopt(zmq.RCVHWM, 16)
                self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
                self._router.setsockopt(zmq.SNDTIMEO, 0)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.replay_endpoint = None if self._router is None else _bind(self._router, replay_endpoint or "")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def follow(self, log: EventLog) -> None:
        """Take the events of a manager's log, until `stop`."""
        if log.reader is not None:
            raise ValueError("the manager's events go to a publisher already")
        if self._is_stopped_by_user or not self.is_alive():
            raise ValueError("the publisher is closed, and follows no manager")
        self._block_size = log.block_size or self._block_size
        with self._log_lock:
            log.reader, self._log = self, log

    def put(self, events: Source, num_events: int) -> None:
        """Queue events; not after `follow`."""
        self.num_queued += num_events
        self._queue.append(events)

    def describe(self, keys: list[bytes], prompt: Prompt) -> None:
        """Queue a description of blocks, before their events."""
        if self.is_alive():
            self._queue.append((keys, prompt))

    def clear(self) -> None:
        """Queue that everything was cleared."""
        if self._log is not None:
            self._log.clear()
        elif self.is_alive():
            self._queue.append(iter([None]))

    def snapshot(self) -> tuple[int, dict[str, frozenset[tuple[bytes, int]]]]:
        """Return the number of the next batch and the blocks that are held; see `KVEventPublisher.snapshot`."""
        if os.getpid() != self._owner:
            raise RuntimeError("the publisher belongs to the process that this one was forked from")
        with self._view_lock:
            return self.num_batches, self._view.media()

    def stop(self) -> None:
        """Send the events that wait, and end. A child that was forked has no such thread."""
        if os.getpid() != self._owner:
            return
        with self._log_lock:
            self._look_at_log()
            if self._log is not None:
                self._log.reader = None
                self._log = None
        self._is_stopped_by_user = True

    def run(self) -> None:
        """Send and answer until `stop`, or until the sockets fail."""
        wait_ms = _LEAST_WAIT_MS
        is_last = False
        try:
            while not is_last:
                is_last = self._is_stopped_by_user
                self._wait(0 if is_last else 1 if self._owed else wait_ms)
                self.num_begun += 1
                self._look_at_log()
                num_batches = self.num_batches
                self._send_all()
                self.num_done = self.num_begun
                self._answer()
                wait_ms = _LEAST_WAIT_MS if self.num_batches > num_batches else min(2 * wait_ms, _MAX_WAIT_MS)
        except Exception:
            _LOG.exception("kvcache publishes no more KV events")
            self.stop()
        finally:
            self._context.destroy(linger=200)

    # ---- events ----------------------------------------------------------------------------------------------

    def _look_at_log(self) -> None:
        """Queue the events of the followed log."""
        with self._log_lock:
            if self._log is not None:
                # Read before the events are taken: a number up to it that does not come was dropped, or is a reset's.
                number = self._log.last_number
                taken = self._log.take(None, self)
                self.num_queued += len(taken)
                self._queue += (taken, self._missing(number))

    def _missing(self, number: int) -> Source:
        """Yield None if events up to `number` were dropped behind the last one that was read."""
        if self._last_number < number:
            yield None
            self._last_number = number

    def _send_all(self) -> None:
        """Send all events that are queued."""
        batch: list[KVEvent] = []
        cost = 0
        for event, event_cost in self._wire_events():
            batch.append(event)
            cost += event_cost
            if cost >= _MAX_BATCH_KEYS:
                self._send(batch)
                batch, cost = [], 0
                time.sleep(_PAUSE_S)
        if batch:
            self._send(batch)

    def _wire_events(self) -> Iterator[tuple[KVEvent, int]]:
        """Yield each event as it is sent, at most `_MAX_BATCH_KEYS` of its keys at a time, and its cost in keys."""
        while self._queue:
            queued = self._queue.popleft()
            if isinstance(queued, tuple):
                self._describe(*queued)
                continue
            for event in queued:
                number = 0 if event is None else event.number
                if event is None or (number and self._last_number and number != self._last_number + 1):
                    # Events were dropped, so the held blocks are unknown: announce none of them.
                    self._prompts.clear()
                    yield AllBlocksCleared(), _EVENT_COST
                    self._last_number = 0
                if event is not None:
                    self._last_number = number or self._last_number
                    self.num_read += 1
                    yield from self._pieces(event)

    def _describe(self, keys: list[bytes], prompt: Prompt) -> None:
        """Note the tokens of blocks; an invalid prompt costs its blocks their tokens only."""
        try:
            self._prompts.add(keys, prompt, self._block_size)
        except (TypeError, ValueError, OverflowError, IndexError) as error:
            if not self._has_warned:
                _LOG.warning("publishing blocks without tokens: %s", error)
            self._has_warned = True

    def _pieces(self, event: OffloadingEvent) -> Iterator[tuple[BlockStored | BlockRemoved, int]]:
        medium = "CPU" if event.medium == "CPU" else "STORAGE"
        for group_idx, hashes in sorted(_by_group(event.keys).items()):
            group = group_idx.to_bytes(4, "big")
            if event.removed:
                self._prompts.remove(hashes, group)
            for run, blocks in [(hashes, [])] if event.removed else self._prompts.runs(hashes, group):
                # A token takes about as many bytes as a hash.
                num_bytes = 1 + max(map(len, run)) + (8 * self._block_size if blocks else 0)
                step = max(1, min(_MAX_BATCH_KEYS, _MAX_PIECE_BYTES // num_bytes))
                for start in range(0, len(run), step):
                    piece = run[start : start + step]
                    cost = _EVENT_COST + len(piece) * _MAX_BATCH_KEYS // step
                    if event.removed:
                        yield BlockRemoved(self._wire_hashes(piece), medium, group_idx, locality="LOCAL"), cost
                        continue
                    stored = self._stored(piece, medium, group_idx, event.block_size or self._block_size)
                    if blocks:
                        self._add_prompt(stored, blocks[start : start + step])
                    yield stored, cost

    def _stored(self, hashes: list[bytes], medium: str, group_idx: int, block_size: int) -> BlockStored:
        kind, window = self._spec_kinds[group_idx] if group_idx < len(self._spec_kinds) else (None, None)
        return BlockStored(
            self._wire_hashes(hashes), None, [], block_size, None, medium, None, group_idx=group_idx,
            kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window, locality="LOCAL",
        )  # fmt: skip

    def _add_prompt(self, event: BlockStored, blocks: list[PromptBlock]) -> None:
        """Add the parent of a chain of described blocks, its adapter and its tokens."""
        first = blocks[0]
        event.parent_block_hash = None if first.parent is None else self._wire_hashes([first.parent])[0]
        event.token_ids = [token for block in blocks for token in block.token_ids]
        event.lora_id, event.lora_name = first.lora_id, first.lora_name
        if any(block.extra_keys is not None for block in blocks):
            event.extra_keys = [block.extra_keys for block in blocks]

    def _wire_hashes(self, hashes: list[bytes]) -> list[BlockHash]:
        return as_ints(hashes) if self._has_ints else [*hashes]

    def _send(self, events: list[KVEvent]) -> None:
        seq, batch = self.num_batches, self._batch(events)
        payload = self._encoder.encode(batch)
        with self._view_lock:
            self._view.apply(batch)
            self.num_batches += 1
        self._kept.append(payload)
        self._num_kept_bytes += len(payload)
        while len(self._kept) > self._max_kept or (self._num_kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1):
            self._num_kept_bytes -= len(self._kept.popleft())
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        # The first batch has a digest, too: it shows early that this publisher is another one than before.
        if self._digest_every and (seq == 0 or self.num_batches % self._digest_every == 0):
            self._pub.send_multipart((DIGEST_PREFIX + self._topic, seq.to_bytes(8, "big"), self._digest(seq)))

    def _batch(self, events: list[KVEvent]) -> EventBatch:
        # Time never goes back: a low number with a later time is a new publisher's, not a repeated message.
        self._last_ts = max(self._last_ts, time.time())
        return EventBatch(self._last_ts, [*map(array_event, events)] if self._has_arrays else events, self._rank)

    def _digest(self, seq: int) -> bytes:
        return self._encoder.encode(Digest(seq, self._view.digests(), epoch=self._epoch))

    # ---- requests --------------------------------------------------------------------------------------------

    def _wait(self, wait_ms: int) -> None:
        if self._router is None:
            time.sleep(wait_ms / 1000)
        else:
            self._router.poll(wait_ms)

    def _answer(self) -> None:
        """Read the requests that have arrived, and send more of every reply that is owed."""
        if self._router is None:
            return
        for client, reply in [*self._owed.items()]:
            self._go_on(client, reply)
        for _ in range(_MAX_REQUESTS):
            if not self._router.poll(0):
                break
            frames = self._router.recv_multipart()
            # REQ sockets put an empty frame before the request, DEALER sockets need not.
            client, request = frames[0], frames[-1]
            is_known = len(frames) in (2, 3) and len(request) == 8
            if not is_known or client in self._owed or len(self._owed) >= _MAX_OWED:
                self.num_rejected += 1
            else:
                self._go_on(client, _Reply(self._messages(request)))

    def _messages(self, request: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield the messages of a reply: topic, number, payload."""
        if request in (SNAPSHOT_REQUEST, DIGEST_REQUEST):
            seq, end = self.num_batches, self._digest(self.num_batches)
            parts = []
            if request == SNAPSHOT_REQUEST:
                # Events wait until the copy is whole; only this thread changes the view.
                for part in self._view.parts(_SNAPSHOT_KEYS):
                    parts.append(part)
                    time.sleep(_PAUSE_S)
            for medium, group_idx, hashes in parts:
                event = self._stored(hashes, medium, group_idx, self._block_size)
                yield self._topic, seq.to_bytes(8, "big"), self._encoder.encode(self._batch([event]))
            yield b"", END_OF_REPLAY, end
            return
        seq = int.from_bytes(request, "big")
        while seq < self.num_batches:
            # The client sees by the number that older batches are no longer kept.
            first = self.num_batches - len(self._kept)
            seq = max(seq, first)
            yield self._topic, seq.to_bytes(8, "big"), self._kept[seq - first]
            seq += 1
        yield b"", END_OF_REPLAY, b""

    def _go_on(self, client: bytes, reply: _Reply) -> None:
        """Send as much of a reply as its client takes. A client that has gone, or stands still, may ask again."""
        assert self._router is not None
        self._owed.pop(client, None)
        for _ in range(_MAX_REPLIES):
            if reply.message is None:
                return
            try:
                self._router.send_multipart((client, b"", *reply.message))
            except zmq.Again:
                if time.monotonic() - reply.since_s > _STANDSTILL_S:
                    self.num_rejected += 1
                    return
                break
            except zmq.ZMQError:
                self.num_rejected += 1
                return
            reply.message, reply.since_s = next(reply.messages, None), time.monotonic()
        self._owed[client] = reply


class _Reply:
    """A client's answer: the messages that are left, and when the client took the last one."""

    def __init__(self, messages: Iterator[tuple[bytes, bytes, bytes]]) -> None:
        self.messages = messages
        self.message = next(messages, None)
        self.since_s = time.monotonic()


def _by_group(keys: list[bytes]) -> dict[int, list[bytes]]:
    """Return block hashes by group. A key of up to 4 bytes is a bare hash of group 0; other types are skipped."""
    if not set(map(type, keys)) <= {bytes}:
        keys = [key for key in keys if isinstance(key, bytes)]
    groups: dict[bytes, list[bytes]] = {}
    if len(tails := {key[-4:] for key in keys}) == 1 and min(map(len, keys)) > 4:
        groups[tails.pop()] = [key[:-4] for key in keys]
    else:
        for key in keys:
            block_hash, group = (key[:-4], key[-4:]) if len(key) > 4 else (key, bytes(4))
            groups.setdefault(group, []).append(block_hash)
    return {int.from_bytes(group, "big"): hashes for group, hashes in groups.items()}


def _bind(socket: Any, endpoint: str) -> str:
    found = re.fullmatch(r"tcp://.*:([0-9]+)", endpoint)
    if found is not None and int(found[1]) >= 1 << 16:  # libzmq would bind the port modulo 65,536
        raise ValueError(f"cannot bind {endpoint!r}: the port must be < 65536")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot bind {endpoint!r}: {error}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
