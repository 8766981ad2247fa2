"""The batch operations of a block cache: compiled policies and the generic one answer alike."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from kvcache import BlockStateError, BlockStatus, CPUBackend
from kvcache.control.generic_cache import GenericBlockCache
from kvcache.core.policy_adapter import PolicyAdapter
from kvcache.registry import POLICIES

ABSENT, PENDING, READY = range(3)
NAMES = ("lru", "arc")


def key(i: int) -> bytes:
    return b"block-%d" % i


def keys(*numbers: int) -> list[bytes]:
    return [key(i) for i in numbers]


@pytest.fixture(params=[(name, form) for name in NAMES for form in ("compiled", "generic")], ids="-".join)
def make(request: pytest.FixtureRequest) -> Any:
    name, form = request.param

    def make_cache(num_blocks: int) -> Any:
        policy = POLICIES.resolve(name)(num_blocks)
        if form == "compiled":
            return policy.native(num_blocks)
        return GenericBlockCache(policy, CPUBackend(16, num_blocks), num_blocks)

    return make_cache


def store(cache: Any, names: list[bytes], request_keys: Any = None) -> Any:
    output = cache.reserve(names, request_keys, None)
    cache.commit(output.keys_to_store, request_keys)
    return output


def test_status_and_locate_take_no_reference(make: Any) -> None:
    cache = make(8)
    ids = store(cache, keys(0, 1)).store_spec.block_ids.tolist()
    cache.reserve(keys(2), None, None)
    assert cache.status(keys(2, 0, 9, 1)) == bytes([PENDING, READY, ABSENT, READY])
    assert [cache.status_of(key(i)) for i in (2, 0, 9)] == [PENDING, READY, ABSENT]
    assert cache.locate(keys(1, 2, 0, 9)) == [ids[1], -1, ids[0], -1]
    assert (cache.status([]), cache.num_referenced) == (b"", 0)


def test_lookups_are_counted_matches_are_not(make: Any) -> None:
    cache = make(8)
    store(cache, keys(0, 1))
    assert cache.lookup(keys(0, 1, 5), cache.open_request()) == 2
    assert (cache.lookups, cache.looked_up_blocks, cache.hit_blocks) == (1, 3, 2)
    assert [cache.status_of(key(i)) for i in (1, 5)] == [READY, ABSENT]
    assert (cache.lookups, cache.looked_up_blocks, cache.hit_blocks) == (3, 5, 3)
    assert cache.match_prefix(keys(0, 5), None) == 1
    assert cache.status(keys(0)) == bytes([READY])
    assert (cache.lookups, cache.looked_up_blocks, cache.hit_blocks) == (3, 5, 3)


def test_status_refuses_what_is_no_key(make: Any) -> None:
    cache = make(8)
    for bad in (b"", "text", bytearray(b"x"), None):
        with pytest.raises(ValueError, match="key must be"):
            cache.status_of(bad)
        with pytest.raises(ValueError, match="key must be"):
            cache.status([key(0), bad])


def test_match_prefix_returns_end_of_run(make: Any) -> None:
    cache = make(64)
    store(cache, keys(*range(3), *range(5, 30)))
    cache.reserve(keys(30), None, None)
    asked = keys(*range(40))
    ends = {0: 3, 2: 3, 3: 3, 4: 4, 5: 30, 29: 30, 30: 30, 40: 40}
    assert {start: cache.match_prefix(asked, None, start) for start in ends} == ends
    for start in (-1, 41):
        with pytest.raises(ValueError, match=r"start must be in 0\.\.40"):
            cache.match_prefix(asked, None, start)


def test_withheld_slots_are_never_given(make: Any) -> None:
    cache = make(8)
    store(cache, keys(*range(8)))
    cache.reset()
    cache.withhold([1, 4, 5])
    assert cache.num_free == 5
    assert store(cache, keys(*range(10, 15))).store_spec.block_ids.tolist() == [0, 2, 3, 6, 7]
    assert cache.reserve(keys(*range(10, 16)), None, None) is None
    cache.give_back([5, 1])
    assert cache.num_free == 2
    cache.reset()
    assert cache.num_free == 8
    with pytest.raises(BlockStateError, match="not withheld"):
        cache.give_back([4])


def test_slots_withheld_twice_are_refused(make: Any) -> None:
    cache = make(4)
    store(cache, keys(0))
    cache.withhold([2])
    for taken in ([3, 0], [1, 2]):
        with pytest.raises(BlockStateError, match="not free"):
            cache.withhold(taken)
    assert cache.num_free == 2
    with pytest.raises(BlockStateError, match="not withheld"):
        cache.give_back([2, 3])
    cache.give_back([2])
    assert cache.num_free == 3


def test_every_slot_is_used_once(make: Any) -> None:
    draw = random.Random(5)
    cache = make(12)
    withheld: list[int] = []
    resident: dict[bytes, int] = {}
    for step in range(600):
        free = [i for i in range(12) if i not in withheld and i not in resident.values()]
        move = draw.random()
        if move < 0.2 and free:
            taken = draw.sample(free, draw.randint(1, len(free)))
            cache.withhold(taken)
            withheld += taken
        elif move < 0.4 and withheld:
            given = draw.sample(withheld, draw.randint(1, len(withheld)))
            cache.give_back(given)
            withheld = [i for i in withheld if i not in given]
        elif move < 0.42:
            cache.reset()
            withheld, resident = [], {}
        elif len(withheld) < 10:
            output = cache.reserve(keys(*draw.sample(range(40), 2)), None, None)
            cache.commit(output.keys_to_store, None)
            for evicted in output.evicted_keys:
                del resident[evicted]
            resident.update(zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True))
        taken_now = [*resident.values(), *withheld]
        assert len(set(taken_now)) == len(taken_now), step
        assert cache.num_free == 12 - len(taken_now)
        if hasattr(cache, "check"):
            cache.check()


@pytest.mark.parametrize("num_keys", [0, 1, 3, 1000])
def test_request_keys_are_forgotten_at_reset(make: Any, num_keys: int) -> None:
    cache = make(64)
    request_keys = cache.open_request(num_keys=num_keys)
    for first in range(0, 40, 10):
        store(cache, keys(*range(first, first + 10)), request_keys)
    cache.touch(keys(*range(40)), request_keys)
    assert request_keys.num_seen == 40
    cache.reset()
    store(cache, keys(50, 51), request_keys)
    assert request_keys.num_seen == 2
    cache.end_request(request_keys, None)
    assert cache.status(keys(0, 1, 50, 51)) == bytes([ABSENT, ABSENT, READY, READY])


def drain(cache: Any, num_blocks: int) -> list[bytes]:
    """Evict everything and return the keys in the order in which they leave."""
    output = cache.reserve([b"filler-%d" % i for i in range(num_blocks)], None, None)
    return list(output.evicted_keys)


@pytest.mark.parametrize("commits", ["before", "after"])
def test_running_request_leaves_tail_first(make: Any, commits: str) -> None:
    cache = make(40)
    request_keys = cache.open_request()
    for start in range(0, 40, 4):
        batch = keys(*range(start, start + 4))
        cache.reserve(batch, request_keys, None)
        if commits == "before":
            cache.commit(batch, None)
        cache.reorder(request_keys, None)
        if commits == "after":
            cache.commit(batch, None)
    assert drain(cache, 40) == keys(*reversed(range(40)))


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", "late shuffle", "groups", "backfill", "gaps"])
@pytest.mark.parametrize("size", [1, 3])
def test_positions_order_a_running_request(make: Any, order: str, size: int) -> None:
    cache = make(30)
    positions = {key(i): (i // 2 if order == "groups" else i) * 16 for i in range(0, 30, 2 if order == "gaps" else 1)}
    numbers = list(range(30))
    if order == "descending":
        numbers.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(numbers)
    elif order == "late shuffle":
        rest = numbers[14:]
        random.Random(2).shuffle(rest)
        numbers[14:] = rest
    elif order == "backfill":
        numbers = [*range(10, 30), *range(10)]
    request_keys = cache.open_request()
    for at in range(0, 30, size):
        batch = keys(*numbers[at : at + size])
        store(cache, batch, request_keys)
        cache.reorder(request_keys, positions)
    assert drain(cache, 30) == keys(*reversed(range(30)))


@pytest.mark.parametrize("form", ["the same keys", "equal keys", "another order", "some"])
def test_requests_in_parts_leave_in_order(form: str) -> None:
    """Parts of three requests turn about, are made ready out of order, loaded, and ordered by positions at the end."""
    rng = random.Random(form)
    policy = POLICIES.resolve("lru")
    caches = [policy(60).native(60), GenericBlockCache(policy(60), CPUBackend(16, 60), 60)]
    for _ in range(30):
        requests = []
        for _ in range(3):
            start = rng.randrange(100)
            names = keys(*range(start, start + rng.randrange(1, 24)))
            known = [bytes(bytearray(name)) for name in names] if form == "equal keys" else list(names)
            if form == "another order":
                rng.shuffle(known)
            elif form == "some":
                known = [name for name in known if rng.random() < 0.7]
            positions = {name: 16 * (i + 1) for i, name in enumerate(names)}
            requests.append((names, {name: positions[name] for name in known}, rng.choice([1, 3, 8])))
        for cache in caches:
            outcome: list[Any] = []
            rng_of_cache = random.Random(len(requests[0][0]))
            opened = [cache.open_request() for _ in requests]
            begun: list[Any] = []
            for at in range(24):
                for request_keys, (names, positions, size) in zip(opened, requests, strict=True):
                    part = names[at * size : (at + 1) * size]
                    output = cache.reserve(part, request_keys, None) if part else None
                    if output is not None:
                        outcome.append((output.keys_to_store, output.evicted_keys))
                        outcome.append(output.store_spec.block_ids.tolist())
                        begun.append((output.keys_to_store, request_keys))
                        cache.reorder(request_keys, positions)
                    if begun and rng_of_cache.random() < 0.5:
                        cache.commit(*begun.pop(rng_of_cache.randrange(len(begun))))
            for stored, request_keys in begun:
                cache.commit(stored, request_keys)
            for request_keys, (names, positions, _) in zip(opened, requests, strict=True):
                if rng_of_cache.random() < 0.5:
                    ready = names[: cache.match_prefix(names, request_keys)]
                    outcome.append(cache.pin(ready, request_keys).block_ids.tolist())
                    cache.unpin(ready, request_keys)
                cache.end_request(request_keys, positions, True)
            if cache is caches[0]:
                cache.check()
                expected = outcome
        assert outcome == expected
    assert drain(caches[0], 60) == drain(caches[1], 60)


def test_later_positions_order_the_prompt(make: Any) -> None:
    cache = make(4)
    request_keys = cache.open_request()
    positions = {key(i): 16 * (i + 1) for i in range(2, 5)}
    for i in (3, 4):
        store(cache, keys(i), request_keys)
        cache.reorder(request_keys, positions)
    for i in (5, 2):
        positions[key(i)] = 16 * (i + 1)
        store(cache, keys(i), request_keys)
        cache.reorder(request_keys, positions)
    cache.end_request(request_keys, positions, True)
    assert drain(cache, 4) == keys(5, 4, 3, 2)


@pytest.mark.parametrize("used", [(0, 1, 2), (1, 2), (0, 2), (0, 2, 1)], ids=str)
def test_end_request_uses_the_whole_prompt(make: Any, used: tuple[int, ...]) -> None:
    cache = make(4)
    store(cache, keys(0, 1, 2))
    request_keys = cache.open_request()
    positions = {key(i): 16 * (i + 1) for i in range(3)}
    for i in used:
        cache.touch(keys(i), request_keys)
        cache.reorder(request_keys, positions)
    store(cache, keys(9))
    cache.end_request(request_keys, positions, True)
    assert drain(cache, 4) == keys(9, 2, 1, 0)


def test_end_request_uses_keys_with_positions(make: Any) -> None:
    cache = make(6)
    store(cache, keys(0, 1, 2))
    store(cache, keys(3, 4, 5))
    request_keys = cache.open_request()
    cache.touch(keys(3), request_keys)
    cache.end_request(request_keys, {key(0): 16, key(2): 48, key(1): 32}, True)
    evicted = drain(cache, 6)
    assert set(evicted[:2]) == set(keys(4, 5))
    assert [name for name in evicted if name in keys(0, 1, 2)] == keys(2, 1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_reorder_of_many_calls_is_linear(name: str) -> None:
    def seconds(num_keys: int) -> float:
        cache = POLICIES.resolve(name)(num_keys).native(num_keys)
        names = [key(i) for i in range(num_keys)]
        request_keys = cache.open_request()
        start = time.process_time()
        for one in names:
            cache.reserve([one], request_keys, None)
            cache.reorder(request_keys, None)
        return time.process_time() - start

    # Quadratic would be 256 times as long.
    assert min(seconds(32_768) for _ in range(2)) < 100 * min(seconds(2_048) for _ in range(4))


@pytest.mark.parametrize("name", POLICIES.names())
class TestOnePolicyOneOwner:
    """A policy belongs to callers that bring their own blocks, or to a manager's pool, and never to both."""

    def test_policy_in_use_is_refused(self, name: str) -> None:
        policy = POLICIES.resolve(name)(2)
        policy.insert(b"x", BlockStatus(0))
        with pytest.raises(BlockStateError, match="in use already"):
            policy.native(2)
        policy.remove(b"x")
        policy.native(2)
        with pytest.raises(BlockStateError, match="in use already"):
            policy.native(2)

    @pytest.mark.parametrize("call", [
        lambda policy: policy.insert(b"y", BlockStatus(1)),
        lambda policy: policy.remove(b"x"),
        lambda policy: policy.touch([b"x"]),
        lambda policy: policy.use([b"x"], False),
        lambda policy: policy.order([b"x"]),
        lambda policy: policy.evict(1, set()),
        lambda policy: policy.clear(),
    ])  # fmt: skip
    def test_policy_of_pool_is_read_only(self, name: str, call: Any) -> None:
        policy = POLICIES.resolve(name)(2)
        cache = policy.native(2)
        store(cache, [b"x"])
        with pytest.raises(BlockStateError, match="belong to its manager"):
            call(policy)
        assert (policy.get(b"x").ref_cnt, policy.get(b"x").block_id) == (0, 0)
        cache.check()

    def test_cache_outlives_its_sources(self, name: str) -> None:
        cache = POLICIES.resolve(name)(2).native(2)
        store(cache, [b"x"])
        policy = cache.current_policy()
        del cache
        assert policy.get(b"x").block_id == 0


def test_policy_without_table_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="no table"):
        PolicyAdapter(2)


def test_another_caches_request_starts_afresh() -> None:
    large, small = POLICIES.resolve("lru")(64).native(64), POLICIES.resolve("lru")(2).native(2)
    request_keys = large.open_request()
    store(large, keys(*range(64)), request_keys)
    assert small.match_prefix(keys(*range(64)), request_keys) == 0
    assert small.reserve(keys(62, 63), request_keys).store_spec.block_ids.tolist() == [0, 1]
    small.check()


def test_reset_of_large_cache_is_short() -> None:
    num_blocks = 1 << 20
    cache = POLICIES.resolve("lru")(num_blocks).native(num_blocks)
    names = [b"%07d" % i for i in range(num_blocks)]
    longest = []
    for _ in range(3):
        store(cache, names[: num_blocks - 100])
        start = time.process_time()
        cache.reset()
        cache.withhold(range(0, 1000, 10))
        longest.append(time.process_time() - start)
    assert min(longest) < 0.02
    assert cache.status_of(names[5]) == ABSENT
    cache.check()


def test_positions_that_call_manager_are_refused() -> None:
    cache = POLICIES.resolve("lru")(4).native(4)
    request_keys = cache.open_request()
    store(cache, keys(0, 1), request_keys)

    class Hostile:
        def __hash__(self) -> int:
            return hash(key(0))

        def __eq__(self, other: object) -> bool:
            cache.reset()
            return False

    positions: Any = {Hostile(): 1}
    with pytest.raises(BlockStateError, match="called the manager"):
        cache.end_request(request_keys, positions)
    cache.check()
