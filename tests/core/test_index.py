"""The key index under churn: at its fullest, buckets overflow into their neighbours and take back what they lent."""

import random

import pytest

from kvcache import CPUOffloadingManager


@pytest.mark.parametrize("num_blocks", [1, 4, 64, 1024])
def test_keys_are_found_through_thousands_of_comings_and_goings(num_blocks):
    rng = random.Random(num_blocks)
    manager = CPUOffloadingManager(16, num_blocks)
    resident: dict[bytes, None] = {}
    for step in range(400):
        batch = max(1, num_blocks // 8)
        keys = [b"%d" % number for number in rng.sample(range(3 * num_blocks), batch)]
        output = manager.prepare_store(keys)
        assert output.keys_to_store == [key for key in keys if key not in resident]
        success = rng.random() < 0.8
        manager.complete_store(output.keys_to_store, success=success)
        for key in output.evicted_keys:
            del resident[key]
        if success:
            resident |= dict.fromkeys(output.keys_to_store)
        if step % 10 == 0:
            manager.policy.check()
            assert [manager.lookup(b"%d" % number) for number in range(3 * num_blocks)] == [
                b"%d" % number in resident for number in range(3 * num_blocks)
            ]
    manager.reset_cache()
    manager.policy.check()
    assert not any(manager.lookup(b"%d" % number) for number in range(3 * num_blocks))
