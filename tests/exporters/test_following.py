"""A publisher that follows a manager: events are queued inside the manager's own calls."""

from __future__ import annotations

import gc
import random
import socket
import threading

import pytest
from kv_harness import ANY_PORT, ask, media_of, open_publisher, stalled
from waiting import wait_until

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.cli.findings import check_config
from kvcache.exporters.kv_events import KVEventPublisher

PLAIN = "reference_policies:ReferenceARC"  # five primitives in plain Python
KEYS = [b"block %4d" % number + bytes(4) for number in range(300)]


@pytest.fixture
def manager(request):
    return CPUOffloadingManager(16, 60, getattr(request, "param", "lru"), True)


@pytest.fixture
def followed(manager, publisher):
    """The publisher, which follows the manager."""
    publisher.follow(manager)
    return publisher


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
    return {block_hash + group.to_bytes(4, "big") for block_hash, group in media_of(publisher).get(medium, ())}


def ready(manager):
    return {key for key in KEYS if manager.lookup(key)}


@pytest.mark.parametrize("manager", ["lru", "arc", "gittins", PLAIN], indirect=True)
def test_published_view_equals_the_manager(manager, publisher):
    store(manager, KEYS[:20])  # not taken yet, so it is published, too
    publisher.follow(manager)
    for seed in range(10):
        drive(manager, 60, seed)
        assert held(publisher) == ready(manager)
        assert list(manager.take_events()) == []
    assert len(manager.events) == manager.events.num_dropped == 0
    assert publisher.stats()["dropped_events"] == 0


@pytest.mark.slow
def test_large_keys_fill_bounded_messages(manager, followed):
    store(manager, [bytes([number]) * (1 << 20) for number in range(12)])
    assert followed.flush(60)
    # 12 MiB of keys; a message holds little more than 4 MiB.
    assert followed.stats()["sent_batches"] >= 3


def test_followed_log_beyond_bound_clears_view(manager, followed):
    store(manager, KEYS[:4])
    assert held(followed) == set(KEYS[:4])
    with stalled(followed):  # the publishing thread sends at most one batch more
        manager.events.max_keys = 3
        for number in range(10, 30):
            store(manager, KEYS[number : number + 1])
    assert held(followed) == set(KEYS[27:30])
    assert followed.stats()["dropped_events"] == manager.events.num_dropped > 0


def test_wrong_use_changes_nothing(manager, publisher):
    with open_publisher() as other:
        with pytest.raises(ValueError, match=r"enable_events=True.*got <"):
            publisher.follow(CPUOffloadingManager(16, 60))
        with pytest.raises(ValueError, match=r"enable_events=True.*got 7"):
            publisher.follow(7)
        publisher.follow(manager)
        with pytest.raises(ValueError, match="follows a manager already"):
            publisher.follow(CPUOffloadingManager(16, 60, "lru", True))
        with pytest.raises(ValueError, match="go to a publisher already"):
            other.follow(manager)
        store(manager, KEYS[:3])
        assert list(manager.take_events()) == []
        assert held(publisher) == set(KEYS[:3])
        assert held(other) == set()


def test_follow_after_failed_watch_works(manager, publisher):
    manager.prepare_store = manager.prepare_store  # an instance that replaces the method cannot be watched
    with pytest.raises(ValueError, match="prepare_store cannot be wrapped"):
        publisher.follow(manager)
    store(manager, KEYS[:2])
    assert [event.keys for event in manager.take_events()] == [KEYS[:2]]
    del manager.prepare_store
    publisher.follow(manager)
    store(manager, KEYS[2:4])
    assert held(publisher) == set(KEYS[2:4])


@pytest.mark.parametrize("ends", ["closed", "dropped", "failed"])
def test_ended_publisher_leaves_events_to_others(manager, ends):
    publisher = open_publisher()
    endpoint = publisher.endpoint
    publisher.follow(manager)
    store(manager, KEYS[:3])
    assert publisher.flush(60)
    thread = publisher._thread
    if ends == "closed":
        publisher.close()
        with pytest.raises(ValueError, match="closed"):
            publisher.follow(manager)
    elif ends == "failed":
        publisher._pub = None
        manager.reset_cache()
    publisher = None
    gc.collect()
    wait_until(lambda: not thread.is_alive)
    assert type(manager) is CPUOffloadingManager  # nothing is wrapped any more
    store(manager, KEYS[3:5])
    assert [event.keys for event in manager.take_events()] == [KEYS[3:5]]
    store(manager, KEYS[5:7])
    with open_publisher() if ends == "failed" else KVEventPublisher(endpoint, ANY_PORT, hash_format="bytes") as second:
        second.follow(manager)
        assert held(second) == set(KEYS[5:7])


def test_threads_that_share_a_followed_manager(manager, followed):
    errors = []

    def work(seed):
        try:
            drive(manager, 300, seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        list(manager.take_events())
        followed.flush(0.01)
        ask(followed)
    assert errors == []
    manager.reset_cache()
    drive(manager, 50, 9)
    assert held(followed) == ready(manager)


def opened(exporters, rank="0", **options):
    settings = OffloadSettings.parse({"num_cpu_blocks": 60, "exporters": exporters})
    return open_manager(settings, block_size=16, num_blocks=60, labels={"engine": "e", "rank": rank}, **options)


def test_configuration_opens_following_publisher():
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


def test_wrong_publisher_configurations_are_named():
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
def test_exporter_failing_to_open_is_logged(given, num_open, reason, caplog):
    manager = opened(given, "1")
    assert len(manager.telemetry.exporters) == num_open
    assert reason in caplog.text
    store(manager, KEYS[:3])
    assert ready(manager) == set(KEYS[:3])
    manager.shutdown()
