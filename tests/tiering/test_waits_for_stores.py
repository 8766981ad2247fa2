"""A look-up waits for a block that the engine is storing, `deadline_s` at most."""

import numpy as np
import pytest
from stores import Clock

from kvcache.block import BlockState
from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager

KEYS = [b"%d" % i for i in range(4)]
PENDING, ABSENT, READY = BlockState.PENDING, BlockState.ABSENT, BlockState.READY


@pytest.fixture
def world():
    clock = Clock()
    tier = ManualTier(16, np.zeros((8, 4), np.uint8))
    return clock, TieredOffloadingManager(16, 8, [(tier, TierConfig())], deadline_s=2.0, clock=clock)


def test_wait_for_store_ends_at_deadline(world):
    clock, manager = world
    manager.prepare_store(KEYS, ReqContext("stores"))
    asking = ReqContext("asks")
    assert manager.status(KEYS[0], asking) == PENDING
    clock.now_s += 1.9
    manager.on_schedule_end()
    assert manager.status(KEYS[0], asking) == PENDING
    # Another request has a deadline of its own.
    other = ReqContext("other")
    assert manager.status(KEYS[1], other) == PENDING
    clock.now_s += 0.1
    manager.on_schedule_end()
    assert [manager.status(key, asking) for key in KEYS] == [ABSENT] * 4
    assert manager.status(KEYS[1], other) == PENDING
    manager.complete_store(KEYS)
    assert [manager.status(key, asking) for key in KEYS] == [READY] * 4


def test_waits_add_up(world):
    clock, manager = world
    tier = manager.controllers[0].tier
    tier.submit_store(99, KEYS[1:2], [0])
    tier.end(tier.pending[0])
    manager.prepare_store(KEYS[:1], ReqContext("stores"))
    asking = ReqContext("asks")
    assert manager.status(KEYS[0], asking) == PENDING
    clock.now_s += 1.5
    manager.complete_store(KEYS[:1])
    assert manager.status(KEYS[0], asking) == READY
    assert manager.status(KEYS[1], asking) == PENDING
    manager.on_schedule_end()
    clock.now_s += 0.5
    manager.on_schedule_end()
    assert manager.status(KEYS[1], asking) == ABSENT


def test_load_begins_new_wait(world):
    clock, manager = world
    manager.prepare_store(KEYS, ReqContext("stores"))
    asking = ReqContext("asks")
    assert manager.status(KEYS[0], asking) == PENDING
    manager.complete_store(KEYS[:1])
    manager.prepare_load(KEYS[:1], asking)
    clock.now_s += 3.0
    assert manager.status(KEYS[1], asking) == PENDING
