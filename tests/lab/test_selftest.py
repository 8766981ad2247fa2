"""`kvcache selftest` on the CPU: each fault that is planted makes its row wrong, and the file names nobody."""

import json
import os
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")

import torch
from servers import find_valkey, running_valkey

from kvcache.lab.selftest import copies, kills, machine, rates, rows
from kvcache.tiers.disk.tier import DiskTier
from kvcache.transfer.cpu import CPUCopyHandler

CPU = torch.device("cpu")


def verdicts(found):
    return {row.subject: row.verdict for row in found}


def skipping_last_block(transfer_async):
    def transfer(handler, job_id, spec):
        device = spec[not handler._to_host]
        if len(device.block_ids) > 1:
            device.block_ids[-1] = device.block_ids[0]
        return transfer_async(handler, job_id, spec)

    return transfer


def test_selftest_copies_compare_every_byte(monkeypatch):
    assert verdicts(copies.check_copies(CPU, 0)) == {"copies": "ok"}
    monkeypatch.setattr(CPUCopyHandler, "transfer_async", skipping_last_block(CPUCopyHandler.transfer_async))
    assert verdicts(copies.check_copies(CPU, 0)) == {"copies": "WRONG"}


@pytest.mark.slow
@pytest.mark.parametrize(("is_damaged", "verdict"), [(False, "ok"), (True, "WRONG")])
def test_kills_compare_what_tier_holds(tmp_path, monkeypatch, is_damaged, verdict):
    if is_damaged:
        # As a tier that serves the bytes of another key.
        fill = kills.fill
        monkeypatch.setattr(kills, "fill", lambda row, key: fill(row, key + b"x"))
    capacity = DiskTier.capacity_for(kills.NUM_BLOCKS, kills.BLOCK_BYTES)
    entry = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": capacity}
    [row] = kills.check_kills("disk", entry, 0)
    assert (row.verdict, row.figures["kills"]) == (verdict, 2)
    assert row.figures["compared"] >= kills.NUM_BLOCKS
    assert (row.figures["wrong"] == row.figures["compared"]) is is_damaged


@pytest.mark.slow
def test_kills_leave_store_as_found():
    valkey = pytest.importorskip("valkey")
    if find_valkey() is None:
        pytest.skip("needs valkey-server or redis-server")
    with running_valkey() as port:
        client = valkey.Valkey(port=port)
        client.set("kvcache:another", b"1")
        [row] = kills.check_kills("shared store", {"type": "valkey", "url": f"valkey://127.0.0.1:{port}"}, 0)
        assert (row.verdict, row.figures["wrong"]) == ("ok", 0)
        assert row.figures["compared"] > 0
        assert client.keys() == [b"kvcache:another"]


@pytest.fixture
def quick(monkeypatch):
    """Rates of a few small blocks."""
    for name, value in {"_BLOCK_BYTES": 64 << 10, "_COPY_BLOCKS": 4, "_DISK_BLOCKS": 4, "_NUM_LAYERS": 2}.items():
        monkeypatch.setattr(rates, name, value)
    # A loaded machine may be slow.
    monkeypatch.setattr(rates, "_SLOW_RATIO", 0.0)


@pytest.mark.slow
def test_selftest_report_names_nobody(run, tmp_path, quick):
    status, out, err = run("selftest", "--minutes", "0.1", "--path", str(tmp_path), "--json", str(tmp_path / "x.json"))
    assert (status, err) == (0, "")
    assert "kvcache works on this machine" in out
    report = json.loads((tmp_path / "x.json").read_text())
    subjects = ["found", "memory", "pinned memory", "shared memory", "copies", "store rate", "load rate"]
    subjects += ["file system", "disk", "disk write rate", "disk read rate"]
    assert [row["subject"] for row in report["rows"]] == subjects
    for name in (str(tmp_path), str(Path.cwd()), str(Path.home()), socket.gethostname()):
        assert name == "/" or name not in json.dumps(report)
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


@pytest.mark.slow
def test_selftest_without_room_says_so(run, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(machine, "memory_left", lambda: (1 << 20, "/sys/fs/cgroup/user-7/memory.max = 9"))
    monkeypatch.setattr(rates, "memory_left", lambda: (1000, "the cgroup"))
    full = os.statvfs(tmp_path)
    usage = type("Usage", (), {"free": 1000, "total": full.f_blocks * full.f_frsize})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    status, out, _ = run("selftest", "--minutes", "0.1", "--path", str(tmp_path), "--json", "-")
    found = {row["subject"]: row["text"] for row in json.loads(out)["rows"] if row["verdict"] == "skipped"}
    assert status == 0
    assert found == {
        "pinned memory": "not tried: it needs 256 MiB of free memory",
        "copy rates": "not measured: they need 1 MiB of free memory",
        "disk": found["disk"],
    }
    assert found["disk"].startswith("not tested: it needs ")
    assert {row["subject"]: row["text"] for row in json.loads(out)["rows"]}[
        "memory"
    ] == "1 MiB left by a cgroup's limit"


@pytest.mark.slow
def test_selftest_read_only_folder_fails(run, tmp_path, quick, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system", str(tmp_path))

    monkeypatch.setattr(machine, "file_system", refuse)
    status, out, err = run("selftest", "--minutes", "0.1", "--path", str(tmp_path), "--json", "-")
    assert status == 1
    assert json.loads(out)["rows"][-1]["text"] == "OSError: Read-only file system"
    assert err == "kvcache: error: 1 of 8 rows are wrong: disk\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "--device cuda: torch"),
        (["--path", "missing"], "--path must be a folder, got 'missing'"),
        (["--store", "{"], "--store is not JSON"),
        (["--store", "[1]"], "--store must be an object with a 'type'"),
        (["--store", '{"type": "no"}'], "'no'"),
        (["--minutes", "0"], "--minutes must be in 0.1..1440, got 0"),
    ],
)
def test_selftest_invalid_option_is_named(run, arguments, message):
    status, _, err = run("selftest", *arguments)
    assert status == 2
    assert message in err


def test_selftest_without_torch_names_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, err = run("selftest")
    assert status == 1
    assert err == "kvcache: error: this command needs the package torch, which is not installed\n"


def test_check_device_names_its_successor(run):
    status, _, err = run("check", "--device")
    assert status == 2
    assert "use `kvcache selftest`" in err


def test_rows_hide_names_in_errors():
    def fail():
        raise FileNotFoundError("/mnt/secret/kv of host7 is missing")
        yield

    [row] = rows.guarded("disk", fail, ["/mnt/secret", "host7"])
    assert (row.verdict, row.text) == ("WRONG", "FileNotFoundError: ***/kv of *** is missing")


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("out of memory")])
def test_rows_without_memory_are_skipped(monkeypatch, error):
    monkeypatch.setattr(copies, "Geometry", Mock(side_effect=error))
    [row] = rows.guarded("copies", lambda: copies.check_copies(CPU, 0), [])
    assert (row.verdict, row.text.partition(":")[0]) == ("skipped", "stopped, too little memory")


@pytest.mark.slow
def test_killed_writer_without_folder_is_named(tmp_path):
    entry = {"type": "disk", "path": str(tmp_path / "file" / "kv"), "capacity": "128MiB"}
    (tmp_path / "file").write_text("")
    [row] = rows.guarded("disk", lambda: kills.check_kills("disk", entry, 0), [str(tmp_path)])
    assert row.verdict == "WRONG"
    assert "***/file" in row.text
