"""The adapter over tiers, with vLLM's types and no engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_tiering import PAGE, engine_spec_config
from test_adapter import check_failed_store_is_announced, keys_of, request, store
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult

from kvcache.integrations.vllm import KVCacheOffloadingSpec
from kvcache.integrations.vllm.tiered import SharedPool
from kvcache.specs import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, CPULoadStoreSpec
from kvcache.transfer import free_memory, shared_file
from kvcache.transfer.shared_file import SharedBlocks

BLOCK_SIZE = 16


@pytest.fixture
def make(tmp_path):
    """A function that builds the adapter over one disk tier from extra options; everything is shut down at the end."""
    made = []
    (tmp_path / "pool").mkdir()

    def build(num_blocks=4, enable_events=False, **options):
        extra_config = {
            "cpu_bytes_to_use": num_blocks * PAGE,
            "pool_folder": str(tmp_path / "pool"),
            "tiers": [{"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}],
            **options,
        }
        adapter = KVCacheOffloadingSpec(engine_spec_config(extra_config, enable_events=enable_events)).get_manager()
        made.append(adapter)
        return adapter

    yield build
    for adapter in made:
        adapter.shutdown()


def test_refused_options_close_the_tiers(make, tmp_path):
    for options in ({"what_if": 1}, {"canonical_layout": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(**options)
    assert [path for path in (tmp_path / "pool").rglob("*") if path.is_file()] == []
    # A tier that had stayed open would hold the folder's lock.
    assert make().get_stats() is not None


def test_tier_descriptions_name_size_and_blocks(make):
    adapter = make()
    assert adapter.tier_descriptions() == ["tier DISK of 215 blocks, 0 found"]
    serve(adapter, "a", keys_of("a", 3))
    adapter.shutdown()
    assert make().tier_descriptions() == ["tier DISK of 215 blocks, 3 found"]
    (line,) = make(tiers=[{"type": "valkey", "url": "valkey://127.0.0.1:1"}]).tier_descriptions()
    assert line.startswith("tier VALKEY of unknown size")


def test_ranks_copy_blocks_of_one_pool(make, tmp_path):
    tiers = [{"type": "memory", "capacity": "1MiB"}]
    options = {"cpu_bytes_to_use": 8 * PAGE, "pool_folder": str(tmp_path / "pool"), "tiers": tiers}
    config = engine_spec_config(options, tp=2, bytes_per_block=96)
    caches = [torch.arange(4 * 96, dtype=torch.int32).to(torch.int8).reshape(4, 96) + rank for rank in range(2)]
    expected, workers = [cache[[3, 1]] for cache in caches], []
    for rank, cache in enumerate(caches):
        spec = KVCacheOffloadingSpec(replace(config, parallel=replace(config.parallel, rank=rank)))
        known = CanonicalKVCaches([CanonicalKVCacheTensor(cache, 96)], [[CanonicalKVCacheRef(0, 96)]])
        workers.append(spec.get_worker(known))
        assert spec.get_worker(known) is workers[-1]
    device = base.GPULoadStoreSpec([3, 1], group_sizes=[2], block_indices=[0])
    # Until a scheduler owns the pool, no tier would read the blocks.
    assert workers[0].submit_store(1, device, CPULoadStoreSpec([0, 1])) is False
    spec = KVCacheOffloadingSpec(config)
    adapter = spec.get_manager()
    assert spec.get_manager() is adapter
    context, keys = request(adapter, "r", keys_of("a", 2)), keys_of("a", 2)

    def copy(method, *specs):
        for worker in workers:
            assert getattr(worker, f"submit_{method}")(7, *specs)
            worker.wait({7})
            assert [(result.job_id, result.success) for result in worker.get_finished()] == [(7, True)]

    host = adapter.prepare_store(keys, context).store_spec
    copy("store", device, host)
    adapter.complete_store(set(keys), context)
    for cache in caches:
        cache.zero_()
    copy("load", adapter.prepare_load(keys, context), device)
    assert all(torch.equal(*pair) for pair in zip([cache[[3, 1]] for cache in caches], expected, strict=True))
    assert list(adapter.config_info()[0].values()) == [4, 8 * PAGE]
    for worker in workers:
        worker.shutdown()
        assert worker.submit_store(8, device, host) is False
    adapter.shutdown()


def test_pool_of_running_engine_is_refused(tmp_path, monkeypatch):
    config, asked = engine_spec_config({}, tp=2), []
    monkeypatch.setattr(shared_file, "check_memory", lambda num_bytes, folder: asked.append(num_bytes))
    worker = SharedPool(config, str(tmp_path), 4, PAGE, is_owner=False)
    owner = SharedBlocks(worker.path, 4, 2 * PAGE, is_owner=True)
    with pytest.raises(ValueError, match="belongs to a running engine of the same engine_id"):
        SharedPool(config, str(tmp_path), 4, PAGE, is_owner=False)
    # The first of an engine's processes makes the memory of all ranks.
    assert asked == [8 * PAGE]
    owner.close()
    worker.close()


def serve(adapter, req_id, keys):
    """Store the blocks of a request, wait until the tier has them, and end the request."""
    context = request(adapter, req_id, keys)
    store(adapter, keys, context)
    assert adapter._tiered.settle()
    adapter.on_request_finished(context)


def test_blocks_from_disk_are_reported(make):
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    adapter = make(num_blocks=4, cache_policy="lru")
    serve(adapter, "old", keys_of("a", 2))
    serve(adapter, "new", keys_of("b", 3))  # a1 leaves host memory
    context = request(adapter, "again", [])
    keys = [b"b0", b"a1"]
    first = [adapter.lookup(key, context) for key in keys]
    assert first[0] is LookupResult.HIT
    assert first[1] in (LookupResult.RETRY, LookupResult.HIT_PENDING)
    assert adapter._tiered.settle()
    assert [adapter.lookup(key, context) for key in keys] == [LookupResult.HIT] * 2
    adapter.prepare_load(keys, context)
    assert [adapter.get_load_source(key, context) for key in keys] == [CacheHitSource.HOST, CacheHitSource.DISK]
    # A later request finds it in host memory.
    assert adapter.get_load_source(b"a1", request(adapter, "later", [])) is CacheHitSource.HOST
    adapter.complete_load(set(keys), context)


def test_working_tiers_count_as_available(make):
    adapter = make()
    serve(adapter, "a", keys_of("a", 2))
    sent = adapter.get_stats().reduce()
    tier = ":('0', 'DISK')"
    assert (sent["vllm:kvcache_tier_unavailable" + tier], sent["vllm:kvcache_tier_held_blocks" + tier]) == (0, 2)
    assert (sent["vllm:kvcache_tier_corrupt_blocks" + tier], sent["vllm:kvcache_tier_io_errors" + tier]) == (0, 0)
    assert sent.keys() >= {"vllm:kvcache_tier_reads_breaker:('0', 'DISK', 'closed')"}
    serve(adapter, "b", keys_of("b", 1))
    assert adapter.get_stats().reduce()["vllm:kvcache_tier_written_blocks" + tier] == 1


def test_failed_store_above_tier_is_announced(make):
    check_failed_store_is_announced(make(enable_events=True))


def test_events_over_disk_keep_their_tokens(make):
    events = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.events")
    adapter = make(num_blocks=2, enable_events=True, cache_policy="lru")
    tracker = events.OffloadingEventsTracker(base.OffloadingKVEventsConfig(True, True))
    group = SimpleNamespace(
        sliding_window_size_in_chunks=None,
        tokens_per_chunk=BLOCK_SIZE,
        tokens_per_block=BLOCK_SIZE,
        hashes_per_chunk=1,
        group_idx=0,
        kv_event_group_spec=events.OffloadingEventGroupSpec("full_attention", None),
    )
    found = []

    def serve_tracked(name):
        """Store a prompt of two blocks, wait for the disk, and return the first key."""
        hashes = [name.encode() * 8 + bytes([i]) * 24 for i in range(2)]
        keys = [base.make_offload_key(block_hash, 0) for block_hash in hashes]
        prompt = SimpleNamespace(block_hashes=hashes, all_token_ids=[*range(2 * BLOCK_SIZE)], lora_request=None)
        for i, key in enumerate(keys):
            tracker.record_store(prompt, group, i, key)
        serve(adapter, name, keys)
        found.extend(tracker.take_events(adapter.take_events()))
        return keys[0]

    first = serve_tracked("a")
    serve_tracked("b")  # evicts both blocks of a from host memory
    context = request(adapter, "again", [])
    while adapter.lookup(first, context) is not LookupResult.HIT:
        assert adapter._tiered.settle()
    found += tracker.take_events(adapter.take_events())
    assert {(event.locality, event.ownership) for event in found} == {("LOCAL", None)}
    stored = [event for event in found if type(event).__name__ == "BlockStored"]
    assert [event.medium for event in stored].count("CPU") == 5
    assert [event.medium for event in stored].count("STORAGE") == 4
    assert all(len(event.token_ids) == event.block_size == BLOCK_SIZE for event in stored)
    assert {event.kv_cache_spec_kind for event in stored} == {"full_attention"}
    assert {event.medium for event in found if event not in stored} == {"CPU"}


def test_memory_limit_stops_engines_worker(monkeypatch):
    """Without it, the process that fills vLLM's region would be killed."""
    monkeypatch.setattr(free_memory, "_cgroup_memory", lambda _: (2 * PAGE, "memory.max"))
    spec = KVCacheOffloadingSpec(engine_spec_config({"cpu_bytes_to_use": 3 * PAGE, "data_plane": "vllm"}))
    with pytest.raises(ValueError, match=r"a pool of 12288 bytes .* 8192 bytes .* are left by memory.max"):
        spec.create_worker(None)
