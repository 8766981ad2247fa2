"""Publishers that replace another one: the epoch of digests prevents views with blocks of both."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from kv_harness import ANY_PORT, NOWHERE, ask, numbers_held, publish_one_by_one

from kvcache.exporters.kv_events import (
    DIGEST_PREFIX,
    DIGEST_REQUEST,
    END_OF_REPLAY,
    BlockStored,
    Digest,
    EventBatch,
    KVEventPublisher,
    KVEventSubscriber,
)
from kvcache.exporters.kv_events import subscriber as subscriber_module

encode = msgspec.msgpack.encode


def message(seq: int, number: int) -> list[bytes]:
    event = BlockStored([number.to_bytes(8, "big")], None, [], 16, None, "CPU", None, group_idx=0)
    return [b"kv-events", seq.to_bytes(8, "big"), encode(EventBatch(1.0 + seq, [event]))]


def digest_message(seq: int, subscriber: KVEventSubscriber, epoch: int | None) -> list[bytes]:
    """Return a digest of the subscriber's view."""
    payload = encode(Digest(seq, subscriber.view.digests(), epoch=epoch))
    return [DIGEST_PREFIX + b"kv-events", seq.to_bytes(8, "big"), payload]


@pytest.fixture
def successor() -> Iterator[KVEventPublisher]:
    with KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=0) as made:
        yield made


@pytest.fixture
def follower(successor: KVEventPublisher) -> Iterator[KVEventSubscriber]:
    """A subscriber that a publisher verified before another publisher replaced it."""
    with KVEventSubscriber(NOWHERE, successor.replay_endpoint or "", timeout_s=30) as made:
        for seq in range(5):
            made.receive(message(seq, 100 + seq))
        made.receive(digest_message(4, made, 7))
        assert made.is_verified
        yield made


@pytest.mark.parametrize("num_batches", [1, 2, 9])
@pytest.mark.parametrize(("kind", "epoch"), [("batch", None), ("digest", None), ("digest", 8)])
def test_first_message_of_a_successor_replaces_the_view(successor, follower, num_batches, kind, epoch):
    """The view has five batches of another publisher."""
    publish_one_by_one(successor, *range(num_batches))
    seq = num_batches - 1
    follower.receive(message(seq, seq) if kind == "batch" else digest_message(seq, follower, epoch))
    assert numbers_held(follower) == set(range(num_batches))
    # The first batch of all needs no snapshot.
    assert follower.is_verified is not (kind == "batch" and num_batches == 1)


def test_late_message_of_the_one_before_is_not_added_to_a_snapshot(successor, follower):
    publish_one_by_one(successor, 1)
    follower.resync()
    follower.receive(message(5, 105))
    assert numbers_held(follower) == {1}
    publish_one_by_one(successor, 2)
    follower.receive(message(1, 2))
    assert numbers_held(follower) == {1, 2}


@pytest.mark.parametrize("digest_every", [0, 1])
def test_successor_first_heard_at_the_number_that_comes_next_is_noticed(digest_every):
    first = KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=digest_every)
    with KVEventSubscriber(first.endpoint, first.replay_endpoint or "", timeout_s=30) as subscriber:
        publish_one_by_one(first, 100, 101, 102)
        subscriber.resync()
        end_s = time.monotonic() + 30
        while 103 not in numbers_held(subscriber):
            assert time.monotonic() < end_s
            publish_one_by_one(first, 103)
            subscriber.poll(0.01)
        num_batches = first.stats()["sent_batches"]
        first.close(30)
        with KVEventPublisher(first.endpoint, first.replay_endpoint, digest_every=digest_every) as second:
            # The subscriber has not reconnected yet, so it misses these batches.
            publish_one_by_one(second, *range(num_batches))
            number = num_batches
            while not numbers_held(subscriber) & set(range(num_batches, number)):
                assert time.monotonic() < end_s
                publish_one_by_one(second, number)
                number += 1
                subscriber.poll(0.01)
                held = numbers_held(subscriber)
                # The view never holds blocks of both publishers.
                assert max(held) < 100 or min(held) >= 100, sorted(held)
            assert subscriber.is_verified


def test_messages_that_waited_since_before_the_restart_are_not_added_to_the_successors():
    first = KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=0)
    with KVEventSubscriber(first.endpoint, first.replay_endpoint or "", timeout_s=30) as subscriber:
        end_s = time.monotonic() + 60
        while not subscriber.poll(0.01):
            assert time.monotonic() < end_s
            publish_one_by_one(first, 1000)
        while subscriber.poll(0.05):
            pass
        publish_one_by_one(first, *range(1001, 1201))
        first.close(30)
        with KVEventPublisher(first.endpoint, first.replay_endpoint, digest_every=0) as second:
            publish_one_by_one(second, *range(100))
            while not subscriber._connections.poll(30_000):
                assert time.monotonic() < end_s
            while numbers_held(subscriber) != set(range(100)):
                assert time.monotonic() < end_s
                subscriber.poll(0.01)
            while subscriber.poll(0.05):
                pass
            assert numbers_held(subscriber) == set(range(100))


KILLED = """
import itertools
from kvcache import OffloadingEvent, make_offload_key
from kvcache.exporters.kv_events import KVEventPublisher

publisher = KVEventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", digest_every=4)
print(publisher.endpoint, publisher.replay_endpoint, flush=True)
for number in itertools.count(1 << 32):
    keys = [make_offload_key((number * 64 + i).to_bytes(8, "big"), 0) for i in range(64)]
    publisher.publish([OffloadingEvent(keys, 16, "CPU", False)])
    if number % 64 == 0:
        publisher.flush()
"""


def test_view_of_a_publisher_that_was_killed_amid_its_batches_is_replaced():
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        endpoint, replay_endpoint = first.stdout.readline().split()
        with KVEventSubscriber(endpoint, replay_endpoint, timeout_s=30) as subscriber:
            end_s = time.monotonic() + 60
            while len(subscriber.view) < 10_000:
                assert time.monotonic() < end_s
                subscriber.poll(0.01)
            first.kill()
            first.wait()
            with KVEventPublisher(endpoint, replay_endpoint) as second:
                publish_one_by_one(second, 1, 2)
                while numbers_held(subscriber) != {1, 2}:
                    assert time.monotonic() < end_s
                    subscriber.poll(0.01)
                assert subscriber.is_verified


def test_connection_made_anew_is_noticed_without_a_message():
    first = KVEventPublisher(ANY_PORT, ANY_PORT)
    with KVEventSubscriber(first.endpoint, first.replay_endpoint or "", timeout_s=30) as subscriber:
        publish_one_by_one(first, 100)
        subscriber.resync()
        first.close(30)
        with KVEventPublisher(first.endpoint, first.replay_endpoint) as second:
            publish_one_by_one(second, 1)
            end_s = time.monotonic() + 30
            while numbers_held(subscriber) != {1}:
                assert time.monotonic() < end_s
                subscriber.poll(0.01)
            assert subscriber.is_verified


def test_verify_mends_a_view_of_a_publisher_that_sends_no_digests(successor):
    with KVEventSubscriber(NOWHERE, successor.replay_endpoint or "", timeout_s=30) as subscriber:
        publish_one_by_one(successor, 1)
        subscriber.resync()
        subscriber.view.add("CPU", [(b"wrong", 0)])
        subscriber.verify()
        assert (numbers_held(subscriber), subscriber.num_snapshots) == ({1}, 2)
        publish_one_by_one(successor, 2, 3)
        subscriber.verify()
        assert (numbers_held(subscriber), subscriber.num_snapshots) == ({1, 2, 3}, 2)
        assert subscriber.is_verified
        successor.close(30)
        subscriber._timeout_s = 0.1
        with pytest.raises(TimeoutError, match="no whole snapshot"):
            subscriber.verify()
        assert not subscriber.is_verified


def test_answer_to_a_request_for_a_digest_is_the_end_of_a_snapshot(successor):
    publish_one_by_one(successor, 1, 2)
    (answer,) = ask(successor, DIGEST_REQUEST)
    assert answer == ask(successor, b"snapshot")[-1]
    digest = msgspec.msgpack.decode(answer[-1], type=Digest)
    assert digest.seq == 2
    assert digest.digests == {"CPU": (2, digest.digests["CPU"][1])}
    assert digest.epoch is not None
    assert 0 <= digest.epoch < 1 << 53
    # The protocol for vLLM's clients is unchanged.
    assert ask(successor, bytes(8))[-1] == [b"", b"", END_OF_REPLAY, b""]


def first_digest(timeout_s: float) -> Digest | None:
    """Return the digest that a new publisher sends with its first batch; None if the subscription came too late."""
    with (
        KVEventPublisher(ANY_PORT, digest_every=1000) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.subscribe(DIGEST_PREFIX)
        socket.connect(publisher.endpoint)
        time.sleep(timeout_s)
        publish_one_by_one(publisher, 1)
        found = socket.recv_multipart() if socket.poll(int(1000 * timeout_s)) else None
        return None if found is None else msgspec.msgpack.decode(found[-1], type=Digest)


def test_every_publisher_has_an_epoch_of_its_own_and_says_it_with_the_first_batch():
    epochs = set()
    timeout_s = 0.05
    while len(epochs) < 3:
        assert timeout_s < 10
        found = first_digest(timeout_s)
        if found is None:
            timeout_s *= 2
            continue
        assert found.seq == 0
        epochs.add(found.epoch)
    assert None not in epochs


def test_poll_returns_though_messages_arrive_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "_POLL_S", 0.0)
    with (
        KVEventPublisher(ANY_PORT, ANY_PORT) as publisher,
        KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint or "", timeout_s=30) as subscriber,
    ):
        end_s = time.monotonic() + 30
        while not subscriber.poll(0.01):
            assert time.monotonic() < end_s
            publish_one_by_one(publisher, 1)
        publish_one_by_one(publisher, *range(2, 12))
        for _ in range(10):
            assert subscriber.poll(30) == 1


class OldDigest(msgspec.Struct, omit_defaults=True):
    """The digest before `epoch` was added."""

    seq: int
    digests: dict[str, tuple[int, int]] | None = None
    gap: int | None = None


def test_older_subscribers_read_the_digest(successor):
    publish_one_by_one(successor, 1)
    (answer,) = ask(successor, DIGEST_REQUEST)
    new = msgspec.msgpack.decode(answer[-1], type=Digest)
    assert msgspec.msgpack.decode(answer[-1], type=OldDigest) == OldDigest(new.seq, new.digests)


def test_publisher_without_an_epoch_still_replays():
    """Like vLLM's publisher, this one takes any eight bytes for a sequence number."""
    ends = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            while not ends.is_set():
                if router.poll(10):
                    client, _, request = router.recv_multipart()
                    for seq in range(int.from_bytes(request, "big"), 6):
                        router.send_multipart([client, b"", *message(seq, 100 + seq)])
                    router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with KVEventSubscriber(NOWHERE, f"tcp://127.0.0.1:{port}", timeout_s=30) as subscriber:
                subscriber.receive(message(0, 100))
                subscriber.receive(digest_message(0, subscriber, None))
                assert subscriber.is_verified
                subscriber.receive(message(5, 105))
                assert numbers_held(subscriber) == set(range(100, 106))
                assert (subscriber.num_replays, subscriber.num_snapshots) == (1, 0)
        finally:
            ends.set()
            thread.join()
