"""A disk tier whose system calls fail, stop short, flip bits or hang: it serves no wrong byte, and blocks no caller."""

import contextlib
import errno
import mmap
import os
import random
import threading
import time
from collections import Counter
from functools import partial

import pytest
from disks import SCALE, Disk

from kvcache.tiers.base import catalog, job_tier
from kvcache.tiers.disk.header import TierDirectoryError

KEYS = [b"block-%06d" % number for number in range(200)]
open_disk = partial(Disk, num_blocks=64, block_bytes=8192, num_host=8, flush_interval_s=0.05, preallocate=False)


class FailingCalls:
    """Replaces functions of `os`; `faults` holds the share of failing calls and the kind of fault by operation.

    A kind is the name of an errno, "short", "flip", or "hang", which lasts until `clear`.
    """

    def __init__(self, patch, draw):
        self.draw = draw
        self.faults = {}
        self.num_faults = Counter()
        self.cleared = threading.Event()
        for name in ("open", "stat", "fsync", "fdatasync"):
            patch.setattr(os, name, partial(self.call, "sync" if "sync" in name else "lookup", getattr(os, name)))
        for name in ("pread", "preadv", "pwrite", "pwritev"):
            patch.setattr(os, name, partial(getattr(self, name), getattr(os, name)))

    def set(self, *lines):
        self.cleared = threading.Event()
        self.faults = {operation: (float(share), kind) for operation, share, kind in map(str.split, lines)}

    def clear(self):
        self.faults = {}
        self.cleared.set()

    def fault(self, operation):
        """Return "short", "flip" or nothing; raise or hang if that is the fault."""
        share, kind = self.faults.get(operation, (0.0, ""))
        if self.draw.random() >= share:
            return ""
        self.num_faults[operation] += 1
        if kind == "hang":
            self.cleared.wait(60)
            return ""
        if kind in ("short", "flip"):
            return kind
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    def call(self, operation, real, *arguments, **options):
        self.fault(operation)
        return real(*arguments, **options)

    def spoilt(self, kind, body):
        """Return bytes of which the last ones are missing, or one bit differs."""
        if kind == "short" and len(body) > 1:
            return body[: self.draw.randrange(1, len(body))]
        if kind == "flip" and body:
            at = self.draw.randrange(len(body))
            return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        return body

    def pread(self, real, fd, size, offset):
        return self.spoilt(self.fault("read"), real(fd, size, offset))

    def preadv(self, real, fd, rows, offset, flags=0):
        if flags and self.faults.get("read", ("", ""))[1] == "hang":
            # RWF_NOWAIT never waits for the disk.
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        kind = self.fault("read")
        num_bytes = real(fd, rows, offset, flags)
        if not kind:
            return num_bytes
        body = self.spoilt(kind, b"".join(rows)[:num_bytes])
        # Bytes after a short read are undefined.
        rest = body.ljust(sum(map(len, rows)), b"?")
        for row in rows:
            row[:], rest = rest[: len(row)], rest[len(row) :]
        return len(body)

    def pwrite(self, real, fd, body, offset):
        return real(fd, self.spoilt(self.fault("write"), bytes(body)), offset)

    def pwritev(self, real, fd, rows, offset):
        kind = self.fault("write")
        if not kind:
            return real(fd, rows, offset)
        body = self.spoilt(kind, b"".join(rows))
        # Direct I/O writes whole pages: the bytes after a short write become garbage.
        memory = mmap.mmap(-1, sum(map(len, rows)))
        memory.write(body.ljust(len(memory), b"?"))
        real(fd, [memory], offset)
        return len(body)


@pytest.fixture
def calls(monkeypatch):
    calls = FailingCalls(monkeypatch, random.Random(1))
    yield calls
    calls.clear()


def use(disk, draw, counts, num_steps):
    """Store and load at random; compare every block that the tier reports as loaded."""
    for _ in range(num_steps):
        keys = draw.sample(KEYS, draw.randint(1, 8))
        if draw.random() < 0.5:
            if result := disk.store(keys):
                counts["stored"] += len(result.done)
                counts["failed"] += len(result.failed)
                # Blocks that find no slot with space fail without an error.
                assert result.failed or not result.error, result
        elif (keys := disk.held(keys)) and (result := disk.load_right(keys)):
            counts["loaded"] += len(result.done)
            counts["failed"] += len(result.failed)


FAULTS = {
    "errors": ["read 0.2 EIO", "write 0.2 EIO"],
    "full": ["write 0.5 ENOSPC"],
    "too large": ["write 0.5 EFBIG"],
    "short": ["read 0.7 short", "write 0.7 short"],
    "interrupted": ["read 0.5 EAGAIN", "write 0.5 EAGAIN"],
    "lies": ["read 0.1 flip"],
    "writes that lie": ["write 0.2 flip"],
    "syncs": ["sync 0.5 EIO"],
    "everything": ["read 0.1 EIO", "write 0.3 short", "sync 0.3 EIO", "lookup 0.1 EIO"],
}


@pytest.mark.parametrize("name", FAULTS)
def test_failing_calls_serve_no_wrong_byte(tmp_path, calls, monkeypatch, name):
    # Slots without space are tried again at the next store, not after a second.
    monkeypatch.setattr(catalog, "_AGAIN_S", 0.0)
    counts = Counter()
    draw = random.Random(name)
    disk = open_disk(tmp_path / "tier")
    kinds = {line.split()[0] for line in FAULTS[name]}
    num_rounds = 0
    # Files are seldom synced, so a round may have no fault of that kind.
    while num_rounds < max(1, round(2 * SCALE)) or (calls.num_faults.keys() != kinds and num_rounds < 50):
        num_rounds += 1
        calls.set(*FAULTS[name])
        use(disk, draw, counts, 80)
        calls.clear()
        stored = counts["stored"]
        use(disk, draw, counts, 40)
        assert counts["stored"] > stored, "after the faults nothing can be stored"
        assert not disk.tier.stats().unavailable_reason
        disk.tier.shutdown()
        calls.set(*FAULTS[name])
        with contextlib.suppress(TierDirectoryError):
            open_disk(tmp_path / "tier").tier.shutdown()
            counts["opened under faults"] += 1
        calls.clear()
        disk = open_disk(tmp_path / "tier")
        use(disk, draw, counts, 40)
    disk.tier.shutdown()
    print(name, dict(counts))
    assert counts["loaded"] > 50
    assert calls.num_faults.keys() == kinds
    if name == "short":
        assert counts["failed"] == 0


def test_hanging_calls_block_no_caller(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(job_tier, "_SHUTDOWN_S", 0.2)
    disk = open_disk(tmp_path / "tier")
    use(disk, random.Random(1), Counter(), 20)
    num_held = disk.tier.stats().num_held
    disk.tier.shutdown()
    since_s = time.monotonic()
    calls.set("lookup 1 hang")
    disk = open_disk(tmp_path / "tier", open_timeout_s=0.2)
    assert (disk.tier.stats().unavailable_reason, disk.tier.lookup(KEYS)) == ("opening", 0)
    calls.clear()
    disk.wait_available()
    assert disk.tier.stats().num_held == num_held > 0
    calls.set("write 1 hang", "sync 1 hang")
    disk.tier.reset()
    assert disk.tier.stats().unavailable_reason == "reset under way"
    calls.clear()
    disk.wait_available()
    assert disk.tier.stats().num_held == 0
    calls.set("write 1 hang", "sync 1 hang")
    assert disk.tier.submit_store(1, KEYS[:1], [0])
    disk.tier.shutdown()
    assert time.monotonic() - since_s < 50
