"""The engine core, and two tensor-parallel workers, in processes of their own: what crosses between them pickles."""

import multiprocessing

import pytest
from engine_options import BLOCK_BYTES


def two_rounds(boot, model, batches, extra_config):
    """Serve the batches twice; return tokens and cached tokens of each round, and the engine's metrics."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    rounds = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with boot(model, extra_config, tensor_parallel_size=2) as engine:
            children = [child.name for child in multiprocessing.active_children()]
            assert any(name.startswith("EngineCore") for name in children), children
            for _ in range(2):
                outputs = [output for batch in batches for output in engine.generate(batch)]
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
                rounds.append((tokens, [output.num_cached_tokens for output in outputs]))
                engine.drop_device_cache()
            metrics = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    return rounds, metrics


def test_blocks_of_ranks_return_from_disk(boot, models, crowd, expected, tmp_path):
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
        rounds, metrics = two_rounds(boot, models["llama"], batches, extra_config)
        assert rounds == [(expected(crowd), cached), (expected(crowd), [640] * 7)]
        # Each rank holds its part of the heads, so its share of the memory holds as many blocks as one rank's whole.
        assert metrics["vllm:kvcache_capacity_blocks"] == 40
        assert metrics["vllm:kvcache_tier_held_blocks"] == 140
        assert metrics["vllm:kvcache_tier_unavailable"] == 0
    assert list(pools.glob("kvcache-*/*")) == []
