"""Readers of request traces: formats, compression, and errors for bad lines."""

import gzip
import json
import os
import sys
import threading

import pytest

from kvcache.lab.commands.options import TraceOptions
from kvcache.lab.traces.requests import ReadOptions, TraceError
from kvcache.lab.traces.trace import Trace
from kvcache.recorder.files import MAGIC

zstandard = pytest.importorskip("zstandard")

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 30, "output_length": 0, "hash_ids": [7]},
]
BAILIAN = [
    {"chat_id": 3, "parent_chat_id": -1, "timestamp": 61.5, "type": "text", "turn": 1, "hash_ids": [4, 5]},
    {"chat_id": 4, "parent_chat_id": 3, "timestamp": 62, "type": "search", "turn": 2, "hash_ids": [4, 5, 6]},
]
BAILIAN[1] |= {"input_length": 33, "output_length": 9}


def test_trace_without_msgspec_reads_all_else(tmp_path, monkeypatch):
    for name in ("msgspec", "kvcache.lab.traces.recording", "kvcache.lab.traces.recorded_trace"):
        monkeypatch.setitem(sys.modules, name, None)
    path = write(tmp_path, lines_of(MOONCAKE))
    with TraceOptions(file=path).open() as trace:
        assert len(list(trace)) == 2
    recording = write(tmp_path, MAGIC, "run.kvlog")
    with pytest.raises(ModuleNotFoundError):
        TraceOptions(file=recording).open()


def lines_of(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write(folder, content, name="trace.jsonl"):
    path = folder / name
    path.write_bytes(content)
    return path


def read(path, **options):
    with Trace(path, ReadOptions(**options)) as trace:
        return [(r.hash_ids.tolist(), r.input_length, r.output_length, r.arrival_s) for r in trace]


MOONCAKE_READ = [([0, 1, 2], 1100, 5, 0.0), ([7], 30, 0, 2.5)]


@pytest.mark.parametrize(
    ("records", "found", "requests"),
    [
        (MOONCAKE, ("mooncake", 512), MOONCAKE_READ),
        # Full blocks are counted where lengths are missing.
        (BAILIAN, ("bailian", 16), [([4, 5], 32, 0, 61.5), ([4, 5, 6], 33, 9, 62.0)]),
    ],
)
def test_first_line_tells_the_format(tmp_path, records, found, requests):
    path = write(tmp_path, lines_of(records))
    with Trace(path) as trace:
        assert (trace.format, trace.block_size) == found
        list(trace)
        assert trace.position_bytes == trace.size_bytes == path.stat().st_size
    assert read(path) == requests


@pytest.mark.parametrize(("ids", "input_length"), [([], 0), ([], 511), ([1], 512), ([1], 513), ([1, 2], 513)])
def test_mooncake_may_omit_partial_block(tmp_path, ids, input_length):
    line = {**MOONCAKE[0], "hash_ids": ids, "input_length": input_length}
    assert read(write(tmp_path, lines_of([line]))) == [(ids, input_length, 5, 0.0)]


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        zstandard.compress,
        lambda content: b"".join(zstandard.compress(line) for line in content.splitlines(keepends=True)),
        lambda content: b"\n" + content.replace(b"\n", b"\r\n\n") + b" ",
    ],
    ids=["gzip", "zstd", "zstd frames", "blank lines"],
)
def test_packing_is_told_by_content(tmp_path, pack):
    assert read(write(tmp_path, pack(lines_of(MOONCAKE)))) == MOONCAKE_READ


def test_pipe_can_be_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(lines_of(MOONCAKE),))
    writer.start()
    assert read(path) == MOONCAKE_READ
    writer.join()


def changed(**fields):
    return {**MOONCAKE[1], **fields}


def lacking(record, field):
    return {name: value for name, value in record.items() if name != field}


BAD_LINES = [
    (b"{oops", "not JSON", "'{oops'"),
    (b"\xff\xfe{", "not JSON", "trace.jsonl:2"),
    (b"[" * 100_000, "not JSON", "[[["),
    (b"[1]", "must be a JSON object", "[1]"),
    (json.dumps(lacking(MOONCAKE[0], "hash_ids")).encode(), "lacks 'hash_ids'", "timestamp"),
    (json.dumps(changed(hash_ids=7)).encode(), "hash_ids must be a list of ints", "got 7"),
    (json.dumps(changed(hash_ids=[1, True])).encode(), "hash_ids must be ints", "got true"),
    (json.dumps(changed(hash_ids=[1, "2"])).encode(), "hash_ids must be ints", "got '2'"),
    (json.dumps(changed(hash_ids=[1, 2.0])).encode(), "hash_ids must be ints", "got 2.0"),
    (json.dumps(changed(hash_ids=[1 << 64])).encode(), "hash_ids must fit 64 bits", "got 18446744073709551616"),
    (json.dumps(changed(timestamp=-1)).encode(), "timestamp must be a number in 0..1e20", "got -1"),
    (json.dumps(changed(timestamp=float("nan"))).encode(), "timestamp must be a number in 0..1e20", "got NaN"),
    (json.dumps(changed(timestamp=10**400)).encode(), "timestamp must be a number in 0..1e20", "got 1000000"),
    (json.dumps(changed(input_length=1 << 64)).encode(), "input_length must be an int in 0..2**40", "got 1844"),
    (json.dumps(changed(timestamp=True)).encode(), "timestamp must be a number in 0..1e20", "got true"),
    (json.dumps(changed(input_length=-3)).encode(), "input_length must be an int in 0..2**40", "got -3"),
    (json.dumps(changed(hash_ids=[7, 8])).encode(), "hash_ids must be 1 (or 0, without the partial", "got 2"),
    (json.dumps(changed(input_length=1024)).encode(), "hash_ids must be 2 for 1024 tokens in blocks of 512", "got 1"),
    (json.dumps(changed(output_length=None)).encode(), "output_length must be an int in 0..2**40", "got null"),
]


@pytest.mark.parametrize(("line", "fault", "value"), BAD_LINES, ids=[fault for _, fault, _ in BAD_LINES])
def test_bad_line_is_named_or_skipped(tmp_path, line, fault, value):
    path = write(tmp_path, lines_of(MOONCAKE[:1]) + line + b"\n" + lines_of(MOONCAKE[1:]))
    with pytest.raises(TraceError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    assert fault in message
    assert value in message
    assert len(message) < len(str(path)) + 300

    with Trace(path, ReadOptions(skip_bad=True)) as trace:
        assert [request.hash_ids.tolist() for request in trace] == [[0, 1, 2], [7]]
        assert trace.num_skipped == 1


@pytest.mark.parametrize("field", ["parent_chat_id", "type", "turn"])
def test_bailian_line_without_field_is_named(tmp_path, field):
    with pytest.raises(TraceError, match=f"trace.jsonl:1: lacks '{field}'"):
        read(write(tmp_path, lines_of([lacking(BAILIAN[0], field)])))


def test_trace_of_other_block_size_raises(tmp_path):
    line = {**BAILIAN[1], "input_length": 200, "hash_ids": [1, 2, 3, 4]}
    path = write(tmp_path, lines_of([line]))
    with pytest.raises(
        TraceError, match=r"hash_ids must be 13 \(or 12, .* blocks of 16, got 4; they fit --block-size 64"
    ):
        read(path)
    assert read(path, listed=64) == [([1, 2, 3, 4], 200, 9, 62.0)]


def test_block_size_holds_for_any_format(tmp_path):
    line = {**MOONCAKE[0], "input_length": 100, "hash_ids": [1, 2]}
    path = write(tmp_path, lines_of([line]))
    with Trace(path, ReadOptions(64)) as trace:
        assert (trace.format, trace.block_size) == ("mooncake", 64)
    path = write(tmp_path, lines_of(BAILIAN[:1]))
    assert read(path, listed=64) == [([4, 5], 128, 0, 61.5)]


def test_leading_bad_lines_settle_no_format(tmp_path):
    path = write(tmp_path, b'{"chat_id": 1}\n' + lines_of(MOONCAKE))
    assert read(path, skip_bad=True) == MOONCAKE_READ


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_cut_file_is_an_error(tmp_path, pack):
    packed = pack(lines_of(MOONCAKE * 2000))
    with pytest.raises(TraceError, match="cannot be read"):
        read(write(tmp_path, packed[:-9]))


@pytest.mark.parametrize("magic", [b"\x1f\x8b", b"\x28\xb5\x2f\xfd"], ids=["gzip", "zstd"])
def test_noise_behind_magic_raises(tmp_path, magic):
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: cannot be read"):
        read(write(tmp_path, magic + b"\xee" * 100))


def test_unreadable_or_empty_file_is_named(tmp_path):
    for path, message in (
        (tmp_path / "missing", "cannot open trace .*missing: No such file"),
        (tmp_path, "cannot open trace .*: Is a directory"),
        (write(tmp_path, b"", "empty"), "holds no request$"),
        (write(tmp_path, b"x\ny\n", "bad"), r"holds no request \(2 bad lines; the first: line 1: not JSON"),
    ):
        with pytest.raises(TraceError, match=message):
            read(path, skip_bad=True)
