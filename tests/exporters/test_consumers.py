"""Our events go through what other routers accept (`consumers`); the table of docs/howto/routers.md is made here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from consumers import READERS, TAKEN, Reader
from kv_harness import ANY_PORT, Source, media_of

from kvcache import CPUOffloadingManager, MemoryTier, Prompt, ReqContext, TieredOffloadingManager
from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events import END_OF_REPLAY, KVEventPublisher
from kvcache.exporters.kv_events.encoder import EventEncoder

BLOCK_SIZE = 4
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "routers.md"
TOPIC = "kv@host@model"


def key_of(request: int, i: int) -> bytes:
    return random.Random(f"{request} {i}").randbytes(32) + bytes(4)


def prompt_of(request: int, num_blocks: int) -> Prompt:
    """Three requests share their first two blocks."""
    keys = [key_of(request // 3 if i < 2 else -request, i) for i in range(num_blocks)]
    return Prompt([*range(num_blocks * BLOCK_SIZE)], keys, lora_name="adapter" if request % 30 == 0 else None)


def serve(manager: Any, prompt: Prompt) -> None:
    context = ReqContext()
    context.prompt = prompt
    output = manager.prepare_store(prompt.keys, context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)


class Wire:
    """The frames of a publisher, of which some are lost on the way and replayed when a number is missing."""

    def __init__(self, publisher: KVEventPublisher, context: zmq.Context, loss: float) -> None:
        self.publisher = publisher
        self.context = context
        self.loss = loss
        self.next = self.num_lost = 0
        self.random = random.Random(7)
        self.socket = context.socket(zmq.SUB)
        self.socket.set_hwm(0)
        self.socket.subscribe(b"kv@")
        self.socket.connect(publisher.endpoint)

    def replay(self) -> Iterator[tuple[bytes, bytes]]:
        with self.context.socket(zmq.DEALER) as socket:
            socket.set_hwm(0)
            socket.connect(self.publisher.replay_endpoint)
            socket.send_multipart((b"", self.next.to_bytes(8, "big")))
            while socket.poll(30_000) and (frames := socket.recv_multipart())[-2] != END_OF_REPLAY:
                yield frames[-3], frames[-1]
                self.next += 1

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield topic and payload of the received messages, in order."""
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            seq = int.from_bytes(number, "big")
            if self.random.random() < self.loss:
                self.num_lost += 1
            elif seq == self.next:
                yield topic, payload
                self.next += 1
            elif seq > self.next:
                yield from self.replay()


@contextmanager
def wire_of(loss: float = 0.0, **options: Any) -> Iterator[Wire]:
    with (
        KVEventPublisher(ANY_PORT, ANY_PORT, topic=TOPIC, **options) as publisher,
        zmq.Context() as context,
    ):
        wire = Wire(publisher, context, loss)
        try:
            yield wire
        finally:
            wire.socket.close()


def run(manager: Any, readers: list[Reader], num_requests: int, loss: float = 0.0, **options: Any) -> dict[str, int]:
    """Serve requests, feed all frames to the readers, and return how many blocks were stored and removed."""
    with wire_of(loss, buffer_batches=100_000, **options) as wire:
        wire.publisher.follow(manager)
        for request in range(num_requests):
            serve(manager, prompt_of(request, 6))
            assert not isinstance(manager, TieredOffloadingManager) or manager.settle()
            if request % 100 == 99:
                assert wire.publisher.flush(60)
                for frames in wire.frames():
                    for reader in readers:
                        reader.feed(*frames)
        assert wire.publisher.flush(60)
        for frames in (*wire.frames(), *wire.replay()):
            for reader in readers:
                reader.feed(*frames)
        assert wire.publisher.stats()["dropped_events"] == 0
        assert bool(wire.num_lost) == bool(loss)
        held = media_of(wire.publisher)
    assert held
    if isinstance(manager, TieredOffloadingManager):
        [tier] = manager.tier_stats()
        stats = manager.stats()
        assert {name: len(blocks) for name, blocks in held.items()} == {
            "CPU": stats.num_blocks - stats.num_free, "STORAGE": tier.tier.num_held
        }  # fmt: skip
    for reader in readers:
        names = {"cpu": "CPU", "hostpinned": "CPU", "storage": "STORAGE", "disk": "STORAGE"}
        found = {names[name.lower()]: blocks for name, blocks in reader.blocks.items() if blocks}
        assert found == {name: {block_hash for block_hash, _ in blocks} for name, blocks in held.items()}
    return {"BlockStored": manager.stats().stored_blocks, "BlockRemoved": manager.stats().evicted_blocks}


@pytest.mark.parametrize(
    ("last_reader", "num_requests", "options"),
    [
        ("vllm-router", 300, {}),
        ("AIBrix (arrays only)", 300, {"encoding": "array"}),
        pytest.param("vllm-router", 10_000, {"loss": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_readers_with_tokens_index_every_change(last_reader: str, num_requests: int, options: dict[str, Any]) -> None:
    manager = CPUOffloadingManager(BLOCK_SIZE, 600, "lru", True)
    readers = [READERS[name](BLOCK_SIZE) for name in ("llm-d", "Dynamo", "AIBrix", last_reader)]
    counts = run(manager, readers, num_requests, **options)
    for reader in readers:
        assert reader.verdicts == {(kind, TAKEN): count for kind, count in counts.items()}


def test_readers_over_tier_know_both_media() -> None:
    tier = MemoryTier(200, np.zeros((60, 8), np.uint8))
    manager = TieredOffloadingManager(BLOCK_SIZE, 60, [tier], "lru", True)
    readers = [READERS[name](BLOCK_SIZE) for name in ("llm-d", "Dynamo", "AIBrix", "vllm-router")]
    run(manager, readers, 100)
    for reader in readers:
        assert {verdict for _, verdict in reader.verdicts} == {TAKEN}
        assert len(reader.blocks) == 2


def event_of(keys: list[bytes], medium: str = "CPU", removed: bool = False) -> OffloadingEvent:
    return OffloadingEvent(keys, BLOCK_SIZE, medium, removed)


def verdicts(name: str, has_tokens: bool, event: OffloadingEvent | None, **options: Any) -> str:
    """Return the verdict of a reader on an event, after the stores that the event refers to."""
    prompt = prompt_of(1, 3)
    reader = READERS[name](BLOCK_SIZE)
    with wire_of(spec_kinds=("full_attention", "sliding_window:128"), **options) as wire:
        source = Source(wire.publisher, BLOCK_SIZE)
        source.describe(prompt.keys if has_tokens else [], prompt)
        if event is None:
            source.events.clear()
        else:
            if event.removed:
                source.events.add(prompt.keys, event.medium, False)
            source.events.add(event.keys, event.medium, event.removed)
        assert wire.publisher.flush(60)
        found: list[str] = []
        try:
            for frames in wire.replay():
                found += reader.feed(*frames)
        except ValueError as error:
            return f"batch refused ({str(error).split(', got')[0]})"
    return "taken" if found[-1] == TAKEN else f"ignored ({found[-1]})"


def table() -> str:
    keys = [*prompt_of(1, 3).keys]
    window = [key[:-4] + (1).to_bytes(4, "big") for key in keys]
    rows: list[tuple[str, bool, OffloadingEvent | None, dict[str, Any]]] = [
        ("store in host memory", True, event_of(keys), {}),
        ("in a tier", True, event_of(keys, "DISK"), {}),
        ("removal from host memory", True, event_of(keys, removed=True), {}),
        ("from a tier", True, event_of(keys, "DISK", removed=True), {}),
        ("everything cleared", True, None, {}),
        ("store without tokens", False, event_of(keys), {}),
        ("store in a group with a sliding window", True, event_of(window), {}),
        ("store, `encoding` array", True, event_of(keys), {"encoding": "array"}),
        ("store, `hash_format` bytes", True, event_of(keys), {"hash_format": "bytes"}),
    ]
    lines = [f"| event | {' | '.join(READERS)} |", "|---" * (len(READERS) + 1) + "|"]
    labels: dict[str, list[str]] = {}
    for label, has_tokens, event, options in rows:
        cells = " | ".join(verdicts(name, has_tokens, event, **options) for name in READERS)
        labels.setdefault(cells, []).append(label)
    return "\n".join([*lines, *(f"| {', '.join(same)} | {cells} |" for cells, same in labels.items())])


def test_routers_page_holds_verdict_table() -> None:
    made = table()
    assert made in PAGE.read_text(), f"docs/howto/routers.md must hold:\n{made}"


def test_chain_with_tokens_is_one_event() -> None:
    prompt = prompt_of(1, 3)
    prompt.extra_keys = [None, ("salt",), None]
    with wire_of() as wire:
        source = Source(wire.publisher, BLOCK_SIZE)
        source.describe(keys := [*prompt.keys], prompt)
        keys.clear()
        source.events.add([*prompt.keys[1:], key_of(9, 9), prompt.keys[0]], "CPU", False)
        assert wire.publisher.flush(60)
        [(topic, payload)] = wire.replay()
    assert topic == TOPIC.encode()
    events = msgspec.msgpack.decode(payload)[1]
    hashes = [int.from_bytes(key[24:32], "big") for key in prompt.keys]
    assert [(one["block_hashes"], one["parent_block_hash"], one["token_ids"]) for one in events] == [
        (hashes[1:], hashes[0], [4, 5, 6, 7, 8, 9, 10, 11]),
        ([int.from_bytes(key_of(9, 9)[24:32], "big")], None, []),
        (hashes[:1], None, [0, 1, 2, 3]),
    ]
    assert events[0]["extra_keys"] == [["salt"], None]


def test_idle_descriptions_are_dropped_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of blocks that a medium holds stay, and end once all media have removed them."""
    monkeypatch.setattr("kvcache.exporters.kv_events.encoder.MAX_IDLE", 2)
    encoder, prompt = EventEncoder("bytes", (), BLOCK_SIZE), prompt_of(1, 6)
    keys, given = prompt.keys, [*prompt.keys[2:5]]

    def described(*events: OffloadingEvent) -> list[bool]:
        return [bool(getattr(made, "token_ids", ())) for event in events for made, _ in encoder.events(event)]

    encoder.describe([*keys[:2]], prompt)
    assert described(event_of([*keys[:2]])) == [True]
    encoder.describe(given[:2], prompt)
    encoder.describe([given[0]], prompt)
    encoder.describe([given[2]], prompt)
    assert described(event_of([*keys[:2]], "DISK"), *(event_of([key]) for key in given)) == [True, True, False, True]
    described(event_of([*keys], removed=True), event_of([*keys[:2]], "DISK", removed=True))
    encoder.describe([*keys[4:]], prompt)
    assert [key for key in keys if described(event_of([key])) == [True]] == [*keys[4:]]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"token_ids": tokens} for tokens in ([-1] * 8, ["a"] * 8, 3, [1 << 40] * 8)),
        {"extra_keys": [object()] * 2},
        {"extra_keys": [[object()]] * 2},
        {"lora_id": 1 << 70},
        {"keys": ["text", prompt_of(1, 2).keys[1]]},
    ],
)
def test_invalid_prompt_publishes_without_tokens(wrong: dict[str, Any]) -> None:
    prompt, keys = prompt_of(1, 2), prompt_of(1, 2).keys
    for name, value in wrong.items():
        setattr(prompt, name, value)
    with wire_of() as wire:
        source = Source(wire.publisher, BLOCK_SIZE)
        source.describe(keys, prompt)
        source.events.add(keys, "CPU", False)
        assert wire.publisher.flush(60)
        [(_, payload)] = wire.replay()
    assert msgspec.msgpack.decode(payload)[1][-1]["token_ids"] == []


def test_blocks_hashed_ahead_carry_their_tokens() -> None:
    manager = CPUOffloadingManager(BLOCK_SIZE, 600, "lru", True)
    keys = [key_of(0, i) for i in range(3)]
    reader = READERS["vllm-router"](BLOCK_SIZE)
    with wire_of() as wire:
        wire.publisher.follow(manager)
        serve(manager, Prompt([*range(14)], keys, num_lookahead_tokens=3))
        assert wire.publisher.flush(60)
        [(topic, payload)] = [*wire.frames(), *wire.replay()]
    [event] = msgspec.msgpack.decode(payload)[1]
    assert event["lookahead_token_ids"] == [[4, 5, 6], [8, 9, 10], [12, 13]]
    reader.feed(topic, payload)
    assert reader.verdicts == {("BlockStored", TAKEN): 3}
    with pytest.raises(ValueError, match="num_lookahead_tokens must be an int >= 0, got -1"):
        Prompt([], [], num_lookahead_tokens=-1)
