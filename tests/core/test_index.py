"""From a key to its row: the keyed hash differs from process to process, and the index finds keys under churn."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from kvcache import CPUOffloadingManager
from kvcache.core.index import key_hash


def test_every_bit_and_the_length_count() -> None:
    for size in (1, 3, 4, 7, 8, 15, 16, 17, 31, 36, 100):
        key = bytes(size)
        hashes = {key_hash(key), key_hash(key + b"\0")}
        for bit in range(8 * size):
            flipped = bytearray(key)
            flipped[bit // 8] ^= 1 << bit % 8
            hashes.add(key_hash(bytes(flipped)))
        assert len(hashes) == 8 * size + 2


def test_python_seed_does_not_fix_hash() -> None:
    code = "from kvcache.core.index import key_hash; print(key_hash(b'block'), hash(b'block'))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": "0"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


def test_colliding_python_hashes_cost_no_more() -> None:
    # All of these share the half of Python's hash that once chose the bucket's neighbourhood.
    def crafted(n: int) -> list[bytes]:
        found: list[bytes] = []
        number = 0
        while len(found) < n:
            key = b"%d" % number
            if (hash(key) & 0xFFFFFFFF) >> 20 == 0:
                found.append(key)
            number += 1
        return found

    def seconds(keys: list[bytes]) -> float:
        best = 1.0
        for _ in range(5):
            manager = CPUOffloadingManager(16, 100_000)
            start = time.process_time()
            manager.prepare_store(keys)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(crafted(512)) < 10 * seconds([b"key-%d" % i for i in range(512)])


@pytest.mark.parametrize("num_blocks", [1, 4, 64, 1024])
def test_index_after_evictions_finds_resident_keys(num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    manager = CPUOffloadingManager(16, num_blocks)
    resident: dict[bytes, None] = {}
    for step in range(400):
        batch = max(1, num_blocks // 8)
        keys = [b"%d" % number for number in rng.sample(range(3 * num_blocks), batch)]
        output = manager.prepare_store(keys)
        assert output is not None
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
