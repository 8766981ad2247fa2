"""The built-in tiers keep the contract of all tiers, and the manager keeps its own over tiers that do not."""

import random
import re
import threading

import numpy as np
import pytest
from engine import Engine

from kvcache.options import Options
from kvcache.request import ReqContext
from kvcache.testing.tier_contract import TierContract
from kvcache.testing.tiers import Faults, FaultyTier, ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.job_tier import BlockOutcome, JobTier
from kvcache.tiers.disk.header import capacity_for
from kvcache.tiers.disk.tier import DiskOptions, DiskTier
from kvcache.tiers.memory import MemoryOptions, MemoryTier


class TestDiskTier(TierContract):
    survives_restart = True

    def open_tier(self, path, host_blocks, num_blocks):
        return DiskTier(DiskOptions(path=path, capacity=capacity_for(num_blocks, self.block_bytes)), host_blocks)

    def options(self, path, num_blocks):
        return {"path": str(path), "capacity": capacity_for(num_blocks, self.block_bytes)}


class TestBufferedDiskTier(TestDiskTier):
    block_bytes = 1000


class TestManualTier(TierContract):
    def open_tier(self, path, host_blocks, num_blocks):
        return ManualTier(num_blocks, host_blocks, is_automatic=True)


class TestMemoryTier(TierContract):
    def open_tier(self, path, host_blocks, num_blocks):
        return MemoryTier(MemoryOptions(num_blocks * self.block_bytes), host_blocks)

    def options(self, path, num_blocks):
        return {"capacity": num_blocks * self.block_bytes}


class RemoteTier(JobTier):
    """A medium that keeps its own index, and is asked what it holds."""

    def __init__(self, host_blocks):
        self.values = {}
        super().__init__(host_blocks, "REMOTE", absent_s=0.001)

    def exists(self, keys):
        return [key in self.values for key in keys]

    def put(self, batch):
        self.values.update(zip(batch.keys, map(bytes, batch.buffers), strict=True))

    def get(self, batch):
        outcomes = []
        for key, buffer in zip(batch.keys, batch.buffers, strict=True):
            value = self.values.get(key)
            outcomes.append(BlockOutcome.ABSENT if value is None else BlockOutcome.DONE)
            if value is not None:
                buffer[:] = value
        return outcomes

    def clear(self, generation):
        self.values.clear()


class TestRemoteTier(TierContract):
    evicts = False
    is_bounded = False

    def open_tier(self, path, host_blocks, num_blocks):
        return RemoteTier(host_blocks)


class TestFaultyTierWithoutFaults(TierContract):
    def open_tier(self, path, host_blocks, num_blocks):
        return FaultyTier(ManualTier(num_blocks, host_blocks, is_automatic=True), Faults(), host_blocks)


ALL_FAULTS = {
    "errors": Faults(error_rate=0.3),
    "refusals": Faults(refuse_rate=0.4),
    "flips": Faults(flip_rate=0.3),
    "short": Faults(short_rate=0.5),
    "lost": Faults(lost_rate=0.05),
    "late": Faults(late_rate=0.5, delay_s=7.0),
    "reordered": Faults(late_rate=0.5, delay_s=2.0, is_reordering=True),
    "unknown": Faults(unknown_rate=0.5),
    "all": Faults(0.1, 0.1, 0.1, 0.1, 0.02, 0.2, 3.0, True, 0.1),
}


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("name", ALL_FAULTS)
def test_faulty_tier_gives_no_wrong_byte(name, write_policy):
    clock = [0.0]
    host = np.zeros((12, 8), np.uint8)
    inner = ManualTier(40, host, is_automatic=True)
    tier = FaultyTier(inner, ALL_FAULTS[name], host, seed=3, clock=lambda: clock[0])
    rule = TierConfig(write_policy=write_policy, pause_s=3.0, max_store_blocks=4)
    manager = TieredOffloadingManager(16, 12, [(tier, rule)], clock=lambda: clock[0])
    engine, draw = Engine(manager, host), random.Random(5)
    num_loaded = 0
    waiting = []
    for _ in range(600):
        clock[0] += 0.25
        if len(waiting) < 3:
            head = draw.randrange(12)
            keys = [b"%02d-%d" % (head, i) for i in range(draw.randint(1, 6))]
            waiting.append((ReqContext(), keys, clock[0]))
        for request in list(waiting):
            context, keys, since_s = request
            num_hits = manager.lookup(keys, context)
            if num_hits is None:
                assert clock[0] - since_s <= 6, "a request waits past its deadline"
                continue
            waiting.remove(request)
            engine.load(keys[:num_hits], context)
            num_loaded += num_hits
            engine.store(keys, context)
            manager.on_request_finished(context)
        manager.on_schedule_end()
    assert tier.num_faults > 0
    assert num_loaded > 150
    # A probe and what waits behind it take a step each.
    for _ in range(12):
        clock[0] += 30
        manager.on_schedule_end()
    stats, stuck = manager.stats(), manager.tier_stats()[0].stuck_blocks
    assert stats.num_pending + stats.num_referenced <= stuck
    assert (stuck > 0) == bool(tier.lost)


CONTRACT_TESTS = [name for name in dir(TierContract) if name.startswith("test_")]


def verdict_of(tier_class, tmp_path):
    """Run the contract by hand, without pytest's rewriting of assertions; return the first complaint."""

    class Contract(TierContract):
        # Long enough for a loaded machine, except where a call or a job never ends.
        timeout_s = 1.0 if tier_class in (Endless, Silent) else 60.0

        def open_tier(self, path, host_blocks, num_blocks):
            return tier_class(num_blocks, host_blocks, is_automatic=True)

    for i, name in enumerate(CONTRACT_TESTS):
        try:
            getattr(Contract(), name)(tmp_path / str(i))
        except AssertionError as error:
            return str(error)
    return ""


WrongCount = type("WrongCount", (ManualTier,), {"lookup": lambda self, keys: len(keys)})
Endless = type("Endless", (ManualTier,), {"lookup": lambda self, keys: threading.Event().wait()})
Silent = type("Silent", (ManualTier,), {"get_finished": lambda self: []})


class NoOptions(Options):
    """Declares that a tier can be configured."""


Unmade = type("Unmade", (ManualTier,), {"options_type": NoOptions, "make": classmethod(lambda cls, *args: None)})


class Grown(ManualTier):
    def __init__(self, num_blocks, host_blocks, is_automatic):
        super().__init__(4 * num_blocks, host_blocks, is_automatic=is_automatic)


class Spoiled(ManualTier):
    def end(self, job, error=""):
        super().end(job, error)
        if job.is_load:
            self._host_blocks[job.block_ids[0], 7] ^= 1


class Scribbling(ManualTier):
    def end(self, job, error=""):
        super().end(job, error)
        self._host_blocks[60] = 1


class Picky(ManualTier):
    options_type = NoOptions

    @classmethod
    def make(cls, options, host_blocks, fingerprint):
        raise ValueError("needs 'size'")


class Reversed(RemoteTier):
    def __init__(self, num_blocks, host_blocks, is_automatic):
        super().__init__(host_blocks)

    def exists(self, keys):
        return super().exists(keys)[::-1]


@pytest.mark.parametrize(
    ("tier_class", "complaint"),
    [
        (ManualTier, ""),
        (Unmade, "expected a Tier to be opened, got None"),
        (Picky, r"from_config raised ValueError\(.* for {}; override TierContract.options"),
        (Reversed, "exists of keys 0, 7, 1, 8, 9 if 0 and 1 are held: expected"),
        (WrongCount, "absent one|blocks found|reset|whether"),
        (Endless, "lookup did not return within 1.0 s"),
        (Silent, r"jobs \[\d+(, \d+)*\] did not all end in 1.0 s, but \[\]"),
        (Grown, "number of keys removed for one: expected 1, got 0"),
        (Spoiled, "1 bytes of b'contract-000' are wrong, the first at 7"),
        (Scribbling, r"host blocks that a load of blocks 0 and 1 changed: expected \[\], got \[60\]"),
    ],
)
def test_contract_judges_faulty_tier_in_time(tier_class, complaint, tmp_path):
    assert re.match(complaint or "$", verdict_of(tier_class, tmp_path))


def test_contract_fails_tier_beyond_capacity(tmp_path):
    class Contract(TierContract):
        evicts = False

        def open_tier(self, path, host_blocks, num_blocks):
            return Grown(num_blocks, host_blocks, is_automatic=True)

    with pytest.raises(AssertionError, match="a tier of 4 blocks holds 12"):
        Contract().test_tier_stays_within_its_capacity(tmp_path)
