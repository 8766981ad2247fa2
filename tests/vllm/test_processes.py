"""The engine core, and two tensor-parallel workers, in processes of their own: what crosses between them pickles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_options import BLOCK_BYTES, OPTIONS


def two_rounds(model: Path, batches: list[list[list[int]]], extra_config: dict[str, Any], ranks: int) -> Any:
    settings = {
        "model": str(model),
        "batches": batches,
        "options": {**OPTIONS, "tensor_parallel_size": ranks},
        "extra_config": {
            "spec_name": "KVCacheOffloadingSpec",
            "spec_module_path": "kvcache.integrations.vllm",
            **extra_config,
        },
    }
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    script = Path(__file__).with_name("two_rounds.py")
    run = subprocess.run(
        [sys.executable, str(script), json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def test_tokens_are_the_same_with_multiprocessing(models: Any, prompts: Any, expected: Any) -> None:
    extra_config = {"cpu_bytes_to_use": 100 * BLOCK_BYTES, "cache_policy": "arc"}
    result = two_rounds(models["llama"], [prompts], extra_config, ranks=1)
    first, second = result["rounds"]
    assert first["tokens"] == second["tokens"] == expected(prompts)
    assert second["cached"] == [1024] * 3
    metrics = result["metrics"]
    assert metrics["vllm:kvcache_capacity_blocks"] == 100
    assert metrics["vllm:kvcache_stored_blocks"] == 34
    assert metrics["vllm:kvcache_loaded_blocks"] == 34
    assert metrics["vllm:kv_offload_store_bytes"] == metrics["vllm:kv_offload_load_bytes"] == 34 * BLOCK_BYTES


def test_blocks_of_two_ranks_come_back_from_disk_also_in_the_next_process(
    models: Any, crowd: Any, expected: Any, tmp_path: Path
) -> None:
    # A busy disk is slow, not dead: with this deadline a lost job makes the test wait and fail.
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "64MiB", "deadline_s": 60}
    extra_config = {"cpu_bytes_to_use": 40 * BLOCK_BYTES, "cache_policy": "lru"}
    extra_config |= {"tiers": [tier], "lookup_deadline_s": 60}
    # Not in shared memory, where others' pools come and go.
    pools = tmp_path / "pools"
    pools.mkdir()
    extra_config["pool_folder"] = str(pools)
    batches = [[prompt] for prompt in crowd]
    for cached in ([0] * 7, [640] * 7):
        result = two_rounds(models["llama"], batches, extra_config, 2)
        first, second = result["rounds"]
        assert first["tokens"] == second["tokens"] == expected(crowd)
        assert (first["cached"], second["cached"]) == (cached, [640] * 7)
        metrics = result["metrics"]
        # Each rank holds its part of the heads, so its share of the memory holds as many blocks as one rank's whole.
        assert metrics["vllm:kvcache_capacity_blocks"] == 40
        assert metrics["vllm:kvcache_tier_held_blocks"] == 140
        assert metrics["vllm:kvcache_tier_unavailable"] == 0
    assert list(pools.glob("kvcache-*/*")) == []
