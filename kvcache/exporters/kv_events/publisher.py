"""KVEventPublisher: the engine's end: the scheduler queues events, and a thread sends them.

Encoding, sending and answering routers take longer than a scheduler's call, and a slow router must not delay it. The
thread is Python: a batch holds the interpreter's lock for some 0.5 ms, and then hands it over.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import zmq

from kvcache.background import Background, after_fork
from kvcache.control.watch import Watch
from kvcache.core.event_log import EventLog, TakenEvents
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.encoder import EVENT_COST, MAX_BATCH_KEYS, EventEncoder
from kvcache.exporters.kv_events.replies import MAX_FRAME_BYTES, ReplayBuffer, Replies
from kvcache.exporters.kv_events.sources import Descriptions, EventQueue, FollowedLog
from kvcache.exporters.kv_events.wire import AllBlocksCleared, EventBatch, KVEvent, array_event, to_bytes
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
DEFAULT_TOPIC = "kv@{host}@{model}"
"""The topic that llm-d filters, and reads the model from."""


class KVEventPublisher:
    """Publish a manager's events to routers; the caller never waits.

    Parameters
    ----------
    endpoint : str
        Where the PUB socket binds: ``"tcp://127.0.0.1:5557"``; with port 0 the system chooses one, see `endpoint`.
    replay_endpoint : str, optional
        Where the ROUTER socket for replays binds.
    topic : str
        First frame of every message; ``{host}``, ``{model}`` and ``{rank}`` are replaced.
    model : str
        The model's name, for the topic.
    block_size : int
        Tokens of a block, for events without a block size.
    buffer_batches : int
        Batches that are kept for replay, of 256 MiB at most.
    queue_events : int
        While this many events wait for the thread, `publish` drops further ones, and announces that every block is
        gone.
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
    topic : str
        As sent.

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
        topic: str = DEFAULT_TOPIC,
        model: str = "",
        block_size: int = 0,
        buffer_batches: int = 10_000,
        queue_events: int = 100_000,
        data_parallel_rank: int = 0,
        hash_format: str = "int",
        encoding: str = "map",
        spec_kinds: Sequence[str] = ("full_attention",),
    ) -> None:
        texts = {"endpoint": endpoint, "replay_endpoint": replay_endpoint or "", "topic": topic, "model": model}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"{name} must be a str, got {text!r}")
        check_int("block_size", block_size, 0, _MAX_NUMBER)
        check_int("buffer_batches", buffer_batches, 1, _MAX_NUMBER)
        self._rank = check_int("data_parallel_rank", data_parallel_rank, 0, _MAX_NUMBER)
        choice_of(*HASH_FORMATS)("hash_format", hash_format)
        self._has_arrays = choice_of(*ENCODINGS)("encoding", encoding) == "array"
        names = {"host": socket.gethostname(), "model": model, "rank": str(data_parallel_rank)}
        self.topic = re.sub(r"[{](host|model|rank)[}]", lambda match: names[match[1]], topic)
        self._encoder = EventEncoder(block_size, hash_format, [*map(parse_spec_kind, spec_kinds)])
        self._queue = EventQueue(check_int("queue_events", queue_events, 1, _MAX_NUMBER))
        self._followed: FollowedLog | None = None
        self._buffer = ReplayBuffer(self.topic.encode(), buffer_batches)
        # Looks at the sources that were begun, and that are done.
        self._num_begun = self._num_done = 0
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
        after_fork(self, KVEventPublisher._refuse_in_child)

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
        if self._followed is not None:
            raise ValueError("the publisher follows a manager already")
        if log.reader is not None:
            raise ValueError("the manager's events go to a publisher already")
        if self._thread.stopping.is_set() or not self._thread.is_alive:
            raise ValueError("the publisher is closed, and follows no manager")
        watch, wrapper = Watch.of(manager), Descriptions(self._queue, self._thread)
        watch.add(wrapper)  # may raise; then nothing has changed
        self._encoder.block_size = log.block_size or self._encoder.block_size
        self._queue.max_events = 0
        self._followed = FollowedLog(log, self._thread, partial(watch.remove, wrapper))

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
            self._queue.describe([*keys], prompt)

    def publish(self, events: Iterable[OffloadingEvent]) -> None:
        """Queue `events`, as `manager.take_events` returns them; for one thread. Costs O(1) for taken events.

        Raises
        ------
        ValueError
            An event that `take_events` did not make has a key that is not bytes, or a bad block size; nothing was
            queued. Or the publisher follows a manager.
        """
        queued = events if type(events) is TakenEvents else [*map(_checked, events)]
        if self._followed is not None and len(queued):
            raise ValueError("the publisher follows a manager, whose events it takes itself")
        self._queue.put(queued)

    def publish_cleared(self) -> None:
        """Queue that every block is gone: call it with `reset_cache` of a manager that is not followed."""
        if self._followed is not None:
            self._followed.clear()
        elif self._thread.is_alive:
            self._queue.clear()

    def stats(self) -> dict[str, int]:
        """Return counters since start by name, as `PublisherStats` describes them; for any thread."""
        return {
            "sent_batches": self._buffer.num_batches,
            "dropped_events": self._queue.num_dropped,
            "rejected_requests": 0 if self._replies is None else self._replies.num_rejected,
            "queued_events": self._queue.num_waiting,
        }

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait at most `timeout_s` until everything queued so far was sent; return whether it was."""
        end_s = time.monotonic() + timeout_s
        next_look = self._num_begun + 1
        while self._num_done < next_look:
            if not self._thread.is_alive:
                return not self._queue.num_dropped and not self._queue.num_waiting
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued events and release the sockets; waits at most `timeout_s`. May be called twice."""
        if not self._is_inherited:
            self._queue.max_events = 0
            self._thread.stop(timeout_s)
            self._unfollow()

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread") and not self._is_inherited:
            self._unfollow()

    def _refuse_in_child(self) -> None:
        """A forked child has no thread, so its copy of the publisher drops events."""
        self._is_inherited, self._queue.max_events = True, 0

    def _unfollow(self) -> None:
        self._queue.max_events = 0
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.end()

    # ---- the publishing thread -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Send the events that wait, and answer requests."""
        self._num_begun += 1
        followed, num_batches = self._followed, self._buffer.num_batches
        if followed is not None:
            self._queue.put_taken(followed.take())
        self._send_all()
        self._num_done = self._num_begun
        if self._replies is not None and self._replies.answer(self._buffer.messages):
            self._wait_ms = 1
        else:
            is_idle = self._buffer.num_batches == num_batches
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
        for item in self._queue.take():
            if item is None:
                self._encoder.clear()
                yield AllBlocksCleared(), EVENT_COST
            elif isinstance(item, tuple):
                self._encoder.describe(*item)
            else:
                yield from self._encoder.events(item)

    def _send(self, events: list[KVEvent]) -> None:
        sent = [*map(array_event, events)] if self._has_arrays else events
        payload = to_bytes(EventBatch(time.time(), sent, self._rank))
        self._pub.send_multipart(self._buffer.add(payload))


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
            # Read before the queue: events that were queued before the stop are still sent.
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


def _bind(socket_of: Any, endpoint: str) -> str:
    match = re.fullmatch(r"tcp://.*:([0-9]+)", endpoint)
    if match is not None and int(match[1]) >= 1 << 16:  # libzmq would bind the port modulo 65,536
        raise ValueError(f"cannot bind {endpoint!r}: the port must be < 65536")
    try:
        socket_of.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot bind {endpoint!r}: {error}") from None
    return str(socket_of.getsockopt_string(zmq.LAST_ENDPOINT))
