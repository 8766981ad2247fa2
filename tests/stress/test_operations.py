"""Random manager operations under finalizers, threads and failing plug-ins: no wrong slot, no lost slot, flat memory.

Every store writes its key to its slot, and every load compares the slot with its key. So a load finds a slot that two
keys share, or that belongs to another key. `KVCACHE_STRESS` multiplies the number of calls of each kind, 50,000 by
default.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvcache import BlockStateError, BlockStatus, CPUOffloadingManager, ReqContext, Retention
from kvcache.testing.reference import ReferenceLRU, Victims

NUM_CALLS = int(50_000 * float(os.environ.get("KVCACHE_STRESS", "1")))
NUM_BLOCKS = 96
NUM_KEYS = 300
KEYS = [b"key %d" % i + bytes(28) for i in range(NUM_KEYS)]


class Boom(Exception):
    """Raised by the failing plug-in."""


class FailingPolicy(ReferenceLRU):
    """A Python policy that sometimes raises before or after its work."""

    dice = random.Random(7)
    is_failing = False

    def _fail(self) -> None:
        if self.is_failing and self.dice.random() < 0.002:
            raise Boom

    def insert(self, key: bytes, block: BlockStatus) -> None:
        self._fail()
        super().insert(key, block)
        self._fail()

    def remove(self, key: bytes) -> None:
        self._fail()
        super().remove(key)
        self._fail()

    def touch(self, keys: Iterable[bytes]) -> None:
        self._fail()
        super().touch(keys)

    def evict(self, n: int, protected: Any) -> Victims | None:
        self._fail()
        victims = super().evict(n, protected)
        self._fail()
        return victims


class Driver:
    """Drives one manager from one thread, or from finalizers."""

    def __init__(self, manager: CPUOffloadingManager, memory: list[bytes], seed: int) -> None:
        self.manager = manager
        self.memory = memory
        self.dice = random.Random(seed)
        self.num_calls = 0
        self.contexts = [ReqContext() for _ in range(4)]

    def step(self) -> None:
        dice, manager = self.dice, self.manager
        first = dice.randrange(NUM_KEYS)
        keys = KEYS[first : first + dice.randrange(1, 12)]
        at = dice.randrange(len(self.contexts))
        context = self.contexts[at] if dice.random() < 0.8 else None
        kind = dice.randrange(10)
        self.num_calls += 1
        if kind < 4:
            self._store(keys, context)
        elif kind < 7:
            self._load(keys, context)
        elif kind < 8:
            manager.touch(keys, context)
        elif kind < 9:
            assert 0 <= manager.lookup(keys, context) <= len(keys)
        else:
            context = self.contexts[at]
            self.contexts[at] = ReqContext(retention=dice.choice((None, None, Retention(2, 0.01), Retention(-1))))
            manager.on_request_finished(context)

    def _store(self, keys: list[bytes], context: ReqContext | None) -> None:
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return
        ids: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        for block_id, key in zip(ids, output.keys_to_store, strict=True):
            self.memory[block_id] = key
        is_written = self.dice.random() < 0.8
        self.num_calls += 1
        while True:
            try:
                self.manager.complete_store(output.keys_to_store, context, is_written)
                return
            except Boom:
                continue

    def _load(self, keys: list[bytes], context: ReqContext | None) -> None:
        try:
            spec = self.manager.prepare_load(keys[: self.manager.lookup(keys)], context)
        except (KeyError, BlockStateError):
            return  # another thread or a finalizer ran in between
        ids: list[int] = spec.block_ids.tolist()  # type: ignore[attr-defined]
        for block_id, key in zip(ids, keys, strict=False):
            assert self.memory[block_id] == key, f"slot {block_id} of {key!r} holds {self.memory[block_id]!r}"
        self.num_calls += 2
        self.manager.complete_load(keys[: len(ids)], context)


class Bomb:
    """Part of a reference cycle: when the garbage collector finds it, its finalizer calls the manager."""

    live = True

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.me = self

    def __del__(self) -> None:
        if Bomb.live:
            try:
                self.driver.step()
            except Boom:
                pass
            except BaseException as error:
                FAULTS.append(error)


FAULTS: list[BaseException] = []


@pytest.fixture
def eager_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    FAULTS.clear()
    Bomb.live = True
    gc.set_threshold(40, 5, 5)
    yield
    gc.set_threshold(*thresholds)
    Bomb.live = False
    gc.collect()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(driver: Driver, bomber: Driver, num_calls: int) -> None:
    warm = 0
    while driver.num_calls + bomber.num_calls < num_calls:
        if driver.dice.random() < 0.3:
            Bomb(bomber)
        with suppress(Boom):
            driver.step()
        if driver.num_calls % 1000 == 0:
            list(driver.manager.take_events())
        if not warm and driver.num_calls > num_calls // 4:
            warm = resident_bytes()
    assert resident_bytes() - warm < 16 << 20


def check_whole(manager: CPUOffloadingManager) -> None:
    stats = manager.stats()
    assert (stats.num_referenced, stats.num_pending) == (0, 0)
    ready = [key for key in KEYS if manager.lookup(key)]
    assert stats.num_free + len(ready) == NUM_BLOCKS
    ids: list[int] = manager.prepare_load(ready).block_ids.tolist()  # type: ignore[attr-defined]
    assert len(set(ids)) == len(ids)
    manager.complete_load(ready)
    manager.reset_cache()
    output = manager.prepare_store(KEYS[:NUM_BLOCKS])
    assert output is not None
    assert output.store_spec.block_ids.tolist() == list(range(NUM_BLOCKS))  # type: ignore[attr-defined]


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("policy", ["lru", "arc", "mq", "amq", "lfuda", "gittins", FailingPolicy])
def test_finalizers_and_failures_give_no_key_anothers_slot(policy: str | type, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CPUOffloadingManager(16, NUM_BLOCKS, policy, enable_events=True)
    memory = [b""] * NUM_BLOCKS
    monkeypatch.setattr(FailingPolicy, "is_failing", True)
    run(Driver(manager, memory, 1), Driver(manager, memory, 2), NUM_CALLS)
    Bomb.live = False
    monkeypatch.setattr(FailingPolicy, "is_failing", False)
    assert FAULTS == []
    list(manager.take_events())
    check_whole(manager)


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("policy", ["lru", "arc", "amq", "gittins"])
def test_threads_and_finalizers_give_no_key_anothers_slot(policy: str) -> None:
    manager = CPUOffloadingManager(16, NUM_BLOCKS, policy)
    memory = [b""] * NUM_BLOCKS

    def work(seed: int) -> None:
        driver, bomber = Driver(manager, memory, seed), Driver(manager, memory, seed + 100)
        try:
            while driver.num_calls < NUM_CALLS // 12:
                if driver.dice.random() < 0.2:
                    Bomb(bomber)
                driver.step()
        except BaseException as error:
            FAULTS.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Bomb.live = False
    assert FAULTS == []
    check_whole(manager)
