"""What the tests of KV events share: a source of events, requests to a publisher, and the blocks that it announced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from consumers import fields_of

from kvcache import Prompt, make_offload_key
from kvcache.core.event_log import EventLog
from kvcache.exporters.kv_events import END_OF_REPLAY, KVEventPublisher

ANY_PORT = "tcp://127.0.0.1:0"
open_publisher = partial(KVEventPublisher, ANY_PORT, ANY_PORT, hash_format="bytes")


def key(number: int, group_idx: int = 0) -> bytes:
    return make_offload_key(number.to_bytes(8, "big"), group_idx)


class Source:
    """As much of a manager as a publisher follows: its log, and the call that names blocks before they are stored."""

    def __init__(self, publisher: KVEventPublisher, block_size: int = 16) -> None:
        self.events = EventLog(block_size)
        publisher.follow(self)

    def prepare_store(self, keys: list[bytes], req_context: Any = None) -> Any:
        return SimpleNamespace(keys_to_store=keys)

    def describe(self, keys: list[bytes], prompt: Prompt) -> None:
        self.prepare_store(keys, SimpleNamespace(prompt=prompt))

    def store(self, *numbers: int) -> None:
        self.events.add([key(number) for number in numbers], "CPU", False)


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


def apply(events: list[Any], held: dict[str, set[Any]]) -> None:
    """Apply decoded events to the blocks of each medium, as a router does: (hash, group index)."""
    for kind, fields in map(fields_of, events):
        if kind == "AllBlocksCleared":
            held.clear()
            continue
        blocks = {(block_hash, fields.get("group_idx") or 0) for block_hash in fields["block_hashes"]}
        medium = held.setdefault(fields["medium"], set())
        (medium.update if kind == "BlockStored" else medium.difference_update)(blocks)


def media_of(publisher: KVEventPublisher) -> dict[str, set[tuple[Any, int]]]:
    """Return the blocks that all batches of a publisher leave in each medium."""
    held: dict[str, set[Any]] = {}
    for frames in ask(publisher)[:-1]:
        apply(msgspec.msgpack.decode(frames[-1])[1], held)
    return {medium: blocks for medium, blocks in held.items() if blocks}


@contextmanager
def stalled(publisher: KVEventPublisher) -> Iterator[None]:
    """Keep the publishing thread in the sending of a batch, so that events wait."""
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
