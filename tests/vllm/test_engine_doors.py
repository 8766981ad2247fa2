"""Real engines with our tier below vLLM's manager, and with our manager over vLLM's region: equal tokens, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_options import BLOCK_BYTES
from engine_tiering import tier_config, wait_until

# Host memory for 40 of the prompts' 140 blocks.
COMMON = {"cpu_bytes_to_use": 40 * BLOCK_BYTES, "spec_module_path": "cpu_worker_specs"}


def blocks_moved(engine: Any, name: str) -> float:
    """Return a counter of the tier. It reaches the engine's metrics with a step, once a second."""

    def is_counted() -> bool:
        engine.generate([[1, 2, 3]])
        return engine.metric(f"vllm:kvcache_tier_{name}_blocks") > 0

    wait_until(is_counted)
    return float(engine.metric(f"vllm:kvcache_tier_{name}_blocks"))


def check_restart(boot: Any, model: Path, crowd: Any, expected: Any, config: dict[str, Any]) -> None:
    with boot(model, config) as engine:
        assert engine.ask_each(crowd) == (expected(crowd), [0] * 7)
        engine.drop_device_cache()
        assert engine.ask_each(crowd) == (expected(crowd), [640] * 7)
        assert blocks_moved(engine, "written") <= 140
    with boot(model, config) as engine:
        assert engine.ask_each(crowd) == (expected(crowd), [640] * 7)
        assert blocks_moved(engine, "promoted") <= 140


@pytest.mark.slow
def test_engine_tier_below_vllms_manager_serves_over_a_restart(
    boot: Any, models: Any, crowd: Any, expected: Any, tmp_path: Path
) -> None:
    tier = tier_config("disk", path=str(tmp_path / "kv"), capacity="64MiB", deadline_s=60)
    config = {**COMMON, "spec_name": "TieringOnCPU", "secondary_tiers": [tier]}
    check_restart(boot, models["llama"], crowd, expected, config)


@pytest.mark.slow
def test_engine_our_manager_over_vllms_region_serves_over_a_restart(
    boot: Any, models: Any, crowd: Any, expected: Any, tmp_path: Path
) -> None:
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "64MiB", "deadline_s": 60}
    options = {"data_plane": "vllm", "cache_policy": "lru", "lookup_deadline_s": 60, "tiers": [tier]}
    check_restart(boot, models["llama"], crowd, expected, {**COMMON, "spec_name": "KVCacheOnCPU", **options})


@pytest.mark.slow
def test_engine_two_engines_share_a_store_below_vllms_manager(
    boot: Any, models: Any, crowd: Any, expected: Any, valkey_url: str
) -> None:
    tier = tier_config("valkey", url=valkey_url, deadline_s=60)
    config = {**COMMON, "spec_name": "TieringOnCPU", "secondary_tiers": [tier]}
    for cached in (0, 640):
        with boot(models["llama"], config) as engine:
            assert engine.ask_each(crowd) == (expected(crowd), [cached] * 7)
