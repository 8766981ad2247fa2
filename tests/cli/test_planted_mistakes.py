"""`kvcache check` names every planted mistake, and says nothing of a correct configuration."""

from __future__ import annotations

import importlib.util
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


EXTRA = "kv_connector_extra_config"
PLAIN = {"num_cpu_blocks": 8}
TIERED = {"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": [disk()]}
CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
OPTIONS = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": ADAPTER, "cpu_bytes_to_use": "4MiB"}
OURS = {**CONNECTOR, EXTRA: {**OPTIONS, "tiers": [disk()]}}
BELOW = {**disk(), "type": "KVCacheTier", "module_path": ADAPTER, "kind": "disk"}
ENGINES = {
    **CONNECTOR,
    EXTRA: {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 4 << 20, "secondary_tiers": [BELOW]},
}
VLLM = {"kv_transfer_config": {**CONNECTOR, EXTRA: OPTIONS}}
EVENTS = {
    "kv_transfer_config": {**CONNECTOR, EXTRA: {**OPTIONS, "self_describing_kv_events": True}},
    "kv_events_config": {"enable_kv_cache_events": True},
    "block_size": 16,
}
L2 = {
    "type": "plugin", "module_path": "kvcache.integrations.lmcache", "class_name": "KVCacheL2",
    "adapter_params": {"kind": "disk", "path": "TMP/l2", "capacity": "64MiB"},
}  # fmt: skip
SGLANG = {
    "backend_name": "kvcache", "module_path": "kvcache.integrations.sglang", "class_name": "KVCacheStorage",
    "interface_v1": 1, "kind": "disk", "path": "TMP/pages", "capacity": "64MiB",
}  # fmt: skip
TWO_STAGES = {".tiers": [disk("TMP/kv{dp_rank}")], "pipeline_parallel_size": 2}
HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None
SALTED = {"type": "valkey", "url": "valkey://127.0.0.1:1", "salt": "0" * 16}

# A base, the edit (dotted path: value), and a text that must be named, behind its level if that is not "error". A path
# that begins with a dot is one of our options; BLOCK and ENGINES are the size of a block and the number of engines.
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # What the engine refused after the check had passed it.
    (TIERED, {"tiers": [disk("TMP/a", capacity="HALF"), disk("TMP/b", capacity="HALF")]}, "are on one file system"),
    (TIERED, {"tiers": [disk(), disk()]}, "2 tiers have the path"),
    (TIERED, {"tiers": [disk(), disk("TMP/x/../kv")]}, "2 tiers have the path"),
    (TIERED, {"tiers.0.path": "TMP/foreign"}, "is no disk tier: it has no kvcache.json, but photo.jpg"),
    (TIERED, {"tiers.0.read_only": True}, "is to be read only, and holds no tier yet"),
    (TIERED, {"tiers.0.path": "TMP/long"}, "data must have"),
    (OURS, {".block_size": 0}, f"block_size in {EXTRA} {COUNT}"),
    (OURS, {".block_size": "16"}, f"block_size in {EXTRA} must be a whole number, as vLLM reads it, got '16'"),
    (OURS, {".block_size": 17}, "warning: must be a multiple of the engine's block"),
    (OURS, {".blocks_per_chunk": -1}, f"blocks_per_chunk in {EXTRA} {COUNT}"),
    (OURS, {".block_size": 16, ".blocks_per_chunk": 2}, "may have one of 'block_size' and"),
    (OURS, {".offload_prompt_only": "yes"}, f"offload_prompt_only in {EXTRA} must be a bool, got 'yes'"),
    (PLAIN, {"record": "/no-such-mount/run.kvlog"}, "warning: is its file system not mounted?"),
    (PLAIN, {"record": "TMP/file/run.kvlog"}, "cannot be recorded to: Not a directory"),
    (ENGINES, {"on_a_cpu": True}, "copies on CUDA, ROCm and XPU only"),
    (OURS, {"kv_role": "both"}, "kv_role must be 'kv_producer' or 'kv_consumer' or 'kv_both', got 'both'"),
    (OURS, {"kv_connector": "Offloading", "kv_role": "both"}, "kv_role must be"),
    (OURS, {EXTRA: REMOVED, "kv_role": "both"}, "kv_role must be"),
    (ENGINES, {".cpu_bytes_to_use": 64}, "cpu_bytes_to_use is 64 bytes"),
    (TIERED, {"tiers.0.advanced": {"num_threads": 8}}, "unknown options of a disk tier: advanced"),
    (TIERED, {"tiers.0.num_thread": 8}, "did you mean 'num_threads'?"),
    # The pool.
    (PLAIN, {"num_cpu_blocks": REMOVED}, "must have one of num_cpu_blocks and cpu_bytes_to_use"),
    (PLAIN, {"cpu_bytes_to_use": "1GiB"}, "must have one of num_cpu_blocks and cpu_bytes_to_use"),
    (PLAIN, {"num_cpu_blocks": REMOVED, "cpu_bytes_to_use": "4096TiB"}, "does not fit into host memory"),
    (PLAIN, {"cache_policy": "lru2"}, "unknown policy 'lru2'"),
    (PLAIN, {"cache_polcy": "arc"}, "warning: cache_polcy (did you mean 'cache_policy'?)"),
    (PLAIN, {"store_threshold": -1}, "store_threshold in extra_config"),
    (PLAIN, {"what_if": True}, "what_if (use 'record', and `kvcache plan` on the recording)"),
    (PLAIN, {"offload_prompt_only": "no"}, "offload_prompt_only in extra_config must be a bool"),
    (PLAIN, {"spec_name": "teiring"}, "unknown spec 'teiring'"),
    (PLAIN, {"spec_name": "teiring"}, "ok: 8 blocks, policy lru"),
    (PLAIN, {"tiers": [disk()]}, "tiers need spec_name 'tiering'"),
    (PLAIN, {"lookup_deadline_s": 2}, "lookup_deadline_s in extra_config need 'tiers'"),
    (PLAIN, {"exporters": "status"}, "exporters in extra_config must be a list"),
    (PLAIN, {"exporters": ["grafana"]}, "unknown exporter 'grafana'"),
    (PLAIN, {"exporters": [{"type": "prometheus", "port": 70_000}]}, "must be at most 65535, got 70000"),
    (PLAIN, {"exporters": [{"type": "prometheus", "port": "BUSY"}]}, "warning: opened: Address already in use"),
    (PLAIN, {"exporters": ["status", "status"]}, "warning: status is configured 2 times"),
    (PLAIN, {"exporters": [{"type": "status", "path": "TMP/file"}]}, "warning: is no socket"),
    (PLAIN, {"record": "TMP/file"}, "is no recording, and will not be written over"),
    (PLAIN, {"record": "TMP"}, "is no file, and will not be recorded to"),
    # Tiers.
    (TIERED, {"tiers": {"type": "disk"}}, "tiers in extra_config must be a list of dicts"),
    (TIERED, {"tiers.0.type": REMOVED}, "a tier needs a type"),
    (TIERED, {"tiers.0.path": REMOVED}, "a disk tier needs 'path'"),
    (TIERED, {"tiers.0.capacity": "4096TiB"}, "are needed below"),
    (TIERED, {"tiers.0.capacity": 64}, "capacity 64 B is less than"),
    (TIERED, {"tiers.0.path": "/no-such-mount/kv"}, "warning: is its file system not mounted?"),
    (TIERED, {"tiers.0.path": "TMP/file"}, "is not a directory"),
    (TIERED, {"tiers.0.path": "TMP/file/kv"}, "is not a directory"),
    (TIERED, {"tiers.0.path": "TMP/used"}, "is in use by process"),
    (TIERED, {"tiers.0.path": "TMP/open"}, "warning: other users may read it"),
    (TIERED, {"tiers.0.path": "TMP/damaged"}, "is not a disk tier's header"),
    (TIERED, {"tiers.0.write_policy": "write_around"}, "write_policy in tier 'disk' must be one of"),
    (TIERED, {"tiers.0.codec": {"type": "zip"}}, "unknown codec 'zip'"),
    (TIERED, {"tiers.0": {"type": "valkey", "url": "user:secret@localhost"}}, "must begin with one of valkey://"),
    (TIERED, {"tiers.0": {"type": "valkey"}}, "a valkey tier needs 'url'"),
    (TIERED, {"tiers.0": {"type": "mooncake", "master": "nowhere"}}, "must be 'host:port', got 'now"),
    (TIERED, {"tiers.0": {"type": "valkey", "url": "valkey://127.0.0.1:1"}}, "it cannot be used: 127.0.0.1:1: "),
    (TIERED, {"tiers.0": {"type": "memory"}}, "a memory tier needs 'capacity'"),
    # vLLM.
    (OURS, {".spec_name": "KVCacheSpec"}, "must be 'KVCacheOffloadingSpec', got 'KVCacheSpec'"),
    (OURS, {".spec_module_path": "kvcache.vllm"}, "spec_name and spec_module_path must be"),
    (OURS, {".cpu_bytes_to_use": REMOVED}, "must have 'cpu_bytes_to_use'"),
    (OURS, {".cpu_bytes_to_use": float("inf")}, f"cpu_bytes_to_use in {EXTRA} {SIZE}"),
    (OURS, {".num_copy_threads": -2}, f"num_copy_threads in {EXTRA} {COUNT}"),
    (OURS, {".node_pool": "../a"}, "node_pool must be true or a name"),
    (OURS, {".node_pool": 3}, "node_pool must be true or a name"),
    (OURS, {".eviction_policy": "arc"}, "kvcache reads 'cache_policy', not 'eviction_policy'"),
    (OURS, {".data_plane": "cuda"}, f"data_plane in {EXTRA} must be one of vllm, kvcache"),
    (OURS, {".exporters": ["kv_events"]}, "it was removed: vLLM publishes events with"),
    (OURS, {".self_describing_kv_events": "true"}, "self_describing_kv_events in"),
    (OURS, {".data_plane": "kvcache", ".canonical_layout": True}, "not support 'canonical_layout'"),
    (OURS, {".pool_folder": "/no-such-shm"}, "pool_folder must be a folder in shared memory"),
    (ENGINES, {".cpu_bytes_to_use": "4MiB"}, "as vLLM reads it, got '4MiB'"),
    (ENGINES, {".cpu_bytes_to_use": True}, "as vLLM reads it, got True"),
    (ENGINES, {".secondary_tiers.0.kind": "disc"}, "did you mean 'disk'"),
    (ENGINES, {".secondary_tiers.0.arbiter": True}, "omit arbiter"),
    (ENGINES, {".secondary_tiers.0.kind": REMOVED}, "a KVCacheTier needs 'kind'"),
    (ENGINES, {".secondary_tiers.0.locality": "local"}, "locality in a KVCacheTier must be one of"),
    (ENGINES, {".backpressure": 3}, "must be an object, got 3"),
    (ENGINES, {".store_threshold": 2}, "store_threshold does not work with TieringOffloadingSpec"),
    (ENGINES, {".eviction_policy": "Amq"}, "eviction_policy of vLLM itself must be one of lru, arc"),
    (PLAIN, {"num_cpu_blocks": REMOVED, "cpu_bytes_to_use": 64}, "less than a block: a unit, as in '64GiB'?"),
    (PLAIN, {"num_cpu_blocks": REMOVED, "cpu_bytes_to_use": "64MiB"}, "ok: 64 MiB, policy lru; a block's size is not"),
    (ENGINES, {".eviction_policy": "arc"}, "ok: 4 MiB, policy arc"),
    (TIERED, {"tiers.0.path": "TMP/kv{dp_rank}"}, "its data-parallel rank is unknown"),
    (OURS, {".tiers.0.path": "TMP/kv{dp_rank}"}, "ok: are needed below TMP/kv0"),
    (TIERED, {"tiers.0": {**SALTED, "salt": "0" * 15}}, "salt has 15 characters, and must have 16 or more"),
    *[(TIERED, {"tiers.0": {"type": "mooncake", "master": "127.0.0.1:1"}}, ":1 cannot be used")] * HAS_MOONCAKE,
    (TIERED, {"tiers.0": SALTED}, "it cannot be used: 127.0.0.1:1: "),
    # Endurance.
    (TIERED, {"tiers.0.endurance": "1KiB/day", "BLOCK": 8192}, "at least one block a day, got '1024/day' for"),
    (TIERED, {"tiers.0.endurance": 3, "tiers.0.write_policy": "write_back"}, "omit write_policy 'write_back'"),
    (TIERED, {"tiers.0.endurance": 3, "tiers.0.write_policy": "write_through_selective"}, "omit write_policy"),
    (TIERED, {"tiers.0": {"type": "memory", "capacity": "1MiB", "endurance": 3}}, "this tier does not wear"),
    *(
        (TIERED, {"tiers": [disk("TMP/a", endurance=rate), disk("TMP/b", endurance=rate), disk("TMP/c")]}, text)
        for rate, text in (
            ("6TiB/day", "warning: 2 tiers of one device may write 12 TiB a day together"),
            (3, "ok: 2 tiers of one device may write 6 MiB a day together"),
        )
    ),
    # vLLM's own options beside ours.
    (EVENTS, {".self_describing_kv_events": False}, "warning: routers ignore events without tokens"),
    (EVENTS, {"block_size": REMOVED, ".blocks_per_chunk": 4}, "warning: loads whole offloaded blocks only"),
    (EVENTS, {".block_size": 64}, "warning: loads whole offloaded blocks only"),
    (EVENTS, {".node_pool": "planted"}, "KV events do not work with 'node_pool'"),
    (VLLM, {".node_pool": "planted", "enable_lora": True}, "warning: new version of an adapter a new path"),
    (VLLM, {".tiers": [disk()], "enable_lora": True}, "warning: new version of an adapter a new path"),
    (VLLM, {".node_pool": "planted", ".canonical_layout": True}, "'node_pool' does not support 'canonical_layout'"),
    (VLLM, {".node_pool": "planted", ".pool_folder": "/dev/shm"}, "lies in /dev/shm; leave 'pool_folder' out"),
    (VLLM, {".node_pool": "planted", ".tiers": [disk("TMP/{dp_rank}")]}, "serves all engines; leave '{dp_rank}'"),
    (VLLM, {".node_pool": "planted", "pipeline_parallel_size": 2}, "does not work with a pipeline of 2 stages"),
    (VLLM, {".node_pool": "planted", ".cpu_bytes_to_use": "4096TiB"}, "4096 TiB are needed below /dev/shm"),
    (VLLM, {".data_plane": "kvcache", **TWO_STAGES}, "in a pipeline of 2 stages"),
    (VLLM, {".tiers": [disk()], "data_parallel_size": 3}, "3 tiers have the path TMP/kv; a directory belongs to one"),
    (VLLM, {".tiers": [disk()], "ENGINES": 3}, "3 tiers have the path TMP/kv; a directory belongs to one tier: {dp_"),
    (VLLM, {".store_threshold": 0}, "warning: store_threshold 0 and 1 store every block"),
    (OURS, {"kv_connector": REMOVED, "kv_conector": "x"}, "kv_connector must be 'OffloadingConnector', got None"),
    (OURS, {"tiers": []}, f"vLLM would not use kvcache: tiers must be inside {EXTRA}"),
    (OURS, {"cpu_bytes_to_use": 1}, f"vLLM would not use kvcache: cpu_bytes_to_use must be inside {EXTRA}"),
    (ENGINES, {".secondary_tiers.0.capasity": 1}, "capasity (did you mean 'capacity'?)"),
    (ENGINES, {".secondary_tiers.0.type": "Tier"}, "must be one of KVCacheTier, got 'Tier'"),
    (ENGINES, {".spec_name": "CPUOffloadingSpec"}, "need spec_name 'TieringOffloadingSpec'"),
    (ENGINES, {".secondary_tiers": [{"type": "fs"}]}, f"no tier has the module_path '{ADAPTER}'"),
    # LMCache.
    (L2, {"class_name": "L2"}, "class_name of an --l2-adapter must be one of KVCacheL2"),
    (L2, {".capacity": "1KiB"}, "capacity 1024 of a KVCacheL2 must be >="),
    (L2, {".read_only": True}, "KVCacheL2 does not support read_only"),
    (L2, {".endurance": 3}, "KVCacheL2 does not support endurance"),
    (L2, {".write_policy": "write_back"}, "KVCacheL2 does not support write_policy"),
    (L2, {".capacity": "x"}, "capacity in a disk tier"),
    (L2, {".kind": "valkey"}, "kind of a KVCacheL2 must be one of disk"),
    (L2, {".capacity": "900PiB"}, "are needed below"),
    (L2, {".type": "disk"}, "unknown options of a disk tier: type"),
    (L2, {".path": "/mnt/{rank}"}, "its data-parallel rank is unknown here, got '/mnt/{rank}'"),
    (L2, {"module_path": "kvcache.lmcache"}, "kvcache.integrations.lmcache, got 'kvcache.lmcache'"),
    (L2, {"adapter_params": "disk"}, "adapter_params must be an object, got 'disk'"),
    (L2, {"exporters": [], "deadline_s": 1}, "deadline_s, exporters of an --l2-adapter must be inside adapter_params"),
    (L2, {"evction": {}}, "warning: unknown keys of an --l2-adapter: evction (did you mean 'eviction'?)"),
    # SGLang.
    (SGLANG, {"class_name": "Storage"}, "class_name of a storage backend must be one of KVCacheStorage, got 'Storage'"),
    (SGLANG, {"backend_name": REMOVED}, "SGLang needs a 'backend_name', such as 'kvcache', got None"),
    (SGLANG, {"kind": REMOVED}, "SGLang's storage backend needs 'kind'"),
    (SGLANG, {"kind": "disc"}, "did you mean 'disk'"),
    (SGLANG, {"type": "disk"}, "unknown options of a disk tier: type"),
    (SGLANG, {"endurance": 3}, "the engine decides what SGLang's storage backend stores and loads: omit endurance"),
    (SGLANG, {"write_policy": "write_through", "max_store_blocks": 9}, "omit max_store_blocks, write_policy"),
    (SGLANG, {"capacity": "much"}, "capacity in a disk tier"),
    (SGLANG, {"shares": {"kv": 0.9, "mamba": 0.2}}, "at most 1 in all"),
    (SGLANG, {"shares": {"kv": 0}}, "must each be above 0"),
    (SGLANG, {"path": "/mnt/kv{dp_rnk}"}, "unknown placeholder {dp_rnk}; known ones: {dp_rank} and {rank}, got '/mnt"),
    (SGLANG, {"module_path": "kvcache.sglnag"}, "a plug-in of SGLang or LMCache must be one of kvcache."),
    (SGLANG, {"module_path": REMOVED}, "kvcache.integrations.lmcache, got None"),
    (SGLANG, {"shares": {"kv": 2}}, "'kv' of shares in SGLang's storage backend must be"),
    (SGLANG, {"shares": {"kv": 0.1, "mmaba": 0.9}}, "got mmaba (did you mean 'mamba'?)"),
    (SGLANG, {"shares": {"mamba": 1}}, "must name the host pools, 'kv' among them"),
    (SGLANG, {"shares": {"kv": 0.1}}, "warning: shares use 10% of the capacity, the rest stays empty"),
    (SGLANG, {"interface_v1": "0"}, "interface_v1 in SGLang's storage backend must be a bool, 0 or 1, got '0'"),
    (SGLANG, {"tp_lcm_size": "x"}, "tp_lcm_size in SGLang's storage backend must be a whole number, as SGLang reads"),
    (SGLANG, {"prefetch_timeout_base": "1s"}, "must be a number of seconds, as SGLang reads it, got '1s'"),
    (SGLANG, {"hicache_storage_pass_prefix_keys": 1}, "must be a bool, got 1"),
    (SGLANG, {"capacity": "900PiB"}, "are needed below"),
]

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
    (OURS, {".block_size": 64, ".offload_prompt_only": False}),
    (OURS, {".blocks_per_chunk": 4, ".cache_policy": "lru", ".data_plane": "kvcache"}),
    (ENGINES, {}),
    (ENGINES, {".secondary_tiers.0.deadline_s": 2, ".backpressure": {}}),
    (ENGINES, {".eviction_policy": "arc", ".blocks_per_chunk": 2}),
    (ENGINES, {".secondary_tiers": [BELOW, {"type": "fs"}]}),
    (EVENTS, {}),
    (EVENTS, {".block_size": 16}),
    (EVENTS, {".blocks_per_chunk": 1}),
    (VLLM, {".node_pool": "planted"}),
    (VLLM, {"enable_lora": True}),
    (VLLM, {".data_plane": "vllm", **TWO_STAGES}),
    (VLLM, {".data_plane": "kvcache", "pipeline_parallel_size": 2}),
    (VLLM, {".store_threshold": 2}),
    (VLLM, {".tiers": [disk("TMP/kv{dp_rank}")], "data_parallel_size": 3}),
    (VLLM, {".tiers": [disk("TMP/kv{dp_rank}")], "data_parallel_size": 3, "ENGINES": 2}),
    (TIERED, {"tiers.0.endurance": "64KiB/day", "BLOCK": 8192}),
    (L2, {}),
    (L2, {"eviction": {}, "serde": {}, "shared": False}),
    (SGLANG, {}),
    (SGLANG, {"shares": {"deepseek_v4_c4": 1}}),
    (SGLANG, {"shares": {"kv": 0.1, "mamba": 0.9}}),
    (SGLANG, {"interface_v1": True}),
    (SGLANG, {"allocator": "shm", "file_storage_path": "/a"}),
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with those directories and files, in the states that the table names, that the edit uses."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    named, tiers = repr(getattr(request.node, "callspec", "")), {}
    for name in ("ours", "long", "damaged", "used"):
        if f"TMP/{name}'" in named:
            options = DiskOptions(path=tmp_path / name, capacity=1 << 20)
            tiers[name] = DiskTier(options, np.zeros((8, 4096), np.uint8))
            if name != "used":
                tiers[name].shutdown()
    if "long" in tiers:
        with (tmp_path / "long" / "data").open("ab") as file:
            file.write(b"more")
    if "damaged" in tiers:
        (tmp_path / "damaged" / "kvcache.json").write_text('{"version": 99}')
    for name, mode in (("foreign", 0o700), ("open", 0o755), ("empty", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "foreign" / "photo.jpg").write_text("x")
    (tmp_path / "file").write_text("some text")
    yield tmp_path
    for tier in tiers.values():
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
    wrapper = "kv_transfer_config." * ("kv_transfer_config" in base)
    options = "adapter_params" if "adapter_params" in base else wrapper + EXTRA
    for place, value in edit.items():
        path = options + place if place.startswith(".") else place
        *outer, last = (int(name) if name.isdigit() else name for name in path.split("."))
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


def findings_of(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    is_cpu, num_bytes, num_engines = config.pop("on_a_cpu", False), config.pop("BLOCK", 0), config.pop("ENGINES", None)
    monkeypatch.setattr("kvcache.cli.engine_keys.has_accelerator", lambda: not is_cpu)
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    before = sorted(folder.iterdir())
    findings = check_file(file, num_bytes, 1, None, num_engines)
    assert sorted(folder.iterdir()) == before  # a check makes nothing
    return findings


@pytest.mark.parametrize(
    ("base", "edit", "text"), MISTAKES, ids=[f"{number}-{[*edit][-1]}" for number, (_, edit, _) in enumerate(MISTAKES)]
)
def test_planted_mistake_is_named(
    base: dict[str, Any], edit: dict[str, Any], text: str, folder: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    level, _, named = text.partition(": ") if text.startswith(("ok: ", "warning: ")) else ("error", "", text)
    findings = findings_of(edited(base, edit, folder, busy_port), folder, monkeypatch)
    shown = [finding.level for finding in findings if named.replace("TMP", str(folder)) in finding.text]
    assert {*shown} == {level}, findings
    assert not any("secret" in finding.text for finding in findings)


@pytest.mark.parametrize(("base", "edit"), CORRECT)
def test_correct_configuration_is_passed_silently(
    base: dict[str, Any], edit: dict[str, Any], folder: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = findings_of(edited(base, edit, folder, busy_port), folder, monkeypatch)
    assert {finding.level for finding in findings} == {"ok"}, findings


def test_check_names_every_entrys_faults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"type": "disk", "capacity": "big", "deadline_s": 0, "codec": {"type": "zip"}, "spede": 1}
    extra = {"eviction_policy": "arc", "cpu_bytes_to_use": "many", "block_size": "16", "exporters": ["kv_event"]}
    edit = {f"{EXTRA}.{name}": value for name, value in {**extra, "tiers.0": entry}.items()}
    config = edited(OURS, edit, folder, 0)
    texts = "\n".join(fault.text for fault in findings_of(config, folder, monkeypatch))
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
