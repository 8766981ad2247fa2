"""The disk tier on damaged, hostile and failing directories: each test was a fault once."""

import errno
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from kvcache.tiers.disk import directory as directory_module
from kvcache.tiers.disk.directory import TierDirectory, TierDirectoryError
from kvcache.tiers.disk.maintenance import compact_tier, inspect_tier, verify_tier
from kvcache.tiers.disk.slot_table import SlotTable
from kvcache.tiers.disk.tier import DiskTier

FILES = ["kvcache.json", "lock", "data", "records", "recency"]


def raiser(number):
    """Return a function that raises OSError with this number."""

    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    return fail


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# --- resets ----------------------------------------------------------------------------------------------------------


def test_reset_is_reported_only_once_header_and_directory_are_synced(bench, monkeypatch):
    tier = bench.open()
    bench.store(tier, bench.keys(0, 1))
    calls = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *args, **kw: (calls.append("replace"), replace(*args, **kw)))

    def recorded_fsync(fd):
        calls.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    tier.reset()
    bench.settle(tier)
    assert calls == ["file", "replace", "directory"]


def test_kill_right_after_reset_brings_nothing_back(bench, monkeypatch, tmp_path):
    tier = bench.open()
    bench.store(tier, bench.keys(0, 1))
    released = threading.Event()
    write_header = TierDirectory.write_header

    def late(self, header):
        released.wait()
        write_header(self, header)

    monkeypatch.setattr(TierDirectory, "write_header", late)
    tier.reset()
    # A killed process leaves a directory without a header.
    shutil.copytree(bench.path, tmp_path / "left")
    assert bench.open(read_only=True).stats().num_held == 0
    released.set()
    bench.settle(tier)
    assert bench.open(path=tmp_path / "left").stats().num_held == 0
    bench.store(tier, bench.keys(2))
    tier.shutdown()
    assert bench.load(bench.open(), bench.keys(2)).done == bench.keys(2)


def test_reset_at_the_largest_epoch_goes_on(bench):
    bench.open().shutdown()
    header = bench.path / "kvcache.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"epoch": (1 << 32) - 1}))
    tier = bench.open()
    bench.store(tier, bench.keys(0))
    tier.reset()
    bench.settle(tier)
    bench.store(tier, bench.keys(1))
    tier.shutdown()
    tier = bench.open()
    assert [tier.lookup([key]) for key in bench.keys(0, 1)] == [0, 1]


# --- whose blocks these are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["data", "records"], ["data", "records", "recency", "lock"]])
def test_files_of_another_model_are_not_served(bench, tmp_path, names):
    other = bench.open(path=tmp_path / "other", fingerprint={"model": "b"})
    bench.store(other, bench.keys(*range(16)))
    other.shutdown()
    bench.open(fingerprint={"model": "a"}).shutdown()
    for name in names:
        shutil.copy(tmp_path / "other" / name, bench.path / name)
    tier = bench.open(fingerprint={"model": "a"})
    assert tier.stats().num_held == 0
    assert tier.lookup(bench.keys(0)) == 0


def test_data_of_another_model_under_own_records_is_not_served(bench, tmp_path):
    for name in ("a", "b"):
        tier = bench.open(path=tmp_path / name, fingerprint={"model": name})
        bench.store(tier, bench.keys(*range(8)))
        tier.shutdown()
    assert (tmp_path / "a" / "data").read_bytes() == (tmp_path / "b" / "data").read_bytes()
    tier = bench.open(path=tmp_path / "a", fingerprint={"model": "a"})
    records = (tmp_path / "a" / "records").read_bytes(), (tmp_path / "b" / "records").read_bytes()
    assert records[0][8:16] != records[1][8:16], "the checksum of the same key and bytes is another model's, too"
    assert sorted(bench.load(tier, bench.keys(*range(8))).done) == bench.keys(*range(8))


def test_fingerprints_that_only_python_calls_equal_are_told_apart(bench):
    bench.open(fingerprint={"layers": 1}).shutdown()
    with pytest.raises(TierDirectoryError, match="blocks of another fingerprint"):
        bench.open(fingerprint={"layers": True})


def test_directory_of_the_first_format_is_refused(bench):
    bench.open().shutdown()
    header = bench.path / "kvcache.json"
    values = json.loads(header.read_text()) | {"version": 1}
    del values["salt"]
    header.write_text(json.dumps(values))
    with pytest.raises(TierDirectoryError, match=r"version 1, not .* version 3; its records do not say whose they are"):
        bench.open()


def open_when_released(monkeypatch):
    """Let a directory open once the returned event is set."""
    released, init = threading.Event(), TierDirectory.__init__
    monkeypatch.setattr(TierDirectory, "__init__", lambda *args: (released.wait(), init(*args))[1])
    return released


# --- what hangs ------------------------------------------------------------------------------------------------------


def test_tier_on_a_mount_that_hangs_is_there_and_unavailable(bench, monkeypatch, caplog):
    released = open_when_released(monkeypatch)
    tier = bench.open(open_timeout_s=0.05)
    assert tier.stats().unavailable_reason == "opening"
    assert f"directory {bench.path} has not opened within 0.05 s" in caplog.text
    keys = bench.keys(0)
    assert (tier.lookup(keys), tier.submit_store(1, keys, [0]), tier.submit_load(2, keys, [0])) == (0, False, False)
    tier.touch(keys)
    assert tier.get_finished() == []
    released.set()
    wait_for(lambda: tier.stats().unavailable_reason == "")
    assert bench.store(tier, keys).done == keys
    assert bench.load(tier, keys).done == keys


def test_reset_before_the_directory_is_open_is_not_forgotten(bench, monkeypatch):
    tier = bench.open()
    bench.store(tier, bench.keys(0))
    tier.shutdown()
    released = open_when_released(monkeypatch)
    tier = bench.open(open_timeout_s=0.02)
    tier.reset()
    released.set()
    wait_for(lambda: tier.get_finished() == [] and not tier.stats().unavailable_reason)
    assert tier.stats().num_held == 0
    tier.shutdown()
    assert bench.open().stats().num_held == 0


def test_tier_that_never_opens_can_be_shut_down(bench, monkeypatch):
    released = open_when_released(monkeypatch)
    monkeypatch.setattr("kvcache.tiering.job_tier._SHUTDOWN_S", 0.02)
    tier = bench.open(open_timeout_s=0.02)
    tier.shutdown()
    released.set()
    tier._control.stop(20)
    monkeypatch.undo()
    bench.open().shutdown()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "link", "directory"])
def test_what_is_no_regular_file_is_refused_at_once(bench, tmp_path, name, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tier = bench.open()
    bench.store(tier, bench.keys(0))
    tier.shutdown()
    path = bench.path / name
    path.rename(tmp_path / "original")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("needs the right to make a device")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"tier/{name}")
    elif kind == "link":
        path.symlink_to(tmp_path / "original")
    else:
        path.mkdir()
    for use in (bench.open, lambda: bench.open(read_only=True), lambda: inspect_tier(bench.path)):
        since = time.monotonic()
        with pytest.raises(TierDirectoryError, match=f"{name} must be a regular file"):
            use()
        assert time.monotonic() - since < 60
    path.rmdir() if kind == "directory" else path.unlink()
    (tmp_path / "original").rename(path)
    assert bench.load(bench.open(), bench.keys(0)).done == bench.keys(0)


def test_huge_header_is_refused_unread(bench):
    bench.open().shutdown()
    os.truncate(bench.path / "kvcache.json", 1 << 40)
    with pytest.raises(TierDirectoryError, match="not a disk tier's header: it has more than 32768 bytes"):
        bench.open()


def test_process_ends_while_its_io_thread_hangs(tmp_path):
    code = (
        "import sys, threading, numpy as np\n"
        "from kvcache.tiering import job_tier\n"
        "from kvcache.tiers.disk.tier import DiskTier\n"
        "job_tier._SHUTDOWN_S = 0.1\n"
        "tier = DiskTier(sys.argv[1], 1 << 20, np.zeros((4, 4096), np.uint8))\n"
        "tier._store.write_payload = lambda slot, rows: threading.Event().wait()\n"
        "assert tier.submit_store(1, [b'k'], [0])\n"
        "tier.shutdown()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "t")], timeout=100, check=False)
    assert ended.returncode == 0


# --- access by other users -------------------------------------------------------------------------------------------


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_directory_and_files_are_the_owners_alone(bench):
    old = os.umask(0)
    try:
        bench.open()
    finally:
        os.umask(old)
    assert mode_of(bench.path) == 0o700
    assert {name: mode_of(bench.path / name) for name in FILES} == dict.fromkeys(FILES, 0o600)
    assert inspect_tier(bench.path).shared_names == []


def test_modes_of_an_existing_directory_are_mended_by_its_writer(bench):
    bench.open().shutdown()
    bench.path.chmod(0o755)
    for name in FILES:
        (bench.path / name).chmod(0o755)
    assert inspect_tier(bench.path).shared_names == [".", *sorted(FILES)]
    bench.open(read_only=True)
    assert mode_of(bench.path / "data") == 0o755
    bench.open().shutdown()
    assert inspect_tier(bench.path).shared_names == []


def test_directory_of_something_else_is_left_as_it_was(bench):
    bench.path.mkdir(mode=0o755)
    bench.path.chmod(0o755)
    (bench.path / "thesis.tex").write_text("precious")
    with pytest.raises(TierDirectoryError, match="is no disk tier"):
        bench.open()
    assert mode_of(bench.path) == 0o755
    assert [path.name for path in bench.path.iterdir()] == ["thesis.tex"]


# --- short reads and writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [4096, 12288, 5000])
@pytest.mark.parametrize("step", [1 << 20, 8192, 4096, 4100])
def test_short_reads_and_writes_are_gone_on_with(bench, monkeypatch, block_bytes, step):
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
    assert sorted(bench.store(tier, keys).done) == keys
    assert sorted(bench.load(tier, keys).done) == keys
    tier.shutdown()
    tier = bench.open(block_bytes=block_bytes)
    assert tier.stats().num_held == 10
    result = bench.load(tier, keys)
    assert (sorted(result.done), tier.stats().corrupt_blocks) == (keys, 0)


def test_two_top_bits_that_flip_in_a_record_break_its_seal(bench):
    tier = bench.open()
    keys = bench.keys(*range(4))
    bench.store(tier, keys)
    tier.shutdown()
    records = bytearray((bench.path / "records").read_bytes())
    # The highest bytes of two words of the first record: the last of the key's words, and one before it.
    records[39] ^= 0x80
    records[95] ^= 0x80
    (bench.path / "records").write_bytes(records)
    tier = bench.open()
    assert tier.stats().num_held == 3


def test_less_than_an_aligned_piece_is_moved_again(bench, monkeypatch):
    tier = bench.open()
    if not tier.is_direct:
        pytest.skip("no way past the page cache here")
    calls = Counter()

    def stingy(call):
        def moved(fd, rows, offset):
            calls[call.__name__] += 1
            moved = call(fd, rows, offset)
            return min(moved, 100) if calls[call.__name__] % 3 else moved

        return moved

    monkeypatch.setattr(os, "pwritev", stingy(os.pwritev))
    monkeypatch.setattr(os, "preadv", stingy(os.preadv))
    keys = bench.keys(*range(6))
    assert sorted(bench.store(tier, keys).done) == sorted(keys)
    assert sorted(bench.load(tier, keys).done) == sorted(keys)
    assert calls["pwritev"] >= 3
    assert calls["preadv"] >= 3


# --- locks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["os.pwrite", "os.pread", "os.statvfs"])
def test_failed_open_gives_the_lock_back(bench, monkeypatch, call):
    bench.open().shutdown()
    monkeypatch.setattr(call, raiser(errno.EIO))
    with pytest.raises(TierDirectoryError) as caught:
        bench.open()
    monkeypatch.undo()
    bench.open().shutdown()
    del caught


def test_thread_that_cannot_be_had_leaves_no_lock(bench, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        bench.open()
    monkeypatch.undo()
    bench.open().shutdown()


def test_forked_child_does_not_keep_the_lock(bench):
    tier = bench.open()
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


def test_child_of_a_killed_writer_does_not_keep_the_lock(bench):
    code = (
        "import os, sys, time, numpy as np\n"
        "from kvcache.tiers.disk.tier import DiskTier\n"
        "tier = DiskTier(sys.argv[1], 1 << 20, np.zeros((4, 4096), np.uint8))\n"
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


def test_forking_leaves_the_parents_lock_alone(bench):
    bench.open()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(TierDirectoryError, match="is in use by process"):
        bench.open()


# --- records of any bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [(1 << 64) - 1, (1 << 63) - 1, 1 << 62])
def test_record_with_the_largest_seq_costs_order_and_nothing_else(bench, seq):
    tier = bench.open(num_blocks=4)
    bench.store(tier, bench.keys(0, 1))
    check = int(tier._store.table.checksums[0])
    tier._store.table.write(0, [seq], bench.keys(0), [check], tier._current[1])
    tier.shutdown()
    for first in (2, 5):
        tier = bench.open(num_blocks=4)
        tier.touch(bench.keys(0))
        keys = bench.keys(first, first + 1)
        assert sorted(bench.store(tier, keys).done) == keys
        assert sorted(bench.load(tier, keys).done) == keys
        tier.shutdown()
    assert inspect_tier(bench.path).num_held == 4


# --- errors ----------------------------------------------------------------------------------------------------------

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
}


def header_with(**changes):
    values = {
        "format": "kvcache disk tier",
        "version": 3,
        "block_bytes": 4096,
        "num_slots": 16,
        "epoch": 1,
        "salt": 1,
        "fingerprint": {},
        "resizing": False,
    }
    return json.dumps(values | changes).encode()


HEADERS |= {
    "huge": header_with(num_slots=1 << 80),
    "huge resized": header_with(num_slots=1 << 60, resizing=True),
    "many slots": header_with(num_slots=10**10),
    "huge block": header_with(block_bytes=1 << 61, resizing=True),
    "boolean": header_with(num_slots=True),
    "float": header_with(epoch=1.0),
    "salt": header_with(salt=1 << 64),
    "no salt": header_with(salt=0),
    "fingerprint": header_with(fingerprint=[]),
    "unknown": header_with(colour="blue"),
    "no such": b'{"format": "kvcache disk tier", "version": 3}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_header_of_any_bytes_is_one_kind_of_error(bench, name):
    tier = bench.open()
    bench.store(tier, bench.keys(0))
    tier.shutdown()
    (bench.path / "kvcache.json").write_bytes(HEADERS[name])
    uses = [
        lambda: bench.open(read_only=True),
        lambda: inspect_tier(bench.path),
        lambda: verify_tier(bench.path),
        lambda: verify_tier(bench.path, wipe=True),
        lambda: compact_tier(bench.path),
    ]
    for use in uses:
        with pytest.raises(TierDirectoryError):
            use()
    if name == "many slots":  # the capacity that is asked for replaces it
        assert bench.store(bench.open(), bench.keys(1)).done == bench.keys(1)
        return
    with pytest.raises(TierDirectoryError):
        bench.open()


@pytest.mark.parametrize("name", ["data", "records", "recency"])
@pytest.mark.parametrize("damage", ["missing", "short", "unreadable"])
def test_damaged_file_is_one_kind_of_error_everywhere(bench, monkeypatch, name, damage):
    tier = bench.open()
    bench.store(tier, bench.keys(0))
    tier.shutdown()
    if damage == "missing":
        (bench.path / name).unlink()
    elif damage == "short":
        os.truncate(bench.path / name, 3)
    else:
        open_file = TierDirectory.open_file

        def fail(self, opened, flags):
            if opened == name:
                raise OSError(errno.EIO, "Input/output error")
            return open_file(self, opened, flags)

        monkeypatch.setattr(TierDirectory, "open_file", fail)
    for use in (lambda: bench.open(read_only=True), lambda: inspect_tier(bench.path), lambda: verify_tier(bench.path)):
        try:
            use()
        except TierDirectoryError:
            continue
    if damage == "unreadable":
        with pytest.raises(TierDirectoryError):
            bench.open()
    else:
        assert bench.store(bench.open(), bench.keys(1)).done == bench.keys(1)


def test_memory_that_cannot_be_had_is_the_directorys_error(bench, monkeypatch):
    bench.open().shutdown()

    def fail(self, *args):
        raise MemoryError("Unable to allocate 80. GiB")

    monkeypatch.setattr(SlotTable, "__init__", fail)
    for use in (bench.open, lambda: inspect_tier(bench.path)):
        with pytest.raises(TierDirectoryError, match=r"MemoryError: Unable to allocate 80\. GiB"):
            use()
    monkeypatch.undo()
    bench.open().shutdown()


def test_deeply_nested_fingerprint_is_refused(bench):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="fingerprint must be what JSON can say"):
        bench.open(fingerprint={"model": nested})
    with pytest.raises(ValueError, match="fingerprint must be what JSON can say"):
        bench.open(fingerprint={"model": float("nan")})
    with pytest.raises(TierDirectoryError, match="fingerprint must be at most 16384 bytes of JSON"):
        bench.open(fingerprint={"model": "m" * 20000})


# --- what the log says -----------------------------------------------------------------------------------------------


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_corrupt_blocks_are_warned_of_once_a_minute(bench, caplog, monkeypatch):
    tier = bench.open()
    bench.store(tier, bench.keys(*range(8)))
    with (bench.path / "data").open("r+b") as file:
        file.write(bytes(8 * 4096))
    for number in range(8):
        assert bench.load(tier, bench.keys(number)).failed == bench.keys(number)
    (message,) = warnings_of(caplog)
    assert message.startswith(f"disk tier {bench.path}: 1 blocks did not verify and count as misses")
    assert tier.stats().corrupt_blocks == 8
    monkeypatch.setattr("kvcache.tiering.log_limiter._INTERVAL_S", 0.0)
    bench.store(tier, bench.keys(0))
    with (bench.path / "data").open("r+b") as file:
        file.write(bytes(8 * 4096))
    bench.load(tier, bench.keys(0))
    assert warnings_of(caplog)[1].endswith("(and 7 more since the last warning)")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_failing_stores_are_warned_of_and_said_until_one_succeeds(bench, monkeypatch, caplog, number):
    tier = bench.open()
    bench.store(tier, bench.keys(0))
    monkeypatch.setattr(os, "pwritev", raiser(number))
    for i in range(1, 4):
        assert bench.store(tier, bench.keys(i)).failed == bench.keys(i)
    text = f"OSError: [Errno {number}] {os.strerror(number)}"
    assert tier.stats().unavailable_reason == f"writes fail: {text}"
    assert (tier.stats().io_errors, tier.stats().last_error) == (3, text)
    assert warnings_of(caplog) == [f"disk tier {bench.path}: a store failed: {text}"]
    assert bench.load(tier, bench.keys(0)).done == bench.keys(0)
    monkeypatch.undo()
    bench.store(tier, bench.keys(1))
    assert tier.stats().unavailable_reason == ""


def test_failing_loads_are_warned_of_and_lose_no_block(bench, monkeypatch, caplog):
    tier = bench.open()
    bench.store(tier, bench.keys(0))
    monkeypatch.setattr(os, "preadv", raiser(errno.EIO))
    assert bench.load(tier, bench.keys(0)).failed == bench.keys(0)
    assert warnings_of(caplog) == [f"disk tier {bench.path}: a load failed: OSError: [Errno 5] Input/output error"]
    monkeypatch.undo()
    assert bench.load(tier, bench.keys(0)).done == bench.keys(0)


def test_directory_that_cannot_be_looked_at_for_a_while_is_not_taken_for_removed(bench, monkeypatch):
    tier = bench.open(flush_interval_s=0.01)
    bench.store(tier, bench.keys(0))
    monkeypatch.setattr(directory_module.Path, "stat", raiser(errno.EIO))
    wait_for(lambda: tier.stats().io_errors)
    monkeypatch.undo()
    assert tier.stats().unavailable_reason == ""
    assert bench.load(tier, bench.keys(0)).done == bench.keys(0)


def test_unavailable_reason_of_a_directory_that_may_not_be_searched_is_the_error(bench, monkeypatch):
    monkeypatch.setattr(directory_module.Path, "exists", raiser(errno.EACCES))
    assert "Permission denied" in DiskTier.unavailable_reason({"path": str(bench.path), "capacity": 1 << 20})


def test_modes_that_cannot_be_changed_are_warned_of(bench, monkeypatch, caplog):
    bench.open().shutdown()
    bench.path.chmod(0o755)

    def refuse(fd, mode):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(directory_module.os, "fchmod", refuse)
    bench.open()
    assert "that others may read (mode drwxr-xr-x), and that cannot be changed: Operation not permitted" in caplog.text
