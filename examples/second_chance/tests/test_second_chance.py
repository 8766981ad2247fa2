"""Test file of a third-party policy: the shipped contract, and one test of the policy's own idea."""

from kvcache_second_chance import SecondChancePolicy

from kvcache import CPUOffloadingManager
from kvcache.registry import POLICIES
from kvcache.testing import PolicyContract


class TestContract(PolicyContract):
    policy = SecondChancePolicy


def test_it_is_known_by_its_name():
    assert POLICIES.resolve("second-chance") is SecondChancePolicy


def test_a_used_block_is_let_past_once():
    manager = CPUOffloadingManager(block_size=16, num_blocks=3, cache_policy="second-chance")
    for key in (b"a", b"b", b"c"):
        manager.complete_store(manager.prepare_store([key]).keys_to_store)
    manager.touch([b"a"])
    assert manager.prepare_store([b"d"]).evicted_keys == [b"b"]
    manager.complete_store([b"d"])
    assert manager.prepare_store([b"e", b"f"]).evicted_keys == [b"c", b"a"]
