"""A disk tier below the engine's host blocks: evicted blocks are loaded from disk, also after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_options import BLOCK_BYTES
from safetensors.torch import load_file, save_file


def extra_config(folder: Path, capacity: Any = "64MiB") -> dict[str, Any]:
    """Host memory for 40 blocks, of which the seven prompts of the crowd have 140."""
    tier = {"type": "disk", "path": str(folder), "capacity": capacity}
    return {"cpu_bytes_to_use": 40 * BLOCK_BYTES, "cache_policy": "lru", "tiers": [tier]}


def test_blocks_come_back_from_disk_and_after_a_restart(
    boot: Any, models: Any, crowd: Any, expected: Any, tmp_path: Path
) -> None:
    # Not in shared memory, where others' pools come and go.
    pools = tmp_path / "pools"
    pools.mkdir()
    config = extra_config(tmp_path / "kv") | {"pool_folder": str(pools)}
    with boot(models["llama"], config) as engine:
        assert engine.ask_each(crowd) == (expected(crowd), [0] * 7)
        assert engine.manager._tiered.tier_stats()[0].tier.num_held == 140
        assert engine.stats.num_blocks == 40
        engine.drop_device_cache()
        assert engine.ask_each(crowd) == (expected(crowd), [640] * 7)
        (stats,) = engine.manager._tiered.tier_stats()
        assert (stats.promoted_blocks, stats.dropped_blocks, stats.failed_jobs) == (140, 0, 0)
        assert engine.stats.loaded_blocks == 140
        assert engine.metric("vllm:kvcache_tier_promoted_blocks") == 140
        # All at once: if loads fill host memory, blocks are computed again, and no request waits forever.
        engine.drop_device_cache()
        assert engine.answers(crowd) == expected(crowd)
        assert engine.metric("vllm:kvcache_tier_unavailable") == 0
        assert engine.metric("vllm:kvcache_tier_held_blocks") == 140
        stats = engine.stats
        assert (stats.num_pending, stats.failed_blocks) == (0, 0)
    assert list(pools.glob("kvcache-*/*")) == []

    with boot(models["llama"], config) as engine:
        assert engine.manager._tiered.tier_stats()[0].tier.num_held == 140
        assert engine.ask_each(crowd) == (expected(crowd), [640] * 7)
        (stats,) = engine.manager._tiered.tier_stats()
        assert (stats.promoted_blocks, engine.stats.stored_blocks) == (140, 0)
        engine.drop_device_cache(host_too=True)
        assert engine.ask_each(crowd[:1]) == (expected(crowd[:1]), [0])


LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("change", "named"), [({"hf_overrides": {"rope_parameters": LLAMA_3_ROPE}}, "config"), ("weights", "weights")]
)
def test_directory_restart_with_changed_model_is_refused(
    boot: Any, models: Any, crowd: Any, tmp_path: Path, change: Any, named: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["llama"], folder)
    config = extra_config(tmp_path / "kv")
    with boot(folder, config) as engine:
        answers = engine.ask_each(crowd)
    with boot(folder, config) as engine:
        assert engine.ask_each(crowd) == (answers[0], [640] * 7)
    options = {} if change == "weights" else change
    if change == "weights":
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.self_attn.k_proj.weight"] *= 2
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"fingerprint.*{named}"), boot(folder, config, **options) as engine:
        pytest.fail(f"served with {engine.manager._tiered.tier_stats()[0].tier.num_held} blocks of another model")


def test_capacity_below_one_block_is_refused_at_start(boot: Any, models: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity"), boot(models["llama"], extra_config(tmp_path / "kv", 4096)):
        pass
