"""KVEventPublisher: the engine's end: the scheduler queues events, and a thread sends them.

Encoding, sending and answering routers take longer than a scheduler's call, and a slow router must not delay it. The
thread is Python: a batch holds the interpreter's lock for some 0.5 ms, and then hands it over.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import zmq

from kvcache.background import Background
from kvcache.control.watch import Watch
from kvcache.core.event_log import EventLog, TakenEvents
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.encoder import EVENT_COST, MAX_BATCH_KEYS, EventEncoder
from kvcache.exporters.kv_events.replies import MAX_FRAME_BYTES, Messages, Replies
from kvcache.exporters.kv_events.view import BlockView
from kvcache.exporters.kv_events.wire import (
    DIGEST_PREFIX,
    DIGEST_REQUEST,
    END_OF_REPLAY,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    Digest,
    EventBatch,
    KVEvent,
    array_event,
    to_bytes,
)
from kvcache.options import check_int, choice_of
from kvcache.request import Prompt

_LOG = logging.getLogger(__name__)
HASH_FORMATS = ("int", "bytes")
ENCODINGS = ("map", "array")
SPEC_KINDS = (
    "full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention",
    "sink_full_attention", "encoder_only_attention", "cross_attention",
)  # fmt: skip
"""vLLM's names of what a KV-cache group holds."""
_MAX_NUMBER = (1 << 62) - 1
_LEAST_WAIT_MS, _MAX_WAIT_MS = 4, 16  # between two looks: a wake-up takes the interpreter's lock from the scheduler
_PAUSE_S = 0.002  # between two batches: each hand-over of the interpreter's lock costs the scheduler time
_MAX_KEPT_BYTES = 1 << 28
_SNAPSHOT_KEYS = 4096  # of one message; copying and encoding them takes some 1 ms
_SNAPSHOT_PAUSE_S = 0.0002  # shorter, because events wait meanwhile
_EPOCH_BITS = 53  # exact in every language


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
        Tokens of a block, for events without a block size.
    buffer_batches : int
        Batches that are kept for replay, of 256 MiB at most.
    queue_events : int
        While this many events wait for the thread, `publish` drops further ones, and the view is cleared.
    digest_every : int
        Batches between two digests; 0: none.
    data_parallel_rank : int
        Rank of the engine, in every batch.
    hash_format : str
        ``"int"``: the last 8 bytes of each block hash, as vLLM sends by default. ``"bytes"``: the whole hash.
    encoding : str
        ``"map"``: events as vLLM 0.24 and later send them. ``"array"``: the layout before, for other routers only.
    spec_kinds : sequence of str
        What each KV-cache group holds, by vLLM's names; ``"sliding_window:4096"`` adds the window's size. Groups
        beyond them have no kind; routers ignore these groups, except for group 0.

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
    A slow subscriber loses messages at ZeroMQ's high-water mark; the publisher and other subscribers do not wait.
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
        hash_format: str = "int",
        encoding: str = "map",
        spec_kinds: Sequence[str] = ("full_attention",),
    ) -> None:
        for name, text in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint or ""), ("topic", topic)):
            if not isinstance(text, str):
                raise ValueError(f"{name} must be a str, got {text!r}")
        check_int("block_size", block_size, 0, _MAX_NUMBER)
        self._max_kept = check_int("buffer_batches", buffer_batches, 1, _MAX_NUMBER)
        self._queue_events = check_int("queue_events", queue_events, 1, _MAX_NUMBER)
        self._digest_every = check_int("digest_every", digest_every, 0, _MAX_NUMBER)
        self._rank = check_int("data_parallel_rank", data_parallel_rank, 0, _MAX_NUMBER)
        choice_of(*HASH_FORMATS)("hash_format", hash_format)
        self._has_arrays = choice_of(*ENCODINGS)("encoding", encoding) == "array"
        self._topic = topic.encode()
        self._view = BlockView()
        self._view_lock = threading.Lock()  # `snapshot` reads in other threads
        self._encoder = EventEncoder(block_size, hash_format, [*map(parse_spec_kind, spec_kinds)], self._view)
        self._epoch = secrets.randbits(_EPOCH_BITS)
        # Events; None: everything was cleared; or keys that are about to be stored, and their prompt.
        self._queue: deque[Collection[OffloadingEvent] | TakenEvents | tuple[list[bytes], Prompt] | None] = deque()
        # Events that were queued and read, written by the queueing thread and by the publishing one.
        self._num_queued = self._num_read = 0
        self._num_dropped, self._gap_at = 0, -1
        # Looks at the queue that were begun, and that are done.
        self._num_begun = self._num_done = 0
        self._last_number = self._num_batches = 0
        self._kept: deque[bytes] = deque()
        self._num_kept_bytes = 0
        self._log: EventLog | None = None
        self._unwatch: Callable[[], None] | None = None
        self._wait_ms = _LEAST_WAIT_MS
        self._is_inherited = False  # by a forked process, which has no thread
        context = zmq.Context()
        try:
            self._pub = context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self.endpoint = _bind(self._pub, endpoint)
            self._replies = None if replay_endpoint is None else Replies(context)
            self.replay_endpoint = None if self._replies is None else _bind(self._replies.socket, replay_endpoint or "")
        except BaseException:
            context.destroy(linger=0)
            raise
        # The thread has no reference to the publisher while it waits: dropping the publisher ends it.
        router = None if self._replies is None else self._replies.socket
        self._thread = Background("kv-events", partial(_run, weakref.ref(self), context, self._pub, router))
        _PUBLISHERS.add(self)

    def follow(self, manager: Any) -> None:
        """Publish the events of `manager` from now on, resets included, without a call per step.

        `manager` is a CPUOffloadingManager, TieredOffloadingManager or other owner of a BlockPool, made with
        ``enable_events=True``. Events that wait in it are sent first. Its `take_events` returns nothing from now on.
        Blocks of requests with a `ReqContext.prompt` are described.

        Raises
        ------
        ValueError
            The manager keeps no events, they go to a publisher already, or this publisher follows another manager.

        Notes
        -----
        Events wait in the manager, at most `EventLog.max_keys` keys of them. Beyond that the oldest ones are dropped,
        and the publisher announces that everything was cleared.
        """
        log = getattr(getattr(manager, "pool", manager), "events", None)
        if not isinstance(log, EventLog):
            raise ValueError(f"the manager must keep events (enable_events=True), got {manager!r}")
        if self._log is not None:
            raise ValueError("the publisher follows a manager already")
        if log.reader is not None:
            raise ValueError("the manager's events go to a publisher already")
        if self._thread.stopping.is_set() or not self._thread.is_alive:
            raise ValueError("the publisher is closed, and follows no manager")
        self._encoder.block_size = log.block_size or self._encoder.block_size
        log.reader, self._log = self._thread, log
        self._queue_events = 0
        watch, wrapper = Watch.of(manager), _Descriptions(self._queue, self._thread)
        watch.add(wrapper)
        self._unwatch = partial(watch.remove, wrapper)

    def describe(self, keys: list[bytes], prompt: Prompt) -> None:
        """Give the tokens of blocks before their events: call it with ``keys_to_store``, if no manager is followed.

        Parameters
        ----------
        keys : list of bytes
            Offload keys.
        prompt : Prompt
            The request's tokens and all keys of its blocks.

        Raises
        ------
        ValueError
            The publisher has no `block_size`.
        """
        if not self._encoder.block_size:
            raise ValueError("a publisher with block_size=0 cannot describe blocks")
        if self._thread.is_alive:
            self._queue.append(([*keys], prompt))

    def publish(self, events: Iterable[OffloadingEvent]) -> None:
        """Queue `events`, as `manager.take_events` returns them; for one thread. Costs O(1) for taken events.

        Raises
        ------
        ValueError
            An event that `take_events` did not make has a key that is not bytes, or a bad block size; nothing was
            queued. Or the publisher follows a manager.
        """
        queued = events if type(events) is TakenEvents else [*map(_checked, events)]
        if self._num_queued - self._num_read >= self._queue_events:
            self._drop(len(queued))
            return
        self._num_queued += len(queued)
        self._queue.append(queued)

    def _drop(self, num_events: int) -> None:
        if not num_events:
            return
        if self._log is not None:
            raise ValueError("the publisher follows a manager, whose events it takes itself")
        self._num_dropped += num_events
        if self._gap_at != self._num_queued:
            self._gap_at = self._num_queued
            self._queue.append(None)

    def publish_cleared(self) -> None:
        """Queue that every block is gone: call it with `reset_cache` of a manager that is not followed."""
        if self._log is not None:
            self._log.clear()
        elif self._thread.is_alive:
            self._queue.append(None)

    def snapshot(self) -> tuple[int, dict[str, frozenset[tuple[bytes, int]]]]:
        """Return the number of the next batch and the blocks held before it, by medium; for any thread.

        Raises
        ------
        RuntimeError
            This process was forked from the publisher's.
        """
        if self._is_inherited:
            raise RuntimeError("the publisher belongs to the process that this one was forked from")
        with self._view_lock:
            return self._num_batches, self._view.media()

    def stats(self) -> dict[str, int]:
        """Return counters since start by name, as `PublisherStats` describes them; for any thread."""
        return {
            "sent_batches": self._num_batches,
            "dropped_events": self._num_dropped,
            "rejected_requests": 0 if self._replies is None else self._replies.num_rejected,
            "queued_events": self._num_queued - self._num_read,
        }

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait at most `timeout_s` until everything queued so far was sent; return whether it was."""
        end_s = time.monotonic() + timeout_s
        next_look = self._num_begun + 1
        while self._num_done < next_look:
            if not self._thread.is_alive:
                return not self._num_dropped and self._num_queued == self._num_read
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued events and release the sockets; waits at most `timeout_s`. May be called twice."""
        if not self._is_inherited:
            self._queue_events = 0
            self._thread.stop(timeout_s)
            self._unfollow()

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread") and not self._is_inherited:
            self._unfollow()

    def _unfollow(self) -> None:
        self._queue_events = 0
        if self._unwatch is not None:
            self._unwatch()
        if self._log is not None:
            self._log.reader = None
            self._log = None

    # ---- the publishing thread -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Send the events that wait, and answer requests."""
        self._num_begun += 1
        log = self._log
        if log is not None:
            taken = log.take(None, self._thread)
            self._num_queued += len(taken)
            self._queue.append(taken)
        num_batches = self._num_batches
        self._send_all()
        self._num_done = self._num_begun
        if self._replies is not None and self._replies.answer(self._messages):
            self._wait_ms = 1
        else:
            is_idle = self._num_batches == num_batches
            self._wait_ms = min(2 * self._wait_ms, _MAX_WAIT_MS) if is_idle else _LEAST_WAIT_MS

    def _send_all(self) -> None:
        """Send all events that are queued."""
        batch: list[KVEvent] = []
        cost = 0
        for event, event_cost in self._wire_events():
            batch.append(event)
            cost += event_cost
            if cost >= MAX_BATCH_KEYS:
                self._send(batch)
                batch, cost = [], 0
                self._thread.stopping.wait(_PAUSE_S)
        if batch:
            self._send(batch)

    def _wire_events(self) -> Iterator[tuple[KVEvent, int]]:
        """Yield each queued event as it is sent, and its cost in keys."""
        cleared = AllBlocksCleared(), EVENT_COST
        while self._queue:
            queued = self._queue.popleft()
            if queued is None:
                self._last_number = 0
                yield cleared
            elif isinstance(queued, tuple):
                self._encoder.describe(*queued)
            else:
                for event in queued:
                    if event.number:
                        if self._last_number and event.number != self._last_number + 1:
                            # Events were dropped, so the held blocks are unknown: announce none of them.
                            yield cleared
                        self._last_number = event.number
                    self._num_read += 1
                    yield from self._encoder.events(event)
                # The last number that was taken may be that of a reset.
                if type(queued) is TakenEvents and self._last_number < queued.next_number - 1:
                    self._last_number = queued.next_number - 1
                    yield cleared

    def _send(self, events: list[KVEvent]) -> None:
        seq, payload = self._num_batches, self._payload(events)
        with self._view_lock:
            self._view.apply(EventBatch(0.0, events))
            self._num_batches += 1
        self._kept.append(payload)
        self._num_kept_bytes += len(payload)
        while len(self._kept) > self._max_kept or (self._num_kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1):
            self._num_kept_bytes -= len(self._kept.popleft())
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        # The first batch has a digest, too: it shows early that this publisher is another one than before.
        if self._digest_every and (seq == 0 or self._num_batches % self._digest_every == 0):
            self._pub.send_multipart((DIGEST_PREFIX + self._topic, seq.to_bytes(8, "big"), self._digest(seq)))

    def _payload(self, events: list[KVEvent]) -> bytes:
        sent = [*map(array_event, events)] if self._has_arrays else events
        return to_bytes(EventBatch(time.time(), sent, self._rank))

    def _digest(self, seq: int) -> bytes:
        return to_bytes(Digest(seq, self._view.digests(), self._epoch))

    def _messages(self, request: bytes) -> Messages:
        """Yield the messages of a reply."""
        if request in (SNAPSHOT_REQUEST, DIGEST_REQUEST):
            seq, end = self._num_batches, self._digest(self._num_batches)
            parts = []
            if request == SNAPSHOT_REQUEST:
                # Events wait until the copy is whole; only this thread changes the view.
                for part in self._view.parts(_SNAPSHOT_KEYS):
                    parts.append(part)
                    time.sleep(_SNAPSHOT_PAUSE_S)
            for medium, group_idx, hashes in parts:
                event = self._encoder.stored(hashes, medium, group_idx, self._encoder.block_size)
                yield self._topic, seq.to_bytes(8, "big"), self._payload([event])
            yield b"", END_OF_REPLAY, end
            return
        seq = int.from_bytes(request, "big")
        while seq < self._num_batches:
            # The client sees by the number that older batches are no longer kept.
            first = self._num_batches - len(self._kept)
            seq = max(seq, first)
            yield self._topic, seq.to_bytes(8, "big"), self._kept[seq - first]
            seq += 1
        yield b"", END_OF_REPLAY, b""


def _run(
    reference: weakref.ref[KVEventPublisher],
    context: zmq.Context[Any],
    pub: Any,
    router: Any,
    stopping: threading.Event,
) -> None:
    """Send and answer until the publisher is closed or dropped, or its sockets fail; then close the sockets."""
    try:
        while (publisher := reference()) is not None:
            is_last = stopping.is_set()
            publisher._look()
            if is_last:
                return
            wait_ms = publisher._wait_ms
            del publisher
            if router is None:
                stopping.wait(wait_ms / 1000)
            else:
                router.poll(wait_ms)
    except Exception:
        _LOG.exception("kvcache publishes no more KV events")
        if (publisher := reference()) is not None:
            publisher._unfollow()
    finally:
        context.destroy(linger=200)


_PUBLISHERS: weakref.WeakSet[KVEventPublisher] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """A forked child has no thread, so its copies of publishers drop events."""
    for publisher in [*_PUBLISHERS]:
        publisher._is_inherited, publisher._queue_events = True, 0


os.register_at_fork(after_in_child=_refuse_in_child)


class _Descriptions:
    """Queues the keys that a manager is about to store, with their prompt."""

    names: Collection[str] = ("prepare_store",)

    def __init__(self, queue: deque[Any], thread: Background) -> None:
        self._queue, self._thread = queue, thread

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        queue, thread = self._queue, self._thread

        def described(keys: Any, req_context: Any = None, *args: Any, **kwargs: Any) -> Any:
            output = method(keys, req_context, *args, **kwargs)
            prompt = getattr(req_context, "prompt", None)
            if prompt is not None and output is not None and output.keys_to_store and thread.is_alive:
                queue.append(([*output.keys_to_store], prompt))
            return output

        return described


def parse_spec_kind(text: str) -> tuple[str, int | None]:
    """Return kind and window of ``"sliding_window:4096"``; ValueError if it is not a kind."""
    kind, colon, window = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in SPEC_KINDS or (colon and not window.isdecimal()):
        known = ", ".join(SPEC_KINDS)
        raise ValueError(f"spec_kinds must hold names of {known}, perhaps with ':WINDOW', got {text!r}")
    return kind, int(window) if colon else None


def _checked(event: OffloadingEvent) -> OffloadingEvent:
    """Return a copy of a caller's event; ValueError if it cannot be encoded."""
    keys = [*event.keys]
    for key in keys:
        if not isinstance(key, bytes):
            raise ValueError(f"a key must be bytes, got {key!r:.80}")
    check_int("block_size", event.block_size, 0, (1 << 64) - 1)
    return OffloadingEvent(keys, event.block_size, event.medium, event.removed, event.number)


def _bind(socket: Any, endpoint: str) -> str:
    found = re.fullmatch(r"tcp://.*:([0-9]+)", endpoint)
    if found is not None and int(found[1]) >= 1 << 16:  # libzmq would bind the port modulo 65,536
        raise ValueError(f"cannot bind {endpoint!r}: the port must be < 65536")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot bind {endpoint!r}: {error}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
