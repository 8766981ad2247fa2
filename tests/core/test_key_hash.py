"""The keyed hash of keys: whole, well spread, and unlike from process to process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from kvcache import CPUOffloadingManager
from kvcache.core.key_hash import key_hash


def test_every_bit_and_the_length_count() -> None:
    for size in (1, 3, 4, 7, 8, 15, 16, 17, 31, 36, 100):
        key = bytes(size)
        hashes = {key_hash(key), key_hash(key + b"\0")}
        for bit in range(8 * size):
            flipped = bytearray(key)
            flipped[bit // 8] ^= 1 << bit % 8
            hashes.add(key_hash(bytes(flipped)))
        assert len(hashes) == 8 * size + 2


def test_equal_keys_have_equal_hashes() -> None:
    assert key_hash(b"block-" + b"7") == key_hash(b"block-7")


def test_a_fixed_seed_of_python_does_not_fix_it() -> None:
    code = "from kvcache.core.key_hash import key_hash; print(key_hash(b'block'), hash(b'block'))"
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


def test_keys_that_collide_under_pythons_hash_cost_no_more() -> None:
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
