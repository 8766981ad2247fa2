"""The adapter over tiers, with vLLM's types and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.base import ReqContext as EngineContext

from kvcache.integrations.vllm import KVCacheOffloadingSpec
from kvcache.integrations.vllm.releases import installed_release
from kvcache.integrations.vllm.tiered import TieredKVCacheOffloadingManager

RANK_BYTES = 4096


def engine_config(extra_config: dict[str, Any], enable_events: bool) -> Any:
    """The fields of `OffloadingConfig` that the adapter reads, for one group on one rank."""
    return SimpleNamespace(
        engine_id="engine",
        extra_config=extra_config,
        enable_kv_cache_events=enable_events,
        model=SimpleNamespace(name="model", dtype="float32"),
        kv_cache_layout="LBHNC",
        groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layer",))],
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
        worker_kv_bytes_per_block=RANK_BYTES,
        parallel=SimpleNamespace(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0
        ),
    )


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """A function that builds the adapter over one disk tier from extra options; everything is shut down at the end."""
    made = []
    (tmp_path / "pool").mkdir()

    def build(num_blocks: int = 4, enable_events: bool = False, **options: Any) -> TieredKVCacheOffloadingManager:
        extra_config = {
            "cpu_bytes_to_use": num_blocks * RANK_BYTES,
            "pool_folder": str(tmp_path / "pool"),
            "tiers": [{"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}],
            **options,
        }
        adapter = KVCacheOffloadingSpec(engine_config(extra_config, enable_events)).get_manager()
        made.append(adapter)
        return adapter

    yield build
    for adapter in made:
        adapter.shutdown()


def test_tiers_are_closed_again_where_the_manager_refuses_its_options(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="what_if"):
        make(what_if=1)
    assert [path for path in (tmp_path / "pool").rglob("*") if path.is_file()] == []
    # A tier that had stayed open would hold the folder's lock.
    assert make().get_stats() is not None


def test_start_line_names_each_tier_and_what_it_found(make: Any) -> None:
    adapter = make()
    assert adapter.tier_descriptions() == ["tier DISK of 215 blocks, 0 found"]
    serve(adapter, "a", keys_of("a", 3))
    adapter.shutdown()
    assert make().tier_descriptions() == ["tier DISK of 215 blocks, 3 found"]


def test_start_line_of_a_store_names_no_number_of_blocks(make: Any) -> None:
    (line,) = make(tiers=[{"type": "valkey", "url": "valkey://127.0.0.1:1"}]).tier_descriptions()
    assert line.startswith("tier VALKEY of unknown size")


def request(adapter: TieredKVCacheOffloadingManager, req_id: str) -> EngineContext:
    context = EngineContext(req_id=req_id)
    adapter.on_new_request(context)
    return context


def serve(adapter: TieredKVCacheOffloadingManager, req_id: str, keys: list[bytes]) -> None:
    """Store the blocks of a request, wait until the tier has them, and end the request."""
    context = request(adapter, req_id)
    adapter.complete_store(set(adapter.prepare_store(keys, context).keys_to_store), context)
    assert adapter._tiered.settle()
    adapter.on_request_finished(context)


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(count)]


@pytest.mark.skipif(not installed_release().load_source, reason="this release does not ask")
def test_blocks_that_came_from_disk_are_reported_as_such(make: Any) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    adapter = make(num_blocks=4, cache_policy="lru")
    serve(adapter, "old", keys_of("a", 2))
    serve(adapter, "new", keys_of("b", 3))  # a1 leaves host memory
    context = request(adapter, "again")
    keys = [b"b0", b"a1"]
    first = [adapter.lookup(key, context) for key in keys]
    assert first[0] is LookupResult.HIT
    assert first[1] in (LookupResult.RETRY, LookupResult.HIT_PENDING)
    assert adapter._tiered.settle()
    assert [adapter.lookup(key, context) for key in keys] == [LookupResult.HIT] * 2
    adapter.prepare_load(keys, context)
    assert [adapter.get_load_source(key, context) for key in keys] == [CacheHitSource.HOST, CacheHitSource.DISK]
    # A later request finds it in host memory.
    assert adapter.get_load_source(b"a1", request(adapter, "later")) is CacheHitSource.HOST
    adapter.complete_load(set(keys), context)


def test_working_tiers_count_as_available(make: Any) -> None:
    adapter = make()
    serve(adapter, "a", keys_of("a", 2))
    sent = adapter.get_stats().reduce()
    tier = ":('0', 'DISK')"
    assert (sent["vllm:kvcache_tier_unavailable" + tier], sent["vllm:kvcache_tier_held_blocks" + tier]) == (0, 2)
    assert (sent["vllm:kvcache_tier_corrupt_blocks" + tier], sent["vllm:kvcache_tier_io_errors" + tier]) == (0, 0)
    assert sent.keys() >= {"vllm:kvcache_tier_reads_breaker:('0', 'DISK', 'closed')"}
