"""Prefix hits of every reference on the conversation trace, to the integer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvcache import CPUOffloadingManager, OffloadingManager, ReqContext
from kvcache.testing.reference_manager import ReferenceManager

pytestmark = pytest.mark.slow

# Every row was checked once at all nine capacities; the compiled policies are, in test_replay.py.
PREFIX_HITS_AT_1000 = {"lru": 12847, "arc": 14158, "mq": 22624, "amq": 18535, "lfuda": 14255}


@pytest.fixture(scope="module")
def requests(shared: Path) -> list[list[bytes]]:
    with (shared / "traces" / "mooncake_conversation.jsonl").open() as lines:
        return [[block.to_bytes(8, "big") for block in json.loads(line)["hash_ids"]] for line in lines]


def prefix_hits(manager: OffloadingManager, requests: Iterable[list[bytes]]) -> int:
    num_hits = 0
    for keys in requests:
        context = ReqContext()
        ready = manager.lookup(keys, context)
        num_hits += ready
        manager.touch(keys, context)
        manager.prepare_load(keys[:ready], context)
        manager.complete_load(keys[:ready], context)
        output = manager.prepare_store(keys, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
    return num_hits


@pytest.mark.parametrize("name", PREFIX_HITS_AT_1000)
def test_reference_reproduces_its_row(name: str, requests: list[list[bytes]]) -> None:
    assert prefix_hits(ReferenceManager(16, 1000, name), requests) == PREFIX_HITS_AT_1000[name]


@pytest.mark.parametrize(("num_blocks", "hits"), [(3000, 36575), (10000, 59582)])
@pytest.mark.parametrize("manager_class", [ReferenceManager, CPUOffloadingManager])
def test_gate_over_lru_reproduces_its_row(
    manager_class: type[OffloadingManager], num_blocks: int, hits: int, requests: list[list[bytes]]
) -> None:
    manager = manager_class(16, num_blocks, "lru", store_threshold=2)

    assert prefix_hits(manager, requests) == hits
