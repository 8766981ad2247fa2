"""The disk tier where its disk, a quota or the largest file leaves it no room: at the start, and while it stores."""

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from stores import load, store

from kvcache.tiers.base.batch import NO_ROOM
from kvcache.tiers.disk import block_store
from kvcache.tiers.disk.header import TierDirectoryError

MIB = 1 << 20
BLOCK_BYTES = 1 << 18
SYSTEMS = ["ext4", "xfs", "btrfs"]
needs_mounts = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("losetup"), reason="mounting needs root")


def run(*command):
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@pytest.fixture
def mount(tmp_path):
    """Return a function that makes a file system in a file and mounts it."""
    folders = []

    def mount_new(kind, num_bytes=320 * MIB, options="loop"):
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"needs mkfs.{kind}")
        image, folder = tmp_path / f"{kind}.img", tmp_path / kind
        with image.open("wb") as file:
            file.truncate(num_bytes)
        folder.mkdir()
        run(f"mkfs.{kind}", image)
        try:
            run("mount", "-t", kind, "-o", options, image, folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel does not mount {kind}: {error.stderr!r}")
        folders.append(folder)
        return folder

    yield mount_new
    for folder in folders:
        run("umount", "--lazy", folder)


def fill(folder):
    """Write until the file system has no room left."""
    with (folder / "neighbour").open("wb", buffering=0) as file:
        size = MIB
        while size >= 4096:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
        os.fsync(file)


@pytest.fixture
def limited(monkeypatch):
    """Return a function that lets writes into payload fail with an error from one byte of the file on."""
    real = os.pwritev

    def limit(first_byte, number=errno.ENOSPC):
        def write(fd, rows, offset):
            if offset + sum(map(len, rows)) > first_byte:
                raise OSError(number, os.strerror(number))
            return real(fd, rows, offset)

        monkeypatch.setattr(block_store.os, "pwritev", write)

    return limit


def store_each(tier, keys):
    """Store keys one job each, and return those that the tier has stored."""
    return [key for key in keys if store(tier, [key]).done]


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("kind", SYSTEMS)
def test_full_disk_opens_preallocated_tier(bench, mount, kind):
    bench.path = mount(kind) / "tier"
    num_blocks = 100 * MIB // BLOCK_BYTES
    bench.leave(1, num_blocks=num_blocks, block_bytes=BLOCK_BYTES)
    fill(bench.path.parent)
    tier = bench.open(num_blocks=num_blocks, block_bytes=BLOCK_BYTES)
    assert load(tier, bench.keys(1)).done == bench.keys(1)
    assert len(store_each(tier, bench.keys(*range(2, 2 * num_blocks)))) == 2 * num_blocks - 2


def test_start_asks_for_missing_files_only(bench, monkeypatch):
    bench.leave(1)
    calls = []

    def fallocate(fd, *_):
        calls.append(Path(f"/proc/self/fd/{fd}").readlink())
        return 0

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **options: SimpleNamespace(fallocate=fallocate))
    bench.open().shutdown()
    assert calls == []
    os.truncate(bench.path / "records", 0)
    os.truncate(bench.path / "records", 16 * 128)
    bench.open().shutdown()
    assert calls == [bench.path / "records"]


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_exceeded_quota_refuses_start(bench, mount, kind):
    folder = mount(kind, options="loop,prjquota" if kind == "xfs" else "loop")
    bench.path = folder / "part" / "tier"
    if kind == "xfs":
        bench.path.parent.mkdir()
        run("xfs_quota", "-x", "-c", f"project -s -p {bench.path.parent} 7", "-c", "limit -p bhard=64m 7", folder)
    else:
        run("btrfs", "subvolume", "create", bench.path.parent)
        run("btrfs", "quota", "enable", folder)
        run("btrfs", "qgroup", "limit", "64M", bench.path.parent)
    with pytest.raises(TierDirectoryError, match=r"has no room for|bytes more on its disk"):
        bench.open(num_blocks=100 * MIB // BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    tier = bench.open(num_blocks=32 * MIB // BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    assert store(tier, bench.keys(1)).done == bench.keys(1)


@pytest.mark.parametrize("number", sorted(NO_ROOM))
def test_refused_allocation_names_reason(bench, monkeypatch, number):
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **options: SimpleNamespace(fallocate=lambda *_: -1))
    monkeypatch.setattr("ctypes.get_errno", lambda: number)
    with pytest.raises(TierDirectoryError, match=f"has no room for 65536 bytes of data: {os.strerror(number)}"):
        bench.open()


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("kind", SYSTEMS)
def test_full_disk_keeps_newest_blocks(bench, mount, kind):
    bench.path = mount(kind) / "tier"
    options = {"num_blocks": 150 * MIB // BLOCK_BYTES, "block_bytes": BLOCK_BYTES, "preallocate": False}
    tier = bench.open(**options)
    with (bench.path.parent / "balloon").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 60 * MIB)
    assert store_each(tier, bench.keys(*range(20))) == bench.keys(*range(20))
    fill(bench.path.parent)
    store_each(tier, bench.keys(*range(20, 60)))
    newest = bench.keys(*range(60, 70))
    stored = store_each(tier, newest)
    assert len(stored) >= 8
    tier.shutdown()
    tier = bench.open(**options)
    assert load(tier, stored).done == stored
    assert tier.stats().num_held <= 21
    # With room again, the tier grows.
    (bench.path.parent / "balloon").unlink()
    end_s = time.monotonic() + 60
    number = 100
    while tier.stats().num_held < 40 and time.monotonic() < end_s:
        store(tier, bench.keys(number))
        number += 1
        time.sleep(0.01)
    assert tier.stats().num_held >= 40


@pytest.mark.parametrize("number", sorted(NO_ROOM))
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_stores_go_where_space_is(bench, limited, number, policy):
    tier = bench.open(num_blocks=40, preallocate=False, cache_policy=policy)
    limited(6 * 4096, number)
    stored = store_each(tier, bench.keys(*range(30)))
    assert len(stored) == 29
    assert stored[-1] == b"key-29"
    assert tier.stats().num_held == 6
    tier.shutdown()
    limited(6 * 4096, number)
    tier = bench.open(num_blocks=40, preallocate=False, cache_policy=policy)
    assert load(tier, bench.keys(29)).done == bench.keys(29)
    # The first store into the slots that were free again fails.
    store_each(tier, bench.keys(40, 41, 42))
    assert load(tier, bench.keys(42)).done == bench.keys(42)


def test_large_job_fills_slots_with_space(bench, limited):
    tier = bench.open(num_blocks=40, preallocate=False)
    limited(5 * 4096)
    assert store_each(tier, bench.keys(*range(6))) == bench.keys(*range(5))
    keys = bench.keys(*range(10, 30))
    result = store(tier, keys)
    # The head of a prefix is offered last.
    assert result.done == keys[-5:]
    assert sorted(result.failed) == sorted(keys[:-5])
    assert tier.stats().num_held == 5


def test_freed_disk_is_used_again(bench, limited, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("kvcache.tiers.base.catalog.time.monotonic", lambda: now_s)
    tier = bench.open(num_blocks=40, preallocate=False)
    limited(4 * 4096)
    store_each(tier, bench.keys(*range(6)))
    assert tier.stats().num_held == 4
    limited(40 * 4096)
    for step in range(6):
        now_s += 1.0
        store_each(tier, bench.keys(*range(100 * (step + 1), 100 * (step + 1) + 64)))
        assert tier.stats().num_held == min(40, 4 + 2 ** (step + 1) - 1)


def test_other_failures_withhold_no_slot(bench, limited):
    tier = bench.open(num_blocks=8, preallocate=False)
    limited(0, errno.EIO)
    assert store_each(tier, bench.keys(*range(8))) == []
    limited(8 * 4096)
    assert len(store_each(tier, bench.keys(*range(8)))) == 8
    assert tier.stats().num_held == 8


def test_system_without_allocation_uses_space(bench, limited, monkeypatch):
    """A file system that reserves no space is a sparse one."""
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **options: SimpleNamespace(fallocate=lambda *_: -1))
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EOPNOTSUPP)
    tier = bench.open(num_blocks=40)
    limited(6 * 4096)
    assert store_each(tier, bench.keys(*range(30)))[-1] == b"key-29"
    assert tier.stats().num_held == 6
