"""A disk tier and its host blocks, whose bytes follow from their keys."""

import mmap
import os
import time

import numpy as np

from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

SCALE = float(os.environ.get("KVCACHE_STRESS", "1"))


def payload(seed, num_bytes):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


class Disk:
    """A disk tier over host blocks of its own, with one job in flight at a time."""

    def __init__(self, path, num_blocks, block_bytes, num_host, fingerprint=None, **options):
        self.host = np.frombuffer(mmap.mmap(-1, num_host * block_bytes), np.uint8).reshape(num_host, block_bytes)
        settings = DiskOptions(path=path, capacity=capacity_for(num_blocks, block_bytes), **options)
        self.tier = DiskTier(settings, self.host, fingerprint)
        self.job_id = 0

    def store(self, keys, seeds=None):
        """Store blocks with the bytes of their keys or seeds; return the result, or None if the tier refuses."""
        for i, seed in enumerate(seeds or map(list, keys)):
            self.host[i] = payload(seed, self.host.shape[1])
        return self._result(self.tier.submit_store, keys)

    def load(self, keys):
        """Load blocks; return the result, and the loaded bytes by key."""
        self.host[:] = 0
        result = self._result(self.tier.submit_load, keys)
        return result, {key: self.host[keys.index(key)].copy() for key in (result.done if result else ())}

    def load_right(self, keys):
        """Load blocks that were stored with the bytes of their keys, and compare them; return the result."""
        result, loaded = self.load(keys)
        wrong = [key for key, block in loaded.items() if not np.array_equal(block, payload(list(key), len(block)))]
        assert not wrong, wrong
        return result

    def held(self, keys):
        return [key for key in keys if self.tier.lookup([key])]

    def _result(self, submit, keys):
        self.job_id += 1
        if not submit(self.job_id, keys, list(range(len(keys)))):
            return None
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            for result in self.tier.get_finished():
                if result.job_id == self.job_id:
                    return result
            time.sleep(0.0002)
        raise AssertionError(f"job {self.job_id} was never reported: {self.tier.stats()}")

    def wait_available(self):
        """Wait until the tier is open, and no reset is under way."""
        end_s = time.monotonic() + 60
        while self.tier.stats().unavailable_reason and time.monotonic() < end_s:
            self.tier.get_finished()
            time.sleep(0.0002)
        assert not self.tier.stats().unavailable_reason
