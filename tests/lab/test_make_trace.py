"""`kvcache trace make`: logs of prompts and traces of other caches become traces that `Trace` reads."""

import gzip
import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.lab.traces.make import make_trace
from kvcache.lab.traces.requests import ReadOptions, TraceError
from kvcache.lab.traces.trace import Trace
from kvcache.lab.traces.turns import chain

zstandard = pytest.importorskip("zstandard")


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines_made(log, block_size=4, **options):
    lines = []
    with Trace(log, ReadOptions(replayed=block_size, **options)) as trace:
        make_trace(trace, lines.append)
    return [json.loads(line) for line in lines]


def chained_ids(tokens, block_size):
    return chain(np.fromiter(tokens, "<i4"), block_size)[0]


def test_prompts_share_ids_of_prefix_alone(tmp_path, run):
    log = write_lines(
        tmp_path / "log.jsonl",
        [
            {"timestamp": 10, "prompt_token_ids": [*range(10)], "output_length": 3},
            {"timestamp": 12.5, "prompt": [*range(8), 99, 98, 97, 96], "usage": {"completion_tokens": 7}},
            {"timestamp": 13, "token_ids": [5, *range(1, 8)]},
        ],
    )
    status, out, _ = run("trace", "make", log, tmp_path / "trace.jsonl", "--block-size", 4)
    fields = "`prompt_token_ids` (1) or `prompt` (1) or `token_ids` (1)"
    assert (status, out) == (
        0,
        f"3 requests, prompts of {fields}, over 3 s\n3 requests, 7 blocks of 4 tokens\n",
    )
    with Trace(tmp_path / "trace.jsonl") as trace:
        assert (trace.format, trace.block_size) == ("mooncake", 4)
        one, two, three = trace
    assert [(r.input_length, r.output_length, r.arrival_s) for r in (one, two, three)] == [
        (10, 3, 0.0),
        (12, 7, 2.5),
        (8, 0, 3.0),
    ]
    assert one.hash_ids.tolist() == two.hash_ids[:2].tolist()
    # The second block has the same tokens, behind another block.
    assert not set(three.hash_ids.tolist()) & set(two.hash_ids.tolist())


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 5))
def test_ids_are_shared_by_full_blocks(one, two, block_size):
    equal = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    ids = [chained_ids(tokens, block_size) for tokens in (one, two)]
    assert [len(found) for found in ids] == [len(one) // block_size, len(two) // block_size]
    assert len(set(ids[0]) & set(ids[1])) == equal // block_size
    assert all(0 <= found < 1 << 63 for found in ids[0])


def test_text_and_messages_are_tokenized(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"[UNK]": 0, "what": 1, "is": 2, "kv": 3, "user": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    from kvcache.lab.traces.make import load_tokenizer

    tokenize = load_tokenizer(str(tmp_path / "tokenizer"))
    log = write_lines(
        tmp_path / "log.jsonl",
        [{"prompt": "user what is kv"}, {"messages": [{"role": "user", "content": "what is kv"}]}, {"text": "kv"}],
    )
    text, chat, short = lines_made(log, 2, tokenize=tokenize)
    assert text["hash_ids"] == chat["hash_ids"] == chained_ids([4, 1, 2, 3], 2)
    assert short["hash_ids"] == []
    assert [line["timestamp"] for line in (text, chat, short)] == [0, 1000, 2000]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda raw: zstandard.ZstdCompressor().compress(raw)])
def test_oracle_general_is_read(tmp_path, pack):
    accesses = [(100, 7, 512, 2), (101, 2**64 - 1, 64, -1), (103, 7, 512, -1)]
    log = tmp_path / "w.oracleGeneral.zst"
    log.write_bytes(pack(b"".join(struct.pack("<IQIq", *access) for access in accesses)))
    lines = lines_made(log, 16)
    assert [line["hash_ids"] for line in lines] == [[7], [-1], [7]]
    assert [(line["timestamp"], line["input_length"]) for line in lines] == [(0, 16), (1000, 16), (3000, 16)]


def test_csv_is_read_by_its_header(tmp_path):
    log = tmp_path / "accesses.csv"
    log.write_text("Time, obj_id, size\n2024-05-01T00:00:00Z,a,1\n2024-05-01T00:00:02Z,b,1\n2024-05-01T00:00:03Z,a,1\n")
    one, two, three = lines_made(log)
    assert one["hash_ids"] == three["hash_ids"] != two["hash_ids"]
    assert [line["timestamp"] for line in (one, two, three)] == [0, 2000, 3000]


def test_late_requests_are_sorted(tmp_path, run):
    log = write_lines(tmp_path / "log.jsonl", [{"time": time, "token_ids": [1]} for time in (5000, 4000, 6000)])
    status, out, err = run("trace", "make", log, "-", "--time-unit", "ms")
    assert [json.loads(line)["timestamp"] for line in out.splitlines()] == [0, 1000, 2000]
    assert status == 0
    assert "1 of 3 requests stood behind later ones: sorted by time" in err


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "text"}, "--tokenizer NAME"),
        ({"token_ids": [1, -2]}, "token_ids must be ints in 0..2**31-1, got -2"),
        ({"token_ids": [1], "time": "soon"}, "time must be a number in 0..1e20 or ISO 8601, got 'soon'"),
        ({"token_ids": [1], "time": True}, "time must be a number in 0..1e20 or ISO 8601, got true"),
        ({"token_ids": [1], "output_length": -1}, "output_length must be an int >= 0, got -1"),
        ({"hash_ids": [1]}, "hash_ids: this is a trace"),
        ({"query": "text"}, "has 'query'"),
        ([1], "must be a JSON object, got [1]"),
    ],
)
def test_bad_record_leaves_no_file(tmp_path, run, record, message):
    log = write_lines(tmp_path / "log.jsonl", [{"token_ids": [1]}, record])
    status, _, err = run("trace", "make", log, tmp_path / "trace.jsonl")
    assert status == 2
    assert f"{log}:2: " in err
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    assert len(lines_made(log, skip_bad=True)) == 1


def test_pipe_and_symlink_are_not_replaced(tmp_path, run):
    log = write_lines(tmp_path / "log.jsonl", [{"prompt_token_ids": [1, 2, 3, 4]}])
    link = tmp_path / "link.jsonl"
    link.symlink_to("trace.jsonl")
    assert run("trace", "make", log, link, "--block-size", 4)[0] == 0
    expected = (tmp_path / "trace.jsonl").read_bytes()
    assert link.is_symlink()
    reading, writing = os.pipe()
    try:
        assert run("trace", "make", log, f"/dev/fd/{writing}", "--block-size", 4)[0] == 0
        assert os.read(reading, 1 << 16) == expected
    finally:
        os.close(reading)
        os.close(writing)


def test_record_without_time_arrives_second_later(tmp_path, run):
    records = [{"timestamp": 1e9}, {}, {"timestamp": 1e9 + 3}]
    log = write_lines(tmp_path / "log.jsonl", [{**record, "token_ids": [1, 2]} for record in records])
    status, out, _ = run("trace", "make", log, tmp_path / "trace.jsonl", "--block-size", 4)
    assert status == 0
    assert "requests have no time: each arrives a second after the one before it" in out
    assert "No prompt fills a block of 4 tokens" in out
    assert [line["timestamp"] for line in lines_made(log)] == [0, 1000, 3000]


def test_trace_onto_its_log_is_refused(tmp_path, run):
    log = write_lines(tmp_path / "log.jsonl", [{"token_ids": [1]}])
    for more in ((log,), (tmp_path / "trace.jsonl", "--json", log)):
        status, _, err = run("trace", "make", log, *more)
        assert status != 0
        assert "must be another file than the one that is read" in err
    assert log.read_text() == '{"token_ids": [1]}\n'


def test_cut_record_and_empty_log_fail(tmp_path):
    log = tmp_path / "w.oracleGeneral"
    log.write_bytes(b"\0" * 30)
    with pytest.raises(TraceError, match="oracleGeneral:2: must have 24 bytes, got 6"):
        lines_made(log)
    log.write_bytes(b"")
    with pytest.raises(TraceError, match="holds no request"):
        lines_made(log)


def test_make_refuses_another_block_size(tmp_path):
    line = {"timestamp": 0, "input_length": 4, "output_length": 0, "hash_ids": [1], "block_size": 4}
    path = write_lines(tmp_path / "trace.jsonl", [line])
    with pytest.raises(TraceError, match="block_size must be the 16 tokens that were given or read, got 4"):
        Trace(path, ReadOptions(16))
    with pytest.raises(TraceError, match="block_size must be an int >= 1, got '4'"):
        Trace(write_lines(path, [line | {"block_size": "4"}]))
