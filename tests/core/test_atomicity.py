"""No operation is seen, or left, half done: finalizers and other threads run between operations only."""

from __future__ import annotations

import contextlib
import gc
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvcache import BlockStateError, BlockStatus, CPUOffloadingManager, ReqContext
from kvcache.registry import POLICIES

NAMES = ("lru", "arc")
PLAIN = "reference_policies:ReferenceARC"  # five primitives in plain Python
NUM_BLOCKS = 24
NUM_KEYS = 60


class Finalizer:
    """Garbage whose finalizer runs `action`, and leaves more of its kind."""

    def __init__(self, action: Any) -> None:
        self.action = action
        self.me = self

    def __del__(self) -> None:
        self.action()


class Meanwhile:
    """Runs `action` in finalizers, at most `depth` within one another, and keeps the errors that it raises."""

    def __init__(self, action: Any, depth: int) -> None:
        self.action, self.depth, self.num_runs = action, depth, 0
        self.faults: list[BaseException] = []

    def __call__(self) -> None:
        if not self.depth:
            return
        self.depth -= 1
        self.num_runs += 1
        try:
            self.action()
        except BaseException as fault:
            self.faults.append(fault)
        finally:
            self.depth += 1


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    gc.collect()


def check(manager: CPUOffloadingManager) -> None:
    """Walk a compiled policy's invariants; a plain one has none of its own."""
    getattr(manager.policy, "check", lambda: None)()


@dataclass
class Owners:
    """The owner of each slot, as recorded from the answers of a manager."""

    manager: CPUOffloadingManager

    def check_load(self, keys: list[bytes]) -> None:
        ids = self.manager.prepare_load(keys).block_ids.tolist()
        found = self.manager._cache.locate(keys)
        self.manager.complete_load(keys)
        assert ids == found

    def act(self, draw: random.Random) -> None:
        """Store, load, order, fail, or forget: any operation, with the keys of any request."""
        keys = [b"key-%d" % draw.randrange(NUM_KEYS) for _ in range(draw.randint(1, 6))]
        context = ReqContext() if draw.random() < 0.7 else None
        manager = self.manager
        if context is not None and draw.random() < 0.5:
            for place, key in enumerate(keys):
                context.set_offload_key_position(key, place)
        kind = draw.random()
        if kind < 0.5:
            output = manager.prepare_store(keys, context)
            if output is not None:
                ids = output.store_spec.block_ids.tolist()
                assert len(ids) == len(output.keys_to_store) == len(set(ids))
                manager.complete_store(output.keys_to_store, context, draw.random() < 0.8)
        elif kind < 0.8:
            ready = [key for key in keys if manager.lookup(key)]
            with contextlib.suppress(KeyError, BlockStateError):
                self.check_load(ready)
        elif kind < 0.9:
            manager.touch(keys, context)
            if context is not None:
                manager.reorder(context)
        elif kind < 0.91:
            manager.reset_cache()
        if context is not None:
            manager.on_request_finished(context)


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("name", [*NAMES, PLAIN])
def test_finalizers_never_meet_half_done_manager(name: str) -> None:
    draw = random.Random(name)
    manager = CPUOffloadingManager(16, NUM_BLOCKS, name, enable_events=True)
    owners = Owners(manager)

    def act() -> None:
        owners.act(draw)
        check(manager)

    meanwhile = Meanwhile(act, 4)
    for _ in range(1500):
        Finalizer(meanwhile)
        keys = [b"key-%d" % draw.randrange(NUM_KEYS) for _ in range(draw.randint(1, 6))]
        owners.act(draw)
        Finalizer(meanwhile)
        # What the spec says must be where the keys are, whatever ran while the spec was made.
        output = manager.prepare_store(keys)
        if output is not None and output.keys_to_store:
            blocks = [manager.policy.get(key) for key in output.keys_to_store]
            for block, block_id in zip(blocks, output.store_spec.block_ids.tolist(), strict=True):
                # A finalizer may have evicted it meanwhile.
                with contextlib.suppress(BlockStateError):
                    assert block is None or block.ref_cnt >= 0 or block.block_id == block_id
            manager.complete_store(output.keys_to_store)
        check(manager)
    meanwhile.depth = 0
    assert meanwhile.faults == []
    # Without a GIL the collector keeps a pace of its own, whatever its threshold.
    assert meanwhile.num_runs > 100 or sysconfig.get_config_var("Py_GIL_DISABLED")


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("name", [*NAMES, PLAIN])
def test_load_gives_slots_while_finalizers_evict(name: str) -> None:
    manager = CPUOffloadingManager(16, 8, name)
    number = 0

    def evict_all() -> None:
        nonlocal number
        number += 1
        output = manager.prepare_store([b"evictor-%d-%d" % (number, i) for i in range(8)])
        if output is not None:
            manager.complete_store(output.keys_to_store)

    for round_ in range(300):
        wanted = [b"wanted-%d-%d" % (round_, i) for i in range(3)]
        output = manager.prepare_store(wanted)
        assert output is not None
        slots = output.store_spec.block_ids.tolist()
        manager.complete_store(wanted)
        if manager.lookup(wanted) != 3:
            continue
        Finalizer(evict_all)
        try:
            spec = manager.prepare_load(wanted)
        except KeyError:
            continue
        assert spec.block_ids.tolist() == slots
        assert manager.stats().num_referenced == 3
        manager.complete_load(wanted)


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("name", NAMES)
def test_plain_policys_primitives_survive_finalizers(name: str) -> None:
    draw = random.Random(name)
    policy = POLICIES.resolve(name)(NUM_BLOCKS)

    class Watched(BlockStatus):
        def __del__(self) -> None:
            meanwhile()

    def act() -> None:
        key = b"key-%d" % draw.randrange(NUM_KEYS)
        kind = draw.random()
        if kind < 0.45 and policy.get(key) is None:
            block = Watched(draw.randrange(100))
            block.ref_cnt = 0
            policy.insert(key, block)
        elif kind < 0.6:
            policy.touch([key])
        elif kind < 0.75:
            policy.evict(draw.randint(0, 3), {key})
        elif kind < 0.9 and policy.get(key) is not None:
            policy.remove(key)
        elif kind > 0.995:
            policy.clear()
        policy.check()

    meanwhile = Meanwhile(act, 3)
    for _ in range(3000):
        Finalizer(meanwhile)
        meanwhile()
    # A key may have come, or left, since `get`.
    raced = [fault for fault in meanwhile.faults if isinstance(fault, BlockStateError) and "already" in str(fault)]
    assert [fault for fault in meanwhile.faults if not isinstance(fault, KeyError) and fault not in raced] == []
    policy.clear()


@pytest.mark.parametrize("name", NAMES)
def test_key_that_calls_back_changes_nothing(name: str) -> None:
    manager = CPUOffloadingManager(16, 4, name)

    class Key:
        def __repr__(self) -> str:
            manager.prepare_store([b"a", b"b", b"c", b"d"])
            return "Key()"

    for call in (manager.prepare_store, manager.prepare_load, manager.complete_load, manager.touch,
                 manager.complete_store, manager.lookup):  # fmt: skip
        manager.reset_cache()
        with pytest.raises(ValueError, match=r"key must be exact, non-empty bytes, got Key\(\)"):
            call([b"a", Key()])
        assert manager.stats().num_pending == 4
        check(manager)


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("policy", ["lru", "arc", "gittins", PLAIN])
def test_finalizer_between_operations_finds_all_events(policy: str) -> None:
    manager = CPUOffloadingManager(16, 4, policy, enable_events=True)
    keys = [b"%d" % number for number in range(12)]
    held: set[bytes] = set()

    def compare() -> None:
        for event in manager.take_events():
            (held.difference_update if event.removed else held.update)(event.keys)
        assert {key for key in keys if manager.lookup(key)} == held

    meanwhile = Meanwhile(compare, 1)
    draw = random.Random(policy)
    for round_ in range(600):
        Finalizer(meanwhile)
        wanted = draw.sample(keys, draw.randint(1, 3))
        output = manager.prepare_store(wanted)
        Finalizer(meanwhile)
        if output is not None:
            manager.complete_store(output.keys_to_store, None, draw.random() < 0.8)
        if round_ % 50 == 49:
            meanwhile.depth -= 1  # a reset is a gap in the numbers
            manager.reset_cache()
            held.clear()
            meanwhile.depth += 1
    gc.collect()
    meanwhile()
    assert meanwhile.faults == []
