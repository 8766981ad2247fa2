"""Millions of events with dropped messages: after replays, the view is equal to what was published."""

from __future__ import annotations

import os
import random
import time

from kvcache import OffloadingEvent
from kvcache.exporters.kv_events import KVEventPublisher, KVEventSubscriber

# Run by hand with KVCACHE_STRESS=50 to send ten million block events.
NUM_EVENTS = 200_000 * int(os.environ.get("KVCACHE_STRESS", "1"))
KEYS_PER_EVENT = 32


def test_views_agree_after_lost_messages():
    rng = random.Random(5)
    with KVEventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        subscriber = KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint or "", timeout_s=60)
        # A subscriber misses messages that are published before its subscription arrives.
        while not subscriber.poll(0.02):
            publisher.publish([OffloadingEvent([b"starting" + bytes(4)], 16, "CPU", False)])
        receive, num_seen, num_dropped = subscriber.receive, 0, 0

        def lossy(frames: list[bytes]) -> None:
            nonlocal num_seen, num_dropped
            num_seen += 1
            if num_seen % 100 == 50:
                num_dropped += 1
            else:
                receive(frames)

        subscriber.receive = lossy  # type: ignore[method-assign]
        keys = [number.to_bytes(8, "big") + bytes(4) for number in range(100_000)]
        held: set[bytes] = set()
        for i in range(0, NUM_EVENTS, KEYS_PER_EVENT):
            batch = rng.sample(keys, KEYS_PER_EVENT)
            is_removed = rng.random() < 0.4
            batch = [key for key in batch if (key in held) is is_removed]
            (held.difference_update if is_removed else held.update)(batch)
            publisher.publish([OffloadingEvent(batch, 16, "CPU", is_removed)])
            if i % 1024 == 0:
                subscriber.poll()
        assert publisher.flush(60)
        while subscriber.poll(0.2):
            pass
        subscriber.receive = receive  # type: ignore[method-assign]
        end_s = time.monotonic() + 60
        # Publish one more message, so that the subscriber detects a loss at the end.
        publisher.publish([OffloadingEvent([b"the end!" + bytes(4)], 16, "CPU", False)])
        while b"the end!" not in {block for block, _ in subscriber.view.media().get("CPU", ())}:
            assert time.monotonic() < end_s
            subscriber.poll(0.1)
        extra = {b"starting" + bytes(4), b"the end!" + bytes(4)}
        assert {block + bytes(4) for block, _ in subscriber.view.media()["CPU"]} - extra == held
        assert num_dropped > 0
        assert subscriber.num_replays > 0
        subscriber.close()
