"""A store that engines share: blocks of one engine are hits for the next one, with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_options import BLOCK_BYTES
from stores import MooncakeStore


@pytest.fixture(params=["valkey", "mooncake"])
def entry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if request.param == "valkey":
        yield {"type": "valkey", "url": request.getfixturevalue("valkey_url")}
        return
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    store = MooncakeStore(tmp_path)
    try:
        store.start_node("256MB")
        # Until the node has lent its memory.
        time.sleep(3)
        yield {"type": "mooncake", "master": store.master}
    finally:
        store.close()


def test_second_engine_hits_what_the_first_stored(
    boot: Any, models: Any, crowd: Any, expected: Any, entry: dict[str, Any]
) -> None:
    # Host memory for 40 blocks, of which the seven prompts have 140.
    config = {
        "cpu_bytes_to_use": 40 * BLOCK_BYTES,
        "cache_policy": "lru",
        "lookup_deadline_s": 30,
        "tiers": [entry | {"deadline_s": 30}],
    }
    with boot(models["llama"], config) as engine:
        assert engine.ask_each(crowd) == (expected(crowd), [0] * 7)
        (lane,) = engine.manager._tiered.tier_stats()
        assert (lane.written_blocks, lane.failed_jobs) == (140, 0)
    with boot(models["llama"], config) as engine:
        assert engine.ask_each(crowd) == (expected(crowd), [640] * 7)
        (lane,) = engine.manager._tiered.tier_stats()
        assert (lane.promoted_blocks, lane.tier.stored_blocks, lane.failed_jobs) == (140, 0, 0)
        assert engine.metric("vllm:kvcache_tier_promoted_blocks") == 140
