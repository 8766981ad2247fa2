"""`kvcache tier` and `kvcache bench disk`: their output, findings and errors."""

import io
import time
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from kvcache.tiers.disk.directory import directory_bytes
from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier


@contextmanager
def opened(path, num_blocks=16):
    """Open a disk tier; yield its host blocks and the tier."""
    host = np.zeros((16, 4096), np.uint8)
    tier = DiskTier(DiskOptions(path=path, capacity=capacity_for(num_blocks, 4096)), host, {"model": "m"})
    try:
        yield host, tier
    finally:
        tier.shutdown()


def move(tier, submit, keys):
    assert submit(1, keys, list(range(len(keys))))
    while not (results := [result for result in tier.get_finished() if result.job_id is not None]):
        time.sleep(0.001)
    return results[0]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tier"
    keys = [b"key-%d" % i for i in range(10)]
    with opened(path) as (host, tier):
        for i in range(10):
            host[i] = i
        move(tier, tier.submit_store, keys)
        move(tier, tier.submit_load, keys[:3])
        tier.touch(keys[:1])
    return path


def test_inspect_says_what_is_there(run, run_json, folder):
    facts = run_json("tier", "inspect", folder)
    names = ("num_held", "num_slots", "block_bytes", "uses", "never_used_blocks")
    assert [facts[name] for name in names] == [10, 16, 4096, 3, 7]
    assert facts["fingerprint"] == {"model": "m"}
    assert facts["bytes_on_disk"] == directory_bytes(folder) <= facts["capacity_bytes"]
    assert "10 of 16" in run("tier", "inspect", folder)[1]


def test_inspect_says_who_can_read(run, run_json, folder):
    assert run_json("tier", "inspect", folder)["shared_names"] == []
    folder.chmod(0o755)
    (folder / "data").chmod(0o644)
    assert run_json("tier", "inspect", folder)["shared_names"] == [".", "data"]
    assert "open to other users   ., data" in run("tier", "inspect", folder)[1]


def test_folder_in_use_allows_inspection_only(run, folder):
    with opened(folder):
        assert run("tier", "inspect", folder)[0] == 0
        for command in (("compact", folder), ("clear", folder, "--yes")):
            status, _, err = run("tier", *command)
            assert (status, "is in use by process" in err) == (2, True)


def test_verify_finds_and_drops_bad_blocks(run, run_json, folder):
    assert run("tier", "verify", folder)[0] == 0
    with (folder / "data").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"x")
    status, _, err = run("tier", "verify", folder)
    assert (status, f"1 blocks of {folder} do not verify" in err) == (1, True)
    expected = {"path": str(folder), "good_blocks": 9, "bad_blocks": 1, "wiped": True}
    assert run_json("tier", "verify", folder, "--wipe") == expected
    assert run("tier", "verify", folder)[0] == 0


def test_compact_keeps_most_recent_frees_space(run_json, folder):
    before = directory_bytes(folder)
    capacity = capacity_for(4, 4096)
    document = run_json("tier", "compact", folder, "--capacity", capacity)
    assert (document["num_held"], document["num_slots"]) == (4, 4)
    assert directory_bytes(folder) <= min(capacity, before)
    with opened(folder, num_blocks=4) as (host, tier):
        held = [i for i in range(10) if tier.lookup([b"key-%d" % i])]
        assert held == [0, 7, 8, 9]
        assert move(tier, tier.submit_load, [b"key-%d" % i for i in held]).failed == []
        assert [int(host[row, 0]) for row in range(4)] == held


def test_compact_without_capacity_frees_unused_space(run, folder):
    before = directory_bytes(folder)
    assert run("tier", "compact", folder)[0] == 0
    assert directory_bytes(folder) == before - 6 * 4096
    assert run("tier", "verify", folder)[0] == 0


def test_clear_deletes_blocks_of_any_format(run_json, folder):
    (folder / "kvcache.json").write_text('{"format": "kvcache disk tier", "version": 99}')
    assert run_json("tier", "clear", folder, "--yes")["bytes"] > 0
    assert [name.name for name in folder.iterdir()] == ["lock"]
    with opened(folder) as (_, tier):
        assert tier.stats().num_held == 0


def test_clear_without_a_yes_deletes_nothing(run, run_json, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    status, _, err = run("tier", "clear", folder)
    assert (status, "holds 10 blocks" in err) == (1, True)
    assert run_json("tier", "inspect", folder)["num_held"] == 10


def test_clear_refuses_foreign_folders(run, folder, tmp_path):
    (folder / "notes.txt").touch()
    for target, message in ((folder, "it also holds notes.txt"), (tmp_path, "it has no kvcache.json, but tier")):
        status, _, err = run("tier", "clear", target, "--yes")
        assert (status, message in err) == (2, True), err
    assert (folder / "data").exists()


def test_bench_disk_measures_and_leaves_nothing(run_json, tmp_path):
    rates = run_json("bench", "disk", tmp_path, "--block-bytes", "64KiB", "--size", "4MiB")
    assert (rates["num_blocks"], rates["block_bytes"]) == (64, 65536)
    assert min(rates["store_bytes_per_s"], rates["load_bytes_per_s"]) > 0
    assert list(tmp_path.iterdir()) == []


TRACE = [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("data", ["--data", "--no-data"])
def test_replay_over_disk_tier_finds_evicted(run, run_json, write_trace, tmp_path, data):
    argv = ["replay", write_trace(TRACE), "--blocks", 4, "--block-bytes", "4KiB", data]
    assert run_json(*argv)["hit_blocks"] == 1
    argv += ["--tier", f"{tmp_path / 'tier'}:1MiB"]
    document = run_json(*argv)
    assert (document["hit_blocks"], document["disk"]["promoted_blocks"]) == (3, 2)
    assert document["disk"]["found_blocks"] == 0
    again = run_json(*argv)
    assert (again["hit_blocks"], again["disk"]["found_blocks"], again["disk"]["tier"]["stored_blocks"]) == (9, 6, 0)
    status, out, _ = run(*argv)
    assert (status, "6 blocks found, 0 stored" in out) == (0, True)


def test_other_trace_in_folder_is_refused(run, write_trace, tmp_path):
    argv = ["--blocks", 4, "--block-bytes", "4KiB", "--tier", f"{tmp_path / 'tier'}:1MiB"]
    one, other = (write_trace(requests).rename(tmp_path / name) for name, requests in (("1", TRACE), ("2", TRACE[:2])))
    assert run("replay", one, *argv)[0] == 0
    status, _, err = run("replay", other, *argv)
    assert (status, "holds blocks of another fingerprint" in err) == (2, True)
    assert run("replay", one, *argv)[0] == 0


def test_replay_over_configured_tier_finds_evicted(run_json, write_trace):
    trace = write_trace([i % 8 * 4 + j for j in range(4)] for i in range(24))
    entry = '{"type": "memory", "capacity": "1MiB"}'
    document = run_json("replay", trace, "--blocks", "8", "--block-bytes", "4KiB", "--tier", entry)
    # 32 blocks in turn, three times, through a pool of 8: all but the first round come from the tier.
    assert (document["hit_blocks"], document["disk"]["tier"]["medium"]) == (64, "MEMORY")
    assert document["data"]["verified_blocks"] == 64
