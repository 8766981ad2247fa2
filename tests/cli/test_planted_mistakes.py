"""`kvcache check` names every planted mistake, and says nothing of a correct configuration."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")

from kvcache.cli.findings import Finding, check_file
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

ADAPTER = "kvcache.integrations.vllm"
REMOVED = object()
"""Stands for a key that the edit removes."""
SIZE = "must be bytes >= 1 or a size"
COUNT = "must be a whole number >= 1"


def disk(path: str = "TMP/kv", **options: Any) -> dict[str, Any]:
    return {"type": "disk", "path": path, "capacity": "1MiB", **options}


PLAIN = {"num_cpu_blocks": 8}
TIERED = {"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": [disk()]}
OURS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "KVCacheOffloadingSpec",
        "spec_module_path": ADAPTER,
        "cpu_bytes_to_use": "4MiB",
        "tiers": [disk()],
    },
}
ENGINES = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 4 << 20,
        "secondary_tiers": [{**disk(), "type": "KVCacheTier", "module_path": ADAPTER, "kind": "disk"}],
    },
}
EXTRA = "kv_connector_extra_config"

# A base, the edit (dotted path: value), and a text that must be named.
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # What the engine refused after the check had passed it.
    (TIERED, {"tiers": [disk("TMP/a", capacity="HALF"), disk("TMP/b", capacity="HALF")]}, "are on one file system"),
    (TIERED, {"tiers": [disk(), disk()]}, "2 tiers have the path"),
    (TIERED, {"tiers": [disk(), disk("TMP/x/../kv")]}, "2 tiers have the path"),
    (TIERED, {"tiers.0.path": "TMP/foreign"}, "is no disk tier: it has no kvcache.json, but photo.jpg"),
    (TIERED, {"tiers.0.read_only": True}, "is to be read only, and holds no tier yet"),
    (TIERED, {"tiers.0.path": "TMP/long"}, "data must have"),
    (OURS, {f"{EXTRA}.block_size": 0}, f"block_size in {EXTRA} {COUNT}"),
    (OURS, {f"{EXTRA}.block_size": "16"}, f"block_size in {EXTRA} must be a whole number, as vLLM reads it, got '16'"),
    (OURS, {f"{EXTRA}.block_size": 17}, "must be a multiple of the engine's block"),
    (OURS, {f"{EXTRA}.blocks_per_chunk": -1}, f"blocks_per_chunk in {EXTRA} {COUNT}"),
    (OURS, {f"{EXTRA}.block_size": 16, f"{EXTRA}.blocks_per_chunk": 2}, "may have one of 'block_size' and"),
    (OURS, {f"{EXTRA}.offload_prompt_only": "yes"}, f"offload_prompt_only in {EXTRA} must be a bool, got 'yes'"),
    (PLAIN, {"record": "/no-such-mount/run.kvlog"}, "is its file system not mounted?"),
    (PLAIN, {"record": "TMP/file/run.kvlog"}, "cannot be recorded to: Not a directory"),
    (ENGINES, {"on_a_cpu": True}, "copies on CUDA, ROCm and XPU only"),
    (ENGINES, {"on_a_cpu": True}, "copies on CUDA, ROCm and XPU only"),
    (OURS, {"kv_role": "both"}, "kv_role must be 'kv_producer' or 'kv_consumer' or 'kv_both', got 'both'"),
    (OURS, {"kv_connector": "Offloading", "kv_role": "both"}, "kv_role must be"),
    (OURS, {EXTRA: REMOVED, "kv_role": "both"}, "kv_role must be"),
    (OURS, {f"{EXTRA}.cpu_bytes_to_use": 64}, "is 64 bytes, less than a block: a unit, as in '64GiB'?"),
    (ENGINES, {f"{EXTRA}.cpu_bytes_to_use": 64}, "cpu_bytes_to_use is 64 bytes"),
    (TIERED, {"tiers.0.advanced": {"num_threads": 8}}, "unknown options of a disk tier: advanced"),
    (TIERED, {"tiers.0.num_thread": 8}, "did you mean 'num_threads'?"),
    # The pool.
    (PLAIN, {"num_cpu_blocks": 0}, f"num_cpu_blocks in extra_config {COUNT}"),
    (PLAIN, {"num_cpu_blocks": REMOVED}, "must have one of num_cpu_blocks and cpu_bytes_to_use"),
    (PLAIN, {"cpu_bytes_to_use": "1GiB"}, "must have one of num_cpu_blocks and cpu_bytes_to_use"),
    (PLAIN, {"num_cpu_blocks": 1.5}, f"num_cpu_blocks in extra_config {COUNT}"),
    (PLAIN, {"num_cpu_blocks": REMOVED, "cpu_bytes_to_use": "4096TiB"}, "does not fit into host memory"),
    (PLAIN, {"cache_policy": "lru2"}, "unknown policy 'lru2'"),
    (PLAIN, {"cache_polcy": "arc"}, "cache_polcy (did you mean 'cache_policy'?)"),
    (PLAIN, {"store_threshold": -1}, "store_threshold in extra_config"),
    (PLAIN, {"what_if": True}, "what_if (use 'record', and `kvcache plan` on the recording)"),
    (PLAIN, {"offload_prompt_only": "no"}, "offload_prompt_only in extra_config must be a bool"),
    (PLAIN, {"spec_name": "teiring"}, "unknown spec 'teiring'"),
    (PLAIN, {"tiers": [disk()]}, "tiers need spec_name 'tiering'"),
    (PLAIN, {"lookup_deadline_s": 2}, "lookup_deadline_s in extra_config need 'tiers'"),
    (PLAIN, {"retention_share": 0.5}, "retention_share (leave it out"),
    (PLAIN, {"exporters": "status"}, "exporters in extra_config must be a list"),
    (PLAIN, {"exporters": ["grafana"]}, "unknown exporter 'grafana'"),
    (PLAIN, {"exporters": [{"type": "prometheus", "port": 70_000}]}, "must be at most 65535, got 70000"),
    (PLAIN, {"exporters": [{"type": "prometheus", "port": "BUSY"}]}, "cannot be opened: Address already in use"),
    (PLAIN, {"exporters": ["status", "status"]}, "status is configured 2 times"),
    (PLAIN, {"exporters": [{"type": "status", "path": "TMP/file"}]}, "is no socket"),
    (PLAIN, {"record": "TMP/file"}, "is no recording, and will not be written over"),
    (PLAIN, {"record": "TMP"}, "is no file, and will not be recorded to"),
    # Tiers.
    (TIERED, {"tiers": []}, "tiers in extra_config must be a list of dicts, at least one"),
    (TIERED, {"tiers": {"type": "disk"}}, "tiers in extra_config must be a list of dicts"),
    (TIERED, {"tiers.0.type": REMOVED}, "a tier needs a type"),
    (TIERED, {"tiers.0.type": "dusk"}, "unknown tier 'dusk'"),
    (TIERED, {"tiers.0.path": REMOVED}, "a disk tier needs 'path'"),
    (TIERED, {"tiers.0.capacity": "big"}, f"capacity in a disk tier {SIZE}"),
    (TIERED, {"tiers.0.capacity": "4096TiB"}, "are needed below"),
    (TIERED, {"tiers.0.capacity": 64}, "capacity 64 B is less than"),
    (TIERED, {"tiers.0.path": "/no-such-mount/kv"}, "is its file system not mounted?"),
    (TIERED, {"tiers.0.path": "TMP/file"}, "is not a directory"),
    (TIERED, {"tiers.0.path": "TMP/file/kv"}, "is not a directory"),
    (TIERED, {"tiers.0.path": "TMP/used"}, "is in use by process"),
    (TIERED, {"tiers.0.path": "TMP/open"}, "other users may read it"),
    (TIERED, {"tiers.0.path": "TMP/damaged"}, "is not a disk tier's header"),
    (TIERED, {"tiers.0.write_policy": "write_around"}, "write_policy in tier 'disk' must be one of"),
    (TIERED, {"tiers.0.deadline_s": 0}, "deadline_s in tier 'disk' must be a number of seconds > 0"),
    (TIERED, {"tiers.0.codec": {"type": "zip"}}, "unknown codec 'zip'"),
    (TIERED, {"tiers.0.write_polciy": "write_back"}, "unknown options of a disk tier: write_polciy"),
    *(
        (TIERED, {"tiers.0": {"type": "valkey", "url": url}}, "must begin with one of valkey://")
        for url in ("localhost:6379", "http://localhost:6379", "user:secret@localhost")
    ),
    (TIERED, {"tiers.0": {"type": "valkey"}}, "a valkey tier needs 'url'"),
    (TIERED, {"tiers.0": {"type": "mooncake", "master": "nowhere"}}, "must be 'host:port', got 'now"),
    (TIERED, {"tiers.0": {"type": "valkey", "url": "valkey://127.0.0.1:1"}}, "it cannot be used: 127.0.0.1:1: "),
    (TIERED, {"tiers.0": {"type": "memory"}}, "a memory tier needs 'capacity'"),
    # vLLM.
    (OURS, {f"{EXTRA}.spec_name": "KVCacheSpec"}, "must be 'KVCacheOffloadingSpec', got 'KVCacheSpec'"),
    (OURS, {f"{EXTRA}.spec_module_path": "kvcache.vllm"}, "spec_name and spec_module_path must be"),
    (OURS, {f"{EXTRA}.cpu_bytes_to_use": REMOVED}, "must have 'cpu_bytes_to_use'"),
    *(
        (OURS, {f"{EXTRA}.cpu_bytes_to_use": value}, f"cpu_bytes_to_use in {EXTRA} {SIZE}")
        for value in (0, -1, 1.5, True, "much", float("inf"), [1])
    ),
    (OURS, {f"{EXTRA}.cache_policy": "lur"}, "did you mean 'lru'"),
    (OURS, {f"{EXTRA}.num_copy_threads": -2}, f"num_copy_threads in {EXTRA} {COUNT}"),
    (OURS, {f"{EXTRA}.lookup_deadline_s": 0}, f"lookup_deadline_s in {EXTRA} must be a number of seconds > 0"),
    (OURS, {f"{EXTRA}.pool_path": "/x"}, "pool_path"),
    (OURS, {f"{EXTRA}.node_pool": "../a"}, "node_pool must be true or a name"),
    (OURS, {f"{EXTRA}.node_pool": 3}, "node_pool must be true or a name"),
    (OURS, {f"{EXTRA}.tiers": []}, f"tiers in {EXTRA} must be a list of dicts, at least one"),
    (OURS, {f"{EXTRA}.tiers": {"type": "disk"}}, f"tiers in {EXTRA} must be a list of dicts"),
    (OURS, {f"{EXTRA}.eviction_policy": "arc"}, "kvcache reads 'cache_policy', not 'eviction_policy'"),
    (OURS, {f"{EXTRA}.data_plane": "cuda"}, f"data_plane in {EXTRA} must be one of vllm, kvcache"),
    (OURS, {f"{EXTRA}.exporters": ["kv_events"]}, "it was removed: vLLM publishes events with"),
    (OURS, {f"{EXTRA}.self_describing_kv_events": "true"}, "self_describing_kv_events in"),
    (OURS, {f"{EXTRA}.data_plane": "kvcache", f"{EXTRA}.canonical_layout": True}, "not support 'canonical_layout'"),
    (OURS, {f"{EXTRA}.pool_folder": "/no-such-shm"}, "pool_folder must be a folder in shared memory"),
    (ENGINES, {f"{EXTRA}.cpu_bytes_to_use": "4MiB"}, "as vLLM reads it, got '4MiB'"),
    (ENGINES, {f"{EXTRA}.cpu_bytes_to_use": True}, "as vLLM reads it, got True"),
    (ENGINES, {f"{EXTRA}.secondary_tiers.0.kind": "disc"}, "did you mean 'disk'"),
    (ENGINES, {f"{EXTRA}.secondary_tiers.0.arbiter": True}, "omit arbiter"),
    (ENGINES, {f"{EXTRA}.secondary_tiers.0.write_policy": "write_back"}, "omit write_policy"),
    (ENGINES, {f"{EXTRA}.secondary_tiers.0.kind": REMOVED}, "a KVCacheTier needs 'kind'"),
    (ENGINES, {f"{EXTRA}.secondary_tiers.0.offload_policy": "block"}, "must be one of chunk_level, request_level, got"),
    (ENGINES, {f"{EXTRA}.secondary_tiers.0.locality": "local"}, "locality in a KVCacheTier must be one of"),
    (ENGINES, {f"{EXTRA}.store_threshold": 2}, "store_threshold does not work with TieringOffloadingSpec"),
    (ENGINES, {f"{EXTRA}.eviction_policy": "Amq"}, "eviction_policy of vLLM itself must be one of lru, arc"),
]
# Mistakes after which the engine starts.
WARNINGS = {
    "other users may read it",
    "must be a multiple of the engine's block",
    "is its file system not mounted?",
    "cache_polcy (did you mean 'cache_policy'?)",
    "cannot be opened: Address already in use",
    "status is configured 2 times",
    "is no socket",
}

CORRECT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PLAIN, {}),
    (PLAIN, {"cache_policy": "arc", "store_threshold": 2}),
    (PLAIN, {"num_cpu_blocks": REMOVED, "cpu_bytes_to_use": "4MiB", "block_size": 64}),
    (PLAIN, {"record": "TMP/run.{pid}.kvlog", "record_max_bytes": "1MiB"}),
    (PLAIN, {"exporters": ["status", {"type": "prometheus", "port": 0}]}),
    (PLAIN, {"exporters": [{"type": "prometheus", "port": 0}, {"type": "prometheus", "port": 0, "host": "localhost"}]}),
    (TIERED, {}),
    (TIERED, {"tiers.0.path": "TMP/ours"}),
    (TIERED, {"tiers.0.path": "TMP/ours", "tiers.0.read_only": True}),
    (TIERED, {"tiers.0.path": "TMP/used", "tiers.0.read_only": True}),
    (TIERED, {"tiers": [disk("TMP/a"), disk("TMP/b")]}),
    (TIERED, {"tiers": [{"type": "memory", "capacity": "1MiB"}, disk()], "lookup_deadline_s": "2s"}),
    (TIERED, {"tiers.0.write_policy": "write_back", "tiers.0.num_threads": 8, "tiers.0.max_failures": 1}),
    (TIERED, {"tiers.0.path": "TMP/empty", "tiers.0.capacity": "2MiB", "tiers.0.deadline_s": 1}),
    (OURS, {}),
    (OURS, {f"{EXTRA}.block_size": 64, f"{EXTRA}.offload_prompt_only": False}),
    (OURS, {f"{EXTRA}.blocks_per_chunk": 4, f"{EXTRA}.cache_policy": "lru", f"{EXTRA}.data_plane": "kvcache"}),
    (ENGINES, {}),
    (ENGINES, {f"{EXTRA}.secondary_tiers.0.deadline_s": 2, f"{EXTRA}.backpressure": {}}),
    (ENGINES, {f"{EXTRA}.eviction_policy": "arc", f"{EXTRA}.blocks_per_chunk": 2}),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with directories and files in the states that the table names."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    host_blocks = np.zeros((8, 4096), np.uint8)
    for name in ("ours", "long", "damaged", "used"):
        tier = DiskTier(DiskOptions(path=tmp_path / name, capacity=1 << 20), host_blocks)
        if name != "used":
            tier.shutdown()
    with (tmp_path / "long" / "data").open("ab") as file:
        file.write(b"more")
    (tmp_path / "damaged" / "kvcache.json").write_text('{"version": 99}')
    for name, mode in (("foreign", 0o700), ("open", 0o755), ("empty", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "foreign" / "photo.jpg").write_text("x")
    (tmp_path / "file").write_text("some text")
    yield tmp_path
    tier.shutdown()


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def edited(base: dict[str, Any], edit: dict[str, Any], folder: Path, port: int) -> dict[str, Any]:
    """Return a configuration with an edit, and the table's placeholders replaced."""
    config = deepcopy(base)
    for place, value in edit.items():
        *outer, last = (int(name) if name.isdigit() else name for name in place.split("."))
        home: Any = config
        for name in outer:
            home = home[name]
        if value is REMOVED:
            del home[last]
        else:
            home[last] = value
    half = shutil.disk_usage(folder).free * 6 // 10
    text = json.dumps(config).replace("TMP", str(folder))
    return json.loads(text.replace('"HALF"', str(half)).replace('"BUSY"', str(port)))  # type: ignore[no-any-return]


def faults_of(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    is_cpu = config.pop("on_a_cpu", False)
    monkeypatch.setattr("kvcache.cli.engine_keys.has_accelerator", lambda: not is_cpu)
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    before = sorted(folder.iterdir())
    findings = check_file(file, 0, 1, None)
    assert sorted(folder.iterdir()) == before  # a check makes nothing
    return [finding for finding in findings if finding.level != "ok"]


@pytest.mark.parametrize(
    ("base", "edit", "text"), MISTAKES, ids=[f"{number}-{[*edit][-1]}" for number, (_, edit, _) in enumerate(MISTAKES)]
)
def test_planted_mistake_is_named(
    base: dict[str, Any], edit: dict[str, Any], text: str, folder: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faults_of(edited(base, edit, folder, busy_port), folder, monkeypatch)
    levels = [fault.level for fault in faults if text in fault.text]
    assert levels[:1] == ["warning" if text in WARNINGS else "error"]
    assert not any("secret" in fault.text for fault in faults)


@pytest.mark.parametrize(("base", "edit"), CORRECT)
def test_correct_configuration_is_passed_silently(
    base: dict[str, Any], edit: dict[str, Any], folder: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults_of(edited(base, edit, folder, busy_port), folder, monkeypatch) == []


def test_check_names_every_entrys_faults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"type": "disk", "capacity": "big", "deadline_s": 0, "codec": {"type": "zip"}, "spede": 1}
    extra = {"eviction_policy": "arc", "cpu_bytes_to_use": "many", "block_size": "16", "exporters": ["kv_event"]}
    edit = {f"{EXTRA}.{name}": value for name, value in {**extra, "tiers.0": entry}.items()}
    config = edited(OURS, edit, folder, 0)
    texts = "\n".join(fault.text for fault in faults_of(config, folder, monkeypatch))
    for text in (
        "needs 'path'",
        SIZE,
        "deadline_s",
        "'zip'",
        "spede",
        "not 'eviction_policy'",
        "vLLM reads it, got '16'",
        "'kv_event'",
    ):
        assert text in texts
