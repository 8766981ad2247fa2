"""KVEventPublisher: the bytes of its messages, and its queue under invalid events, threads, forks and slow clients."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_harness import (
    ANY_PORT,
    Source,
    ask,
    key,
    media_of,
    open_publisher,
)
from waiting import wait_until

from kvcache import OffloadingEvent, Prompt
from kvcache.exporters.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventPublisher,
)
from kvcache.exporters.kv_events import publisher as publisher_module

MAX_BATCH_KEYS = 1024
TOPIC = f"kv@{socket.gethostname()}@".encode()


def test_batches_have_vllms_wire_format():
    with KVEventPublisher(ANY_PORT, ANY_PORT) as publisher:
        log = Source(publisher).events
        log.add([key(7, 3)], "CPU", False)
        log.add([key(7, 3)], "disk", True)
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


def published_changes(events: Iterable[OffloadingEvent | None], block_size: int) -> Iterator[tuple[Any, Any]]:
    """Yield the kind and the blocks of each event of a log; None clears all."""
    for event in events:
        if event is None:
            yield AllBlocksCleared, ()
        elif event.keys:
            kind = (BlockRemoved, None) if event.removed else (BlockStored, block_size)
            yield (*kind, "CPU" if event.medium == "CPU" else "STORAGE"), map(split, event.keys)


def sent_changes(events: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the kind and the blocks of each event of a message."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield AllBlocksCleared, ()
        else:
            blocks = [(block_hash, event.group_idx) for block_hash in event.block_hashes]
            yield (type(event), getattr(event, "block_size", None), event.medium), blocks


def merged(changes: Iterable[tuple[Any, Any]]) -> list[tuple[Any, set[Any]]]:
    """Merge adjacent changes of one kind."""
    runs: list[tuple[Any, set[Any]]] = []
    for kind, blocks in changes:
        if not runs or runs[-1][0] != kind:
            runs.append((kind, set()))
        runs[-1][1].update(blocks)
    return runs


keys = st.binary(max_size=8) | st.sampled_from(
    [b"hash" + bytes(4), b"x" * 300 + b"\0\0\0\7", b"y" * 70_000, b"\xff" * 36, b"four", b"", b"hash\0\0\1\0"]
)


events = st.builds(
    OffloadingEvent, st.lists(keys, max_size=40), st.just(0), st.sampled_from(["CPU", "disk", "STORAGE"]), st.booleans()
)


@settings(max_examples=40)
@given(st.lists(st.none() | events, max_size=30), st.integers(0, 2**33), st.sampled_from([0, 8, 65_536, 2**32]))
@example([OffloadingEvent([b"%d" % i + bytes(4) for i in range(70_000)], 0, "CPU", False)], 0, 0)
@example([OffloadingEvent([b"%d" % i + bytes(4) for i in range(5_000)], 0, "CPU", True)], 0, 65_536)
@example([OffloadingEvent([os.urandom(32) for _ in range(3000)], 0, "CPU", False)], 0, 2**32)
def test_messages_equal_those_of_msgspec(published, rank, block_size):
    with open_publisher(data_parallel_rank=rank) as publisher:
        source = Source(publisher, block_size)
        for event in published:
            if event is None:
                # Events that still wait are dropped with the blocks, and two clearings at once are one.
                assert publisher.flush(30)
                source.events.clear()
                assert publisher.flush(30)
            else:
                source.events.add(event.keys, event.medium, event.removed)
        assert publisher.flush(30)
        replies = ask(publisher)
    assert [reply[1:3] for reply in replies[:-1]] == [
        [TOPIC, seq.to_bytes(8, "big")] for seq in range(len(replies) - 1)
    ]
    sent = []
    for reply in replies[:-1]:
        batch = msgspec.msgpack.decode(reply[-1], type=EventBatch)
        assert msgspec.msgpack.encode(batch) == reply[-1]
        assert batch.data_parallel_rank == rank
        sent += batch.events
    # A batch may split an event's keys; after merging, the events are equal.
    assert merged(sent_changes(sent)) == merged(published_changes(published, block_size))
    assert all(len(event.block_hashes) <= MAX_BATCH_KEYS for event in sent if not isinstance(event, AllBlocksCleared))


def test_taken_event_leaves_out_bad_key(publisher):
    log = Source(publisher).events
    log.add([b"first"], "CPU", False)
    log.add([b"second", "text"], "CPU", False)
    assert publisher.flush(30)
    assert media_of(publisher) == {"CPU": {split(b"first"), split(b"second")}}


@pytest.mark.parametrize(
    ("steps", "held"), [("ab/c/", "abc"), ("a/!b/", "b"), ("a/b!/", ""), ("a!b/", "b"), ("!/a", "a")]
)
def test_events_behind_reset_clear_view(publisher, steps, held):
    """Steps: a letter is added to a log, "!" resets it, "/" waits until it is published."""
    log = Source(publisher).events
    for step in steps:
        if step == "/":
            assert publisher.flush(30)
        elif step == "!":
            log.clear()
        else:
            log.add([step.encode()], "CPU", False)
    assert publisher.flush(30)
    assert media_of(publisher) == ({"CPU": {(letter.encode(), 0) for letter in held}} if held else {})


def test_published_events_hold_no_key(publisher):
    log = Source(publisher).events
    key = bytes(bytearray(b"a key of its own"))
    held = sys.getrefcount(key)
    log.add([key], "CPU", False)
    assert publisher.flush(30)
    assert sys.getrefcount(key) == held


@pytest.mark.slow
def test_subscriber_that_never_reads_delays_nobody(publisher):
    source = Source(publisher)
    with zmq.Context() as context, context.socket(zmq.SUB) as idle:
        idle.setsockopt(zmq.RCVHWM, 1)
        idle.setsockopt(zmq.LINGER, 0)
        idle.subscribe(b"")
        idle.connect(publisher.endpoint)
        for number in range(5000):
            source.store(*range(number * 20, number * 20 + 20))
        assert publisher.flush(60)
        assert len(media_of(publisher)["CPU"]) == 100_000


def test_garbage_requests_are_counted(publisher):
    Source(publisher).store(1)
    assert publisher.flush(30)
    with zmq.Context() as context:
        for request in (b"", b"x", b"not eight bytes at all", b"\xff" * 60_000):
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 1000)
                socket.connect(publisher.replay_endpoint)
                socket.send_multipart((b"", request))
        wait_until(lambda: publisher.stats()["rejected_requests"] == 4)
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


def publish_batches(publisher: KVEventPublisher, num_batches: int) -> Source:
    """Publish `num_batches` full batches."""
    source = Source(publisher)
    for number in range(num_batches):
        source.store(*range(1024 * (number % 2), 1024 * (number % 2) + 1024))
        if number % 100 == 99:
            assert publisher.flush(60)  # the log holds no more than 256 of them
    assert publisher.stats()["sent_batches"] == num_batches
    return source


@pytest.mark.slow
def test_silent_clients_hold_no_memory(publisher, monkeypatch):
    monkeypatch.setattr(publisher_module, "_STANDSTILL_S", 0.05)
    source = publish_batches(publisher, 1000)
    # A reply may be longer than the socket's queue.
    assert numbers_of(publisher, 0) == [*range(1000), -1]
    assert publisher.stats()["rejected_requests"] == 0
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
        wait_until(lambda: publisher.stats()["rejected_requests"] == 20)
        source.store(1)
        assert publisher.flush(30)
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


def test_replay_buffer_is_bounded_in_bytes(publisher, monkeypatch):
    monkeypatch.setattr(publisher_module, "_MAX_KEPT_BYTES", 43 << 12)
    log = Source(publisher).events
    for number in range(40):
        log.add([bytes([number]) * (1 << 12) for _ in range(4)], "CPU", number % 2 == 1)
        assert publisher.flush(30)
    assert numbers_of(publisher, 0) == [*range(30, 40), -1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_keeps_no_descriptions(publisher):
    source = Source(publisher)
    ends = threading.Event()
    thread = threading.Thread(target=lambda: [publisher.stats() for _ in iter(ends.is_set, True)])
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                status = 1
                signal.alarm(30)
                try:
                    source.describe([key(1)], Prompt(range(16), [key(1)]))
                    publisher.close()
                    status = len(publisher._source.descriptions) + publisher.flush(0)
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        ends.set()
        thread.join()
    source.store(1)
    assert publisher.flush(30)
    assert media_of(publisher) == {"CPU": {split(key(1))}}
