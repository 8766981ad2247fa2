"""What tiers cost: the index of a disk tier at start, its rates both ways, and a scheduler's calls over it."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from pathlib import Path

import numpy as np

from kvcache.lab.bench.disk import DiskRates, measure_disk
from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier


class RestoreDiskIndex:
    """Open a disk tier that holds a million blocks: their payload is never read, so it was never written."""

    number = 1
    warmup_time = 0
    timeout = 300
    num_blocks = 1_000_000

    def setup(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.host_blocks = np.frombuffer(mmap.mmap(-1, 4096), np.uint8).reshape(1, 4096)
        tier = self.opened()
        table = tier._store.table
        keys = [i.to_bytes(36, "big") for i in range(self.num_blocks)]
        for first in range(0, self.num_blocks, 4096):
            batch = keys[first : first + 4096]
            table.write(first, list(range(first, first + len(batch))), batch, [0] * len(batch), table.generation)
        tier.shutdown()

    def opened(self) -> DiskTier:
        capacity_bytes = capacity_for(self.num_blocks, 4096)
        return DiskTier(DiskOptions(path=self.path, capacity=capacity_bytes, preallocate=False), self.host_blocks)

    def teardown(self) -> None:
        shutil.rmtree(self.path)

    def time_open(self) -> None:
        tier = self.opened()
        assert tier.stats().num_held == self.num_blocks
        tier.shutdown()


class DiskTierRates:
    """Rates of a disk tier, checksums on; beside them, what fio reaches is measured by hand."""

    params = ((256 << 10, 2 << 20),)
    param_names = ("block_bytes",)
    unit = "bytes/s"

    def measured(self, block_bytes: int) -> DiskRates:
        folder = Path(tempfile.mkdtemp())
        try:
            return measure_disk(folder / "tier", block_bytes, (256 << 20) // block_bytes)
        finally:
            shutil.rmtree(folder)

    def track_store_rate(self, block_bytes: int) -> float:
        return self.measured(block_bytes).store_bytes_per_s

    def track_load_rate(self, block_bytes: int) -> float:
        return self.measured(block_bytes).load_bytes_per_s


class TieredCalls:
    """One request of 256 blocks through a tiered manager, all of them promoted from a tier without bytes."""

    def setup(self) -> None:
        tier = ManualTier(4096, is_automatic=True)
        self.manager = TieredOffloadingManager(16, 512, [tier])
        self.keys = [[b"%04d-%04d" % (request, i) for i in range(256)] for request in range(16)]
        for keys in self.keys:
            output = self.manager.prepare_store(keys)
            assert output is not None
            self.manager.complete_store(output.keys_to_store)
            self.manager.settle()
        self.position = 0

    def time_promote_and_load(self) -> None:
        keys = self.keys[self.position % 16]
        self.position += 1
        context = ReqContext()
        while self.manager.lookup(keys, context) is None:
            self.manager.on_schedule_end()
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)


class LookupBelow:
    """A look-up of 256 blocks that a tier holds, by the whole list or key by key, with an arbiter and without."""

    params = ((False, True), (False, True))
    param_names = ("arbiter", "by_key")
    rounds = 64

    def setup(self, arbiter: bool, by_key: bool) -> None:
        tier = ManualTier(1024, is_automatic=True)
        self.manager = TieredOffloadingManager(
            16, 512, [(tier, TierConfig(arbiter=arbiter))], prefill_tokens_per_s=10_000
        )
        link = self.manager.controllers[0].link
        if link is not None:
            for num_blocks in (1, 10, 100):
                link.fit.record(num_blocks, 1, 1e-4 * num_blocks + 1e-3)
        self.keys = [b"%032d\0\0\0\0" % i for i in range(256)]
        tier.submit_store(-1, self.keys, [0] * 256)
        self.manager.on_schedule_end()

    def time_first_lookup(self, arbiter: bool, by_key: bool) -> None:
        for _ in range(self.rounds):
            context = ReqContext()
            context.set_offload_key_positions({key: 16 * i for i, key in enumerate(self.keys, 1)})
            if by_key:
                for key in self.keys:
                    assert self.manager.status(key, context) == 1
            else:
                assert self.manager.lookup(self.keys, context) is None
            self.manager.on_request_finished(context)
