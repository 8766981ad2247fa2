"""Real engines with a tier below host memory: evicted blocks come back with equal tokens, also in the next engine."""

import shutil

import pytest
from engine_options import BLOCK_BYTES
from engine_tiering import tier_config
from local_stores import FaultyS3
from safetensors.torch import load_file, save_file
from stores import MooncakeStore, set_credentials
from waiting import wait_until

pytestmark = pytest.mark.slow
# Host memory for 40 of the prompts' 140 blocks.
HOST = {"cpu_bytes_to_use": 40 * BLOCK_BYTES}
OURS = {**HOST, "cache_policy": "lru", "lookup_deadline_s": 60}
VLLMS = {**HOST, "spec_module_path": "cpu_worker_specs"}
# By door, the configuration of an engine with a tier.
DOORS = {
    "our manager": lambda tier: {**OURS, "tiers": [tier]},
    "vLLM's region": lambda tier: {
        **OURS, **VLLMS, "spec_name": "KVCacheOnCPU", "data_plane": "vllm", "tiers": [tier]
    },
    "vLLM's manager": lambda tier: {
        **VLLMS, "spec_name": "TieringOnCPU", "secondary_tiers": [tier_config(tier.pop("type"), **tier)]
    },
}  # fmt: skip


@pytest.fixture
def disk(tmp_path):
    return {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "64MiB", "deadline_s": 60}


@pytest.fixture
def valkey(valkey_url):
    return {"type": "valkey", "url": valkey_url, "deadline_s": 60, "timeout_s": 60}


@pytest.fixture
def mooncake(tmp_path):
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    store = MooncakeStore(tmp_path)
    try:
        store.start_node("256MB")
        store.wait_for_memory()
        yield {"type": "mooncake", "master": store.master, "deadline_s": 60, "timeout_s": 60}
    finally:
        store.close()


@pytest.fixture
def s3(monkeypatch):
    pytest.importorskip("obstore")
    set_credentials(monkeypatch)
    server = FaultyS3(share=0.0)
    # These prompts are computed sooner than they are loaded.
    yield {"type": "s3", **server.place, "deadline_s": 60, "timeout_s": 60, "arbiter": False}
    server.close()


def tier_stats(engine):
    """Return the counters of the engine's tier once they have reached its metrics, with a step, once a second."""
    tiers = getattr(engine.manager, "secondary_tiers", None)
    stats = tiers[0]._controller.stats() if tiers else engine.manager._tiered.tier_stats()[0]

    def are_sent():
        engine.generate([[1, 2, 3]])
        return all(
            engine.metric(f"vllm:kvcache_tier_{name}_blocks") == getattr(stats, f"{name}_blocks")
            for name in ("written", "promoted")
        )

    wait_until(are_sent)
    assert (stats.dropped_blocks, stats.failed_jobs, engine.metric("vllm:kvcache_tier_unavailable")) == (0, 0, 0)
    return stats


@pytest.mark.parametrize(
    ("door", "kind"),
    [
        *[(door, "disk") for door in DOORS],
        ("our manager", "valkey"),
        ("our manager", "mooncake"),
        ("our manager", "s3"),
        ("vLLM's manager", "valkey"),
    ],
)
def test_engine_tier_serves_next_engine(boot, models, crowd, expected, tmp_path, door, kind, request):
    config = DOORS[door](request.getfixturevalue(kind))
    if door == "our manager":
        # Not in shared memory, where others' pools come and go.
        pools = tmp_path / "pools"
        pools.mkdir()
        config["pool_folder"] = str(pools)
    # vLLM's manager promotes fewer blocks if some are still in host memory.
    promoted = range(1, 141) if door == "vLLM's manager" else [140]
    with boot(models["llama"], config) as engine:
        assert engine.ask_each(crowd) == (expected(crowd), [0] * 7)
        engine.drop_device_cache()
        assert engine.ask_each(crowd) == (expected(crowd), [640] * 7)
        stats = tier_stats(engine)
        assert stats.written_blocks == 140
        assert stats.promoted_blocks in promoted
        # All at once: if loads fill host memory, blocks are computed again, and no request waits forever.
        engine.drop_device_cache()
        assert engine.answers(crowd) == expected(crowd)
    assert list(tmp_path.glob("pools/kvcache-*/*")) == []

    with boot(models["llama"], config) as engine:
        assert engine.ask_each(crowd) == (expected(crowd), [640] * 7)
        stats = tier_stats(engine)
        assert (stats.written_blocks, stats.tier.stored_blocks) == (0, 0)
        assert stats.promoted_blocks in promoted
        if (door, kind) == ("our manager", "disk"):
            assert (engine.stats.num_blocks, engine.stats.stored_blocks, stats.tier.num_held) == (40, 0, 140)
            assert (engine.stats.num_pending, engine.stats.failed_blocks) == (0, 0)
            engine.drop_device_cache(host_too=True)
            assert engine.ask_each(crowd[:1]) == (expected(crowd[:1]), [0])


def test_bucket_serves_equal_engines_only(boot, models, crowd, tmp_path, s3):
    tier = {**s3, "salt": "one tenant"}
    other_weights = tmp_path / "model"
    shutil.copytree(models["llama"], other_weights)
    weights = load_file(other_weights / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"] *= 2
    save_file(weights, other_weights / "model.safetensors", metadata={"format": "pt"})
    hits = []
    for model, changes in (
        (models["llama"], {}), (models["llama"], {}), (models["llama"], {"salt": "another"}), (other_weights, {}),
    ):  # fmt: skip
        with boot(model, {**OURS, "tiers": [tier | changes]}) as engine:
            hits.append(engine.ask_each(crowd[:2])[1])
            if len(hits) == 2:
                # After a reset without a version its weights have no name.
                engine.drop_device_cache(host_too=True)
                hits.append(engine.ask_each(crowd[:2])[1])
            tier_stats(engine)
    assert hits == [[0] * 2, [640] * 2, [0] * 2, [0] * 2, [0] * 2]


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_restart_with_changed_model_is_refused(boot, models, crowd, disk):
    config = {**OURS, "tiers": [disk]}
    with boot(models["llama"], config) as engine:
        engine.ask_each(crowd[:2])
    changed = boot(models["llama"], config, hf_overrides={"rope_parameters": ROPE})
    with pytest.raises(ValueError, match=r"fingerprint.*config"), changed as engine:
        pytest.fail(f"served with {engine.manager._tiered.tier_stats()[0].tier.num_held} blocks of another model")
