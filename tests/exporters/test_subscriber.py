"""KVEventSubscriber over real sockets: lost messages, invalid answers, and publishers that replace another one."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest
from kv_harness import (
    ANY_PORT,
    NOWHERE,
    answering,
    batch,
    encode,
    joined,
    key,
    message,
    numbers_held,
    poll_until,
    publish_one_by_one,
    removed,
    settle,
    stored,
    subscribed,
)

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.exporters.kv_events import (
    DIGEST_PREFIX,
    END_OF_REPLAY,
    BlockRemoved,
    Digest,
    EventBatch,
    KVEventPublisher,
    KVEventSubscriber,
)
from kvcache.exporters.kv_events import subscriber as subscriber_module


def test_view_of_a_subscriber_follows_a_manager_through_evictions(publisher, subscriber):
    manager = CPUOffloadingManager(16, 50, enable_events=True)
    publisher.publish([removed(0)])
    rng = random.Random(1)
    for _ in range(300):
        context = ReqContext()
        output = manager.prepare_store([key(rng.randrange(1, 201)) for _ in range(rng.randrange(1, 6))], context)
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        publisher.publish(manager.take_events())
    settle(publisher, subscriber)
    assert numbers_held(subscriber) == {number for number in range(1, 201) if manager.lookup(key(number))}


def lose(publisher, subscriber, monkeypatch, *batches):
    """Publish batches that do not reach the subscriber."""
    lost = set()
    with monkeypatch.context() as patch:
        patch.setattr(subscriber, "receive", lambda frames: lost.add(int.from_bytes(frames[1], "big")))
        for events in batches:
            publisher.publish(events)
            assert publisher.flush(30)
        poll_until(subscriber, lambda: publisher.stats()["sent_batches"] - 1 in lost)


def test_lost_messages_are_replayed(publisher, subscriber, monkeypatch):
    subscriber.verify()  # it then knows the publisher's epoch
    num_snapshots = subscriber.num_snapshots
    lose(publisher, subscriber, monkeypatch, [stored(1), removed(0)])
    publisher.publish([stored(2)])
    settle(publisher, subscriber)
    assert subscriber.num_replays >= 1
    assert subscriber.num_snapshots == num_snapshots
    assert numbers_held(subscriber) == {1, 2}


def test_subscriber_beyond_the_replay_buffer_resyncs_from_a_snapshot(monkeypatch):
    with (
        KVEventPublisher(ANY_PORT, ANY_PORT, buffer_batches=2, digest_every=0) as publisher,
        joined(publisher) as subscriber,
    ):
        before = subscriber.num_snapshots
        lose(publisher, subscriber, monkeypatch, *([stored(number)] for number in range(1, 21)))
        publisher.publish([stored(21)])
        settle(publisher, subscriber)
        assert subscriber.num_snapshots == before + 1
        assert numbers_held(subscriber) == set(range(22))


def test_digest_shows_a_wrong_view_and_the_snapshot_mends_it(publisher, subscriber):
    subscriber.view.add("CPU", [(b"a block that nobody holds", 0)])
    before = subscriber.num_snapshots
    publish_one_by_one(publisher, *range(1, 9))
    settle(publisher, subscriber)
    assert subscriber.num_snapshots == before + 1
    assert subscriber.is_verified


def test_reset_clears_every_medium(publisher, subscriber):
    publisher.publish([stored(1), stored(1, medium="disk")])
    settle(publisher, subscriber)
    publisher.publish_cleared()
    publisher.publish([stored(2, medium="disk")])
    settle(publisher, subscriber)
    assert subscriber.view.media() == {"STORAGE": {((2).to_bytes(8, "big"), 0)}}


def test_garbage_messages_are_counted_and_change_nothing(subscriber):
    before = subscriber.view.media()
    for frames in (
        [],
        [b"kv-events"],
        [b"kv-events", b"short", b""],
        [b"kv-events", bytes(8), b"\xc1"],
        [b"kv-events", bytes(8), encode([0.0, [{"type": "Unknown"}]])],
        [b"kv-events", bytes(8), encode(EventBatch(1.0, [BlockRemoved([b"x"], "CPU", 1 << 40)], 0))],
        [DIGEST_PREFIX + b"kv-events", bytes(8), b"garbage"],
    ):
        subscriber.receive(frames)
    assert subscriber.rejected_messages == 7
    assert subscriber.view.media() == before


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
    with (
        answering(lambda request: [reply]) as endpoint,
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=0.2) as subscriber,
    ):
        with pytest.raises(TimeoutError, match="no whole snapshot"):
            subscriber.resync()
        subscriber.receive(message(0, 1))
        assert numbers_held(subscriber) == {1}
        with pytest.raises(TimeoutError, match="no whole snapshot"):
            subscriber.receive(message(5, 2))
        assert not subscriber.is_verified


@pytest.mark.slow
@pytest.mark.parametrize("method", ["resync", "verify", "receive"])
def test_answer_without_end_times_out(method):
    with (
        answering(lambda request: itertools.repeat([b"", *message(0, 1)])) as endpoint,
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=0.3) as subscriber,
    ):
        subscriber.receive(message(0, 1))
        arguments = [message(9, 2)] if method == "receive" else []
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no whole snapshot|no digest"):
            getattr(subscriber, method)(*arguments)
        assert time.monotonic() - began_s < 10
        assert not subscriber.is_verified


def test_answer_beyond_the_largest_size_is_dropped(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_MAX_ANSWER_BYTES", 100_000)
    sent = itertools.count()
    answer = map(lambda number: [b"", *message(0, 1)], sent)  # noqa: C417
    with (
        answering(lambda request: answer) as endpoint,
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=60) as subscriber,
        pytest.raises(TimeoutError, match="no whole snapshot"),
    ):
        subscriber.resync()
    assert next(sent) < 1_000_000


@pytest.mark.parametrize(("seq", "group_idx"), [(2**64 - 1, 0), (0, 1 << 40)])
def test_message_with_number_or_group_out_of_range_is_rejected(seq, group_idx):
    with KVEventSubscriber(NOWHERE, NOWHERE, timeout_s=0.01) as subscriber:
        subscriber.receive(message(seq, 1, group_idx))
        assert subscriber.rejected_messages == 1
        assert not subscriber.num_snapshots


def test_sockets_that_only_their_user_reaches(tmp_path):
    tmp_path.chmod(0o700)
    with (
        KVEventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", digest_every=1) as publisher,
        subscribed(publisher) as subscriber,
    ):
        publish_one_by_one(publisher, 1)
        subscriber.resync()
        assert numbers_held(subscriber) == {1}

        def has_both():
            publisher.publish([stored(2)])
            return numbers_held(subscriber) == {1, 2}

        poll_until(subscriber, has_both)
        assert subscriber.num_snapshots == 1


def digest_message(seq: int, subscriber: KVEventSubscriber, epoch: int) -> list[bytes]:
    """Return a digest of the subscriber's view."""
    payload = encode(Digest(seq, subscriber.view.digests(), epoch))
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
@pytest.mark.parametrize("kind", ["batch", "digest"])
def test_first_message_of_a_successor_replaces_the_view(successor, follower, num_batches, kind):
    """The view has five batches of another publisher."""
    publish_one_by_one(successor, *range(num_batches))
    seq = num_batches - 1
    follower.receive(message(seq, seq) if kind == "batch" else digest_message(seq, follower, 8))
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
    with joined(first, 100) as subscriber:
        num_batches = first.stats()["sent_batches"]
        first.close(30)
        with KVEventPublisher(first.endpoint, first.replay_endpoint, digest_every=digest_every) as second:
            # The subscriber has not reconnected yet, so it misses these batches.
            publish_one_by_one(second, *range(num_batches))
            following = itertools.count(num_batches)

            def has_noticed():
                publish_one_by_one(second, next(following))
                held = numbers_held(subscriber)
                # The view never holds blocks of both publishers.
                assert max(held) < 100 or min(held) >= 100, sorted(held)
                return min(held) < 100

            poll_until(subscriber, has_noticed)
            assert subscriber.is_verified


def test_messages_that_waited_since_before_the_restart_are_not_added_to_the_successors():
    first = KVEventPublisher(ANY_PORT, ANY_PORT, digest_every=0)
    with joined(first, 1000) as subscriber:
        while subscriber.poll(0.05):
            pass
        publish_one_by_one(first, *range(1001, 1201))
        first.close(30)
        with KVEventPublisher(first.endpoint, first.replay_endpoint, digest_every=0) as second:
            publish_one_by_one(second, *range(100))
            assert subscriber._connections.poll(60_000)
            poll_until(subscriber, lambda: numbers_held(subscriber) == set(range(100)))
            while subscriber.poll(0.05):
                pass
            assert numbers_held(subscriber) == set(range(100))


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


def test_poll_returns_though_messages_arrive_all_the_time(publisher, subscriber, monkeypatch):
    monkeypatch.setattr(subscriber_module, "_POLL_S", 0.0)
    publish_one_by_one(publisher, *range(1, 11))
    for _ in range(10):
        assert subscriber.poll(30) == 1


def test_publisher_without_an_epoch_still_replays():
    """Like vLLM's publisher, this one takes any eight bytes for a sequence number."""

    def answer(request):
        first = int.from_bytes(request, "big")
        return [*([b"", *message(seq, 100 + seq)] for seq in range(first, 6)), [b"", b"", END_OF_REPLAY, b""]]

    with answering(answer) as endpoint, KVEventSubscriber(NOWHERE, endpoint, timeout_s=30) as subscriber:
        subscriber.receive(message(0, 100))
        subscriber.receive(message(5, 105))
        assert numbers_held(subscriber) == set(range(100, 106))
        assert (subscriber.num_replays, subscriber.num_snapshots) == (1, 0)
