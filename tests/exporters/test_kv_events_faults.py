"""Hostile and unlucky peers of KV events: clocks that go back, replies that are none, readers that stand still."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kvcache import OffloadingEvent, make_offload_key
from kvcache.exporters.kv_events import (
    DIGEST_PREFIX,
    END_OF_REPLAY,
    BlockStored,
    Digest,
    EventBatch,
    KVEventPublisher,
    KVEventSubscriber,
)

ANY_PORT = "tcp://127.0.0.1:0"
NOWHERE = "tcp://127.0.0.1:1"
encode = msgspec.msgpack.encode


def key(number: int, group_idx: int = 0) -> bytes:
    return make_offload_key(number.to_bytes(8, "big"), group_idx)


def stored(*numbers: int) -> OffloadingEvent:
    return OffloadingEvent([key(number) for number in numbers], 16, "CPU", False)


def batch(ts: float, number: int, group_idx: int = 0) -> EventBatch:
    return EventBatch(
        ts, [BlockStored([number.to_bytes(8, "big")], None, [], 16, None, "CPU", None, group_idx=group_idx)]
    )


def message(seq: int, payload: EventBatch) -> list[bytes]:
    return [b"kv-events", seq.to_bytes(8, "big"), encode(payload)]


def numbers_held(subscriber: KVEventSubscriber) -> set[int]:
    return {int.from_bytes(block, "big") for block, _ in subscriber.view.media().get("CPU", ())}


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    with KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=4) as made:
        yield made


@pytest.fixture
def follower(publisher: KVEventPublisher) -> Iterator[KVEventSubscriber]:
    """A subscriber to a publisher that has gone; another one, whose clock is an hour behind, answers in its place."""
    with KVEventSubscriber(NOWHERE, publisher.replay_endpoint or "", timeout_s=30) as made:
        for seq in range(5):
            made.receive(message(seq, batch(time.time() + 3600 + seq, 100 + seq)))
        assert numbers_held(made) == {100, 101, 102, 103, 104}
        yield made


def test_first_batch_of_a_restarted_publisher_clears_the_view_though_its_clock_is_behind(follower):
    follower.receive(message(0, batch(time.time(), 7)))
    assert numbers_held(follower) == {7}


def test_later_batch_of_a_restarted_publisher_asks_for_a_snapshot_though_its_clock_is_behind(publisher, follower):
    for number in (1, 2):
        publisher.publish([stored(number)])
        assert publisher.flush(30)
    follower.receive(message(1, batch(time.time(), 2)))
    assert numbers_held(follower) == {1, 2}
    assert follower.is_verified


def test_digest_of_a_restarted_publisher_asks_for_a_snapshot(publisher, follower):
    publisher.publish([stored(1)])
    assert publisher.flush(30)
    follower.receive([DIGEST_PREFIX + b"kv-events", bytes(8), encode(Digest(0, {"CPU": (1, 1)}))])
    assert numbers_held(follower) == {1}


@contextmanager
def foreign_publisher(reply: list[bytes]) -> Iterator[str]:
    """Answer every request by the same frames, and the last of them once more."""
    ends = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            while not ends.is_set():
                if router.poll(10):
                    router.send_multipart([router.recv_multipart()[0], *reply])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            ends.set()
            thread.join()


@pytest.mark.parametrize(
    "reply",
    [
        [b"one frame"],
        [b"", END_OF_REPLAY, b"no digest"],
        [b"", END_OF_REPLAY, encode({"seq": -5, "digests": {}})],
        [b"", END_OF_REPLAY, encode({"seq": 2**64 - 1, "digests": {}})],
        [b"", bytes(8), b"no batch"],
        [b"", bytes(8), encode(batch(1.0, 1, 1 << 40))],
    ],
)
def test_reply_that_is_none_ends_in_a_timeout_error(reply):
    with foreign_publisher(reply) as endpoint, KVEventSubscriber(NOWHERE, endpoint, timeout_s=0.2) as subscriber:
        with pytest.raises(TimeoutError, match="no whole snapshot"):
            subscriber.resync()
        subscriber.receive(message(0, batch(5.0, 1)))
        assert numbers_held(subscriber) == {1}
        with pytest.raises(TimeoutError, match="no whole snapshot"):
            subscriber.receive(message(5, batch(6.0, 2)))
        assert not subscriber.is_verified


def test_number_that_no_batch_has_is_rejected():
    with KVEventSubscriber(NOWHERE, NOWHERE, timeout_s=0.01) as subscriber:
        subscriber.receive(message(2**64 - 1, batch(1.0, 1)))
        assert subscriber.rejected_messages == 1
        assert not subscriber.num_snapshots
