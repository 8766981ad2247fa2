"""Uses that wait for a tier: bounded, passed on in order, each block once."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference_gittins import CLASSES_PER_HINT, NEXT_USES, ReferenceGittins

from kvcache.lab.simulate.simulated_tier import SimulatedTieredManager
from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import HostBudget, TierConfig, TierController, TierJob
from kvcache.tiering.uses import UseQueue
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS

STEP, LIMIT = 4, 16
REQUESTS = [ReqContext(str(i)) for i in range(3)]
KEYS = [b"%02d" % i for i in range(24)]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.lists(st.sampled_from(KEYS), min_size=1, max_size=8), st.sampled_from([None, *REQUESTS])),
        st.sampled_from(REQUESTS),
        st.none(),
    )
)


def in_order(keys, keeps_paths):
    """Return keys in the order in which a tier must receive them."""
    return keys if keeps_paths else keys[::-1]


def shown(queue, keeps_paths):
    """Take a step; return its uses and ends, oldest first."""
    entries = []
    for keys, request in queue.take():
        assert len(keys) <= STEP
        entries += [(key, request) for key in in_order(keys, keeps_paths)] or [("end", request)]
    return entries


@pytest.mark.parametrize("keeps_paths", [False, True], ids=["tail first", "head first"])
@given(ACTIONS)
@example(
    [
        ([b"00"] * 6 + [b"02", b"03"], None),
        REQUESTS[0],
        ([b"00"] * 7 + [b"01"], None),
        None,
        ([b"00"], None),
        None,
    ]
)
def test_queue_keeps_order_of_last_uses(keeps_paths, actions):
    queue, recorded, told = UseQueue(STEP, LIMIT, keeps_paths), [], []
    for action in actions:
        if action is None:
            before = len(queue)
            entries = shown(queue, keeps_paths)
            assert len(entries) <= max(2 * STEP, before // 4 + 1)
            # Merging may leave fewer entries than there were, but a step is only short if it empties the queue.
            assert len(entries) >= STEP or not queue
            told += entries
        elif isinstance(action, ReqContext):
            queue.end(action)
            recorded.append(("end", action))
        else:
            # A path names each key once.
            keys = list(dict.fromkeys(action[0])) if keeps_paths else action[0]
            queue.add(keys, action[1])
            recorded += [(key, action[1]) for key in in_order(keys, keeps_paths)]
        assert len(queue) <= LIMIT + 4 * STEP
    while queue:
        told += shown(queue, keeps_paths)
    # A use counts at its last time, whatever the request; so does an end.
    last = {key if key != "end" else request: None for key, request in reversed(recorded)}
    last_told = {key if key != "end" else request: None for key, request in reversed(told)}
    assert len(last) - len(last_told) <= queue.num_dropped
    assert set(told) <= set(recorded)
    if not queue.num_dropped:
        assert list(last_told) == list(last)


class OrderedTier(ManualTier):
    """Keeps the blocks in the order of their last use."""

    def __init__(self):
        super().__init__(8)
        self.order, self.ended = {}, []

    def touch(self, keys, req_context=None):
        for key in reversed(keys):
            self.order.pop(key, None)
            self.order[key] = None

    def on_request_finished(self, req_context):
        self.ended.append(req_context)


@pytest.fixture
def world():
    tier = OrderedTier()
    return SimpleNamespace(tier=tier, controller=TierController(tier, TierConfig(), 64, 1, HostBudget(64)))


def test_long_requests_leave_no_backlog(world):
    """A request of 2,048 blocks ends each step, twice as many as a small queue passes on."""
    waiting = []
    for number in range(40):
        request, keys = ReqContext(), [b"%d-%d" % (number, i) for i in range(2 * MAX_STEP_BLOCKS)]
        world.controller.touch(keys, request)
        world.controller.end_request(request)
        world.controller.pass_on_uses()
        waiting.append(len(world.controller._uses))
    assert max(waiting[20:]) <= 8 * MAX_STEP_BLOCKS
    assert world.controller.stats().dropped_uses == 0
    assert len(world.tier.ended) >= 35
    while world.controller.has_reports:
        world.controller.pass_on_uses()
    assert list(world.tier.order)[: -len(keys) - 1 : -1] == keys


def test_job_follows_earlier_uses(world):
    world.controller.touch([b"a"], None)
    seen = []
    world.tier.submit_store = lambda *job: seen.extend(world.tier.order)
    world.controller.send(TierJob(1, world.controller, False, [b"b"], [0], 5.0), 0.0)
    assert seen == [b"a"]


def test_flood_of_uses_is_bounded(world):
    """Eight loads of 2,048 blocks a step."""
    num_added = 0
    for number in range(24):
        for load in range(8):
            world.controller.touch([b"%d-%d-%d" % (number, load, i) for i in range(2048)], None)
            num_added += 2048
            assert len(world.controller._uses) <= 36 * MAX_STEP_BLOCKS
        world.controller.pass_on_uses()
    steps = 0
    while world.controller.has_reports:
        world.controller.pass_on_uses()
        steps += 1
    assert steps < 40
    assert world.controller.stats().dropped_uses + len(world.tier.order) == num_added
    # The last use is the last one that the tier receives.
    assert list(world.tier.order)[:-2049:-1] == [b"23-7-%d" % i for i in range(2048)]


@pytest.mark.parametrize("by_keys", [False, True])
def test_hint_reaches_policy_of_tier(by_keys):
    manager = SimulatedTieredManager(16, 4, [8], "lru", tier_policy=ReferenceGittins, clock=lambda: 0.0)
    keys, context = [b"a", b"b"], ReqContext()
    manager.touch(keys, context)
    manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)
    manager.on_request_finished(context)
    manager.hint(iter(keys) if by_keys else context, "later")
    group_of = manager.simulated[0].policy.group_of
    assert {NEXT_USES[group_of[key].cls // CLASSES_PER_HINT] for key in keys} == {"later"}
