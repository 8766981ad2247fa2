"""The disk tier on damaged, hostile and failing directories: each test was a fault once."""

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from stores import load, store, until, wait_for_reset

from kvcache.epoch import Epoch
from kvcache.tiers.disk import directory as directory_module
from kvcache.tiers.disk import tier as tier_module
from kvcache.tiers.disk.directory import TierDirectory, clear_directory
from kvcache.tiers.disk.header import TierDirectoryError
from kvcache.tiers.disk.maintenance import compact_tier, inspect_tier, verify_tier
from kvcache.tiers.disk.slot_table import SlotTable
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

OF_V1 = Epoch.of_version("v1").of_fingerprint({})
FILES = ["kvcache.json", "lock", "data", "records", "recency"]


def raiser(error):
    """Return a function that raises this error, or the OSError of this number."""

    def fail(*args, **options):
        raise error if isinstance(error, Exception) else OSError(error, os.strerror(error))

    return fail


def test_power_cut_leaves_whole_directory(bench, monkeypatch):
    """Each change of a directory is durable before the next one that relies on it."""
    calls = []

    def record(name, call, *args, **options):
        calls.append("fsync folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else name)
        return call(*args, **options)

    for name in ("pwrite", "ftruncate", "fsync", "fdatasync", "replace", "unlink"):
        monkeypatch.setattr(os, name, partial(record, name, getattr(os, name)))
    monkeypatch.setattr(tier_module, "_MARK_S", 60)
    header, lock = ["unlink", "pwrite", "fsync", "replace", "fsync folder"], ["pwrite"]
    lengths = ["ftruncate", "fsync"] * 3
    tier = bench.open(preallocate=False, flush_interval_s=1000)
    assert calls == ["fsync folder", *lock, *header, *["ftruncate", "ftruncate", "fsync"] * 3, *header]
    store(tier, bench.keys(0, 1))
    calls.clear()
    tier.flush()
    assert sorted(calls) == ["fdatasync", "fdatasync", "pwrite"]
    calls.clear()
    tier.reset()
    wait_for_reset(tier)
    assert calls == [*lock, *header], "the mark is first, and the reset is reported once synced"
    tier.shutdown()
    calls.clear()
    bench.open(num_blocks=8, preallocate=False).shutdown()
    # At the end, the blocks and how worn the disk is.
    assert calls[:-4] == [*lock, *header, *lengths, *header]
    assert calls[-4:] == ["fdatasync", "fdatasync", "pwrite", "pwrite"]
    calls.clear()
    compact_tier(bench.path)
    assert calls == [*lock, "fdatasync", "fdatasync", *header, "ftruncate", "ftruncate", *header, *lengths, *header]
    calls.clear()
    clear_directory(bench.path)
    assert calls == [*lock, "fsync", *["unlink"] * 5], "without a header, the lock shows whose the files are"


def test_kill_after_reset_restores_nothing(bench, tier, monkeypatch, tmp_path):
    tier.reset()
    wait_for_reset(tier)
    store(tier, bench.keys(0, 1))
    released = threading.Event()
    write_header = TierDirectory.write_header

    def late(self, header):
        released.wait()
        write_header(self, header)

    mark_void = TierDirectory.mark_void
    monkeypatch.setattr(TierDirectory, "write_header", late)
    monkeypatch.setattr(TierDirectory, "mark_void", lambda *args: (time.sleep(0.05), mark_void(*args)))
    monkeypatch.setattr(tier_module, "_MARK_S", 60)
    tier.reset()
    # A killed process leaves a directory without a header.
    shutil.copytree(bench.path, tmp_path / "left")
    assert bench.open(read_only=True).stats().num_held == 0
    released.set()
    wait_for_reset(tier)
    tier.shutdown()
    for path in (bench.path, tmp_path / "left"):
        tier = bench.open(path=path)
        assert tier.stats().num_held == 0
        store(tier, bench.keys(2))
        tier.shutdown()
        assert load(bench.open(path=path), bench.keys(2)).done == bench.keys(2)


def test_hung_mark_keeps_files_open(bench, monkeypatch):
    monkeypatch.setattr(tier_module, "_CLOSE_S", 0.01)
    released, start = threading.Event(), tier_module.Background
    monkeypatch.setattr(tier_module, "Background", lambda name, run: start(name, lambda s: (released.wait(), run(s))))
    tier = bench.open()
    tier.reset("v1")
    wait_for_reset(tier)
    store(tier, bench.keys(0))
    tier.shutdown()
    assert os.path.samestat(os.fstat(tier._store.fd), (bench.path / "data").stat())
    released.set()
    assert all(mark.stop(60) for mark in tier._marks)
    tier._store.close()
    # Even late, it is the mark of the blocks before the reset.
    assert load(bench.open(fingerprint=OF_V1), bench.keys(0)).done == bench.keys(0)


def test_reset_at_largest_epoch_continues(bench):
    bench.open().shutdown()
    bench.edit_header(epoch=(1 << 32) - 1)
    tier = bench.open()
    store(tier, bench.keys(0))
    tier.reset("v1")
    wait_for_reset(tier)
    store(tier, bench.keys(1))
    tier.shutdown()
    tier = bench.open(fingerprint=OF_V1)
    assert [tier.lookup([key]) for key in bench.keys(0, 1)] == [0, 1]


@pytest.mark.parametrize("names", [["data", "records"], ["data", "records", "recency", "lock"]])
def test_foreign_models_files_are_not_served(bench, tmp_path, names):
    bench.leave(*range(16), path=tmp_path / "other", fingerprint={"model": "b"})
    bench.open(fingerprint={"model": "a"}).shutdown()
    for name in names:
        shutil.copy(tmp_path / "other" / name, bench.path / name)
    tier = bench.open(fingerprint={"model": "a"})
    assert tier.stats().num_held == 0
    assert tier.lookup(bench.keys(0)) == 0


def test_data_of_other_model_is_refused(bench, tmp_path):
    for name in ("a", "b"):
        bench.leave(*range(8), path=tmp_path / name, fingerprint={"model": name})
    assert (tmp_path / "a" / "data").read_bytes() == (tmp_path / "b" / "data").read_bytes()
    tier = bench.open(path=tmp_path / "a", fingerprint={"model": "a"})
    records = (tmp_path / "a" / "records").read_bytes(), (tmp_path / "b" / "records").read_bytes()
    assert records[0][8:16] != records[1][8:16], "the checksum of the same key and bytes is another model's, too"
    assert sorted(load(tier, bench.keys(*range(8))).done) == bench.keys(*range(8))


def test_tier_on_hung_mount_is_unavailable(bench, monkeypatch, caplog):
    released, init = threading.Event(), TierDirectory.__init__
    monkeypatch.setattr(TierDirectory, "__init__", lambda *args: (released.wait(), init(*args))[1])
    tier = bench.open(open_timeout_s=0.05)
    assert tier.stats().unavailable_reason == "opening"
    assert f"directory {bench.path} has not opened within 0.05 s" in caplog.text
    keys = bench.keys(0)
    assert (tier.lookup(keys), tier.submit_store(1, keys, [0]), tier.submit_load(2, keys, [0])) == (0, False, False)
    tier.touch(keys)
    assert tier.get_finished() == []
    released.set()
    wait_for_reset(tier)
    assert store(tier, keys).done == keys
    assert load(tier, keys).done == keys


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "link", "directory"])
def test_irregular_file_is_refused_at_once(bench, tmp_path, name, kind):
    bench.leave(0)
    path = bench.path / name
    path.rename(tmp_path / "original")
    if kind == "link":
        path.symlink_to(tmp_path / "original")
    elif kind == "directory":
        path.mkdir()
    else:
        try:
            os.mknod(path, 0o600 | {"fifo": stat.S_IFIFO, "device": stat.S_IFCHR, "socket": stat.S_IFSOCK}[kind])
        except PermissionError:
            pytest.skip("needs the right to make a device")
    for use in (bench.open, lambda: bench.open(read_only=True), lambda: inspect_tier(bench.path)):
        with pytest.raises(TierDirectoryError, match=f"{name} must be a regular file"):
            use()
    path.rmdir() if kind == "directory" else path.unlink()
    (tmp_path / "original").rename(path)
    assert load(bench.open(), bench.keys(0)).done == bench.keys(0)


def test_huge_header_is_refused_unread(bench):
    bench.open().shutdown()
    os.truncate(bench.path / "kvcache.json", 1 << 40)
    with pytest.raises(TierDirectoryError, match="not a disk tier's header: it has more than 32768 bytes"):
        bench.open()


def test_process_ends_despite_hung_io_thread(tmp_path):
    code = (
        "import sys, threading, numpy as np\n"
        "from kvcache.tiers.base import job_tier\n"
        "from kvcache.tiers.disk.tier import DiskOptions, DiskTier\n"
        "job_tier._SHUTDOWN_S = 0.1\n"
        "tier = DiskTier(DiskOptions(path=sys.argv[1], capacity=1 << 20), np.zeros((4, 4096), np.uint8))\n"
        "tier._store.write_payload = lambda slot, rows: threading.Event().wait()\n"
        "assert tier.submit_store(1, [b'k'], [0])\n"
        "tier.shutdown()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "t")], timeout=100, check=False)
    assert ended.returncode == 0


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_directory_is_the_owners_alone(bench):
    old = os.umask(0)
    try:
        bench.open()
    finally:
        os.umask(old)
    assert mode_of(bench.path) == 0o700
    assert {name: mode_of(bench.path / name) for name in FILES} == dict.fromkeys(FILES, 0o600)
    assert inspect_tier(bench.path).shared_names == []


def test_writer_repairs_modes_of_directory(bench):
    bench.open().shutdown()
    bench.path.chmod(0o755)
    for name in FILES:
        (bench.path / name).chmod(0o755)
    assert inspect_tier(bench.path).shared_names == [".", *sorted(FILES)]
    bench.open(read_only=True)
    assert mode_of(bench.path / "data") == 0o755
    bench.open().shutdown()
    assert inspect_tier(bench.path).shared_names == []


@pytest.mark.parametrize("name", ["thesis.tex", "data", "records"])
def test_foreign_directory_is_left_unchanged(bench, name):
    bench.path.mkdir(mode=0o755)
    bench.path.chmod(0o755)
    (bench.path / name).write_text("precious")
    with pytest.raises(TierDirectoryError, match="is no disk tier"):
        bench.open()
    assert mode_of(bench.path) == 0o755
    assert [(path.name, path.read_text()) for path in bench.path.iterdir()] == [(name, "precious")]


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("stage", ["void", "payload"])
@pytest.mark.parametrize("failed_before", ["nothing", "void", "records"])
def test_kill_inside_store_leaves_misses(bench, monkeypatch, tmp_path, stage, is_reopened, failed_before):
    tier = bench.open(num_blocks=4)
    store(tier, bench.keys(0, 1, 2, 3))
    if is_reopened:
        tier.shutdown()
        tier = bench.open(num_blocks=4)
    pwrite = os.pwrite

    def half_failing(fd, body, offset):
        # Records arrive although their write fails.
        written = pwrite(fd, body, offset) if any(body) or failed_before == "records" else 0
        return raiser(errno.EIO)() if any(body) or failed_before == "void" else written

    if failed_before != "nothing":
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half_failing)
            assert store(tier, bench.keys(4, 5)).done == []
    holder, name = {"void": (tier._store, "write_payload"), "payload": (tier._store.table, "write")}[stage]
    monkeypatch.setattr(holder, name, raiser(errno.EIO))
    store(tier, bench.keys(4, 5))
    shutil.copytree(bench.path, tmp_path / "left")
    left = bench.open(num_blocks=4, path=tmp_path / "left")
    keys = bench.keys(*range(6))
    held = [key for key in keys if left.lookup([key])]
    assert held == keys[2:4]
    assert load(left, held).done == held
    assert left.stats().corrupt_blocks == 0


def test_kill_inside_shrink_leaves_whole_blocks(bench, monkeypatch, tmp_path):
    """A record whose payload was cut off would count as corrupt at the old capacity."""
    bench.leave(*range(16))
    real, copies = os.ftruncate, []

    def cut(fd, num_bytes):
        real(fd, num_bytes)
        copies.append(shutil.copytree(bench.path, tmp_path / str(len(copies))))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", cut)
        bench.open(num_blocks=8).shutdown()
    assert len(copies) > 1
    for path in copies:
        bench.open(path=path).shutdown()
        assert verify_tier(path)[1] == 0


def test_store_overtaken_by_reset_writes_nothing(bench, monkeypatch):
    tier, put = bench.open(), DiskTier.put

    def reset_and_put(self, batch):
        number = self._current[0]
        self.reset()
        until(lambda: self._current[0] != number)
        return put(self, batch)

    monkeypatch.setattr(DiskTier, "put", reset_and_put)
    assert store(tier, bench.keys(0, 1)).done == []
    tier.shutdown()
    assert bench.open().stats().num_held == 0


def test_store_that_ends_early_fails(bench, tier, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, rows, offset: 0 if offset else 4096)
    result = store(tier, bench.keys(0, 1))
    assert (result.done, result.failed) == ([], bench.keys(0, 1))
    assert "takes no more bytes after 4096 of slot" in result.error


def test_first_store_writes_records_once(bench, monkeypatch):
    tier = bench.open(num_blocks=4)
    writes = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: (writes.append(len(args[1])), pwrite(*args))[1])
    store(tier, bench.keys(0, 1))
    assert writes == [256]
    store(tier, bench.keys(2, 3))
    store(tier, bench.keys(4, 5))
    assert writes == [256] * 4, "only slots of a block are emptied before"


@pytest.mark.parametrize("lock", [b"", b"of a spool", b"process of " + bytes(300)])
@pytest.mark.parametrize("name", ["data", "records", "recency"])
def test_foreign_file_beside_lock_stays(bench, lock, name):
    bench.path.mkdir()
    (bench.path / "lock").write_bytes(lock)
    (bench.path / name).write_text("precious")
    assert "is no disk tier" in DiskTier.unavailable_reason(DiskOptions(path=str(bench.path), capacity=1 << 20))
    for use in (lambda: clear_directory(bench.path), bench.open):
        with pytest.raises(TierDirectoryError, match="is no disk tier"):
            use()
        assert (bench.path / name).read_text() == "precious"


@pytest.mark.parametrize("lock", ["kept", "lost", "empty"])
def test_interrupted_clear_is_gone_on_with(bench, monkeypatch, lock):
    bench.leave(0)
    if lock != "kept":
        # A tier of the first format, or one whose unsynced lock a power cut has emptied.
        (bench.path / "lock").unlink()
    if lock == "empty":
        (bench.path / "lock").touch()
    unlink = directory_module.Path.unlink

    def unlink_header(path, **options):
        unlink(path, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(directory_module.Path, "unlink", unlink_header)
    with pytest.raises(KeyboardInterrupt):
        clear_directory(bench.path)
    monkeypatch.undo()
    assert not (bench.path / "kvcache.json").exists()
    assert clear_directory(bench.path) > 0
    assert [path.name for path in bench.path.iterdir()] == ["lock"]
    assert bench.open().stats().num_held == 0


@pytest.mark.parametrize("block_bytes", [4096, 12288, 5000])
@pytest.mark.parametrize("step", [1 << 20, 8192, 4096, 4100])
def test_short_reads_and_writes_continue(bench, monkeypatch, block_bytes, step):
    tier = bench.open(block_bytes=block_bytes)
    pwritev, preadv, pwrite, pread = os.pwritev, os.preadv, os.pwrite, os.pread

    def cut(rows):
        if sum(map(len, rows)) <= step:
            return rows
        return [np.concatenate(rows)[:step]] if not tier.is_direct else rows[:1] if len(rows) > 1 else [rows[0][:4096]]

    monkeypatch.setattr(os, "pwritev", lambda fd, rows, offset: pwritev(fd, cut(rows), offset))

    def short_preadv(fd, rows, offset):
        left, given = step, []
        for row in rows:
            take = min(left, len(row))
            given.append(row[: take if not tier.is_direct else take // 4096 * 4096])
            left -= take
        return preadv(fd, [row for row in given if len(row)], offset)

    monkeypatch.setattr(os, "preadv", short_preadv)
    monkeypatch.setattr(
        os, "pwrite", lambda fd, body, offset: pwrite(fd, memoryview(body)[: max(1, len(body) // 2)], offset)
    )
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, max(1, size // 2), offset))
    keys = bench.keys(*range(10))
    assert sorted(store(tier, keys).done) == keys
    assert sorted(load(tier, keys).done) == keys
    tier.shutdown()
    tier = bench.open(block_bytes=block_bytes)
    assert tier.stats().num_held == 10
    result = load(tier, keys)
    assert (sorted(result.done), tier.stats().corrupt_blocks) == (keys, 0)


def test_two_flipped_bits_break_the_seal(bench):
    bench.leave(0, 1, 2, 3)
    records = bytearray((bench.path / "records").read_bytes())
    # The highest bytes of two words of the first record: the last of the key's words, and one before it.
    records[39] ^= 0x80
    records[95] ^= 0x80
    (bench.path / "records").write_bytes(records)
    assert bench.open().stats().num_held == 3


@pytest.mark.parametrize(
    ("owner", "name", "error", "message"),
    [
        (os, "pwrite", errno.EIO, "Input/output error"),
        (os, "pread", errno.EIO, "Input/output error"),
        (os, "statvfs", errno.EIO, "Input/output error"),
        (SlotTable, "__init__", MemoryError("80 GiB"), "MemoryError: 80 GiB"),
        (SlotTable, "load", errno.EIO, "Input/output error"),
        (threading.Thread, "start", RuntimeError("can't start new thread"), "can't start new thread"),
    ],
)
def test_failed_open_releases_the_lock(bench, monkeypatch, owner, name, error, message):
    bench.open().shutdown()
    monkeypatch.setattr(owner, name, raiser(error))
    with pytest.raises(RuntimeError if name == "start" else TierDirectoryError, match=message) as caught:
        bench.open()
    if owner is SlotTable:
        with pytest.raises(TierDirectoryError, match=message):
            inspect_tier(bench.path)
    monkeypatch.undo()
    bench.open().shutdown()
    del caught


def test_inherited_descriptor_keeps_no_lock(bench, tier):
    inherited = os.dup(tier._store.directory._lock_fd)
    tier.shutdown()
    bench.open().shutdown()
    os.close(inherited)


def test_forked_child_does_not_keep_lock(bench, tier):
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(TierDirectoryError, match="is in use by process"):
        bench.open()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        tier.shutdown()
        bench.open().shutdown()
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_child_of_killed_writer_frees_lock(bench):
    code = (
        "import os, sys, time, numpy as np\n"
        "from kvcache.tiers.disk.tier import DiskOptions, DiskTier\n"
        "tier = DiskTier(DiskOptions(path=sys.argv[1], capacity=1 << 20), np.zeros((4, 4096), np.uint8))\n"
        "if not os.fork():\n"
        "    print(os.getpid(), flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(bench.path)], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        bench.open(num_blocks=16).shutdown()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.parametrize("seq", [(1 << 64) - 1, (1 << 63) - 1, 1 << 62])
def test_largest_seq_costs_order_only(bench, seq):
    tier = bench.open(num_blocks=4)
    store(tier, bench.keys(0, 1))
    check = int(tier._store.table.checksums[0])
    tier._store.table.write(0, [seq], bench.keys(0), [check], tier._current[1])
    tier.shutdown()
    for first in (2, 5):
        tier = bench.open(num_blocks=4)
        tier.touch(bench.keys(0))
        keys = bench.keys(first, first + 1)
        assert sorted(store(tier, keys).done) == keys
        assert sorted(load(tier, keys).done) == keys
        tier.shutdown()
    assert inspect_tier(bench.path).num_held == 4


HEADERS = {
    "not text": b"\xff\xfe\x00",
    "nested": b"[" * 30000,
    "long number": b'{"format": ' + b"9" * 20000 + b"}",
    "list": b"[1, 2]",
    "null": b"null",
    "nan": b'{"format": NaN, "version": Infinity}',
    "empty": b"",
    "lone surrogate": b'{"format": "\\ud800", "version": 3}',
    "unhashable": b'{"format": {}, "version": []}',
    "no such": b'{"format": "kvcache disk tier", "version": 3}',
    "first format": {"version": 1},
    "huge": {"num_slots": 1 << 80},
    "huge resized": {"num_slots": 1 << 60, "resizing": True},
    "many slots": {"num_slots": 10**10},
    "no slots": {"num_slots": 0},
    "boolean": {"num_slots": True},
    "huge block": {"block_bytes": 1 << 61, "resizing": True},
    "float": {"epoch": 1.0},
    "text": {"epoch": "x"},
    "epoch 0": {"epoch": 0},
    "huge epoch": {"epoch": 1 << 32},
    "salt": {"salt": 1 << 64},
    "no salt": {"salt": 0},
    "resizing": {"resizing": "no"},
    "fingerprint": {"fingerprint": []},
    "unknown": {"colour": "blue"},
}
CAUSES = {
    "first format": "version 1, not .* version 3",
    "no slots": "not a disk tier's header: num_slots must be an int >= 1, got 0",
    "text": "not a disk tier's header: epoch must be an int in 1..4294967295, got 'x'",
    "epoch 0": "epoch must be an int in 1..4294967295, got 0",
    "huge epoch": "epoch must be an int in 1..4294967295, got 4294967296",
    "resizing": "not a disk tier's header: resizing must be true or false, got 'no'",
}


@pytest.mark.parametrize("name", HEADERS)
def test_any_header_raises_one_error(bench, name):
    bench.leave(0)
    header = HEADERS[name]
    if isinstance(header, bytes):
        (bench.path / "kvcache.json").write_bytes(header)
    else:
        bench.edit_header(**header)
    refused = [
        lambda: bench.open(read_only=True),
        lambda: inspect_tier(bench.path),
        lambda: verify_tier(bench.path),
        lambda: verify_tier(bench.path, wipe=True),
        lambda: compact_tier(bench.path),
    ]
    if name != "many slots":  # the capacity that is asked for replaces it
        refused.append(bench.open)
    for use in refused:
        with pytest.raises(TierDirectoryError, match=CAUSES.get(name)):
            use()
    if name == "many slots":
        assert store(bench.open(), bench.keys(1)).done == bench.keys(1)


@pytest.mark.parametrize("name", ["data", "records", "recency"])
def test_unreadable_file_raises_one_error(bench, monkeypatch, name):
    bench.leave(0)
    open_file = TierDirectory.open_file

    def fail(self, opened, flags):
        if opened == name:
            raiser(errno.EIO)()
        return open_file(self, opened, flags)

    monkeypatch.setattr(TierDirectory, "open_file", fail)
    uses = [bench.open, lambda: bench.open(read_only=True)]
    uses += [lambda: verify_tier(bench.path), lambda: inspect_tier(bench.path)]
    for use in uses:
        with pytest.raises(TierDirectoryError, match="Input/output error"):
            use()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_corrupt_blocks_warn_once_a_minute(bench, tier, caplog, monkeypatch):
    store(tier, bench.keys(*range(8)))
    with (bench.path / "data").open("r+b") as file:
        file.write(bytes(8 * 4096))
    for number in range(8):
        assert load(tier, bench.keys(number)).failed == bench.keys(number)
    (message,) = warnings_of(caplog)
    assert message.startswith(f"disk tier {bench.path}: 1 blocks did not verify and count as misses")
    assert tier.stats().corrupt_blocks == 8
    monkeypatch.setattr("kvcache.tiers.base.log_limiter._INTERVAL_S", 0.0)
    store(tier, bench.keys(0))
    with (bench.path / "data").open("r+b") as file:
        file.write(bytes(8 * 4096))
    load(tier, bench.keys(0))
    assert warnings_of(caplog)[1].endswith("(and 7 more since the last warning)")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_failing_moves_warn_until_one_succeeds(bench, tier, monkeypatch, caplog, number):
    store(tier, bench.keys(0))
    monkeypatch.setattr(os, "preadv", raiser(number))
    assert load(tier, bench.keys(0)).failed == bench.keys(0)
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwritev", raiser(number))
    for i in range(1, 4):
        assert store(tier, bench.keys(i)).failed == bench.keys(i)
    text = f"OSError: [Errno {number}] {os.strerror(number)}"
    assert tier.stats().unavailable_reason == f"writes fail: {text}"
    assert (tier.stats().io_errors, tier.stats().last_error) == (4, text)
    assert warnings_of(caplog) == [f"disk tier {bench.path}: a {move} failed: {text}" for move in ("load", "store")]
    assert load(tier, bench.keys(0)).done == bench.keys(0)
    monkeypatch.undo()
    store(tier, bench.keys(1))
    assert tier.stats().unavailable_reason == ""


def test_unreadable_directory_is_not_removed(bench, monkeypatch):
    tier = bench.open(flush_interval_s=0.01)
    store(tier, bench.keys(0))
    monkeypatch.setattr(directory_module.Path, "stat", raiser(errno.EIO))
    until(lambda: tier.stats().io_errors)
    monkeypatch.undo()
    assert tier.stats().unavailable_reason == ""
    assert load(tier, bench.keys(0)).done == bench.keys(0)


def test_unsearchable_directory_is_the_reason(bench, monkeypatch):
    monkeypatch.setattr(directory_module.Path, "iterdir", raiser(errno.EACCES))
    assert "Permission denied" in DiskTier.unavailable_reason(DiskOptions(path=str(bench.path), capacity=1 << 20))


def test_unchangeable_modes_are_warned_of(bench, monkeypatch, caplog):
    bench.open().shutdown()
    bench.path.chmod(0o755)

    monkeypatch.setattr(directory_module.os, "fchmod", raiser(errno.EPERM))
    bench.open()
    assert "that others may read (mode drwxr-xr-x), and that cannot be changed: Operation not permitted" in caplog.text


def of_weights(weights):
    return {"fingerprint": {"model": "m", "weights": weights}}


def test_private_blocks_end_with_their_process(bench):
    bench.leave(0, **of_weights("sha256:a"))
    tier = bench.open(**of_weights("sha256:a"))
    tier.reset()
    wait_for_reset(tier)
    store(tier, bench.keys(1))
    private = inspect_tier(bench.path).fingerprint["weights"]
    assert private.startswith("private:")
    # Not even for one that reads beside it.
    assert bench.open(read_only=True, **of_weights("sha256:a")).stats().num_held == 0
    assert bench.open(read_only=True, **of_weights(private)).stats().num_held == 1
    tier.shutdown()
    bench.leave(2, **of_weights("sha256:a"))
    tier = bench.open(**of_weights("sha256:a"))
    assert [tier.lookup([key]) for key in bench.keys(0, 1, 2)] == [0, 0, 1]
    assert inspect_tier(bench.path).fingerprint["weights"] == "sha256:a"


@pytest.mark.parametrize(("weights", "num_held"), [
    ("version:7", 1), ("version:8", 0), ("sha256:a", 0), ("sha256:b", 0), (None, 0),
])  # fmt: skip
def test_named_blocks_are_found_by_name(bench, weights, num_held):
    tier = bench.open(**of_weights("sha256:a"))
    store(tier, bench.keys(0))
    tier.reset(7)
    wait_for_reset(tier)
    store(tier, bench.keys(1))
    tier.shutdown()
    tier = bench.open(**of_weights(weights))
    assert (tier.stats().num_held, tier.lookup(bench.keys(0))) == (num_held, 0)


def test_weights_of_files_are_refused(bench):
    bench.leave(0, **of_weights("sha256:a"))
    with pytest.raises(TierDirectoryError, match=r"another fingerprint: weights 'sha256:a' is not 'sha256:b'"):
        bench.open(**of_weights("sha256:b"))
    with pytest.raises(TierDirectoryError, match="another fingerprint: model 'm' is not 'n'"):
        bench.open(fingerprint={"model": "n", "weights": "version:7"})
    # A version is set on purpose, so the directory is not the wrong one.
    assert bench.open(**of_weights("version:7")).stats().num_held == 0


def test_reset_without_note_stores_nothing(bench, monkeypatch):
    tier = bench.open(**of_weights("sha256:a"))
    store(tier, bench.keys(0))
    monkeypatch.setattr(TierDirectory, "mark_void", raiser(errno.EIO))
    monkeypatch.setattr(TierDirectory, "write_header", raiser(errno.ENOSPC))
    tier.reset()
    until(lambda: tier.stats().unavailable_reason.startswith("reset failed"))
    assert not tier.submit_store(5, bench.keys(1), [1])
    tier.shutdown()
    monkeypatch.undo()
    # The blocks from before the reset are of the files still.
    tier = bench.open(**of_weights("sha256:a"))
    assert [tier.lookup([key]) for key in bench.keys(0, 1)] == [1, 0]
