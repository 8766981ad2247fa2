"""What `kvcache check` says inside a container: rights, read-only roots, small claims, and several engines."""

import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from kvcache.cli import findings as findings_module
from kvcache.cli.findings import check_config, check_file
from kvcache.tiers.base.tier import host_rows
from kvcache.tiers.disk import directory as directory_module

VLLM = {
    "spec_name": "KVCacheOffloadingSpec",
    "spec_module_path": "kvcache.integrations.vllm",
    "cpu_bytes_to_use": "4MiB",
}
needs_mounts = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting needs root")


def disk(path, **options):
    pytest.importorskip("xxhash")
    return {"type": "disk", "path": str(path), "capacity": "4MiB", **options}


def errors_of(*entries, **options):
    given = {"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": list(entries), **options}
    return [finding.text for finding in check_config(given) if finding.level != "ok"]


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
    from kvcache.tiers.disk.tier import DiskOptions, DiskTier

    DiskTier(DiskOptions(path=tmp_path / "kv", capacity=4 << 20), host_rows(4, 4096)).shutdown()
    monkeypatch.setattr(directory_module.os, "access", lambda path, mode: not str(path).endswith("records"))
    assert f"{tmp_path / 'kv' / 'records'} cannot be written by user {os.geteuid()}" in errors_of(disk(tmp_path / "kv"))


@pytest.mark.parametrize("by_file", [True, False])
def test_engines_of_one_file_need_directories(tmp_path, by_file):
    path = tmp_path / "kv"
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

    def errors(tier_path, num_engines):
        options = {**VLLM, "tiers": [disk(tier_path)]}
        engine = {"data_parallel_size": num_engines} if by_file else {}
        document = {**engine, "kv_transfer_config": {**config, "kv_connector_extra_config": options}}
        (tmp_path / "c.json").write_text(json.dumps(document))
        findings = check_file(tmp_path / "c.json", 0, 1, None, None if by_file else num_engines)
        return [finding.text for finding in findings if finding.level == "error"]

    assert errors(path, 1) == []
    assert errors(path, 3) == [
        f"3 tiers have the path {path}; a directory belongs to one tier: {{dp_rank}} names the engine"
    ]
    assert errors(f"{path}-{{dp_rank}}", 3) == []


def test_engines_need_memory_and_disk_together(monkeypatch, tmp_path):
    monkeypatch.setattr(findings_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=11 << 20, free=10 << 20))
    given = {**VLLM, "tiers": [disk(f"{tmp_path}/{{dp_rank}}", capacity="8MiB")]}

    def texts(num_engines):
        findings = check_config(given, is_vllm=True, num_engines=num_engines)
        return [finding.text for finding in findings if finding.level == "error"]

    assert texts(1) == []
    memory, together = texts(3)
    assert memory.startswith("12 MiB are needed below /dev/shm, 10 MiB are free: the volume has 11 MiB in all")
    assert together == (
        f"{tmp_path}/0 and {tmp_path}/1 and {tmp_path}/2 are on one file system: 24 MiB are needed, 10 MiB are free"
    )


def test_full_disk_of_whole_tier_passes(monkeypatch, tmp_path):
    from kvcache.tiers.disk.tier import DiskOptions, DiskTier

    DiskTier(DiskOptions(path=tmp_path / "kv", capacity=4 << 20), host_rows(4, 4096)).shutdown()
    monkeypatch.setattr(findings_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=80 << 20, free=0))
    shared = {"num_cpu_blocks": 8, "tiers": [disk(tmp_path / "kv")], "spec_name": "tiering"}
    findings = [finding for finding in check_config(shared) if "tiers[0]" in finding.subject]
    assert [finding.level for finding in findings] == ["ok"] * 3
    larger = {**shared, "tiers": [disk(tmp_path / "kv", capacity="8MiB")]}
    assert "error" in [finding.level for finding in check_config(larger) if "tiers[0]" in finding.subject]


def test_recording_that_exists_needs_no_room(monkeypatch, tmp_path):
    for name in ("log", "log.1"):
        (tmp_path / name).write_bytes(b"KVCLOG\r\n" + bytes((1 << 20) - 8))
    monkeypatch.setattr(findings_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=80 << 20, free=0))
    given = {"num_cpu_blocks": 8, "record": str(tmp_path / "log"), "record_max_bytes": "2MiB"}
    assert [finding.text for finding in check_config(given) if finding.level == "error"] == []


@pytest.mark.parametrize("names", [[".snapshot"], ["quota.user", "quota.group"], [".Trash-0", "lost+found"]])
def test_foreign_files_are_named(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    foreign = ", ".join(sorted(set(names) - {"lost+found"}))
    text = f"directory {tmp_path} is no disk tier: it has no kvcache.json, but {foreign}: choose a folder below it"
    assert text in errors_of(disk(tmp_path))
    from kvcache.tiers.disk.tier import DiskOptions, DiskTier

    with pytest.raises(ValueError, match=r"but .*: choose a folder below it"):
        DiskTier(DiskOptions(path=tmp_path, capacity=4 << 20), host_rows(4, 4096))
    DiskTier(DiskOptions(path=tmp_path / "below", capacity=4 << 20), host_rows(4, 4096)).shutdown()
