"""Files that planners have: each gives the figure of a plain simulation, or an error with the next step."""

from __future__ import annotations

import csv
import json
import os
import random
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_simulation import hits_of, words, write

from kvcache.lab.traces.make import make_trace
from kvcache.lab.traces.requests import ReadOptions, TraceError
from kvcache.lab.traces.trace import Trace

pytest.importorskip("typer")

BLOCK = 16


def chats(num_chats=20, turns=5, seed=1):
    """Return (time, chat, turn, prompt, answer) of chats over one system prompt, in order of time."""
    draw = random.Random(seed)
    rows = []
    for chat in range(num_chats):
        time, tokens = draw.uniform(0, 300), [("system", i) for i in range(40)]
        for turn in range(turns):
            tokens = [*tokens, *((chat, turn, i) for i in range(draw.randrange(5, 60)))]
            answer = draw.randrange(1, 40)
            rows.append((round(time, 3), chat, turn, list(tokens), answer))
            tokens += [(chat, turn, "answer", i) for i in range(answer)]
            time += draw.uniform(1, 60)
    return sorted(rows, key=lambda row: row[0])


def trace_lines(rows):
    """Return rows as lines of a Mooncake trace, with a number for each prefix that fills a block."""
    ids = {}
    lines = []
    for time, _, _, tokens, answer in rows:
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        named = [ids.setdefault(tuple(tokens[:end]), len(ids)) for end in ends]
        line = {"timestamp": time * 1000, "input_length": len(tokens), "output_length": answer, "hash_ids": named}
        lines.append({**line, "block_size": BLOCK})
    return lines


ROWS = chats()
PROMPTS = [tokens for _, _, _, tokens, _ in ROWS]
LINES = trace_lines(ROWS)
ORDERS = {
    "by time": list(range(len(ROWS))),
    "by chat": sorted(range(len(ROWS)), key=lambda i: ROWS[i][1]),
    "shuffled": random.Random(2).sample(range(len(ROWS)), len(ROWS)),
    "two servers": sorted(range(len(ROWS)), key=lambda i: ROWS[i][1] % 2),
}


@pytest.fixture
def planned(run_json):
    """Return the hits of a file in a plan."""

    def hits(path, blocks=10_000, *options):
        return run_json("plan", path, "--blocks", blocks, "--jobs", 1, "--quiet", *options)["cells"][0]["hit_blocks"]

    return hits


@pytest.fixture
def made(tmp_path):
    """Return a trace that is made from a log."""

    def trace(log, **options):
        path = tmp_path / "made.jsonl"
        options = ReadOptions(**{"tokenize": words, "replayed": BLOCK, **options})
        with path.open("w") as file, Trace(log, options) as source:
            trace.facts = make_trace(source, file.write)
            trace.expanded = source.reading.expanded
        return path

    return trace


def test_long_trace_is_sorted_in_runs(tmp_path, planned, monkeypatch):
    monkeypatch.setattr("kvcache.lab.traces.compact._RUN_IDS", 100)
    monkeypatch.setattr("kvcache.lab.traces.compact._PIECE_IDS", 30)
    path = write(tmp_path / "trace.jsonl", [LINES[i] for i in ORDERS["shuffled"]])
    assert planned(path, 60) == hits_of(PROMPTS, BLOCK, 60)


def test_late_lines_are_counted(tmp_path, run, run_json):
    path = write(tmp_path / "trace.jsonl", [LINES[0], LINES[50], LINES[20], LINES[30], LINES[60]])
    line = "2 of 5 requests stood behind later ones: sorted by time"
    for words_of in (("plan",), ("replay", "--no-data"), ("fleet", "--engines", 1)):
        assert line in run(words_of[0], path, *words_of[1:], "--quiet")[1]
    assert run_json("plan", path, "--quiet")["doubts"] == [line]


def deltas(rows, listed=BLOCK, **more):
    """Return chats as sessions of AIPerf: a line has the new tokens of its turn, and a delay but for the first."""
    lines, last, names = [], {}, {}
    for time, chat, turn, tokens, answer in sorted(rows, key=lambda row: row[1:3]):
        before, length = last.get(chat, (time, 0))
        new = tokens[length:]
        named = [names.setdefault(tuple(new[i : i + listed]), len(names)) for i in range(0, len(new), listed)]
        line = {"session_id": f"s{chat}", "input_length": len(new), "output_length": answer, "hash_ids": named, **more}
        lines.append(line | ({"delay": round((time - before) * 1000, 3)} if turn else {"timestamp": time * 1000}))
        last[chat] = (time, len(tokens) + answer)
    return lines


def tokens_of(rows):
    names = {}
    return [[names.setdefault(token, len(names)) for token in tokens] for _, _, _, tokens, _ in rows]


def bailian(rows, when):
    ids = [{"hash_ids": line["hash_ids"], "input_length": line["input_length"]} for line in trace_lines(rows)]
    same = {"parent_chat_id": -1, "type": "text"}
    return [
        line | same | when(row[0]) | {"chat_id": row[1], "turn": row[2]} for line, row in zip(ids, rows, strict=True)
    ]


def mooncake(rows, when, change=lambda i: i, **more):
    lines = zip(trace_lines(rows), rows, strict=True)
    return [
        without(line, "timestamp") | when(row[0]) | {"hash_ids": list(map(change, line["hash_ids"]))} | more
        for line, row in lines
    ]


def without(record, *names):
    return {name: value for name, value in record.items() if name not in names}


def listed_deltas(rows, when):
    lines = deltas(rows, block_size=BLOCK)
    times = {(chat, turn): time for time, chat, turn, *_ in rows}
    order = sorted(row[1:3] for row in rows)
    return [without(line, "delay", "timestamp") | when(times[place]) for line, place in zip(lines, order, strict=True)]


def counted(rows, when):
    names = ("conversation", "turn", "prompt_tokens")
    return [when(time) | dict(zip(names, (chat, turn, len(row)), strict=True)) for time, chat, turn, row, _ in rows]


def prompts(name):
    def write(rows, when):
        return [when(row[0]) | {name: tokens} for row, tokens in zip(rows, tokens_of(rows), strict=True)]

    return write


FORMATS = {
    "mooncake": (mooncake, False),
    "unsigned": (lambda rows, when: mooncake(rows, when, lambda i: (1 << 64) - 1 - i), False),
    "hex": (lambda rows, when: mooncake(rows, when, lambda i: f"{i:032x}"), False),
    "whole sessions": (
        lambda rows, when: [
            line | {"session_id": row[1]} for line, row in zip(mooncake(rows, when), rows, strict=True)
        ],
        False,
    ),
    "bailian": (bailian, False),
    "deltas": (listed_deltas, False),
    "tokens": (prompts("prompt_token_ids"), True),
    "completions": (prompts("prompt"), True),
    "counts": (counted, True),
}
EPOCH_S = 1_767_225_600
TIMES = {
    **{unit: (lambda time, number=number: round((EPOCH_S + time) * number)) for unit, number in
       {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}.items()},
    "iso": lambda time: datetime.fromtimestamp(EPOCH_S + time, UTC).isoformat(),
    "naive": lambda time: datetime.fromtimestamp(EPOCH_S + time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
}  # fmt: skip


@given(
    st.sampled_from(list(FORMATS)),
    st.sampled_from(list(TIMES)),
    st.sampled_from(["timestamp", "startTime", "start_time", "created_at", "Time"]),
    st.sampled_from(list(ORDERS)),
    st.booleans(),
    st.sampled_from([60, 10_000]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
def test_formats_and_commands_agree(tmp_path, run_json, planned, form, unit, name, order, as_csv, capacity):
    rows = [(7.0 * i, *row) for i, (_, *row) in enumerate(ROWS)]
    writer, may_be_csv = FORMATS[form]
    records = writer(rows, lambda time: {name: TIMES[unit](time)})
    if form != "deltas":
        records = [records[i] for i in ORDERS[order]]
    path = tmp_path / f"log.{'csv' if as_csv and may_be_csv else 'jsonl'}"
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, records[0])
            table.writeheader()
            table.writerows(records)
    else:
        write(path, records)
    options = ("--blocks", capacity, "--quiet", "--block-size", BLOCK, "--shared-tokens", 40)
    if unit not in ("iso", "naive"):
        options += ("--time-unit", unit)
    document = run_json("plan", path, "--jobs", 1, *options)
    expected = hits_of(PROMPTS, BLOCK, capacity)
    assert document["cells"][0]["hit_blocks"] == expected
    assert "2026-01-01 00:0" in document["read"][0]
    assert run_json("replay", path, "--no-data", *options)["hit_blocks"] == expected
    fleet = run_json("fleet", path, "--engines", 1, "--copies", 1, *options)
    assert fleet["cells"][0]["local_blocks"] == expected
    run_json("trace", "make", path, tmp_path / "made.jsonl", *options[2:])
    assert planned(tmp_path / "made.jsonl", capacity) == expected
    times = [json.loads(line)["timestamp"] for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert times == [1000 * row[0] for row in rows]


@pytest.mark.parametrize("capacity", [60, 10_000])
def test_sessions_of_deltas_add_up(tmp_path, planned, made, capacity):
    log = write(tmp_path / "sessions.jsonl", deltas(ROWS, block_size=BLOCK))
    assert planned(made(log), capacity) == hits_of(PROMPTS, BLOCK, capacity)


def test_deltas_in_large_blocks_add_up(tmp_path, planned, made):
    # Each session's first block holds the system prompt and its own question, so nothing is shared.
    own = [[(chat, *token) for token in tokens] for _, chat, _, tokens, _ in ROWS]
    assert planned(made(write(tmp_path / "sessions.jsonl", deltas(ROWS, 512)))) == hits_of(own, BLOCK)


def test_deltas_without_ids_add_up(tmp_path, planned, made):
    own = [[(chat, *token) for token in tokens] for _, chat, _, tokens, _ in ROWS]
    lines = [{name: value for name, value in line.items() if name != "hash_ids"} for line in deltas(ROWS)]
    assert planned(made(write(tmp_path / "sessions.jsonl", lines))) == hits_of(own, BLOCK)


def test_sessions_of_whole_prompts_are_read(tmp_path, planned, made):
    lines = [{**line, "session_id": chat} for line, (_, chat, *_) in zip(LINES, ROWS, strict=True)]
    path = write(tmp_path / "trace.jsonl", lines)
    assert planned(path, 60) == planned(made(path), 60) == hits_of(PROMPTS, BLOCK, 60)
    lines[-1]["delay"] = 5
    with pytest.raises(TraceError, match="hold whole prompts: remove session_id"):
        made(write(path, lines))


def test_ambiguous_sessions_are_refused(tmp_path, made):
    rows = [{"session_id": "a", "timestamp": i, "input_length": n} for i, n in enumerate((100, 300))]
    with pytest.raises(TraceError, match="may count a whole prompt or its new tokens"):
        made(write(tmp_path / "log.jsonl", rows), skip_bad=True)


def test_null_delay_is_none(tmp_path, planned):
    lines = [{**line, "delay": None, "session_id": None} for line in LINES]
    assert planned(write(tmp_path / "trace.jsonl", lines), 60) == hits_of(PROMPTS, BLOCK, 60)


HEADER = "timestamp,conversation,turn,prompt_tokens,completion_tokens"


@pytest.mark.parametrize("shared", [0, 40])
def test_counted_conversations_give_all_hits(tmp_path, planned, made, shared):
    rows = [ROWS[i] for i in ORDERS["shuffled"]]
    text = [f"{time},c{chat},{turn},{len(tokens)},{answer}" for time, chat, turn, tokens, answer in rows]
    log = tmp_path / "counts.csv"
    log.write_text("\n".join([HEADER, *text]))
    # Only the system prompt is shared, and only if its length is known.
    prompts = [[token if shared else (chat, *token) for token in tokens] for _, chat, _, tokens, _ in ROWS]
    assert planned(made(log, shared_tokens=shared), 60) == hits_of(prompts, BLOCK, 60)


def test_counts_of_new_tokens_are_refused(tmp_path, made):
    rows = [{"time": i, "conversation_id": "a", "input_tokens": n} for i, n in enumerate((500, 80, 90))]
    with pytest.raises(TraceError, match="conversation 'a': a later prompt has 80 tokens, an earlier one 500"):
        made(write(tmp_path / "log.jsonl", rows), skip_bad=True)


def spoken(chat, turn):
    """Return the messages of a chat up to a turn's question, then its answer."""
    messages = [{"role": "system", "content": "you are a helpful assistant " * 8}]
    for i in range(turn + 1):
        messages.append({"role": "user", "content": f"q{chat}{i} " * (11 + i)})
        messages.append({"role": "assistant", "content": f"a{chat}{i} " * 17})
    return messages


@pytest.mark.parametrize("name", ["messages", "input", "conversations"])
def test_whole_conversations_become_requests(tmp_path, run, planned, made, name):
    prompts = [words(spoken(chat, turn)[:-1]) for chat in range(9) for turn in range(4)]
    records = [{name: spoken(chat, 3), "timestamp": chat} for chat in range(9)]
    if name == "conversations":
        roles = {"user": "human", "assistant": "gpt", "system": "system"}
        records = [
            {"id": i, name: [{"from": roles[one["role"]], "value": one["content"]} for one in record[name]]}
            for i, record in enumerate(records)
        ]
    path = made(write(tmp_path / "log.jsonl", records))
    assert (made.facts.requests, made.expanded) == (36, 9)
    assert planned(path) == hits_of(prompts, BLOCK)


def test_answered_requests_are_not_expanded(tmp_path, planned, made):
    answered = [spoken(chat, turn) for chat in range(5) for turn in range(4)]
    path = made(write(tmp_path / "log.jsonl", [{"messages": messages} for messages in answered]))
    assert made.facts.requests == 20
    assert planned(path) == hits_of([words(messages[:-1]) for messages in answered], BLOCK)


LENGTHS = "lengths alone, which do not say what hits"
MAKE = "kvcache trace make FILE OUT"
FOREIGN = {
    "azure.csv": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n", LENGTHS),
    "burst.csv": ("Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,GPT,472,18,490\n", LENGTHS),
    "burst2.csv": ("Timestamp,Session ID,Elapsed time,Model,Request tokens\n5,7,3,GPT,472\n", LENGTHS),
    "spend.csv": ("request_id,startTime,prompt_tokens,completion_tokens,session_id,messages\nr,5,9,1,s,{}\n", LENGTHS),
    "spend.jsonl": ('{"request_id": "r", "prompt_tokens": 9, "session_id": "s", "messages": {}}\n', LENGTHS),
    "mooncake.jsonl": ('{"timestamp": 5, "input_length": 9, "output_length": 3}\n', LENGTHS),
    "bench.json": ('{"date": "x", "input_lens": [5, 6], "output_lens": [1, 1]}\n', LENGTHS),
    "list.json": ('[\n  {"timestamp": 0, "hash_ids": [1]}\n]\n', "jq -c '.[]' FILE"),
    "one_line.json": ('[{"timestamp": 0, "hash_ids": [1]}]\n', "jq -c '.[]' FILE"),
    "pretty.json": ('{\n  "timestamp": 0,\n  "hash_ids": [1]\n}\n', "jq -c . FILE"),
    "aibrix.jsonl": ('{"timestamp": 0, "requests": [{"prompt": "hi", "prompt_length": 1}]}\n', "an AIBrix workload"),
    "sglang.log": ('{"timestamp": "x", "event": "request.finished", "rid": "r", "obj": {"text": "hi"}}\n', "of SGLang"),
    "prompts.jsonl": ('{"prompt": "hello", "output_tokens": 3}\n', f"a log of prompts: {MAKE}"),
    "share.jsonl": ('{"id": "1", "conversations": [{"from": "human", "value": "hi"}]}\n', f"a log of prompts: {MAKE}"),
    "langfuse.csv": ("id,timestamp,name,userId,input,output\n1,2,c,u,hi,x\n", f"a log of prompts: {MAKE}"),
    "trace.csv": ('timestamp,input_length,hash_ids\n0,16,"[1]"\n', "a trace, but not as JSONL"),
    "chats.parquet": ("PAR1\0\0", "Parquet: duckdb"),
    "other.csv": ("a,b\n1,2\n", "must have token ids or text under one of"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("skipped", [(), ("--skip-bad",)])
def test_plan_names_foreign_file(tmp_path, run, name, skipped):
    text, message = FOREIGN[name]
    (tmp_path / name).write_text(text)
    status, out, err = run("plan", tmp_path / name, *skipped)
    assert (status, out) == (2, "")
    assert message in err or (name == "spend.csv" and MAKE in err)


@pytest.mark.parametrize(
    "line", ["[2026-01-01 00:00:00] Finish: obj=Input(rid=1, text=2)", 'INFO request a: prompt: "hi", params: x']
)
def test_text_log_is_not_json(tmp_path, run, line):
    (tmp_path / "server.log").write_text(line + "\n")
    status, _, err = run("plan", tmp_path / "server.log")
    assert status == 2
    assert "not JSON" in err
    assert "jq" not in err
    assert "CSV" not in err


@pytest.mark.parametrize("name", [name for name, (_, text) in FOREIGN.items() if text == LENGTHS or "jq" in text])
def test_make_names_foreign_file(tmp_path, run, name):
    text, message = FOREIGN[name]
    (tmp_path / name).write_text(text)
    status, _, err = run("trace", "make", tmp_path / name, tmp_path / "out.jsonl")
    assert status != 0
    assert message in err


def test_lines_without_times_are_read(tmp_path, planned):
    lines = [{name: line[name] for name in ("input_length", "hash_ids", "block_size")} for line in LINES]
    assert planned(write(tmp_path / "trace.jsonl", lines), 60) == hits_of(PROMPTS, BLOCK, 60)


@pytest.mark.parametrize(
    ("factor", "options", "doubt"),
    [
        (1, (), None),
        (1e-3, ("--time-unit", "s"), None),
        (1e3, ("--time-unit", "us"), None),
        (1e-3, (), "all 100 requests come within"),
        (1e3, (), "s pass between most requests"),
        (1e12, (), "comes after the year 2100"),
        (1e-5, ("--model", "llama-3.1-8b", "--serving", "engines=1"), "1 engines are busy"),
    ],
)
def test_impossible_times_are_doubted(tmp_path, run_json, factor, options, doubt):
    lines = [{**line, "timestamp": line["timestamp"] * factor} for line in LINES]
    document = run_json("plan", write(tmp_path / "trace.jsonl", lines), "--quiet", "--jobs", 1, *options)
    if doubt is None:
        assert document["doubts"] == []
    else:
        assert any(doubt in line and "--time-unit" in line for line in document["doubts"])


@pytest.mark.parametrize(("factor", "doubt"), [(1, None), (1e3, "engines are busy"), (1e-3, "engines are busy")])
def test_wrong_unit_is_doubted_once(tmp_path, run_json, factor, doubt):
    # A request of 1,000 tokens every 40 ms keeps one engine of an 8B model busy.
    lines = [{"timestamp": 40 * i * factor, "input_length": 1024, "hash_ids": [2 * i, 2 * i + 1]} for i in range(1200)]
    options = ("--model", "llama-3.1-8b", "--serving", "engines=2", "--quiet", "--jobs", 1)
    doubts = run_json("plan", write(tmp_path / "trace.jsonl", lines), *options)["doubts"]
    assert len(doubts) == (doubt is not None)
    assert all(doubt in line and "--time-unit" in line for line in doubts)


def test_sessions_are_read_packed_and_piped(tmp_path, planned, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    requests = [{"t": 9.0 * i, "in": 64 * (3 + i), "out": 5, "hash_ids": list(range(3 + i))} for i in range(4)]
    text = json.dumps({"id": "s", "block_size": 64, "requests": requests}).encode() + b"\n"
    plain, packed = tmp_path / "s.jsonl", tmp_path / "s.jsonl.zst"
    plain.write_bytes(text)
    packed.write_bytes(zstandard.compress(text))
    assert planned(plain, 40) == planned(packed, 40) == 3 + 4 + 5
    monkeypatch.setattr("os.dup", lambda descriptor: os.open(packed, os.O_RDONLY))
    assert planned("-", 40) == 3 + 4 + 5
