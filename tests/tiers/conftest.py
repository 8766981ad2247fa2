"""A disk tier under test with its pool and the blocks in it."""

import mmap
import sys
import time
from pathlib import Path

import numpy as np
import pytest

# For `stores`, which more than one module here needs.
sys.path.insert(0, str(Path(__file__).parent))

BLOCK_BYTES = 4096
NUM_HOST = 64


class DiskBench:
    """Open disk tiers in `path`, store and load blocks whose payload follows from their key."""

    def __init__(self, path):
        self.path = path
        self.opened = []
        self.job_id = 100

    def open(self, num_blocks=16, path=None, block_bytes=BLOCK_BYTES, **options):
        # Here, where a missing package skips the test: not where the folder is collected.
        from kvcache.tiers.disk.directory import capacity_for
        from kvcache.tiers.disk.tier import DiskTier

        blocks = options.pop("host_blocks", None)
        blocks = self.host_blocks(block_bytes) if blocks is None else blocks
        tier = DiskTier(path or self.path, capacity_for(num_blocks, block_bytes), blocks, **options)
        tier.host = blocks
        self.opened.append(tier)
        return tier

    def close(self):
        for tier in self.opened:
            tier.shutdown()

    @staticmethod
    def host_blocks(block_bytes=BLOCK_BYTES):
        stride = -(-block_bytes // 4096) * 4096
        flat = np.frombuffer(mmap.mmap(-1, NUM_HOST * stride), np.uint8)
        return flat.reshape(NUM_HOST, stride)[:, :block_bytes]

    @staticmethod
    def payload(key, block_bytes=BLOCK_BYTES):
        seed = int.from_bytes(key[:16].ljust(16, b"\0"), "little")
        return np.random.default_rng(seed).integers(0, 256, block_bytes, np.uint8)

    @staticmethod
    def keys(*numbers):
        return [f"key-{number}".encode() for number in numbers]

    def fill(self, tier, keys):
        for block_id, key in enumerate(keys):
            tier.host[block_id] = self.payload(key, tier.host.shape[1])

    def result(self, tier, job_id):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for result in tier.get_finished():
                if result.job_id == job_id:
                    return result
            time.sleep(0.001)
        raise AssertionError(f"job {job_id} did not end")

    def result_of(self, tier, keys):
        from stores import in_order

        return in_order(self.result(tier, self.job_id), keys)

    def store(self, tier, keys):
        self.fill(tier, keys)
        self.job_id += 1
        assert tier.submit_store(self.job_id, keys, list(range(len(keys)))), tier.stats()
        return self.result_of(tier, keys)

    def load(self, tier, keys):
        """Load blocks; every one that is said to be right is compared."""
        tier.host[:] = 0
        self.job_id += 1
        assert tier.submit_load(self.job_id, keys, list(range(len(keys)))), tier.stats()
        result = self.result_of(tier, keys)
        for key in result.done:
            assert np.array_equal(tier.host[keys.index(key)], self.payload(key, tier.host.shape[1])), key
        return result

    def settle(self, tier):
        """Wait until a reset is over."""
        end = time.monotonic() + 60
        while tier.stats().unavailable_reason.startswith("reset") and time.monotonic() < end:
            tier.get_finished()
            time.sleep(0.001)
        assert tier.stats().unavailable_reason == ""


@pytest.fixture
def bench(tmp_path):
    bench = DiskBench(tmp_path / "tier")
    yield bench
    bench.close()
