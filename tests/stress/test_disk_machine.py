"""A disk tier as a state machine: moves, resets, restarts, resizes, damage, failing calls, kills and power cuts.

After each rule the tier holds exactly the blocks that it has acknowledged, and evicts them in the order of their uses.
A crash comes after any system call of the last rule: it leaves any sectors that were not synced and any first part of
the renames, or, of a killed process, every change.
"""

import random
import shutil
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest
from disks import SCALE, Calls, Disk, crash_state, keys_on_disk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stores import payload

from kvcache.epoch import Epoch
from kvcache.tiers.base import catalog, job_tier, lifecycle
from kvcache.tiers.disk import tier as tier_module
from kvcache.tiers.disk.directory import directory_bytes
from kvcache.tiers.disk.header import TierDirectoryError, capacity_for
from kvcache.tiers.disk.maintenance import compact_tier, verify_tier

BLOCK_BYTES = 4096
FEW, MANY = 8, 12
ALL = range(24)
NAMED = Epoch.of_version("v1").of_fingerprint({})
ERRORS = ("EIO", "EIO+", "ENOSPC", "EAGAIN")
FAILING = [
    *(f"write/{name} 1 {kind}" for name in ("data", "records", "recency", "lock") for kind in ERRORS),
    *(f"{call} 1 EIO" for call in ("read/data", "read/records", "write/kvcache.json.new", "change", "sync", "lookup")),
    *(f"{call} 1 short" for call in ("read/data", "read/records", "write/data", "write")),
    *(f"{call} 1 flip" for call in ("read/data", "write/data", "write/records")),
]


def keys_of(numbers):
    return [b"block-%06d" % number for number in numbers]


def numbers_of(keys):
    return [int(key[6:]) for key in keys]


class Promise(NamedTuple):
    """The blocks that a killed process keeps, those that a power cut keeps, and how many resets they have seen."""

    held: frozenset
    durable: frozenset
    generation: int


class DiskMachine(RuleBasedStateMachine):
    """A disk tier beside its model: `order` is what it holds, least recent first."""

    def __init__(self):
        super().__init__()
        self.undo = ExitStack()
        self.path = Path(self.undo.enter_context(TemporaryDirectory(prefix="kvcache-"))) / "tier"
        patch = self.undo.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(tier_module, "_MARK_S", 60)
        patch.setattr(lifecycle, "RETRY_S", 0.01)
        patch.setattr(catalog, "_AGAIN_S", 0.0)
        self.calls = Calls(patch, random.Random(0), self.path)
        self.armed, self.num_blocks, self.generation = ("", 0), MANY, 0
        self.order, self.durable, self.doubtful, self.ghosts = [], set(), set(), set()
        # Whether the order of evictions is known, and whether a block may be corrupt after a kill.
        self.is_exact, self.is_damaged, self.is_full = True, False, False
        self.counts = Counter()
        with self.step():
            self.disk = self.new_disk(self.path)

    def new_disk(self, path, num_blocks=0):
        options = {"num_threads": 3, "flush_interval_s": 1000, "preallocate": False}
        return Disk(path, num_blocks or self.num_blocks, BLOCK_BYTES, 2 * MANY, NAMED, **options)

    def teardown(self):
        self.disk.tier.shutdown()
        self.undo.close()

    def promise(self):
        held = frozenset(self.order) - self.doubtful
        return Promise(held, held & self.durable, self.generation)

    @contextmanager
    def step(self):
        """Note what was promised before, and let calls fail meanwhile."""
        self.before, self.most_blocks, self.dropped = self.promise(), self.num_blocks, set()
        self.since, self.void_from = len(self.calls.events), None
        self.num_faults = self.calls.num_faults.total()
        if self.armed[0]:
            self.calls.set(self.armed[0], times=self.armed[1])
        yield
        self.calls.clear()
        if self.is_spoilt:
            # A slot that could not be emptied may still have its block at the next start.
            self.is_exact, self.ghosts = False, self.ghosts | self.dropped
        self.armed = ("", 0)

    @property
    def is_spoilt(self):
        """Whether a call of this step has failed, or has lied. A short one does no harm."""
        is_hit = self.calls.num_faults.total() > self.num_faults and "short" not in self.armed[0]
        self.is_damaged |= is_hit and "flip" in self.armed[0]
        return is_hit

    def drop(self, keys):
        for number in numbers_of(keys):
            assert number in self.order, "a block leaves that was not held"
            self.order.remove(number)
            self.dropped.add(number)

    numbers = st.lists(st.sampled_from(ALL), min_size=1, max_size=4, unique=True)
    sizes = st.sampled_from([FEW, MANY])

    @rule(line=st.sampled_from(FAILING), times=st.sampled_from([1, 2, 50]))
    def fail(self, line, times=1):
        """Let the next calls of a kind fail."""
        self.armed = (line, times)

    @rule(num_blocks=st.sampled_from([None, 0, 3, 10]))
    def fill(self, num_blocks):
        """Leave room for so many blocks on the disk, or for all."""
        self.calls.full_from = float("inf") if num_blocks is None else num_blocks * BLOCK_BYTES
        self.is_full, self.is_exact = True, False

    @rule(stores=st.lists(numbers, min_size=1, max_size=2))
    def store(self, stores):
        self.move([], stores)

    @rule(loads=numbers, stores=st.lists(numbers, max_size=2))
    def move(self, loads, stores):
        """Load blocks, and store others beside it."""
        held = [number for number in loads if number in self.order]
        jobs = [(keys_of(held), None)] if held else []
        jobs += [(keys_of(numbers), [[number, self.generation] for number in numbers]) for numbers in stores]
        with self.step():
            self.disk.host[:] = 0
            results = self.disk.move(jobs)
            if held:
                self.end_load(held, results.pop(0))
            offered = set()
            for numbers, result in zip(stores, results, strict=True):
                self.end_store(numbers, offered, result, is_alone=len(jobs) == 1)
                offered.update(numbers)

    def end_load(self, numbers, result):
        done = set(numbers_of(result.done))
        for row, number in zip(self.disk.host, numbers, strict=False):
            assert number not in done or np.array_equal(row, payload([number, self.generation], BLOCK_BYTES)), number
        lost = set(numbers) - done
        assert self.is_spoilt or lost <= self.doubtful, (lost, result)
        assert not (result.error and result.removed), "a block that was not read stays"
        assert result.error or set(numbers_of(result.removed)) == lost
        self.drop(result.removed)
        self.is_exact &= not lost
        self.counts["loaded"] += len(done)

    def end_store(self, numbers, offered, result, is_alone):
        absent = [number for number in numbers if number not in self.order]
        if result is None:
            assert self.is_full or not is_alone, "a store is refused"
            return
        num_over = max(0, len(self.order) + len(absent) - self.num_blocks)
        if self.is_exact and is_alone:
            oldest = [number for number in self.order if number not in numbers]
            assert numbers_of(result.removed) == oldest[:num_over], self.order
        self.drop(key for key in result.removed if int(key[6:]) in self.order)
        done = set(numbers_of(result.done))
        assert done <= set(absent)
        assert self.is_spoilt or self.is_full or set(absent) - offered <= done, result
        assert self.is_spoilt or self.is_full or not done or self.disk.reason == ""
        if done != set(absent) or not is_alone:
            self.is_exact = False
        self.order += [number for number in absent if number in done]
        self.doubtful -= done
        if self.is_spoilt and "flip" in self.armed[0]:
            self.doubtful |= done
        self.durable -= done
        self.counts["stored"] += len(done)

    @rule(numbers=numbers)
    def touch(self, numbers):
        held = [number for number in numbers if number in self.order]
        with self.step():
            self.disk.tier.touch(keys_of(held))
        self.order = [number for number in self.order if number not in held] + held[::-1]

    @rule(numbers=numbers)
    def delete(self, numbers):
        with self.step():
            self.drop(self.disk.tier.delete(keys_of(numbers)))
        self.is_exact = False

    @rule()
    def flush(self):
        with self.step():
            try:
                self.disk.tier.flush()
            except OSError:
                assert self.is_spoilt
            else:
                self.durable = set(self.order)

    @rule()
    def reset(self):
        with self.step():
            self.order, self.durable, self.doubtful, self.ghosts = [], set(), set(), set()
            self.disk.tier.reset("v1")
            # From here on a killed process leaves no block, if the mark could be written.
            self.void_from = None if self.is_spoilt else len(self.calls.events)
            self.disk.wait_available()
            self.generation += 1
        self.is_exact = not self.is_full

    @rule(num_blocks=sizes, is_packed=st.booleans())
    def reopen(self, num_blocks=MANY, is_packed=False):
        """Shut the tier down, at times pack its blocks, and open it with more or fewer slots."""
        with self.step():
            self.disk.tier.shutdown()
            if not self.is_spoilt:
                self.durable = set(self.order)
            if is_packed:
                self.pack(num_blocks)
            is_smaller = num_blocks < self.num_blocks and not is_packed
            self.num_blocks, self.most_blocks = num_blocks, max(num_blocks, self.num_blocks)
            self.open(is_smaller)

    def pack(self, num_blocks):
        self.calls.full_from = float("inf")
        capacity = capacity_for(num_blocks, BLOCK_BYTES)
        try:
            compact_tier(self.path, capacity)
        except (TierDirectoryError, OSError):
            assert self.is_spoilt
            self.calls.clear()
            compact_tier(self.path, capacity)
        self.calls.clear()
        num_good, num_bad = verify_tier(self.path)
        if self.is_exact and not self.is_spoilt:
            self.order = self.order[-num_blocks:]
            assert (num_good, num_bad) == (len(self.order), 0)
        elif len(self.order) > num_blocks or self.is_spoilt:
            self.doubtful = set(self.order)

    def open(self, is_smaller=False):
        """Open the tier; faults may prevent it once. Its blocks are those of the last one."""
        num_faults, is_open = self.calls.num_faults.total(), False
        while not is_open:
            try:
                self.disk = self.new_disk(self.path)
                is_open = self.calls.num_faults.total() == num_faults or "short" in self.armed[0]
                if not is_open:
                    self.disk.tier.shutdown()
            except TierDirectoryError:
                if not self.is_spoilt:
                    raise
            self.calls.clear()
            num_faults = self.calls.num_faults.total()
        held = numbers_of(self.disk.held(keys_of(ALL)))
        risen = set(held).difference(self.order)
        assert risen <= self.ghosts, "a block is back that has left"
        self.order, self.doubtful = [*risen, *self.order], self.doubtful | risen
        self.is_exact &= not risen
        assert is_smaller or set(self.order) - self.doubtful <= set(held)
        self.order = [number for number in self.order if number in held]
        self.is_full = self.calls.full_from < float("inf")
        if self.doubtful or self.is_spoilt or not self.is_exact:
            self.settle(held)

    def settle(self, held):
        """Find out which blocks are whole, and give them an order."""
        self.is_exact = not self.is_full
        if held:
            self.doubtful |= set(self.order) if self.is_damaged else set()
            self.disk.host[:] = 0
            self.end_load(held, self.disk.move([(keys_of(held), None)])[0])
            self.disk.tier.touch(keys_of(self.order))
            self.order.reverse()
        self.doubtful = set()

    @rule(name=st.sampled_from(["data", "records", "recency", "lock", "kvcache.json"]), seed=st.integers(0, 1 << 32),
          kind=st.sampled_from(["flip", "zero", "swap", "cut", "grow", "void"]))  # fmt: skip
    def damage(self, name, kind, seed=0):
        """Damage a file of the tier that is shut down."""
        draw = random.Random(seed)
        self.disk.tier.shutdown()
        files = {file.name: file.read_bytes() for file in self.path.iterdir()}
        body = bytearray(files[name])
        at, unit = draw.randrange(len(body)), {"data": 4096, "records": 128}.get(name, 16)
        match kind:
            case "flip":
                body[at] ^= 1 << draw.randrange(8)
            case "zero":
                body[at // 512 * 512 : (at // 512 + 1) * 512] = bytes(len(body[at // 512 * 512 :][:512]))
            case "swap":
                one, other = (draw.randrange(len(body) // unit) * unit for _ in range(2))
                body[one : one + unit], body[other : other + unit] = (
                    body[other : other + unit], body[one : one + unit])  # fmt: skip
            case "cut":
                del body[at:]
            case "grow":
                body += draw.randbytes(draw.randint(1, 5000))
            case "void":
                body[:] = bytes(len(body))
        num_held, most = len(self.order), {"flip": 1, "zero": 1 if name == "data" else 4, "swap": 2}.get(kind, MANY)
        if name in ("recency", "lock"):
            most = 0
        self.durable, self.doubtful, self.is_exact, self.is_damaged = set(self.order), set(self.order), False, True
        self.restart(files | {name: bytes(body)})
        with self.step():
            try:
                self.open()
            except TierDirectoryError:
                assert name == "kvcache.json" or kind == "grow"
                self.restart(files)
                self.open()
            assert num_held - len(self.order) <= most or name == "kvcache.json"

    def restart(self, files):
        """Leave these files in place of the tier's, which is shut down."""
        shutil.rmtree(self.path)
        write_files(self.path, files)
        self.calls.adopt(files)

    @rule(is_kill=st.booleans(), seed=st.integers(0, 1 << 32))
    def crash(self, is_kill, seed=0):
        """Go on from a state that a crash inside the last step may leave."""
        draw = random.Random(seed)
        files, held, generation = self.check_crash(draw.randint(self.since, len(self.calls.events)), is_kill, draw)
        self.disk.tier.shutdown()
        self.restart(files)
        self.num_blocks = self.most_blocks
        # A power cut may keep the record of a block and lose its bytes.
        self.order, self.durable, self.doubtful, self.is_exact = held, set(held), set(() if is_kill else held), False
        self.generation = generation
        self.is_damaged |= not is_kill
        with self.step():
            self.open()

    def check_crash(self, at, is_kill, draw):
        """Open what a crash after so many events leaves; return the files, the blocks held and their generation."""
        files = crash_state(self.calls.events[:at], draw, is_kill)
        left, after = self.path.with_name("left"), self.promise()
        write_files(left, files)
        before = self.before if at < len(self.calls.events) else after
        must = (before.held & after.held if is_kill else before.durable & after.durable) - self.dropped
        is_void = is_kill and self.void_from is not None and at >= self.void_from
        generations = {after.generation} if is_void else {before.generation, after.generation}
        disk = self.new_disk(left, self.most_blocks)
        held = disk.held(keys_of(ALL))
        loaded = disk.load(held)[1] if held else {}
        num_corrupt = disk.tier.stats().corrupt_blocks
        disk.tier.shutdown()
        blocks = dict(zip(numbers_of(loaded), loaded.values(), strict=True))

        def matching(generation):
            return [n for n, block in blocks.items() if np.array_equal(block, payload([n, generation], BLOCK_BYTES))]

        generation = max(range(self.generation + 1), key=lambda generation: len(matching(generation)))
        found = matching(generation)
        assert len(found) == len(loaded), "wrong bytes, or blocks from before and after a reset"
        assert generation in generations or not found, (generation, generations)
        assert must <= set(found), f"lost {must.difference(found)}"
        # A killed process loses no change, so only a bad medium makes a block corrupt.
        assert not (is_kill and num_corrupt) or self.is_damaged, f"{num_corrupt} blocks are corrupt"
        assert keys_on_disk(files, self.most_blocks) in (None, set(loaded))
        shutil.rmtree(left)
        self.counts.update(crashes=1, promised=len(must))
        return files, numbers_of(held), generation if found else after.generation

    @invariant()
    def tier_holds_what_it_acknowledged(self):
        stats = self.disk.tier.stats()
        assert numbers_of(self.disk.held(keys_of(ALL))) == sorted(self.order)
        assert stats.num_held == len(self.order) <= self.num_blocks
        assert directory_bytes(self.path) <= capacity_for(self.num_blocks, BLOCK_BYTES)


def write_files(path, files):
    path.mkdir(mode=0o700)
    for name, body in files.items():
        (path / name).write_bytes(body)
        (path / name).chmod(0o600)


class TestDiskMachine(DiskMachine.TestCase):
    settings = settings(
        max_examples=max(5, round(60 * SCALE)), stateful_step_count=30, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


FULL = [("store", [range(4), range(4, 8)]), ("store", [range(8, 12)])]
RUNS = {
    "full tier": [*FULL, ("store", [range(12, 16)]), ("move", [12, 13], [range(16, 20), [3, 4]])],
    "reset": [*FULL, ("flush",), ("reset",), ("store", [range(2, 6)]), ("reset",), ("reopen",)],
    "resize": [*FULL, ("reopen", FEW), ("store", [range(12, 16)]), ("reopen", MANY), ("reopen", FEW, True)],
    "deleted": [*FULL, ("delete", [0, 5]), ("store", [[5, 12]]), ("reopen",), ("store", [[0, 5]])],
}


@pytest.mark.parametrize("name", RUNS)
def test_every_crash_state_is_sound(name):
    machine, draw = DiskMachine(), random.Random(name)
    try:
        for rule_name, *arguments in RUNS[name]:
            getattr(machine, rule_name)(*arguments)
            machine.tier_holds_what_it_acknowledged()
            for at in range(machine.since, len(machine.calls.events) + 1):
                for is_kill in (True, False):
                    machine.check_crash(at, is_kill, draw)
    finally:
        machine.teardown()
    print(machine.counts)


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("line", FAILING)
def test_failing_calls_lose_nothing(line, times):
    machine = DiskMachine()
    uses = [("store", [range(8, 12)]), ("move", range(8, 12), [range(12, 14)]), ("flush",), ("reset",), *FULL[:1]]
    try:
        for rule_name, *arguments in [*FULL, *uses, ("reopen", FEW), ("reopen", MANY, True)]:
            machine.fail(line, times)
            getattr(machine, rule_name)(*arguments)
            machine.tier_holds_what_it_acknowledged()
            machine.check_crash(len(machine.calls.events), True, random.Random(line))
    finally:
        machine.teardown()


def test_hanging_calls_block_no_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(job_tier, "_SHUTDOWN_S", 0.2)
    calls = Calls(monkeypatch, random.Random(1))
    open_disk = partial(Disk, tmp_path / "tier", MANY, BLOCK_BYTES, MANY, flush_interval_s=0.05)
    disk = open_disk()
    disk.store(keys_of(range(8)))
    disk.tier.shutdown()
    since_s = time.monotonic()
    calls.set("lookup 1 hang")
    disk = open_disk(open_timeout_s=0.2)
    assert (disk.tier.stats().unavailable_reason, disk.tier.lookup(keys_of(ALL))) == ("opening", 0)
    calls.clear()
    disk.wait_available()
    assert disk.tier.stats().num_held == 8
    calls.set("write 1 hang", "sync 1 hang")
    disk.tier.reset()
    assert disk.tier.stats().unavailable_reason == "reset under way"
    calls.clear()
    disk.wait_available()
    assert disk.tier.stats().num_held == 0
    calls.set("write 1 hang", "sync 1 hang")
    assert disk.tier.submit_store(1, keys_of([1]), [0])
    disk.tier.shutdown()
    assert time.monotonic() - since_s < 50
    calls.clear()
