"""A replay finds the fault of a plug-in policy: another answer, or a broken promise."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine import Engine

from kvcache import CPUOffloadingManager, MemoryTier, ReqContext, TierConfig, TieredOffloadingManager
from kvcache.lab.rerun.promises import Promises
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recording import Recording
from kvcache.recorder.format import Raised
from kvcache.recorder.recorder import Recorder
from kvcache.testing.reference import REFERENCE_POLICIES
from kvcache.tiers.memory import MemoryOptions

Reference = REFERENCE_POLICIES["lru"]


class SwapsVictims(Reference):
    """Evicts in another order if it has to evict many blocks at a time."""

    def evict(self, n, protected):
        victims = super().evict(n, protected)
        if victims is not None and n > 6:
            victims[0], victims[1] = victims[1], victims[0]
        return victims


class LosesCount(Reference):
    """Answers as it should, but finds itself broken in its check, after a while."""

    num_evictions = 0

    def evict(self, n, protected):
        self.num_evictions += 1
        return super().evict(n, protected)

    def check(self):
        if self.num_evictions == 9:
            raise RuntimeError("9 evictions")


class EvictsWhatMustStay(Reference):
    """Evicts blocks that are being read, in stores of many blocks."""

    def evict(self, n, protected):
        if n <= 5:
            return super().evict(n, protected)
        return [(key, self.blocks.pop(key)) for key in list(self.blocks)[-n:]]


def record(path):
    rng = random.Random(5)
    manager = CPUOffloadingManager(16, 50, "lru")
    waiting = []
    with Recorder(manager, path):
        for _ in range(800):
            context = ReqContext()
            prompt = rng.randrange(25)
            keys = [b"%d %d" % (prompt, i) for i in range(rng.randrange(1, 12))]
            num_hits = manager.lookup(keys, context)
            manager.touch(keys)
            manager.prepare_load(keys[:num_hits], context)
            waiting.append((keys[:num_hits], context))
            Engine(manager).store(keys, context)
            if len(waiting) > 2:
                loaded, context = waiting.pop(0)
                manager.complete_load(loaded, context)
                manager.on_request_finished(context)
    return Recording(path)


@pytest.mark.parametrize("has_arbiter", [False, True])
def test_fault_over_tiers_is_found(tmp_path, has_arbiter):
    rng = random.Random(4)
    host = np.zeros((30, 64), np.uint8)
    tier = MemoryTier(MemoryOptions(64 * 64 * 80), host)
    manager = TieredOffloadingManager(16, 30, [(tier, TierConfig(arbiter=has_arbiter))], "lru", True)
    engine = Engine(manager)
    with Recorder(manager, tmp_path / "run.kvlog"):
        for number in range(150):
            context = ReqContext()
            prompt = rng.randrange(12)
            keys = [b"%d %d" % (prompt, i) + bytes(4) for i in range(rng.randrange(1, 9))]
            if has_arbiter:
                context.set_offload_key_positions({key: 16 * (i + 1) for i, key in enumerate(keys)})
            if manager.lookup(keys, context) is None:
                assert manager.settle(10)
            engine.load(keys[: manager.lookup(keys, context) or 0], context)
            engine.store(keys, context)
            manager.on_request_finished(context)
            manager.report_prefill(0, 16 * len(keys), 0.01)
            manager.on_schedule_end()
            if number == 50:
                # A fast thread may end before the tier has stored a block.
                assert manager.settle(10)
    assert manager.tier_stats()[0].promoted_blocks > 0
    manager.shutdown()
    recording = Recording(tmp_path / "run.kvlog")
    assert replay_recording(recording, "lru", Promises).difference is None
    assert replay_recording(recording, SwapsVictims, Promises).difference is not None


@pytest.mark.parametrize(
    ("faulty", "got", "reason"),
    [
        (EvictsWhatMustStay, Raised("BlockStateError"), ""),
        (LosesCount, None, "the policy's check fails: RuntimeError: 9 evictions"),
    ],
)
def test_broken_promise_is_found(tmp_path, faulty, got, reason):
    difference = replay_recording(record(tmp_path / "run.kvlog"), faulty, Promises).difference
    assert difference.reason == reason
    assert got is None or difference.got == got
