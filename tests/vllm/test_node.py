"""Engines of one machine over one pool: the next engine loads the first one's blocks, with equal tokens."""

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_options import BLOCK_BYTES
from engine_tiering import engine_spec_config
from test_processes import two_rounds
from waiting import kill_and_wait, wait_until

from kvcache.integrations.vllm import KVCacheOffloadingSpec, node
from kvcache.integrations.vllm.node import joined_region
from kvcache.node.protocol import node_folder


@pytest.fixture
def pool(tmp_path):
    name = f"test-{tmp_path.name}-{os.getpid()}"
    patient = {"spec_module_path": "cpu_worker_specs", "spec_name": "KVCacheOffloadingSpec"}
    yield {**patient, "cpu_bytes_to_use": 100 * BLOCK_BYTES, "cache_policy": "lru", "node_pool": name}
    shutil.rmtree(node_folder(name))


def end_owner(engine):
    kill_and_wait(engine.manager._manager.owner_figures()["pid"], signal.SIGTERM)


def finish_stores(engine):
    """Step until no copy to the pool is under way: the blocks of copies that end after the engine are lost."""
    wait_until(lambda: engine.generate([[1, 2, 3]]) and not engine.manager._manager._prompts)


def test_random_hash_seed_is_refused(monkeypatch):
    from kvcache.integrations.vllm.node import _seed

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="xxhash"))
    with pytest.raises(ValueError, match="xxhash has a random seed: set PYTHONHASHSEED=0"):
        _seed(config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = _seed(config)
    monkeypatch.delenv("PYTHONHASHSEED")
    config.cache_config.prefix_caching_hash_algo = "sha256"
    assert seeded != _seed(config) == _seed(config)


@pytest.mark.parametrize(("name", "num_pools"), [("shared", 1), (True, 3), ("chat-{model}", 3)])
def test_pool_of_fixed_name_accepts_versions(monkeypatch, name, num_pools):
    """Its owner has one directory for all weights; a pool with the model in its name has one for each."""
    folders, paths = set(), set()
    for weights in ("sha256:files", "version:v1", "version:v2"):
        monkeypatch.setattr(node, "fingerprint", lambda *_, weights=weights: {"model": "m", "weights": weights})
        monkeypatch.setattr(node, "_seed", lambda _: ["sha256", "0"])
        monkeypatch.setattr(node, "node_folder", str)
        spec = SimpleNamespace(
            config=SimpleNamespace(
                engine_id="e",
                parallel=SimpleNamespace(data_parallel_index=0, world_size=1),
                extra_config={"tiers": [{"type": "disk", "path": "/kv/{model}", "capacity": "1GiB"}]},
            ),
            settings=SimpleNamespace(weights_version=None, cache_policy="lru", group_windows=None),
            copies=SimpleNamespace(spec_type=None),
            node_pool=name,
            num_blocks=8,
            block_bytes=64,
        )
        folder, hello = node._greeting(spec, 16, None, -1)
        folders.add(folder)
        paths.add(hello["options"]["tiers"][0]["path"])
    assert (len(folders), len(paths)) == (num_pools, num_pools)


@pytest.mark.parametrize("data_plane", ["vllm", "kvcache"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 2}, "'node_pool' does not work with a pipeline of 2 stages"),
        ({"enable_events": True}, "KV events do not work with 'node_pool'; leave out --kv-events-config"),
    ],
)
def test_what_node_pool_excludes_is_refused(options, message, data_plane):
    extra_config = {"cpu_bytes_to_use": 1 << 20, "node_pool": True, "data_plane": data_plane}
    with pytest.raises(ValueError, match=message):
        KVCacheOffloadingSpec(engine_spec_config(extra_config, **{"enable_events": False, **options})).get_manager()


@pytest.mark.slow
def test_next_engine_loads_blocks_of_first(boot, models, prompts, expected, pool):
    with boot(models["llama"], pool) as engine:
        assert engine.ask(prompts) == (expected(prompts), [0, 992, 992])
        finish_stores(engine)
    with boot(models["llama"], pool) as engine:
        assert engine.ask(prompts) == (expected(prompts), [1024] * 3)
        engine.drop_device_cache()
        assert engine.ask(prompts) == (expected(prompts), [1024] * 3)
        engine.generate([[1, 2, 3]])
        assert engine.metric("vllm:kvcache_node_shared_hit_blocks") > 30
        assert engine.metric("vllm:kvcache_node_outages") == 0
        engine.drop_device_cache(host_too=True)
        assert engine.ask(prompts) == (expected(prompts), [0, 992, 992])
        os.kill(engine.manager._manager.owner_figures()["pid"], signal.SIGKILL)
        engine.drop_device_cache()
        assert engine.answers(prompts) == expected(prompts)
        assert engine.metric("vllm:kvcache_node_outages") == 1
        wait_until(lambda: engine.generate([[1, 2, 3]]) and not engine.manager._manager.parts()[1].stats.unavailable)
        engine.drop_device_cache()
        assert engine.ask(prompts)[0] == expected(prompts)
        engine.drop_device_cache()
        assert engine.ask(prompts) == (expected(prompts), [1024] * 3)
        with pytest.raises(ValueError, match="cache_policy: the pool has 'lru', this engine 'arc'"):
            boot(models["llama"], {**pool, "cache_policy": "arc"}).__enter__()
        end_owner(engine)


@pytest.mark.slow
def test_worker_of_vllm_joins_pool(boot, models, prompts, expected, pool, monkeypatch):
    """vLLM's region is the owner's memory; only its GPU worker is replaced."""
    config = {**pool, "data_plane": "vllm", "spec_name": "NodeOnCPU"}
    for cached in ([0, 992, 992], [1024] * 3):
        with boot(models["llama"], config) as engine:
            assert engine.ask(prompts) == (expected(prompts), cached)
            engine.drop_device_cache()
            assert engine.ask(prompts) == (expected(prompts), [1024] * 3)
            finish_stores(engine)
            if cached[0]:
                with pytest.raises(ValueError, match=r"worker: the pool has \['vllm', False\], this engine None"):
                    boot(models["llama"], pool).__enter__()
                end_owner(engine)
    assert not [path for path in Path("/dev/shm").glob("vllm_offload_*") if path.is_symlink()]
    monkeypatch.setattr("kvcache.integrations.vllm.node._MADV_POPULATE_WRITE", 9999)
    with pytest.raises(ValueError, match=r"needs MADV_POPULATE_WRITE \(Linux 5.14\): .* set 'data_plane' to 'kvcache'"):
        joined_region(None, 16, None).__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_grouped_model_hits_as_in_private(boot, models, prompts, pool, policy):
    """Of two engines over one pool, the second one begins with the second round."""
    pool = {**pool, "cpu_bytes_to_use": 64 << 20, "cache_policy": policy}
    private = {name: value for name, value in pool.items() if name != "node_pool"}
    options = {"num_gpu_blocks_override": 300, "disable_hybrid_kv_cache_manager": False}
    answers = []
    for extra_config, engine_rounds in ((private, [3]), (pool, [1, 2])):
        rounds = []
        for num_rounds in engine_rounds:
            with boot(models["hybrid"], extra_config, **options) as engine:
                for _ in range(num_rounds):
                    rounds.append(engine.ask(prompts))
                    engine.drop_device_cache()
                if "node_pool" in extra_config:
                    finish_stores(engine)
                    assert (engine.manager._manager.path_group is None) == (policy == "lru")
                    if len(rounds) == 3:
                        end_owner(engine)
        answers.append(rounds)
    assert answers[0] == answers[1]
    # The last prompt token is computed again, and before it a part of a block.
    assert answers[0][2][1] == [1024] * 3


@pytest.mark.slow
def test_workers_in_processes_share_pool(boot, models, prompts, expected, pool):
    """By the name that the model gives: scheduler and workers agree on it."""
    [(first, _), second], metrics = two_rounds(boot, models["llama"], [prompts], {**pool, "node_pool": True})
    assert first == expected(prompts)
    assert second == (expected(prompts), [1024] * 3)
    assert metrics["vllm:kvcache_node_outages"] == 0
