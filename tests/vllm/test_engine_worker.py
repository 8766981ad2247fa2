"""Our manager over vLLM's own worker: geometry, specs and host blocks are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_tiering import PAGE, engine_spec_config, key, keys, wait_until
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcache.integrations.vllm import KVCacheOffloadingSpec


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's specs ask the platform for the shared region."""
    from vllm.v1.kv_offload.cpu import spec

    monkeypatch.setattr(spec, "current_platform", Cuda)


class Cuda:
    """What the specs ask the platform."""

    is_cuda_alike = is_xpu = staticmethod(lambda: True)
    is_rocm = staticmethod(lambda: False)


@pytest.mark.parametrize("with_tiers", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tp": 2},
        {"tp": 2, "replicated": True},
        {"tp": 2, "pp": 2},
        {"tp": 2, "num_groups": 3, "bytes_per_block": 3000},
    ],
    ids=["tp1", "tp2", "tp2-mla", "tp2-pp2", "groups"],
)
def test_engine_worker_geometry_is_that_of_vllm(config: dict[str, Any], with_tiers: bool, tmp_path: Path) -> None:
    tiers = [{"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}] if with_tiers else []
    upstream = TieringOffloadingSpec if with_tiers else CPUOffloadingSpec
    theirs = upstream(engine_spec_config({"cpu_bytes_to_use": 1 << 20}, **config))
    extra_config = {"cpu_bytes_to_use": "1MiB", "data_plane": "vllm", **({"tiers": tiers} if tiers else {})}
    ours = KVCacheOffloadingSpec(engine_spec_config(extra_config, **config))
    for name in ("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "replicated_layout"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.num_blocks == theirs.num_chunks
    assert ours.replicated_layout == config.get("replicated", False)


def test_engine_worker_memory_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block of 4096 bytes, got 4095"):
        KVCacheOffloadingSpec(engine_spec_config({"cpu_bytes_to_use": 4095, "data_plane": "vllm"}))
    with pytest.raises(ValueError, match=r"data_plane .* must be one of vllm, kvcache, got 'cuda'"):
        KVCacheOffloadingSpec(engine_spec_config({"cpu_bytes_to_use": 1 << 20, "data_plane": "cuda"}))


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[KVCacheOffloadingSpec]:
    """Our spec with a disk below eight host blocks of two ranks."""
    extra_config = {
        "cpu_bytes_to_use": 8 * 2 * PAGE,
        "data_plane": "vllm",
        "cache_policy": "lru",
        "tiers": [{"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}],
    }
    made = KVCacheOffloadingSpec(engine_spec_config(extra_config, tp=2))
    yield made
    made.get_manager().shutdown()
    assert not list(Path("/dev/shm").glob(f"*{made.config.engine_id}*"))


def test_engine_worker_blocks_of_all_ranks_come_back_from_a_tier(spec: Any) -> None:
    manager = spec.get_manager()
    # What vLLM's workers map: rank by rank.
    regions = [
        SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        for rank in (0, 1)
    ]
    views = [region.create_next_worker_view(PAGE).numpy() for region in regions]

    def settle() -> None:
        def is_idle() -> bool:
            manager.on_schedule_end(None)
            return not manager.has_pending_work()

        wait_until(is_idle)

    for first in range(0, 24, 8):
        context = base.ReqContext(f"store-{first}")
        manager.on_new_request(context)
        output = manager.prepare_store(keys(*range(first, first + 8)), context)
        assert type(output.store_spec) is CPULoadStoreSpec
        assert output.store_spec.chunk_ids.dtype == np.int32
        for rank, view in enumerate(views):
            for number, chunk in zip(range(first, first + 8), output.store_spec.chunk_ids, strict=True):
                view[chunk] = number + 100 * rank
        manager.complete_store(set(output.keys_to_store), context)
        manager.on_request_finished(context)
        settle()
    for view in views:
        view[:] = -1

    context = base.ReqContext("load")
    manager.on_new_request(context)

    def is_found() -> bool:
        manager.on_schedule_end(None)
        return all(manager.lookup(key(number), context) is base.LookupResult.HIT for number in range(8))

    wait_until(is_found)
    spec_of_load = manager.prepare_load(keys(*range(8)), context)
    assert type(spec_of_load) is CPULoadStoreSpec
    for rank, view in enumerate(views):
        for number, chunk in enumerate(spec_of_load.chunk_ids):
            assert (view[chunk] == number + 100 * rank).all()
    manager.complete_load(set(keys(*range(8))), context)
    manager.on_request_finished(context)
    assert manager.config_info() == [dict(zip(spec.config_info_keys({}), (8, 16 * 4096), strict=True))]
    del view, views
    for region in regions:
        region.cleanup()


def test_engine_worker_load_filter_keeps_a_request_from_the_tiers(spec: Any) -> None:
    manager = spec.get_manager()
    for first in (0, 8):
        context = base.ReqContext(f"store-{first}")
        manager.on_new_request(context)
        output = manager.prepare_store(keys(*range(first, first + 8)), context)
        manager.complete_store(set(output.keys_to_store), context)

        def is_idle() -> bool:
            manager.on_schedule_end(None)
            return not manager.has_pending_work()

        wait_until(is_idle)
    host_only = base.TierFilter((base.TierMatcher(base.Medium.CPU),))
    context = base.ReqContext("host only", load_tier_filter=host_only)
    manager.on_new_request(context)
    assert manager.lookup(key(0), context) is base.LookupResult.MISS
    assert manager.lookup(key(8), context) is base.LookupResult.HIT
    context = base.ReqContext("any")
    manager.on_new_request(context)
    assert manager.lookup(key(0), context) is not base.LookupResult.MISS
