"""KVEventSubscriber over real sockets: lost messages, invalid answers, and publishers that replace another one."""

from __future__ import annotations

import itertools
import random
import time

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
from kvcache.exporters.kv_events import END_OF_REPLAY, BlockRemoved, EventBatch, KVEventPublisher, KVEventSubscriber
from kvcache.exporters.kv_events import subscriber as subscriber_module

TOPIC = b"kv@host@"


def test_view_follows_manager_through_evictions(publisher, subscriber):
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
    num_replays = subscriber.num_replays
    lose(publisher, subscriber, monkeypatch, [stored(1), removed(0)])
    publisher.publish([stored(2)])
    settle(publisher, subscriber)
    assert (subscriber.num_replays, subscriber.num_gaps) == (num_replays + 1, 0)
    assert numbers_held(subscriber) == {1, 2}


def test_late_subscriber_replays_from_first_batch(publisher):
    publish_one_by_one(publisher, *range(1, 6))
    with joined(publisher) as subscriber:
        assert numbers_held(subscriber) == set(range(6))
        assert subscriber.num_gaps == 0


def test_gap_beyond_buffer_begins_view_anew(monkeypatch):
    with KVEventPublisher(ANY_PORT, ANY_PORT, buffer_batches=2) as publisher, joined(publisher) as subscriber:
        num_gaps = subscriber.num_gaps
        lose(publisher, subscriber, monkeypatch, *([stored(number)] for number in range(1, 21)))
        publisher.publish([stored(21)])
        poll_until(subscriber, lambda: 21 in numbers_held(subscriber))
        assert subscriber.num_gaps == num_gaps + 1
        # Blocks of the kept batches only: earlier ones may have been evicted in those that are missing.
        assert numbers_held(subscriber) == {20, 21}


def test_reset_clears_every_medium(publisher, subscriber):
    publisher.publish([stored(1), stored(1, medium="disk")])
    settle(publisher, subscriber)
    publisher.publish_cleared()
    publisher.publish([stored(2, medium="disk")])
    settle(publisher, subscriber)
    assert subscriber.view.media() == {"STORAGE": {((2).to_bytes(8, "big"), 0)}}


def test_garbage_messages_are_counted_and_ignored(subscriber):
    before, num_replays = subscriber.view.media(), subscriber.num_replays
    for frames in (
        [],
        [TOPIC],
        [TOPIC, b"short", b""],
        [b"another topic", bytes(8), encode(batch(1.0, 1))],
        [TOPIC, bytes(8), b"\xc1"],
        [TOPIC, bytes(8), encode([0.0, [{"type": "Unknown"}]])],
        [TOPIC, bytes(8), encode(EventBatch(1.0, [BlockRemoved([b"x"], "CPU", 1 << 40)], 0))],
        message(2**64 - 1, 1),
        message(0, 1, 1 << 40),
    ):
        subscriber.receive(frames)
    assert (subscriber.rejected_messages, subscriber.num_replays) == (9, num_replays)
    assert subscriber.view.media() == before


@pytest.mark.parametrize(
    "reply", [[b"one frame"], [b"", bytes(8), b"no batch"], [b"", bytes(8), encode(batch(1.0, 1, 1 << 40))]]
)
def test_invalid_replay_raises_timeout_error(reply):
    with (
        answering(lambda request: [reply]) as endpoint,
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=0.2) as subscriber,
    ):
        subscriber.receive(message(0, 1))
        with pytest.raises(TimeoutError, match="no whole replay"):
            subscriber.receive(message(5, 2))
        assert numbers_held(subscriber) == {1}


@pytest.mark.slow
def test_replay_without_end_times_out():
    with (
        answering(lambda request: itertools.repeat([b"", *message(1, 1)])) as endpoint,
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=0.3) as subscriber,
    ):
        subscriber.receive(message(0, 1))
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match="no whole replay"):
            subscriber.receive(message(9, 2))
        assert time.monotonic() - began_s < 10


def test_replay_beyond_largest_size_is_dropped(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_MAX_ANSWER_BYTES", 100_000)
    sent = itertools.count()
    answer = map(lambda number: [b"", *message(1, 1)], sent)  # noqa: C417
    with (
        answering(lambda request: answer) as endpoint,
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=60) as subscriber,
        pytest.raises(TimeoutError, match="no whole replay"),
    ):
        subscriber.receive(message(9, 2))
    assert next(sent) < 1_000_000


@pytest.mark.parametrize("last", [6, 3])
def test_failed_replay_is_asked_for_again(last):
    """A last number below that of the failed replay is another publisher's, which has other blocks."""
    replies = [
        [[b"", b"one frame"]],
        [[b"", *message(seq, seq)] for seq in range(last + 1)] + [[b"", b"", END_OF_REPLAY, b""]],
    ]
    with (
        answering(lambda request: replies.pop(0)) as endpoint,
        KVEventSubscriber(NOWHERE, endpoint, timeout_s=30) as subscriber,
    ):
        subscriber.receive(message(0, 0 if last > 5 else 99))
        with pytest.raises(TimeoutError, match="no whole replay"):
            subscriber.receive(message(5, 5))
        subscriber.receive(message(last, last))
        assert numbers_held(subscriber) == set(range(last + 1))


def test_sockets_that_only_their_user_reaches(tmp_path):
    tmp_path.chmod(0o700)
    with (
        KVEventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as publisher,
        subscribed(publisher) as subscriber,
    ):
        publish_one_by_one(publisher, 1)

        def has_both():
            publisher.publish([stored(2)])
            return numbers_held(subscriber) == {1, 2}

        poll_until(subscriber, has_both)


@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_falling_number_begins_view_anew(publisher, num_batches):
    """The view has five batches of another publisher, which `publisher` replaces."""
    with KVEventSubscriber(NOWHERE, publisher.replay_endpoint, timeout_s=30) as subscriber:
        for seq in range(5):
            subscriber.receive(message(seq, 100 + seq))
        publish_one_by_one(publisher, *range(num_batches))
        subscriber.receive(message(num_batches - 1, num_batches - 1))
        assert numbers_held(subscriber) == set(range(num_batches))


def test_poll_returns_though_messages_keep_arriving(publisher, subscriber, monkeypatch):
    monkeypatch.setattr(subscriber_module, "_POLL_S", 0.0)
    publish_one_by_one(publisher, *range(1, 11))
    for _ in range(10):
        assert subscriber.poll(30) == 1
