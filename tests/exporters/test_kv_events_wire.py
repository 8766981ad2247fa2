"""The bytes that the publishing thread encodes, and its queue under invalid events, threads and finalizers."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_harness import ANY_PORT, ask

from kvcache import CPUOffloadingManager, OffloadingEvent
from kvcache.core.event_log import EventLog
from kvcache.exporters.kv_events import (
    DIGEST_PREFIX,
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BlockView,
    Digest,
    EventBatch,
    KVEventPublisher,
)

open_publisher = partial(KVEventPublisher, hash_format="bytes")  # whole hashes can be compared with keys
MAX_BATCH_KEYS = 1024


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
        for key in event.keys:
            block_hash, group_idx = split(key)
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


def joined(events: list) -> list:
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
@example([OffloadingEvent([os.urandom(32) for _ in range(3000)], 16, "CPU", False)], 0)
def test_messages_are_byte_for_byte_what_msgspec_makes_of_the_structs(published, rank):
    plain = BlockView()
    with open_publisher(ANY_PORT, ANY_PORT, block_size=8, data_parallel_rank=rank, digest_every=0) as publisher:
        for event in published:
            if event is None:
                publisher.publish_cleared()
            else:
                publisher.publish([event])
        assert publisher.flush(30)
        replies = ask(publisher)
        snapshot = publisher.snapshot()
    assert [reply[1:3] for reply in replies[:-1]] == [
        [b"kv-events", seq.to_bytes(8, "big")] for seq in range(len(replies) - 1)
    ]
    sent = []
    for reply in replies[:-1]:
        batch = msgspec.msgpack.decode(reply[-1], type=EventBatch)
        assert msgspec.msgpack.encode(batch) == reply[-1]
        assert batch.data_parallel_rank == rank
        sent += batch.events
        plain.apply(batch)
    # A batch may split an event's keys; after merging, the events are equal.
    assert joined(sent) == joined(plain_events(published, 8))
    assert all(len(event.block_hashes) <= MAX_BATCH_KEYS for event in sent if not isinstance(event, AllBlocksCleared))
    whole = BlockView()
    whole.apply(EventBatch(0.0, plain_events(published, 8)))
    assert snapshot == (len(replies) - 1, whole.media())
    assert plain.media() == whole.media()


def test_digests_are_byte_for_byte_what_msgspec_makes_of_the_struct():
    view = BlockView()
    epochs: set[int | None] = set()
    with (
        open_publisher(ANY_PORT, digest_every=1) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.subscribe(DIGEST_PREFIX)
        socket.connect(publisher.endpoint)
        while not socket.poll(20):
            publisher.publish_cleared()
        assert publisher.flush(30)
        while socket.poll(100):
            socket.recv_multipart()
        for number in range(30):
            medium = ("CPU", "disk")[number % 2]
            publisher.publish([OffloadingEvent([b"%d" % number + bytes(4)], 16, medium, False)])
            view.add("CPU" if medium == "CPU" else "STORAGE", [(b"%d" % number, 0)])
            assert publisher.flush(30)
            seq = publisher.stats()["sent_batches"] - 1
            assert socket.poll(30_000)
            topic, seq_bytes, payload = socket.recv_multipart()
            assert (topic, seq_bytes) == (b"digest.kv-events", seq.to_bytes(8, "big"))
            epochs.add(msgspec.msgpack.decode(payload, type=Digest).epoch)
            (epoch,) = epochs
            assert payload == msgspec.msgpack.encode(Digest(seq, view.digests(), epoch=epoch))


def test_snapshot_carries_every_block_and_its_digest():
    held = {(b"%d" % number, number % 3) for number in range(10_000)}
    with open_publisher(ANY_PORT, ANY_PORT) as publisher:
        made = [block_hash + group_idx.to_bytes(4, "big") for block_hash, group_idx in held]
        publisher.publish([OffloadingEvent(made, 16, "CPU", False), OffloadingEvent(made[:5], 16, "disk", False)])
        assert publisher.flush(30)
        *parts, end = ask(publisher, b"snapshot")
        seq = publisher.stats()["sent_batches"]
    view = BlockView()
    for part in parts:
        assert part[:3] == [b"", b"kv-events", seq.to_bytes(8, "big")]
        view.apply(msgspec.msgpack.decode(part[-1], type=EventBatch))
    assert view.media() == {"CPU": held, "STORAGE": {split(key) for key in made[:5]}}
    epoch = msgspec.msgpack.decode(end[-1], type=Digest).epoch
    assert end == [b"", b"", END_OF_REPLAY, msgspec.msgpack.encode(Digest(seq, view.digests(), epoch=epoch))]


class Rude:
    """A key whose `__repr__` publishes."""

    def __init__(self, publisher):
        self.publisher = publisher

    def __repr__(self):
        self.publisher.publish([OffloadingEvent([b"from inside"], 16, "CPU", False)])
        return "rude"


@pytest.mark.parametrize("wrong", ["text", 7, None, bytearray(b"bytes")])
@pytest.mark.parametrize("queue_events", [1, 1000])
def test_a_key_that_is_no_bytes_is_named_and_its_event_is_not_queued(wrong, queue_events):
    with open_publisher(ANY_PORT, queue_events=queue_events) as publisher:
        for keys in ([wrong], [b"fine" * 10, wrong], [b"x" * 100_000, b"fine", wrong]):
            with pytest.raises(ValueError, match=r"a key must be bytes, .*got "):
                publisher.publish([OffloadingEvent(keys, 16, "CPU", False)])
        publisher.publish([OffloadingEvent([b"good"], 16, "CPU", False)])
        assert publisher.flush(30)
        assert publisher.snapshot()[1] == {"CPU": {(b"good", 0)}}


def test_publish_taken_event_with_a_key_not_bytes_leaves_that_key_out():
    log = EventLog(16)
    with open_publisher(ANY_PORT) as publisher:
        log.add([b"first"], "CPU", False)
        log.add([b"second", "text"], "CPU", False)
        publisher.publish(log.take())
        assert publisher.flush(30)
        assert publisher.snapshot()[1] == {"CPU": {split(b"first"), split(b"second")}}


def test_publish_taken_events_behind_a_gap_clears_the_view():
    log = EventLog(16)
    with open_publisher(ANY_PORT) as publisher:
        log.add([b"old"], "CPU", False)
        publisher.publish(log.take())
        log.clear()
        log.add([b"new"], "CPU", False)
        publisher.publish(log.take())
        assert publisher.flush(30)
        assert publisher.snapshot()[1] == {"CPU": {(b"new", 0)}}


def test_an_error_message_that_publishes_breaks_no_event():
    with open_publisher(ANY_PORT) as publisher:
        with pytest.raises(ValueError, match="got rude"):
            publisher.publish([OffloadingEvent([b"half of an event", Rude(publisher)], 16, "CPU", False)])
        assert publisher.flush(30)
        assert publisher.snapshot()[1] == {"CPU": {split(b"from inside")}}


@pytest.mark.parametrize("wrong", [-1, 1 << 64, "16", 1.5])
def test_a_wrong_block_size_is_named(wrong):
    with open_publisher(ANY_PORT) as publisher, pytest.raises(ValueError, match="block_size must be"):
        publisher.publish([OffloadingEvent([b"a"], wrong, "CPU", False)])


def test_events_that_were_published_hold_no_key():
    manager = CPUOffloadingManager(16, 10, "lru", True)
    key = bytes(bytearray(b"a key of its own"))
    with open_publisher(ANY_PORT) as publisher:
        manager.prepare_store([key])
        manager.complete_store([key])
        taken = manager.take_events()
        held = sys.getrefcount(key)
        publisher.publish(taken)
        assert publisher.flush(30)
        assert len(taken) == 0
        assert sys.getrefcount(key) == held - 1


def test_threads_publish_clear_flush_and_look_at_once():
    """One thread publishes; others clear, flush, take snapshots and request replays at the same time."""
    with open_publisher(ANY_PORT, ANY_PORT, queue_events=50, buffer_batches=20, digest_every=3) as publisher:
        stop, errors = threading.Event(), []

        def loop(call):
            try:
                while not stop.is_set():
                    call()
                    time.sleep(0.001)
            except BaseException as error:
                errors.append(error)

        calls = (
            publisher.publish_cleared,
            lambda: publisher.flush(0.01),
            publisher.snapshot,
            publisher.stats,
            lambda: ask(publisher),
            lambda: ask(publisher, b"snapshot"),
        )
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
        assert publisher.snapshot()[1] == {"STORAGE": {split(b"the last")}}


def test_a_publisher_that_is_dropped_ends_its_thread():
    publisher = open_publisher(ANY_PORT, ANY_PORT)
    publisher.publish([OffloadingEvent([b"a"], 16, "CPU", False)])
    endpoint, gone = publisher.endpoint, weakref.ref(publisher)
    (thread,) = (one for one in threading.enumerate() if one.name == "kvcache-kv-events")
    del publisher
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert gone() is None
    open_publisher(endpoint).close()


def test_an_interpreter_that_ends_with_an_open_publisher_ends_well():
    code = (
        "from kvcache import OffloadingEvent\n"
        "from kvcache.exporters.kv_events import KVEventPublisher\n"
        f"publisher = KVEventPublisher({ANY_PORT!r}, {ANY_PORT!r})\n"
        "for _ in range(1000):\n"
        "    publisher.publish([OffloadingEvent([b'%d' % i for i in range(100)], 16, 'CPU', False)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
