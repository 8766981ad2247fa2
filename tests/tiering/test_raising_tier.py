"""Every method of the manager survives a tier that raises, or answers nonsense, at every place it is called.

A scripted day of a scheduler is played once for each call of each of the tier's methods, which raises then, and from
then on. Nothing may reach the scheduler, and the host pool must be whole in the end.
"""

import numpy as np
import pytest
from engine import Engine

from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import HostBudget, TierConfig, TierController, TierJob
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import TierResult

NONSENSE = {
    "lookup": [-1, 99, "three", 2.0, True, [1]],
    "submit_store": [np.zeros(2), "no"],
    "submit_load": [np.zeros(2), "no"],
    "get_finished": [
        None,
        7,
        [None],
        "ab",
        [TierResult(12345, [b"a"])],
        [TierResult(None, ["a"])],
        [TierResult("one", [b"a"])],
        [TierResult(1, [b"zz", b"yy"], [b"zz"]), TierResult(1, [b"zz"])],
        [TierResult(2, 5)],
    ],
    "stats": [None, 3],
}
METHODS = [*NONSENSE, "cancel", "reset", "touch", "on_request_finished", "shutdown"]
NUM_BLOCKS = 6


class Fault:
    """Replaces a method: calls go through until the one that fails, and all after it if it is for good."""

    def __init__(self, inner, at, is_for_good, answer):
        self.inner, self.at, self.is_for_good, self.answer = inner, at, is_for_good, answer
        self.num_calls = 0

    def __call__(self, *args):
        self.num_calls += 1
        if self.num_calls == self.at or (self.is_for_good and self.num_calls > self.at):
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer
        return self.inner(*args)


class Day(Engine):
    """A manager over one automatic tier, and everything a scheduler does with it."""

    def __init__(self, write_policy="write_through"):
        self.now_s = 0.0
        self.host = np.zeros((NUM_BLOCKS, 4), np.uint8)
        self.tier = ManualTier(20, self.host, is_automatic=True)
        self.clock = lambda: self.now_s
        config = TierConfig(write_policy=write_policy, deadline_s=3.0, pause_s=2.0, max_store_blocks=3)
        self.manager = TieredOffloadingManager(
            16, NUM_BLOCKS, [(self.tier, config)], enable_events=True, clock=lambda: self.clock()
        )

    def wait(self):
        super().wait()
        self.now_s += 0.5
        assert self.now_s < self.end_s, "a request waits for ever"

    def request(self, text):
        context, keys = ReqContext(text), [letter.encode() for letter in text]
        self.end_s = self.now_s + 20.0
        self.manager.on_new_request(context)
        self.manager.status(keys[0], context)
        self.manager.touch(keys, context)
        self.serve(keys, context)
        self.now_s += 0.25

    def play(self):
        for text in ("abc", "def", "abcd", "ghi", "abc", "jk", "def", "abcj"):
            self.request(text)
        self.manager.reset_cache()
        for text in ("abc", "def", "abcd", "ghi", "abc"):
            self.request(text)
        self.manager.tier_stats()
        self.manager.stats()
        self.manager.has_pending_work()
        list(self.manager.take_events())
        self.tier._is_automatic = True
        for _ in range(12):
            self.now_s += 2
            self.manager.on_schedule_end()
        self.manager.shutdown()

    def check(self):
        """All host blocks are free, held, or a lost job's."""
        stats = self.manager.stats()
        (tier_stats,) = self.manager.tier_stats()
        assert stats.num_pending + stats.num_referenced <= tier_stats.stuck_blocks
        assert tier_stats.stuck_blocks <= 3 * NUM_BLOCKS // 4


def played(method, at, is_for_good, answer, write_policy="write_through"):
    """Play a day on which a method of the tier fails; return the day, and how often the method was called."""
    day = Day(write_policy)
    fault = Fault(getattr(day.tier, method), at, is_for_good, answer)
    setattr(day.tier, method, fault)
    day.play()
    return day, fault.num_calls


@pytest.mark.parametrize("is_for_good", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_tier_that_raises_reaches_nobody(method, is_for_good):
    num_calls = 4 if method == "cancel" else played(method, 0, False, None)[1]
    assert num_calls
    for at in range(1, num_calls + 1):
        day, _ = played(method, at, is_for_good, RuntimeError("bug"))
        if method != "stats":
            day.check()


@pytest.mark.parametrize("is_for_good", [False, True])
@pytest.mark.parametrize("method", NONSENSE)
def test_tier_that_answers_nonsense_reaches_nobody(method, is_for_good):
    for answer in NONSENSE[method]:
        for at in (1, 2, 5):
            day, _ = played(method, at, is_for_good, answer)
            if method != "stats":
                day.check()


@pytest.mark.parametrize("write_policy", ["write_back", "write_through_selective"])
def test_other_write_policies_survive_too(write_policy):
    for method in METHODS:
        for at in (1, 3):
            day, _ = played(method, at, True, RuntimeError("bug"), write_policy)
            if method != "stats":
                day.check()


def test_raising_reset_serves_nothing():
    day = Day()
    day.request("abc")
    day.request("def")
    day.manager.settle(5)
    assert day.tier.lookup([b"a"]) == 1
    inner, day.tier.reset = day.tier.reset, Fault(None, 1, True, RuntimeError("bug"))
    day.manager.reset_cache()
    for _ in range(10):
        assert day.manager.lookup([b"a"], ReqContext()) == 0
        day.manager.on_schedule_end()
        day.now_s += 0.5
    assert "reset failed: reset raised" in day.manager.tier_stats()[0].tier.unavailable_reason
    day.tier.reset = inner
    day.now_s += 2
    day.manager.on_schedule_end()
    assert day.tier.lookup([b"a"]) == 0
    day.request("abc")
    day.manager.settle(5)
    assert day.tier.lookup([b"a"]) == 1


@pytest.mark.parametrize("answer", [-2, 5, 2.0, True, "2", [2]])
def test_impossible_lookup_answer_finds_nothing(answer):
    tier = ManualTier(8)
    controller = TierController(tier, TierConfig(), 16, 1, HostBudget(16))
    keys = [bytes([number]) for number in range(4)]
    for scripted, expected in ((4, 4), (None, None), (answer, 0)):
        tier.lookup = lambda keys, scripted=scripted: scripted
        assert controller.lookup(keys, 0.0) == expected
    assert controller.stats().tier.last_error == f"lookup returned {answer!r} for 4 keys"


def test_stuck_direction_gets_no_job():
    tier = ManualTier(8)
    config = TierConfig(max_store_blocks=4, pause_s=1.0, deadline_s=5.0)
    controller = TierController(tier, config, 16, 1, HostBudget(16))
    for number in range(2):
        keys = [bytes([number, i]) for i in range(2)]
        job = TierJob(number, controller, False, keys, [2 * number, 2 * number + 1], 5.0)
        assert controller.send(job, 0.0)
    controller.give_up_overdue(5.0)
    stats = controller.stats()
    assert (stats.overdue_jobs, stats.stuck_blocks, stats.num_storing) == (2, 4, 4)
    assert not controller.may_send(False, 5.5)
    # The pause is over, and the tier still has all blocks that it may have.
    assert not controller.may_send(False, 10.0)
    assert (controller.may_send(True, 10.0), controller.room(False)) == (True, 0)
    while tier.pending:
        tier.end(tier.pending[0])
    assert len(controller.get_finished(100, 10.0)) == 2
    assert (controller.stats().stuck_blocks, controller.room(False)) == (0, 4)
    assert controller.may_send(False, 10.0)
