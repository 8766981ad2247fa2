"""Every interleaving of two requests and a tier, on a small scale: no endless wait, no leak, no wrong byte.

3 host blocks, 4 tier blocks, 5 keys, 2 requests. From each state that can be reached by steps of the requests, ends of
scheduler steps, completions and failures of jobs in any order, and passing deadlines, two futures are played out: one
where every job completes, and one where none ever does. In both, both requests must end.
"""

import os
from collections import deque

import numpy as np
import pytest
from engine import Engine

from kvcache.control.pool import BlockPool
from kvcache.request import ReqContext
from kvcache.testing.reference import ReferenceLRU
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager

pytestmark = pytest.mark.slow

DEADLINE_S = 5.0
MAX_ROUNDS = 16
MANY = 10**9


class Request:
    def __init__(self, name, keys):
        self.context = ReqContext(name)
        self.keys = keys
        self.state = "ask"
        self.hits = 0
        self.output = None

    def step(self, world):
        manager, context = world.manager, self.context
        if self.state == "ask":
            hits = manager.lookup(self.keys, context)
            if hits is not None:
                self.hits = hits
                spec = manager.prepare_load(self.keys[:hits], context)
                world.check_bytes(self.keys[:hits], spec.block_ids)
                self.state = "load"
        elif self.state == "load":
            spec_ids = [manager.policy.get(key).block_id for key in self.keys[: self.hits]]
            world.check_bytes(self.keys[: self.hits], spec_ids)
            manager.complete_load(self.keys[: self.hits], context)
            self.output = manager.prepare_store(self.keys, context)
            if self.output is None:
                self.end(manager)
            else:
                world.check_free_of_jobs(self.output.store_spec.block_ids)
                self.state = "store"
        elif self.state == "store":
            world.fill(self.output.keys_to_store, self.output.store_spec.block_ids)
            manager.complete_store(self.output.keys_to_store, context)
            self.end(manager)

    def end(self, manager):
        manager.on_request_finished(self.context)
        self.state, self.output = "ended", None


class World(Engine):
    """One run of the small scale; `actions` are what may happen next."""

    def __init__(self, scenario):
        self.now_s = 0.0
        self.num_ticks = 0
        self.host = np.zeros((3, 4), np.uint8)
        self.tier = ManualTier(4, self.host, ReferenceLRU)
        rule = TierConfig(
            deadline_s=DEADLINE_S, pause_s=DEADLINE_S, max_failures=2, max_store_blocks=2, **scenario["rule"]
        )
        self.manager = TieredOffloadingManager(
            16, 3, [(self.tier, rule)], ReferenceLRU, deadline_s=DEADLINE_S, clock=lambda: self.now_s
        )
        for key in scenario["on_tier"]:
            self.fill([key], [0])
            assert self.tier.submit_store(-1, [key], [0])
            self.tier.end(self.tier.pending[0])
        self.tier.get_finished()
        for key in scenario["in_host"]:
            self.store([key])
            self.end_jobs()
            self.manager.on_schedule_end()
        self.requests = [Request(str(i), keys) for i, keys in enumerate(scenario["requests"])]

    def end_jobs(self):
        for job in list(self.tier.pending):
            self.tier.end(job)

    def actions(self, max_ticks):
        found = [("step", i) for i, request in enumerate(self.requests) if request.state != "ended"]
        found.append(("schedule", 0))
        found += [("end", i) for i in range(len(self.tier.pending))]
        found += [("fail", i) for i in range(len(self.tier.pending))]
        if self.num_ticks < max_ticks:
            found.append(("tick", 0))
        return found

    def act(self, action):
        kind, i = action
        if kind == "step":
            self.requests[i].step(self)
        elif kind == "schedule":
            self.manager.on_schedule_end()
        elif kind == "tick":
            self.now_s += DEADLINE_S
            self.num_ticks += 1
        else:
            job = self.tier.pending[i]
            self.tier.end(job, "failed" if kind == "fail" else "")
        self.check()

    def check_free_of_jobs(self, block_ids):
        busy = {block_id for job in self.tier.pending for block_id in job.block_ids}
        assert not busy.intersection(block_ids.tolist())

    def check(self):
        blocks = self.manager.policy.blocks
        ids = [block.block_id for block in blocks.values()]
        assert len(set(ids)) == len(ids) <= 3
        for job in self.tier.pending:
            for key, block_id in zip(job.keys, job.block_ids, strict=True):
                if not job.is_load and key in blocks and block_id == blocks[key].block_id:
                    assert blocks[key].ref_cnt > 0
                    self.check_bytes([key], [block_id])

    def signature(self):
        manager, now_s = self.manager, self.now_s
        controller = manager.controllers[0]
        request_of = {None if c is None else c.req_id: request for c, request in manager._pending._requests.items()}

        def left(deadline_s):
            return None if deadline_s is None else max(deadline_s - now_s, -2 * DEADLINE_S)

        parts = [(r.state, r.hits, r.output and list(r.output.keys_to_store)) for r in self.requests]
        for r in self.requests:
            for owner, known in (r.context.request_keys or {}).items():
                if hasattr(known, "keys") and isinstance(owner, BlockPool):
                    parts.append(list(known.keys))
        policies = (manager.policy, self.tier._index.policy)
        parts += [[(key, block.ref_cnt) for key, block in policy.blocks.items()] for policy in policies]
        parts.append([(job.is_load, list(job.moving), list(job.failed)) for job in self.tier.pending])
        parts.append([(result.error, list(result.done), list(result.failed)) for result in self.tier._results])
        for name, r in request_of.items():
            sets = [sorted(r.tried), sorted(r.held)]
            parts.append((name, list(r.wanted), sets, list(r.prefix), r.is_over, left(r.deadline_s)))
        for job in controller.jobs.values():
            waiters = sorted(str(c and c.req_id) for c in job.waiters)
            parts.append((job.is_load, list(job.keys), job.is_overdue, left(job.deadline_s), waiters))
        ways = (controller._reads, controller._writes)
        parts += [(way._num_failures, left(way._open_until_s), way._is_trying) for way in ways]
        backlog = controller.backlog
        unwritten = [*getattr(backlog, "dirty", ()), getattr(backlog, "_num_ahead", 0)]
        return repr([*parts, list(backlog), list(backlog.missed), unwritten, self.num_ticks, manager._has_results])

    def ends(self, completing):
        """Play on, fairly, until both requests have ended; return whether they did."""
        for _ in range(MAX_ROUNDS):
            for request in self.requests:
                request.step(self)
            if completing:
                self.end_jobs()
            self.manager.on_schedule_end()
            # If the tier answers, all requests end before their deadlines.
            self.now_s += 0 if completing else 0.5 * DEADLINE_S
            if all(request.state == "ended" for request in self.requests):
                return True
        return False

    def is_clean_in_the_end(self):
        """Let every job end, and see that nothing is left of them."""
        for _ in range(MAX_ROUNDS):
            self.end_jobs()
            self.now_s += DEADLINE_S
            self.manager.on_schedule_end()
        stats = self.manager.stats()
        return (stats.num_referenced, stats.num_pending, self.tier._index.stats().num_referenced) == (0, 0, 0)


def replayed(scenario, path):
    world = World(scenario)
    for action in path:
        world.act(action)
    return world


def explore(scenario, max_ticks, max_failures, max_states):
    """Visit every reachable state, breadth first, and play both futures from each; return how many, and if all."""
    start = World(scenario)
    seen = {(start.signature(), 0)}
    queue = deque([((), 0)])
    num_visited = 0
    while queue and num_visited < max_states:
        path, num_failures = queue.popleft()
        num_visited += 1
        for completing in (True, False):
            world = replayed(scenario, path)
            assert world.ends(completing), f"a request waits for ever (jobs complete: {completing}) after {path}"
            assert world.is_clean_in_the_end(), f"something is left over (jobs complete: {completing}) after {path}"
        for action in replayed(scenario, path).actions(max_ticks):
            failures = num_failures + (action[0] == "fail")
            if failures > max_failures:
                continue
            world = replayed(scenario, path)
            world.act(action)
            # Where failures are not bounded, how many there were does not matter.
            state = (world.signature(), failures if max_failures < MANY else 0)
            if state not in seen:
                seen.add(state)
                queue.append(((*path, action), failures))
    return num_visited, not queue


def scenario(in_host, on_tier, requests, **rule):
    """Return a start: the keys in host memory and on the tier, those of each request, and the rule of the tier."""
    in_host, on_tier, *requests = ([letter.encode() for letter in text] for text in (in_host, on_tier, *requests))
    return {"rule": rule, "in_host": in_host, "on_tier": on_tier, "requests": requests}


SCENARIOS = {
    "write_through": scenario("a", "bcd", ["abc", "dce"], write_policy="write_through"),
    "write_back": scenario("ae", "bcd", ["abc", "de"], write_policy="write_back"),
    "more_than_fits": scenario("", "bcde", ["bcde", "edcb"], write_policy="write_through_selective", num_uses=2),
}


# Visiting everything, 69,864 states, takes 7 minutes:
# KVCACHE_ALL_INTERLEAVINGS=1 python -m pytest -s --timeout=3600 tests/tiering/test_interleavings.py
ALL = os.environ.get("KVCACHE_ALL_INTERLEAVINGS") == "1"


@pytest.mark.parametrize(("max_ticks", "max_failures"), [(0, MANY), (1, 1)], ids=["any_failures", "a_deadline"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_call_waits_and_nothing_leaks(name, max_ticks, max_failures):
    num_visited, is_whole = explore(SCENARIOS[name], max_ticks, max_failures, MANY if ALL else 250)
    print(f"{name}: {num_visited} states")
    assert is_whole or num_visited == 250


def test_every_interleaving_without_failures():
    assert explore(SCENARIOS["write_through"], 0, 0, MANY) == (1143, True)
