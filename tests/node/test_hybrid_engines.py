"""Engines of a model with several KV-cache groups over one pool hit as one engine that has all the memory."""

import random
import struct

import pytest
from node_harness import gated, wait_for

from kvcache import CPUOffloadingManager, ReqContext, TieredOffloadingManager, make_offload_key
from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.lab.traces.trace import Trace
from kvcache.node import protocol
from kvcache.node.client import NodeManager
from kvcache.transfer.shared_file import SharedBlocks

TOKENS = 16


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Engines:
    """Serve prompts in turns, each in one step, as vLLM does."""

    def __init__(self, managers, windows, clock, block_tokens=TOKENS):
        self.managers, self.windows, self.clock, self.block_tokens = managers, windows, clock, block_tokens
        self.num_served = self.num_hits = self.num_stored = 0

    def set_of(self, path, end):
        groups = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        return [make_offload_key(x, group) for group, window in groups for x in path[max(end - window, 0) : end]]

    def find(self, manager, path, limit, context):
        """Return the leading run of blocks without a window, and the hit. Look up again while a tier reads blocks."""
        while True:
            states = set()

            def is_found(keys, states=states):
                found = [self.state(manager, key, context) for key in keys]
                states.update(found)
                return 0 not in found

            full = next((i for i in range(limit) if not is_found(self.anchors(path[i : i + 1]))), limit)
            hit = next(end for end in range(full, -1, -1) if is_found(self.set_of(path, end)))
            if states.isdisjoint((1, 3)):
                return full, hit
            manager.on_schedule_end()

    def state(self, manager, key, context):
        if isinstance(manager, CPUOffloadingManager):
            return manager.pool.states([key])[0]
        return manager.status(key, context)

    def anchors(self, path):
        return [make_offload_key(x, self.windows.index(None)) for x in path]

    def context(self, path):
        context = ReqContext()
        context.set_offload_key_positions(
            {
                make_offload_key(x, group): self.block_tokens * (i + 1)
                for group in range(len(self.windows))
                for i, x in enumerate(path)
            }
        )
        return context

    def serve(self, path, prompt_tokens, now_s):
        self.clock.now_s = now_s
        manager = self.managers[self.num_served % len(self.managers)]
        self.num_served += 1
        is_private = not isinstance(manager, NodeManager)
        context, limit = self.context(path), min(len(path), (prompt_tokens - 1) // self.block_tokens)
        anchors = self.anchors(path)
        full, hit = self.find(manager, path, limit, context)
        if full:
            manager.pool.note_found(context, full * self.block_tokens)
        if is_private:
            manager.touch(anchors, context)
        if keys := anchors[:hit] + self.set_of(path, hit):
            manager.prepare_load(keys, context)
            if isinstance(manager, TieredOffloadingManager):
                manager.prepare_store([], context)
            manager.complete_load(keys, context)
        ends = [end for end in sorted({full, limit}) if end > hit]
        windowed = dict.fromkeys(key for end in ends for key in self.set_of(path, end))
        if offered := anchors[hit:] + sorted(windowed, key=lambda key: key[-4:]):
            output = manager.prepare_store(offered, context)
            if is_private:
                manager.reorder(context)
            manager.complete_store(output.keys_to_store, context)
            self.num_stored += len(output.keys_to_store)
        manager.on_request_finished(context, use_positions=not is_private)
        manager.on_schedule_end()
        if not is_private:
            # The owner has applied the messages of this engine before the next one asks.
            manager.owner_figures()
        self.num_hits += hit


def shared_engines(node, windows, clock, num_engines=2, block_tokens=TOKENS):
    names = [f"engine {i}" for i in range(num_engines)]
    node.identity["block_bytes"] = 4096
    options = {"num_groups": len(windows), "group_windows": windows, "block_size": block_tokens}
    engines = Engines([node.engine(name, **options) for name in names], windows, clock, block_tokens)
    node.owner.pool.manager.clock = clock
    return engines


def paths(seed, num_requests, longest=24):
    """Yield growing and branching conversations: path, tokens of the prompt, and time."""
    dice, documents = random.Random(seed), [[]]
    for number in range(num_requests):
        stem = dice.choice(documents)
        stem = stem[: dice.randrange(len(stem) + 1)] if dice.random() < 0.3 else stem
        grown = [random.Random(1000 * number + i).randbytes(8) for i in range(dice.randrange(1, 6))]
        path = (stem + grown)[:longest]
        documents.append(path)
        yield path, TOKENS * len(path) + dice.randrange(2), 10.0 * number


@pytest.mark.parametrize("windows", [[None, 1], [2, None, 1], [None, 1, 3]])
def test_two_engines_decide_like_one(node, windows):
    node, clock = node(200, {"cache_policy": "gittins"}), Clock()
    alone = Engines([CPUOffloadingManager(TOKENS, 200, "gittins", clock=clock, group_windows=windows)], windows, clock)
    shared = shared_engines(node, windows, clock)
    policies = [alone.managers[0].policy, node.owner.pool.manager.policy]
    for path, prompt_tokens, now_s in paths(1, 400):
        for engines in (alone, shared):
            engines.serve(path, prompt_tokens, now_s)
        assert policies[0].leave_first == policies[1].leave_first
        assert policies[0].listed == policies[1].listed
    assert (alone.num_hits, alone.num_stored) == (shared.num_hits, shared.num_stored)
    assert alone.num_hits > 1000
    assert alone.managers[0].stats().loaded_blocks == node.owner.pool.manager.stats().loaded_blocks
    assert policies[1].lru_requests == 0
    policies[1].check()
    node.check()


@pytest.mark.parametrize("windows", [[None, 1], [2, None, 1]])
def test_tier_serves_two_like_one(node, tmp_path, windows):
    options = {"cache_policy": "gittins", "tiers": [{"type": "memory", "capacity": "2MiB"}]}
    node, clock = node(100, options), Clock()
    shared = shared_engines(node, windows, clock)
    host = SharedBlocks(tmp_path / "pool", 100, 4096, is_owner=True)
    settings = OffloadSettings.parse_part({**options, "group_windows": windows})
    manager = open_manager(settings, block_size=TOKENS, num_blocks=100, shared=host, clock=clock)
    alone = Engines([manager], windows, clock)
    owner = node.owner.pool.manager
    for path, prompt_tokens, now_s in paths(1, 300):
        alone.serve(path, prompt_tokens, now_s)
        manager.settle()
        shared.serve(path, prompt_tokens, now_s)
        wait_for(lambda: not owner.has_pending_work())
    # The owner promotes blocks in the order of single questions, so the share may differ.
    assert shared.num_hits == pytest.approx(alone.num_hits, rel=0.02)
    assert owner.stats().promoted_loads == pytest.approx(manager.stats().promoted_loads, rel=0.1)
    assert alone.num_hits > 1000
    assert manager.stats().promoted_loads > 500
    owner.policy.check()
    node.check()
    node.restart()
    node.check()
    manager.shutdown()


def store(engines, manager, path, offered=None):
    context = engines.context(path)
    keys = [key for key in context.positions if key[:-4] in (offered or path)]
    manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)
    manager.on_request_finished(context)
    manager.owner_figures()


def test_load_holds_needed_blocks_only(node):
    node, path = node(64, {"cache_policy": "gittins"}), [bytes([i] * 8) for i in range(8)]
    engines = shared_engines(node, [None, 2], Clock())
    engine, other = engines.managers
    for end in (2, 4, 8):
        store(engines, other, path[:end])
    context = engines.context(path[:6])
    assert engines.find(engine, path, 6, context) == (6, 4)
    keys = engines.anchors(path[:4]) + engines.set_of(path, 4)
    leases = node.leases.engines[engine.number]
    assert leases.num_held == 10
    # A load may name a key twice.
    spec = engine.prepare_load([*keys, keys[0]], context)
    assert engine.owner_figures()["num_referenced"] == leases.num_held == len(keys) == 6
    assert spec.block_ids.tolist() == node.owner.pool.manager.locate([*keys, keys[0]])
    assert (node.owner.pool.manager.stats().loaded_blocks, node.owner.stats["dropped_clients"]) == (6, 0)
    node.check()
    node.restart()
    assert engine.owner_figures()["num_referenced"] == 6
    engine.complete_load(keys, context)
    assert engine.owner_figures()["num_referenced"] == 0
    node.check()


def test_cut_hit_keeps_its_windows(node):
    """An engine may hold half of the pool: the first blocks of the prompt, with the windows behind them."""
    node, path = node(32, {"cache_policy": "gittins"}), [bytes([i] * 8) for i in range(20)]
    engines = shared_engines(node, [None, 1], Clock())
    engine, other = engines.managers
    for end in range(4, 24, 4):
        store(engines, other, path[:end], path[end - 4 : end])
    assert node.owner.pool.manager.pool.num_free == 32 - 20 - 5
    assert engines.find(engine, path, 20, engines.context(path)) == (13, 12)
    assert node.leases.engines[engine.number].num_held == 16


def reconnect(engine):
    engine._link.close()
    wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)


def test_interrupted_request_leaves_its_windows_first(node):
    """A request stores a part of a window, and its engine connects again. No later request needs this part."""
    node, path = node(64, {"cache_policy": "gittins"}), [bytes([i] * 8) for i in range(4)]
    engines = shared_engines(node, [None, 2], Clock())
    engine, context = engines.managers[0], engines.context(path)
    offered = [*engines.anchors(path[:3]), make_offload_key(path[2], 1)]
    assert engine.prepare_store(offered, context).keys_to_store == offered
    engine.complete_store(offered, context)
    engine.owner_figures()
    policy = node.owner.pool.manager.policy
    assert policy.leave_first == []
    reconnect(engine)
    engine.on_request_finished(context, use_positions=True)
    engine.owner_figures()
    assert offered[3] in policy.leave_first
    policy.check()


def test_request_over_reset_stores_nothing(node):
    """Its blocks may be of the old weights; a later request stores them, and is resumed like any other."""
    node, path = node(64, {"cache_policy": "gittins"}), [bytes([i] * 8) for i in range(8)]
    engines = shared_engines(node, [None, 2], Clock())
    engine, context = engines.managers[0], engines.context(path)
    store(engines, engine, path[:4])
    assert engines.find(engine, path, 8, context) == (4, 4)
    engine.reset_cache("v2")
    assert engines.find(engine, path, 8, context) == (0, 0)
    assert engine.prepare_store(list(context.positions), context).keys_to_store == []
    engine.on_request_finished(context, use_positions=True)
    store(engines, engine, path)
    assert engines.find(engine, path, 8, engines.context(path)) == (8, 8)
    policy = node.owner.pool.manager.policy
    assert policy.lru_requests == 0
    assert policy.leave_first == []
    node.check()


def test_load_of_unread_slots_is_refused(node):
    node, path = node(64, {"cache_policy": "gittins"}), [bytes([i] * 8) for i in range(8)]
    engines = shared_engines(node, [None, 2], Clock())
    engine, context = engines.managers[0], engines.context(path)
    store(engines, engine, path)
    engines.find(engine, path, 8, context)
    for slots in ([63], [0, 0], [-1], [0] * 1000):
        payload = struct.pack(f"<II{len(slots)}i", 0, len(slots), *slots)
        engine._link.tell(protocol.USE, 0, 2, payload if len(slots) < 9 else payload[:99])
        engine._link.flush()
        engine.owner_figures()
        wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)
    assert node.owner.stats["dropped_clients"] == 4
    assert engine.owner_figures()["num_referenced"] == node.leases.engines[engine.number].num_held == 10
    node.check()


def test_late_welcome_mixes_no_keys(node):
    """A request gains keys while the owner has not answered a greeting, and is looked up again afterwards."""
    node, path = node(64, {"cache_policy": "gittins"}), [bytes([i] * 8) for i in range(8)]
    engines = shared_engines(node, [None, 2], Clock())
    engine, other = engines.managers
    for end in (4, 6):
        store(engines, other, path[:end])
    context, later = engines.context(path[:4]), engines.context(path[:6])
    assert engines.find(engine, path, 4, context) == (4, 4)
    with gated(node.owner) as gate:
        engine._link.close()
        wait_for(lambda: engine.on_schedule_end() or engine._link._sock)
        context.positions.update(later.positions)
        assert engine.prepare_store([*later.positions][-2:], context) is None
        engine.on_schedule_end()
        gate.set()
    wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)
    assert engines.find(engine, path, 6, context) == (6, 6)
    keys = engines.anchors(path[:6]) + engines.set_of(path, 6)
    assert engine.prepare_load(keys, context).block_ids.tolist() == node.owner.pool.manager.locate(keys)


def test_second_load_keeps_first(node):
    """Two loads of a request run at once: the blocks of both are held until both have ended."""
    node, path = node(64, {"cache_policy": "gittins"}), [bytes([i] * 8) for i in range(4)]
    engines = shared_engines(node, [None, 2], Clock())
    engine, context = engines.managers[0], engines.context(path)
    store(engines, engine, path)
    assert engines.find(engine, path, 4, context) == (4, 4)
    keys = engines.anchors(path) + engines.set_of(path, 4)
    for loaded in (keys, keys[:1]):
        engine.prepare_load(loaded, context)
    engine.complete_load(keys[:1], context)
    assert engine.owner_figures()["num_referenced"] == 6
    engine.complete_load(keys, context)
    assert engine.owner_figures()["num_referenced"] == 0


@pytest.mark.slow
def test_replay_over_pool_reproduces_table(node, shared):
    """The first row of the table of gittins with several groups, with two engines in turns over one pool."""
    node, clock = node(2000, {"cache_policy": "gittins"}), Clock()
    engines = shared_engines(node, [None, 1], clock, block_tokens=512)
    with Trace(shared / "traces" / "mooncake_conversation.jsonl") as requests:
        for request in requests:
            path = [x.to_bytes(8, "big") for x in request.hash_ids.tolist()[: request.input_length // 512]]
            engines.serve(path, request.input_length, request.arrival_s)
    assert (engines.num_hits, engines.num_stored) == (27071, 153426)
    node.check()
