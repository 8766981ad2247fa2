"""`kvcache tier` and `kvcache bench disk`: their output, findings and errors."""

import io
import json
import time

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from kvcache.tiers.disk.directory import capacity_for, directory_bytes
from kvcache.tiers.disk.tier import DiskTier


def opened(path, num_blocks=16):
    host = np.zeros((16, 4096), np.uint8)
    return host, DiskTier(path, capacity_for(num_blocks, 4096), host, fingerprint={"model": "m"})


def move(tier, submit, keys):
    assert submit(1, keys, list(range(len(keys))))
    while not (results := [result for result in tier.get_finished() if result.job_id is not None]):
        time.sleep(0.001)
    return results[0]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tier"
    host, tier = opened(path)
    for i in range(10):
        host[i] = i
    keys = [b"key-%d" % i for i in range(10)]
    move(tier, tier.submit_store, keys)
    move(tier, tier.submit_load, keys[:3])
    tier.touch(keys[:1])
    tier.shutdown()
    return path


def test_inspect_says_what_is_there(run, folder):
    status, out, _ = run("tier", "inspect", folder, "--json", "-")
    facts = json.loads(out)
    assert status == 0
    assert {name: facts[name] for name in ("num_held", "num_slots", "block_bytes", "uses", "never_used_blocks")} == {
        "num_held": 10,
        "num_slots": 16,
        "block_bytes": 4096,
        "uses": 3,
        "never_used_blocks": 7,
    }
    assert facts["fingerprint"] == {"model": "m"}
    assert facts["bytes_on_disk"] == directory_bytes(folder) <= facts["capacity_bytes"]
    status, out, _ = run("tier", "inspect", folder)
    assert status == 0
    assert "10 of 16" in out


def test_inspect_says_what_other_users_can_read(run, folder):
    assert json.loads(run("tier", "inspect", folder, "--json", "-")[1])["shared_names"] == []
    folder.chmod(0o755)
    (folder / "data").chmod(0o644)
    assert json.loads(run("tier", "inspect", folder, "--json", "-")[1])["shared_names"] == [".", "data"]
    assert "open to other users   ., data" in run("tier", "inspect", folder)[1]


def test_inspect_works_beside_a_writer(run, folder):
    _, tier = opened(folder)
    try:
        assert run("tier", "inspect", folder)[0] == 0
        status, _, err = run("tier", "compact", folder)
        assert status == 2
        assert "is in use by process" in err
    finally:
        tier.shutdown()


def test_verify_finds_and_drops_bad_blocks(run, folder):
    assert run("tier", "verify", folder)[:1] == (0,)
    with (folder / "data").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"x")
    status, _, err = run("tier", "verify", folder)
    assert status == 1
    assert f"1 blocks of {folder} do not verify" in err
    status, out, _ = run("tier", "verify", folder, "--wipe", "--json", "-")
    assert status == 0
    assert json.loads(out) == {"path": str(folder), "good_blocks": 9, "bad_blocks": 1, "wiped": True}
    assert run("tier", "verify", folder)[0] == 0


def test_compact_keeps_the_most_recent_and_gives_space_back(run, folder):
    before = directory_bytes(folder)
    capacity = capacity_for(4, 4096)
    status, out, _ = run("tier", "compact", folder, "--capacity", capacity, "--json", "-")
    assert status == 0
    assert (json.loads(out)["num_held"], json.loads(out)["num_slots"]) == (4, 4)
    assert directory_bytes(folder) <= min(capacity, before)
    host, tier = opened(folder, num_blocks=4)
    try:
        held = [i for i in range(10) if tier.lookup([b"key-%d" % i])]
        assert held == [0, 7, 8, 9]
        assert move(tier, tier.submit_load, [b"key-%d" % i for i in held]).failed == []
        assert [int(host[row, 0]) for row in range(4)] == held
    finally:
        tier.shutdown()


def test_compact_without_a_capacity_frees_what_is_not_used(run, folder):
    before = directory_bytes(folder)
    assert run("tier", "compact", folder)[0] == 0
    assert directory_bytes(folder) == before - 6 * 4096
    assert run("tier", "verify", folder)[0] == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "compact"])
def test_folder_of_something_else_is_one_line(run, tmp_path, command):
    status, _, err = run("tier", command, tmp_path)
    assert status == 2
    assert err.count("\n") == 1
    assert "is no disk tier" in err


@pytest.mark.parametrize("command", ["inspect", "verify", "compact"])
def test_url_of_a_server_is_refused(run, command):
    status, _, err = run("tier", command, "valkey://user:secret@127.0.0.1:1")
    assert (status, err.count("\n")) == (2, 1)
    assert "must be the folder of a disk tier, not a URL" in err
    assert "secret" not in err


def test_clear_deletes_the_blocks_of_any_format(run, folder):
    (folder / "kvcache.json").write_text('{"format": "kvcache disk tier", "version": 99}')
    status, out, _ = run("tier", "clear", folder, "--yes", "--json", "-")
    assert status == 0
    assert json.loads(out)["bytes"] > 0
    assert [name.name for name in folder.iterdir()] == ["lock"]
    _, tier = opened(folder)
    try:
        assert tier.stats().num_held == 0
    finally:
        tier.shutdown()


def test_clear_without_a_yes_deletes_nothing(run, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    status, _, err = run("tier", "clear", folder)
    assert status == 1
    assert "holds 10 blocks" in err
    assert json.loads(run("tier", "inspect", folder, "--json", "-")[1])["num_held"] == 10


def test_clear_refuses_a_folder_in_use_and_foreign_folders(run, folder, tmp_path):
    _, tier = opened(folder)
    try:
        status, _, err = run("tier", "clear", folder, "--yes")
        assert (status, "is in use by process" in err) == (2, True)
    finally:
        tier.shutdown()
    (folder / "notes.txt").touch()
    for target, text in ((folder, "it holds data, kvcache.json"), (tmp_path, "it holds tier"), ("missing", "must be")):
        status, _, err = run("tier", "clear", target, "--yes")
        assert (status, text in err) == (2, True), err
    assert (folder / "data").exists()
    status, _, err = run("tier", "clear", folder, "--cluster")
    assert (status, "need the URL of a server" in err) == (2, True)


def test_bench_disk_measures_and_leaves_nothing(run, tmp_path):
    status, out, _ = run("bench", "disk", tmp_path, "--block-bytes", "64KiB", "--size", "4MiB", "--json", "-")
    rates = json.loads(out)
    assert status == 0
    assert (rates["num_blocks"], rates["block_bytes"]) == (64, 65536)
    assert min(rates["store_bytes_per_s"], rates["load_bytes_per_s"]) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "size", "message"),
    [
        (".", "1KiB", "--size must hold at least one block of 2097152 bytes, got '1KiB'"),
        (".", "999999TiB", " free in ., got '999999TiB'"),
        ("missing", "2MiB", "folder must be one that exists, got 'missing'"),
        ("file", "2MiB", "folder must be one that exists, got 'file'"),
    ],
)
def test_bench_disk_refuses_what_it_cannot_measure(run, tmp_path, monkeypatch, folder, size, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    status, _, err = run("bench", "disk", folder, "--size", size)
    assert status == 2
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


TRACE = [
    {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 2]},
    {"timestamp": 5, "input_length": 1536, "output_length": 1, "hash_ids": [3, 4, 5]},
    {"timestamp": 9, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 2]},
]


@pytest.mark.parametrize("data", ["--data", "--no-data"])
def test_replay_over_a_disk_tier_finds_what_left_host_memory(run, tmp_path, data):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    argv = ["replay", trace, "--blocks", 4, "--block-bytes", "4KiB", data, "--json", "-"]
    assert json.loads(run(*argv)[1])["hit_blocks"] == 1
    status, out, _ = run(*argv, "--tier", f"{tmp_path / 'tier'}:1MiB")
    document = json.loads(out)
    assert status == 0
    assert (document["hit_blocks"], document["disk"]["promoted_blocks"]) == (3, 2)
    assert document["disk"]["found_blocks"] == 0
    again = json.loads(run(*argv, "--tier", f"{tmp_path / 'tier'}:1MiB")[1])
    assert (again["hit_blocks"], again["disk"]["found_blocks"], again["disk"]["tier"]["stored_blocks"]) == (9, 6, 0)
    status, out, _ = run(*argv[:-2], "--tier", f"{tmp_path / 'tier'}:1MiB")
    assert status == 0
    assert "6 blocks found, 0 stored" in out


def test_another_trace_is_refused_in_the_same_folder(run, tmp_path):
    argv = ["--blocks", 4, "--block-bytes", "4KiB", "--tier", f"{tmp_path / 'tier'}:1MiB"]
    for name, records in (("one", TRACE), ("other", TRACE[:2])):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run("replay", tmp_path / "one", *argv)[0] == 0
    status, _, err = run("replay", tmp_path / "other", *argv)
    assert status == 2
    assert "holds blocks of another fingerprint" in err
    assert run("replay", tmp_path / "one", *argv)[0] == 0


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ("5GiB", "--tier must be PATH:SIZE, as in /mnt/nvme/kv:100GiB, or JSON, got '5GiB'"),
        ("x:y", "--tier must be bytes >= 1 or a size"),
        ("new:1KiB", "hold one block of 65536 bytes"),
    ],
)
def test_replay_bad_tier_is_named(run, tmp_path, monkeypatch, tier, message):
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(TRACE[0]) + "\n")
    assert message in run("replay", trace, "--tier", tier)[2]


def test_replay_over_a_configured_tier_finds_what_left_host_memory(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lengths = {"input_length": 2048, "output_length": 1}
    turns = [{"timestamp": i, **lengths, "hash_ids": [i % 8 * 4 + j for j in range(4)]} for i in range(24)]
    lines = [json.dumps(turn) for turn in turns]
    trace.write_text("\n".join(lines))
    options = ("--blocks", "8", "--block-bytes", "4KiB", "--json", "-")
    entry = json.dumps({"type": "memory", "capacity": "1MiB"})
    status, out, _ = run("replay", trace, *options, "--tier", entry)
    assert status == 0
    document = json.loads(out)
    # 32 blocks in turn, three times, through a pool of 8: all but the first round come from the tier.
    assert (document["hit_blocks"], document["disk"]["tier"]["medium"]) == (64, "MEMORY")
    assert document["data"]["verified_blocks"] == 64
    status, _, err = run("replay", trace, *options, "--tier", '{"type": "tape"}')
    assert status == 2
    assert "unknown tier 'tape'" in err
