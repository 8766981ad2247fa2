"""`is_coming` of a block that a lookup did not find ready: it is on its way, or the request must not wait for it."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.manager import TieredOffloadingManager


class Bench:
    """Three host blocks over a hand-driven tier that holds ``a``, which has left host memory."""

    def __init__(self) -> None:
        self.now_s = 100.0
        host = np.zeros((3, 8), np.uint8)
        self.tier = ManualTier(4, host)
        self.manager = TieredOffloadingManager(16, 3, [self.tier], deadline_s=5.0, clock=lambda: self.now_s)
        self.manager.prepare_store([b"a"])
        self.manager.complete_store([b"a"])
        self.step()
        fillers = [b"x", b"y", b"z"]
        self.manager.prepare_store(fillers)
        self.manager.complete_store(fillers, None, False)
        self.request = ReqContext("r")

    def step(self) -> None:
        for job in list(self.tier.pending):
            self.tier.end(job)
        self.manager.on_schedule_end()

    def asked(self, key: bytes) -> tuple[bool | int | None, bool]:
        return self.manager.lookup(key, self.request), self.manager.is_coming(key, self.request)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_block_of_a_tier_is_coming_until_it_is_there(bench: Bench) -> None:
    assert bench.asked(b"a") == (None, True)
    bench.manager.on_schedule_end()
    assert bench.asked(b"a") == (None, True)
    bench.step()
    assert bench.manager.lookup(b"a", bench.request) is True


def test_unknown_block_is_not_coming(bench: Bench) -> None:
    assert bench.asked(b"b") == (False, False)


def test_block_that_the_engine_stores_is_coming(bench: Bench) -> None:
    bench.manager.prepare_store([b"b"])
    assert bench.asked(b"b") == (False, True)


def test_tier_that_hangs_is_not_waited_for_though_its_host_block_stays_reserved(bench: Bench) -> None:
    bench.asked(b"a")
    bench.manager.on_schedule_end()
    bench.now_s += 6
    bench.manager.on_schedule_end()
    assert bench.asked(b"a") == (False, False)
    assert bench.manager.policy.get(b"a") is not None


def test_nothing_is_coming_while_a_reset_waits_for_a_job(bench: Bench) -> None:
    bench.asked(b"a")
    bench.manager.on_schedule_end()
    bench.manager.reset_cache()
    assert bench.asked(b"a") == (False, False)
