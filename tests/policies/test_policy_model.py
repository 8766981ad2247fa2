"""Every policy against its contract and its specification, under every manager."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.registry import POLICIES
from kvcache.testing import REFERENCE_POLICIES, PolicyContract, ReferenceManager, cache_machine

BUILT_IN = [name for name in POLICIES.names() if POLICIES.resolve(name).__module__.startswith("kvcache.policies.")]


class ReferenceContract(PolicyContract):
    # The machine of the compiled twin runs these, too.
    test_agrees_with_reference_under_every_manager = None


for _name, _twin in REFERENCE_POLICIES.items():
    _attributes = {
        "policy": _name,
        "stores_all": not _twin.declines,
        "evicts_tails_first": getattr(_twin, "evicts_tails_first", True),
    }
    globals()[f"Test{_name.upper()}"] = type(f"Test{_name.upper()}", (PolicyContract,), _attributes)
    _reference = type(f"Test{_twin.__name__}", (ReferenceContract,), {**_attributes, "policy": _twin})
    globals()[_reference.__name__] = _reference


class ReferenceGittinsAboveTier(REFERENCE_POLICIES["gittins"]):
    stores_all = True


TestGittinsAboveTier = cache_machine("gittins", ReferenceGittinsAboveTier).TestCase
TestGittinsAboveTier.settings = settings(max_examples=20)
TestGittinsAboveTier = pytest.mark.slow(TestGittinsAboveTier)
TestGate = cache_machine("arc", manager_options={"store_threshold": 2, "max_tracker_size": 5}).TestCase
TestGate = pytest.mark.slow(TestGate)


def test_compiled_policy_shows_compared_state() -> None:
    shown = CPUOffloadingManager(16, 2, "arc").policy

    assert REFERENCE_POLICIES.keys() == set(BUILT_IN)
    assert [name for name in ("t1", "t2", "b1", "b2", "target_t1_size") if not hasattr(shown, name)] == []


def prompts(num_requests: int, num_heads: int, seed: int) -> Iterator[list[bytes]]:
    """Prompts of 1 to 60 blocks that share heads; the hotter half of the heads comes four times as often."""
    draw = random.Random(seed)
    for _ in range(num_requests):
        head = draw.choices((draw.randrange(num_heads // 2), draw.randrange(num_heads)), (3, 2))[0]
        length = draw.randint(1, 40)
        tail = [b"%d/%d" % (draw.randrange(1 << 30), i) for i in range(draw.randint(0, 20))]
        yield [b"%d:%d" % (head, i) for i in range(length)] + tail


@pytest.mark.parametrize("store_threshold", [0, 2])
@pytest.mark.parametrize("name", BUILT_IN)
def test_large_caches_evict_like_specification(name: str, store_threshold: int) -> None:
    draw = random.Random(5)
    now_s = 0.0
    gate: dict[str, Any] = {"store_threshold": store_threshold, "max_tracker_size": 6000, "clock": lambda: now_s}
    managers = [ReferenceManager(16, 1500, name, **gate), CPUOffloadingManager(16, 1500, name, **gate)]
    loading: list[list[bytes]] = []
    writing: list[list[bytes]] = []
    num_evicted = 0
    for keys in prompts(1500, 80, seed=4):
        now_s += 0.7
        context = ReqContext()
        hits, specs, outputs = [], [], []
        for manager in managers:
            hits.append(manager.lookup(keys, context))
            manager.touch(keys, context)
            specs.append(repr(manager.prepare_load(keys[: hits[0]], context)))
            outputs.append(manager.prepare_store(keys, context))
        assert hits[1] == hits[0]
        assert specs[1] == specs[0]
        assert outputs[1] == outputs[0]
        loading.append(keys[: hits[0]])
        if outputs[0] is not None:
            writing.append(outputs[0].keys_to_store)
            num_evicted += len(outputs[0].evicted_keys)
        # Up to 20 loads and 4 stores are under way, and end in any order.
        done = loading.pop(draw.randrange(len(loading))) if len(loading) > 20 else []
        written = writing.pop(draw.randrange(len(writing))) if len(writing) > 4 else []
        success = draw.random() < 0.9
        for manager in managers:
            manager.complete_load(done)
            manager.complete_store(written, context, success)
            manager.on_request_finished(context)
        assert managers[1].stats() == managers[0].stats()
    managers[1].policy.check()
    assert num_evicted > (500 if store_threshold else 10_000)
