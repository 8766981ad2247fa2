"""BlockView against plain sets, and its digest against the definition in docs/howto/routers.md."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.exporters.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BlockView,
    EventBatch,
    block_value,
)

WORD = 1 << 64


def splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) % WORD
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ state >> 27) * 0x94D049BB133111EB % WORD
    return state ^ state >> 31


def plain_value(block_hash: bytes, group_idx: int) -> int:
    key = block_hash + group_idx.to_bytes(4, "big")
    value = splitmix64(len(key))
    for start in range(0, len(key), 8):
        value = splitmix64(value ^ int.from_bytes(key[start : start + 8], "little"))
    return value


class PlainView:
    """BlockView in plain Python: the specification."""

    def __init__(self):
        self.held = {}

    def apply(self, batch):
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                continue
            held = self.held.setdefault(event.medium or "", set())
            blocks = {(block_hash, event.group_idx or 0) for block_hash in event.block_hashes}
            (held.update if isinstance(event, BlockStored) else held.difference_update)(blocks)

    def media(self):
        return {medium: frozenset(held) for medium, held in self.held.items() if held}

    def digests(self):
        return {
            medium: (len(held), sum(plain_value(*block) for block in held) % WORD)
            for medium, held in self.held.items()
            if held
        }


# Few hashes, so that events overlap; short, inline and long ones.
hashes = st.sampled_from([b"", b"a", b"a\0", b"ab", b"12345678", b"x" * 40, b"x" * 41, b"y" * 300]) | st.binary(
    max_size=3
)
groups = st.sampled_from([None, 0, 1, 2**32 - 1])
media = st.sampled_from(["CPU", "STORAGE", None, "elsewhere"])
stored = st.builds(
    BlockStored, st.lists(hashes), st.none(), st.just([]), st.just(16), st.none(), media, st.none(), group_idx=groups
)
removed = st.builds(BlockRemoved, st.lists(hashes), media, groups)
batches = st.lists(st.builds(EventBatch, st.just(0.0), st.lists(stored | removed | st.builds(AllBlocksCleared))))


@given(batches)
def test_view_and_digest_equal_those_of_plain_sets(applied):
    view, plain = BlockView(), PlainView()
    for batch in applied:
        view.apply(batch)
        plain.apply(batch)
        assert view.digests() == plain.digests()
    assert view.media() == plain.media()
    assert len(view) == sum(map(len, plain.held.values()))
    for medium, held in plain.media().items():
        assert all(view.holds(medium, *block) for block in held)
        assert not view.holds(medium, b"never", 3)


@given(st.binary(max_size=100), st.integers(0, 2**32 - 1))
def test_value_of_a_block_is_what_the_router_page_says(block_hash, group_idx):
    assert block_value(block_hash, group_idx) == plain_value(block_hash, group_idx)


@pytest.mark.parametrize(
    ("block_hash", "group_idx", "value"),
    [
        (b"", 0, 0xA0567EF80DEDF5CB),
        (b"", 1, 0x55FABBA600CA3F17),
        (b"a", 0, 0x2CCE365DA14D953E),
        (b"12345678", 0, 0xDAC7E0893E850122),
        (bytes(range(32)), 7, 0xDAD23191EFBA6E5B),
    ],
)
def test_value_of_a_block_never_changes(block_hash, group_idx, value):
    assert block_value(block_hash, group_idx) == value


def test_splitmix64_is_the_published_one():
    # The first outputs of the generator for seed 0.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("wrong", [-1, 1 << 32, "0", 1.5, None])
def test_block_value_of_a_group_out_of_range_raises(wrong):
    view = BlockView()
    for call in (view.add, view.discard):
        with pytest.raises(ValueError, match="group_idx must be an int in"):
            call("CPU", [(b"x", wrong)])
    with pytest.raises(ValueError, match="group_idx must be an int in"):
        block_value(b"x", wrong)
    assert len(view) == 0


def test_digest_of_many_blocks_equals_the_sum_of_their_values():
    draw = random.Random(4)
    view, held = BlockView(), set()
    for _ in range(20):
        blocks = [(b"%d" % draw.randrange(20_000) + b"-" * draw.choice((0, 60)), draw.randrange(3)) for _ in range(400)]
        removed = draw.random() < 0.4
        (view.discard if removed else view.add)("CPU", blocks)
        (held.difference_update if removed else held.update)(blocks)
    assert view.media() == {"CPU": held}
    assert view.digests() == {"CPU": (len(held), sum(itertools.starmap(block_value, held)) % WORD)}


def test_a_batch_with_a_wrong_group_changes_nothing():
    view = BlockView()
    fine = BlockRemoved([b"held"], "CPU", 0)
    view.add("CPU", [(b"held", 0)])
    with pytest.raises(ValueError, match="got -1"):
        view.apply(EventBatch(0.0, [AllBlocksCleared(), fine, BlockRemoved([b"x"], "CPU", -1)]))
    assert view.media() == {"CPU": {(b"held", 0)}}
