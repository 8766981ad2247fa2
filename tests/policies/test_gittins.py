"""gittins: its tables on both traces, what they do not pin, and how engines call it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference_gittins import EDGES, ReferenceGittins

from kvcache import CPUOffloadingManager, OffloadingManager, ReqContext, RequestUses, Retention
from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.traces.trace import Trace
from kvcache.testing import ReferenceManager

CONVERSATION = "mooncake_conversation.jsonl"
AGENTS = "agentic_coding.jsonl.gz"
# Prefix hits and stored blocks, by trace and capacity.
TABLE = {
    CONVERSATION: {
        1000: (23630, 29601),
        3000: (40137, 69694),
        5000: (49099, 106793),
        10000: (65892, 203605),
        15000: (79767, 208733),
        20000: (87605, 200895),
        30000: (96788, 191712),
    },
    AGENTS: {
        500: (459272, 102620),
        1000: (697816, 176846),
        2000: (1024592, 251066),
        3000: (1200880, 216891),
        4000: (1286877, 161288),
        8000: (1375694, 74725),
    },
}
CELLS = [
    pytest.param(name, num_blocks, marks=[pytest.mark.slow] * (num_blocks != min(row)))
    for name, row in TABLE.items()
    for num_blocks in row
]


def requests_of(shared: Path, name: str) -> Iterable[tuple[float, list[bytes]]]:
    with Trace(shared / "traces" / name) as trace:
        for request in trace:
            yield request.arrival_s, [block.to_bytes(8, "big") for block in request.hash_ids.tolist()]


@pytest.mark.parametrize(("name", "num_blocks"), CELLS)
def test_replay_of_trace_reproduces_table(name: str, num_blocks: int, shared: Path) -> None:
    arrivals = ReplayClock()
    manager = CPUOffloadingManager(512, num_blocks, "gittins", clock=arrivals)
    replay = Replay(manager, arrivals=arrivals)
    with Trace(shared / "traces" / name) as trace:
        for request in trace:
            replay.step(request, [block.to_bytes(8, "big") for block in request.hash_ids.tolist()])

    assert replay.tally.rejected_requests == 0
    assert (replay.tally.hit_blocks, replay.tally.stored_blocks) == TABLE[name][num_blocks]


def serve(
    manager: CPUOffloadingManager, clock: ReplayClock, requests: Iterable[tuple[float, list[bytes]]], part: int
) -> int:
    """Serve requests as engines do: no touch, only what missed is stored, in parts, eight requests in turn."""
    num_hits = 0
    running: list[tuple[ReqContext, list[bytes]]] = []

    def step() -> None:
        for context, rest in list(running):
            now, rest[:] = rest[:part], rest[part:]
            output = manager.prepare_store(now, context)
            assert output is not None
            manager.complete_store(output.keys_to_store, context)
            if not rest:
                manager.on_request_finished(context)
                running.remove((context, rest))

    for clock.now_s, keys in requests:
        context = ReqContext()
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 512 * (i + 1))
        ready = manager.lookup(keys, context)
        num_hits += ready
        manager.prepare_load(keys[:ready], context)
        manager.complete_load(keys[:ready], context)
        running.append((context, keys[ready:]))
        while len(running) >= 8:
            step()
    while running:
        step()
    return num_hits


def test_storing_only_misses_reproduces_table(shared: Path) -> None:
    clock = ReplayClock()
    manager = CPUOffloadingManager(512, 500, "gittins", clock=clock)
    num_hits = 0
    for clock.now_s, keys in requests_of(shared, AGENTS):
        context = ReqContext()
        ready = manager.lookup(keys, context)
        num_hits += ready
        manager.touch(keys, context)
        output = manager.prepare_store(keys[ready:], context)
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)

    assert (num_hits, manager.stats().stored_blocks) == TABLE[AGENTS][500]


@pytest.mark.parametrize("part", [16, 10_000])
def test_interleaved_parts_lose_few_hits(part: int, shared: Path) -> None:
    clock = ReplayClock()
    manager = CPUOffloadingManager(512, 500, "gittins", clock=clock)
    requests = list(requests_of(shared, AGENTS))
    num_hits = serve(manager, clock, requests, part)
    manager.policy.check()

    assert num_hits > 0.97 * TABLE[AGENTS][500][0]
    paths = {key: path[i - 1] for _, path in requests for i, key in enumerate(path) if i}
    resident = {key for _, path in requests for key in path if manager.policy.get(key) is not None}
    assert len(resident) == 500
    assert [key for key in resident if key in paths and paths[key] not in resident] == []


def standing(num_blocks: int) -> CPUOffloadingManager:
    """Return a manager whose clock stands still."""
    return CPUOffloadingManager(16, num_blocks, "gittins", clock=lambda: 0.0)


def stored(
    manager: OffloadingManager, keys: list[bytes], context: ReqContext | None = None
) -> tuple[list[bytes], list[bytes]]:
    """Store `keys`, and return the stored keys and the evicted keys."""
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)
    return output.keys_to_store, output.evicted_keys


def keys_of(name: str, count: int) -> list[bytes]:
    return [b"%s %d" % (name.encode(), i) for i in range(count)]


class Both:
    """A compiled manager beside its specification, on one clock."""

    def __init__(self, num_blocks: int) -> None:
        self.now_s = 0.0
        clock = lambda: self.now_s  # noqa: E731
        self.specified = ReferenceManager(16, num_blocks, "gittins", clock=clock)
        self.compiled: Any = CPUOffloadingManager(16, num_blocks, "gittins", clock=clock)
        self.managers: list[Any] = [self.specified, self.compiled]

    def request(
        self, keys: list[bytes], is_checked: bool = True, next_use: str | None = None, late: str | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """Serve one request, with a hint or with a `late` one that comes after its end."""
        answers = []
        for manager in self.managers:
            context = ReqContext(retention=Retention(next_use))
            manager.touch(keys, context)
            answers.append(stored(manager, keys, context))
            manager.on_request_finished(context)
            if late is not None:
                manager.hint(context, late)
        assert answers[1] == answers[0]
        if is_checked:
            self.compiled.policy.check()
        return answers[1]

    def splits(self) -> bool:
        """Return whether widely shared blocks form classes of their own, and check that both policies agree."""
        specified, compiled = [(one.policy.splits_shared, one.policy.worths) for one in self.managers]
        assert compiled == specified
        return bool(compiled[0])


@pytest.mark.parametrize(("num_blocks", "num_taken"), [(4, 0), (6, 2)])
def test_equal_blocks_keep_their_slots(num_blocks: int, num_taken: int) -> None:
    both = Both(num_blocks)
    both.request(keys_of("old", 4))
    assert both.request(keys_of("new", 5)) == (keys_of("new", num_taken), [])
    for manager in both.managers:
        stats, declined = manager.stats(), 5 - num_taken
        assert (stats.declined_blocks, stats.gated_blocks, stats.rejected_stores) == (declined, declined, 0)


def test_old_blocks_leave_tail_first() -> None:
    both = Both(6)
    both.request(keys_of("old", 6))
    both.now_s = 3600.0

    # The last block is a group of its own and leaves in the first pass; only then may the others.
    assert both.request(keys_of("new", 4)) == (keys_of("new", 4), keys_of("old", 6)[:1:-1])


def test_queued_blocks_leave_before_declining() -> None:
    """Blocks that were stored for a tier only leave before the policy declines new blocks."""
    both = Both(6)

    def request(name: str, num_blocks: int, stores_all: bool) -> tuple[list[bytes], list[bytes]]:
        for manager in both.managers:
            manager.policy.stores_all = stores_all
        return both.request(keys_of(name, num_blocks))

    request("old", 6, False)
    request("written", 2, True)
    assert request("new", 3, False) == (keys_of("new", 2), keys_of("written", 2)[::-1])
    draw = random.Random(1)
    for _ in range(300):
        both.now_s += draw.choice([0.5, 5.0, 60.0])
        request(f"prompt {draw.randrange(6)}", draw.randrange(1, 9), draw.random() < 0.3)


@pytest.mark.slow
def test_counters_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    num_touches, keys = 64 * 18, keys_of("key", 2000)
    compiled = standing(1000)
    references = []
    for halving in (1 << 21, 1 << 60):
        monkeypatch.setattr(ReferenceGittins, "halving_total", halving)
        reference = ReferenceGittins(1000)
        for _ in range(num_touches):
            request = RequestUses()
            request.add(keys)
            reference.count_uses(keys, request)
        references.append(reference.worths)
    for _ in range(num_touches):
        compiled.touch(keys)

    assert compiled.policy.worths == references[0] != references[1]


def chats(count: int, seed: int) -> Iterator[tuple[float, list[bytes]]]:
    """Return sessions of one or two requests behind one of ten prompts, the n-th of which has a share of 1/n."""
    draw = random.Random(seed)
    prompts = [keys_of(f"prompt {i}", draw.randrange(10, 30)) for i in range(10)]
    open_session: list[bytes] = []
    for i in range(count):
        own = keys_of(f"session {seed} {i}", draw.randrange(1, 4))
        if not open_session or draw.random() < 0.6:
            open_session = draw.choices(prompts, [1 / rank for rank in range(1, 11)])[0]
        open_session = [*open_session, *own]
        yield draw.expovariate(0.5), open_session


def one_session(count: int) -> Iterator[tuple[float, list[bytes]]]:
    """Return requests of an agent, who begins anew when the prompt is long."""
    for i in range(count):
        yield 5.0, keys_of(f"agent {i // 40}", 2 * (i % 40) + 2)


def test_shared_blocks_are_told_apart() -> None:
    both = Both(90)
    draw = random.Random(1)
    splits = []

    def serve_all(requests: Iterable[tuple[float, list[bytes]]]) -> None:
        for after_s, keys in requests:
            both.now_s += after_s
            both.request(keys, is_checked=draw.random() < 0.02)
            if draw.random() < 0.05:
                for manager in both.managers:
                    manager.hint(keys[: len(keys) // 2], "later")
        splits.append(both.splits())

    serve_all(one_session(20))
    serve_all(chats(400, 1))
    serve_all(one_session(320))
    for manager in both.managers:
        manager.reset_cache()
    serve_all(chats(50, 3))

    assert splits == [False, True, False, False]


@pytest.mark.parametrize("seed", range(3))
def test_hints_match_specification(seed: int) -> None:
    both = Both(60)
    draw = random.Random(seed)
    for after_s, keys in chats(300, seed):
        both.now_s += after_s
        hints = draw.choices([None, "end", "soon", "later"], k=2)
        both.request(keys, draw.random() < 0.02, hints[0], hints[1] if draw.random() < 0.5 else None)
        if draw.random() < 0.1:
            part, hint = keys[draw.randrange(len(keys)) :], draw.choice(["end", "soon", "later"])
            for manager in both.managers:
                manager.hint(part, hint)
        if draw.random() < 0.2:
            both.splits()


@pytest.mark.parametrize(("next_use", "late"), [("end", None), (None, "end")])
def test_end_spares_blocks_of_others(next_use: str | None, late: str | None) -> None:
    both = Both(12)
    system, sessions = keys_of("system", 4), [keys_of(f"session {i}", 4) for i in range(3)]
    for own in sessions:
        both.request(system + own, True, next_use, late)
    for manager in both.managers:
        manager.hint(system, "end")
    policy = both.specified.policy
    ended = {key for key in policy.group_of if policy.group_of[key].cls // 8 == 1}  # type: ignore[attr-defined]
    assert ended == {key for own in sessions for key in own}


@pytest.mark.parametrize("delay_s", [0.5, 4.0, 9.0])
def test_late_hint_leaves_classes_apart(delay_s: float) -> None:
    """Each request is used again after 10 s, but for its last block. Before that, every one is hinted."""
    now_s = 0.0
    manager = CPUOffloadingManager(16, 60, "gittins", clock=lambda: now_s)
    for i in range(500):
        for turn in range(1, 5):
            keys, context = [*keys_of(f"session {i}", 8 * turn), b"question %d %d" % (i, turn)], ReqContext()
            manager.touch(keys, context)
            stored(manager, keys, context)
            manager.on_request_finished(context)
            now_s += delay_s
            manager.hint(context, "soon")
            now_s += 10.0 - delay_s
    worths = manager.policy.worths  # type: ignore[attr-defined]
    assert worths[0] < worths[2]


@pytest.mark.parametrize(("after_s", "is_told_apart"), [(1.0, False), (5.0, True), (15.0, True), (17.0, False)])
def test_only_middle_uses_judge_sharing(after_s: float, is_told_apart: bool) -> None:
    both = Both(40)
    for i in range(128):
        both.now_s += after_s
        both.request([*keys_of("prompt", 30), *keys_of(f"question {i}", 2)], is_checked=False)

    assert both.splits() == is_told_apart


def test_sharing_keeps_prompts_of_sessions() -> None:
    # Twenty prompts of 50 blocks, half as much room; what is asked of them is never asked again.
    draw = random.Random(3)
    names = [f"prompt {i}" for i in range(20)]
    num_hits: dict[str, int] = {}
    for policy in ("lru", "gittins"):
        draw.seed(3)
        now_s = 0.0
        manager = CPUOffloadingManager(16, 500, policy, clock=lambda: now_s)  # noqa: B023
        num_hits[policy] = 0
        for i in range(3000):
            now_s += draw.expovariate(1.0)
            name = draw.choices(names, [1 / rank for rank in range(1, 21)])[0]
            keys, context = [*keys_of(name, 50), *keys_of(f"question {i}", 20)], ReqContext()
            num_hits[policy] += manager.lookup(keys, context)
            manager.touch(keys, context)
            stored(manager, keys, context)
            manager.on_request_finished(context)

    assert num_hits["gittins"] > num_hits["lru"]


def aged_manager(num_requests: int, length: int) -> CPUOffloadingManager:
    """Return a full cache of short requests, whose clock goes on an hour later."""
    now_s = [0.0]
    manager = CPUOffloadingManager(16, num_requests * length, "gittins", clock=lambda: now_s[0])
    for i in range(num_requests):
        context = ReqContext()
        stored(manager, keys_of(f"request {i}", length), context)
    now_s[0] = 3600.0
    return manager


def test_use_after_silence_ages_few_groups() -> None:
    manager = aged_manager(700, 2)
    # Two groups a request: its last block, and the rest.
    num_bins = sum(0 < edge <= 3_600_000 >> 11 for edge in EDGES)
    num_aged = []
    for i in range(400):
        before = manager.policy.num_aged
        manager.touch([b"new %d" % i])
        num_aged.append(manager.policy.num_aged - before)
    manager.policy.check()

    assert num_aged[:200] == [256] * 200
    assert num_aged[-1] == 0
    assert sum(num_aged) == 2 * 700 * num_bins


def test_aged_groups_of_tick_match_specification() -> None:
    both = Both(120)
    draw = random.Random(5)
    num_checked = 0
    for silence_s in (8.0, 60.0, 3.0, 600.0, 0.0):
        for i in range(160):
            chain, count = draw.randrange(300), draw.randrange(1, 4)
            before = both.compiled.policy.num_aged
            both.request([b"%d %d" % (chain, j) for j in range(count)], is_checked=i % 20 == 0)
            if both.compiled.policy.num_aged - before == 256:
                both.compiled.policy.check()
                num_checked += 1
        both.now_s += silence_s
        both.splits()

    assert num_checked > 20


def test_store_skips_bounded_blocked_groups() -> None:
    manager = aged_manager(3000, 2)
    for i in range(3000):
        manager.prepare_load(keys_of(f"request {i}", 2)[1:])
    for i in range(1100):
        manager.touch([b"older %d" % i])
    before = manager.policy.num_passed

    assert stored(manager, keys_of("new", 10), ReqContext()) == ([], [])
    assert manager.policy.num_passed - before == 2048
    manager.policy.check()


def test_failed_parents_children_match_reference() -> None:
    both = Both(302)
    paths = [keys_of(f"path {i}", 3) for i in range(100)]
    for path in paths:
        for manager in both.managers:
            context = ReqContext()
            assert manager.prepare_store(path, context).keys_to_store == path
            manager.complete_store(path[1:], context)
            manager.complete_store(path[:1], context, False)
    # Half of the parents are stored again, and continued by other children.
    for path in paths[::2]:
        both.request([path[0], path[0] + b" branch"], is_checked=path is paths[0])
    both.compiled.policy.check()
    both.now_s = 3600.0
    for manager in both.managers:
        for i in range(400):
            manager.touch([b"other %d" % i])
    _, victims = both.request(keys_of("new", 200))

    assert len(victims) == 198
    both.compiled.policy.check()


def test_store_beyond_memory_remembers_all_keys() -> None:
    manager = standing(2)
    keys = keys_of("key", 9000)
    context = ReqContext()
    manager.touch(keys, context)
    assert manager.policy.num_remembered == 9000

    assert stored(manager, keys, context) == (keys[:2], [])
    assert manager.policy.num_remembered == 4 * 2
    manager.policy.check()


def test_nothing_is_stored_behind_a_hole() -> None:
    manager = standing(4)
    keys = keys_of("key", 6)
    context = ReqContext()

    assert stored(manager, keys[:5], context) == (keys[:4], [])
    manager.complete_store(keys[:1], context)
    assert stored(manager, keys[5:], context) == ([], [])
    assert manager.stats().declined_blocks == 2


def test_reordered_keys_know_their_predecessors() -> None:
    manager = standing(8)
    keys = keys_of("key", 4)
    context = ReqContext()
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, i)
    # The tail is named first: its predecessor is not known to the request yet, so that it is stored as a head.
    assert stored(manager, keys[2:], context) == (keys[2:], [])
    assert stored(manager, keys[:2], context) == (keys[:2], [])
    manager.policy.check()


def test_store_takes_keys_of_earlier_use() -> None:
    manager = standing(8)
    keys = keys_of("key", 4)
    context = ReqContext()
    # All are new; what the first use noted of its keys does not hold for those of the second.
    manager.touch(keys[:3], context)
    manager.touch(keys[3:], context)
    assert stored(manager, keys, context) == (keys, [])
    manager.policy.check()

    assert manager.policy.num_remembered == 0


@pytest.mark.parametrize("policy", ["gittins", ReferenceGittins])
def test_clock_after_weeks_stays_exact(policy: Any) -> None:
    now_s = 0.0
    manager = CPUOffloadingManager(16, 4, policy, clock=lambda: now_s)
    manager.touch([b"a"])
    # An odd number of ns, at which doubles have no halves any more.
    now_s = 5_018_027.143999999
    manager.touch([b"a"])
    assert manager.policy.now_ms == round(now_s * 1e9) // 1_000_000 == 5_018_027_143


def test_clock_is_read_once_per_request() -> None:
    now_s = 10.0
    manager = CPUOffloadingManager(16, 4, "gittins", clock=lambda: now_s)
    context = ReqContext()
    seen = []
    for now_s, request in ((10.0, context), (12.0, context), (5.0, None), (11.0, None)):
        manager.touch([b"%f" % now_s], request)
        seen.append(manager.policy.now_ms)
    now_s = float("inf")
    with pytest.raises(ValueError, match="the clock must give finite seconds, inf have passed"):
        manager.touch([b"key"])
    assert (seen, manager.policy.touches) == ([0, 0, 0, 1000], 3)
    now_s = 15.0
    manager.reset_cache()
    manager.touch([b"key"], context)
    assert manager.policy.now_ms == 5000
