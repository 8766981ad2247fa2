"""Checks of a configuration against this machine, also in containers: rights, read-only roots, small claims."""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from kvcache.assembly.assemble import OffloadSettings
from kvcache.cli import findings as findings_module
from kvcache.cli.findings import check_config, check_file
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.tiers.base.tier import host_rows
from kvcache.tiers.disk import directory as directory_module
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

VLLM = {
    "spec_name": "KVCacheOffloadingSpec",
    "spec_module_path": "kvcache.integrations.vllm",
    "cpu_bytes_to_use": "4MiB",
}
needs_mounts = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting needs root")


def tiered(*entries, **options):
    """Return a configuration with tiers."""
    return {"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": list(entries), **options}


def disk(path, **options):
    return {"type": "disk", "path": str(path), "capacity": "4MiB", **options}


def texts_of(findings, level="error"):
    return [finding.text for finding in findings if finding.level == level]


def errors_of(*entries, **options):
    return [finding.text for finding in check_config(tiered(*entries, **options)) if finding.level != "ok"]


def make_tier(path):
    """Leave the directory of a tier of 4 MiB."""
    DiskTier(DiskOptions(path=path, capacity=4 << 20), host_rows(4, 4096)).shutdown()


def test_check_continues_behind_odd_error(monkeypatch, tmp_path):
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
    found = "\n".join(texts_of(check_config(given)))
    assert "tier 'valkey' cannot be imported" in found
    for extra in ("valkey", "prometheus"):
        assert f"pip install 'kvcache[{extra}]', or in a checkout: pip install '.[{extra}]'" in found


def test_room_is_checked_with_tiers_only(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    given = tiered(disk(tmp_path / "tier"), num_cpu_blocks=1, pool_folder=str(tmp_path))
    for config, levels in ((given, ["error"]), ({"num_cpu_blocks": 1}, [])):
        findings = check_config(config, block_bytes=2 * free)
        assert [one.level for one in findings if one.subject == "shared memory"] == levels


def test_leftover_of_killed_engine_is_named(tmp_path, monkeypatch):
    path = tmp_path / "vllm_offload_a b.mmap"
    monkeypatch.setattr(findings_module, "leftover_files", lambda: [(path, 3 << 30)])
    config = tmp_path / "c.json"
    config.write_text('{"kv_connector_extra_config": {"cpu_bytes_to_use": "1MiB"}}')
    [text] = texts_of(check_file(config, 0, 1, None), "warning")
    assert f"{path} holds 3 GiB of a killed engine" in text
    assert f"rm '{path}'" in text


@pytest.mark.parametrize("made", [CPUOffloadingManager, "kvcache.exporters.prometheus:PrometheusExporter"])
def test_option_defaults_equal_the_constructors(made):
    if isinstance(made, str):
        module, _, name = made.partition(":")
        made = getattr(importlib.import_module(module), name)
    parameters = inspect.signature(made).parameters
    options = getattr(made, "options_type", OffloadSettings)
    declared = {name: one.default for name, one in options.declared().items() if name in parameters}
    assert len(declared) >= 2
    assert {name: parameters[name].default for name in declared} == declared


@pytest.fixture
def mount(tmp_path):
    """Return a function that mounts a tmpfs."""
    folders = []

    def mount_new(options):
        folder = tmp_path / f"mount{len(folders)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
        folders.append(folder)
        return folder

    yield mount_new
    for folder in folders:
        subprocess.run(["umount", "--lazy", folder], check=True)


@needs_mounts
@pytest.mark.slow
def test_read_only_root_needs_volume(mount):
    folder = mount("ro")
    exporter = {"type": "status", "path": str(folder / "run" / "engine.sock")}
    errors = errors_of(disk(folder / "kv" / "blocks"), record=str(folder / "log"), exporters=[exporter])
    assert f"{folder} is on a read-only file system: mount a volume at {folder / 'kv' / 'blocks'}" in errors
    assert f"{folder} is on a read-only file system: mount a volume at {folder}" in errors
    assert f"{folder} cannot be written by user 0: mount a volume at {folder / 'run'}" in errors


@needs_mounts
@pytest.mark.slow
def test_small_claim_is_named(mount):
    folder = mount("size=2m")
    assert errors_of(disk(folder / "kv")) == [
        f"4 MiB are needed below {folder / 'kv'}, 2 MiB are free: the volume has 2 MiB in all"
    ]


def test_volume_of_others_names_user(monkeypatch, tmp_path):
    monkeypatch.setattr(findings_module.os, "access", lambda *_: False)
    errors = errors_of(disk(tmp_path / "kv"))
    assert len(errors) == 1
    assert errors[0].startswith(f"{tmp_path} cannot be written by user {os.geteuid()}, groups ")
    assert errors[0].endswith(": set the volume's owner or fsGroup")


def test_files_of_others_are_named(monkeypatch, tmp_path):
    make_tier(tmp_path / "kv")
    monkeypatch.setattr(directory_module.os, "access", lambda path, mode: not str(path).endswith("records"))
    assert f"{tmp_path / 'kv' / 'records'} cannot be written by user {os.geteuid()}" in errors_of(disk(tmp_path / "kv"))


def test_engines_need_memory_and_disk_together(monkeypatch, tmp_path):
    monkeypatch.setattr(findings_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=11 << 20, free=10 << 20))
    given = {**VLLM, "tiers": [disk(f"{tmp_path}/{{dp_rank}}", capacity="8MiB")]}

    assert texts_of(check_config(given, is_vllm=True, num_engines=1)) == []
    memory, together = texts_of(check_config(given, is_vllm=True, num_engines=3))
    assert memory.startswith("12 MiB are needed below /dev/shm, 10 MiB are free: the volume has 11 MiB in all")
    assert together == (
        f"{tmp_path}/0 and {tmp_path}/1 and {tmp_path}/2 are on one file system: 24 MiB are needed, 10 MiB are free"
    )


def test_full_disk_of_whole_tier_passes(monkeypatch, tmp_path):
    make_tier(tmp_path / "kv")
    monkeypatch.setattr(findings_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=80 << 20, free=0))
    for capacity, num_errors in (("4MiB", 0), ("8MiB", 1)):
        findings = check_config(tiered(disk(tmp_path / "kv", capacity=capacity)))
        levels = [finding.level for finding in findings if "tiers[0]" in finding.subject]
        assert (len(levels), levels.count("error")) == (3, num_errors)


def test_recording_that_exists_needs_no_room(monkeypatch, tmp_path):
    for name in ("log", "log.1"):
        (tmp_path / name).write_bytes(b"KVCLOG\r\n" + bytes((1 << 20) - 8))
    monkeypatch.setattr(findings_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=80 << 20, free=0))
    given = {"num_cpu_blocks": 8, "record": str(tmp_path / "log"), "record_max_bytes": "2MiB"}
    assert texts_of(check_config(given)) == []


@pytest.mark.parametrize("names", [[".snapshot"], ["quota.user", "quota.group"], [".Trash-0", "lost+found"]])
def test_foreign_files_are_named(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    foreign = ", ".join(sorted(set(names) - {"lost+found"}))
    text = f"directory {tmp_path} is no disk tier: it has no kvcache.json, but {foreign}: choose a folder below it"
    assert text in errors_of(disk(tmp_path))
    with pytest.raises(ValueError, match=r"but .*: choose a folder below it"):
        make_tier(tmp_path)
    make_tier(tmp_path / "below")
