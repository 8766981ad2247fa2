"""PublishingThread: the sockets of a publisher, the thread that uses them, and events that were too many to queue.

The thread runs compiled code without the GIL; it comes back to Python for merged events and for requests of routers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import threading
import time
import weakref
from typing import Any

import msgspec
import zmq
from zmq.backend.cython import _zmq as zmq_library

from kvcache.core.event_log import EventLog
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.batches import BatchLog
from kvcache.exporters.kv_events.queue import EventQueue
from kvcache.exporters.kv_events.sender import BatchSender, Reply
from kvcache.exporters.kv_events.wire import DIGEST_PREFIX, DIGEST_REQUEST, SNAPSHOT_REQUEST, Digest

_LOG = logging.getLogger(__name__)
_MAX_OWED = 64  # replies under way
_MAX_REQUESTS = 256  # looked at before batches are sent again
_MAX_QUEUED_REPLIES = 64  # messages in the memory of each client's connection
_STANDSTILL_S = 10.0
_MAX_FRAME_BYTES = 1 << 16  # of a request or a subscription; libzmq bounds neither parts of a message nor subscriptions
_EPOCH_BITS = 53  # exact in every language


class MergedEvents:
    """What came while the queue was full: of each key of a medium, whether it was removed last."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, bytes], bool] = {}
        self.num_events = 0
        """Events that were ever merged."""

    def add(self, event: OffloadingEvent) -> None:
        """Merge an event, or raise ValueError where a key is no bytes."""
        if wrong := [key for key in event.keys if not isinstance(key, bytes)]:
            raise ValueError(f"a key must be bytes, got {wrong[0]!r:.80}")
        self.num_events += 1
        for key in event.keys:
            self._last[event.medium, key] = event.removed

    def clear(self) -> None:
        """Forget all."""
        self._last = {}

    def put_into(self, queue: EventQueue) -> None:
        """Put all into a queue, what was removed first."""
        for removed in (True, False):
            by_medium: dict[str, list[bytes]] = {}
            for (medium, key), is_removed in self._last.items():
                if is_removed is removed:
                    by_medium.setdefault(medium, []).append(key)
            for medium, keys in by_medium.items():
                queue.put(keys, medium, removed)


class PublishingThread(threading.Thread):
    """Sends what is queued, and answers requests; parameters and errors as of `KVEventPublisher`.

    Attributes
    ----------
    endpoint, replay_endpoint : str
        As bound.
    queue : EventQueue
        What the scheduler puts its events in.
    merged : MergedEvents
        Events that found the queue full.
    log : BatchLog
        What was sent.
    num_rejected : int
        Requests that were none, came while another of the same client was being answered, or whose client took no more.
    num_dropped : int
        Events that came after the end.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        block_size: int,
        queue_events: int,
        buffer_batches: int,
        digest_every: int,
        data_parallel_rank: int,
    ) -> None:
        super().__init__(name="kvcache-kv-events", daemon=True)
        self.queue = EventQueue(block_size, queue_events)
        self.merged = MergedEvents()
        self.log = BatchLog(self.queue, buffer_batches, data_parallel_rank)
        self.num_rejected = self.num_dropped = 0
        # Of what is merged and of who puts events in: the scheduler, or this thread where it puts in what was merged.
        self._lock = threading.Lock()
        # By client: what it is owed, and when it last took some of it.
        self._owed: dict[bytes, tuple[Reply, float]] = {}
        self._has_ended = self._is_inherited = False
        self._followed: EventLog | None = None
        self._digest_topic = DIGEST_PREFIX + topic.encode()
        self._epoch = secrets.randbits(_EPOCH_BITS)
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            self.endpoint = _bind(self._pub, endpoint)
            self._router = None if replay_endpoint is None else self._context.socket(zmq.ROUTER)
            if self._router is not None:
                # A client that does not read its replies must not hold memory, nor the thread. Set before the socket is
                # bound: later, it would count for nobody who connects.
                self._router.setsockopt(zmq.SNDHWM, _MAX_QUEUED_REPLIES)
                self._router.setsockopt(zmq.RCVHWM, 16)
                self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
                self._router.setsockopt(zmq.SNDTIMEO, 0)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.replay_endpoint = None if self._router is None else _bind(self._router, replay_endpoint or "")
            self._sender = BatchSender(
                self.log,
                self.queue,
                ctypes.CDLL(zmq_library.__file__),
                self._pub.underlying,
                0 if self._router is None else self._router.underlying,
                topic.encode(),
                self._digest_topic,
                digest_every,
                block_size,
                self._epoch,
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        _THREADS.add(self)

    def follow(self, log: EventLog) -> None:
        """Let a manager's log give its events to the queue, until this thread is stopped."""
        if self._sender.is_stopped or self._has_ended:
            raise ValueError("the publisher is closed, and follows no manager")
        self.queue.block_size = log.block_size or self.queue.block_size
        log.forward_to(self.queue)
        self._followed = log

    def push_waiting(self) -> bool:
        """Queue some of what the manager's log had no room for here; return whether more waits there."""
        self.queue.has_refused = False
        return self._followed is not None and self._followed.push()

    def merge(self, event: OffloadingEvent) -> None:
        """Merge an event that finds the queue full; for the scheduler's thread."""
        with self._lock:
            if self._has_ended:
                self.num_dropped += 1
                return
            self.merged.add(event)
            self.queue.is_merging = True

    def clear(self) -> None:
        """Queue that everything was cleared; what was merged counts no more."""
        if self._followed is not None:
            # Guarded as the manager's calls are, which may be other threads'.
            self._followed.clear()
            return
        with self._lock:
            if not self._has_ended:
                self.merged.clear()
                self.queue.is_merging = False
                self.queue.put_cleared()

    def snapshot(self) -> tuple[int, dict[str, frozenset[tuple[bytes, int]]]]:
        """Return what is held, see `KVEventPublisher.snapshot`."""
        if self._is_inherited:
            # Perhaps the thread was just changing it.
            raise RuntimeError("the publisher belongs to the process that this one was forked from")
        return self.log.snapshot()

    def stop(self) -> None:
        """Let the thread send what is queued, and end."""
        if self._followed is not None:
            self._followed.forward_to(None)
        self._sender.stop()

    def run(self) -> None:
        """Send and answer until the publisher is closed, or nothing more can be sent."""
        _stand_back()
        has_waiting = False
        try:
            while True:
                is_last = self._sender.is_stopped
                has_requests = self._sender.run(bool(self._owed) or has_waiting)
                if self.queue.is_merging:
                    self._take_merged()
                has_waiting = self.push_waiting()
                if has_requests and self._router is not None:
                    self._take_requests(self._router)
                if self._owed:
                    self._go_on_with_replies()
                if is_last:
                    self._sender.run()  # what was merged
                    break
        except Exception:
            _LOG.exception("kvcache publishes no more KV events")
        finally:
            self._drop_events()
            self._context.destroy(linger=200)

    def _drop_events(self) -> None:
        """Let what is published from now on be dropped: nobody takes it."""
        with self._lock:
            self._has_ended = True
            self.merged.clear()
            self.queue.is_merging = True

    def leave_to_parent(self) -> None:
        """In a child that was forked: this thread is not there, and its locks may be held."""
        self._lock = threading.Lock()
        self._is_inherited = True
        self._drop_events()

    def _take_merged(self) -> None:
        with self._lock:
            # Only when all that came before has been sent; the scheduler may queue again from then on.
            if len(self.queue) or not self.queue.is_merging:
                return
            gap = msgspec.msgpack.encode(Digest(self.log.num_batches, gap=1, epoch=self._epoch))
            self._pub.send_multipart((self._digest_topic, self.log.num_batches.to_bytes(8, "big"), gap))
            self.merged.put_into(self.queue)
            self.merged.clear()
            self.queue.is_merging = False

    def _take_requests(self, router: Any) -> None:
        for _ in range(_MAX_REQUESTS):
            if not router.poll(0):
                break
            frames = router.recv_multipart()
            # REQ sockets put an empty frame before the request, DEALER sockets need not.
            client, request = frames[0], frames[-1]
            is_known = len(frames) in (2, 3) and len(request) == 8
            if not is_known or client in self._owed or len(self._owed) >= _MAX_OWED:
                self.num_rejected += 1
                continue
            if request in (SNAPSHOT_REQUEST, DIGEST_REQUEST):
                reply = Reply(client, has_keys=request == SNAPSHOT_REQUEST)
            else:
                reply = Reply(client, int.from_bytes(request, "big"))
            self._go_on(client, reply, time.monotonic())

    def _go_on_with_replies(self) -> None:
        for client, (reply, since_s) in [*self._owed.items()]:
            self._go_on(client, reply, since_s)

    def _go_on(self, client: bytes, reply: Reply, since_s: float) -> None:
        """Send what a client takes of its reply; one that has gone, or stands still, may ask again."""
        num_messages = reply.num_messages
        try:
            if self._sender.go_on(reply):
                self._owed.pop(client, None)
                return
            now_s = time.monotonic()
            if reply.num_messages > num_messages:
                since_s = now_s
            elif now_s - since_s > _STANDSTILL_S:
                raise TimeoutError("a client stands still")
            self._owed[client] = reply, since_s
        except (OSError, MemoryError):
            self._owed.pop(client, None)
            self.num_rejected += 1


_THREADS: weakref.WeakSet[PublishingThread] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for thread in [*_THREADS]:
        thread.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _stand_back() -> None:
    """Let this thread wake up without taking the processor of one that runs, such as the scheduler's; Linux only."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _bind(socket: Any, endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot bind {endpoint!r}: {error}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
