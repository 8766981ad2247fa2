"""KVEventPublisher: the engine's end: the scheduler queues events, and a thread sends them.

Encoding, sending and answering routers take longer than a scheduler's call, and a slow router must not delay it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import length_hint
from typing import Any

from kvcache.control.watch import Watch
from kvcache.core.event_log import EventLog, TakenEvents
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.publishing_thread import PublishingThread
from kvcache.options import check_int
from kvcache.request import Prompt

HASH_FORMATS = ("int", "bytes")
ENCODINGS = ("map", "array")
SPEC_KINDS = (
    "full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention",
    "sink_full_attention", "encoder_only_attention", "cross_attention",
)  # fmt: skip
"""vLLM's names of what a KV-cache group holds."""


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
        Events passed to `publish` that may wait for the thread. Beyond it they are dropped, and the view is cleared.
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
            if check_int(name, value, least) >= 1 << 62:
                raise ValueError(f"{name} must be < 2**62, got {value}")
        for name, text, known in (("hash_format", hash_format, HASH_FORMATS), ("encoding", encoding, ENCODINGS)):
            if text not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {text!r}")
        self._block_size, self._queue_events = block_size, queue_events
        self._num_dropped, self._is_behind_gap = 0, False
        self._is_following = False
        self._watch: Watch | None = None
        self._thread = PublishingThread(
            endpoint, replay_endpoint, topic, block_size, buffer_batches, digest_every, data_parallel_rank,
            hash_format, encoding, tuple(map(parse_spec_kind, spec_kinds)),
        )  # fmt: skip
        self.endpoint, self.replay_endpoint = self._thread.endpoint, self._thread.replay_endpoint
        # The thread has no reference to the publisher: dropping the publisher ends the thread, as `close` does.
        self._finalizer = weakref.finalize(self, self._thread.stop)
        self._thread.start()

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
        if self._is_following:
            raise ValueError("the publisher follows a manager already")
        self._thread.follow(log)
        self._is_following = True
        self._wrapper = _Descriptions(self._thread.describe)
        self._watch = Watch.of(manager)
        self._watch.add(self._wrapper)

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
        if not self._block_size:
            raise ValueError("a publisher with block_size=0 cannot describe blocks")
        self._thread.describe([*keys], prompt)

    def publish(self, events: Iterable[OffloadingEvent]) -> None:
        """Queue `events`, as `manager.take_events` returns them; for one thread. Costs O(1) for taken events.

        Raises
        ------
        ValueError
            An event that `take_events` did not make has a key that is not bytes, or a bad block size; nothing was
            queued. Or the publisher follows a manager.
        """
        if self._is_following:
            if any(True for _ in events):
                raise ValueError("the publisher follows a manager, whose events it takes itself")
            return
        queued = events if type(events) is TakenEvents else iter([_checked(event) for event in events])
        num_events, num_waiting = length_hint(queued), self._num_waiting()
        if not self._thread.is_alive() or (num_waiting and num_waiting + num_events > self._queue_events):
            self._num_dropped += num_events
            self._is_behind_gap = True
            return
        if self._is_behind_gap:
            self.publish_cleared()
            self._is_behind_gap = False
        self._thread.put(queued, num_events)

    def publish_cleared(self) -> None:
        """Queue that every block is gone: call it with `reset_cache` of a manager that is not followed."""
        self._thread.clear()

    def snapshot(self) -> tuple[int, dict[str, frozenset[tuple[bytes, int]]]]:
        """Return the number of the next batch and the blocks held before it, by medium; for any thread.

        Raises
        ------
        RuntimeError
            This process was forked from the publisher's.
        """
        return self._thread.snapshot()

    def stats(self) -> dict[str, int]:
        """Return counters since start by name, as `PublisherStats` describes them; for any thread."""
        return {
            "sent_batches": self._thread.num_batches,
            "dropped_events": self._num_dropped,
            "rejected_requests": self._thread.num_rejected,
            "queued_events": self._num_waiting(),
        }

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait at most `timeout_s` until everything queued so far was sent; return whether it was."""
        end_s = time.monotonic() + timeout_s
        next_look = self._thread.num_begun + 1
        while self._thread.num_done < next_look:
            if not self._thread.is_alive():
                return not self._num_dropped and not self._num_waiting()
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued events and release the sockets; waits at most `timeout_s`. May be called twice."""
        if self._watch is not None:
            self._watch.remove(self._wrapper)
        self._finalizer()
        self._thread.join(timeout_s)

    def _num_waiting(self) -> int:
        return self._thread.num_queued - self._thread.num_read

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Descriptions:
    """Passes the keys that a manager is about to store on, with their prompt."""

    names: Collection[str] = ("prepare_store",)

    def __init__(self, describe: Callable[[list[bytes], Prompt], None]) -> None:
        self._describe = describe

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        describe = self._describe

        def described(keys: Any, req_context: Any = None, *args: Any, **kwargs: Any) -> Any:
            output = method(keys, req_context, *args, **kwargs)
            prompt = getattr(req_context, "prompt", None)
            if prompt is not None and output is not None and output.keys_to_store:
                describe([*output.keys_to_store], prompt)
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
    if check_int("block_size", event.block_size, 0) >= 1 << 64:
        raise ValueError(f"block_size must be < 2**64, got {event.block_size}")
    return OffloadingEvent(keys, event.block_size, event.medium, event.removed, event.number)
