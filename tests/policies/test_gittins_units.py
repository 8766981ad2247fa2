"""gittins with several KV-cache groups: its table on both traces, and its twin after each request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from reference_gittins_units import ReferenceUnits, Serving

from kvcache import CPUOffloadingManager, ReqContext, make_offload_key
from kvcache.lab.traces.trace import Trace
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.manager import TieredOffloadingManager

TOKENS = 512
FILES = {"conversation": "mooncake_conversation.jsonl", "agents": "agentic_coding.jsonl.gz"}
# Windows of the groups beside the one without a window.
WINDOWS = {"A": [1], "B": [2, 2, 2, 2, 2], "C": [1, 1, 1], "D": [1, 1]}
# Trace, windows, positions (slots by groups), hits in positions, stored keys of all groups.
TABLE = [
    ("conversation", "A", 1000, 27071, 153426),
    ("conversation", "A", 3000, 47156, 220887),
    ("conversation", "A", 10000, 82413, 200999),
    ("conversation", "A", 20000, 97348, 185343),
    ("conversation", "B", 1000, 39387, 279982),
    ("conversation", "B", 3000, 68721, 296196),
    ("conversation", "B", 10000, 97149, 263184),
    ("conversation", "C", 1000, 37409, 193501),
    ("conversation", "C", 3000, 63579, 240732),
    ("conversation", "C", 10000, 95686, 207307),
    ("conversation", "C", 20000, 99551, 203249),
    ("conversation", "D", 1000, 32789, 158841),
    ("conversation", "D", 3000, 55865, 236819),
    ("conversation", "D", 10000, 90993, 202221),
    ("agents", "A", 500, 646034, 191250),
    ("agents", "A", 1000, 986008, 251620),
    ("agents", "A", 2000, 1263326, 176496),
    ("agents", "A", 4000, 1368576, 83612),
    ("agents", "B", 500, 1137893, 280057),
    ("agents", "B", 1000, 1330803, 153756),
    ("agents", "B", 2000, 1380564, 111016),
    ("agents", "C", 500, 977075, 256312),
    ("agents", "C", 1000, 1263121, 189263),
    ("agents", "C", 2000, 1366342, 96318),
    ("agents", "D", 500, 838425, 234691),
    ("agents", "D", 1000, 1163952, 234791),
    ("agents", "D", 2000, 1339726, 109905),
]
# How an engine offers keys: in parts of a step but for "whole".
STYLES = ["whole", "parts", "by group", "states first", "all", "junction", "unknown", "no positions"]
GROWING = ["all", "states first", "by group", "parts"]


class Engine:
    """A compiled manager, with a tier or without, and the calls that an engine makes."""

    def __init__(self, num_blocks: int, windows: list[int | None], tier: ManualTier | None = None) -> None:
        self.now_ms = 0
        self.windows = windows
        self.anchor_group = windows.index(None)
        kind: Any = CPUOffloadingManager if tier is None else partial(TieredOffloadingManager, tiers=[tier])
        self.manager: Any = kind(
            TOKENS, num_blocks, cache_policy="gittins", clock=lambda: self.now_ms / 1000, group_windows=windows
        )

    @property
    def policy(self) -> Any:
        return self.manager.policy

    def is_resident(self, keys: list[bytes]) -> bool:
        return all(self.policy.get(key) is not None for key in keys)

    def set_of(self, path: list[bytes], end: int) -> list[bytes]:
        return [
            make_offload_key(x, group)
            for group, window in enumerate(self.windows)
            if window is not None
            for x in path[max(end - window, 0) : end]
        ]

    def anchors(self, path: list[bytes]) -> list[bytes]:
        return [make_offload_key(x, self.anchor_group) for x in path]

    def full(self, path: list[bytes]) -> list[bytes]:
        """Return the keys of all groups without a window, group by group."""
        groups = [group for group, window in enumerate(self.windows) if window is None]
        return [make_offload_key(x, group) for group in groups for x in path]

    def find_hit(self, path: list[bytes], prompt_tokens: int) -> tuple[int, list[int]]:
        """Return the hit in positions, and the ends of the prompt."""
        limit = min(len(path), (prompt_tokens - 1) // TOKENS)
        full = next((i for i, x in enumerate(path[:limit]) if not self.is_resident(self.full([x]))), limit)
        hit = next(end for end in range(full, -1, -1) if self.is_resident(self.set_of(path, end)))
        return hit, [end for end in sorted({full, limit}) if end > hit]

    def offers(self, path: list[bytes], hit: int, ends: list[int]) -> list[bytes]:
        """Return the keys that an engine offers: those behind the hit, group by group."""
        windowed = dict.fromkeys(key for end in ends for key in self.set_of(path, end))
        return self.full(path[hit:]) + sorted(windowed, key=lambda key: key[-4:])

    def open(self, path: list[bytes], now_ms: int, has_positions: bool = True) -> ReqContext:
        self.now_ms = now_ms
        context = ReqContext()
        for i, x in enumerate(path if has_positions else []):
            for group in range(len(self.windows)):
                context.set_offload_key_position(make_offload_key(x, group), TOKENS * (i + 1))
        self.manager.touch(self.anchors(path), context)
        return context

    def load(self, path: list[bytes], hit: int, context: ReqContext) -> None:
        keys = self.full(path[:hit]) + self.set_of(path, hit)
        if keys:
            self.manager.prepare_load(keys, context)
            self.manager.complete_load(keys, context)

    def request(self, path: list[bytes], prompt_tokens: int, now_ms: int) -> tuple[int, list[bytes]]:
        """Serve a request in one step. Return its hit in positions, and the stored keys."""
        hit, ends = self.find_hit(path, prompt_tokens)
        context = self.open(path, now_ms)
        self.load(path, hit, context)
        output = self.manager.prepare_store(self.offers(path, hit, ends), context)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        return hit, output.keys_to_store


def replay(serve: Callable[[list[bytes], int, int], Any], trace: str, shared: Path) -> Iterator[Any]:
    """Yield what `serve` returns for each request of a trace: its hashes, the tokens of its prompt, and its time."""
    with Trace(shared / "traces" / FILES[trace]) as requests:
        for request in requests:
            path = [x.to_bytes(8, "big") for x in request.hash_ids.tolist()[: request.input_length // TOKENS]]
            yield serve(path, request.input_length, round(request.arrival_s * 1000))


# Groups without a window, windows, slots; hits in positions, stored keys of the first one and of the windows.
TABLE_OF_FULL_GROUPS = [
    ("conversation", 2, "A", 2000, 20442, 82699),
    ("agents", 2, "A", 1000, 424438, 113337),
    ("conversation", 4, "D", 12000, 32696, 147336),
]
REPLAYS = [
    *((trace, 1, windows, positions * (1 + len(WINDOWS[windows])), *row) for trace, windows, positions, *row in TABLE),
    *TABLE_OF_FULL_GROUPS,
]


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "num_full", "windows", "num_slots", "hits", "stored"), REPLAYS)
def test_replay_reproduces_table_of_units(
    trace: str, num_full: int, windows: str, num_slots: int, hits: int, stored: int, shared: Path
) -> None:
    engine = Engine(num_slots, [None] * num_full + WINDOWS[windows])
    num_hits = num_stored = 0
    for hit, keys in replay(engine.request, trace, shared):
        num_hits += hit
        num_stored += sum(not 0 < key[-1] < num_full for key in keys)
    engine.policy.check()

    assert (num_hits, num_stored) == (hits, stored)


@pytest.mark.slow
def test_replay_of_twin_reproduces_table(shared: Path) -> None:
    twin = ReferenceUnits(2000, [None, 1])
    served = [(hit, len(twin.stored)) for hit in replay(twin.request, "conversation", shared)]

    assert tuple(map(sum, zip(*served, strict=True))) == TABLE[0][3:]


class Medium:
    """An lru tier of `num_slots` slots; 0: unlimited."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.keys, self.num_written = num_slots, dict[bytes, None](), 0

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.keys:
                del self.keys[key]
                self.keys[key] = None

    def store(self, keys: list[bytes]) -> None:
        new = [key for key in reversed(keys) if key not in self.keys]
        self.keys.update(dict.fromkeys(new))
        self.num_written += len(new)
        while self.num_slots and len(self.keys) > self.num_slots:
            del self.keys[next(iter(self.keys))]


class EngineAboveTier(Engine):
    """A manager above a `Medium`. Spare slots hold what passes, so that the share drops only its oldest blocks."""

    num_spare = 6000

    def __init__(self, num_blocks: int, windows: list[int | None], times: int) -> None:
        super().__init__(num_blocks + self.num_spare, windows)
        self.policy.stores_all, self.policy.spare_slots = True, self.num_spare
        self.tier, self.num_read, self.num_share = Medium(times * num_blocks), 0, max(1, num_blocks // 20)

    def absent(self, keys: list[bytes]) -> list[bytes]:
        return [key for key, state in zip(keys, self.manager.states(keys), strict=True) if not state]

    def is_resident(self, keys: list[bytes]) -> bool:
        return self.tier.keys.keys() >= set(self.absent(keys))

    def request(self, path: list[bytes], prompt_tokens: int, now_ms: int) -> tuple[int, list[bytes]]:
        hit, ends = self.find_hit(path, prompt_tokens)
        anchors, limit = self.anchors(path), min(len(path), (prompt_tokens - 1) // TOKENS)
        full = next((i for i, key in enumerate(anchors[:limit]) if not self.is_resident([key])), limit)
        needed, offers = anchors[:hit] + self.set_of(path, hit), self.offers(path, hit, ends)
        read, new = self.absent(needed), self.absent(offers)
        self.num_read += len(read)
        self.manager.reserve(read, is_move=True)
        self.manager.commit(read, is_move=True)
        context = self.open(path, now_ms)
        self.load(path, hit, context)
        self.manager.note_found(context, TOKENS * full)
        stored = self.manager.prepare_store(offers, context).keys_to_store
        self.manager.complete_store(stored, context)
        self.manager.on_request_finished(context)
        if len(self.policy.passing) > self.num_share:
            # Blocks that were being written leave with the next store.
            context = ReqContext()
            context.set_offload_key_position(b"none", 1)
            self.manager.prepare_store([], context)
        self.tier.touch(needed)
        self.tier.store(new)
        self.tier.touch(needed)
        return hit, stored


# Trace, windows, positions, slots of the tier in slots of memory; hits, keys written to the tier and read from it.
TABLE_ABOVE_TIER = [
    ("conversation", "A", 1000, 0, 101404, 181137, 76739),
    ("conversation", "A", 1000, 2, 36143, 249163, 8569),
    ("conversation", "A", 1000, 4, 54991, 228951, 28154),
    ("conversation", "A", 1000, 8, 71816, 210967, 46185),
    ("conversation", "B", 1000, 2, 56087, 311228, 25610),
    ("conversation", "B", 3000, 8, 100642, 259790, 47258),
    ("conversation", "C", 1000, 2, 56978, 247649, 23577),
    ("conversation", "D", 1000, 4, 65643, 228193, 36377),
    ("conversation", "D", 3000, 2, 76098, 217050, 22468),
    # A declined block that is in the share already, and is pushed out by the same request, is not let in again.
    ("agents", "A", 500, 2, 943508, 417009, 339107),
    ("agents", "C", 500, 2, 1251196, 192252, 299062),
]


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "windows", "positions", "times", "hits", "written", "read"), TABLE_ABOVE_TIER)
def test_replay_above_tier_reproduces_table(
    trace: str, windows: str, positions: int, times: int, hits: int, written: int, read: int, shared: Path
) -> None:
    engine = EngineAboveTier(positions * (1 + len(WINDOWS[windows])), [None, *WINDOWS[windows]], times)
    num_hits = sum(hit for hit, _ in replay(engine.request, trace, shared))
    engine.policy.check()

    assert (num_hits, engine.tier.num_written, engine.num_read) == (hits, written, read)


def calls_of(style: str, engine: Engine, path: list[bytes], hit: int, ends: list[int], step: int) -> list[list[bytes]]:
    """Return the keys of each store of a request, as an engine of this style offers them."""
    windowed = set(engine.offers(path, hit, ends)[len(engine.full(path[hit:])) :])
    calls = []
    for start in range(hit, len(path), step if style != "whole" else len(path)):
        positions = path[start : start + step if style != "whole" else None]
        if style == "whole":
            return [engine.offers(path, hit, ends)]
        groups = [
            [
                key
                for key in map(partial(make_offload_key, group_idx=group), positions)
                if key in windowed or style == "all"
            ]
            for group, window in enumerate(engine.windows)
            if window is not None
        ]
        full = engine.full(positions)
        if style == "states first":
            calls += [[key] for keys in groups for key in keys] + [full]
        elif style == "by group":
            calls += [full, *filter(None, groups)]
        else:
            calls.append(full + [key for keys in groups for key in keys])
    return calls


class Running:
    """A request in both: its calls, and the stores in progress."""

    def __init__(self, context: ReqContext, twin: Serving, calls: list[list[bytes]]) -> None:
        self.context, self.twin, self.calls = context, twin, calls
        self.stores: list[list[bytes]] = []
        self.has_ended = False


class UnitsMachine(RuleBasedStateMachine):
    """The compiled policy beside its twin, as an engine calls them: stored keys, queue and lists after each call."""

    is_above_tier = False

    @initialize(
        num_blocks=strategies.integers(3, 60),
        windows=strategies.sampled_from(
            [[None, 1], [None, 2, 2], [1, None, 1, 1], [None, 3], [2, 1, None], [None, None, 1], [2, None, 1, None]]
        ),
        seed=strategies.integers(0, 1 << 30),
    )
    def start(self, num_blocks: int, windows: list[int | None], seed: int) -> None:
        self.engine = Engine(num_blocks, windows)
        self.engine.policy.stores_all = self.is_above_tier
        self.twin = ReferenceUnits(num_blocks, windows, self.is_above_tier)
        self.draw = random.Random(seed)
        self.paths: list[list[bytes]] = [[]]
        self.running: list[Running] = []
        self.now_ms = 0

    def agree(self) -> None:
        assert self.engine.policy.leave_first == list(self.twin.leave_first)
        assert self.engine.policy.listed == self.twin.listed
        assert self.engine.policy.passing == list(self.twin.in_share)
        assert self.engine.policy.gauges()["lru_requests"] == self.twin.lru_requests
        self.engine.policy.check()

    def make_path(self, num_shared: int, num_new: int, after_s: int) -> list[bytes]:
        """Return a path that shares a head with an older one."""
        path = self.draw.choice(self.paths)[: num_shared + 4] + [self.draw.randbytes(8) for _ in range(num_new)]
        path = path or [self.draw.randbytes(8)]
        self.paths.append(path)
        self.now_ms += 1000 * after_s
        return path

    @rule(
        num_shared=strategies.integers(0, 12),
        num_new=strategies.integers(0, 9),
        tokens=strategies.integers(0, TOKENS - 1),
        after_s=strategies.sampled_from([0, 1, 3, 10, 60, 600]),
    )
    def request(self, num_shared: int, num_new: int, tokens: int, after_s: int) -> None:
        """Serve a request in one step."""
        path = self.make_path(num_shared, num_new, after_s)
        if self.running:
            return self.begin(num_shared, num_new, tokens, after_s, "whole", 1, True)
        hit = self.twin.request(path, TOKENS * len(path) + tokens, self.now_ms)
        compiled_hit, stored = self.engine.request(path, TOKENS * len(path) + tokens, self.now_ms)

        assert (compiled_hit, sorted(stored)) == (hit, sorted(self.twin.stored))
        self.agree()
        return None

    @rule(num_keys=strategies.integers(1, 12), with_windowed=strategies.booleans())
    def promote(self, num_keys: int, with_windowed: bool) -> None:
        """Read blocks of a path from a tier, in host memory or not."""
        path = self.draw.choice(self.paths)[:num_keys]
        if not self.is_above_tier:
            return
        keys = self.engine.full(path) + (self.engine.set_of(path, len(path)) if with_windowed else [])
        absent = [key for key in keys if not self.engine.is_resident([key])]
        output = self.engine.manager.reserve(absent, is_move=True)
        self.twin.move_in(absent)

        assert output.keys_to_store == self.twin.stored
        self.engine.manager.commit(output.keys_to_store, is_move=True)
        self.agree()

    @rule()
    def decide(self) -> None:
        """A request that has loaded decides what stays, before its first store."""
        running = [request for request in self.running if request.twin.mode == "new" and not request.has_ended]
        if not running:
            return
        output = self.engine.manager.prepare_store([], running[0].context)
        self.twin.offer(running[0].twin, [])

        assert output.keys_to_store == self.twin.stored == []
        self.agree()

    @rule(
        num_shared=strategies.integers(0, 12),
        num_new=strategies.integers(0, 9),
        tokens=strategies.integers(0, TOKENS - 1),
        after_s=strategies.sampled_from([0, 1, 10, 60]),
        style=strategies.sampled_from(STYLES),
        step=strategies.integers(1, 6),
        loads=strategies.booleans(),
    )
    def begin(
        self, num_shared: int, num_new: int, tokens: int, after_s: int, style: str, step: int, loads: bool
    ) -> None:
        """Begin a request. If it does not load its hit, it has one in the engine's own cache."""
        path = self.make_path(num_shared, num_new, after_s)
        hit, ends = self.engine.find_hit(path, TOKENS * len(path) + tokens)
        if style == "junction" and hit + 1 < len(path):
            ends = [self.draw.randrange(hit + 1, len(path)), *ends[-1:]]
        if style == "unknown":
            calls = [[make_offload_key(x, len(self.engine.windows)) for x in path], self.engine.anchors(path)]
        else:
            calls = calls_of(style, self.engine, path, hit if loads else 0, ends, step)
        has_positions = style != "no positions"
        context = self.engine.open(path, self.now_ms, has_positions)
        for call in calls if has_positions else []:
            for key in call:
                index = path.index(key[:-4])
                context.set_offload_key_position(key, TOKENS * (index + 1))
        twin = self.twin.open(path, self.now_ms, None if has_positions else 0)
        loaded = self.twin.full(twin.path[:hit]) + self.twin.set_of(twin.path, hit)
        is_ready = self.twin.pending.isdisjoint(loaded)
        if loads and is_ready:
            self.engine.load(path, hit, context)
            self.twin.load(twin, hit)
        self.running.append(Running(context, twin, calls))
        self.agree()

    @rule(
        at=strategies.integers(0, 9),
        num_new=strategies.integers(1, 9),
        style=strategies.sampled_from(GROWING),
        step=strategies.integers(1, 3),
    )
    def reply(self, at: int, num_new: int, style: str, step: int) -> None:
        """Let a running request whose prompt was offered grow by a reply."""
        running = [request for request in self.running if not (request.calls or request.has_ended)]
        if not running or running[at % len(running)].twin.uses.positions is None:
            return
        request = running[at % len(running)]
        path = [key[:-4] for key in request.twin.path]
        num_before = len(path)
        path += [self.draw.randbytes(8) for _ in range(num_new)]
        self.paths.append(path)
        for index in range(num_before, len(path)):
            for group in range(len(self.engine.windows)):
                request.context.set_offload_key_position(make_offload_key(path[index], group), TOKENS * (index + 1))
        anchors = self.engine.anchors(path[num_before:])
        self.engine.manager.touch(anchors, request.context)
        self.twin.extend(request.twin, path[num_before:])
        request.calls += calls_of(style, self.engine, path, num_before, [len(path)], step)
        self.agree()

    @rule(at=strategies.integers(0, 9))
    def offer(self, at: int) -> None:
        """Offer the next keys of a running request."""
        running = [request for request in self.running if request.calls and not request.has_ended]
        if not running:
            return
        request = running[at % len(running)]
        keys = request.calls.pop(0)
        output = self.engine.manager.prepare_store(keys, request.context)
        self.twin.offer(request.twin, keys)

        assert sorted(output.keys_to_store) == sorted(self.twin.stored)
        request.stores.append(output.keys_to_store)
        self.agree()

    @rule(at=strategies.integers(0, 9), success=strategies.sampled_from([True, True, False]))
    def finish_store(self, at: int, success: bool) -> None:
        running = [request for request in self.running if request.stores]
        if not running:
            return
        request = running[at % len(running)]
        keys = request.stores.pop(0)
        context = None if request.has_ended and success else request.context
        self.engine.manager.complete_store(keys, context, success)
        if success:
            self.twin.pending.difference_update(keys)
        else:
            self.twin.fail(request.twin, keys)
        self.agree()

    @rule(at=strategies.integers(0, 9), aborts=strategies.booleans())
    def end(self, at: int, aborts: bool) -> None:
        running = [request for request in self.running if not request.has_ended and (aborts or not request.calls)]
        if not running:
            return
        request = running[at % len(running)]
        request.has_ended = True
        self.engine.manager.on_request_finished(request.context)
        self.twin.end(request.twin)
        self.agree()


class UnitsAboveTierMachine(UnitsMachine):
    """The same above a tier: also what passes through the share."""

    is_above_tier = True


TestUnitsMachine = UnitsMachine.TestCase
TestUnitsMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestUnitsAboveTierMachine = UnitsAboveTierMachine.TestCase
TestUnitsAboveTierMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("windows", [[None, 1], [None, 2, 2], [None, 1, 1, 1], [None, 1, None]])
@pytest.mark.parametrize("in_parts", [False, True])
def test_random_requests_agree_with_twin(windows: list[int | None], in_parts: bool) -> None:
    for seed in range(4):
        machine = UnitsMachine()
        machine.start(random.Random(seed).randrange(3, 61), windows, seed)
        draw = machine.draw
        for _ in range(60):
            shape = (draw.randrange(13), draw.randrange(10), draw.randrange(TOKENS), draw.choice([0, 1, 3, 10]))
            if not in_parts:
                machine.request(*shape)
                continue
            machine.begin(*shape, draw.choice(STYLES), draw.randrange(1, 7), draw.random() < 0.7)
            for _ in range(draw.randrange(9)):
                machine.offer(draw.randrange(9))
                machine.finish_store(draw.randrange(9), draw.random() < 0.9)
            machine.reply(draw.randrange(9), draw.randrange(1, 10), draw.choice(GROWING), draw.randrange(1, 4))
            machine.end(draw.randrange(9), draw.random() < 0.2)


def test_group_split_by_ageing_keeps_order() -> None:
    machine = UnitsMachine()
    machine.start(60, [None, 1], 0)
    for _ in range(20):
        machine.begin(-4, 1, 0, 0, "whole", 1, loads=False)
    # One use moves 256 groups to their next bin, so that the 20 of one time age in two parts.
    machine.offer(19)
    for after_s in (3600, 0, 0, 0):
        machine.begin(-4, 1, 0, after_s, "whole", 1, loads=False)
    machine.offer(0)
    assert len(machine.twin.listed) == 2


def test_evicted_passing_anchor_is_no_boundary() -> None:
    engine = Engine(8, [2, None, 1])
    engine.policy.stores_all = True
    context = engine.open([b"a"], 0)
    windowed, anchor, state = (make_offload_key(b"a", group) for group in range(3))
    engine.manager.prepare_store([windowed], context)
    passing = [anchor, make_offload_key(b"b", 1), state]
    engine.manager.reserve(passing, is_move=True)
    engine.manager.commit(passing, is_move=True)
    # The rule takes the state. Of the other two, the share has room for one.
    assert engine.manager.prepare_store([state], context).evicted_keys == [anchor]
    engine.policy.check()


def end_jobs(engine: Engine, tier: ManualTier, draw: random.Random) -> None:
    """Let some of the tier's jobs end or fail, and end a step."""
    for job in list(tier.pending):
        if draw.random() < 0.6:
            tier.end(job, draw.choice(["", "", "", "failed"]))
    engine.manager.on_schedule_end()


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=pytest.mark.slow)])
def test_failures_and_resets_keep_invariants(seeds: range) -> None:
    num_failed = num_promoted = 0
    for seed in seeds:
        draw = random.Random(seed)
        windows = draw.choice([[None, 1], [2, None, 3], [None, 1, 1, 1]])
        tier = ManualTier(40) if seed % 2 else None
        engine = Engine(draw.randrange(4, 40), windows, tier)
        manager = engine.manager
        paths = [[draw.randbytes(8) for _ in range(12)] for _ in range(6)]
        for _ in range(120):
            path = draw.choice(paths)[: draw.randrange(1, 13)] + [draw.randbytes(8) for _ in range(draw.randrange(3))]
            engine.now_ms += draw.choice([0, 1000, 60_000])
            context = ReqContext() if draw.random() < 0.9 else None
            keys = [make_offload_key(x, group) for group in range(len(windows) + 1) for x in path]
            if context is not None and draw.random() < 0.8:
                for key in keys:
                    context.set_offload_key_position(key, TOKENS * (path.index(key[:-4]) + 1))
            manager.lookup(engine.anchors(path), context)
            keys = [key for key in keys if draw.random() < 0.9] + [b"key"]
            while keys:
                if tier is not None:
                    end_jobs(engine, tier, draw)
                part, keys = keys[: draw.randrange(1, 30)], keys[draw.randrange(1, 30) :]
                output = manager.prepare_store(part, context)
                engine.policy.check()
                if output is not None:
                    manager.complete_store(output.keys_to_store, context, draw.random() < 0.8)
                engine.policy.check()
            if draw.random() < 0.1:
                manager.hint(engine.anchors(path), draw.choice(["end", "soon", "later"]))
            if context is not None:
                manager.on_request_finished(context)
            if draw.random() < 0.02:
                manager.reset_cache()
            engine.policy.check()
        num_failed += manager.stats().failed_blocks
        num_promoted += 0 if tier is None else manager.tier_stats()[0].promoted_blocks

    assert min(num_failed, num_promoted) > 0


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([None, 0], "a window of group_windows must be an int >= 1, got 0"),
        ([None, 1.5], "a window of group_windows must be an int"),
        ([None, True], "a window of group_windows must be an int"),
        ([1, 1], "a group of group_windows must have no window"),
        ([None] + [1] * 64, "group_windows must name at most 64 groups, got 65"),
        ("none", "group_windows must be a list such as"),
    ],
)
def test_wrong_group_windows_are_refused(windows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUOffloadingManager(16, 8, "gittins", group_windows=windows)


def test_above_tier_declined_unit_passes() -> None:
    """Declined blocks pass through the share, or take victims; blocks of a move belong to no request, and pass, too."""
    engine = Engine(8, [None, 1])
    engine.policy.stores_all = True
    paths = [[b"%d %d" % (i, j) for j in range(4)] for i in range(3)]
    stored = [engine.request(path, TOKENS * 4 + 1, 1000 * i)[1] for i, path in enumerate(paths)]
    moved = engine.manager.prepare_store(engine.anchors([b"a", b"b"])).keys_to_store

    assert [len(keys) for keys in stored] == [5, 5, 5]
    assert engine.policy.passing[-2:] == moved == engine.anchors([b"a", b"b"])
    assert engine.policy.gauges()["lru_requests"] == 0
    engine.policy.check()


def test_blocks_evicted_without_store_are_misses() -> None:
    """A call that stores nothing lets loaded blocks in, and evicts others. Other requests must not find those."""
    engine = Engine(20, [None, 1])
    engine.policy.stores_all = True
    path, old = [b"0", b"1"], engine.anchors([b"old %d" % i for i in range(4)])
    for keys in (old, engine.anchors(path) + engine.set_of(path, 2)):
        engine.manager.reserve(keys, is_move=True)
        engine.manager.commit(keys, is_move=True)
    other = ReqContext()
    num_found = [engine.manager.lookup(old, other) for _ in range(2)]
    context = engine.open(path, 0)
    engine.load(path, 2, context)

    assert engine.manager.prepare_store([], context).evicted_keys == old[:3]
    assert [*num_found, engine.manager.lookup(old, other)] == [4, 4, 0]
    with pytest.raises(KeyError, match="block is not in the cache"):
        engine.manager.prepare_load(old, other)


def test_passing_set_makes_no_end() -> None:
    """A windowed key in the share ends no prompt: if its anchor has left, a request that loaded it leaves it there."""
    machine = UnitsAboveTierMachine()
    machine.start(3, [None, 1], 1)
    empty: dict[str, Any] = {"num_shared": 0, "tokens": 0, "after_s": 0, "style": "whole", "step": 1}
    machine.begin(num_new=0, loads=False, **empty)
    machine.decide()
    machine.begin(num_new=0, loads=False, **empty)
    machine.promote(1, True)
    machine.begin(num_new=1, loads=True, **empty)
    machine.offer(1)
    machine.decide()

    assert [key[-1] for key in machine.engine.policy.passing] == [1]


def test_load_without_test_stays_known() -> None:
    """The rule stores the first of more declined loads than pass, though its memory of keys is full by then."""
    engine = Engine(4, [None, 1])
    engine.policy.stores_all = True
    for now_ms in range(3):
        engine.request([b"used"], TOKENS + 1, now_ms)
    path = [b"%d" % i for i in range(8)]
    loaded = engine.anchors(path[:1]) + engine.set_of(path, 1)
    engine.manager.reserve(loaded, is_move=True)
    engine.manager.commit(loaded, is_move=True)
    context = engine.open(path, 3)
    engine.load(path, 1, context)
    engine.open([b"other %d" % i for i in range(20)], 3)

    assert engine.manager.prepare_store([], context).keys_to_store == []
    assert (engine.policy.leave_first, engine.policy.passing) == (loaded[:1], loaded[1:])
    assert engine.policy.gauges()["forced_blocks"] == 1
    engine.policy.check()


def test_lru_request_takes_slots_of_passing() -> None:
    """Memory may be full of blocks that a tier read. Requests that the rule does not know store theirs, too."""
    engine = Engine(40, [None, 1])
    engine.policy.stores_all = True
    read = engine.anchors([b"read %d" % i for i in range(40)])
    engine.manager.reserve(read, is_move=True)
    engine.manager.commit(read, is_move=True)
    num_stored = []
    for i in range(6):
        context = ReqContext()
        keys = engine.anchors([b"%d %d" % (i, j) for j in range(10)])
        stored = engine.manager.prepare_store(keys, context).keys_to_store
        engine.manager.complete_store(stored, context)
        engine.manager.on_request_finished(context)
        num_stored.append(len(stored))

    assert num_stored == [10] * 6
    assert engine.policy.passing == read[-2:]
    engine.policy.check()


def test_keys_outside_sets_are_declined() -> None:
    engine = Engine(20, [None, 1])
    path = [b"%d" % i for i in range(6)]
    context = engine.open(path, 0)
    keys = [make_offload_key(x, group) for group in range(2) for x in path]

    assert engine.manager.prepare_store(keys, context).keys_to_store == [*keys[:6], keys[11]]
    assert engine.manager.stats().declined_blocks == 5


@pytest.mark.parametrize("key", [b"key", make_offload_key(b"of another size", 1)])
def test_key_without_anchor_uses_lru(key: bytes) -> None:
    engine = Engine(6, [None, 1])
    path = [b"%d" % i for i in range(6)]
    context = engine.open(path, 0)
    context.set_offload_key_position(key, TOKENS)
    keys = [*engine.anchors(path[:4]), key]
    engine.manager.complete_store(engine.manager.prepare_store(keys, context).keys_to_store, context)

    assert engine.policy.leave_first == keys
    assert engine.policy.gauges()["lru_requests"] == 1


@pytest.mark.parametrize(("num_used", "num_stored"), [(1000, 1), (1100, 0)])
def test_store_passes_1024_rows_at_most(num_used: int, num_stored: int) -> None:
    engine, context = Engine(1200, [None, 1]), ReqContext()
    keys = engine.anchors([b"%d" % i for i in range(1200)])
    engine.manager.complete_store(engine.manager.prepare_store(keys, context).keys_to_store, context)
    engine.manager.prepare_load(engine.policy.leave_first[:num_used])
    output = engine.manager.prepare_store(engine.anchors([b"new"]), ReqContext())

    assert len(output.keys_to_store) == num_stored
