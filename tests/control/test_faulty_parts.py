"""Plug-ins, backends and clocks may raise at every place where they are called: the bookkeeping stays whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest

from kvcache import (
    BackendOffloadingManager,
    BlockStateError,
    BlockStatus,
    CachePolicy,
    CPUBackend,
    CPUOffloadingManager,
    OffloadingManager,
    ReqContext,
    Retention,
)
from kvcache.testing.reference import Blocks, ReferenceLRU, Victims

NUM_BLOCKS = 6
KEYS = [b"k%d" % i for i in range(12)]


class Boom(Exception):
    """What faulty parts raise."""


class Fault:
    """Raises at one call of all those that are made, before or after the work is done."""

    def __init__(self, at: int, is_after: bool) -> None:
        self.at = at
        self.is_after = is_after
        self.num_calls = 0

    def run(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        is_now = self.num_calls == self.at
        if is_now and not self.is_after:
            raise Boom
        result = work(*args, **options)
        if is_now:
            raise Boom
        return result


def faulty(base: type, fault: Fault, names: Iterable[str]) -> type:
    """Return a subclass whose methods `names` go through `fault`."""

    def wrapped(name: str) -> Callable[..., Any]:
        return lambda self, *args, **options: fault.run(getattr(super(made, self), name), *args, **options)

    made = type(f"Faulty{base.__name__}", (base,), {name: wrapped(name) for name in names})
    return made


PRIMITIVES = ("get", "insert", "remove", "touch", "evict", "order", "use", "clear")
ALLOCATIONS = ("get_num_free_blocks", "allocate_blocks", "free", "get_load_store_spec", "reset")


def manager_of(part: str, fault: Fault) -> CPUOffloadingManager | BackendOffloadingManager:
    options: dict[str, Any] = {"enable_events": True, "store_threshold": 0}
    if part == "policy":
        return CPUOffloadingManager(16, NUM_BLOCKS, faulty(ReferenceLRU, fault, PRIMITIVES), **options)
    if part == "backend":
        backend = CPUBackend(16, NUM_BLOCKS)
        manager = BackendOffloadingManager(backend, ReferenceLRU, **options)
        backend.__class__ = faulty(CPUBackend, fault, ALLOCATIONS)
        return manager
    ticks = iter(range(1 << 30))
    options["clock"] = lambda: fault.run(lambda: float(next(ticks)))
    return CPUOffloadingManager(16, NUM_BLOCKS, "gittins", **options)


def script(manager: Any, context: ReqContext) -> list[Callable[[], Any]]:
    """Return calls of every method, such that blocks are written, read, evicted, dropped and ordered on the way."""
    return [
        lambda: manager.on_new_request(context),
        lambda: manager.lookup(KEYS[:3], context),
        lambda: manager.prepare_store(KEYS[:4], context),
        lambda: manager.complete_store(KEYS[:3], context),
        lambda: manager.complete_store(KEYS[3:4], context, False),
        lambda: manager.lookup(KEYS[0], context),
        lambda: manager.touch(KEYS[:3]),
        lambda: manager.touch(KEYS[:3], context),
        lambda: manager.prepare_load(KEYS[:2], context),
        lambda: manager.prepare_store(KEYS[4:8], context),
        lambda: manager.complete_store(KEYS[4:8], context),
        lambda: manager.complete_load(KEYS[:2], context),
        lambda: manager.prepare_store(KEYS[8:11]),
        lambda: manager.complete_store(KEYS[8:10]),
        lambda: manager.complete_store(KEYS[8:11], False),
        lambda: manager.on_request_finished(context),
        lambda: manager.on_schedule_end(),
        lambda: manager.stats(),
        lambda: manager.reset_cache(),
        lambda: manager.prepare_store(KEYS[:5]),
        lambda: manager.complete_store(KEYS[:5]),
        lambda: manager.shutdown(),
    ]


def check(manager: Any, present: set[bytes], may_lose_slots: bool) -> None:
    """Check what anybody can see: slots, counts and events agree."""
    for event in manager.take_events():
        (present.difference_update if event.removed else present.update)(event.keys)
    ready = [key for key in KEYS if manager.lookup(key)]
    assert set(ready) == present
    stats = manager.stats()
    held = stats.num_free + len(ready) + stats.num_pending
    assert held == NUM_BLOCKS or (may_lose_slots and held < NUM_BLOCKS)
    ids = manager.prepare_load(ready).block_ids.tolist()
    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(range(NUM_BLOCKS))
    manager.complete_load(ready)


@pytest.mark.parametrize("part", ["policy", "backend", "clock"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_every_method_survives_raising_parts(part: str, is_after: bool) -> None:
    num_places = at = 0
    while at <= num_places:
        at += 1
        fault = Fault(0, is_after)
        manager = manager_of(part, fault)
        present: set[bytes] = set()
        num_calls = 0
        for call in script(manager, ReqContext("r", retention=Retention("end"))):
            # The checks between call the parts, too; those calls do not fail, and do not count.
            fault.num_calls, fault.at = num_calls, at
            with suppress(Boom, KeyError, BlockStateError):
                call()
            num_calls, fault.at = fault.num_calls, 0
            if manager.stats().num_free == NUM_BLOCKS:
                present.clear()  # a reset has no events
            check(manager, present, part == "backend")
        num_places = max(num_places, num_calls)
        manager.reset_cache()
        output = manager.prepare_store([b"n%d" % i for i in range(NUM_BLOCKS)])
        assert output is not None
        assert output.store_spec.block_ids.tolist() == list(range(NUM_BLOCKS))
    # A policy reads the clock at the first use of a request alone.
    assert num_places >= (5 if part == "clock" else 8)


class Bare(ReferenceLRU):
    """The five primitives, without `cache_capacity` and `clear`."""

    clear = CachePolicy.clear

    def __init__(self, cache_capacity: int) -> None:
        self.blocks: Blocks = OrderedDict()
        self.capacity_given = cache_capacity


def stored(manager: Any, keys: list[bytes]) -> list[int]:
    output = manager.prepare_store(keys)
    manager.complete_store(keys)
    ids: list[int] = output.store_spec.block_ids.tolist()
    return ids


def test_plug_in_without_cache_capacity_resets() -> None:
    manager = CPUOffloadingManager(16, 2, Bare)
    assert stored(manager, [b"a", b"b"]) == [0, 1]
    manager.reset_cache()
    assert manager.lookup([b"a"]) == 0
    assert stored(manager, [b"c", b"d"]) == [0, 1]
    assert manager.policy.capacity_given == 2  # type: ignore[attr-defined]


def test_failed_reset_loses_no_block() -> None:
    class Stuck(Bare):
        def clear(self) -> None:
            self.blocks.clear()
            raise Boom

    manager = CPUOffloadingManager(16, 1, Stuck)
    stored(manager, [b"a"])
    Stuck.__init__ = lambda *_: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        manager.reset_cache()
    assert (manager.lookup(b"a"), stored(manager, [b"b"])) == (True, [0])


def test_raising_insert_adds_none_of_keys() -> None:
    class Choosy(Bare):
        def insert(self, key: bytes, block: BlockStatus) -> None:
            if key == b"bad":
                raise Boom
            super().insert(key, block)

    manager = CPUOffloadingManager(16, 2, Choosy, enable_events=True)
    stored(manager, [b"a", b"b"])
    list(manager.take_events())
    with pytest.raises(Boom):
        manager.prepare_store([b"c", b"bad"])
    assert (manager.stats().num_free, manager.stats().num_pending, manager.stats().evicted_blocks) == (2, 0, 2)
    assert [(event.keys, event.removed) for event in manager.take_events()] == [([b"a", b"b"], True)]
    assert manager.lookup([b"c"]) == 0
    assert sorted(stored(manager, [b"c", b"d"])) == [0, 1]


def test_failing_allocation_leaves_no_half_block() -> None:
    class Broken(CPUBackend):
        def allocate_blocks(self, block_hashes: list[bytes]) -> list[BlockStatus]:
            raise Boom

    backend = CPUBackend(16, 2)
    manager = BackendOffloadingManager(backend, Bare)
    stored(manager, [b"a", b"b"])
    backend.__class__ = Broken
    with pytest.raises(Boom):
        manager.prepare_store([b"c"])
    backend.__class__ = CPUBackend
    assert (manager.stats().num_free, manager.lookup([b"b"]), manager.lookup([b"c"])) == (1, 1, 0)
    assert stored(manager, [b"c"]) == [0]


@pytest.mark.parametrize("policy", ["lru", Bare])
def test_prepare_store_larger_backend_keeps_capacity(policy: Any) -> None:
    backend = CPUBackend(16, 4)
    backend.allocate_blocks([b"x", b"y"])
    manager = BackendOffloadingManager(backend, policy)
    manager.reset_cache()  # the backend then has four free blocks, for a manager of two
    assert manager.prepare_store(KEYS[:3]) is None
    assert (stored(manager, KEYS[:2]), stored(manager, KEYS[2:3])) == ([0, 1], [2])
    assert manager.stats().evicted_blocks == 1


def test_evict_answering_none_changes_no_count() -> None:
    class Stingy(Bare):
        def evict(self, n: int, protected: Any) -> Victims | None:
            return None

    manager = CPUOffloadingManager(16, 1, Stingy, enable_events=True, store_threshold=2)
    manager.prepare_store([b"a"])
    stored(manager, [b"a"])
    manager.prepare_store([b"b"])
    list(manager.take_events())
    before = manager.stats()
    assert manager.prepare_store([b"b", b"new"]) is None
    after = manager.stats()
    assert (after.gated_blocks, after.needed_blocks) == (before.gated_blocks, before.needed_blocks + 2)
    assert after.rejected_stores == before.rejected_stores + 1
    assert list(manager.take_events()) == []


@pytest.mark.parametrize("answer", [[], [b"a"], [(b"a",)], 7, [(b"a", 1)], [(b"z", BlockStatus(0))]])
def test_evict_answering_nonsense_loses_no_block(answer: Any) -> None:
    class Confused(Bare):
        def evict(self, n: int, protected: Any) -> Any:
            self.blocks.clear()
            return answer

    manager = CPUOffloadingManager(16, 1, Confused)
    stored(manager, [b"a"])
    with pytest.raises((BlockStateError, TypeError, ValueError)):
        manager.prepare_store([b"b"])
    assert (manager.lookup([b"a"]), manager.lookup([b"b"]), manager.stats().num_free) == (1, 0, 0)


def test_raising_remove_keeps_block_and_slot() -> None:
    class Clinging(Bare):
        def remove(self, key: bytes) -> None:
            if key == b"a":
                raise Boom
            super().remove(key)

    manager = CPUOffloadingManager(16, 2, Clinging)
    manager.prepare_store([b"a", b"b"])
    with pytest.raises(Boom):
        manager.complete_store([b"a", b"b"], None, False)
    assert (manager.stats().num_pending, manager.stats().num_free) == (1, 1)
    assert stored(manager, [b"c"]) == [1]


def test_seed_style_manager_needs_three_methods() -> None:
    methods = {name: lambda self, keys, req_context=None: None for name in ("lookup", "prepare_load", "prepare_store")}
    small: Any = type("Small", (OffloadingManager,), methods)
    manager = small()
    manager.touch([b"a"])
    manager.hint([b"a"], "soon")
    manager.hint(ReqContext(), "end")
    manager.complete_load([b"a"])
    manager.complete_store([b"a"], False)
    manager.on_new_request(ReqContext())
    manager.on_request_finished(ReqContext())
    manager.on_schedule_end()
    assert (list(manager.take_events()), manager.stats().num_blocks) == ([], 0)
    with pytest.raises(NotImplementedError, match="Small cannot be reset"):
        manager.reset_cache()
    manager.shutdown()
