"""The conformance kit finds faults: each of these policies has one, and is caught."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import run_state_machine_as_test
from reference_policies import ReferenceARC

from kvcache import BlockStatus
from kvcache.testing import PolicyContract, cache_machine
from kvcache.testing.bounded import shrinking_within
from kvcache.testing.reference import ReferenceLRU, Victims


def orders_as_use(policy: ReferenceARC, keys: Iterable[bytes]) -> None:
    keys = list(keys)
    (policy.touch if len(keys) > 1 else partial(ReferenceARC.order, policy))(keys)


def remembers_failed_stores(policy: ReferenceARC, key: bytes) -> None:
    ReferenceARC.remove(policy, key)
    policy.b1[key] = None


def promotes_unready(policy: ReferenceARC, keys: Iterable[bytes]) -> None:
    for key in reversed(list(keys)):
        if key in policy.t1:
            policy.t2[key] = policy.t1.pop(key)
        else:
            ReferenceARC.touch(policy, [key])


def larger_by_one(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs as if the cache had one block more."""

    def faulty(policy: ReferenceARC, *args: Any) -> Any:
        policy.cache_capacity += 1
        result = method(policy, *args)
        policy.cache_capacity -= 1
        return result

    return faulty


@pytest.mark.parametrize(
    ("right", "method", "faulty"),
    [
        (ReferenceLRU, "touch", lambda policy, keys: ReferenceLRU.touch(policy, reversed(list(keys)))),
        (ReferenceLRU, "order", lambda policy, keys: None),
        (ReferenceARC, "order", orders_as_use),
        (ReferenceARC, "remove", remembers_failed_stores),
        (ReferenceARC, "touch", larger_by_one(ReferenceARC.touch)),
        (ReferenceARC, "evict", larger_by_one(ReferenceARC.evict)),
        (ReferenceARC, "touch", promotes_unready),
    ],
)
def test_machine_catches(right: type[ReferenceLRU], method: str, faulty: Callable[..., Any]) -> None:
    machine = cache_machine(type("Faulty", (right,), {method: faulty}), right)
    # Shrinking is left out: that there is a failure is all that is asked.
    hunt = settings(
        max_examples=1000,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError, match="differs from the specification"):
        run_state_machine_as_test(machine, settings=hunt)


def takes_what_it_can(policy: ReferenceLRU, n: int, protected: Container[bytes]) -> Victims | None:
    victims: Victims = []
    for _ in range(n):
        one = ReferenceLRU.evict(policy, 1, protected)
        if one is None:
            return None
        victims += one
    return victims


def keeps_what_it_evicts(policy: ReferenceLRU, n: int, protected: Container[bytes]) -> Victims | None:
    victims = ReferenceLRU.evict(policy, n, protected)
    policy.blocks.update(victims or [])
    return victims


def evicts_blocks_in_use(policy: ReferenceLRU, n: int, protected: Container[bytes]) -> Victims | None:
    return None if n > len(policy.blocks) else [policy.blocks.popitem(last=False) for _ in range(n)]


def counts_gets(policy: ReferenceLRU, key: bytes) -> BlockStatus | None:
    policy.touch([key])
    return ReferenceLRU.get(policy, key)


def compares_by_identity(policy: ReferenceLRU, key: bytes) -> BlockStatus | None:
    return next((block for own, block in policy.blocks.items() if own is key), None)


def takes_any_capacity(policy: ReferenceLRU, cache_capacity: int) -> None:
    policy.cache_capacity = cache_capacity
    policy.clear()


# A method that replaces one of ReferenceLRU, the check of the contract that fails, and its arguments.
FAULTS: dict[str, tuple[str, Callable[..., Any], str, tuple[Any, ...]]] = {
    "too few": (
        "evict",
        lambda policy, n, protected: ReferenceLRU.evict(policy, max(0, n - 1), protected),
        "evict_returns_exactly_n_blocks",
        (),
    ),
    "ignores protection": (
        "evict",
        lambda policy, n, protected: ReferenceLRU.evict(policy, n, ()),
        "evict_passes_over_protected_blocks",
        (),
    ),
    "takes what it can": ("evict", takes_what_it_can, "refused_eviction_and_get_change_nothing", ()),
    "keeps what it evicts": ("evict", keeps_what_it_evicts, "remove_lets_a_block_go", ()),
    "evicts nothing": ("evict", lambda policy, n, protected: [], "remove_lets_a_block_go", ()),
    "evicts blocks in use": ("evict", evicts_blocks_in_use, "evict_passes_over_blocks_in_use", (1,)),
    "counts gets": ("get", counts_gets, "refused_eviction_and_get_change_nothing", ()),
    "compares by identity": ("get", compares_by_identity, "get_finds_equal_keys_any_length", ()),
    "removes quietly": (
        "remove",
        lambda policy, key: policy.blocks.pop(key, None),
        "removed_key_can_return",
        (),
    ),
    "never orders": ("order", lambda policy, keys: None, "prefix_loses_its_tail_first", ()),
    "takes any capacity": ("__init__", takes_any_capacity, "refuses_what_is_no_capacity", (0,)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_contract_catches(fault: str) -> None:
    method, faulty, check, arguments = FAULTS[fault]
    contract = type("Contract", (PolicyContract,), {"policy": type("Faulty", (ReferenceLRU,), {method: faulty})})()

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(contract, f"test_{check}")(*arguments)


# The contract leaves the thread of a test that gives no verdict: it would go on, with the garbage collector paused.
is_over = threading.Event()


class NeverAnswers(ReferenceLRU):
    def get(self, key: bytes) -> BlockStatus | None:
        is_over.wait()
        raise KeyboardInterrupt


def test_contract_ends_hanging_policy() -> None:
    # A loaded machine may need longer than the first bounds until it calls the policy.
    for verdict_s in (0.5, 4.0, 32.0):
        attributes = {"policy": NeverAnswers, "reference": ReferenceLRU, "verdict_s": verdict_s}
        is_over.clear()
        try:
            with pytest.raises(AssertionError, match=f"did not return within {verdict_s} s; it was here") as raised:
                type("Contract", (PolicyContract,), attributes)().test_agrees_with_reference_under_every_manager()
        finally:
            is_over.set()
            for thread in threading.enumerate():
                if thread.name == "bounded-test":
                    thread.join(30)
        if "in get" in str(raised.value):
            return
    pytest.fail(f"the policy was not called within {verdict_s} s")


class ForgetsTouches(ReferenceLRU):
    def touch(self, keys: Iterable[bytes]) -> None:
        super().touch(list(keys)[1:])


def test_contract_judges_without_random_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.testing.contract.run_state_machine_as_test", lambda machine: None)
    contract = type("Contract", (PolicyContract,), {"policy": ForgetsTouches, "reference": ReferenceLRU})()

    with pytest.raises(AssertionError, match="differs from the specification"):
        contract.test_agrees_with_reference_under_every_manager()


def test_shrinking_limit_holds_in_block() -> None:
    before = engine.MAX_SHRINKING_SECONDS
    with shrinking_within(7.5):
        assert engine.MAX_SHRINKING_SECONDS == 7
    assert before == engine.MAX_SHRINKING_SECONDS > 7


def test_machine_needs_reference_of_name() -> None:
    machine = cache_machine("kvcache.testing.reference:ReferenceLRU")

    with pytest.raises(ValueError, match="has no reference"):
        run_state_machine_as_test(machine, settings=settings(max_examples=1, database=None))


def test_references_import_without_pytest_and_hypothesis() -> None:
    script = (
        "import sys; sys.modules.update(pytest=None, hypothesis=None);"
        "from kvcache.testing import REFERENCE_POLICIES, ReferenceManager;"
        "print(ReferenceManager(16, 2, 'lru').prepare_store([b'a']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "PrepareStoreOutput(keys_to_store=[b'a'], store_spec=array([0]), evicted_keys=[])\n"
