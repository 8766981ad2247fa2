"""A small file must not expand to more than its size suggests, unless its reader trusts it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from kvcache.lab.traces.recorded_trace import RecordedTrace
from kvcache.lab.traces.recording import Recording, RecordingError
from kvcache.recorder.files import frame_bytes, header_bytes
from kvcache.recorder.ops import Op

HEADER = {"manager": {"block_size": 16, "num_blocks": 4, "cache_policy": "lru"}, "is_from_start": True}
KEY = bytes(range(8))


def frame(first_number: int, records: object) -> bytes:
    return frame_bytes(msgspec.msgpack.encode((first_number, records)))


def looked_up(num_keys: int) -> list[object]:
    return [Op.STATUS_RUN, 0.0, 0, num_keys * KEY, None, 2]


def one_long_run() -> bytes:
    return frame(0, [looked_up(4_000_000)])


def many_short_runs() -> bytes:
    return b"".join(frame(number * 60_000, [looked_up(500)] * 120) for number in range(8))


def many_records() -> bytes:
    return frame(0, [[Op.ON_SCHEDULE_END, 0.0, 0, b""]] * 2_000_000)


def many_values_in_one_record() -> bytes:
    return frame(0, [[Op.CONTEXT, 0.0, 2, b"", {"kvcache": [[]] * 20_000_000}]])


def bare_bytes() -> bytes:
    return b"".join(frame(number, [[Op.HINT, 0.0, 0, b"", "x" * 1_000_000]]) for number in range(50))


@pytest.mark.parametrize(
    "content", [one_long_run, many_short_runs, many_records, many_values_in_one_record, bare_bytes]
)
def test_small_file_that_expands_is_refused(tmp_path: Path, content: Callable[[], bytes]) -> None:
    path = tmp_path / "small.kvlog"
    path.write_bytes(header_bytes(HEADER) + content())
    size = path.stat().st_size
    assert size < 250_000
    tracemalloc.start()
    try:
        with pytest.raises(RecordingError, match=r"small\.kvlog expands to more .*--trusted lifts the limit"):
            list(Recording(path))
        assert tracemalloc.get_traced_memory()[1] < 160 << 20
    finally:
        tracemalloc.stop()


def test_header_that_expands_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.kvlog"
    path.write_bytes(header_bytes({**HEADER, "more": [[]] * 4_000_000}))
    with pytest.raises(RecordingError, match="expands to more"):
        Recording(path)


def test_trusted_file_may_expand(tmp_path: Path) -> None:
    path = tmp_path / "own.kvlog"
    path.write_bytes(header_bytes(HEADER) + frame(0, [looked_up(1_000_000)]))
    calls = list(islice(Recording(path, is_trusted=True), 1000))
    assert [call.keys for call in calls] == [KEY] * 1000


def test_polls_of_one_block_stay_readable(tmp_path: Path) -> None:
    """A waiting engine looks up the same block for hours."""
    path = tmp_path / "polls.kvlog"
    path.write_bytes(header_bytes(HEADER) + b"".join(frame(500 * n, [looked_up(500)]) for n in range(90)))
    recording = Recording(path)
    assert sum(1 for _ in recording) == 45_000
    assert recording.end == ""


def varied_lookups(num_calls: int) -> bytes:
    """Return look-ups of a list with one key, which compress well; each is a request of a trace."""
    records = [[Op.LOOKUP, float(i % 10), 0, KEY, None, 0] for i in range(10_000)]
    return b"".join(frame(number, records) for number in range(0, num_calls, 10_000))


@pytest.mark.slow
def test_memory_is_bounded_by_size(tmp_path: Path) -> None:
    path = tmp_path / "lookups.kvlog"
    path.write_bytes(header_bytes(HEADER) + varied_lookups(160_000))
    tracemalloc.start()
    try:
        trace = RecordedTrace(path)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert trace.size_bytes == 160_000
    assert held < 200 * trace.size_bytes
    path.write_bytes(header_bytes(HEADER) + varied_lookups(600_000))
    assert (64 << 20) + 128 * path.stat().st_size < 600_000 * 300
    with pytest.raises(RecordingError, match="expands to more"):
        RecordedTrace(path)
    assert RecordedTrace(path, is_trusted=True).size_bytes == 600_000
