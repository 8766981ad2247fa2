"""BlockView against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.exporters.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, BlockView, EventBatch


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
def test_view_equals_plain_sets(applied):
    view, plain = BlockView(), PlainView()
    for batch in applied:
        view.apply(batch)
        plain.apply(batch)
        assert view.media() == plain.media()
    assert len(view) == sum(map(len, plain.held.values()))
    for medium, held in plain.media().items():
        assert all(view.holds(medium, *block) for block in held)
        assert not view.holds(medium, b"never", 3)
