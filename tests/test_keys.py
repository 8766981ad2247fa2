"""Block keys: chained, exact, unambiguous, and fast enough to key a million tokens in a scheduler's thread."""

from __future__ import annotations

import hashlib
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.keys import KEY_BYTES, block_keys, key_seed

SEED = key_seed("model", 16)


def test_key_hashes_predecessor_and_ids():
    keys = block_keys([1, 2, 3, 70000], 2, SEED)
    first = hashlib.sha256(SEED + b"\x01\0\0\0\x02\0\0\0").digest()
    assert keys == [first, hashlib.sha256(first + b"\x03\0\0\0\x70\x11\x01\0").digest()]


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)])
def test_only_whole_blocks_have_keys(num_tokens, num_keys):
    assert len(block_keys(range(num_tokens), 16, SEED)) == num_keys


@given(
    prefix=st.lists(st.integers(0, 2**32 - 1), max_size=12),
    ends=st.tuples(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8)),
    block_size=st.integers(1, 5),
)
def test_keys_equal_as_far_as_prompts(prefix, ends, block_size):
    prompts = [prefix + end for end in ends]
    keys = [block_keys(prompt, block_size, SEED) for prompt in prompts]
    for i, (one, other) in enumerate(zip(*keys, strict=False)):
        stop = (i + 1) * block_size
        assert (one == other) == (prompts[0][:stop] == prompts[1][:stop])


def test_chain_goes_on_from_a_key():
    ids = list(range(64))
    keys = block_keys(ids, 16, SEED)
    assert keys[:1] + block_keys(ids[16:], 16, keys[0]) == keys


def test_keys_do_not_depend_on_container():
    ids = [0, 1, 127, 128, 255, 7, 8, 9]
    held = [np.array(ids, dtype) for dtype in ("u1", "<i2", ">i4", "i8", "u8")]
    held += [tuple(ids), np.repeat(np.array(ids), 2)[::2]]
    assert {tuple(block_keys(each, 4, SEED)) for each in held} == {tuple(block_keys(ids, 4, SEED))}


def test_seeds_differ_wherever_fields_differ():
    fields = [("ab", "c"), ("a", "bc"), ("abc",), ("", "abc"), (b"abc",), (1, "a"), ("1", "a"), (b"1", "a"), (), ("",)]
    seeds = [key_seed(*each) for each in fields]
    assert all(one != other for one, other in itertools.combinations(seeds, 2))
    assert {len(seed) for seed in seeds} == {KEY_BYTES}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -2], "got -2"),
        ([2**32], "got 4294967296"),
        (np.array([2**63], np.uint64), "got 9223372036854775808"),
        ([1.5, 2.0], "one-dimensional sequence of integers"),
        ([[1, 2]], "one-dimensional sequence of integers"),
        ([True, False], "one-dimensional sequence of integers"),
        ("ab", "one-dimensional sequence of integers"),
    ],
)
def test_refuses_ids_that_are_none(ids, message):
    with pytest.raises(ValueError, match=message):
        block_keys(ids, 1, SEED)


def test_seeds_and_sizes_are_checked():
    for field in (True, None, 1.0, ["a"]):
        with pytest.raises(ValueError, match=r"seed's field must be str, bytes or int, got "):
            key_seed(field)
    for block_size in (0, -1, 1.0, True, None):
        with pytest.raises(ValueError, match="block_size must be an int >= 1, got"):
            block_keys([1], block_size, SEED)
    for seed in (b"", b"short", bytes(33), "s" * 32, None):
        with pytest.raises(ValueError, match="seed must be 32 bytes, got"):
            block_keys([1], 1, seed)


def test_keys_cost_little_beside_digests():
    def least_s(compute):
        seconds = []
        for _ in range(5):
            start = time.thread_time()
            compute()
            seconds.append(time.thread_time() - start)
        return min(seconds)

    def digest_all():
        for _ in range(62_500):
            hashlib.sha256(block).digest()

    ids = np.random.default_rng(0).integers(0, 128_000, 1_000_000)
    block = bytes(KEY_BYTES + 4 * 16)
    # Both are measured on the machine of the test: its speed does not matter.
    assert least_s(lambda: block_keys(ids, 16, SEED)) < 3 * least_s(digest_all)
