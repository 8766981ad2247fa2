"""The offline optimum in bounded memory: it finds next uses in parts, and keeps the blocks with the nearest ones."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.lab.simulate.optimum import optimal_hits
from kvcache.lab.traces import compact as compact_module
from kvcache.lab.traces.compact import CompactTrace, next_uses
from kvcache.lab.traces.nearest import NearestUses, NextUses
from kvcache.lab.traces.requests import Request

requests_of_ids = st.lists(st.lists(st.integers(0, 8), max_size=7), min_size=1, max_size=12)


def trace_of(requests):
    return CompactTrace.of((Request(np.array(ids, dtype=np.int64), 16 * len(ids), 0, 0.0) for ids in requests), 16)


def next_uses_by_the_book(requests):
    firsts = []
    for number, ids in enumerate(requests):
        begin = sum(map(len, requests[:number]))
        firsts.append({block: begin + ids.index(block) for block in ids})
    found = []
    for number, ids in enumerate(requests):
        for i, block in enumerate(ids):
            later = [places[block] for places in firsts[number + 1 :] if block in places]
            found.append(-2 if block in ids[:i] else later[0] if later else -1)
    return found


def optimum_by_the_book(requests, num_blocks):
    """After each request, sort every block that could be kept, as the definition states."""
    kept = set()
    hits_of_requests = []
    for i, ids in enumerate(requests):
        hits = 0
        while hits < len(ids) and ids[hits] in kept:
            hits += 1
        hits_of_requests.append(hits)
        next_uses = {}
        for block in kept | set(ids):
            for later in range(i + 1, len(requests)):
                if block in requests[later]:
                    next_uses[block] = (later, requests[later].index(block))
                    break
        kept = set(sorted(next_uses, key=lambda block: next_uses[block])[:num_blocks])
    return hits_of_requests


@given(requests_of_ids, st.integers(1, 9) | st.none())
def test_optimum_is_its_definition(requests, num_blocks):
    assert optimal_hits(trace_of(requests), num_blocks).tolist() == optimum_by_the_book(requests, num_blocks)


@given(requests_of_ids, st.integers(1, 5))
def test_next_uses_in_parts_match_definition(requests, num_parts):
    trace = trace_of(requests)
    nexts = np.full(len(trace.ids), 99, dtype=np.int64)
    total = 0
    for part in range(num_parts):
        uses = NextUses(part, num_parts)
        uses.link(trace.ids, trace.bounds, nexts)
        total += uses.num_ids
    whole, distinct = next_uses(trace)
    assert nexts.tolist() == whole.tolist() == next_uses_by_the_book(requests)
    assert total == distinct == len(set(trace.ids.tolist()))


@given(requests_of_ids, st.integers(1, 9), st.integers(1, 4))
def test_optimum_reads_trace_in_pieces(requests, room, piece_ids):
    trace = trace_of(requests)
    whole = optimal_hits(trace, room).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_module, "_PIECE_IDS", piece_ids)
        assert optimal_hits(trace, room).tolist() == whole


def test_table_of_ids_grows():
    ids = np.tile(np.arange(10_000, dtype=np.int64), 2)
    trace = trace_of([ids[:10_000].tolist(), ids[10_000:].tolist()])
    nexts, distinct = next_uses(trace)
    assert distinct == 10_000
    assert nexts[:10_000].tolist() == list(range(10_000, 20_000))
    assert (nexts[10_000:] == -1).all()


@given(requests_of_ids, st.integers(1, 9))
def test_split_optimum_equals_split_trace(requests, room):
    trace = trace_of(requests)
    assert optimal_hits(trace, room, split=2).tolist() == optimal_hits(trace.split(2), room).tolist()


def test_spooled_trace_is_the_trace(tmp_path):
    trace = trace_of([[1, 2], [], [1, 2, 3]])
    spooled = CompactTrace.spool(iter(trace), 16, tmp_path)
    assert [request.hash_ids.tolist() for request in spooled] == [[1, 2], [], [1, 2, 3]]
    assert (spooled.num_blocks, spooled.num_tokens, len(spooled)) == (5, 80, 3)
    (tmp_path / "empty").mkdir()
    assert list(CompactTrace.spool(iter(()), 16, tmp_path / "empty")) == []


def test_places_out_of_range_are_refused():
    bounds = np.array([0, 2], dtype=np.int64)
    hits = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="the next use of place 0 must come later and in the trace, got 7"):
        NearestUses(4, 1).step(np.array([7, -1], dtype=np.int64), bounds, hits)
    with pytest.raises(ValueError, match="places must be less than 1, got 2"):
        NearestUses(1, 1).step(np.array([-1, -1], dtype=np.int64), bounds, hits)
    with pytest.raises(ValueError, match="nexts must have one item a place, got 1"):
        NearestUses(4, 1).step(np.array([-1], dtype=np.int64), bounds, hits)
    with pytest.raises(ValueError, match=r"bounds must span 1 places, got 0\.\.2"):
        NextUses().link(np.array([1], dtype=np.int64), bounds, np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="room must be >= 1, got 0"):
        NearestUses(4, 0)
    with pytest.raises(ValueError, match=r"part must be in 0\.\.num_parts-1"):
        NextUses(2, 2)


PEAK = """
import resource, sys
from pathlib import Path
import numpy as np
from kvcache.lab.traces.compact import CompactTrace, next_uses
from kvcache.lab.simulate.optimum import optimal_hits
folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = CompactTrace.load(folder)
next_uses(trace, folder, 16 << 20)
hits = optimal_hits(trace, 100_000, nexts=np.load(folder / "nexts.npy", mmap_mode="r"))
print(hits.sum(), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_optimum_takes_less_than_trace(tmp_path):
    num_requests, length = 60_000, 64
    begins = np.random.default_rng(1).integers(0, 15_000, num_requests)
    ids = (begins[:, None] * length + np.arange(length)).ravel()
    bounds = np.arange(num_requests + 1, dtype=np.int64) * length
    lengths = np.full(num_requests, 16 * length)
    CompactTrace(ids, bounds, lengths, np.zeros(num_requests), 16).save(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    hits, peak_mib = map(int, done.stdout.split())
    assert hits > 0
    # The ids and next uses alone are 59 MiB; a set and a heap of places took ten times as much.
    assert peak_mib < 59
