"""A publisher that follows a manager: events are queued inside the manager's own calls."""

from __future__ import annotations

import gc
import random
import socket
import threading
import time
from functools import partial

import numpy as np
import pytest

from kvcache import CPUOffloadingManager, MemoryTier, OffloadingEvent, ReqContext, TierConfig, TieredOffloadingManager
from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.assembly.check import check_config
from kvcache.exporters.kv_events import KVEventPublisher, KVEventSubscriber

ANY_PORT = "tcp://127.0.0.1:0"
open_publisher = partial(KVEventPublisher, hash_format="bytes")  # whole hashes can be compared with keys
PLAIN = "reference_policies:ReferenceARC"  # five primitives in plain Python
KEYS = [b"block %4d" % number + bytes(4) for number in range(300)]


def store(manager, keys, success=True):
    context = ReqContext()
    output = manager.prepare_store(keys, context)
    if output is not None:
        manager.complete_store(output.keys_to_store, context, success)
    manager.on_request_finished(context)


def drive(manager, num_requests, seed):
    """Store runs of keys, some of which fail, with occasional resets."""
    draw = random.Random(seed)
    for _ in range(num_requests):
        start = draw.randrange(len(KEYS) - 12)
        store(manager, KEYS[start : start + draw.randint(1, 12)], draw.random() < 0.9)
        if draw.random() < 0.01:
            manager.reset_cache()


def held(publisher, medium="CPU"):
    assert publisher.flush(60)
    return {block_hash + group.to_bytes(4, "big") for block_hash, group in publisher.snapshot()[1].get(medium, ())}


def ready(manager):
    return {key for key in KEYS if manager.lookup(key)}


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins", PLAIN])
def test_what_is_published_is_what_the_manager_holds(policy):
    manager = CPUOffloadingManager(16, 60, policy, True)
    with open_publisher(ANY_PORT, ANY_PORT, digest_every=4) as publisher:
        store(manager, KEYS[:20])  # not taken yet, so it is published, too
        publisher.follow(manager)
        subscriber = KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, timeout_s=60)
        for seed in range(10):
            drive(manager, 60, seed)
            assert held(publisher) == ready(manager)
            assert list(manager.take_events()) == []
        assert len(manager.events) == manager.events.num_dropped == 0
        assert publisher.stats()["dropped_events"] == 0
        subscriber.resync()
        assert subscriber.view.media() == publisher.snapshot()[1]
        subscriber.close()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[36], [5, 12, 40, 44, 45, 70, 300, 7_000], [1, 2, 3, 4, 36], [36, 4]])
def test_blocks_that_leave_by_their_hashes_are_the_right_ones(sizes):
    """A key of up to 4 bytes gets a group index appended, so its hash differs."""
    draw = random.Random(str(sizes))
    manager = CPUOffloadingManager(16, 50, "lru", True)
    with open_publisher(ANY_PORT, ANY_PORT, digest_every=2) as publisher:
        publisher.follow(manager)
        subscriber = KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, timeout_s=60)
        keys = list({draw.randbytes(draw.choice(sizes)) for _ in range(400)})
        for start in range(0, len(keys), 8):
            store(manager, keys[start : start + 8])
        there = [key if len(key) > 4 else key + bytes(4) for key in keys if manager.lookup(key)]
        assert held(publisher) == set(there)
        subscriber.resync()
        assert subscriber.view.media() == publisher.snapshot()[1]
        subscriber.close()


def test_many_blocks_that_leave_at_once_go_on_in_the_next_batch():
    manager = CPUOffloadingManager(16, 5_000, "lru", True)
    with open_publisher(ANY_PORT, ANY_PORT, digest_every=1) as publisher:
        publisher.follow(manager)
        subscriber = KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, timeout_s=60)
        subscriber.resync()
        old, new = ([b"%d %d" % (number, i) + bytes(4) for i in range(5_000)] for number in range(2))
        store(manager, old)
        store(manager, new)
        assert held(publisher) == set(new)
        end_s = time.monotonic() + 60
        while subscriber.view.media() != publisher.snapshot()[1]:
            assert time.monotonic() < end_s
            subscriber.poll(0.05)
        subscriber.close()


@pytest.mark.slow
def test_large_keys_are_sent_in_messages_of_bounded_size():
    manager = CPUOffloadingManager(16, 12, "lru", True)
    with open_publisher(ANY_PORT) as publisher:
        publisher.follow(manager)
        keys = [bytes([number]) * (1 << 20) for number in range(12)]
        store(manager, keys)
        assert publisher.flush(60)
        # 12 MiB of keys; a message holds little more than 4 MiB.
        assert publisher.stats()["sent_batches"] >= 3


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_tiers_of_a_manager_are_followed(write_policy):
    """Two managers do the same work; the test takes the events of one and follows the other."""
    rule = TierConfig(write_policy=write_policy, deadline_s=60)
    followed, read = (
        TieredOffloadingManager(16, 20, [(MemoryTier(40 * 8, np.zeros((20, 8), np.uint8)), rule)], "lru", True)
        for _ in range(2)
    )
    view = {}
    with open_publisher(ANY_PORT) as publisher:
        publisher.follow(followed)
        draw = random.Random(1)
        for _ in range(150):
            start = draw.randrange(90)
            for manager in (followed, read):
                store(manager, KEYS[start : start + 4])
                manager.on_schedule_end()
                assert manager.settle(60)
            for event in read.take_events():
                medium = view.setdefault(event.medium, set())
                (medium.difference_update if event.removed else medium.update)(event.keys)
        assert held(publisher) == view["CPU"] != set()
        assert held(publisher, "STORAGE") == view["MEMORY"] != set()
        followed.reset_cache()
        assert publisher.flush(60)
        assert publisher.snapshot()[1] == {}
    followed.shutdown()
    read.shutdown()


def test_a_reset_is_published_by_itself_and_so_is_one_of_an_idle_manager():
    manager = CPUOffloadingManager(16, 60, "lru", True)
    with open_publisher(ANY_PORT) as publisher:
        publisher.follow(manager)
        store(manager, KEYS[:5])
        manager.reset_cache()
        assert held(publisher) == set()
        store(manager, KEYS[2:4])
        publisher.publish_cleared()
        store(manager, KEYS[7:9])
        assert held(publisher) == set(KEYS[7:9])


def test_followed_log_beyond_its_bound_clears_the_view():
    manager = CPUOffloadingManager(16, 60, "lru", True)
    with open_publisher(ANY_PORT) as publisher:
        publisher.follow(manager)
        store(manager, KEYS[:4])
        assert held(publisher) == set(KEYS[:4])
        with publisher._view_lock:  # the publishing thread sends at most one batch more
            manager.events.max_keys = 3
            for number in range(10, 30):
                store(manager, KEYS[number : number + 1])
        assert held(publisher) == set(KEYS[27:30])
        assert manager.events.num_dropped > 0


def test_followed_key_that_is_not_bytes_is_left_out():
    manager = CPUOffloadingManager(16, 60, "lru", True)
    with open_publisher(ANY_PORT) as publisher:
        publisher.follow(manager)
        manager.events.add([KEYS[1], "text"], "STORAGE", False)
        assert held(publisher, "STORAGE") == {KEYS[1]}


def test_wrong_use_is_refused_and_changes_nothing():
    manager = CPUOffloadingManager(16, 60, "lru", True)
    with open_publisher(ANY_PORT) as publisher, open_publisher(ANY_PORT) as other:
        with pytest.raises(ValueError, match=r"enable_events=True.*got <"):
            publisher.follow(CPUOffloadingManager(16, 60))
        with pytest.raises(ValueError, match=r"enable_events=True.*got 7"):
            publisher.follow(7)
        publisher.follow(manager)
        with pytest.raises(ValueError, match="follows a manager already"):
            publisher.follow(CPUOffloadingManager(16, 60, "lru", True))
        with pytest.raises(ValueError, match="go to a publisher already"):
            other.follow(manager)
        with pytest.raises(ValueError, match="follows a manager, whose events"):
            publisher.publish([OffloadingEvent([KEYS[9]], 16, "CPU", False)])
        store(manager, KEYS[:3])
        publisher.publish(manager.take_events())  # the call of an old publishing loop; it finds no events
        other.publish([OffloadingEvent([KEYS[9]], 16, "CPU", False)])
        assert held(publisher) == set(KEYS[:3])
        assert held(other) == {KEYS[9]}


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_publisher_that_ended_leaves_events_to_their_manager_and_to_another_publisher(ends):
    manager = CPUOffloadingManager(16, 60, "lru", True)
    publisher = open_publisher(ANY_PORT)
    publisher.follow(manager)
    store(manager, KEYS[:3])
    assert publisher.flush(60)
    thread = publisher._thread
    if ends == "closed":
        publisher.close()
        with pytest.raises(ValueError, match="closed"):
            publisher.follow(manager)
    publisher = None
    gc.collect()
    end_s = time.monotonic() + 60
    while thread.is_alive:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    store(manager, KEYS[3:5])
    assert [event.keys for event in manager.take_events()] == [KEYS[3:5]]
    store(manager, KEYS[5:7])
    with open_publisher(ANY_PORT) as second:
        second.follow(manager)
        assert held(second) == set(KEYS[5:7])


def test_threads_that_share_a_followed_manager():
    manager = CPUOffloadingManager(16, 60, "lru", True)
    errors = []

    def work(seed):
        try:
            drive(manager, 300, seed)
        except BaseException as error:
            errors.append(error)

    with open_publisher(ANY_PORT) as publisher:
        publisher.follow(manager)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            list(manager.take_events())
            publisher.flush(0.01)
            publisher.snapshot()
        assert errors == []
        manager.reset_cache()
        drive(manager, 50, 9)
        assert held(publisher) == ready(manager)


def opened(exporters, rank="0", **options):
    settings = OffloadSettings.read({"num_cpu_blocks": 60, "exporters": exporters})
    return open_manager(settings, block_size=16, num_blocks=60, labels={"engine": "e", "rank": rank}, **options)


def test_a_configuration_opens_a_publisher_that_follows_the_manager():
    manager = opened(
        [{"type": "kv_events", "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT, "hash_format": "bytes"}], "3"
    )
    (exporter,) = manager.telemetry.exporters
    assert exporter.address == f"{exporter.publisher.endpoint} (replays at {exporter.publisher.replay_endpoint})"
    store(manager, KEYS[:3])
    assert held(exporter.publisher) == set(KEYS[:3])
    found = {sample.name: sample.value for sample in manager.telemetry.snapshot().samples()}
    assert (found["publisher_sent_batches"], found["publisher_queued_events"]) == (1, 0)
    manager.telemetry.close()
    manager.telemetry.close()
    store(manager, KEYS[5:6])
    assert [event.keys for event in manager.take_events()] == [KEYS[5:6]]


def test_ranks_publish_on_ports_that_follow():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        given = [{"type": "kv_events", "endpoint": f"tcp://127.0.0.1:{port - 1}"}]
        # The port is in use: the manager logs that and works without the exporter.
        manager = opened(given, "1")
        assert manager.telemetry.exporters == []
        found = check_config({"num_cpu_blocks": 8, "exporters": [{**given[0], "endpoint": f"tcp://127.0.0.1:{port}"}]})
        (finding,) = [one for one in found if one.subject.startswith("exporter")]
        assert (finding.level, f"cannot bind 'tcp://127.0.0.1:{port}'" in finding.text) == ("warning", True)
    manager = opened(given, "1")
    assert manager.telemetry.exporters[0].publisher.endpoint == f"tcp://127.0.0.1:{port}"
    manager.telemetry.close()


def test_wrong_configurations_of_a_publisher_are_named():
    with pytest.raises(ValueError, match="unknown options of exporter 'kv_events': port; known"):
        opened([{"type": "kv_events", "port": 5}])
    with pytest.raises(ValueError, match=r"buffer_batches in exporter 'kv_events'.*0"):
        opened([{"type": "kv_events", "advanced": {"buffer_batches": 0}}])
    with pytest.raises(ValueError, match="takes the manager's events; remove the exporter KVEventExporter"):
        opened([{"type": "kv_events", "endpoint": ANY_PORT}], enable_events=True)


@pytest.mark.parametrize(
    ("given", "num_open", "reason"),
    [
        ([{"type": "kv_events", "endpoint": ANY_PORT}] * 2, 1, "go to a publisher already"),
        ([{"type": "kv_events", "endpoint": "tcp://127.0.0.1:70000"}], 0, "cannot bind 'tcp://127.0.0.1:70001'"),
        ([{"type": "prometheus", "port": 65535}], 0, "port must be an int in 0..65535, got 65536"),
    ],
)
def test_exporter_that_cannot_be_opened_is_logged_and_the_engine_goes_on(given, num_open, reason, caplog):
    manager = opened(given, "1")
    assert len(manager.telemetry.exporters) == num_open
    assert reason in caplog.text
    store(manager, KEYS[:3])
    assert ready(manager) == set(KEYS[:3])
    manager.shutdown()
