"""The reader of recordings: truncated, damaged, hostile and foreign files."""

from __future__ import annotations

import copy
import io
import os
import random
import zlib
from pathlib import Path

import msgspec
import pytest
from recorder_harness import make_all_calls

from kvcache import CPUOffloadingManager
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recording import Recording, RecordingError
from kvcache.recorder import ops
from kvcache.recorder.files import frame_bytes, header_bytes
from kvcache.recorder.recorder import Recorder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run.kvlog"
    manager = CPUOffloadingManager(16, 20, "arc", True)
    with Recorder(manager, path):
        make_all_calls(manager, random.Random(3), 4)
    return path.read_bytes()


def read_all(path, data):
    path.write_bytes(data)
    recording = Recording(path)
    return list(recording), recording.end


def frame_starts(data):
    starts = [12]  # after the magic bytes and the version
    while starts[-1] < len(data):
        starts.append(starts[-1] + 4 + int.from_bytes(data[starts[-1] : starts[-1] + 4], "little"))
    return starts


def test_cut_recording_reads_to_cut(path, whole):
    records, end = read_all(path, whole)
    assert end == ""
    for length in range(0, len(whole), 3):
        try:
            found, end = read_all(path, whole[:length])
        except RecordingError:
            continue
        assert found == records[: len(found)]
        assert end or length in frame_starts(whole)


def test_missing_and_foreign_records_are_noticed(path, whole):
    _, rows = msgspec.msgpack.decode(zlib.decompress(whole[frame_starts(whole)[1] + 4 :], 31))
    parts = [frame_bytes(msgspec.msgpack.encode(part)) for part in ((0, rows[:2]), (9, rows[2:4]))]
    records, end = read_all(path, header_bytes({"manager": {}}) + b"".join(parts))
    assert (len(records), end) == (2, f"{path}: records 2 to 8 are missing")
    for older_id, is_whole in (("a", False), ("b", True)):
        Path(f"{path}.1").write_bytes(header_bytes({"manager": {}, "id": older_id, "segment": 0}))
        path.write_bytes(header_bytes({"manager": {}, "id": "b", "segment": 1}))
        assert Recording(path).is_whole == is_whole


def test_foreign_files_are_named(path):
    for data in (b"", b"KVC", b'{"timestamp": 0}', os.urandom(100), b"KVCLOG\r\n", header_bytes({"no": "manager"})):
        with pytest.raises(RecordingError, match=r"run\.kvlog"):
            read_all(path, data)
    later = bytearray(header_bytes({"manager": {}}))
    later[8] = 9
    with pytest.raises(RecordingError, match="of format 9, this kvcache reads format 6"):
        read_all(path, bytes(later))


def test_flipped_bytes_are_found(path, whole):
    rng = random.Random(11)
    records, _ = read_all(path, whole)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            found, end = read_all(path, bytes(damaged))
        except RecordingError:
            continue
        assert found == records or end


# Run by hand with KVCACHE_STRESS=100 for a million cases.
NUM_FUZZED = 10_000 * int(os.environ.get("KVCACHE_STRESS", "1"))


@pytest.mark.parametrize("kind", range(4))
def test_hostile_frame_is_a_clear_error(monkeypatch, whole, kind):
    """The checksum of the frame is right, but its content is arbitrary."""
    config = {"block_size": 16, "num_blocks": 20, "cache_policy": "arc", "enable_events": True}
    header = header_bytes({"manager": config, "is_from_start": True})
    start = frame_starts(whole)[1] + 4
    _, rows = msgspec.msgpack.decode(zlib.decompress(whole[start:], 31))
    content = b""
    monkeypatch.setattr(Path, "open", lambda self, mode: io.BytesIO(content))
    num_damaged = 0
    for seed in range(NUM_FUZZED // 4):
        content = header + frame_bytes(hostile_bytes(random.Random(seed), kind, rows))
        try:
            recording = Recording("hostile.kvlog")
            if seed % 10:
                list(recording)
            else:
                replay_recording(recording)
            num_damaged += bool(recording.end)
        except RecordingError:
            num_damaged += 1
    assert num_damaged > 0


ODD_VALUES = (
    None, True, -1, 0, 1, 7, 1 << 40, (1 << 64) - 1, 0.5, float("nan"), "x", b"", b"\0" * 8, b"\1" + bytes(15), b"123",
    [], {}, [1, 2, 3], [[0]], {"priority": 9},
)  # fmt: skip


def hostile_bytes(rng, kind, rows):
    """Return bytes, unusual rows, or recorded rows with a few values replaced or removed."""
    if kind == 0:
        return rng.choice((b"", b"\x92\x00")) + rng.randbytes(rng.randrange(200))
    if kind == 1:
        rows = [[rng.choice(list(ops.Op)), *(rng.choice(ODD_VALUES) for _ in range(rng.randrange(7)))] for _ in "row"]
        return msgspec.msgpack.encode((0, rows))
    rows = copy.deepcopy(rng.sample(rows, min(30, len(rows))))
    for row in rng.sample(rows, 1 + len(rows) // 8):
        at = rng.randrange(len(row))
        if isinstance(row[at], list) and row[at] and rng.random() < 0.7:
            row, at = row[at], rng.randrange(len(row[at]))
        row[at] = rng.choice(ODD_VALUES)
        if kind == 3:
            del row[rng.randrange(len(row))]
    return msgspec.msgpack.encode((0, rows))


def test_configuration_of_strangers_is_not_trusted(path):
    for config, message in (
        ({"block_size": 16, "num_blocks": 1 << 29, "cache_policy": "lru"}, "memory"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "os:PathLike"}, "--policy"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": ["lru"]}, "policy"),
        ({"block_size": "x", "num_blocks": 4, "cache_policy": "lru"}, "block_size"),
        ({"block_size": 16, "cache_policy": "lru"}, "num_blocks"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "lru", "surprise": 1}, "surprise"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "lru", "tiers": [{"medium": "X", "rule": 1}]}, "rule"),
    ):
        path.write_bytes(header_bytes({"manager": config, "is_from_start": True}))
        with pytest.raises(RecordingError, match=message):
            replay_recording(Recording(path))
