"""Histograms in powers of two, and ages of blocks at eviction."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.core.histogram import BlockAges, Histogram


@given(st.lists(st.integers(0, 1 << 62), max_size=50), st.sampled_from((10, 31, 32, 36, 63)))
def test_observation_falls_into_its_bucket(values: list[int], highest: int) -> None:
    histogram = Histogram(1.0, 2, highest)
    for value in values:
        histogram.observe_ticks(value)
    bounds, counts, total = histogram.data()
    assert bounds == tuple(2.0**exponent for exponent in range(2, highest + 1))
    edges = [-1.0, *bounds, math.inf]
    assert counts == tuple(sum(low < value <= high for value in values) for low, high in pairwise(edges))
    assert total == pytest.approx(sum(values))
    assert sum(histogram.data()[1]) == len(values)
    assert histogram.max == float(max(values, default=0))


def test_observations_convert_units_ignore_nonsense() -> None:
    histogram = Histogram(1e-9, 9, 30)
    for value in (1e-6, 0.25, -1.0):
        histogram.observe(value)
    for value in (math.nan, math.inf, 1e300):
        histogram.observe(value)
    assert sum(histogram.data()[1]) == 3
    assert histogram.max == pytest.approx(0.25)
    assert histogram.data()[2] == pytest.approx(0.250001)


@pytest.mark.parametrize("arguments", [(0.0, 1, 2), (1.0, 2, 2), (1.0, -1, 2), (1.0, 1, 64)])
def test_bad_exponents_are_refused(arguments: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Histogram(*arguments)


def test_only_evicted_blocks_have_ages() -> None:
    ages = BlockAges(4)
    ages.note(np.array([0, 1]), [b"a", b"b"], [])
    time.sleep(0.3)
    start_s = time.monotonic()
    ages.note(np.array([2]), [b"c"], [])
    ages.note(np.array([2, 0, 3]), [b"d", b"e", b"f"], [b"a", b"c"])  # the last evicted is handed out first
    num_s = time.monotonic() - start_s
    bounds, counts, total = ages.histogram.data()
    assert sum(counts) == 2
    assert sum(counts[: np.searchsorted(bounds, num_s) + 1]) >= 1  # c, at once
    assert 0.25 <= total <= 30 + 2 * num_s
    assert bounds[0] == pytest.approx(0.01)


def test_block_without_arrival_has_no_age() -> None:
    ages = BlockAges(2)
    ages.note(np.array([0]), [b"a"], [])
    # b took a's place, and nobody said so.
    ages.note(np.array([0]), [b"c"], [b"b"])
    ages.note(np.array([1]), [b"d"], [b"x"])  # slot 1 was never filled
    assert sum(ages.histogram.data()[1]) == 0
    ages.note(np.array([0]), [b"e"], [b"c"])
    assert sum(ages.histogram.data()[1]) == 1


def test_foreign_ids_are_skipped_arrays_checked() -> None:
    ages = BlockAges(2)
    ages.note(np.array([-1, 2, 1 << 40]), [b"a", b"b", b"c"], [b"x", b"y", b"z"])
    assert sum(ages.histogram.data()[1]) == 0
    with pytest.raises(ValueError, match="must be int64"):
        ages.note(np.array([1], dtype=np.int32), [b"a"], [])
    with pytest.raises(ValueError, match="num_blocks must be >= 1"):
        BlockAges(0)
    with pytest.raises(TypeError, match="unhashable"):
        ages.note(np.array([1]), [bytearray(b"a")], [])  # type: ignore[list-item]
