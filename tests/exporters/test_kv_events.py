"""KV events over real sockets: wire format, lost messages, slow subscribers, restarts, garbage."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from kv_harness import ANY_PORT, key

from kvcache import CPUOffloadingManager, OffloadingEvent, ReqContext
from kvcache.exporters.kv_events import (
    DIGEST_PREFIX,
    BlockRemoved,
    BlockView,
    EventBatch,
    KVEventPublisher,
    KVEventSubscriber,
)


def stored(*keys: bytes, medium: str = "CPU") -> OffloadingEvent:
    return OffloadingEvent(list(keys), 16, medium, False)


def removed(*keys: bytes, medium: str = "CPU") -> OffloadingEvent:
    return OffloadingEvent(list(keys), 16, medium, True)


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    with KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=4) as made:
        yield made


def subscribed(publisher: KVEventPublisher) -> KVEventSubscriber:
    """Return a subscriber that has joined: PUB sockets drop messages sent before."""
    subscriber = KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint or "", timeout_s=30)
    end_s = time.monotonic() + 30
    while not subscriber.poll(0.01):
        assert time.monotonic() < end_s
        publisher.publish([stored(key(0))])
    return subscriber


def settle(publisher: KVEventPublisher, subscriber: KVEventSubscriber) -> None:
    """Wait until publisher and subscriber agree."""
    end_s = time.monotonic() + 30
    assert publisher.flush(30)
    while subscriber.view.media() != publisher.snapshot()[1]:
        assert time.monotonic() < end_s
        subscriber.poll(0.05)


def test_batches_have_the_wire_format_of_vllm(publisher):
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"kv-events")
        socket.connect(publisher.endpoint)
        while not socket.poll(20):
            publisher.publish([stored(key(7, 3), medium="CPU")])
        topic, _, payload = socket.recv_multipart()
        while True:
            publisher.publish([removed(key(7, 3), medium="disk")])
            raw = msgspec.msgpack.decode(socket.recv_multipart()[2])
            if raw[1][0]["type"] == "BlockRemoved":
                break
    assert topic == b"kv-events"
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert abs(ts - time.time()) < 60
    assert rank == 0
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "group_idx": 3,
        "locality": "LOCAL",
    }
    assert raw[1][0] == {
        "type": "BlockRemoved",
        "block_hashes": [7],
        "medium": "STORAGE",
        "group_idx": 3,
        "locality": "LOCAL",
    }


def test_view_of_a_subscriber_follows_a_manager_through_evictions(publisher):
    manager = CPUOffloadingManager(16, 50, enable_events=True)
    subscriber = subscribed(publisher)
    publisher.publish([removed(key(0))])
    rng = random.Random(1)
    for _ in range(300):
        context = ReqContext()
        keys = [key(rng.randrange(200) + 1) for _ in range(rng.randrange(1, 6))]
        output = manager.prepare_store(keys, context)
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        publisher.publish(manager.take_events())
    settle(publisher, subscriber)
    assert subscriber.view.media()["CPU"] == {
        (number.to_bytes(8, "big"), 0) for number in range(1, 201) if manager.lookup(key(number))
    }
    subscriber.close()


def test_lost_messages_are_replayed(publisher):
    subscriber = subscribed(publisher)
    settle(publisher, subscriber)
    lost = subscriber.receive
    subscriber.receive = lambda frames: None
    publisher.publish([stored(key(1)), removed(key(0))])
    publisher.flush()
    while not subscriber.poll(1):
        pass
    subscriber.receive = lost
    publisher.publish([stored(key(2))])
    settle(publisher, subscriber)
    assert subscriber.num_replays >= 1
    assert subscriber.num_snapshots <= 1  # the first received message may be the second one sent
    assert subscriber.view.media() == {"CPU": {((1).to_bytes(8, "big"), 0), ((2).to_bytes(8, "big"), 0)}}
    subscriber.close()


def test_subscriber_beyond_the_replay_buffer_resyncs_from_a_snapshot():
    with KVEventPublisher(ANY_PORT, ANY_PORT, buffer_batches=2, digest_every=0) as publisher:
        subscriber = subscribed(publisher)
        settle(publisher, subscriber)
        before = subscriber.num_snapshots
        apply = subscriber.receive
        subscriber.receive = lambda frames: None
        for number in range(1, 21):
            publisher.publish([stored(key(number))])
            publisher.flush()
        while subscriber.poll(0.2):
            pass
        subscriber.receive = apply
        publisher.publish([stored(key(21))])
        settle(publisher, subscriber)
        assert subscriber.num_snapshots == before + 1
        assert len(subscriber.view) == 22
        subscriber.close()


def test_digest_shows_a_wrong_view_and_the_snapshot_mends_it(publisher):
    subscriber = subscribed(publisher)
    settle(publisher, subscriber)
    subscriber.view.add("CPU", [(b"a block that nobody holds", 0)])
    before = subscriber.num_snapshots
    for number in range(1, 9):
        publisher.publish([stored(key(number))])
        publisher.flush()
    settle(publisher, subscriber)
    assert subscriber.num_snapshots == before + 1
    assert subscriber.is_verified
    subscriber.close()


def test_reset_clears_every_medium(publisher):
    subscriber = subscribed(publisher)
    publisher.publish([stored(key(1)), stored(key(1), medium="disk")])
    settle(publisher, subscriber)
    publisher.publish_cleared()
    publisher.publish([stored(key(2), medium="disk")])
    settle(publisher, subscriber)
    assert subscriber.view.media() == {"STORAGE": {((2).to_bytes(8, "big"), 0)}}
    subscriber.close()


def test_publish_beyond_the_queue_drops_events_and_clears_the_view():
    with KVEventPublisher(ANY_PORT, ANY_PORT, queue_events=1, digest_every=1) as publisher:
        subscriber = subscribed(publisher)
        last: set[int] = set()
        for number in range(2000):
            num_dropped = publisher.stats()["dropped_events"]
            publisher.publish([stored(key(number))])
            if publisher.stats()["dropped_events"] > num_dropped:
                last.clear()
            else:
                last.add(number)
        assert publisher.flush(30)
        publisher.publish([stored(key(9999))])
        settle(publisher, subscriber)
        assert publisher.stats()["dropped_events"] > 0
        held = {int.from_bytes(block, "big") for block, _ in subscriber.view.media()["CPU"]}
        assert held == last | {9999} or held == {9999}
        subscriber.close()


@pytest.mark.slow
def test_subscriber_that_never_reads_delays_nobody(publisher):
    with zmq.Context() as context, context.socket(zmq.SUB) as idle:
        idle.setsockopt(zmq.RCVHWM, 1)
        idle.setsockopt(zmq.LINGER, 0)
        idle.subscribe(b"")
        idle.connect(publisher.endpoint)
        subscriber = subscribed(publisher)
        for number in range(5000):
            publisher.publish([stored(*(key(number * 20 + i) for i in range(20)))])
        settle(publisher, subscriber)
        assert len(subscriber.view) == 100_000
        subscriber.close()


def test_garbage_requests_are_counted_and_others_still_answered(publisher):
    publisher.publish([stored(key(1))])
    with zmq.Context() as context:
        for request in (b"", b"x", b"not eight bytes at all", b"\xff" * 60_000):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(publisher.replay_endpoint)
            socket.send_multipart((b"", request))
            socket.close()
        end_s = time.monotonic() + 30
        while publisher.stats()["rejected_requests"] < 4:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(publisher.replay_endpoint)
        socket.send((0).to_bytes(8, "big"))
        assert socket.poll(30_000)
        topic, seq, _payload = socket.recv_multipart()
        assert (topic, seq) == (b"kv-events", bytes(8))
        socket.close()


def test_garbage_messages_are_counted_and_change_nothing(publisher):
    subscriber = subscribed(publisher)
    settle(publisher, subscriber)
    before = subscriber.view.media()
    for frames in (
        [],
        [b"kv-events"],
        [b"kv-events", b"short", b""],
        [b"kv-events", bytes(8), b"\xc1"],
        [b"kv-events", bytes(8), msgspec.msgpack.encode([0.0, [{"type": "Unknown"}]])],
        [b"kv-events", bytes(8), msgspec.msgpack.encode(EventBatch(1.0, [BlockRemoved([b"x"], "CPU", 1 << 40)], 0))],
        [DIGEST_PREFIX + b"kv-events", bytes(8), b"garbage"],
    ):
        subscriber.receive(frames)
    assert subscriber.rejected_messages == 7
    assert subscriber.view.media() == before
    subscriber.close()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["CPU", "STORAGE"]), st.integers(0, 20))))
def test_digest_depends_on_what_is_held_and_not_on_its_history(changes):
    view, held = BlockView(), set()
    for is_removed, medium, number in changes:
        (view.discard if is_removed else view.add)(medium, [(number.to_bytes(8, "big"), 0)])
        (held.discard if is_removed else held.add)((medium, number))
    fresh = BlockView()
    for medium, number in sorted(held, reverse=True):
        fresh.add(medium, [(number.to_bytes(8, "big"), 0)])
    assert view.digests() == fresh.digests()
    assert view.media() == fresh.media()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_batches": 0}, "buffer_batches must be an int in 1.*, got 0"),
        ({"digest_every": -1}, "digest_every must be an int in 0.*, got -1"),
        ({"queue_events": "many"}, "queue_events must be an int in 1.*, got 'many'"),
        ({"buffer_batches": 10**30}, "buffer_batches must be an int in .*, got 10000"),
        ({"endpoint": 5557}, "endpoint must be a str, got 5557"),
        ({"replay_endpoint": b"tcp"}, "replay_endpoint must be a str, got b'tcp'"),
        ({"topic": None}, "topic must be a str, got None"),
    ],
)
def test_publisher_invalid_option_raises(options, message):
    with pytest.raises(ValueError, match=message):
        KVEventPublisher(**{"endpoint": ANY_PORT, **options})


def test_port_in_use_is_a_clear_error(publisher):
    with pytest.raises(ValueError, match=f"cannot bind '{publisher.endpoint}': Address already in use"):
        KVEventPublisher(publisher.endpoint)


def test_closing_twice_sends_what_is_queued():
    publisher = KVEventPublisher(ANY_PORT)
    publisher.publish([stored(key(1))])
    publisher.close()
    publisher.close()
    assert publisher.snapshot()[1] == {"CPU": {((1).to_bytes(8, "big"), 0)}}
    assert msgspec.structs.fields(BlockRemoved)[0].name == "block_hashes"
