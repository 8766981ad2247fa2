"""KVEventPublisher: sends the events of a manager to routers, in a thread of its own.

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
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import zmq

from kvcache.background import Background, after_fork
from kvcache.control.watch import Watch
from kvcache.core.event_log import EventLog
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.encoder import EVENT_COST, MAX_BATCH_KEYS, EventEncoder
from kvcache.exporters.kv_events.wire import END_OF_REPLAY, EventBatch, KVEvent, array_event, to_bytes
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
DEFAULT_TOPIC = "kv@{host}@{model}"
"""Default topic: llm-d filters by it, and reads the model's name from it."""
_MAX_NUMBER = (1 << 62) - 1
_LEAST_WAIT_MS, _MAX_WAIT_MS = 4, 16  # between two looks: a wake-up takes the interpreter's lock from the scheduler
_PAUSE_S = 0.002  # between two batches: each hand-over of the interpreter's lock costs the scheduler time
_MAX_FRAME_BYTES = 1 << 16  # of a request or a subscription
_MAX_QUEUED = 64  # messages in the memory of each client's connection
_MAX_MESSAGES = 256  # of a reply that are sent between two looks at the events
_MAX_REQUESTS = 64  # that are read between two looks at the events
_STANDSTILL_S = 2.0
_MAX_KEPT_BYTES = 1 << 28


class KVEventPublisher:
    """Publish a manager's events to routers; the manager's calls never wait.

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
    buffer_batches : int
        Batches that are kept for replay, of 256 MiB at most.
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
        buffer_batches: int = 10_000,
        data_parallel_rank: int = 0,
        hash_format: str = "int",
        encoding: str = "map",
        spec_kinds: Sequence[str] = ("full_attention",),
    ) -> None:
        texts = {"endpoint": endpoint, "replay_endpoint": replay_endpoint or "", "topic": topic, "model": model}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"{name} must be a str, got {text!r}")
        check_int("buffer_batches", buffer_batches, 1, _MAX_NUMBER)
        self._rank = check_int("data_parallel_rank", data_parallel_rank, 0, _MAX_NUMBER)
        choice_of(*HASH_FORMATS)("hash_format", hash_format)
        self._has_arrays = choice_of(*ENCODINGS)("encoding", encoding) == "array"
        names = {"host": socket.gethostname(), "model": model, "rank": str(data_parallel_rank)}
        self.topic = re.sub(r"[{](host|model|rank)[}]", lambda match: names[match[1]], topic)
        self._encoder = EventEncoder(hash_format, [*map(parse_spec_kind, spec_kinds)])
        self._source: _Source | None = None
        # Numbers of looks at the source that have begun, and that have ended.
        self._num_begun = self._num_done = 0
        self._is_inherited = False  # by a forked process, which has no thread
        context = zmq.Context()
        try:
            self._pub = context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            self.endpoint = _bind(self._pub, endpoint)
            router = None if replay_endpoint is None else context.socket(zmq.ROUTER)
            self._replay = Replay(self.topic.encode(), buffer_batches, router)
            self.replay_endpoint = None if router is None else _bind(router, replay_endpoint or "")
        except BaseException:
            context.destroy(linger=0)
            raise
        # The thread has no reference to the publisher while it waits: dropping the publisher ends it.
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
            The manager records no events, another publisher follows it, or this one has followed a manager before.

        Notes
        -----
        Events wait in the manager, at most `EventLog.max_keys` keys of them. Beyond that the oldest ones are dropped,
        and the publisher announces that everything was cleared.
        """
        log = getattr(getattr(manager, "pool", manager), "events", None)
        if not isinstance(log, EventLog):
            raise ValueError(f"the manager must keep events (enable_events=True), got {manager!r}")
        if self._thread.stopping.is_set() or not self._thread.is_alive:
            raise ValueError("the publisher is closed, and follows no manager")
        if self._source is not None:
            raise ValueError("the publisher follows a manager already")
        if log.reader is not None:
            raise ValueError("the manager's events go to a publisher already")
        self._encoder.block_size = log.block_size
        self._source = _Source(log, Watch.of(manager), self._thread)

    def stats(self) -> dict[str, int]:
        """Return counters since start by name, as `PublisherStats` describes them; for any thread."""
        source = self._source
        return {
            "sent_batches": self._replay.num_batches,
            "dropped_events": 0 if source is None else source.log.num_dropped,
            "rejected_requests": self._replay.num_rejected,
            "queued_events": 0 if source is None or source.has_ended else len(source.log),
        }

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait at most `timeout_s` until all events so far were sent; return whether they were, False if closed."""
        end_s = time.monotonic() + timeout_s
        next_look = self._num_begun + 1
        while self._num_done < next_look:
            if time.monotonic() >= end_s or not self._thread.is_alive:
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the events that wait and release the sockets; waits at most `timeout_s`. May be called twice."""
        if not self._is_inherited:
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
        """In a forked child: it has no thread, so events of its copy of the manager wait until the log drops them."""
        self._is_inherited = True

    def _unfollow(self) -> None:
        if self._source is not None:
            self._source.end()

    # ---- the publishing thread -------------------------------------------------------------------------------

    def _look(self) -> int:
        """Send the events that wait, and answer requests. Return milliseconds to wait for the next look, or 0."""
        self._num_begun += 1
        num_batches = self._replay.num_batches
        self._send_all()
        self._num_done = self._num_begun
        if self._replay.answer():
            return 1
        return _LEAST_WAIT_MS if self._replay.num_batches > num_batches else 0

    def _send_all(self) -> None:
        """Send all events that wait."""
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
        """Yield each event as it is sent, and its cost in keys."""
        for event in () if self._source is None else self._source.take(self._encoder.describe):
            if event is None:
                yield self._encoder.clear(), EVENT_COST
            else:
                yield from self._encoder.events(event)

    def _send(self, events: list[KVEvent]) -> None:
        sent = [*map(array_event, events)] if self._has_arrays else events
        payload = to_bytes(EventBatch(time.time(), sent, self._rank))
        self._pub.send_multipart(self._replay.add(payload))


def _run(
    reference: weakref.ref[KVEventPublisher],
    context: zmq.Context[Any],
    pub: Any,
    router: Any,
    stopping: threading.Event,
) -> None:
    """Send and answer until the publisher is closed or dropped, or its sockets fail; then close the sockets.

    The argument `pub` keeps its socket open until then, even if the publisher is garbage-collected.
    """
    wait_ms = _LEAST_WAIT_MS
    try:
        while (publisher := reference()) is not None:
            # Read before the events: those that were logged before the stop are still sent.
            is_last = stopping.is_set()
            wait_ms = publisher._look() or min(2 * wait_ms, _MAX_WAIT_MS)  # noqa: SLF001
            if is_last:
                return
            del publisher
            if router is None:
                stopping.wait(wait_ms / 1000)
            else:
                router.poll(wait_ms)
    except Exception:
        _LOG.exception("kvcache publishes no more KV events")
        if (publisher := reference()) is not None:
            publisher._unfollow()  # noqa: SLF001
    finally:
        context.destroy(linger=200)


class _Source:
    """The event log of a manager, read by one thread alone, and the descriptions of the blocks that it stores.

    It is a `kvcache.control.watch.Wrapper`: keys that are about to be stored are queued with their prompt.
    """

    names: Collection[str] = ("prepare_store",)

    def __init__(self, log: EventLog, watch: Watch, reader: Background) -> None:
        self.log, self.has_ended = log, False
        self.descriptions: deque[tuple[list[bytes], Prompt]] = deque()
        self._watch, self._reader = watch, reader
        self._last_number = 0
        watch.add(self)  # may raise; then nothing has changed
        log.reader = reader

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        descriptions, reader = self.descriptions, self._reader

        def described(keys: Any, req_context: Any = None, *args: Any, **kwargs: Any) -> Any:
            output = method(keys, req_context, *args, **kwargs)
            prompt = getattr(req_context, "prompt", None)
            if prompt is not None and output is not None and output.keys_to_store and reader.is_alive:
                descriptions.append(([*output.keys_to_store], prompt))
            return output

        return described

    def take(self, describe: Callable[[list[bytes], Prompt], object]) -> Iterator[OffloadingEvent | None]:
        """Take all events, and yield them in order. None: all blocks were cleared, or events are missing."""
        events = self.log.take(None, self._reader)
        # After the events: each block is described before its event is logged, so no description is missed.
        while self.descriptions:
            describe(*self.descriptions.popleft())
        for event in events:
            if self._last_number and event.number != self._last_number + 1:
                yield None
            self._last_number = event.number
            yield event
        # The last number that was taken may be that of a reset.
        if self._last_number < events.next_number - 1:
            self._last_number = events.next_number - 1
            yield None

    def end(self) -> None:
        """Stop taking events: the manager's own callers may take them again."""
        if not self.has_ended:
            self.has_ended = True
            self._watch.remove(self)
            self.log.reader = None


class Replay:
    """The last batches that were sent, at most `max_batches` and 256 MiB, and the ROUTER socket that sends them again.

    One reply is sent at a time, as fast as its client reads, so clients hold neither the memory nor the thread of the
    publisher. A client that reads nothing for 2 s loses the rest of its reply. `router` is not bound yet, or None.
    """

    def __init__(self, topic: bytes, max_batches: int, router: Any) -> None:
        self.num_batches = self.num_rejected = 0
        self._topic, self._max_batches = topic, max_batches
        self._payloads: deque[bytes] = deque()
        self._num_bytes = 0
        self._router = router
        self._reply: Iterator[None] = iter(())
        if router is not None:
            # The limits apply to connections made after they were set.
            router.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
            router.setsockopt(zmq.RCVHWM, 16)
            router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            router.setsockopt(zmq.SNDTIMEO, 0)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)

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

    def answer(self) -> bool:
        """Send more of the reply, or read requests and begin the next one; return whether a reply is unfinished."""
        for _ in range(_MAX_REQUESTS):
            if next(self._reply, self) is not self:
                return True
            if self._router is None or not self._router.poll(0):
                break
            frames = self._router.recv_multipart()
            # REQ sockets put an empty frame before the request, DEALER sockets need not.
            if len(frames) in (2, 3) and len(frames[-1]) == 8:
                self._reply = self._sending(frames[0], int.from_bytes(frames[-1], "big"))
            else:
                self.num_rejected += 1
        return False

    def _sending(self, client: bytes, seq: int) -> Iterator[None]:
        """Send a reply from the number `seq` on, and yield while its client takes no more, or between two looks."""
        for number, message in enumerate(self._messages(seq), 1):
            end_s = time.monotonic() + _STANDSTILL_S
            while True:
                try:
                    self._router.send_multipart((client, b"", *message))
                    break
                except zmq.ZMQError as error:
                    # An error other than EAGAIN: the client has disconnected.
                    if error.errno != zmq.EAGAIN or time.monotonic() > end_s:
                        self.num_rejected += 1
                        return
                yield
            if number % _MAX_MESSAGES == 0:
                yield

    def _messages(self, seq: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield the messages of a reply: every kept batch from `seq` on, and the end."""
        while seq < self.num_batches:
            # The client sees by the number that older batches are no longer kept.
            first = self.num_batches - len(self._payloads)
            seq = max(seq, first)
            yield self._topic, seq.to_bytes(8, "big"), self._payloads[seq - first]
            seq += 1
        yield b"", END_OF_REPLAY, b""


def parse_spec_kind(text: str) -> tuple[str, int | None]:
    """Return kind and window of ``"sliding_window:4096"``; ValueError if it is not a kind."""
    kind, colon, window = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in SPEC_KINDS or (colon and not window.isdecimal()):
        known = ", ".join(SPEC_KINDS)
        raise ValueError(f"spec_kinds must hold names of {known}, perhaps with ':WINDOW', got {text!r}")
    return kind, int(window) if colon else None


def _bind(socket_of: Any, endpoint: str) -> str:
    match = re.fullmatch(r"tcp://.*:([0-9]+)", endpoint)
    if match is not None and int(match[1]) >= 1 << 16:  # libzmq would bind the port modulo 65,536
        raise ValueError(f"cannot bind {endpoint!r}: the port must be < 65536")
    try:
        socket_of.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot bind {endpoint!r}: {error}") from None
    return str(socket_of.getsockopt_string(zmq.LAST_ENDPOINT))
