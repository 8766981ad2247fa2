"""Checks of a configuration against this machine."""

import dataclasses
import importlib
import inspect
import shutil
import socket
import sys

import pytest

from kvcache.cli import findings as findings_module
from kvcache.cli.findings import check_config, check_file

HUGE = "4096TiB"


def text_of(findings, level):
    return "\n".join(finding.text for finding in findings if finding.level == level)


def tiered(*entries, **options):
    """Return a configuration with tiers."""
    needed = {"disk": "xxhash", "mooncake": "xxhash", "valkey": "valkey"}
    for entry in entries:
        if entry["type"] in needed:
            importlib.import_module(needed[entry["type"]])
    return {"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": list(entries), **options}


def disk(path="x", **options):
    return {"type": "disk", "path": str(path), "capacity": "1MiB", **options}


@pytest.mark.parametrize("kind", ["valkey", "mooncake"])
def test_check_unreachable_store_is_error(kind):
    pytest.importorskip(kind)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        entry = {"type": kind, "url": f"valkey://{address}"} if kind == "valkey" else {"type": kind, "master": address}
        findings = check_config(tiered(entry))
    assert text_of(findings, "error").removeprefix("it cannot be used: ").startswith(address)


def test_check_continues_behind_odd_error(monkeypatch, tmp_path):
    pytest.importorskip("xxhash")
    memory = importlib.import_module("kvcache.tiers.memory").MemoryTier
    for name in ("unavailable_reason", "doubt"):
        monkeypatch.setattr(memory, name, lambda _: 1 / 0)
        findings = check_config(tiered({"type": "memory", "capacity": "1MiB"}, disk(tmp_path / "kv")))
        levels = {finding.text: finding.level for finding in findings}
        expected = "error" if name == "unavailable_reason" else "warning"
        assert levels["it cannot be checked: ZeroDivisionError: division by zero"] == expected
        assert any(text.startswith("jobs of at most") for text in levels)
        monkeypatch.undo()


def test_check_names_missing_packages_with_extra(monkeypatch):
    for module in ("valkey", "prometheus_client"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("kvcache.tiers.valkey", "kvcache.exporters.prometheus"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    given = {**tiered(exporters=["prometheus"]), "tiers": [{"type": "valkey", "url": "x"}]}
    found = text_of(check_config(given), "error")
    assert "tier 'valkey' cannot be imported" in found
    for extra in ("valkey", "prometheus"):
        assert f"pip install 'kvcache[{extra}]', or in a checkout: pip install '.[{extra}]'" in found


def test_check_continues_behind_wrong_spec_name():
    findings = check_config({"num_cpu_blocks": 8, "spec_name": "teiring", "exporters": ["status"]}, block_bytes=1)
    assert [finding.subject for finding in findings][:2] == ["options", "pool"]


def test_room_is_checked_with_tiers_only(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    given = tiered(disk(tmp_path / "tier"), num_cpu_blocks=1, pool_folder=str(tmp_path))
    for config, levels in ((given, ["error"]), ({"num_cpu_blocks": 1}, [])):
        findings = check_config(config, block_bytes=2 * free)
        assert [one.level for one in findings if one.subject == "shared memory"] == levels


@pytest.mark.parametrize(
    ("options", "constructor"),
    [
        ("kvcache.tiers.disk.tier:DiskOptions", "kvcache.tiers.disk.tier:DiskTier"),
        ("kvcache.tiers.memory:MemoryOptions", "kvcache.tiers.memory:MemoryTier"),
        ("kvcache.tiers.valkey:ValkeyOptions", "kvcache.tiers.valkey:ValkeyTier"),
        ("kvcache.tiers.mooncake:MooncakeOptions", "kvcache.tiers.mooncake:MooncakeTier"),
        ("kvcache.exporters.prometheus:PrometheusOptions", "kvcache.exporters.prometheus:PrometheusExporter"),
        ("kvcache.assembly.assemble:OffloadSettings", "kvcache.control.cpu:CPUOffloadingManager"),
    ],
)
def test_option_defaults_equal_the_constructors(options, constructor):
    table, made = (
        getattr(importlib.import_module(module), name) for module, name in (options.split(":"), constructor.split(":"))
    )
    defaults = {name: one.default for name, one in inspect.signature(made).parameters.items()}
    declared = {name: one.default for name, one in table.declared().items() if name in defaults}
    expected = {name: defaults[name] for name in declared}
    required = {name for name, default in declared.items() if default is dataclasses.MISSING}
    assert all(expected.pop(name) is inspect.Parameter.empty for name in required)
    assert {name: default for name, default in declared.items() if name not in required} == expected


def test_leftover_of_killed_engine_is_named(tmp_path, monkeypatch):
    path = tmp_path / "vllm_offload_a b.mmap"
    monkeypatch.setattr(findings_module, "leftover_files", lambda: [(path, 3 << 30)])
    config = tmp_path / "c.json"
    config.write_text('{"kv_connector_extra_config": {"cpu_bytes_to_use": "1MiB"}}')
    text = text_of(check_file(config, 0, 1, None), "warning")
    assert f"{path} holds 3 GiB of a killed engine" in text
    assert f"rm '{path}'" in text
