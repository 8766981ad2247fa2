"""A disk tier and its host blocks, whose bytes follow from their keys."""

import mmap
import os

import numpy as np
from stores import payload, until, wait_for

from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

SCALE = float(os.environ.get("KVCACHE_STRESS", "1"))


class Disk:
    """A disk tier over host blocks of its own, with one job in flight at a time."""

    def __init__(self, path, num_blocks, block_bytes, num_host, fingerprint=None, **options):
        self.host = np.frombuffer(mmap.mmap(-1, num_host * block_bytes), np.uint8).reshape(num_host, block_bytes)
        settings = DiskOptions(path=path, capacity=capacity_for(num_blocks, block_bytes), **options)
        self.tier = DiskTier(settings, self.host, fingerprint)
        self.job_id = 0

    def store(self, keys, seeds=None):
        """Store blocks with the bytes of their keys or seeds; return the result, or None if the tier refuses."""
        for i, seed in enumerate(seeds or keys):
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
        wrong = [key for key, block in loaded.items() if not np.array_equal(block, payload(key, len(block)))]
        assert not wrong, wrong
        return result

    def held(self, keys):
        return [key for key in keys if self.tier.lookup([key])]

    def _result(self, submit, keys):
        self.job_id += 1
        is_taken = submit(self.job_id, keys, list(range(len(keys))))
        return wait_for(self.tier, self.job_id) if is_taken else None

    def wait_available(self):
        """Wait until the tier is open, and no reset is under way."""
        until(lambda: self.tier.get_finished() is not None and not self.tier.stats().unavailable_reason)
