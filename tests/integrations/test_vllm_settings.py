"""What the adapter for vLLM decides without vLLM: releases, settings and hints; the rest is tested in tests/vllm."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

import kvcache.integrations.vllm as door
from kvcache.assembly.assemble import OffloadSettings
from kvcache.integrations.vllm import releases
from kvcache.integrations.vllm.releases import RELEASES, choose_release
from kvcache.integrations.vllm.settings import blocks_per_rank, node_options, read_config, unknown_keys


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1rc1.dev3+g1234567", "0.32.0+cpu"])
def test_choose_release_accepts_a_tried_release(found):
    assert choose_release(found) is RELEASES[0, 32]


@pytest.mark.parametrize("found", ["0.29.0", "0.31.1", "0.99.0", "1.0", "dev"])
def test_untried_release_is_refused_unless_allowed(found):
    with pytest.raises(ImportError, match=f"vLLM {found} has not been tried .*KVCACHE_ALLOW_UNTRIED_VLLM=1"):
        choose_release(found)
    assert choose_release(found, allow_untried=True) is RELEASES[max(RELEASES)]


def test_spec_names_what_release_lacks(monkeypatch):
    monkeypatch.setattr(releases, "installed_release", lambda: None)
    monkeypatch.setattr(door, "_MODULES", {"KVCacheTier": "releases_of_another_planet"})
    # With vLLM, another test may have loaded it.
    monkeypatch.delitem(vars(door), "KVCacheTier", raising=False)
    with pytest.raises(
        ImportError, match=r"No module named .*another_planet.* \(kvcache was tried with vLLM 0\.32, 0\.33\)"
    ):
        door.KVCacheTier  # noqa: B018


ROOM = {"cpu_bytes_to_use": 1}


def read_settings(extra_config, num_groups=1):
    return read_config(extra_config, num_groups).settings


DISK = {"type": "disk", "path": "kv", "capacity": "1GiB"}


@pytest.fixture
def disk_tier():
    # Read from a setting, a tier that lacks its package is a ValueError like any other; here it is an ImportError.
    importlib.import_module("kvcache.tiers.disk.tier")


def test_read_settings_accepts_json_numbers():
    assert read_settings(
        {"spec_name": "X", "cpu_bytes_to_use": 1e9, "cache_policy": "arc", "store_threshold": 2.0}
    ) == OffloadSettings(cpu_bytes_to_use=10**9, cache_policy="arc", store_threshold=2)
    found = read_settings({"cpu_bytes_to_use": "1.5GiB", "store_threshold": "2"})
    assert (found.cpu_bytes_to_use, found.store_threshold) == (3 << 29, 2)


def test_read_settings_policy_defaults_to_gittins():
    assert read_settings(ROOM).cache_policy == "gittins"
    assert read_settings(ROOM, num_groups=2).cache_policy == "lru"
    assert read_settings({**ROOM, "cache_policy": "arc"}, num_groups=2).cache_policy == "arc"
    assert read_settings({**ROOM, "cache_policy": "lru"}).cache_policy == "lru"
    assert OffloadSettings(cpu_bytes_to_use=1).cache_policy == "lru"


@pytest.mark.parametrize("key", ["num_cpu_blocks", "enable_events"])
def test_read_settings_ignores_engines_options(key):
    assert read_settings({**ROOM, "cache_policy": "lru", key: "nonsense"}) == OffloadSettings(cpu_bytes_to_use=1)
    assert key in unknown_keys({key: 1})


@pytest.mark.usefixtures("disk_tier")
def test_read_settings_reads_tiers(tmp_path):
    from kvcache.tiers.disk.tier import DiskOptions

    found = read_settings({**ROOM, "tiers": [DISK], "pool_folder": str(tmp_path), "lookup_deadline_s": "1s"})
    assert (found.pool_folder, found.lookup_deadline_s) == (str(tmp_path), 1)
    assert [tier.options for tier in found.tiers] == [DiskOptions(path="kv", capacity="1GiB")]
    assert read_settings(ROOM).tiers == ()


@pytest.mark.usefixtures("disk_tier")
def test_blocks_per_rank_refuses_pipeline_tiers():
    settings = read_settings({"cpu_bytes_to_use": 40_960, "tiers": [DISK]})
    assert (blocks_per_rank(settings, 1, 100), blocks_per_rank(settings, 2, 100)) == (10, 5)
    with pytest.raises(ValueError, match=r"'tiers' under vLLM are for tensor parallelism, .* a pipeline of 2 stages"):
        blocks_per_rank(settings, 2, 100, 2)


def test_unknown_keys_are_named_with_closest():
    assert unknown_keys({**ROOM, "spec_name": "X", "blocks_per_chunk": 2}) == ""
    assert unknown_keys({**ROOM, "cache_polcy": "arc"}) == "cache_polcy (did you mean 'cache_policy'?)"


def test_share_below_one_block_is_refused():
    settings = OffloadSettings(cpu_bytes_to_use=1000)
    assert [blocks_per_rank(settings, ranks, 100) for ranks in (1, 4, 3)] == [10, 2, 3]
    with pytest.raises(ValueError, match=r"at least one block of 1004 bytes over all 4 workers, got 1000"):
        blocks_per_rank(settings, 4, 251)
    with pytest.raises(ValueError, match="no KV cache to offload"):
        blocks_per_rank(settings, 1, 0)


def test_package_can_be_imported_without_vllm():
    code = "import sys, kvcache.integrations.vllm; assert not {'vllm', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_spec_without_vllm_names_it():
    with pytest.raises(ImportError, match="needs vLLM, which is not installed"):
        door.KVCacheOffloadingSpec  # noqa: B018


def test_node_pool_is_imported_if_named():
    code = (
        "import sys\n"
        "from kvcache.integrations.vllm.settings import read_config\n"
        f"pools = [read_config({ROOM!r} | {{'node_pool': value}}).node_pool for value in (None, False, True)]\n"
        "print(pools, [name for name in sys.modules if 'kvcache.node' in name])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[None, None, True] []\n"


def test_model_names_pool_and_paths():
    pytest.importorskip("xxhash")
    tiers = [{"type": "disk", "path": "/kv/{model}", "capacity": "1GiB"}]
    given = {"cpu_bytes_to_use": 1 << 20, "node_pool": "chat-{model}", "tiers": tiers, "record": "{model}.kvlog"}
    settings = read_config(given).settings
    options = node_options(given, settings, "0a1b")
    assert (options["tiers"][0]["path"], options["record"]) == ("/kv/0a1b", "0a1b.kvlog")
    assert tiers[0]["path"] == "/kv/{model}"
    with pytest.raises(ValueError, match=r"only a .node_pool. replaces {model}"):
        settings.tiers[0].of_rank("0")
