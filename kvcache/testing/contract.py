"""The contract of a policy as pytest tests: subclass, name the policy, and run pytest.

The tests drive the five primitives as a manager does, then run the state machine under every manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvcache.block import BlockStatus
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.policies.base import CachePolicy
from kvcache.registry import POLICIES
from kvcache.request import ReqContext
from kvcache.testing.bounded import run_within, shrinking_within
from kvcache.testing.machine import Policy, cache_machine, serve_fixed_requests

_KEYS = [b"key %d" % i for i in range(12)]


class PolicyContract:
    """Tests that every policy must pass.

    Attributes
    ----------
    policy : str or type
        The policy under test: a registered name or a class.
    reference : type, optional
        Its plain-Python twin; see `CacheMachine`.
    evicts_tails_first : bool
        Whether a prefix's tail is evicted before its head after a request has ended, as with all built-in policies.
        A policy without `order` may set this to False.
    verdict_s : float
        Time limit of the state machine. Shrinking a failing sequence of operations may take a tenth of it.
    stores_all : bool
        Whether every key is stored for which there is room. A policy that `declines` sets this to False.

    Examples
    --------
    >>> class TestMine(PolicyContract):
    ...     policy = "lru"
    """

    policy: ClassVar[Policy]
    reference: ClassVar[type[CachePolicy] | None] = None
    evicts_tails_first: ClassVar[bool] = True
    verdict_s: ClassVar[float] = 300.0
    stores_all: ClassVar[bool] = True

    def make(self, capacity: int = 8) -> CachePolicy:
        """Return a new policy of `capacity` blocks."""
        made: CachePolicy = POLICIES.resolve(self.policy)(capacity)
        return made

    def filled(self, num_blocks: int, capacity: int = 8) -> tuple[CachePolicy, list[BlockStatus]]:
        """Return a policy of `capacity` with `num_blocks` ready blocks, key 0 inserted first, and the blocks."""
        policy = self.make(capacity)
        blocks = [BlockStatus(block_id) for block_id in range(num_blocks)]
        for key, block in zip(_KEYS, blocks, strict=False):
            policy.insert(key, block)
            block.ref_cnt = 0
        return policy, blocks

    def test_is_a_cache_policy(self) -> None:
        policy = self.make(8)

        assert isinstance(policy, CachePolicy)
        assert policy.cache_capacity == 8

    @pytest.mark.parametrize("capacity", [0, -1, True, 1.5, "8", None])
    def test_refuses_what_is_no_capacity(self, capacity: Any) -> None:
        with pytest.raises(ValueError, match="capacity"):
            self.make(capacity)

    def test_get_finds_equal_keys_any_length(self) -> None:
        policy = self.make(200)
        blocks = [BlockStatus(block_id) for block_id in range(200)]
        for length, block in enumerate(blocks, 1):
            policy.insert(b"\x00" * length, block)

        assert [policy.get(bytes(length)) is block for length, block in enumerate(blocks, 1)] == [True] * 200
        assert policy.get(_KEYS[0]) is None

    def test_remove_lets_a_block_go(self) -> None:
        policy, _ = self.filled(3)
        policy.remove(_KEYS[1])

        assert policy.get(_KEYS[1]) is None
        assert sorted(drained(policy)) == [_KEYS[0], _KEYS[2]]

    def test_removed_key_can_return(self) -> None:
        policy, _ = self.filled(1)
        policy.remove(_KEYS[0])
        with pytest.raises(KeyError):
            policy.remove(_KEYS[0])
        again = BlockStatus(7)
        policy.insert(_KEYS[0], again)

        assert policy.get(_KEYS[0]) is again

    @pytest.mark.parametrize("form", [list, tuple, iter, dict.fromkeys])
    def test_touch_and_order_take_any_iterable(self, form: Callable[[list[bytes]], Iterable[bytes]]) -> None:
        by_list, by_form = self.filled(4)[0], self.filled(4)[0]
        by_list.touch(_KEYS[:2])
        by_list.order(_KEYS[1:3])
        by_form.touch(form(_KEYS[:2]))
        by_form.order(form(_KEYS[1:3]))

        assert drained(by_form) == drained(by_list)

    def test_touch_and_order_ignore_absent_keys(self) -> None:
        policy, _ = self.filled(2)
        policy.touch(_KEYS[5:8])
        policy.order(_KEYS[5:8])

        assert [policy.get(key) for key in _KEYS[5:8]] == [None] * 3
        assert sorted(drained(policy)) == _KEYS[:2]

    def test_evict_returns_exactly_n_blocks(self) -> None:
        policy, blocks = self.filled(6)
        victims = policy.evict(4, set())

        assert victims is not None
        assert len(dict(victims)) == len(victims) == 4
        assert all(blocks[_KEYS.index(key)] is block for key, block in victims)
        assert [policy.get(key) for key, _ in victims] == [None] * 4
        assert sorted([*dict(victims), *drained(policy)]) == _KEYS[:6]

    def test_evict_takes_none_or_all(self) -> None:
        policy, _ = self.filled(8)

        assert self.make().evict(0, set()) == policy.evict(0, set()) == []
        victims = policy.evict(8, set())
        assert victims is not None
        assert sorted(dict(victims)) == _KEYS[:8]
        assert policy.evict(1, set()) is None

    @pytest.mark.parametrize("ref_cnt", [-1, 1, 3])
    def test_evict_passes_over_blocks_in_use(self, ref_cnt: int) -> None:
        policy, blocks = self.filled(6)
        for i in (0, 3, 5):
            blocks[i].ref_cnt = ref_cnt

        assert policy.evict(4, set()) is None
        assert sorted(drained(policy)) == [_KEYS[1], _KEYS[2], _KEYS[4]]
        blocks[3].ref_cnt = 0
        assert drained(policy) == [_KEYS[3]]

    def test_evict_passes_over_protected_blocks(self) -> None:
        policy, _ = self.filled(6)
        protected = {_KEYS[0], _KEYS[3], _KEYS[5], _KEYS[9]}

        assert policy.evict(4, protected) is None
        assert sorted(drained(policy, protected)) == [_KEYS[1], _KEYS[2], _KEYS[4]]
        assert sorted(drained(policy)) == [_KEYS[0], _KEYS[3], _KEYS[5]]

    def test_refused_eviction_and_get_change_nothing(self) -> None:
        asked, unasked = (self._with_a_past() for _ in range(2))
        assert asked.evict(6, set()) is None
        assert asked.evict(3, {_KEYS[6], _KEYS[7], _KEYS[2]}) is None
        for _ in range(3):
            assert asked.get(_KEYS[2]) is not None

        assert self._future(asked) == self._future(unasked)

    def test_clear_forgets_everything(self) -> None:
        policy = self._with_a_past()
        try:
            policy.clear()
        except NotImplementedError:
            pytest.skip("the policy has no clear; managers make a fresh instance")

        assert [policy.get(key) for key in _KEYS] == [None] * len(_KEYS)
        assert policy.evict(1, set()) is None
        for block_id, key in enumerate(_KEYS[:6]):
            block = BlockStatus(block_id)
            policy.insert(key, block)
            block.ref_cnt = 0
        assert self._future(policy) == self._future(self.filled(6)[0])

    def test_cache_of_one_block_works(self) -> None:
        if not self.stores_all:
            pytest.skip("the policy may keep the block that it has")
        manager = CPUOffloadingManager(16, 1, self.policy)
        for i, key in enumerate(_KEYS):
            output = manager.prepare_store([key])
            assert output is not None
            assert output.keys_to_store == [key]
            assert output.evicted_keys == _KEYS[:i][-1:]
            manager.complete_store([key])
            assert [manager.lookup(other) for other in _KEYS] == [other == key for other in _KEYS]

    def test_prefix_loses_its_tail_first(self) -> None:
        if not self.evicts_tails_first or not self.stores_all:
            pytest.skip("the policy does not promise it")
        manager = CPUOffloadingManager(16, 6, self.policy)
        context = ReqContext()
        manager.prepare_store(_KEYS[:6], context)
        manager.complete_store(_KEYS[:6], context)
        manager.on_request_finished(context)
        output = manager.prepare_store(_KEYS[6:8])

        assert output is not None
        assert output.evicted_keys == [_KEYS[5], _KEYS[4]], (
            "a request's last blocks should leave first; a policy that does not promise it says so in its test class: "
            "evicts_tails_first = False"
        )
        assert manager.lookup(_KEYS[:6]) == 4

    def test_agrees_with_reference_under_every_manager(self) -> None:
        machine = cache_machine(self.policy, self.reference)

        def judge() -> None:
            # The fixed requests come first: with few random examples, a faulty policy may pass.
            serve_fixed_requests(machine())
            run_state_machine_as_test(machine)

        with shrinking_within(self.verdict_s / 10):
            run_within(self.verdict_s, judge)

    def _with_a_past(self) -> CachePolicy:
        """Return a policy of 8 blocks that has evicted. Keys 2, 3, 6 and 7 are evictable; key 5 is being read."""
        policy, blocks = self.filled(8)
        policy.touch(_KEYS[2:4])
        policy.evict(2, {_KEYS[i] for i in (2, 3, 5, 6, 7)})
        policy.touch(_KEYS[:2])
        policy.order(_KEYS[5:7])
        policy.remove(next(key for key in _KEYS[:5] if key not in _KEYS[2:4] and policy.get(key) is not None))
        blocks[5].ref_cnt = 1
        return policy

    @staticmethod
    def _future(policy: CachePolicy) -> list[bytes]:
        """Run a policy for a while, and return all keys that it evicts, in order."""
        evicted: list[bytes] = []
        for i in (8, 9, 0, 1, 4, 10, 2):
            policy.touch([_KEYS[i]])
            if policy.get(_KEYS[i]) is not None:
                continue
            victims = policy.evict(1, {_KEYS[i]})
            evicted.extend(key for key, _ in victims or [])
            block = BlockStatus(i)
            policy.insert(_KEYS[i], block)
            block.ref_cnt = 0
        return evicted + drained(policy)


def drained(policy: CachePolicy, protected: Iterable[bytes] = ()) -> list[bytes]:
    """Evict one block at a time until none is evictable, and return their keys, in order."""
    keys: list[bytes] = []
    while (victims := policy.evict(1, set(protected))) is not None:
        assert len(victims) == 1, f"evict(1, ...) must return one victim, got {victims!r}"
        key = victims[0][0]
        assert key not in keys, f"evict must let go what it returns, got {key!r} twice"
        keys.append(key)
    return keys
