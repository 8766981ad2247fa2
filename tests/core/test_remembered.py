"""RememberedKeys beside an ordered dict: order, groups, merged segments, and growth."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict

import pytest

from kvcache.core.remembered import RememberedKeys


def keys_of(count: int) -> list[bytes]:
    return [b"key %d" % i for i in range(count)]


@pytest.mark.parametrize("num_groups", [1, 3, 6, 1000])
@pytest.mark.parametrize("num_keys", [5, 60, 2500])
def test_keeps_order_and_groups_as_an_ordered_dict_does(num_keys: int, num_groups: int) -> None:
    chance = random.Random(1000 * num_keys + num_groups)
    remembered = RememberedKeys(chance.choice([1, 30, 3000]))
    model: OrderedDict[bytes, int] = OrderedDict()
    keys = keys_of(num_keys)
    for step in range(4000):
        key, kind = chance.choice(keys), chance.random()
        assert (key in remembered) == (key in model)
        if kind < 0.6:
            model[key] = chance.randint(1, num_groups)
            model.move_to_end(key)
            remembered.remember(key, model[key])
        elif kind < 0.85:
            if key in model:
                assert remembered.forget(key) == model.pop(key)
        elif model and kind < 0.95:
            assert remembered.forget_oldest() == model.popitem(last=False)[1]
        elif model:
            most = chance.randint(1, 40)
            group, num_forgotten = remembered.forget_oldest_of_a_group(most)
            assert 1 <= num_forgotten <= most
            assert [model.popitem(last=False)[1] for _ in range(num_forgotten)] == [group] * num_forgotten
        if step % 101 == 0:
            remembered.check()
            assert remembered.groups() == list(model.values())
    assert len(remembered) == len(model)


def test_sixteen_keys_of_a_group_share_a_segment() -> None:
    remembered = RememberedKeys(1)
    for key in keys_of(160):
        remembered.remember(key, 1)

    assert remembered.num_in_use == 10


def test_segments_that_have_become_sparse_are_merged() -> None:
    remembered = RememberedKeys(1600)
    keys = keys_of(1600)
    for key in keys:
        remembered.remember(key, 1)
    for i, key in enumerate(keys):
        if i % 8:
            remembered.forget(key)
    remembered.check()

    assert len(remembered) == 200
    assert remembered.num_in_use <= 25


def test_a_fifth_group_opens_a_segment_unless_another_has_left() -> None:
    remembered = RememberedKeys(16)
    keys = keys_of(7)
    for i in range(4):
        remembered.remember(keys[i], i + 1)
    remembered.forget(keys[1])
    remembered.remember(keys[4], 5)
    assert remembered.num_in_use == 1

    remembered.remember(keys[5], 6)
    assert remembered.num_in_use == 2
    assert remembered.groups() == [1, 3, 4, 5, 6]
    remembered.check()


def test_neighbours_of_a_group_are_forgotten_at_once_up_to_their_segment_s_end() -> None:
    remembered = RememberedKeys(100)
    for i, key in enumerate(keys_of(40)):
        remembered.remember(key, 1 + (i >= 35))

    assert [remembered.forget_oldest_of_a_group(most) for most in (10, 99, 99, 99, 2)] == [
        (1, 10),
        (1, 6),
        (1, 16),
        (1, 3),
        (2, 2),
    ]
    assert remembered.groups() == [2] * 3
    remembered.check()


def test_what_is_not_there_is_refused() -> None:
    remembered = RememberedKeys(1)
    with pytest.raises(IndexError, match="no key is remembered"):
        remembered.forget_oldest_of_a_group(1)
    with pytest.raises(KeyError, match="not remembered"):
        remembered.forget(b"key")
    with pytest.raises(IndexError, match="no key is remembered"):
        remembered.forget_oldest()
    with pytest.raises(ValueError, match="group must be >= 1, got 0"):
        remembered.remember(b"key", 0)
    with pytest.raises(ValueError, match="num_keys must be >= 1, got 0"):
        RememberedKeys(0)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(remembered)
