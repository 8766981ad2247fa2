"""Weights that change in a running engine: every token is that of an engine with the same weights and no cache."""

import os
import shutil
import signal

import pytest
from engine_process import running, scale
from engine_tiering import tier_config
from waiting import kill_and_wait

from kvcache.exporters.status import ask, default_folder, name_next_version
from kvcache.node.protocol import node_folder

pytestmark = pytest.mark.slow
OURS = {"cpu_bytes_to_use": 64 << 20}


@pytest.fixture(scope="module")
def prompts(tokens):
    """Two prompts of 20 blocks and a token."""
    return [tokens(9000 + number, 641) for number in range(2)]


@pytest.fixture(scope="module")
def right(boot, models, prompts):
    """The answers of the checkpoint's weights and of the new ones, by an engine that keeps nothing."""
    with boot(models["llama"], None, enable_prefix_caching=False) as engine:
        before = engine.answers(prompts)
        engine.llm.apply_model(scale)
        after = engine.answers(prompts)
    assert all(one != other for one, other in zip(before, after, strict=True))
    return before, after


def entry(kind, tmp_path, valkey_url):
    if kind == "valkey":
        return {"type": "valkey", "url": valkey_url}
    return {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "32MiB"}


@pytest.mark.parametrize("version", [None, "step-1"])
@pytest.mark.parametrize("kind", ["disk", "valkey"])
def test_next_start_takes_named_blocks_only(boot, models, prompts, right, tmp_path, sockets, valkey_url, kind, version):
    before, after = right
    config = {**OURS, "tiers": [entry(kind, tmp_path, valkey_url)], "exporters": ["status"]}
    with boot(models["llama"], config) as engine:
        assert engine.ask_each(prompts) == (before, [0, 0])
        engine.drop_device_cache()
        assert engine.ask_each(prompts) == (before, [640, 640])
        engine.llm.apply_model(scale)
        if version is not None:
            assert name_next_version(version) != []
        engine.drop_device_cache(host_too=True)
        assert engine.ask_each(prompts) == (after, [0, 0])
        engine.drop_device_cache()
        assert engine.ask_each(prompts) == (after, [640, 640])
    with boot(models["llama"], config) as engine:
        # The store still has the blocks of the checkpoint; the directory of one engine does not.
        assert engine.ask_each(prompts) == (before, [640 * (kind == "valkey")] * 2)
    with boot(models["llama"], {**config, "weights_version": "step-1"}) as engine:
        engine.llm.apply_model(scale)
        # The start in between has emptied the directory.
        assert engine.ask_each(prompts) == (after, [640 * (kind == "valkey" and version is not None)] * 2)
    with boot(models["llama"], {**config, "weights_version": "step-1"}) as engine:
        engine.llm.apply_model(scale)
        assert engine.ask_each(prompts) == (after, [640, 640])


@pytest.mark.parametrize("forgets", [False, True])
def test_engines_own_tier_forgets_on_request(boot, models, prompts, right, tmp_path, forgets):
    """vLLM leaves its tiers as they are; then a restart finds blocks of the checkpoint, and none of the new weights."""
    before, after = right
    tier = tier_config("disk", path=str(tmp_path / "kv"), capacity="32MiB", forget_on_reset=forgets)
    config = {**OURS, "spec_module_path": "cpu_worker_specs", "spec_name": "TieringOnCPU", "secondary_tiers": [tier]}
    with boot(models["llama"], config) as engine:
        assert engine.ask_each(prompts) == (before, [0, 0])
        engine.drop_device_cache(host_too=True)
        assert engine.ask_each(prompts) == (before, [0 if forgets else 640] * 2)
        if not forgets:
            return
        engine.llm.apply_model(scale)
        engine.drop_device_cache(host_too=True)
        assert engine.ask_each(prompts) == (after, [0, 0])
    with boot(models["llama"], config) as engine:
        assert engine.ask_each(prompts) == (before, [0, 0])


@pytest.fixture
def pool_name(tmp_path):
    name = f"test-{tmp_path.name[-20:]}-{os.getpid()}"
    yield name
    shutil.rmtree(node_folder(name))


def test_engines_of_node_keep_their_weights(models, prompts, right, pool_name, sockets):
    before, after = right
    config = {**OURS, "node_pool": pool_name, "exporters": ["status"]}
    with running(models["llama"], config) as first, running(models["llama"], config) as second:
        assert first.call("ask", prompts[:1]) == (before[:1], [0])
        assert second.call("ask", prompts[:1]) == (before[:1], [640])
        first.call("scale")
        first.call("drop_device_cache", True)
        assert first.call("ask", prompts[:1]) == (after[:1], [0])
        # Not updated yet, it loads the blocks of its weights, and stores others.
        second.call("drop_device_cache")
        assert second.call("ask", prompts) == (before, [640, 0])
        assert first.call("ask", prompts[1:]) == (after[1:], [0])
        first.call("drop_device_cache")
        assert first.call("ask", prompts) == (after, [640, 640])
        second.call("scale")
        for engine in (first, second):
            ask(default_folder() / f"status-{engine.pid}.sock", "next_version", version="step-1")
            engine.call("drop_device_cache", True)
        assert first.call("ask", prompts) == (after, [0, 0])
        assert second.call("ask", prompts) == (after, [640, 640])
        kill_and_wait(first.call("owner_figures")["pid"], signal.SIGTERM)
