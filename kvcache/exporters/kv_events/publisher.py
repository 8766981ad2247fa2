"""KVEventPublisher: an engine's end: events are queued by the scheduler, and sent by a thread of their own.

Encoding, sending and answering routers take longer than a scheduler's call, and a slow router must not be felt there.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any

from kvcache.core.event_log import EventLog, TakenEvents
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.publishing_thread import PublishingThread


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
        Batches that are kept for replay, of 256 MiB at most.
    queue_events : int
        Events that may wait for the publishing thread. Beyond it they are merged by key, so that memory
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
        for name, text in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint), ("topic", topic)):
            if not isinstance(text, str) and (text is not None or name != "replay_endpoint"):
                raise ValueError(f"{name} must be a str, got {text!r}")
        for name, value, least in (
            ("buffer_batches", buffer_batches, 1),
            ("queue_events", queue_events, 1),
            ("digest_every", digest_every, 0),
            ("block_size", block_size, 0),
            ("data_parallel_rank", data_parallel_rank, 0),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
            if value >= 1 << 62:
                raise ValueError(f"{name} must be < 2**62, got {value!r}")
        self._queue_events = queue_events
        self._thread = PublishingThread(
            endpoint, replay_endpoint, topic, block_size, queue_events, buffer_batches, digest_every, data_parallel_rank
        )
        self.endpoint, self.replay_endpoint = self._thread.endpoint, self._thread.replay_endpoint
        self._queue, self._merged = self._thread.queue, self._thread.merged
        self._is_following = False
        # The thread holds all that it needs, and no publisher: one that is dropped ends it, as one that is closed.
        self._finalizer = weakref.finalize(self, self._thread.stop)
        self._thread.start()

    def follow(self, manager: Any) -> None:
        """Queue what comes to a manager's media and leaves them from now on, inside its own calls; for one manager.

        There is nothing to do per step then, and its `take_events` returns nothing. This costs less than `publish`: no
        event is made, and each key is copied while it is at hand. A reset of the manager is published, too.

        Parameters
        ----------
        manager : CPUOffloadingManager, TieredOffloadingManager or other owner of a BlockPool
            With ``enable_events=True``. Untaken events are queued first.

        Raises
        ------
        ValueError
            It keeps no events, they go to a publisher already, or this publisher follows another manager.

        Notes
        -----
        Events that find the queue full wait in the manager, `EventLog.max_keys` of them at most, and follow with later
        ones. Those that are dropped beyond that are a gap, behind which everything counts as cleared.
        """
        log = getattr(getattr(manager, "pool", manager), "events", None)
        if not isinstance(log, EventLog):
            raise ValueError(f"the manager must keep events (enable_events=True), got {manager!r}")
        if self._is_following:
            raise ValueError("the publisher follows a manager already")
        self._thread.follow(log)
        self._is_following = True

    def publish(self, events: Iterable[OffloadingEvent]) -> None:
        """Queue events, as `manager.take_events` returns them; for one thread.

        The keys are copied, and nobody is woken: the publishing thread looks by itself. Once
        the queue is full, they are merged by key, which costs about as much as a dict's item each.

        Parameters
        ----------
        events : iterable of OffloadingEvent
            As `manager.take_events` returns them.

        Raises
        ------
        ValueError
            A key is no bytes; nothing that `take_events` returned is queued then, and nothing of an event of others. Or
            the publisher follows a manager.
        """
        queue = self._queue
        if self._is_following and any(True for _ in events):
            raise ValueError("the publisher follows a manager, whose calls queue their events themselves")
        if type(events) is TakenEvents and queue.put_taken(events):
            return
        for event in events:
            if event.number and queue.last_number and event.number != queue.last_number + 1:
                # The manager's log has dropped events: what it holds is not known, so nothing is claimed.
                self.publish_cleared()
            if not queue.is_merging and len(queue) < self._queue_events:
                keys = event.keys if type(event.keys) is list else list(event.keys)
                queue.put(keys, event.medium, event.removed, event.block_size)
            else:
                self._thread.merge(event)
            queue.last_number = event.number or queue.last_number

    def publish_cleared(self) -> None:
        """Queue that everything has been forgotten: call it with `reset_cache` of a manager that is not followed."""
        self._thread.clear()

    # ---- what others may ask, from any thread ----------------------------------------------------------------

    def snapshot(self) -> tuple[int, dict[str, frozenset[tuple[bytes, int]]]]:
        """Return the number of the next batch, and the blocks that were held when it was taken, by medium.

        Returns
        -------
        tuple of (int, dict)
            Number of the next batch, and the blocks of each medium.

        Raises
        ------
        RuntimeError
            This process was forked from the publisher's.
        """
        return self._thread.snapshot()

    def stats(self) -> dict[str, int]:
        """Return counters since start: batches sent, events merged because the queue was full, bad requests refused.

        Returns
        -------
        dict of str to int
            Counters by name.
        """
        return {
            "sent_batches": self._thread.log.num_batches,
            "merged_events": self._merged.num_events,
            "rejected_requests": self._thread.num_rejected,
            "queued_events": len(self._queue),
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
        while self._thread.push_waiting() or len(self._queue) or self._queue.is_merging:
            if not self._thread.is_alive():
                return len(self._queue) == 0 and not self._thread.num_dropped
            if time.monotonic() >= end_s:
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
        self._finalizer()
        self._thread.join(timeout_s)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
