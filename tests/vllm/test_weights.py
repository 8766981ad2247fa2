"""Weights that change in a running engine: every token is that of an engine with the same weights and no cache."""

import json
import os
import re
import shutil
import signal
from contextlib import nullcontext

import pytest
import torch
from engine_process import running, scale
from engine_tiering import settle, tier_config
from safetensors.torch import load_file, save_file
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM
from waiting import kill_and_wait, wait_until

from kvcache.cli.findings import check_file
from kvcache.exporters.status import ask, default_folder, name_next_version
from kvcache.node.protocol import node_folder
from kvcache.tiers.base.lifecycle import State

pytestmark = pytest.mark.slow
SPEC = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": "kvcache.integrations.vllm"}
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


def store_options(kind, tmp_path, request):
    """Return the connector's options for a store that outlives an engine."""
    if kind == "node":
        return {"node_pool": request.getfixturevalue("pool_name")}
    return {"tiers": [entry(kind, tmp_path, request.getfixturevalue("valkey_url") if kind == "valkey" else None)]}


def update_under(engine, prompt, num_tokens, version, **reset):
    """Update the weights under a request that has computed `num_tokens`; return whether vLLM emptied its device.

    0 tokens: the request's blocks are being loaded. If vLLM refuses the reset then, it is repeated after the request.
    """
    from vllm import SamplingParams
    from vllm.v1.request import RequestStatus

    core, llm = engine.llm.llm_engine.engine_core.engine_core, engine.llm.llm_engine
    if not num_tokens:
        engine.ask_each([prompt])
        engine.drop_device_cache()
    sampling = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True)
    llm.add_request("over the update", {"prompt_token_ids": prompt}, sampling)
    (running,) = engine.scheduler.requests.values()
    while (
        running.num_computed_tokens < num_tokens
        if num_tokens
        else running.status != RequestStatus.WAITING_FOR_REMOTE_KVS
    ):
        llm.step()
    core.pause_scheduler("keep", clear_cache=False)
    engine.llm.apply_model(scale)
    engine.manager._manager.name_next_version(version)
    with pytest.raises(RuntimeError, match="KV transfer") if reset and not num_tokens else nullcontext():
        is_empty = engine.llm.reset_prefix_cache(reset_connector=True, **reset)
    core.resume_scheduler()
    while llm.has_unfinished_requests():
        llm.step()
    if reset and not num_tokens:
        is_empty = engine.llm.reset_prefix_cache(reset_connector=True, **reset)
    # Until its reset is durable, a tier stores nothing. A node's engine has no tier.
    tiers = [controller.tier for controller in getattr(engine.manager._manager, "controllers", ())]
    wait_until(lambda: settle(engine.manager) or all(tier._life.state is State.OPEN for tier in tiers))
    return is_empty


@pytest.mark.parametrize(
    ("kind", "version", "num_tokens", "reset"),
    [
        ("disk", None, 642, {}),
        ("disk", "v1", 256, {}),
        ("disk", "v1", 642, {"reset_running_requests": True}),
        ("valkey", "v1", 642, {}),
        ("node", None, 256, {}),
        ("node", "v1", 642, {}),
        ("disk", "v1", 0, {}),
        ("disk", "v1", 0, {"reset_running_requests": True}),
        ("valkey", "v1", 0, {"reset_running_requests": True}),
        ("node", "v1", 0, {"reset_running_requests": True}),
    ],
)
def test_request_over_update_stores_nothing(
    boot, models, prompts, right, tmp_path, request, kind, version, num_tokens, reset
):
    """One that begins later and finds the old blocks on the device stores nothing of them either."""
    config = {**OURS, **store_options(kind, tmp_path, request)}
    options = {"max_num_batched_tokens": 256}
    with boot(models["llama"], config, **options) as engine:
        assert update_under(engine, prompts[0], num_tokens, version, **reset) is bool(reset)
        engine.ask(prompts[:1])
        engine.drop_device_cache()
        # The later request is a hit if it computed its blocks itself.
        assert engine.ask_each(prompts) == (right[1], [640 if reset else 0, 0])
        engine.drop_device_cache()
        assert engine.ask_each(prompts) == (right[1], [640, 640])
    if version is not None and kind != "node":
        with boot(models["llama"], {**config, "weights_version": version}) as engine:
            engine.llm.apply_model(scale)
            assert engine.ask_each(prompts) == (right[1], [640, 640])


@pytest.mark.parametrize("kind", ["llama", "hybrid", "engine's tier"])
def test_check_compares_folder_with_directory(boot, models, tokens, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = shutil.copytree(models["hybrid" if kind == "hybrid" else "llama"], tmp_path / "model")
    config = checked = {**SPEC, **OURS, "tiers": [entry("disk", tmp_path, None)]}
    if kind == "engine's tier":
        tier = tier_config("disk", path=str(tmp_path / "kv"), capacity="32MiB")
        checked = {**OURS, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        config = checked | {"spec_module_path": "cpu_worker_specs", "spec_name": "TieringOnCPU"}
    with boot(model, config, num_gpu_blocks_override=256) as engine:
        engine.ask_each([tokens(1, 100)])

    def check(**options):
        (tmp_path / "c.json").write_text(json.dumps({"kv_connector_extra_config": checked | options}))
        findings = check_file(tmp_path / "c.json", 0, 1, None, model=model)
        texts = [(each.level, each.text.removeprefix(f"{tmp_path / 'kv'} ")) for each in findings]
        return [(level, text) for level, text in texts if text.startswith(("has ", "was written "))]

    [(level, text)] = check()
    assert level == "ok"
    # The engine's class of configurations has rewritten nothing that it compares.
    assert not {"weights", "processor"} & set(re.split(r"[, ]+", text))
    assert "config." not in text.partition(";")[2]
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 0.5}))
    assert [level for level, _ in check()] == ["warning", "ok"]
    assert check()[0][1].endswith("may undo: rms_norm_eps 1e-06 is not 0.5")
    shutil.copy(models["tall"] / "model.safetensors", model)
    assert check()[0][1].startswith("was written by other weights: 'sha256:")
    if kind == "llama":
        assert check(weights_version="7")[0][1].startswith("has blocks of the weights 'sha256:")


class OtherLlama(LlamaForCausalLM):
    def load_weights(self, weights):
        return super().load_weights(scaled(weights))


def scaled(weights):
    return ((name, weight * 1.3 if "k_proj" in name else weight) for name, weight in weights)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"load_format": "npcache"}),
        ({"load_format": "hf"}, {"load_format": "mistral"}),
        ({}, {"hf_overrides": {"architectures": ["OtherLlama"]}}),
    ],
)
def test_other_weights_of_folder_are_refused(boot, models, prompts, right, tmp_path, first, second):
    """One folder has other weights in other formats, and other classes compute other bytes with the same weights."""
    ModelRegistry.register_model("OtherLlama", OtherLlama)
    model = shutil.copytree(models["llama"], tmp_path / "model")
    others = dict(scaled(load_file(model / "model.safetensors").items()))
    torch.save(others, model / "pytorch_model.bin")
    if second.get("load_format") == "mistral":
        save_file(others, model / "consolidated.safetensors")
    config = {**OURS, "tiers": [entry("disk", tmp_path, None)]}
    with boot(model, config, **first) as engine:
        assert engine.ask_each(prompts[:1]) == (right[0][:1], [0])
    with pytest.raises(ValueError, match="another fingerprint"), boot(model, config, **second):
        pass
