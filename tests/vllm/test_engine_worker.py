"""Our manager over vLLM's own worker: geometry, specs and host blocks are vLLM's."""

import os
from pathlib import Path

import numpy as np
import pytest
from engine_tiering import PAGE, EngineTiering, engine_spec_config, keys
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcache.integrations.vllm import KVCacheOffloadingSpec
from kvcache.transfer.shared_file import private_folder


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
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
def test_engine_worker_geometry_is_vllms(config, with_tiers, tmp_path):
    tiers = [{"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}] if with_tiers else []
    upstream = TieringOffloadingSpec if with_tiers else CPUOffloadingSpec
    theirs = upstream(engine_spec_config({"cpu_bytes_to_use": 1 << 20}, **config))
    extra_config = {"cpu_bytes_to_use": "1MiB", "data_plane": "vllm", **({"tiers": tiers} if tiers else {})}
    ours = KVCacheOffloadingSpec(engine_spec_config(extra_config, **config))
    for name in ("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "replicated_layout"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.num_blocks == theirs.num_chunks
    assert ours.replicated_layout == config.get("replicated", False)


def test_engine_worker_memory_needs_one_block():
    with pytest.raises(ValueError, match="at least one block of 4096 bytes, got 4095"):
        KVCacheOffloadingSpec(engine_spec_config({"cpu_bytes_to_use": 4095, "data_plane": "vllm"}))
    with pytest.raises(ValueError, match=r"data_plane .* must be one of vllm, kvcache, got 'cuda'"):
        KVCacheOffloadingSpec(engine_spec_config({"cpu_bytes_to_use": 1 << 20, "data_plane": "cuda"}))


@pytest.fixture
def engine(tmp_path):
    """Our manager with a disk below eight host blocks of two ranks; a killed engine has left its region behind."""
    killed = Path(f"/dev/shm/vllm_offload_killed-{os.getpid()}.mmap")
    killed.write_bytes(bytes(PAGE))
    private_folder().joinpath(f"record-{killed.name}").touch(0o600)
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}
    made = EngineTiering([tier], num_chunks=8, policy={"cache_policy": "lru"}, is_ours=True, tp=2)
    assert not killed.exists()
    pattern = f"**/*{made.spec.config.engine_id}*"
    assert len(list(Path("/dev/shm").glob(pattern))) == 2  # the region and its record
    yield made
    made.close()
    assert not list(Path("/dev/shm").glob(pattern))


def test_blocks_of_ranks_return_from_tier(engine):
    for first in range(0, 24, 8):
        assert engine.store(keys(*range(first, first + 8))) == keys(*range(first, first + 8))
        engine.settle()
    engine.view[:] = -1
    assert engine.view.shape == (8, 2 * PAGE)
    # Their bytes are checked.
    assert engine.load(keys(*range(8))) == 8
    context = engine.request()
    spec = engine.manager.prepare_load(keys(0), context)
    assert (type(spec), spec.chunk_ids.dtype) == (CPULoadStoreSpec, np.int32)
    engine.manager.complete_load(set(keys(0)), context)
    info = dict(zip(engine.spec.config_info_keys({}), (8, 16 * PAGE), strict=True))
    assert engine.manager.config_info() == [info]


def test_load_filter_keeps_request_from_tiers(engine):
    for first in (0, 8):
        engine.store(keys(*range(first, first + 8)))
        engine.settle()
    host_only = base.TierFilter((base.TierMatcher(base.Medium.CPU),))
    assert engine.find(keys(0), engine.request(load_tier_filter=host_only)) == 0
    assert engine.find(keys(8), engine.request(load_tier_filter=host_only)) == 1
    assert engine.find(keys(0), engine.request()) == 1
