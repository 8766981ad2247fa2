"""Routers (`consumers`) take the events of docs/howto/routers.md; the page's table is made here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from consumers import READERS, TAKEN

from kvcache import CPUOffloadingManager, MemoryTier, ReqContext, TieredOffloadingManager
from kvcache.tiers.memory import MemoryOptions

BLOCK_SIZE = 4
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "routers.md").read_text()


def key_of(*seed: object) -> bytes:
    return random.Random(repr(seed)).randbytes(32) + bytes(4)


def publish(manager: Any) -> tuple[Any, list[tuple[bytes, bytes, bytes]]]:
    """Return the publisher of the page over a manager, and the list of the messages that it will have sent."""
    pytest.importorskip("zmq")
    names: dict[str, Any] = {}
    exec(PAGE.partition("```python\n")[2].partition("```")[0], names)
    publisher = names["Publisher"](manager, "tcp://127.0.0.1:*")
    publisher.socket.close()
    sent: list[tuple[bytes, bytes, bytes]] = []
    publisher.socket = SimpleNamespace(send_multipart=sent.append)
    return publisher, sent


def serve(manager: Any, publisher: Any, keys: list[bytes]) -> None:
    context = ReqContext()
    publisher.describe(keys, [*range(len(keys) * BLOCK_SIZE)])
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)


def test_readers_index_every_change_in_media() -> None:
    tier = MemoryTier(MemoryOptions(200 * 8), np.zeros((60, 8), np.uint8))
    manager = TieredOffloadingManager(BLOCK_SIZE, 60, [tier], "lru", True)
    publisher, sent = publish(manager)
    readers = [READERS[name](BLOCK_SIZE) for name in ("llm-d", "Dynamo", "AIBrix", "vllm-router")]
    # Three requests share their first two blocks.
    prompts = [[key_of(request // 3 if i < 2 else -request, i) for i in range(6)] for request in range(100)]
    for keys in prompts:
        serve(manager, publisher, keys)
        assert manager.settle()
        publisher.send()
    in_memory = {publisher.hash_of(key) for keys in prompts for key in keys if manager.pool.policy.get(key)}
    assert len(in_memory) == 60
    for reader in readers:
        for topic, _, payload in sent:
            reader.feed(topic, payload)
        assert {verdict for _, verdict in reader.verdicts} == {TAKEN}
        sizes = {len(blocks): blocks for blocks in reader.blocks.values()}
        assert sizes.keys() == {60, tier.stats().num_held}
        assert sizes[60] == in_memory


def test_lost_events_clear_the_view() -> None:
    manager = CPUOffloadingManager(BLOCK_SIZE, 60, "lru", True)
    publisher, sent = publish(manager)
    reader = READERS["vllm-router"](BLOCK_SIZE)
    for number in range(3):
        serve(manager, publisher, [key_of(number)])
        if number == 1:
            manager.reset_cache()
        publisher.send()
    assert [int.from_bytes(number, "big") for _, number, _ in sent] == [0, 1]
    for topic, _, payload in sent:
        reader.feed(topic, payload)
    assert reader.blocks == {"CPU": {publisher.hash_of(key_of(2))}}


def verdict(
    name: str, change: Callable[[dict[str, Any]], object], medium: str, is_removed: bool, is_reset: bool
) -> str:
    """Return the verdict of a reader on the last event, after the stores that it refers to."""
    manager = CPUOffloadingManager(BLOCK_SIZE, 8, "lru", True)
    publisher, sent = publish(manager)
    keys = [key_of(i) for i in range(3)]
    publisher.describe(keys, [*range(12)])
    assert manager.events is not None
    for removed in (False, True)[: 1 + is_removed]:
        manager.events.add(keys, medium, removed)
    if is_reset:
        publisher.send()
        manager.events.clear()
        manager.events.add(keys, medium, False)
    publisher.send()
    reader = READERS[name](BLOCK_SIZE)
    found: list[str] = []
    try:
        for topic, _, payload in sent:
            ts, events, rank = msgspec.msgpack.decode(payload)
            for event in events:
                change(event)
            found += reader.feed(topic, msgspec.msgpack.encode([ts, events, rank]))
    except ValueError as error:
        return f"batch refused ({str(error).split(', got')[0]})"
    wrong = next((text for text in found if text != TAKEN), "")
    return f"ignored ({wrong})" if wrong else "taken"


def without_tokens(event: dict[str, Any]) -> None:
    event.update(token_ids=[], parent_block_hash=None)


def with_window(event: dict[str, Any]) -> None:
    event.update(group_idx=1, kv_cache_spec_kind="sliding_window")


def with_whole_hashes(event: dict[str, Any]) -> None:
    event.update(block_hashes=[number.to_bytes(32, "big") for number in event["block_hashes"]])


def test_routers_page_holds_verdict_table() -> None:
    rows: list[tuple[str, Callable[[dict[str, Any]], object], str, bool, bool]] = [
        ("store in host memory", bool, "CPU", False, False),
        ("in a tier", bool, "DISK", False, False),
        ("removal from host memory", bool, "CPU", True, False),
        ("from a tier", bool, "DISK", True, False),
        ("everything cleared", bool, "CPU", False, True),
        ("store without tokens", without_tokens, "CPU", False, False),
        ("store in a group with a sliding window", with_window, "CPU", False, False),
        ("store with whole hashes", with_whole_hashes, "CPU", False, False),
    ]
    lines = [f"| event | {' | '.join(READERS)} |", "|---" * (len(READERS) + 1) + "|"]
    labels: dict[str, list[str]] = {}
    for label, *case in rows:
        cells = " | ".join(verdict(name, *case) for name in READERS)
        labels.setdefault(cells, []).append(label)
    made = "\n".join([*lines, *(f"| {', '.join(same)} | {cells} |" for cells, same in labels.items())])
    assert made in PAGE, f"docs/howto/routers.md must hold:\n{made}"
