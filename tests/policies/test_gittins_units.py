"""gittins with several KV-cache groups: its table on both traces, and its twin after each request."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from reference_gittins_units import ReferenceUnits

from kvcache import CPUOffloadingManager, ReqContext, make_offload_key
from kvcache.lab.traces.trace import Trace

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
CELLS = [pytest.param(*row, marks=[pytest.mark.slow] * (i > 0)) for i, row in enumerate(TABLE)]


class Engine:
    """A compiled manager that serves a request in one step, as the replay does."""

    def __init__(self, num_blocks: int, windows: list[int | None]) -> None:
        self.now_ms = 0
        self.windows = windows
        self.manager: Any = CPUOffloadingManager(
            TOKENS, num_blocks, "gittins", clock=lambda: self.now_ms / 1000, group_windows=windows
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

    def request(self, path: list[bytes], prompt_tokens: int, now_ms: int) -> tuple[int, list[bytes]]:
        """Serve a request. Return its hit in positions, and the stored keys."""
        self.now_ms = now_ms
        anchors = [make_offload_key(x, self.windows.index(None)) for x in path]
        limit = min(len(path), (prompt_tokens - 1) // TOKENS)
        full = next((i for i, key in enumerate(anchors[:limit]) if not self.is_resident([key])), limit)
        hit = next(end for end in range(full, -1, -1) if self.is_resident(self.set_of(path, end)))
        ends = [end for end in sorted({full, limit}) if end > hit]
        context = ReqContext()
        position_of = {x: TOKENS * (i + 1) for i, x in enumerate(path)}
        windowed = sorted({key for end in ends for key in self.set_of(path, end)}, key=lambda key: key[-4:])
        windowed.sort(key=lambda key: (key[-4:], position_of[key[:-4]]))
        for key in anchors + windowed:
            context.set_offload_key_position(key, position_of[key[:-4]])
        self.manager.touch(anchors, context)
        output = self.manager.prepare_store(anchors[hit:] + windowed, context)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        return hit, output.keys_to_store


@pytest.mark.parametrize(("trace", "windows", "positions", "hits", "stored"), CELLS)
def test_replay_reproduces_table_of_units(
    trace: str, windows: str, positions: int, hits: int, stored: int, shared: Path
) -> None:
    engine = Engine(positions * (1 + len(WINDOWS[windows])), [None, *WINDOWS[windows]])
    num_hits = 0
    with Trace(shared / "traces" / FILES[trace]) as requests:
        for request in requests:
            num_full = request.input_length // TOKENS
            path = [x.to_bytes(8, "big") for x in request.hash_ids.tolist()[:num_full]]
            num_hits += engine.request(path, request.input_length, round(request.arrival_s * 1000))[0]
    engine.policy.check()

    assert (num_hits, engine.manager.stats().stored_blocks) == (hits, stored)


@pytest.mark.slow
def test_replay_of_twin_reproduces_table(shared: Path) -> None:
    twin = ReferenceUnits(2000, [None, 1])
    num_hits = num_stored = 0
    with Trace(shared / "traces" / FILES["conversation"]) as requests:
        for request in requests:
            path = [x.to_bytes(8, "big") for x in request.hash_ids.tolist()[: request.input_length // TOKENS]]
            num_hits += twin.request(path, request.input_length, round(request.arrival_s * 1000))
            num_stored += len(twin.stored)

    assert (num_hits, num_stored) == TABLE[0][3:]


class UnitsMachine(RuleBasedStateMachine):
    """The compiled policy beside its twin: hits, stored keys, queue and lists after each request."""

    @initialize(
        num_blocks=strategies.integers(3, 60),
        windows=strategies.sampled_from([[None, 1], [None, 2, 2], [1, None, 1, 1], [None, 3], [2, 1, None]]),
        seed=strategies.integers(0, 1 << 30),
    )
    def start(self, num_blocks: int, windows: list[int | None], seed: int) -> None:
        self.engine = Engine(num_blocks, windows)
        self.twin = ReferenceUnits(num_blocks, windows)
        self.draw = random.Random(seed)
        self.paths: list[list[bytes]] = [[]]
        self.now_ms = 0

    @rule(
        num_shared=strategies.integers(0, 12),
        num_new=strategies.integers(0, 9),
        tokens=strategies.integers(0, TOKENS - 1),
        after_s=strategies.sampled_from([0, 1, 3, 10, 60, 600]),
    )
    def request(self, num_shared: int, num_new: int, tokens: int, after_s: int) -> None:
        """Serve a request that shares a head with an older one."""
        older = self.draw.choice(self.paths)[: num_shared + 4]
        path = older + [self.draw.randbytes(8) for _ in range(num_new)]
        if not path:
            return
        self.paths.append(path)
        self.now_ms += 1000 * after_s
        prompt_tokens = TOKENS * len(path) + tokens
        hit = self.twin.request(path, prompt_tokens, self.now_ms)
        compiled_hit, stored = self.engine.request(path, prompt_tokens, self.now_ms)

        assert (compiled_hit, sorted(stored)) == (hit, sorted(self.twin.stored))
        assert self.engine.policy.leave_first == list(self.twin.leave_first)
        assert self.engine.policy.listed == self.twin.listed
        self.engine.policy.check()


TestUnitsMachine = UnitsMachine.TestCase
TestUnitsMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("windows", [[None, 1], [None, 2, 2], [None, 1, 1, 1]])
def test_random_requests_agree_with_twin(windows: list[int | None]) -> None:
    for seed in range(12):
        machine = UnitsMachine()
        machine.start(random.Random(seed).randrange(3, 61), windows, seed)
        for _ in range(150):
            machine.request(
                machine.draw.randrange(13), machine.draw.randrange(10), machine.draw.randrange(TOKENS),
                machine.draw.choice([0, 1, 3, 10, 60]),
            )  # fmt: skip


def test_failures_parts_and_resets_break_no_invariant() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        windows = draw.choice([[None, 1], [2, None, 3], [None, 1, 1, 1]])
        engine = Engine(draw.randrange(4, 40), windows)
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
            keys = [key for key in keys if draw.random() < 0.9] + [b"key"]
            while keys:
                part, keys = keys[: draw.randrange(1, 30)], keys[draw.randrange(1, 30) :]
                output = manager.prepare_store(part, context)
                manager.policy.check()
                manager.complete_store(output.keys_to_store, context, draw.random() < 0.8)
                manager.policy.check()
            if draw.random() < 0.1:
                manager.hint([make_offload_key(x, 0) for x in path], draw.choice(["end", "soon", "later"]))
            if draw.random() < 0.02:
                manager.reset_cache()
            manager.policy.check()


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([None, 0], "a window of group_windows must be an int >= 1, got 0"),
        ([None, 1.5], "a window of group_windows must be an int"),
        ([None, True], "a window of group_windows must be an int"),
        ([1, 1], "exactly one group of group_windows must have no window"),
        ([None, None, 1], "exactly one group of group_windows must have no window"),
        ([None] + [1] * 64, "group_windows must name at most 64 groups, got 65"),
        ("none", "group_windows must be a list such as"),
    ],
)
def test_wrong_group_windows_are_refused(windows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUOffloadingManager(16, 8, "gittins", group_windows=windows)


def test_policy_without_units_refuses_windows() -> None:
    with pytest.raises(ValueError, match="the policy LRUCachePolicy has no rule for several KV-cache groups"):
        CPUOffloadingManager(16, 8, "lru", group_windows=[None, 1])


def test_one_group_is_plain_gittins() -> None:
    assert type(CPUOffloadingManager(16, 8, "gittins", group_windows=[None]).policy).__name__ == "GittinsCachePolicy"


def test_unknown_groups_and_keys_outside_sets_are_declined() -> None:
    engine = Engine(20, [None, 1])
    path = [b"%d" % i for i in range(6)]
    context = ReqContext()
    keys = [make_offload_key(x, group) for group in range(3) for x in path]
    for key in keys:
        context.set_offload_key_position(key, TOKENS * (path.index(key[:-4]) + 1))
    output = engine.manager.prepare_store([*keys, b"key"], context)

    assert output.keys_to_store == [*keys[:6], keys[11]]
    assert engine.manager.stats().declined_blocks == 12
