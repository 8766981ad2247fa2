"""What the tests of KV events share: events of numbered blocks, subscribers, and requests to a publisher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import zmq

from kvcache import OffloadingEvent, make_offload_key
from kvcache.exporters.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BlockView,
    EventBatch,
    KVEventPublisher,
    KVEventSubscriber,
)

ANY_PORT = "tcp://127.0.0.1:0"
NOWHERE = "tcp://127.0.0.1:1"
encode = msgspec.msgpack.encode
open_publisher = partial(KVEventPublisher, ANY_PORT, ANY_PORT, hash_format="bytes")


def key(number: int, group_idx: int = 0) -> bytes:
    return make_offload_key(number.to_bytes(8, "big"), group_idx)


def stored(*numbers: int, medium: str = "CPU") -> OffloadingEvent:
    return OffloadingEvent([key(number) for number in numbers], 16, medium, False)


def removed(*numbers: int) -> OffloadingEvent:
    return OffloadingEvent([key(number) for number in numbers], 16, "CPU", True)


def batch(ts: float, number: int, group_idx: int = 0) -> EventBatch:
    hashes: list[int | bytes] = [number.to_bytes(8, "big")]
    return EventBatch(ts, [BlockStored(hashes, None, [], 16, None, "CPU", None, group_idx=group_idx)])


def message(seq: int, number: int, group_idx: int = 0) -> list[bytes]:
    """Return the frames of a batch that stores one block."""
    return [b"kv@host@", seq.to_bytes(8, "big"), encode(batch(1.0 + seq, number, group_idx))]


def until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def subscribed(publisher: KVEventPublisher) -> KVEventSubscriber:
    return KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint or "", timeout_s=30)


@contextmanager
def joined(publisher: KVEventPublisher, number: int = 0) -> Iterator[KVEventSubscriber]:
    """Yield a subscriber after it has received a block: PUB sockets drop messages sent before it has joined."""
    with subscribed(publisher) as subscriber:

        def has_joined() -> bool:
            publisher.publish([stored(number)])
            return subscriber.poll(0.01) > 0

        until(has_joined)
        settle(publisher, subscriber)
        yield subscriber


def settle(publisher: KVEventPublisher, subscriber: KVEventSubscriber) -> None:
    """Poll until publisher and subscriber agree."""
    assert publisher.flush(30)
    poll_until(subscriber, lambda: subscriber.view.media() == media_of(publisher))


def poll_until(subscriber: KVEventSubscriber, holds: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    until(lambda: holds() or subscriber.poll(0.01) < 0)


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


def media_of(publisher: KVEventPublisher) -> dict[str, frozenset[tuple[bytes, int]]]:
    """Return the blocks that all batches of a publisher leave in each medium."""
    types = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
    view = BlockView()
    for frames in ask(publisher)[:-1]:
        for event in msgspec.msgpack.decode(frames[-1])[1]:
            fields = event if isinstance(event, dict) else {"type": event[0]}
            made = msgspec.convert(fields, types[fields["type"]]) if fields is event else types[event[0]](*event[1:])
            view.apply(EventBatch(0.0, [made]))
    return view.media()


@contextmanager
def stalled(publisher: KVEventPublisher) -> Iterator[None]:
    """Keep the publishing thread in the sending of a batch, so that the queue fills."""
    may_go, socket = threading.Event(), publisher._pub

    class Stalled:
        def send_multipart(self, frames: Any) -> None:
            may_go.wait(60)
            socket.send_multipart(frames)

    publisher._pub = Stalled()
    try:
        yield
    finally:
        may_go.set()
        publisher._pub = socket


@contextmanager
def answering(answer: Callable[[bytes], Iterable[list[bytes]]]) -> Iterator[str]:
    """Send `answer(request)` to each request, message by message, on the yielded endpoint."""
    ends = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDTIMEO, 10)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            while not ends.is_set():
                if router.poll(10):
                    frames: Any = router.recv_multipart()
                    for reply in answer(frames[-1]):
                        with suppress(zmq.ZMQError):  # the client reads slowly, or is gone
                            router.send_multipart([frames[0], *reply])
                        if ends.is_set():
                            return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            ends.set()
            thread.join()
