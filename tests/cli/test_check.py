"""`kvcache check` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kvcache.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    return int(ended.value.code or 0)


def test_settings_of_vllm_are_found_inside_its_own(tmp_path: Path, capsys):
    config = tmp_path / "engine.json"
    inner = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": "kvcache.integrations.vllm"}
    inner["cpu_bytes_to_use"] = "64MiB"
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
    inner = {"spec_module_path": "kvcache.integrations.vllm", "cpu_bytes_to_use": 1 << 20}
    given = {
        "kv_events_config": {"enable_kv_cache_events": True},
        "kv_transfer_config": {"kv_connector_extra_config": {**inner, "self_describing_kv_events": described}},
    }
    config.write_text(json.dumps(given))
    assert run(str(config), "--strict") == code
    assert ("routers ignore events without tokens" in " ".join(capsys.readouterr().out.split())) is not described


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


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"spec_name": "KVCacheOfloadingSpec"}, "must be 'KVCacheOffloadingSpec', got 'KVCacheOfloadingSpec'"),
        ({"exporters": ["kv_events"]}, "the exporter 'kv_events' does not work under vLLM"),
        ({"num_cpu_blocks": 8, "cpu_bytes_to_use": None}, "must have 'cpu_bytes_to_use'"),
        ({"eviction_policy": "arc"}, "kvcache reads 'cache_policy', not 'eviction_policy'"),
    ],
)
def test_check_vllm_fault_is_error(tmp_path: Path, capsys, extra, message):
    config = tmp_path / "c.json"
    inner = {"spec_module_path": "kvcache.integrations.vllm", "cpu_bytes_to_use": "64MiB", **extra}
    config.write_text(json.dumps({"kv_connector_extra_config": inner}))
    assert run(str(config)) == 1
    assert message in " ".join(capsys.readouterr().out.split())
