"""A disk tier on a file system that fails, truncates, lies and hangs: it serves no wrong byte, and no caller blocks."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvcache.tiers.disk.directory import TierDirectoryError, capacity_for
from kvcache.tiers.disk.tier import DiskTier

SCALE = float(os.environ.get("KVCACHE_STRESS", "1"))
SCRIPT = Path(__file__).parents[1] / "isolated" / "fuse_faults.py"
BLOCK_BYTES = 8192
NUM_BLOCKS = 64
NUM_KEYS = 200


def payload(number):
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def key_of(number):
    return b"block-%06d" % number


class Mount:
    """A faulty file system in another process, and its commands."""

    def __init__(self, path, process):
        self.path = path
        self.process = process

    def say(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"


@contextlib.contextmanager
def mounted(path, seed=1):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse that this user may open")
    path.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if process.stdout.readline() != "mounted\n":
            pytest.skip("a FUSE file system cannot be mounted here")
        yield Mount(path, process)
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def opened(path, **options):
    host = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    capacity = capacity_for(NUM_BLOCKS, BLOCK_BYTES)
    return host, DiskTier(path, capacity, host, flush_interval_s=0.05, preallocate=False, **options)


def end_of(tier, job_id):
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for result in tier.get_finished():
            if result.job_id == job_id:
                return result
        time.sleep(0.0005)
    raise AssertionError(f"job {job_id} was never reported: {tier.stats()}")


def use(host, tier, draw, counts, num_steps):
    """Store and load at random; compare every block that the tier reports as loaded."""
    for _ in range(num_steps):
        counts["jobs"] += 1
        job_id = counts["jobs"]
        numbers = draw.sample(range(NUM_KEYS), draw.randint(1, 8))
        if draw.random() < 0.5:
            for row, number in enumerate(numbers):
                host[row] = payload(number)
            if tier.submit_store(job_id, [key_of(n) for n in numbers], list(range(len(numbers)))):
                result = end_of(tier, job_id)
                counts["stored"] += len(result.done)
                counts["failed"] += len(result.failed)
                assert bool(result.error) == bool(result.failed), result
        else:
            held = [n for n in numbers if tier.lookup([key_of(n)])]
            host[:] = 0
            if held and tier.submit_load(job_id, [key_of(n) for n in held], list(range(len(held)))):
                result = end_of(tier, job_id)
                counts["failed"] += len(result.failed)
                for key in result.done:
                    counts["loaded"] += 1
                    number = int(key[6:])
                    assert np.array_equal(host[held.index(number)], payload(number)), number


FAULTS = {
    "errors": ["fault read 0.2 EIO", "fault write 0.2 EIO"],
    "full": ["fault write 0.5 ENOSPC"],
    "too large": ["fault write 0.5 EFBIG"],
    "short": ["fault read 0.7 short", "fault write 0.7 short"],
    "lies": ["fault read 0.1 flip"],
    "writes that lie": ["fault write 0.2 flip"],
    "syncs": ["fault fsync 0.5 EIO"],
    "interrupted": ["fault read 0.2 EINTR", "fault write 0.2 EAGAIN"],
    "everything": ["fault read 0.1 EIO", "fault write 0.3 short", "fault fsync 0.3 EIO", "fault lookup 0.1 EIO"],
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_file_system_serve_no_wrong_byte(tmp_path, name):
    counts = Counter()
    with mounted(tmp_path / "mount") as mount:
        path = mount.path / "tier"
        draw = random.Random(name)
        host, tier = opened(path)
        for _ in range(max(1, round(2 * SCALE))):
            for line in FAULTS[name]:
                mount.say(line)
            use(host, tier, draw, counts, 80)
            mount.say("clear")
            stored = counts["stored"]
            use(host, tier, draw, counts, 40)
            assert counts["stored"] > stored, "after the faults nothing can be stored"
            assert not tier.stats().unavailable_reason
            tier.shutdown()
            for line in FAULTS[name]:
                mount.say(line)
            with contextlib.suppress(TierDirectoryError):
                _, tier = opened(path)
                tier.shutdown()
                counts["opened under faults"] += 1
            mount.say("clear")
            host, tier = opened(path)
            use(host, tier, draw, counts, 40)
        tier.shutdown()
    print(name, dict(counts))
    assert counts["loaded"] > 50
    if name == "short":
        assert counts["failed"] == 0


def test_mount_that_hangs_at_the_start_keeps_nobody(tmp_path):
    with mounted(tmp_path / "mount") as mount:
        host, tier = opened(mount.path / "tier")
        use(host, tier, random.Random(1), Counter(), 20)
        num_held = tier.stats().num_held
        tier.shutdown()
        mount.say("fault lookup 1 hang")
        since_s = time.monotonic()
        host, tier = opened(mount.path / "tier", open_timeout_s=0.2)
        assert time.monotonic() - since_s < 5
        assert tier.stats().unavailable_reason == "opening"
        assert tier.lookup([key_of(1)]) == 0
        mount.say("clear")
        end_s = time.monotonic() + 20
        while tier.stats().unavailable_reason and time.monotonic() < end_s:
            time.sleep(0.01)
        assert tier.stats().num_held == num_held > 0
        use(host, tier, random.Random(2), Counter(), 20)
        tier.shutdown()


def test_reset_on_a_mount_that_hangs_keeps_nobody(tmp_path):
    with mounted(tmp_path / "mount") as mount:
        host, tier = opened(mount.path / "tier")
        use(host, tier, random.Random(1), Counter(), 20)
        mount.say("fault write 1 hang")
        mount.say("fault fsync 1 hang")
        since_s = time.monotonic()
        tier.reset()
        assert time.monotonic() - since_s < 10
        assert tier.stats().unavailable_reason == "reset under way"
        mount.say("clear")
        end_s = time.monotonic() + 20
        while tier.stats().unavailable_reason and time.monotonic() < end_s:
            tier.get_finished()
            time.sleep(0.01)
        assert (tier.stats().unavailable_reason, tier.stats().num_held) == ("", 0)
        tier.shutdown()


def test_shutdown_returns_though_the_mount_hangs_and_the_process_ends_with_it(tmp_path):
    code = (
        "import sys, time, numpy as np\n"
        "from kvcache.tiering import job_tier\n"
        "from kvcache.tiers.disk.tier import DiskTier\n"
        "job_tier._SHUTDOWN_S = 0.2\n"
        "tier = DiskTier(sys.argv[1], 1 << 20, np.zeros((4, 4096), np.uint8), flush_interval_s=0.05)\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
        "assert tier.submit_store(1, [b'k'], [0])\n"
        "tier.shutdown()\n"
        "print('shut', flush=True)\n"
    )
    with mounted(tmp_path / "mount") as mount:
        command = [sys.executable, "-c", code, str(mount.path / "tier")]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout.readline() == "open\n"
            mount.say("fault write 1 hang")
            mount.say("fault fsync 1 hang")
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "shut\n"
            # A process waits for requests that this file system has not answered, even after it was killed.
            mount.say("clear")
            assert child.wait(20) == 0
        finally:
            mount.process.stdin.close()
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
