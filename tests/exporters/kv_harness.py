"""What the tests of KV events share: events of numbered blocks, and requests to a publisher."""

from __future__ import annotations

import zmq

from kvcache import OffloadingEvent, make_offload_key
from kvcache.exporters.kv_events import END_OF_REPLAY, KVEventPublisher, KVEventSubscriber

ANY_PORT = "tcp://127.0.0.1:0"
NOWHERE = "tcp://127.0.0.1:1"


def key(number: int, group_idx: int = 0) -> bytes:
    return make_offload_key(number.to_bytes(8, "big"), group_idx)


def stored(*numbers: int) -> OffloadingEvent:
    return OffloadingEvent([key(number) for number in numbers], 16, "CPU", False)


def numbers_held(subscriber: KVEventSubscriber) -> set[int]:
    return {int.from_bytes(block, "big") for block, _ in subscriber.view.media().get("CPU", ())}


def publish_one_by_one(publisher: KVEventPublisher, *numbers: int) -> None:
    """Publish a batch for each number."""
    for number in numbers:
        publisher.publish([stored(number)])
        assert publisher.flush(30)


def ask(publisher: KVEventPublisher, request: bytes = bytes(8)) -> list[list[bytes]]:
    """Return the frames of a reply, up to its end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart((b"", request))
        frames: list[list[bytes]] = []
        while not frames or frames[-1][-2] != END_OF_REPLAY:
            assert socket.poll(30_000)
            frames.append(socket.recv_multipart())
        return frames
