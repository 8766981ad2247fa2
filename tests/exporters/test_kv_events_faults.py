"""Faulty peers of KV events: clocks that go back, invalid replies, readers that stop reading."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from kv_harness import ANY_PORT, NOWHERE, ask, numbers_held, stored

from kvcache import OffloadingEvent
from kvcache.exporters.kv_events import (
    END_OF_REPLAY,
    BlockStored,
    EventBatch,
    KVEventPublisher,
    KVEventSubscriber,
)
from kvcache.exporters.kv_events import (
    publisher as publisher_module,
)
from kvcache.exporters.kv_events import subscriber as subscriber_module

encode = msgspec.msgpack.encode


def batch(ts: float, number: int, group_idx: int = 0) -> EventBatch:
    return EventBatch(
        ts, [BlockStored([number.to_bytes(8, "big")], None, [], 16, None, "CPU", None, group_idx=group_idx)]
    )


def message(seq: int, payload: EventBatch) -> list[bytes]:
    return [b"kv-events", seq.to_bytes(8, "big"), encode(payload)]


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    with KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=4) as made:
        yield made


@contextmanager
def foreign_publisher(reply: list[bytes]) -> Iterator[str]:
    """Answer every request with the same frames, and send the last of them twice."""
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


@contextmanager
def endless_publisher(payload: bytes) -> Iterator[tuple[str, list[int]]]:
    """Answer the first request with endless batches; yield the endpoint and the number of sent batches."""
    ends, num_sent = threading.Event(), [0]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDTIMEO, 10)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            client = None
            while not ends.is_set():
                try:
                    if router.poll(0 if client else 10):
                        client = router.recv_multipart()[0]
                    if client:
                        router.send_multipart([client, b"", b"kv-events", bytes(8), payload])
                        num_sent[0] += 1
                except zmq.ZMQError:
                    pass  # the client reads slowly, or is gone

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}", num_sent
        finally:
            ends.set()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["resync", "verify", "receive"])
def test_answer_without_end_times_out(method):
    with (
        endless_publisher(encode(batch(1.0, 1))) as (endpoint, _),
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=0.3) as subscriber,
    ):
        subscriber.receive(message(0, batch(1.0, 1)))
        arguments = [message(9, batch(2.0, 2))] if method == "receive" else []
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no whole snapshot|no digest"):
            getattr(subscriber, method)(*arguments)
        assert time.monotonic() - began_s < 10
        assert not subscriber.is_verified


def test_answer_beyond_the_largest_size_is_dropped(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_MAX_ANSWER_BYTES", 100_000)
    payload = encode(batch(1.0, 1))
    with (
        endless_publisher(payload) as (endpoint, num_sent),
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=60) as subscriber,
    ):
        with pytest.raises(TimeoutError, match="no whole snapshot"):
            subscriber.resync()
        assert num_sent[0] * len(payload) < 50_000_000


@pytest.mark.parametrize(("seq", "group_idx"), [(2**64 - 1, 0), (0, 1 << 40)])
def test_message_with_number_or_group_out_of_range_is_rejected(seq, group_idx):
    with KVEventSubscriber(NOWHERE, NOWHERE, timeout_s=0.01) as subscriber:
        subscriber.receive(message(seq, batch(1.0, 1, group_idx)))
        assert subscriber.rejected_messages == 1
        assert not subscriber.num_snapshots


def numbers_of(publisher: KVEventPublisher, start_seq: int) -> list[int]:
    """Return the numbers of all messages in a replay."""
    return [int.from_bytes(one[-2], "big", signed=True) for one in ask(publisher, start_seq.to_bytes(8, "big"))]


def publish_batches(publisher: KVEventPublisher, num_batches: int) -> None:
    """Publish `num_batches` full batches."""
    for number in range(num_batches):
        publisher.publish([stored(*range(1024 * (number % 2), 1024 * (number % 2) + 1024))])
    assert publisher.flush(60)
    assert publisher.stats()["sent_batches"] == num_batches


@pytest.mark.slow
def test_replay_of_more_batches_than_a_socket_queues_is_whole(publisher):
    publish_batches(publisher, 1000)
    assert numbers_of(publisher, 0) == [*range(1000), -1]
    assert publisher.stats()["rejected_requests"] == 0


@pytest.mark.slow
def test_clients_that_never_read_hold_neither_memory_nor_others(publisher):
    publish_batches(publisher, 1000)
    before = resident_bytes()
    with zmq.Context() as context:
        idle = [context.socket(zmq.DEALER) for _ in range(4)]
        for socket in idle:
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.RCVBUF, 4096)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(publisher.replay_endpoint)
            for _ in range(5):
                socket.send_multipart((b"", bytes(8)))
        end_s = time.monotonic() + 30
        # The publisher sends one reply at a time to each client.
        while publisher.stats()["rejected_requests"] < 16:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        publisher.publish([stored(1)])
        assert publisher.flush(30)
        assert numbers_of(publisher, 999) == [999, 1000, -1]
        # Four replies are 140 MB, but only 64 messages of 35 KB wait in each client's connection.
        assert resident_bytes() - before < 64 << 20
        for socket in idle:
            socket.close()


def resident_bytes() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_request_that_is_too_long_is_not_taken_in(publisher):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart((b"", bytes((1 << 16) + 1)))
        assert monitor.poll(30_000)
        socket.disable_monitor()
        monitor.close(0)
    assert publisher.stats()["rejected_requests"] == 0


def test_subscription_that_is_too_long_is_not_taken_in(publisher):
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.subscribe(bytes((1 << 16) + 1))
        socket.connect(publisher.endpoint)
        assert monitor.poll(30_000)
        socket.disable_monitor()
        monitor.close(0)


def test_sockets_that_only_their_user_reaches(tmp_path):
    tmp_path.chmod(0o700)
    with (
        KVEventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", digest_every=1) as publisher,
        KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint or "", timeout_s=30) as subscriber,
    ):
        publisher.publish([stored(1)])
        assert publisher.flush(30)
        subscriber.resync()
        assert numbers_held(subscriber) == {1}
        end_s = time.monotonic() + 30
        while numbers_held(subscriber) != {1, 2}:
            assert time.monotonic() < end_s
            publisher.publish([stored(2)])
            subscriber.poll(0.01)
        assert subscriber.num_snapshots == 1


@pytest.mark.slow
def test_replay_buffer_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(publisher_module, "_MAX_KEPT_BYTES", 43 << 16)
    with KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=0, hash_format="bytes") as publisher:
        for number in range(40):
            keys = [bytes([number]) * (1 << 16) for _ in range(4)]
            publisher.publish([OffloadingEvent(keys, 16, "CPU", number % 2 == 1)])
            assert publisher.flush(30)
        assert numbers_of(publisher, 0) == [*range(30, 40), -1]


def test_events_published_after_close_are_dropped(publisher):
    publisher.publish([stored(1)])
    publisher.close()
    for number in range(1000):
        publisher.publish([stored(number)])
    publisher.publish_cleared()
    assert publisher.stats()["queued_events"] == 0
    assert publisher.stats()["dropped_events"] == 1000
    assert publisher.snapshot()[1] == {"CPU": {((1).to_bytes(8, "big"), 0)}}
    assert not publisher.flush(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_neither_hangs_nor_keeps_events():
    ends = threading.Event()
    with KVEventPublisher(ANY_PORT, digest_every=0) as publisher:
        publisher.publish([stored(*range(100_000))])

        def ask() -> None:
            # The lock is held most of the time.
            while not ends.is_set():
                publisher.snapshot()

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    status = 1
                    signal.alarm(30)
                    num_queued = publisher.stats()["queued_events"]
                    try:
                        publisher.snapshot()
                    except RuntimeError:
                        publisher.publish([stored(1)])
                        publisher.publish_cleared()
                        publisher.close()
                        status = publisher.stats()["queued_events"] - num_queued
                    os._exit(status)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            ends.set()
            thread.join()
