"""KVEventPublisher: the bytes of its messages, and its queue under invalid events, threads, forks and slow clients."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_harness import (
    ANY_PORT,
    ask,
    encode,
    joined,
    key,
    media_of,
    numbers_held,
    open_publisher,
    publish_one_by_one,
    settle,
    stalled,
    stored,
    until,
)

from kvcache import CPUOffloadingManager, OffloadingEvent, Prompt
from kvcache.core.event_log import EventLog
from kvcache.exporters.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BlockView,
    EventBatch,
    KVEventPublisher,
)
from kvcache.exporters.kv_events import replies as replies_module

MAX_BATCH_KEYS = 1024
TOPIC = f"kv@{socket.gethostname()}@".encode()


def test_batches_have_vllms_wire_format():
    with KVEventPublisher(ANY_PORT, ANY_PORT) as publisher:
        publisher.publish([OffloadingEvent([key(7, 3)], 16, "CPU", False)])
        publisher.publish([OffloadingEvent([key(7, 3)], 16, "disk", True)])
        assert publisher.flush(30)
        [_, topic, seq, payload], *_ = ask(publisher)
    assert (topic, seq) == (TOPIC, bytes(8))
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert abs(ts - time.time()) < 60
    assert rank == 0
    assert events == [
        {
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
        },
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "STORAGE", "group_idx": 3, "locality": "LOCAL"},
    ]


def split(key: bytes) -> tuple[bytes, int]:
    return (key[:-4], int.from_bytes(key[-4:], "big")) if len(key) > 4 else (key, 0)


def plain_events(events: list[OffloadingEvent | None], block_size: int) -> list:
    """Return the wire events in plain Python; the groups of one event are in ascending order."""
    made: list = []
    for event in events:
        if event is None:
            made.append(AllBlocksCleared())
            continue
        groups: dict[int, list[bytes]] = {}
        for one in event.keys:
            block_hash, group_idx = split(one)
            groups.setdefault(group_idx, []).append(block_hash)
        medium = "CPU" if event.medium == "CPU" else "STORAGE"
        for group_idx, hashes in sorted(groups.items()):
            if event.removed:
                made.append(BlockRemoved(hashes, medium, group_idx, "LOCAL"))
            else:
                size = event.block_size or block_size
                made.append(
                    BlockStored(hashes, None, [], size, None, medium, None, group_idx=group_idx, locality="LOCAL")
                )
    return made


def merged(events: list) -> list:
    """Return the changes of each block, run by run: adjacent events that differ only in their blocks are merged."""
    runs: list = []
    for event in events:
        hashes = [] if isinstance(event, AllBlocksCleared) else event.block_hashes
        rest = () if isinstance(event, AllBlocksCleared) else (event.medium, getattr(event, "block_size", None))
        kind = (type(event), rest)
        if not runs or runs[-1][0] != kind:
            runs.append((kind, set()))
        if hashes:
            runs[-1][1].update((block_hash, event.group_idx) for block_hash in hashes)
    return runs


keys = st.binary(max_size=8) | st.sampled_from(
    [b"hash" + bytes(4), b"x" * 300 + b"\0\0\0\7", b"y" * 70_000, b"\xff" * 36, b"four", b"", b"hash\0\0\1\0"]
)


events = st.builds(
    OffloadingEvent,
    st.lists(keys, max_size=40),
    st.sampled_from([0, 1, 16, 127, 128, 65_535, 65_536, 2**32, 2**64 - 1]),
    st.sampled_from(["CPU", "disk", "STORAGE"]),
    st.booleans(),
)


@settings(max_examples=40)
@given(st.lists(st.none() | events, max_size=30), st.integers(0, 2**33))
@example([OffloadingEvent([b"%d" % i + bytes(4) for i in range(70_000)], 16, "CPU", False)], 0)
@example([OffloadingEvent([b"%d" % i + bytes(4) for i in range(5_000)], 16, "CPU", True)], 0)
@example([OffloadingEvent([os.urandom(32) for _ in range(3000)], 16, "CPU", False)], 0)
def test_messages_equal_those_of_msgspec(published, rank):
    plain = BlockView()
    with open_publisher(block_size=8, data_parallel_rank=rank) as publisher:
        for event in published:
            if event is None:
                publisher.publish_cleared()
            else:
                publisher.publish([event])
        assert publisher.flush(30)
        replies = ask(publisher)
    assert [reply[1:3] for reply in replies[:-1]] == [
        [TOPIC, seq.to_bytes(8, "big")] for seq in range(len(replies) - 1)
    ]
    sent = []
    for reply in replies[:-1]:
        batch = msgspec.msgpack.decode(reply[-1], type=EventBatch)
        assert encode(batch) == reply[-1]
        assert batch.data_parallel_rank == rank
        sent += batch.events
        plain.apply(batch)
    # A batch may split an event's keys; after merging, the events are equal.
    assert merged(sent) == merged(plain_events(published, 8))
    assert all(len(event.block_hashes) <= MAX_BATCH_KEYS for event in sent if not isinstance(event, AllBlocksCleared))
    whole = BlockView()
    whole.apply(EventBatch(0.0, plain_events(published, 8)))
    assert plain.media() == whole.media()


class Rude:
    """A key whose `__repr__` publishes."""

    def __init__(self, publisher):
        self.publisher = publisher

    def __repr__(self):
        self.publisher.publish([OffloadingEvent([b"from inside"], 16, "CPU", False)])
        return "rude"


@pytest.mark.parametrize("wrong", ["text", 7, None, bytearray(b"bytes")])
@pytest.mark.parametrize("queue_events", [1, 1000])
def test_key_not_bytes_raises_queues_nothing(wrong, queue_events):
    with open_publisher(queue_events=queue_events) as publisher:
        for keys in ([wrong], [b"fine" * 10, wrong], [b"x" * 100_000, b"fine", wrong]):
            with pytest.raises(ValueError, match=r"a key must be bytes, .*got "):
                publisher.publish([OffloadingEvent(keys, 16, "CPU", False)])
        publisher.publish([OffloadingEvent([b"good"], 16, "CPU", False)])
        assert publisher.flush(30)
        assert media_of(publisher) == {"CPU": {(b"good", 0)}}


def test_taken_event_leaves_out_bad_key(publisher):
    log = EventLog(16)
    log.add([b"first"], "CPU", False)
    log.add([b"second", "text"], "CPU", False)
    publisher.publish(log.take())
    assert publisher.flush(30)
    assert media_of(publisher) == {"CPU": {split(b"first"), split(b"second")}}


@pytest.mark.parametrize(
    ("steps", "held"), [("ab/c/", "abc"), ("a/!b/", "b"), ("a/b!/", ""), ("A!/", ""), ("a/!?Ab/", "Ab")]
)
def test_taken_events_behind_reset_clear_view(publisher, steps, held):
    """Steps: a letter is added to a log, "!" resets it, "/" publishes it.

    "?" publishes a clearing, and a capital an event without a number.
    """
    log = EventLog(16)
    for step in steps:
        if step == "/":
            publisher.publish(log.take())
        elif step == "!":
            log.clear()
        elif step == "?":
            publisher.publish_cleared()
        elif step.isupper():
            publisher.publish([OffloadingEvent([step.encode()], 16, "CPU", False)])
        else:
            log.add([step.encode()], "CPU", False)
    assert publisher.flush(30)
    assert media_of(publisher) == ({"CPU": {(letter.encode(), 0) for letter in held}} if held else {})


def test_nothing_to_full_queue_clears_nothing():
    with open_publisher(queue_events=1) as publisher:
        with stalled(publisher):
            publisher.publish([stored(1), stored(2)])
            publisher.publish([])
        assert publisher.flush(30)
        assert media_of(publisher) == {"CPU": {split(event.keys[0]) for event in (stored(1), stored(2))}}


def test_error_message_that_publishes_breaks_nothing(publisher):
    with pytest.raises(ValueError, match="got rude"):
        publisher.publish([OffloadingEvent([b"half of an event", Rude(publisher)], 16, "CPU", False)])
    assert publisher.flush(30)
    assert media_of(publisher) == {"CPU": {split(b"from inside")}}


@pytest.mark.parametrize("wrong", [-1, 1 << 64, "16", 1.5])
def test_wrong_block_size_is_named(publisher, wrong):
    with pytest.raises(ValueError, match="block_size must be"):
        publisher.publish([OffloadingEvent([b"a"], wrong, "CPU", False)])


def test_published_events_hold_no_key(publisher):
    manager = CPUOffloadingManager(16, 10, "lru", True)
    key = bytes(bytearray(b"a key of its own"))
    manager.prepare_store([key])
    manager.complete_store([key])
    taken = manager.take_events()
    held = sys.getrefcount(key)
    publisher.publish(taken)
    assert publisher.flush(30)
    assert len(taken) == 0
    assert sys.getrefcount(key) == held - 1


def test_threads_publish_and_clear_at_once():
    """One thread publishes; others clear, flush and request replays at the same time."""
    with open_publisher(queue_events=50, buffer_batches=20) as publisher:
        stop, errors = threading.Event(), []

        def loop(call):
            try:
                while not stop.is_set():
                    call()
                    time.sleep(0.001)
            except BaseException as error:
                errors.append(error)

        calls = (publisher.publish_cleared, lambda: publisher.flush(0.01), publisher.stats, lambda: ask(publisher))
        threads = [threading.Thread(target=loop, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        draw = random.Random(6)
        end_s = time.monotonic() + 1
        while time.monotonic() < end_s:
            made = [b"%d" % draw.randrange(5000) + bytes(4) for _ in range(draw.randrange(100))]
            publisher.publish([OffloadingEvent(made, 16, "CPU", draw.random() < 0.3)])
        stop.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert publisher.flush(30)  # the queue may be full
        publisher.publish_cleared()
        publisher.publish([OffloadingEvent([b"the last"], 16, "disk", False)])
        assert publisher.flush(30)
        assert media_of(publisher) == {"STORAGE": {split(b"the last")}}


def test_dropped_publisher_ends_its_thread():
    publisher = open_publisher()
    publisher.publish([OffloadingEvent([b"a"], 16, "CPU", False)])
    endpoint, gone = publisher.endpoint, weakref.ref(publisher)
    (thread,) = (one for one in threading.enumerate() if one.name == "kvcache-kv-events")
    del publisher
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert gone() is None
    KVEventPublisher(endpoint).close()


def test_publish_beyond_queue_clears_the_view():
    with open_publisher(queue_events=1) as publisher, joined(publisher) as subscriber:
        last: set[int] = set()
        for number in range(2000):
            num_dropped = publisher.stats()["dropped_events"]
            publisher.publish([stored(number)])
            if publisher.stats()["dropped_events"] > num_dropped:
                last.clear()
            else:
                last.add(number)
        assert publisher.flush(30)
        publisher.publish([stored(9999)])
        settle(publisher, subscriber)
        assert publisher.stats()["dropped_events"] > 0
        assert numbers_held(subscriber) in (last | {9999}, {9999})


@pytest.mark.slow
def test_subscriber_that_never_reads_delays_nobody(publisher, subscriber):
    with zmq.Context() as context, context.socket(zmq.SUB) as idle:
        idle.setsockopt(zmq.RCVHWM, 1)
        idle.setsockopt(zmq.LINGER, 0)
        idle.subscribe(b"")
        idle.connect(publisher.endpoint)
        for number in range(5000):
            publisher.publish([stored(*range(number * 20, number * 20 + 20))])
        settle(publisher, subscriber)
        assert len(subscriber.view) == 100_000


def test_garbage_requests_are_counted(publisher):
    publish_one_by_one(publisher, 1)
    with zmq.Context() as context:
        for request in (b"", b"x", b"not eight bytes at all", b"\xff" * 60_000):
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 1000)
                socket.connect(publisher.replay_endpoint)
                socket.send_multipart((b"", request))
        until(lambda: publisher.stats()["rejected_requests"] == 4)
        with context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(publisher.replay_endpoint)
            socket.send((0).to_bytes(8, "big"))
            assert socket.poll(30_000)
            assert socket.recv_multipart()[:2] == [TOPIC, bytes(8)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_batches": 0}, "buffer_batches must be an int in 1.*, got 0"),
        ({"model": 7}, "model must be a str, got 7"),
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
def test_replay_beyond_socket_queue_is_whole(publisher):
    publish_batches(publisher, 1000)
    assert numbers_of(publisher, 0) == [*range(1000), -1]
    assert publisher.stats()["rejected_requests"] == 0


@pytest.mark.slow
def test_silent_clients_hold_no_memory(publisher):
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
        # The publisher sends one reply at a time to each client.
        until(lambda: publisher.stats()["rejected_requests"] >= 16)
        publish_one_by_one(publisher, 1)
        assert numbers_of(publisher, 999) == [999, 1000, -1]
        # Four replies are 140 MB, but only 64 messages of 35 KB wait in each client's connection.
        assert resident_bytes() - before < 64 << 20
        for socket in idle:
            socket.close()


def resident_bytes() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("is_request", [True, False])
def test_too_long_request_closes_the_connection(publisher, is_request):
    too_long = bytes((1 << 16) + 1)
    with zmq.Context() as context, context.socket(zmq.DEALER if is_request else zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(publisher.replay_endpoint if is_request else publisher.endpoint)
        if is_request:
            socket.send_multipart((b"", too_long))
        else:
            socket.subscribe(too_long)
        assert monitor.poll(30_000)
        socket.disable_monitor()
        monitor.close(0)
    assert publisher.stats()["rejected_requests"] == 0


def test_clients_get_replies_in_turns(monkeypatch):
    monkeypatch.setattr(replies_module, "_STANDSTILL_S", 1)
    requests, sent = [[name, b"", bytes(8)] for name in (b"silent", b"long", b"late")], []

    def send(frames):
        if frames[0] == b"silent":
            raise zmq.ZMQError(zmq.EAGAIN)
        sent.append(frames[0])

    buffer = replies_module.ReplayBuffer(b"", 1000)
    for _ in range(600):
        buffer.add(b"")
    with zmq.Context() as context:
        replies = replies_module.Replies(context)
        replies.socket.close()
        replies.socket = Mock(poll=lambda _: len(requests), recv_multipart=lambda: requests.pop(0), send_multipart=send)
        for num_sent in (256, 512, 601, 601):
            assert replies.answer(buffer.messages)
            assert [sent.count(name) for name in (b"long", b"late")] == [num_sent] * 2
        assert replies.num_rejected == 0
        until(lambda: not replies.answer(buffer.messages))
        assert replies.num_rejected == 1


def test_replay_buffer_is_bounded_in_bytes(publisher, monkeypatch):
    monkeypatch.setattr(replies_module, "_MAX_KEPT_BYTES", 43 << 12)
    for number in range(40):
        keys = [bytes([number]) * (1 << 12) for _ in range(4)]
        publisher.publish([OffloadingEvent(keys, 16, "CPU", number % 2 == 1)])
        assert publisher.flush(30)
    assert numbers_of(publisher, 0) == [*range(30, 40), -1]


@pytest.mark.parametrize("fails", [False, True])
def test_events_published_after_end_are_dropped(fails):
    publisher = open_publisher(block_size=16)
    publisher.publish([stored(1)])
    if fails:
        assert publisher.flush(30)
        publisher._pub = None
        publisher.publish([stored(2)])
        until(lambda: not publisher._thread.is_alive)
    else:
        publisher.close()
        publisher.close()
    publisher.describe([key(1)], Prompt(range(16), [key(1)]))
    for number in range(1000):
        publisher.publish([stored(number)])
    publisher.publish_cleared()
    assert list(publisher._queue.take()) == [None]  # of the gap
    assert publisher.stats()["dropped_events"] == 1000
    assert publisher.stats()["sent_batches"] == 1
    assert not publisher.flush(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_keeps_no_events(publisher):
    ends = threading.Event()
    publisher.publish([stored(*range(100_000))])

    def look() -> None:
        while not ends.is_set():
            publisher.stats()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                status = 1
                signal.alarm(30)
                num_queued = publisher.stats()["queued_events"]
                try:
                    publisher.publish([stored(1)])
                    publisher.publish_cleared()
                    publisher.close()
                    status = publisher.stats()["queued_events"] - num_queued
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        ends.set()
        thread.join()
