"""The events of the adapter over a disk, after vLLM's own tracker has added tokens and parents."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_tiered_adapter import make, request  # noqa: F401
from vllm.v1.kv_offload import base

from kvcache.integrations.vllm.tiered import TieredKVCacheOffloadingManager

tracker = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.events")
pytestmark = pytest.mark.skipif(not hasattr(base, "Locality"), reason="this release's events have no locality")
BLOCK_SIZE = 16


class Engine:
    """The adapter between a prompt's blocks and vLLM's tracker."""

    def __init__(self, adapter: TieredKVCacheOffloadingManager) -> None:
        self.adapter = adapter
        self.tracker = tracker.OffloadingEventsTracker(base.OffloadingKVEventsConfig(True, True))
        self.group = SimpleNamespace(
            sliding_window_size_in_chunks=None,
            tokens_per_chunk=BLOCK_SIZE,
            tokens_per_block=BLOCK_SIZE,
            hashes_per_chunk=1,
            group_idx=0,
            kv_event_group_spec=tracker.OffloadingEventGroupSpec("full_attention", None),
        )

    def serve(self, name: str, num_blocks: int) -> list[bytes]:
        """Store a prompt's blocks, wait for the disk, and return the keys."""
        hashes = [name.encode() * 8 + bytes([i]) * 24 for i in range(num_blocks)]
        keys = [base.make_offload_key(block_hash, 0) for block_hash in hashes]
        prompt = SimpleNamespace(
            block_hashes=hashes, all_token_ids=[*range(num_blocks * BLOCK_SIZE)], lora_request=None
        )
        context = request(self.adapter, name)
        output = self.adapter.prepare_store(keys, context)
        for i, key in enumerate(keys):
            self.tracker.record_store(prompt, self.group, i, key)
        self.adapter.complete_store(set(output.keys_to_store), context)
        assert self.adapter._tiered.settle()
        self.adapter.on_request_finished(context)
        return keys

    def promote(self, key: bytes) -> None:
        """Look a block up until it is in host memory."""
        context = request(self.adapter, "again")
        while self.adapter.lookup(key, context) is not base.LookupResult.HIT:
            assert self.adapter._tiered.settle()

    def events(self) -> Iterator[Any]:
        return self.tracker.take_events(self.adapter.take_events())


def test_events_over_disk_keep_their_tokens_until_the_last_removal(make: Any) -> None:  # noqa: F811
    engine = Engine(make(num_blocks=2, enable_events=True, cache_policy="lru"))
    events, stored, removed = [], [], []
    keys = engine.serve("a", 2)
    events += engine.events()
    engine.serve("b", 2)  # evicts both blocks of a from host memory
    events += engine.events()
    engine.promote(keys[0])
    for event in (*events, *engine.events()):
        assert event.locality == "LOCAL"
        assert event.ownership is None
        (removed if type(event).__name__ == "BlockRemoved" else stored).append(event)
    assert len([event for event in stored if event.medium == "CPU"]) == 5
    assert len([event for event in stored if event.medium == "STORAGE"]) == 4
    assert all(len(event.token_ids) == event.block_size == BLOCK_SIZE for event in stored)
    assert {event.kv_cache_spec_kind for event in stored} == {"full_attention"}
    assert {event.medium for event in removed} == {"CPU"}
